//! Host tensors of a call on a CUDA device: whole storages go up, views keep their strides and offsets, and outputs come
//! back with what lay between their elements.
//!
//! The invariant: the device sees the very storage that the host has, poison and gaps included, so that a read or a
//! write outside a view shows exactly as it does on the host. Copying the elements of a view into a tidy
//! buffer would hide such faults, and would never run a stride.

use std::sync::Arc;

use attn_core::{
    DType, Engine, ForwardResults, Gradients, Inputs, KernelDesc, KvView, LayoutId, Outputs, Plan,
    Strided, TensorView, TensorViewMut, View, ViewMut, dispatch_view, dispatch_view_mut,
};
use attn_kernels::Error;
use attn_kernels::cuda::{
    self, CudaEngine, CudaStream, DeviceBuffer, DeviceTensor, DeviceTensorMut, DeviceView,
    DeviceViewMut, Workspace,
};
use bytemuck::Pod;

/// What a poisoned workspace holds: every f32 of it is NaN.
const POISON: u8 = 0xFF;

/// The first CUDA device, its engine and one stream.
#[derive(Debug)]
pub(crate) struct Gpu {
    pub(crate) engine: Arc<CudaEngine>,
    pub(crate) stream: Arc<CudaStream>,
}

impl Gpu {
    /// # Errors
    /// No driver, or no device, with what was tried.
    pub(crate) fn open() -> Result<Self, Error> {
        let engine = Arc::new(CudaEngine::new(0)?);
        let stream = engine.new_stream()?;
        Ok(Self { engine, stream })
    }

    /// The kernels for it.
    pub(crate) fn catalogue() -> &'static [KernelDesc] {
        attn_kernels::catalog_of(Engine::Cuda)
    }

    /// Runs a plan on tensors that are on the device, outputs going there and back, from a workspace full of
    /// NaN.
    ///
    /// # Errors
    /// What the engine refuses, and what fails on the device.
    pub(crate) fn forward(
        &self,
        plan: &Plan,
        inputs: &DeviceInputs,
        outputs: &mut Outputs<'_>,
        workspace: &mut Workspace,
    ) -> Result<(), Error> {
        let mut on_device = DeviceOutputs::upload(&self.stream, outputs)?;
        let inputs = inputs.inputs()?;
        self.engine.prepare(plan, workspace, &self.stream)?;
        workspace.fill(&self.stream, POISON)?;
        let outputs_there = &mut on_device.outputs()?;
        self.engine.forward(plan, &inputs, outputs_there, workspace, &self.stream)?;
        on_device.download(&self.stream, outputs)
    }

    /// Runs a backward plan, the results and the gradients going there and the gradients back, from a workspace full of
    /// NaN.
    ///
    /// # Errors
    /// As [`Gpu::forward`].
    pub(crate) fn backward(
        &self,
        plan: &Plan,
        inputs: &DeviceInputs,
        results: &ForwardResults<'_>,
        gradients: &mut Gradients<'_>,
        workspace: &mut Workspace,
    ) -> Result<(), Error> {
        let results = DeviceResults::upload(&self.stream, results)?;
        let mut on_device = DeviceGradients::upload(&self.stream, gradients)?;
        let (inputs, results) = (inputs.inputs()?, results.results()?);
        self.engine.prepare(plan, workspace, &self.stream)?;
        workspace.fill(&self.stream, POISON)?;
        let there = &mut on_device.gradients()?;
        self.engine.backward(plan, &inputs, &results, there, workspace, &self.stream)?;
        on_device.download(&self.stream, gradients)
    }
}

/// A tensor in one of the buffers of a call.
#[derive(Debug, Clone)]
struct Placed {
    field: &'static str,
    buffer: usize,
    dtype: DType,
    layout: Strided,
}

/// The inputs of a call, on the device.
#[derive(Debug)]
pub(crate) struct DeviceInputs {
    buffers: Vec<DeviceBuffer>,
    q: Placed,
    k: Placed,
    v: Placed,
    table: Option<(Placed, LayoutId)>,
    mask: Option<Placed>,
    block_mask: Option<Placed>,
    bias: Option<Placed>,
    alibi: Option<Placed>,
    sinks: Option<Placed>,
    q_scale: Option<Placed>,
    k_scale: Option<Placed>,
    v_scale: Option<Placed>,
    dropout: Option<Placed>,
}

/// Storages that were uploaded, by where they are on the host: two views of one storage share a buffer.
struct Uploads<'s> {
    stream: &'s CudaStream,
    buffers: Vec<DeviceBuffer>,
    known: Vec<(*const u8, usize)>,
}

