//! Gradient kernels.
//!
//! The invariant: there is one family of them, so a forced phase, which names a kind of forward kernel,
//! rules none out.

use attn_core::{Bytes, Engine, KernelDesc, Refusal, Split};

use crate::candidate::{Call, Fit};
use crate::heuristics;

pub(crate) fn fit(call: &Call<'_>, kernel: &KernelDesc) -> Result<Fit, Refusal> {
    let (problem, host) = (call.problem, &call.caps.host);
    let reason = "recomputes scores tile by tile from the LSE instead of keeping them";
    match (kernel.engine, &call.caps.cuda) {
        (Engine::Cuda, Some(device)) => {
            let options = call.options();
            let reason = match options.deterministic || options.batch_invariant {
                true => "recomputes scores from the LSE, and adds up dQ in a fixed order, as asked",
                false => {
                    "recomputes scores from the LSE, and adds up dQ in whatever order blocks come"
                }
            };
            let (tile, shared_memory) = heuristics::device_tile(kernel, problem, device)?;
            Ok(Fit { tile, split: Split::Whole, shared_memory, reason })
        }
        _ => {
            let tile = heuristics::backward_tile(problem, host);
            let shared_memory = Bytes::ZERO;
            Ok(Fit { tile, split: Split::Whole, shared_memory, reason })
        }
    }
}
