//! Forward kernels that divide the work by query rows.
//!
//! Some divide the keys, too, where the rows alone would leave a device idle.
//!
//! The invariant: this family takes every shape. It is the last resort of the forward pass, so it never
//! steps aside for speed.

use attn_core::{Bytes, Engine, KernelDesc, Phase, Refusal, Split};

use crate::candidate::{Call, Fit};
use crate::heuristics;

/// Why a kernel of row tiles has keys in parts.
const DIVIDED: &str = "tiles of query rows that are fewer than the device has room for meet many keys, which are divided \
                       among blocks and joined";

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
            let split = heuristics::device_prefill_split(kernel, problem, tile, device);
            let is_own_choice = call.options().phase.is_none() && !call.options().batch_invariant;
            let reason = if split != Split::Whole && is_own_choice { DIVIDED } else { reason };
            Ok(Fit { tile, split, shared_memory, reason })
        }
        _ => {
            let tile = heuristics::prefill_tile(problem, host);
            let shared_memory = Bytes::ZERO;
            Ok(Fit { tile, split: Split::Whole, shared_memory, reason })
        }
    }
}
