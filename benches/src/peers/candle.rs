//! candle-nn's CPU flash attention as a timed peer.
//!
//! The invariant: candle gets the layout it asks for, `[batch, tokens, heads, dim]`, so that no copy is
//! timed.

use std::hint::black_box;
use std::time::Instant;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::attention::{AttnMask, flash_attn};
use half::{bf16, f16};

use super::case::Case;

/// Inputs of one case.
#[derive(Debug)]
pub(crate) struct Candle {
    q: Tensor,
    k: Tensor,
    v: Tensor,
}

impl Candle {
    pub(crate) fn new(case: &Case) -> Result<Self> {
        let dtype = match case.dtype {
            "f16" => DType::F16,
            "bf16" => DType::BF16,
            _ => DType::F32,
        };
        let make = |len, heads| {
            Tensor::randn(0f32, 1.0, (case.batch, len, heads, case.dim), &Device::Cpu)?
                .to_dtype(dtype)
        };
        let q = make(case.q_len, case.q_heads)?;
        Ok(Self { q, k: make(case.kv_len, case.kv_heads)?, v: make(case.kv_len, case.kv_heads)? })
    }

    /// Milliseconds of one call.
    pub(crate) fn time(&self, case: &Case) -> Result<f64> {
        let scale = 1.0 / (case.dim as f32).sqrt();
        let mask = if case.causal { AttnMask::causal() } else { AttnMask::None };
        let (q, k, v) = (&self.q, &self.k, &self.v);
        let start = Instant::now();
        let o = match case.dtype {
            "f16" => flash_attn::<f16>(q, k, v, scale, mask, None, None)?,
            "bf16" => flash_attn::<bf16>(q, k, v, scale, mask, None, None)?,
            _ => flash_attn::<f32>(q, k, v, scale, mask, None, None)?,
        };
        let millis = start.elapsed().as_secs_f64() * 1e3;
        black_box(o);
        Ok(millis)
    }
}
