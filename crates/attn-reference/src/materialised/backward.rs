//! The same-dtype baseline of a backward: P and dS rounded to the dtype, everything else in f32.
//!
//! The invariant: the formulas are those of the f64 reference, and only the precision differs. The sums over
//! query rows that make dk and dv are kept in f32 and rounded once, as are dsinks and dbias, which
//! nothing rounds below f32.

use attn_core::{Error, Inputs, Problem, TensorView};

use super::{Evaluation, Head, add_scaled};
use crate::naive::{ReferenceGradients, bias_place, check_d_o};
use crate::rows::{kv_place, kv_places, q_place, q_places, query_rows};

/// Computes gradients in the call's own dtype; elements are exact f32 values.
///
/// # Errors
/// As [`crate::naive::backward_f64`].
pub fn backward(
    problem: &Problem,
    inputs: &Inputs<'_>,
    d_o: &TensorView<'_>,
    evaluation: Evaluation,
) -> Result<ReferenceGradients, Error> {
    inputs.check(problem)?;
    check_d_o(problem, d_o)?;
    let l = problem.lengths();
    let (heads, kv_heads) = (problem.q_heads(), problem.kv_heads());
    let (dim, value_dim) = (problem.head_dim(), problem.value_dim());
    let dtype = problem.q_dtype();
    let mut dq = vec![0f32; q_places(problem) * heads * dim];
    let mut dk = vec![0f32; kv_places(problem) * kv_heads * dim];
    let mut dv = vec![0f32; kv_places(problem) * kv_heads * value_dim];
    let mut dsinks = vec![0f32; heads];
    let mut dbias = vec![0f32; inputs.bias.as_ref().map_or(0, |bias| bias.layout().len())];
    for sequence in 0..l.batch() {
        for head in 0..heads {
            let this = Head::new(problem, inputs, sequence, head, evaluation)?;
            let d_o = query_rows(problem, "do", d_o, sequence, head)?;
            let kv_head = head / problem.group();
            for (row, _) in evaluation.terms(l.q(sequence)) {
                let scores = this.scores(row);
                let mut result = this.row(row, &scores);
                this.backward_weights(&scores, &mut result);
                let d_o = &d_o[row * value_dim..][..value_dim];
                if evaluation.recomputes() {
                    // They start from what a forward has left: the output in its type, as the log-sum-exp in f32.
                    result.o.iter_mut().for_each(|x| *x = dtype.round(*x));
                }
                let delta = evaluation.dot(this.unit, &result.o, d_o);
                dsinks[head] -= result.sink_weight * delta;
                let mut ds = vec![0.0; this.kv_len];
                for (key, &score) in scores.value.iter().enumerate() {
                    if score == f32::NEG_INFINITY {
                        continue;
                    }
                    let p = result.weights[key];
                    let place = kv_place(problem, sequence, key) * kv_heads + kv_head;
                    let dv = &mut dv[place * value_dim..][..value_dim];
                    let keep = if this.keeps(row, key) { this.keep_factor() } else { 0.0 };
                    add_scaled(dv, dtype.round(p * keep), d_o);
                    let v = &this.v[key * value_dim..][..value_dim];
                    let dz = p * (keep * evaluation.dot(this.unit, d_o, v) - delta);
                    if let Some(bias) = &inputs.bias {
                        dbias[bias_place(bias.shape(), [sequence, head, row, key])] += dz;
                    }
                    let gain = this.softcap.map_or(1.0, |c| {
                        let t = (scores.raw[key] / c).tanh();
                        1.0 - t * t
                    });
                    ds[key] = dtype.round(dz * gain);
                    let dk = &mut dk[place * dim..][..dim];
                    add_scaled(dk, this.scale * ds[key], this.q(row));
                }
                let at = (q_place(problem, sequence, row) * heads + head) * dim;
                let sums = evaluation.combine(this.unit, &ds, &this.k, dim);
                for (to, from) in dq[at..][..dim].iter_mut().zip(sums) {
                    *to = this.scale * from;
                }
            }
        }
    }
    let rounded =
        |values: Vec<f32>| values.into_iter().map(|x| f64::from(dtype.round(x))).collect();
    let exact = |values: Vec<f32>| values.into_iter().map(f64::from).collect();
    Ok(ReferenceGradients {
        dq: rounded(dq),
        dk: rounded(dk),
        dv: rounded(dv),
        dsinks: inputs.sinks.as_ref().map(|_| exact(dsinks)),
        dbias: inputs.bias.as_ref().map(|_| exact(dbias)),
    })
}
