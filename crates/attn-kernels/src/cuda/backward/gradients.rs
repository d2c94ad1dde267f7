//! The engine's backward: checks, then the launches of a prepared plan.

use std::sync::Arc;

use attn_core::Plan;
use cudarc::driver::CudaStream;

use super::config::Main;
use super::{ForwardResults, Gradients, Site, check_alignment, config, launch};
use crate::cuda::call::{Inputs, check_memory};
use crate::cuda::capture::Captures;
use crate::cuda::engine::{BACKWARD, CudaEngine, with_shape};
use crate::cuda::workspace::{Work, Workspace};
use crate::error::Error;
use crate::launch::check_context;

impl CudaEngine {
    /// Runs a backward plan in stream order, on the results of a forward of the same problem. Padding rows of the
    /// gradients are written too, as 0.
    ///
    /// Under [`attn_core::Options::deterministic`] equal calls give equal bits; else dQ, and the gradient of a bias, are
    /// summed in whatever order blocks come. Launches overlap with their neighbours in the stream as those of
    /// [`CudaEngine::forward`] do.
    ///
    /// # Errors
    /// As [`CudaEngine::forward`], for results and gradients too.
    pub fn backward(
        &self,
        plan: &Plan,
        inputs: &Inputs<'_>,
        results: &ForwardResults<'_>,
        gradients: &mut Gradients<'_>,
        workspace: &mut Workspace,
        stream: &Arc<CudaStream>,
    ) -> Result<(), Error> {
        let problem = &plan.problem;
        check_context(self.context(), stream.context())?;
        inputs.layout().check(problem)?;
        results.layout().check(problem)?;
        gradients.layout().check(problem, inputs.bias.as_ref().map(|bias| bias.layout()))?;
        let memory = || inputs.memory().chain(results.memory()).chain(gradients.memory());
        check_memory(self.context(), memory())?;
        if config::main(plan)?.main == Main::Tiled {
            check_alignment(inputs, results, gradients)?;
        }
        let at = self.prepared(plan, workspace, stream)?;
        let ready = workspace.ready(at);
        let Work::Backward(launches) = &ready.prepared.work else {
            return Err(Error::Plan { expected: BACKWARD, got: plan.kernel.to_owned() });
        };
        let own = [Some(&ready.prepared.lengths), ready.partials];
        let own = own.into_iter().flatten();
        Captures::shared().hold(launches.functions(), own, memory());
        let site = Site {
            tables: ready.prepared.lengths.address(),
            space: ready.partials.map_or(0, |partials| partials.address()),
            maps: ready.maps,
        };
        launch(launches, problem, inputs, results, gradients, site, stream)
            .map_err(|error| with_shape(error, problem))
    }
}
