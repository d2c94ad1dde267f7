//! What cancels in the gradients of scores: an error that no baseline of a lucky order shows.
//!
//! The invariant: it is a size, not an error; [`crate::CaseData::expected_gradients`] says what share of it is granted. A row that sees one key has
//! the gradient `p (d_o . v - delta) = 0`, since both terms are one sum: in f32 they cancel to nothing if both are added up in one order, and
//! to some roundings of their terms if a matrix unit adds up the one and a vector unit the other, as kernels that recompute do.

use attn_core::{Error, Inputs, Problem, TensorView};

use super::Head;
use crate::rows::{kv_place, kv_places, query_rows};

/// The largest sums, over the elements of a gradient, of the absolute terms that its elements are what is left of.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(crate) struct Cancelled {
    /// Of the gradient of q.
    pub(crate) dq: f64,
    /// Of the gradient of k.
    pub(crate) dk: f64,
    /// Of a score's gradient, and so of the bias'.
    pub(crate) score: f64,
}

/// Sums the absolute terms of a backward.
///
/// # Errors
/// As [`super::backward_f64`].
pub(crate) fn cancelled(
    problem: &Problem,
    inputs: &Inputs<'_>,
    d_o: &TensorView<'_>,
) -> Result<Cancelled, Error> {
    let lengths = problem.lengths();
    let (heads, kv_heads, value_dim) = (problem.q_heads(), problem.kv_heads(), problem.value_dim());
    let mut of_keys = vec![0.0; kv_places(problem) * kv_heads];
    let mut most = Cancelled::default();
    for sequence in 0..lengths.batch() {
        for head in 0..heads {
            let this = Head::new(problem, inputs, sequence, head)?;
            let d_o = query_rows(problem, "do", d_o, sequence, head)?;
            for row in 0..lengths.q(sequence) {
                let scores = this.scores(row);
                let softmax = this.softmax(&scores);
                let mut o = vec![0.0; value_dim];
                this.weighted_values(&softmax.weights, &mut o);
                let d_o: Vec<f64> =
                    d_o[row * value_dim..][..value_dim].iter().copied().map(f64::from).collect();
                let delta = absolute_dot(&o, &d_o);
                let (mut of_row, q) = (0.0, largest(this.q(row)));
                for (key, score) in scores.iter().enumerate() {
                    if score.value == f64::NEG_INFINITY {
                        continue;
                    }
                    let term = softmax.weights[key] * (absolute_dot(&d_o, this.v(key)) + delta);
                    most.score = most.score.max(term);
                    let scaled = term * this.scale.abs();
                    of_row += scaled * largest(this.k(key));
                    of_keys
                        [kv_place(problem, sequence, key) * kv_heads + head / problem.group()] +=
                        scaled * q;
                }
                most.dq = most.dq.max(of_row);
            }
        }
    }
    most.dk = of_keys.into_iter().fold(0.0, f64::max);
    Ok(most)
}

fn absolute_dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a * b).abs()).sum()
}

fn largest(x: &[f64]) -> f64 {
    x.iter().fold(0.0, |most, x| most.max(x.abs()))
}
