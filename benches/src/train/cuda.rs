//! Attention by the CUDA engine, in bf16, inside a layer whose other parts are on the host.
//!
//! The invariant: plans and buffers are made once and serve every step, and seed and offset of the dropout are data on the device. Each
//! pass rounds what it is given, copies it there and its results back, for the layer is the host's; so a time of the layer
//! is not one of the kernels. From the forward to the backward the LSE alone stays.

use attn_core::{Plan, Problem};
use attn_kernels::Error;
use attn_kernels::cuda::{
    self, DeviceBuffer, DeviceTensor, DeviceTensorMut, DeviceView, DeviceViewMut, Workspace,
};
use half::bf16;

use super::TrainError;
use super::attention::{Attention, Data, DataGradients, Memory, Shape, narrow, rows_shape};
use super::engine::plans;
use crate::device::Gpu;

/// The CUDA engine as a layer's attention.
#[derive(Debug)]
pub(super) struct OnDevice<'g> {
    gpu: &'g Gpu,
    forward: Plan,
    backward: Plan,
    operands: Operands,
    o: DeviceBuffer,
    lse: DeviceBuffer,
    d_o: DeviceBuffer,
    dq: DeviceBuffer,
    dk: DeviceBuffer,
    dv: DeviceBuffer,
    workspace: Workspace,
}

/// What both passes read.
#[derive(Debug)]
struct Operands {
    q: DeviceBuffer,
    k: DeviceBuffer,
    v: DeviceBuffer,
    slopes: DeviceBuffer,
    stream: DeviceBuffer,
}

impl<'g> OnDevice<'g> {
    /// Plans both passes, and makes room for their tensors.
    pub(super) fn new(gpu: &'g Gpu, shape: &Shape) -> Result<Self, TrainError> {
        let [forward, backward] = plans(shape, &gpu.engine.caps(), Gpu::catalogue())?;
        let queries = shape.tokens() * shape.width() * size_of::<bf16>();
        let keys = shape.tokens() * shape.kv_width() * size_of::<bf16>();
        let alloc = |bytes| gpu.engine.alloc(bytes);
        let operands = Operands {
            q: alloc(queries)?,
            k: alloc(keys)?,
            v: alloc(keys)?,
            slopes: alloc(shape.heads * size_of::<f32>())?,
            stream: alloc(2 * size_of::<u64>())?,
        };
        Ok(Self {
            gpu,
            forward,
            backward,
            operands,
            o: alloc(queries)?,
            lse: alloc(shape.tokens() * shape.heads * size_of::<f32>())?,
            d_o: alloc(queries)?,
            dq: alloc(queries)?,
            dk: alloc(keys)?,
            dv: alloc(keys)?,
            workspace: Workspace::new(),
        })
    }
}

impl Operands {
    fn upload(&mut self, gpu: &Gpu, data: &Data<'_>) -> Result<(), Error> {
        let stream = &gpu.stream;
        self.q.copy_from_host(stream, &narrow(data.q))?;
        self.k.copy_from_host(stream, &narrow(data.k))?;
        self.v.copy_from_host(stream, &narrow(data.v))?;
        self.slopes.copy_from_host(stream, data.slopes)?;
        self.stream.copy_from_host(stream, data.stream)
    }

    fn inputs(&self, problem: &Problem) -> Result<cuda::Inputs<'_>, Error> {
        let (heads, kv_heads) = (problem.q_heads(), problem.kv_heads());
        let mut inputs = cuda::Inputs::dense(
            tensor("q", &self.q, heads, problem)?,
            tensor("k", &self.k, kv_heads, problem)?,
            tensor("v", &self.v, kv_heads, problem)?,
        );
        inputs.alibi = Some(DeviceView::contiguous("alibi", &self.slopes, &[heads])?);
        if problem.dropout().is_some() {
            inputs.dropout = Some(DeviceView::contiguous("dropout", &self.stream, &[2])?);
        }
        Ok(inputs)
    }

    const fn buffers(&self) -> [&DeviceBuffer; 5] {
        [&self.q, &self.k, &self.v, &self.slopes, &self.stream]
    }
}