impl Uploads<'_> {
    fn tensor(&mut self, field: &'static str, tensor: &TensorView<'_>) -> Result<Placed, Error> {
        dispatch_view!(tensor, view => self.view(field, tensor.dtype(), view))
    }

    /// `dtype` is of use to tensors alone; masks and tables have a type of their own.
    fn view<T: Pod>(
        &mut self,
        field: &'static str,
        dtype: DType,
        view: &View<'_, T>,
    ) -> Result<Placed, Error> {
        let bytes: &[u8] = bytemuck::cast_slice(view.data());
        let key = (bytes.as_ptr(), bytes.len());
        let buffer = match self.known.iter().position(|known| *known == key) {
            Some(at) => at,
            None => {
                self.buffers.push(DeviceBuffer::from_host(self.stream, bytes)?);
                self.known.push(key);
                self.known.len() - 1
            }
        };
        Ok(Placed { field, buffer, dtype, layout: view.layout().clone() })
    }

    fn optional<T: Pod>(
        &mut self,
        field: &'static str,
        view: Option<&View<'_, T>>,
    ) -> Result<Option<Placed>, Error> {
        view.map(|view| self.view(field, DType::F32, view)).transpose()
    }
}

impl DeviceInputs {
    /// Copies every storage that the call reads.
    ///
    /// # Errors
    /// Device memory that is too small, or a driver that fails.
    pub(crate) fn upload(stream: &CudaStream, inputs: &Inputs<'_>) -> Result<Self, Error> {
        let mut up = Uploads { stream, buffers: Vec::new(), known: Vec::new() };
        let q = up.tensor("q", &inputs.q)?;
        let (k, v, table) = match &inputs.kv {
            KvView::Dense { k, v } => (up.tensor("k", k)?, up.tensor("v", v)?, None),
            KvView::Paged { k_cache, v_cache, block_table, stamp } => {
                let (k, v) = (up.tensor("k_cache", k_cache)?, up.tensor("v_cache", v_cache)?);
                let table = up.view("block_table", DType::F32, block_table)?;
                (k, v, Some((table, stamp.clone())))
            }
        };
        Ok(Self {
            q,
            k,
            v,
            table,
            mask: up.optional("mask", inputs.mask.as_ref())?,
            block_mask: up.optional("block_mask", inputs.block_mask.as_ref())?,
            bias: up.optional("bias", inputs.bias.as_ref())?,
            alibi: up.optional("alibi", inputs.alibi.as_ref())?,
            sinks: up.optional("sinks", inputs.sinks.as_ref())?,
            q_scale: up.optional("q_scale", inputs.q_scale.as_ref())?,
            k_scale: up.optional("k_scale", inputs.k_scale.as_ref())?,
            v_scale: up.optional("v_scale", inputs.v_scale.as_ref())?,
            dropout: up.optional("dropout", inputs.dropout.as_ref())?,
            buffers: up.buffers,
        })
    }

    /// The call's inputs as the engine takes them.
    ///
    /// # Errors
    /// None for views that were valid on the host.
    pub(crate) fn inputs(&self) -> Result<cuda::Inputs<'_>, Error> {
        let kv = match &self.table {
            None => cuda::KvTensors::Dense { k: self.tensor(&self.k)?, v: self.tensor(&self.v)? },
            Some((table, stamp)) => cuda::KvTensors::Paged {
                k_cache: self.tensor(&self.k)?,
                v_cache: self.tensor(&self.v)?,
                block_table: self.view(table)?,
                stamp: stamp.clone(),
            },
        };
        let mut inputs = cuda::Inputs::new(self.tensor(&self.q)?, kv);
        inputs.mask = self.optional(self.mask.as_ref())?;
        inputs.block_mask = self.optional(self.block_mask.as_ref())?;
        inputs.bias = self.optional(self.bias.as_ref())?;
        inputs.alibi = self.optional(self.alibi.as_ref())?;
        inputs.sinks = self.optional(self.sinks.as_ref())?;
        inputs.q_scale = self.optional(self.q_scale.as_ref())?;
        inputs.k_scale = self.optional(self.k_scale.as_ref())?;
        inputs.v_scale = self.optional(self.v_scale.as_ref())?;
        inputs.dropout = self.optional(self.dropout.as_ref())?;
        Ok(inputs)
    }

    fn tensor(&self, at: &Placed) -> Result<DeviceTensor<'_>, Error> {
        DeviceTensor::new(at.field, &self.buffers[at.buffer], at.dtype, at.layout.clone())
    }

    fn view<T: Pod>(&self, at: &Placed) -> Result<DeviceView<'_, T>, Error> {
        DeviceView::new(at.field, &self.buffers[at.buffer], at.layout.clone())
    }

    fn optional<T: Pod>(&self, at: Option<&Placed>) -> Result<Option<DeviceView<'_, T>>, Error> {
        at.map(|at| self.view(at)).transpose()
    }
}

