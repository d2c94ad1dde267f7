//! What a CPU kernel needs of its engine: the vector level and the threads.
//!
//! The invariant: kernels take no global thread pool and detect nothing themselves, so that one
//! process can run several engines, and tests can run every level with any number of threads.

use super::simd::Simd;

/// The vector level and the threads of one engine.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Workers<'e> {
    pub(crate) simd: Simd,
    pub(crate) pool: &'e rayon::ThreadPool,
}