fn tensor<'b>(
    field: &'static str,
    buffer: &'b DeviceBuffer,
    heads: usize,
    problem: &Problem,
) -> Result<DeviceTensor<'b>, Error> {
    DeviceTensor::contiguous(field, buffer, problem.q_dtype(), &rows_shape(heads, problem))
}

fn tensor_mut<'b>(
    field: &'static str,
    buffer: &'b mut DeviceBuffer,
    heads: usize,
    problem: &Problem,
) -> Result<DeviceTensorMut<'b>, Error> {
    DeviceTensorMut::contiguous(field, buffer, problem.q_dtype(), &rows_shape(heads, problem))
}

/// Copies a tensor back once the stream has written it.
fn download(gpu: &Gpu, from: &DeviceBuffer, to: &mut [f32]) -> Result<(), Error> {
    let values: Vec<bf16> = from.to_host(&gpu.stream, to.len())?;
    for (to, from) in to.iter_mut().zip(values) {
        *to = from.to_f32();
    }
    Ok(())
}

impl Attention for OnDevice<'_> {
    fn name(&self) -> &'static str {
        "fused"
    }

    fn engine(&self) -> &'static str {
        "cuda"
    }

    fn plans(&self) -> Vec<&Plan> {
        vec![&self.forward, &self.backward]
    }

    fn forward(&mut self, data: &Data<'_>, o: &mut [f32]) -> Result<(), TrainError> {
        let Self { gpu, forward: plan, operands, workspace, .. } = self;
        let problem = &plan.problem;
        let heads = problem.q_heads();
        operands.upload(gpu, data)?;
        let inputs = operands.inputs(problem)?;
        let lse = &rows_shape(heads, problem)[..2];
        let mut outputs = cuda::Outputs {
            o: tensor_mut("o", &mut self.o, heads, problem)?,
            lse: Some(DeviceViewMut::contiguous("lse", &mut self.lse, lse)?),
        };
        gpu.engine.forward(plan, &inputs, &mut outputs, workspace, &gpu.stream)?;
        Ok(download(gpu, &self.o, o)?)
    }

    fn backward(
        &mut self,
        data: &Data<'_>,
        o: &[f32],
        d_o: &[f32],
        gradients: DataGradients<'_>,
    ) -> Result<(), TrainError> {
        let Self { gpu, backward: plan, operands, workspace, .. } = self;
        let problem = &plan.problem;
        let (heads, kv_heads) = (problem.q_heads(), problem.kv_heads());
        operands.upload(gpu, data)?;
        self.o.copy_from_host(&gpu.stream, &narrow(o))?;
        self.d_o.copy_from_host(&gpu.stream, &narrow(d_o))?;
        let inputs = operands.inputs(problem)?;
        let lse = &rows_shape(heads, problem)[..2];
        let results = cuda::ForwardResults {
            o: tensor("o", &self.o, heads, problem)?,
            lse: DeviceView::contiguous("lse", &self.lse, lse)?,
            d_o: tensor("do", &self.d_o, heads, problem)?,
        };
        let mut there = cuda::Gradients {
            dq: tensor_mut("dq", &mut self.dq, heads, problem)?,
            dk: tensor_mut("dk", &mut self.dk, kv_heads, problem)?,
            dv: tensor_mut("dv", &mut self.dv, kv_heads, problem)?,
            dsinks: None,
            dbias: None,
        };
        gpu.engine.backward(plan, &inputs, &results, &mut there, workspace, &gpu.stream)?;
        download(gpu, &self.dq, gradients.dq)?;
        download(gpu, &self.dk, gradients.dk)?;
        Ok(download(gpu, &self.dv, gradients.dv)?)
    }

    fn memory(&self) -> Memory {
        let own = [&self.o, &self.d_o, &self.dq, &self.dk, &self.dv];
        let copies = own.into_iter().chain(self.operands.buffers());
        let copies: u64 = copies.map(|buffer| buffer.bytes() as u64).sum();
        Memory { kept: self.lse.bytes() as u64, scratch: copies + self.workspace.bytes() }
    }
}
