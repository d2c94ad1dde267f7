//! Host calls on the device: the same storage, byte for byte, under the same layouts.

use std::sync::Arc;

use attn_core::{
    DType, Element, Inputs, KvView, LayoutId, Strided, TensorView, TensorViewMut, View, ViewMut,
    dispatch_view, dispatch_view_mut,
};
use attn_kernels::Error;
use attn_kernels::cuda::{
    self, CudaStream, DeviceBuffer, DeviceTensor, DeviceTensorMut, DeviceView, DeviceViewMut,
    KvTensors,
};
use bytemuck::Pod;

/// A tensor's storage on the device.
struct Tensor {
    buffer: DeviceBuffer,
    dtype: DType,
    layout: Strided,
}

impl Tensor {
    fn new(stream: &CudaStream, view: &TensorView<'_>) -> Result<Self, Error> {
        let buffer = dispatch_view!(view, v => DeviceBuffer::from_host(stream, v.data()))?;
        Ok(Self { buffer, dtype: view.dtype(), layout: view.layout().clone() })
    }

    fn tensor(&self) -> Result<DeviceTensor<'_>, Error> {
        DeviceTensor::new("tensor", &self.buffer, self.dtype, self.layout.clone())
    }
}

struct Typed {
    buffer: DeviceBuffer,
    layout: Strided,
}

impl Typed {
    fn new<T: Pod>(stream: &CudaStream, view: &View<'_, T>) -> Result<Self, Error> {
        let buffer = DeviceBuffer::from_host(stream, view.data())?;
        Ok(Self { buffer, layout: view.layout().clone() })
    }

    fn view<T: Pod>(&self) -> Result<DeviceView<'_, T>, Error> {
        DeviceView::new("view", &self.buffer, self.layout.clone())
    }
}

/// A call's inputs on the device.
pub(crate) struct Uploaded {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Option<(Typed, LayoutId)>,
    bytes: [Option<Typed>; 2],
    floats: [Option<Typed>; 6],
}

impl Uploaded {
    pub(crate) fn new(stream: &Arc<CudaStream>, inputs: &Inputs<'_>) -> Result<Self, Error> {
        let (k, v, table) = match &inputs.kv {
            KvView::Dense { k, v } => (k, v, None),
            KvView::Paged { k_cache, v_cache, block_table, stamp } => {
                let table = Typed::new(stream, block_table)?;
                (k_cache, v_cache, Some((table, stamp.clone())))
            }
        };
        let Inputs { mask, block_mask, bias, alibi, sinks, q_scale, k_scale, v_scale, .. } = inputs;
        let byte = |x: &Option<View<'_, u8>>| x.as_ref().map(|x| Typed::new(stream, x)).transpose();
        let float =
            |x: &Option<View<'_, f32>>| x.as_ref().map(|x| Typed::new(stream, x)).transpose();
        Ok(Self {
            q: Tensor::new(stream, &inputs.q)?,
            k: Tensor::new(stream, k)?,
            v: Tensor::new(stream, v)?,
            table,
            bytes: [byte(mask)?, byte(block_mask)?],
            floats: [
                float(bias)?,
                float(alibi)?,
                float(sinks)?,
                float(q_scale)?,
                float(k_scale)?,
                float(v_scale)?,
            ],
        })
    }

    pub(crate) fn inputs(&self) -> Result<cuda::Inputs<'_>, Error> {
        let (k, v) = (self.k.tensor()?, self.v.tensor()?);
        let kv = match &self.table {
            None => KvTensors::Dense { k, v },
            Some((table, stamp)) => KvTensors::Paged {
                k_cache: k,
                v_cache: v,
                block_table: table.view()?,
                stamp: stamp.clone(),
            },
        };
        fn some<T: Pod>(x: &Option<Typed>) -> Result<Option<DeviceView<'_, T>>, Error> {
            x.as_ref().map(Typed::view).transpose()
        }
        let [mask, block_mask] = &self.bytes;
        let [bias, alibi, sinks, q_scale, k_scale, v_scale] = &self.floats;
        Ok(cuda::Inputs {
            mask: some(mask)?,
            block_mask: some(block_mask)?,
            bias: some(bias)?,
            alibi: some(alibi)?,
            sinks: some(sinks)?,
            q_scale: some(q_scale)?,
            k_scale: some(k_scale)?,
            v_scale: some(v_scale)?,
            ..cuda::Inputs::new(self.q.tensor()?, kv)
        })
    }
}