/// An output with the storage that it had on the host.
#[derive(Debug)]
pub(crate) struct DeviceOutput {
    field: &'static str,
    buffer: DeviceBuffer,
    dtype: DType,
    layout: Strided,
}

impl DeviceOutput {
    /// # Errors
    /// As [`DeviceInputs::upload`].
    pub(crate) fn upload(
        stream: &CudaStream,
        field: &'static str,
        tensor: &TensorViewMut<'_>,
    ) -> Result<Self, Error> {
        dispatch_view_mut!(tensor, view => Self::upload_as(stream, field, tensor.dtype(), view))
    }

    /// # Errors
    /// As [`DeviceInputs::upload`].
    pub(crate) fn upload_f32(
        stream: &CudaStream,
        field: &'static str,
        view: &ViewMut<'_, f32>,
    ) -> Result<Self, Error> {
        Self::upload_as(stream, field, DType::F32, view)
    }

    fn upload_as<T: Pod>(
        stream: &CudaStream,
        field: &'static str,
        dtype: DType,
        view: &ViewMut<'_, T>,
    ) -> Result<Self, Error> {
        let buffer = DeviceBuffer::from_host(stream, view.as_view().data())?;
        Ok(Self { field, buffer, dtype, layout: view.layout().clone() })
    }

    /// The output as the engine takes it.
    ///
    /// # Errors
    /// None for views that were valid on the host.
    pub(crate) fn tensor_mut(&mut self) -> Result<DeviceTensorMut<'_>, Error> {
        DeviceTensorMut::new(self.field, &mut self.buffer, self.dtype, self.layout.clone())
    }

    /// The same for an output that is f32 by definition.
    ///
    /// # Errors
    /// None for views that were valid on the host.
    pub(crate) fn view_mut(&mut self) -> Result<DeviceViewMut<'_, f32>, Error> {
        DeviceViewMut::new(self.field, &mut self.buffer, self.layout.clone())
    }

    /// The storage as the device left it, once the stream is done.
    ///
    /// # Errors
    /// A failed copy, or a failed kernel before it.
    pub(crate) fn storage<T: Pod>(&self, stream: &CudaStream) -> Result<Vec<T>, Error> {
        self.buffer.to_host(stream, self.buffer.bytes() / size_of::<T>())
    }

    /// Copies the whole storage back, gaps included.
    ///
    /// # Errors
    /// As [`DeviceOutput::storage`].
    pub(crate) fn download(
        &self,
        stream: &CudaStream,
        tensor: &mut TensorViewMut<'_>,
    ) -> Result<(), Error> {
        dispatch_view_mut!(tensor, view => self.download_as(stream, view))
    }

    /// # Errors
    /// As [`DeviceOutput::storage`].
    pub(crate) fn download_as<T: Pod>(
        &self,
        stream: &CudaStream,
        view: &mut ViewMut<'_, T>,
    ) -> Result<(), Error> {
        view.data_mut().copy_from_slice(&self.storage(stream)?);
        Ok(())
    }
}

/// The outputs of a forward, on the device.
#[derive(Debug)]
pub(crate) struct DeviceOutputs {
    pub(crate) o: DeviceOutput,
    pub(crate) lse: Option<DeviceOutput>,
}

impl DeviceOutputs {
    /// Copies what the outputs hold: poison, and what may not be touched.
    ///
    /// # Errors
    /// As [`DeviceInputs::upload`].
    pub(crate) fn upload(stream: &CudaStream, outputs: &Outputs<'_>) -> Result<Self, Error> {
        let lse = outputs.lse.as_ref().map(|lse| DeviceOutput::upload_f32(stream, "lse", lse));
        Ok(Self { o: DeviceOutput::upload(stream, "o", &outputs.o)?, lse: lse.transpose()? })
    }

