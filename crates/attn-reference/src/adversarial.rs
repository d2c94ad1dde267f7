//! Inputs that break engines which pass on random numbers.
//!
//! The invariant: a sequence's values depend on the seed, the pattern and the sequence's own index and
//! lengths only, so that a batch can be cut apart and each part must give the same rows. Values are made so
//! that the intended scores come out in every dtype: the level of a score sits in one component (`LEVER`
//! times a per-key number), because spread over all components it would drown in their rounding.

use attn_core::{DType, Problem};

use crate::random::Random;

/// What the scores of a sequence look like.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pattern {
    /// Standard normal q, k and v.
    Normal,
    /// Scores rise from the first key to the last: every tile raises the running maximum.
    LargestLast,
    /// All scores near -1e5, or as far down as fp8 queries and keys reach: a maximum that starts at 0, or any finite stand-in for -inf, gives 0/0.
    FarBelow,
    /// All scores near +1e5, or as far up as fp8 reaches: an exponential without the maximum taken off is infinite.
    FarAbove,
    /// All scores of a row equal: the weights are exactly 1/n and sums of them must not drift.
    Equal,
    /// One key in the middle stands 100 above the rest: its neighbours must vanish without NaN.
    Outlier,
    /// Scores with a deviation of about 300: one-hot weights, exponentials that underflow.
    HugeRange,
    /// Values near the bottom of the dtype's range: an absolute tolerance would pass zeros.
    Tiny,
}

impl Pattern {
    /// Every pattern.
    pub const ALL: [Self; 8] = [
        Self::Normal,
        Self::LargestLast,
        Self::FarBelow,
        Self::FarAbove,
        Self::Equal,
        Self::Outlier,
        Self::HugeRange,
        Self::Tiny,
    ];

    /// The name used in case names.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Normal => "normal",
            Self::LargestLast => "largest_last",
            Self::FarBelow => "far_below",
            Self::FarAbove => "far_above",
            Self::Equal => "equal",
            Self::Outlier => "outlier",
            Self::HugeRange => "huge_range",
            Self::Tiny => "tiny",
        }
    }

    /// Makes the values of one sequence, not yet rounded to a dtype.
    ///
    /// # Panics
    /// When `sequence` is not below the problem's batch.
    #[must_use]
    pub fn sequence(self, problem: &Problem, sequence: usize, seed: u64) -> SequenceValues {
        let l = problem.lengths();
        let (q_len, kv_len) = (l.q(sequence), l.kv(sequence));
        let (dim, kv_heads) = (problem.head_dim(), problem.kv_heads());
        let random = |salt: u64| Random::new(seed ^ (sequence as u64 + 1).wrapping_mul(salt));
        let q_rows = q_len * problem.q_heads();
        let mut q = normals(&mut random(0xD1B5_4A32_D192_ED03), q_rows * dim);
        let mut k = normals(&mut random(0xABC9_8388_FB8F_AC03), kv_len * kv_heads * dim);
        let mut v =
            normals(&mut random(0x8CB9_2BA7_2F3D_8DD7), kv_len * kv_heads * problem.value_dim());
        match self {
            Self::Normal => {}
            Self::Equal => {
                let row = kv_heads * dim;
                for key in 1..kv_len {
                    k.copy_within(..row, key * row);
                }
            }
            Self::HugeRange => {
                scale_all(&mut q, 17.0);
                scale_all(&mut k, 17.0);
            }
            Self::Tiny => {
                let factor = match problem.q_dtype() {
                    DType::F32 | DType::BF16 => 2f32.powi(-30),
                    DType::F16 => 2f32.powi(-13),
                    // Below the smallest normal value, which is 2^-6.
                    DType::F8E4M3 | DType::F8E5M2 => 2f32.powi(-7),
                };
                for values in [&mut q, &mut k, &mut v] {
                    scale_all(values, factor);
                }
            }
            Self::LargestLast | Self::FarBelow | Self::FarAbove | Self::Outlier => {
                let quiet = if self == Self::LargestLast { 0.25 } else { 1.0 };
                scale_all(&mut q, quiet);
                scale_all(&mut k, quiet);
                let unit = LEVER * if problem.scale() == 0.0 { 1.0 } else { problem.scale() };
                for q in q.chunks_mut(dim) {
                    q[0] = LEVER;
                }
                for (n, k) in k.chunks_mut(dim).enumerate() {
                    k[0] = self.level(n / kv_heads, kv_len) / unit;
                }
            }
        }
        SequenceValues { q, k, v }
    }

    /// The score that a key gets beside its noise.
    fn level(self, key: usize, kv_len: usize) -> f32 {
        // Lengths of test data are far below 2^24.
        let (key_number, count) = (key as f32 + 1.0, kv_len as f32);
        match self {
            Self::LargestLast => key_number * (60.0 / count).min(1.0),
            Self::FarBelow => -1e5,
            Self::FarAbove => 1e5,
            Self::Outlier if key == kv_len / 2 => 100.0,
            Self::Outlier | Self::Normal | Self::Equal | Self::HugeRange | Self::Tiny => 0.0,
        }
    }
}

