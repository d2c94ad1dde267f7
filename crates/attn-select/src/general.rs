//! Forward kernels that take every problem, a row at a time.
//!
//! The invariant: they are the last resort of both phases, behind every kernel that shares keys among rows; the plan
//! says so, because they are slow.

use attn_core::{Bytes, Engine, KernelDesc, Refusal, Split, Tile};

use crate::candidate::{Call, Fit};
use crate::heuristics;

pub(crate) fn fit(call: &Call<'_>, kernel: &KernelDesc) -> Result<Fit, Refusal> {
    let reason = "takes what no tiled kernel takes, and reads every key again for each row";
    let (tile, shared_memory) = match (kernel.engine, &call.caps.cuda) {
        (Engine::Cuda, Some(device)) => heuristics::device_tile(kernel, call.problem, device)?,
        _ => (Tile { q: 1, kv: 1 }, Bytes::ZERO),
    };
    Ok(Fit { tile, split: Split::Whole, shared_memory, reason })
}
