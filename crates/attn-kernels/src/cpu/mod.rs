//! The CPU engine: tiled online-softmax attention on vectors, over worker threads.
//!
//! The invariant: scores exist one tile at a time, in scratch that belongs to a worker and is bounded by
//! the tile sizes, never by the sequence lengths. Unsafe code lives in `simd` alone.

mod backward;
mod cascade;
pub(crate) mod cost;
mod decode;
mod engine;
mod merge;
mod prefill;
mod rows;
mod scores;
mod simd;
mod workers;
mod workspace;

pub use cascade::{CascadeTables, CascadeWorkspace};
pub use engine::CpuEngine;
pub use simd::Level;
pub use workspace::Workspace;