    /// The outputs as the engine takes them.
    ///
    /// # Errors
    /// None for views that were valid on the host.
    pub(crate) fn outputs(&mut self) -> Result<cuda::Outputs<'_>, Error> {
        let lse = self.lse.as_mut().map(DeviceOutput::view_mut).transpose()?;
        Ok(cuda::Outputs { o: self.o.tensor_mut()?, lse })
    }

    /// # Errors
    /// As [`DeviceOutput::storage`].
    pub(crate) fn download(
        &self,
        stream: &CudaStream,
        outputs: &mut Outputs<'_>,
    ) -> Result<(), Error> {
        self.o.download(stream, &mut outputs.o)?;
        if let (Some(here), Some(there)) = (&self.lse, &mut outputs.lse) {
            here.download_as(stream, there)?;
        }
        Ok(())
    }
}

/// What a backward reads beside its inputs, on the device.
#[derive(Debug)]
struct DeviceResults {
    buffers: Vec<DeviceBuffer>,
    o: Placed,
    lse: Placed,
    d_o: Placed,
}

impl DeviceResults {
    fn upload(stream: &CudaStream, results: &ForwardResults<'_>) -> Result<Self, Error> {
        let mut up = Uploads { stream, buffers: Vec::new(), known: Vec::new() };
        let (o, d_o) = (up.tensor("o", &results.o)?, up.tensor("do", &results.d_o)?);
        let lse = up.view("lse", DType::F32, &results.lse)?;
        Ok(Self { buffers: up.buffers, o, lse, d_o })
    }

    fn results(&self) -> Result<cuda::ForwardResults<'_>, Error> {
        let tensor = |at: &Placed| {
            DeviceTensor::new(at.field, &self.buffers[at.buffer], at.dtype, at.layout.clone())
        };
        let Self { buffers, o, lse, d_o } = self;
        let lse = DeviceView::new(lse.field, &buffers[lse.buffer], lse.layout.clone())?;
        Ok(cuda::ForwardResults { o: tensor(o)?, lse, d_o: tensor(d_o)? })
    }
}

/// The gradients of a backward, on the device.
#[derive(Debug)]
struct DeviceGradients {
    dq: DeviceOutput,
    dk: DeviceOutput,
    dv: DeviceOutput,
    dsinks: Option<DeviceOutput>,
    dbias: Option<DeviceOutput>,
}

impl DeviceGradients {
    /// Copies what the gradients hold: poison, and what may not be touched.
    fn upload(stream: &CudaStream, gradients: &Gradients<'_>) -> Result<Self, Error> {
        let tensor = |field, tensor| DeviceOutput::upload(stream, field, tensor);
        let view = |field, view: &Option<ViewMut<'_, f32>>| {
            view.as_ref().map(|view| DeviceOutput::upload_f32(stream, field, view)).transpose()
        };
        Ok(Self {
            dq: tensor("dq", &gradients.dq)?,
            dk: tensor("dk", &gradients.dk)?,
            dv: tensor("dv", &gradients.dv)?,
            dsinks: view("dsinks", &gradients.dsinks)?,
            dbias: view("dbias", &gradients.dbias)?,
        })
    }

    fn gradients(&mut self) -> Result<cuda::Gradients<'_>, Error> {
        Ok(cuda::Gradients {
            dq: self.dq.tensor_mut()?,
            dk: self.dk.tensor_mut()?,
            dv: self.dv.tensor_mut()?,
            dsinks: self.dsinks.as_mut().map(DeviceOutput::view_mut).transpose()?,
            dbias: self.dbias.as_mut().map(DeviceOutput::view_mut).transpose()?,
        })
    }

    fn download(&self, stream: &CudaStream, gradients: &mut Gradients<'_>) -> Result<(), Error> {
        self.dq.download(stream, &mut gradients.dq)?;
        self.dk.download(stream, &mut gradients.dk)?;
        self.dv.download(stream, &mut gradients.dv)?;
        for (here, there) in
            [(&self.dsinks, &mut gradients.dsinks), (&self.dbias, &mut gradients.dbias)]
        {
            if let (Some(here), Some(there)) = (here, there) {
                here.download_as(stream, there)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use attn_core::{Bytes, CudaCaps, DeviceCaps, HostCaps};

    /// A Hopper, for plans that need no device.
    pub(crate) fn hopper() -> DeviceCaps {
        let cuda = CudaCaps {
            name: "a Hopper".to_owned(),
            compute: (9, 0),
            sm_count: 132,
            smem_per_block: Bytes(227 << 10),
            memory: Bytes(141 << 30),
        };
        DeviceCaps { host: HostCaps::default(), cuda: Some(cuda) }
    }
}
