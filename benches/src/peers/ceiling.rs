//! What the machine gives: a large f32 matrix product, and reading memory once.
//!
//! The invariant: both are measured in the same rounds as the attention they are compared with,
//! because a shared machine's speed drifts by tens of percent between runs.

use std::hint::black_box;
use std::time::Instant;

use attn_kernels::cpu::CpuEngine;
use candle_core::{Device, Tensor};

/// Size of the matrix product, and of both operands.
const GEMM: usize = 2048;
/// Bytes read: many times any last-level cache.
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
    data: Vec<f32>,
}

impl Read {
    pub(crate) fn new() -> Self {
        // Written, so that every page is its own memory and not the shared page of zeros.
        Self { data: vec![1.0; READ_BYTES / size_of::<f32>()] }
    }

    /// GB/s of one pass, with plain loads or with explicit prefetches.
    pub(crate) fn measure(&self, engine: &CpuEngine, prefetch: bool) -> f64 {
        let start = Instant::now();
        black_box(engine.read(&self.data, prefetch));
        (self.data.len() * size_of::<f32>()) as f64 / start.elapsed().as_secs_f64() / 1e9
    }
}
