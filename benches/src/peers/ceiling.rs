//! What the machine gives: a large f32 matrix product, and reading memory once.
//!
//! The invariant: both are measured in the same rounds as the attention they are compared with,
//! because a shared machine's speed drifts by tens of percent between runs.

use std::hint::black_box;
use std::time::Instant;

use candle_core::{Device, Tensor};
use rayon::prelude::*;

/// Size of the matrix product, and of both operands.
const GEMM: usize = 2048;
/// Bytes read: many times the last-level cache that one guest gets.
const READ_BYTES: usize = 2 << 30;

/// `2048 x 2048 x 2048` in f32 through the `gemm` crate, as candle calls it.
#[derive(Debug)]
pub(crate) struct Gemm {
    a: Tensor,
    b: Tensor,
}

impl Gemm {
    pub(crate) fn new() -> candle_core::Result<Self> {
        let make = || Tensor::randn(0f32, 1.0, (GEMM, GEMM), &Device::Cpu);
        Ok(Self { a: make()?, b: make()? })
    }

    /// GFLOP/s of one product.
    pub(crate) fn measure(&self) -> candle_core::Result<f64> {
        let start = Instant::now();
        let c = self.a.matmul(&self.b)?;
        let seconds = start.elapsed().as_secs_f64();
        black_box(c);
        Ok(2.0 * (GEMM as f64).powi(3) / seconds / 1e9)
    }
}

/// A buffer that is summed from end to end by every thread at once.
#[derive(Debug)]
pub(crate) struct Read {
    words: Vec<u64>,
    pool: rayon::ThreadPool,
}

impl Read {
    pub(crate) fn new(threads: usize) -> Result<Self, rayon::ThreadPoolBuildError> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
        // Written, so that every page is its own memory and not the shared page of zeros.
        let words = (0..(READ_BYTES / 8) as u64).collect();
        Ok(Self { words, pool })
    }

    /// GB/s of one pass.
    pub(crate) fn measure(&self) -> f64 {
        let threads = self.pool.current_num_threads();
        let start = Instant::now();
        let sum = self.pool.install(|| {
            let part = self.words.len().div_ceil(threads);
            self.words.par_chunks(part).map(sum).reduce(|| 0, u64::wrapping_add)
        });
        let seconds = start.elapsed().as_secs_f64();
        black_box(sum);
        (self.words.len() * 8) as f64 / seconds / 1e9
    }
}

/// A sum with eight cache lines in flight; the loop is bound by memory on any vector width.
fn sum(words: &[u64]) -> u64 {
    let (blocks, tail) = words.as_chunks::<64>();
    let mut sums = [0u64; 64];
    for block in blocks {
        for (sum, word) in sums.iter_mut().zip(block) {
            *sum = sum.wrapping_add(*word);
        }
    }
    sums.iter().chain(tail).fold(0, |a, &b| a.wrapping_add(b))
}
