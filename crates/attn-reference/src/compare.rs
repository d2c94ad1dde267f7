//! How far a result is from the truth: worst errors, where they are, and the first element over a limit.
//!
//! The invariant: NaN is never accepted, neither in a result nor in what it is compared with, and an
//! infinity only where the very same infinity is wanted. A difference computed the obvious way is NaN in
//! both cases, and a maximum over differences silently drops NaN: this is how broken kernels pass tests.

use std::fmt;

use attn_core::ErrorRule;

/// An element that is further from the wanted value than the limit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mismatch {
    /// Row-major position.
    pub index: usize,
    /// What the engine gave; NaN for an element that is missing.
    pub got: f64,
    /// What was wanted; NaN for an element too many.
    pub want: f64,
}

/// The distance between two tensors of one shape.
///
/// Units: `worst_abs` and `limit` are in those of the elements; an element that is NaN, or an infinity that
/// is not wanted, counts as infinitely wrong.
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    /// Extents, to print positions with.
    pub shape: Vec<usize>,
    /// The largest absolute error.
    pub worst_abs: f64,
    /// The largest error relative to the wanted value, over wanted values other than 0.
    pub worst_rel: f64,
    /// Row-major position of the largest absolute error; `None` when there is no element.
    pub at: Option<usize>,
    /// The largest absolute error that was accepted.
    pub limit: f64,
    /// Elements over the limit.
    pub bad: usize,
    /// The first of them.
    pub first_bad: Option<Mismatch>,
}

impl Comparison {
    /// Whether every element is within the limit.
    #[must_use]
    pub const fn is_within(&self) -> bool {
        self.first_bad.is_none()
    }

    /// The same comparison with positions printed for `shape`; ignored when it has another size.
    #[must_use]
    pub fn with_shape(mut self, shape: &[usize]) -> Self {
        if shape.iter().product::<usize>() == self.shape.iter().product::<usize>() {
            self.shape = shape.to_vec();
        }
        self
    }

    /// The index of a row-major position.
    #[must_use]
    pub fn index_of(&self, mut position: usize) -> Vec<usize> {
        let mut index = vec![0; self.shape.len()];
        for (i, &extent) in index.iter_mut().zip(&self.shape).rev() {
            *i = position % extent.max(1);
            position /= extent.max(1);
        }
        index
    }
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "worst abs {:.3e}, rel {:.3e}", self.worst_abs, self.worst_rel)?;
        if let Some(at) = self.at {
            write!(f, " at {:?}", self.index_of(at))?;
        }
        write!(f, ", limit {:.3e}", self.limit)?;
        if let Some(Mismatch { index, got, want }) = self.first_bad {
            let (bad, index) = (self.bad, self.index_of(index));
            write!(f, "; {bad} bad, first at {index:?}: got {got:.9e}, want {want:.9e}")?;
        }
        Ok(())
    }
}

/// Compares elements with an absolute limit.
///
/// Tensors of different sizes differ: what is missing or too many counts as bad.
///
/// ```
/// use attn_reference::compare::compare;
///
/// let c = compare(&[1.0, 2.0, f64::NAN], &[1.0, 2.5, 3.0], 0.6);
/// assert_eq!(c.first_bad.map(|m| m.index), Some(2));
/// assert!(compare(&[f64::NEG_INFINITY], &[f64::NEG_INFINITY], 0.0).is_within());
/// assert!(!compare(&[f64::NAN], &[f64::NAN], f64::INFINITY).is_within());
/// ```
#[must_use]
pub fn compare(got: &[f64], want: &[f64], limit: f64) -> Comparison {
    let len = got.len().max(want.len());
    let mut out = Comparison {
        shape: vec![len],
        worst_abs: 0.0,
        worst_rel: 0.0,
        at: None,
        limit,
        bad: 0,
        first_bad: None,
    };
    for index in 0..len {
        let value = |side: &[f64]| side.get(index).copied().unwrap_or(f64::NAN);
        let (got, want) = (value(got), value(want));
        let error = distance(got, want);
        if out.at.is_none() || error > out.worst_abs {
            (out.worst_abs, out.at) = (error, Some(index));
        }
        if want != 0.0 {
            let relative = if error == 0.0 { 0.0 } else { error / want.abs() };
            out.worst_rel =
                out.worst_rel.max(if relative.is_nan() { f64::INFINITY } else { relative });
        }
        // An infinite error is bad whatever the limit: a limit that overflowed accepts nothing.
        if error.is_infinite() || error > limit || limit.is_nan() {
            out.bad += 1;
            out.first_bad = out.first_bad.or(Some(Mismatch { index, got, want }));
        }
    }
    out
}

