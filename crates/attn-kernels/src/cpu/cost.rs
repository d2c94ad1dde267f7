//! What a call costs in scratch, as the catalogue states it and as the engine reserves it.
//!
//! The invariant: both come from the kernel's own sizing through this file, so a plan's workspace is
//! what [`super::Workspace`] holds after the call, to the byte.

use attn_core::{Bytes, HostCaps, Problem, Split, Tile};

use super::{backward, decode, prefill, workspace};

/// Scratch of `cpu_prefill`.
pub(crate) fn prefill(problem: &Problem, host: &HostCaps, tile: Tile, _: Split) -> Bytes {
    workspace::held(prefill::workspace(problem, tile, host.threads))
}

/// Scratch of `cpu_decode`.
pub(crate) fn decode(problem: &Problem, host: &HostCaps, tile: Tile, split: Split) -> Bytes {
    workspace::held(decode::workspace(problem, tile, split, host.threads))
}

/// Scratch of `cpu_backward`.
pub(crate) fn backward(problem: &Problem, host: &HostCaps, tile: Tile, _: Split) -> Bytes {
    workspace::held(backward::workspace(problem, tile, host.threads))
}