/// Outputs on the device, filled as the host's are.
pub(crate) struct UploadedOutputs {
    o: Tensor,
    lse: Option<Typed>,
}

impl Tensor {
    /// A tensor that is to be written, filled as the host's is.
    fn written(stream: &CudaStream, view: &TensorViewMut<'_>) -> Result<Self, Error> {
        let buffer =
            dispatch_view_mut!(view, v => DeviceBuffer::from_host(stream, v.as_view().data()))?;
        Ok(Self { buffer, dtype: view.dtype(), layout: view.layout().clone() })
    }

    fn tensor_mut(&mut self) -> Result<DeviceTensorMut<'_>, Error> {
        DeviceTensorMut::new("tensor", &mut self.buffer, self.dtype, self.layout.clone())
    }

    fn download(&self, stream: &Arc<CudaStream>, to: &mut TensorViewMut<'_>) -> Result<(), Error> {
        match to {
            TensorViewMut::F32(to) => copy_back(stream, &self.buffer, to),
            TensorViewMut::F16(to) => copy_back(stream, &self.buffer, to),
            TensorViewMut::BF16(to) => copy_back(stream, &self.buffer, to),
        }
    }
}

impl Typed {
    fn view_mut(&mut self) -> Result<DeviceViewMut<'_, f32>, Error> {
        DeviceViewMut::new("view", &mut self.buffer, self.layout.clone())
    }
}

/// What a backward reads beside its inputs, on the device.
pub(crate) struct UploadedResults {
    o: Tensor,
    lse: Typed,
    d_o: Tensor,
}

impl UploadedResults {
    pub(crate) fn new(
        stream: &Arc<CudaStream>,
        results: &attn_core::ForwardResults<'_>,
    ) -> Result<Self, Error> {
        let (o, d_o) = (Tensor::new(stream, &results.o)?, Tensor::new(stream, &results.d_o)?);
        Ok(Self { o, lse: Typed::new(stream, &results.lse)?, d_o })
    }

    pub(crate) fn results(&self) -> Result<cuda::ForwardResults<'_>, Error> {
        let (o, lse, d_o) = (self.o.tensor()?, self.lse.view()?, self.d_o.tensor()?);
        Ok(cuda::ForwardResults { o, lse, d_o })
    }
}

/// Gradients on the device, filled as the host's are.
pub(crate) struct UploadedGradients {
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dsinks: Option<Typed>,
    dbias: Option<Typed>,
}

