//! Rotary position embedding, in its half-split form.
//!
//! Invariant: element i of a head turns with element i + `head_dim/2`. GGUF files carry the query
//! and key rows in another order, in which 2i turns with 2i + 1; [`half_split_rows`] undoes that
//! once, at load. Scores are the same either way, since queries and keys are permuted alike. The
//! half-split form is preferred because its loops run over contiguous elements, and because q and k
//! then equal the published model's, element for element, so that they can be compared with
//! recorded ones.
//!
//! Source: Su et al., "`RoFormer`", section 3.4.2, arXiv:2104.09864.

/// The rotary frequencies of a head.
#[derive(Debug, Clone)]
pub(crate) struct Rope {
    /// `theta^(-2i/head_dim)`, of length `head_dim / 2`; f64 since an angle may be thousands of
    /// radians.
    frequencies: Vec<f64>,
}

/// Cosines and sines of some positions, the same in every layer.
///
/// Shapes: both `[positions, head_dim / 2]`.
#[derive(Debug, Clone, Default)]
pub(crate) struct Turns {
    cos: Vec<f32>,
    sin: Vec<f32>,
    half: usize,
}

impl Rope {
    /// The frequencies for an even head dimension and a base.
    pub(crate) fn new(head_dim: usize, theta: f32) -> Self {
        #[expect(clippy::cast_precision_loss, reason = "a head dimension is far below 2^53")]
        let exponent = |i: usize| -(2.0 * i as f64) / head_dim as f64;
        let theta = f64::from(theta);
        Self { frequencies: (0..head_dim / 2).map(|i| theta.powf(exponent(i))).collect() }
    }

    /// Replaces the content of `turns` by the turns of these positions.
    pub(crate) fn turns(&self, positions: &[u32], turns: &mut Turns) {
        turns.half = self.frequencies.len();
        turns.cos.clear();
        turns.sin.clear();
        for &position in positions {
            for frequency in &self.frequencies {
                let (sin, cos) = (f64::from(position) * frequency).sin_cos();
                #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is the point")]
                let (sin, cos) = (sin as f32, cos as f32);
                turns.sin.push(sin);
                turns.cos.push(cos);
            }
        }
    }
}

impl Turns {
    /// Turns all heads of the token at place `row` of the positions.
    ///
    /// Shapes: x and out `[heads, head_dim]`.
    ///
    /// # Panics
    /// When `row` is not among the positions.
    pub(crate) fn apply(&self, row: usize, x: &[f32], out: &mut [f32]) {
        let half = self.half;
        let cos = &self.cos[row * half..][..half];
        let sin = &self.sin[row * half..][..half];
        for (x, out) in x.chunks_exact(2 * half).zip(out.chunks_exact_mut(2 * half)) {
            let (x1, x2) = x.split_at(half);
            let (out1, out2) = out.split_at_mut(half);
            for i in 0..half {
                out1[i] = x1[i] * cos[i] - x2[i] * sin[i];
                out2[i] = x2[i] * cos[i] + x1[i] * sin[i];
            }
        }
    }
}

/// Reorders the rows of a query or key projection from adjacent pairs to half-split.
///
/// Row `2i + j` of a head becomes row `i + j * head_dim/2` of that head, for j in {0, 1}.
///
/// Shapes: weights and result `[heads * head_dim, columns]`.
pub(crate) fn half_split_rows(weights: &[f32], head_dim: usize, columns: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(weights.len());
    for head in weights.chunks_exact(head_dim * columns) {
        for parity in 0..2 {
            for row in head.chunks_exact(columns).skip(parity).step_by(2) {
                out.extend_from_slice(row);
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two-dimensional rotations spelt out in f64, on adjacent pairs.
    fn adjacent(x: &[f32], position: u32, theta: f64) -> Vec<f64> {
        let d = f64::from(u32::try_from(x.len()).unwrap());
        let mut out = Vec::new();
        for (i, pair) in (0u32..).zip(x.chunks_exact(2)) {
            let angle = f64::from(position) * theta.powf(-2.0 * f64::from(i) / d);
            let (a, b) = (f64::from(pair[0]), f64::from(pair[1]));
            out.push(a * angle.cos() - b * angle.sin());
            out.push(a * angle.sin() + b * angle.cos());
        }
        out
    }

    #[test]
    fn rope_on_half_split_rows_matches_adjacent_pairs() {
        let heads: Vec<f32> = (0..16u8).map(|i| f32::from(i * 7 % 5) - 1.5).collect();
        // A head is a projection with one column.
        let split = half_split_rows(&heads, 8, 1);
        let rope = Rope::new(8, 1e4);
        let mut turns = Turns::default();
        rope.turns(&[0, 5, 8191], &mut turns);
        for (row, position) in [0, 5, 8191].into_iter().enumerate() {
            let mut turned = vec![0.0; 16];
            turns.apply(row, &split, &mut turned);
            for head in 0..2 {
                let expected = adjacent(&heads[head * 8..][..8], position, 1e4);
                for (i, expected) in expected.iter().enumerate() {
                    let got = f64::from(turned[head * 8 + i / 2 + i % 2 * 4]);
                    assert!(
                        (got - expected).abs() < 1e-6,
                        "{position} {head} {i}: {got} {expected}"
                    );
                }
            }
        }
    }

    #[test]
    fn rope_at_position_zero_changes_nothing() {
        let mut turns = Turns::default();
        Rope::new(4, 1e5).turns(&[0], &mut turns);
        let mut out = [0.0; 4];
        turns.apply(0, &[1.0, 2.0, 3.0, 4.0], &mut out);
        assert_eq!(out, [1.0, 2.0, 3.0, 4.0]);
    }

    #[test]
    fn rope_scores_depend_on_distance_alone() {
        let (q, k) = ([0.3, -1.2, 0.7, 2.0], [1.1, 0.4, -0.6, 0.9]);
        let rope = Rope::new(4, 1e5);
        let mut turns = Turns::default();
        rope.turns(&[10, 3, 1007, 1000], &mut turns);
        let score = |a, b| {
            let (mut turned_q, mut turned_k) = ([0.0; 4], [0.0; 4]);
            turns.apply(a, &q, &mut turned_q);
            turns.apply(b, &k, &mut turned_k);
            turned_q.iter().zip(&turned_k).map(|(a, b)| a * b).sum::<f32>()
        };
        assert!((score(0, 1) - score(2, 3)).abs() < 1e-5);
    }

    #[test]
    fn half_split_rows_moves_whole_rows() {
        // One head of four rows, two columns; each row is [r, r].
        let rows = [0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0];
        assert_eq!(half_split_rows(&rows, 4, 2), [0.0, 0.0, 2.0, 2.0, 1.0, 1.0, 3.0, 3.0]);
    }
}
