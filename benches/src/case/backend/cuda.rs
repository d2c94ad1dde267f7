//! A CUDA device as a backend: problem, `choose`, engine, as any caller composes them.
//!
//! The invariant: engine, stream, plans and workspace are kept from case to case, and the workspace is full of NaN before
//! each call, so that what one call leaves behind could only ever make the next one fail. Page ids and scales were
//! checked on the host, where the contract wants wrong ones found; the engine, which cannot see them, is not asked to.
//! A kernel that cannot load a view is followed by the next that selection takes, for plans know no strides.

use attn_core::{
    ForwardResults, Gradients, Inputs, Outputs, Plan, Problem, TensorView, TensorViewMut, View,
    ViewMut, dispatch_view,
};
use attn_kernels::cuda::{DeviceBuffer, DeviceTensor, DeviceView, Workspace};
use attn_select::PlanCache;

use super::super::failure::{Failure, Kind};
use super::{Backend, PLANS, Ran, State};
use crate::device::{DeviceInputs, DeviceOutput, Gpu};

pub(super) struct Cuda {
    gpu: Gpu,
    plans: PlanCache,
    workspace: Workspace,
}

impl Cuda {
    /// # Errors
    /// `device` when there is no driver or no device, with what was tried.
    pub(super) fn new() -> Result<Self, Failure> {
        let gpu = Gpu::open().map_err(|error| Failure::new(Kind::Device, error))?;
        let plans = PlanCache::new(gpu.engine.caps(), Gpu::catalogue(), PLANS);
        Ok(Self { gpu, plans, workspace: Workspace::new() })
    }

    /// Runs a problem by the first kernel that loads its views: a plan knows no strides, and what its kernel cannot load,
    /// the next one may.
    fn run(
        &mut self,
        problem: &Problem,
        mut run: impl FnMut(&Gpu, &Plan, &mut Workspace) -> Result<(), attn_kernels::Error>,
    ) -> Result<Ran, Failure> {
        let mut problem = problem.clone();
        let mut refused = None;
        loop {
            let plan = match (self.plans.choose(&problem), refused) {
                (Ok(plan), _) => plan,
                (Err(_), Some(layout)) => return Err(refusal(layout)),
                (Err(error), None) => return Err(error.into()),
            };
            match run(&self.gpu, &plan, &mut self.workspace) {
                Ok(()) => return Ok(Ran::of(&plan)),
                Err(error @ attn_kernels::Error::Call(attn_core::Error::Layout { .. })) => {
                    refused = Some(error);
                    problem = without(&problem, plan.kernel)?;
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn upload(&self, tensor: &TensorView<'_>) -> Result<DeviceBuffer, attn_kernels::Error> {
        dispatch_view!(tensor, view => DeviceBuffer::from_host(&self.gpu.stream, view.data()))
    }
}

/// What the engine says about data that was found to fit: a view that it does not take.
fn refusal(error: attn_kernels::Error) -> Failure {
    match error {
        attn_kernels::Error::Call(error @ attn_core::Error::Layout { .. }) => {
            Failure::new(Kind::Unsupported, error)
        }
        other => other.into(),
    }
}

/// The problem with one kernel fewer to choose from.
fn without(problem: &Problem, kernel: &str) -> Result<Problem, Failure> {
    let mut spec = problem.spec().clone();
    spec.options.disabled_kernels.push(kernel.to_owned());
    Ok(Problem::new(spec)?)
}

impl Backend for Cuda {
    fn forward(
        &mut self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        mut outputs: Outputs<'_>,
    ) -> Result<Ran, Failure> {
        let on_device = DeviceInputs::upload(&self.gpu.stream, inputs)?;
        self.run(problem, |gpu, plan, workspace| {
            gpu.forward(plan, &on_device, &mut outputs, workspace)
        })
    }

    fn backward(
        &mut self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        results: &ForwardResults<'_>,
        mut gradients: Gradients<'_>,
    ) -> Result<Ran, Failure> {
        let on_device = DeviceInputs::upload(&self.gpu.stream, inputs)?;
        self.run(problem, |gpu, plan, workspace| {
            gpu.backward(plan, &on_device, results, &mut gradients, workspace)
        })
    }

    fn merge(
        &mut self,
        a: State<'_, '_>,
        b: State<'_, '_>,
        o: &mut TensorViewMut<'_>,
        lse: &mut ViewMut<'_, f32>,
    ) -> Result<Ran, Failure> {
        let stream = &self.gpu.stream;
        let lse_up = |view: &View<'_, f32>| DeviceBuffer::from_host(stream, view.data());
        let (a_o, a_lse) = (self.upload(a.0)?, lse_up(a.1)?);
        let (b_o, b_lse) = (self.upload(b.0)?, lse_up(b.1)?);
        let state = |(o, lse): State<'_, '_>, o_there, lse_there| {
            let o = DeviceTensor::new("o", o_there, o.dtype(), o.layout().clone())?;
            let lse = DeviceView::new("lse", lse_there, lse.layout().clone())?;
            Ok::<_, attn_kernels::Error>((o, lse))
        };
        let (a_there, b_there) = (state(a, &a_o, &a_lse)?, state(b, &b_o, &b_lse)?);
        let mut o_there = DeviceOutput::upload(stream, "o", o)?;
        let mut lse_there = DeviceOutput::upload_f32(stream, "lse", lse)?;
        let (a_there, b_there) = ((&a_there.0, &a_there.1), (&b_there.0, &b_there.1));
        let to = (&mut o_there.tensor_mut()?, &mut lse_there.view_mut()?);
        self.gpu.engine.merge_states(a_there, b_there, to.0, to.1, stream).map_err(refusal)?;
        o_there.download(stream, o)?;
        lse_there.download_as(stream, lse)?;
        let plan = "two states, a row a warp, weighted by their share of the denominator";
        Ok(Ran { kernel: "cuda_merge_states".to_owned(), plan: plan.to_owned() })
    }
}
