//! One timed shape, and the counts that turn milliseconds into rates.
//!
//! The invariant: GFLOP/s counts both matrix products over all pairs, halved for causal, and GB/s
//! counts each key and value byte once, for ours and for every peer alike.

use serde::Serialize;

/// Which rate a case is judged by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    /// Arithmetic-bound: GFLOP/s.
    Prefill,
    /// Memory-bound: GB/s of keys and values.
    Decode,
}

/// One shape.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Case {
    pub(crate) kind: Kind,
    pub(crate) dtype: &'static str,
    pub(crate) batch: usize,
    pub(crate) q_heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) q_len: usize,
    pub(crate) kv_len: usize,
    pub(crate) dim: usize,
    pub(crate) causal: bool,
}

impl Case {
    pub(crate) const fn prefill(dtype: &'static str, len: usize, dim: usize, causal: bool) -> Self {
        Self {
            kind: Kind::Prefill,
            dtype,
            batch: 1,
            q_heads: 8,
            kv_heads: 8,
            q_len: len,
            kv_len: len,
            dim,
            causal,
        }
    }

    pub(crate) const fn decode(dtype: &'static str, q_heads: usize, kv_len: usize) -> Self {
        Self {
            kind: Kind::Decode,
            dtype,
            batch: 8,
            q_heads,
            kv_heads: 8,
            q_len: 1,
            kv_len,
            dim: 128,
            causal: false,
        }
    }

    /// Every timed case: the prefill and decode shapes of the speed section.
    pub(crate) fn all() -> Vec<Self> {
        let mut cases = Vec::new();
        for dim in [64, 128] {
            for len in [2048, 4096] {
                for causal in [true, false] {
                    cases.push(Self::prefill("f32", len, dim, causal));
                }
            }
        }
        for dtype in ["bf16", "f16"] {
            for dim in [64, 128] {
                for causal in [true, false] {
                    cases.push(Self::prefill(dtype, 2048, dim, causal));
                }
            }
        }
        for dtype in ["f32", "bf16", "f16"] {
            cases.push(Self::decode(dtype, 32, 4096));
        }
        // The same bytes with one query head a KV head: grouping must be free.
        cases.push(Self::decode("f32", 8, 4096));
        cases
    }

    pub(crate) fn id(&self) -> String {
        let Self { dtype, batch, q_heads, kv_heads, q_len, kv_len, dim, causal, .. } = self;
        let mask = if *causal { "causal" } else { "full" };
        match self.kind {
            Kind::Prefill => format!("prefill/{dtype}/b{batch}h{q_heads}d{dim}/s{q_len}/{mask}"),
            Kind::Decode => {
                format!("decode/{dtype}/b{batch}h{q_heads}.{kv_heads}d{dim}/ctx{kv_len}")
            }
        }
    }

    pub(crate) const fn element_bytes(&self) -> usize {
        match self.dtype.as_bytes() {
            b"f32" => 4,
            _ => 2,
        }
    }

    /// Floating-point operations of both products, halved for causal.
    pub(crate) const fn flops(&self) -> u64 {
        let pairs = (self.batch * self.q_heads * self.q_len) as u64 * self.kv_len as u64;
        let flops = 4 * pairs * self.dim as u64;
        if self.causal { flops / 2 } else { flops }
    }

    /// Key and value bytes, each once.
    pub(crate) const fn kv_bytes(&self) -> u64 {
        let rows = (self.batch * self.kv_heads * self.kv_len) as u64;
        2 * rows * (self.dim * self.element_bytes()) as u64
    }

    /// GFLOP/s of a prefill, GB/s of a decode.
    pub(crate) fn rate(&self, millis: f64) -> f64 {
        let count = match self.kind {
            Kind::Prefill => self.flops(),
            Kind::Decode => self.kv_bytes(),
        };
        count as f64 / (millis * 1e6)
    }

    pub(crate) const fn unit(&self) -> &'static str {
        match self.kind {
            Kind::Prefill => "GFLOP/s",
            Kind::Decode => "GB/s",
        }
    }
}