/// One sequence's values, row-major: q `[q_len, q_heads, head_dim]`, k `[kv_len, kv_heads, head_dim]`,
/// v `[kv_len, kv_heads, value_dim]`.
#[derive(Debug, Clone, PartialEq)]
pub struct SequenceValues {
    /// Queries.
    pub q: Vec<f32>,
    /// Keys.
    pub k: Vec<f32>,
    /// Values.
    pub v: Vec<f32>,
}

/// The query's share of a score's level; large enough that f16 keys can carry 1e5 at any head dim.
const LEVER: f32 = 64.0;

fn normals(random: &mut Random, len: usize) -> Vec<f32> {
    (0..len).map(|_| random.normal()).collect()
}

fn scale_all(values: &mut [f32], factor: f32) {
    for value in values {
        *value *= factor;
    }
}

#[cfg(test)]
mod tests {
    use attn_core::ProblemSpec;

    use super::*;

    fn scores(pattern: Pattern, dtype: DType) -> Vec<Vec<f64>> {
        let spec = ProblemSpec::new(dtype, 2, 1, 16, &[3], &[40]);
        let problem = Problem::new(spec).unwrap();
        let values = pattern.sequence(&problem, 0, 9);
        let round = |x: &f32| f64::from(dtype.round(*x));
        let dot = |q: &[f32], k: &[f32]| {
            let sum: f64 = q.iter().zip(k).map(|(q, k)| round(q) * round(k)).sum();
            sum * f64::from(problem.scale())
        };
        let keys: Vec<&[f32]> = values.k.chunks(16).collect();
        values.q.chunks(16).map(|q| keys.iter().map(|k| dot(q, k)).collect()).collect()
    }

    #[test]
    fn patterns_give_their_scores_in_every_dtype() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for row in scores(Pattern::FarBelow, dtype) {
                assert!(row.iter().all(|s| (-1.01e5..-0.99e5).contains(s)), "{dtype} {row:?}");
            }
            for row in scores(Pattern::FarAbove, dtype) {
                assert!(row.iter().all(|s| (0.99e5..1.01e5).contains(s)), "{dtype} {row:?}");
            }
            for row in scores(Pattern::LargestLast, dtype) {
                assert!(row[..39].iter().all(|s| *s < row[39]), "{dtype} {row:?}");
            }
            for row in scores(Pattern::Equal, dtype) {
                assert!(row.iter().all(|s| *s == row[0]), "{dtype} {row:?}");
            }
            for row in scores(Pattern::Outlier, dtype) {
                let rest = row.iter().enumerate().filter(|(key, _)| *key != 20);
                assert!(rest.fold(0.0, |m: f64, (_, s)| m.max(*s)) + 80.0 < row[20], "{row:?}");
            }
        }
    }

    #[test]
    fn patterns_reach_as_far_as_fp8_does() {
        let largest = 448.0 * LEVER * 0.25;
        let spec = ProblemSpec::new(DType::F8E4M3, 2, 1, 16, &[3], &[40]);
        let problem = Problem::new(spec).unwrap();
        for pattern in Pattern::ALL {
            let values = pattern.sequence(&problem, 0, 9);
            let far = values.k.iter().fold(0f32, |far, x| far.max(x.abs()));
            let is_far = matches!(pattern, Pattern::FarBelow | Pattern::FarAbove);
            assert_eq!(far > 448.0, is_far, "{pattern:?} {far}");
            let tiny = values.q.iter().all(|q| q.abs() < 2f32.powi(-4));
            assert_eq!(tiny, pattern == Pattern::Tiny, "{pattern:?}");
        }
        // Clamped to the format, the level is far below every finite stand-in for a score.
        assert!(largest > 7000.0);
    }

    #[test]
    fn sequence_does_not_depend_on_its_batch_mates() {
        let alone = Problem::new(ProblemSpec::new(DType::F32, 2, 1, 8, &[0, 3], &[0, 5])).unwrap();
        let among = Problem::new(ProblemSpec::new(DType::F32, 2, 1, 8, &[9, 3], &[7, 5])).unwrap();
        for pattern in Pattern::ALL {
            assert_eq!(pattern.sequence(&alone, 1, 4), pattern.sequence(&among, 1, 4));
        }
    }
}