/// Compares elements by the project's error rule.
///
/// `baseline` is the largest error of the same-dtype materialised computation on the same data.
#[must_use]
pub fn judge(rule: ErrorRule, got: &[f64], want: &[f64], baseline: f64) -> Comparison {
    compare(got, want, rule.limit(baseline, magnitude(want)))
}

/// The largest finite magnitude.
#[must_use]
pub fn magnitude(values: &[f64]) -> f64 {
    values.iter().map(|x| x.abs()).filter(|x| x.is_finite()).fold(0.0, f64::max)
}

/// The largest distance over the elements whose wanted value is finite.
///
/// Infinite where a finite value was wanted and something else was given.
#[must_use]
pub fn largest_error(got: &[f64], want: &[f64]) -> f64 {
    got.iter()
        .zip(want)
        .filter(|(_, want)| want.is_finite())
        .map(|(&got, &want)| distance(got, want))
        .fold(0.0, f64::max)
}

fn distance(got: f64, want: f64) -> f64 {
    if got.is_infinite() && got == want {
        return 0.0;
    }
    let error = (got - want).abs();
    if error.is_nan() { f64::INFINITY } else { error }
}

#[cfg(test)]
mod tests {
    use attn_core::DType;

    use super::*;

    const INF: f64 = f64::INFINITY;

    #[test]
    fn compare_finds_worst_and_first_bad() {
        let c = compare(&[1.0, 2.2, 3.0, 4.9], &[1.0, 2.0, 3.0, 4.0], 0.1);
        assert_eq!((c.at, c.bad), (Some(3), 2));
        assert_eq!(c.first_bad, Some(Mismatch { index: 1, got: 2.2, want: 2.0 }));
        assert!((c.worst_abs - 0.9).abs() < 1e-12 && (c.worst_rel - 0.225).abs() < 1e-12);
    }

    #[test]
    fn compare_never_accepts_nan() {
        for (got, want) in [(f64::NAN, 0.0), (0.0, f64::NAN), (f64::NAN, f64::NAN)] {
            let c = compare(&[0.0, got], &[0.0, want], INF);
            assert_eq!((c.worst_abs, c.at, c.bad), (INF, Some(1), 1));
        }
        assert!(!compare(&[1.0], &[1.0], f64::NAN).is_within());
    }

    #[test]
    fn compare_wants_the_very_same_infinity() {
        assert!(compare(&[-INF, INF], &[-INF, INF], 0.0).is_within());
        for (got, want) in [(INF, -INF), (-1e300, -INF), (-INF, -1e300), (INF, 0.0)] {
            assert!(!compare(&[got], &[want], INF).is_within(), "{got} for {want}");
        }
    }

    #[test]
    fn compare_refuses_other_sizes() {
        assert_eq!(compare(&[1.0], &[1.0, 0.0], 9.0).first_bad.map(|m| m.index), Some(1));
        assert_eq!(compare(&[1.0, 0.0], &[1.0], 9.0).first_bad.map(|m| m.index), Some(1));
        let empty = compare(&[], &[], 0.0);
        assert!(empty.is_within() && empty.at.is_none());
    }

    #[test]
    fn judge_grants_one_rounding_and_twice_the_baseline() {
        let rule = ErrorRule::new(DType::F16);
        let ulp = 2f64.powi(-10);
        assert!(judge(rule, &[1.0 + ulp], &[1.0], 0.0).is_within());
        assert!(!judge(rule, &[1.0 + 2.0 * ulp], &[1.0], 0.0).is_within());
        assert!(judge(rule, &[1.0 + 2.0 * ulp], &[1.0], ulp).is_within());
        // A baseline that overflowed makes no limit that anything passes by being wrong.
        assert!(!judge(rule, &[f64::NAN], &[1.0], INF).is_within());
    }

    #[test]
    fn display_is_one_line_with_an_index_of_the_shape() {
        let text = compare(&[0.0, 0.0, 0.0, 7.0], &[0.0; 4], 1.0).with_shape(&[2, 2]).to_string();
        assert!(text.contains("first at [1, 1]: got 7.0") && !text.contains('\n'), "{text}");
    }

    #[test]
    fn largest_error_ignores_wanted_infinities_only() {
        assert_eq!(largest_error(&[1.0, -INF, 2.0], &[1.5, -INF, 2.0]), 0.5);
        assert_eq!(largest_error(&[f64::NAN], &[1.0]), INF);
    }
}