impl UploadedGradients {
    pub(crate) fn new(
        stream: &Arc<CudaStream>,
        gradients: &attn_core::Gradients<'_>,
    ) -> Result<Self, Error> {
        let view = |view: &Option<ViewMut<'_, f32>>| {
            view.as_ref().map(|view| Typed::new(stream, &view.as_view())).transpose()
        };
        Ok(Self {
            dq: Tensor::written(stream, &gradients.dq)?,
            dk: Tensor::written(stream, &gradients.dk)?,
            dv: Tensor::written(stream, &gradients.dv)?,
            dsinks: view(&gradients.dsinks)?,
            dbias: view(&gradients.dbias)?,
        })
    }

    pub(crate) fn gradients(&mut self) -> Result<cuda::Gradients<'_>, Error> {
        Ok(cuda::Gradients {
            dq: self.dq.tensor_mut()?,
            dk: self.dk.tensor_mut()?,
            dv: self.dv.tensor_mut()?,
            dsinks: self.dsinks.as_mut().map(Typed::view_mut).transpose()?,
            dbias: self.dbias.as_mut().map(Typed::view_mut).transpose()?,
        })
    }

    /// The bytes of all of them.
    pub(crate) fn bits(&self, stream: &Arc<CudaStream>) -> Result<Vec<u8>, Error> {
        let mut all = Vec::new();
        let views = [&self.dsinks, &self.dbias].into_iter().flatten().map(|view| &view.buffer);
        let tensors = [&self.dq, &self.dk, &self.dv].map(|tensor| &tensor.buffer);
        for buffer in tensors.into_iter().chain(views) {
            all.extend(buffer.to_host::<u8>(stream, buffer.bytes())?);
        }
        Ok(all)
    }

    /// Copies the gradients into the host's, and checks that nothing between them was written.
    pub(crate) fn download(
        &self,
        stream: &Arc<CudaStream>,
        gradients: &mut attn_core::Gradients<'_>,
    ) -> Result<(), Error> {
        self.dq.download(stream, &mut gradients.dq)?;
        self.dk.download(stream, &mut gradients.dk)?;
        self.dv.download(stream, &mut gradients.dv)?;
        for (own, to) in
            [(&self.dsinks, &mut gradients.dsinks), (&self.dbias, &mut gradients.dbias)]
        {
            if let (Some(own), Some(to)) = (own, to) {
                copy_back(stream, &own.buffer, to)?;
            }
        }
        Ok(())
    }
}

impl UploadedOutputs {
    pub(crate) fn new(
        stream: &Arc<CudaStream>,
        outputs: &attn_core::Outputs<'_>,
    ) -> Result<Self, Error> {
        let lse = outputs.lse.as_ref().map(|lse| Typed::new(stream, &lse.as_view())).transpose()?;
        Ok(Self { o: Tensor::written(stream, &outputs.o)?, lse })
    }

    pub(crate) fn outputs(&mut self) -> Result<cuda::Outputs<'_>, Error> {
        let lse = self.lse.as_mut().map(Typed::view_mut).transpose()?;
        Ok(cuda::Outputs { o: self.o.tensor_mut()?, lse })
    }

    /// Copies the results into the host's outputs, and checks that nothing between them was written.
    pub(crate) fn download(
        &self,
        stream: &Arc<CudaStream>,
        outputs: &mut attn_core::Outputs<'_>,
    ) -> Result<(), Error> {
        self.o.download(stream, &mut outputs.o)?;
        if let (Some(lse), Some(own)) = (&mut outputs.lse, &self.lse) {
            copy_back(stream, &own.buffer, lse)?;
        }
        Ok(())
    }
}

fn copy_back<T: Element>(
    stream: &CudaStream,
    buffer: &DeviceBuffer,
    to: &mut ViewMut<'_, T>,
) -> Result<(), Error> {
    let layout = to.layout().clone();
    let got: Vec<T> = buffer.to_host(stream, to.as_view().data().len())?;
    let view = View::new("device", &got, layout.clone())?;
    for_each_index(layout.shape(), |at| {
        let value = view.get(at).expect("inside the shape");
        assert!(to.set(at, value));
    });
    let now = to.as_view();
    let same = bytemuck::cast_slice::<T, u8>(now.data()) == bytemuck::cast_slice::<T, u8>(&got);
    assert!(same, "the device wrote between the elements of {layout:?}");
    Ok(())
}

fn for_each_index(shape: &[usize], mut f: impl FnMut(&[usize])) {
    let count: usize = shape.iter().product();
    let mut at = vec![0; shape.len()];
    for n in 0..count {
        let mut rest = n;
        for (i, &extent) in at.iter_mut().zip(shape).rev() {
            (*i, rest) = (rest % extent, rest / extent);
        }
        f(&at);
    }
}
