//! Forward kernels that divide the work by query rows.
//!
//! The invariant: this family takes every shape. It is the last resort of the forward pass, so it never
//! steps aside for speed.

use attn_core::{Bytes, Engine, KernelDesc, Phase, Refusal, Split};

use crate::candidate::{Call, Fit};
use crate::heuristics;

pub(crate) fn fit(call: &Call<'_>, kernel: &KernelDesc) -> Result<Fit, Refusal> {
    let (problem, host) = (call.problem, &call.caps.host);
    let reason = if call.options().phase == Some(Phase::Prefill) {
        "the caller asked for a prefill kernel"
    } else if call.options().batch_invariant {
        "takes any number of rows, so that a sequence meets the same kernel in every batch"
    } else {
        "enough query rows to fill tiles, which read each key and value once for all their rows"
    };
    match (kernel.engine, &call.caps.cuda) {
        (Engine::Cuda, Some(device)) => {
            let (tile, shared_memory) = heuristics::device_tile(kernel, problem, device)?;
            Ok(Fit { tile, split: Split::Whole, shared_memory, reason })
        }
        _ => {
            let tile = heuristics::prefill_tile(problem, host);
            let shared_memory = Bytes::ZERO;
            Ok(Fit { tile, split: Split::Whole, shared_memory, reason })
        }
    }
}
