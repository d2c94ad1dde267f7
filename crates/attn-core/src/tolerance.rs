//! The error rule that every engine is held to.
//!
//! The invariant: a tolerance is derived from data and dtype, never a constant. A kernel may err twice
//! as much as the straightforward computation in the same dtype errs on the same data, plus one
//! rounding of the output; a fixed absolute tolerance passes wrong kernels on small values and fails
//! right ones on large values.

use crate::dtype::DType;

/// How far an output may be from the f64 reference.
///
/// Source: the rule used by the FlashAttention test-suite (factor 2 over a same-precision baseline).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ErrorRule {
    /// Multiple of the baseline's error.
    pub factor: f64,
    /// The type whose rounding is granted once.
    pub dtype: DType,
}

impl ErrorRule {
    /// The project's rule for an output of `dtype`.
    #[must_use]
    pub const fn new(dtype: DType) -> Self {
        Self { factor: 2.0, dtype }
    }

    /// The largest allowed absolute error.
    ///
    /// `baseline` is `max|same-dtype materialised - reference|` and `magnitude` is `max|reference|`, over the
    /// whole tensor. One rounding is one unit in the last place of the magnitude.
    #[must_use]
    pub fn limit(self, baseline: f64, magnitude: f64) -> f64 {
        let ulp = 2.0 * self.dtype.unit_roundoff() * magnitude;
        self.factor * baseline + ulp + self.dtype.underflow_roundoff()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_grows_with_baseline_and_magnitude() {
        let rule = ErrorRule::new(DType::BF16);
        assert!(rule.limit(0.0, 1.0) >= 2f64.powi(-7));
        assert!(rule.limit(1e-3, 1.0) >= rule.limit(0.0, 1.0) + 2e-3);
        assert!(rule.limit(0.0, 0.0) > 0.0);
    }
}
