//! Gradients of `sum(o * d_o)`, by the chain rule, in f64.
//!
//! The invariant: the softmax is recomputed here in f64, so that these are the true gradients, not
//! those of a rounded forward; `o` and `lse` of [`ForwardResults`] are checked for shape and then not
//! used. The chain rule is written out step by step and verified by finite differences of the forward
//! next door, rather than derived by some machinery that would need its own tests.
//!
//! With `z` the final score, `p = exp(z - lse)`, `m` what dropout multiplies it by (1 without) and `delta = o . d_o`:
//! `dv += m p d_o`; `dz = p (m d_o . v - delta)`; the bias takes `dz`; the soft-cap gives
//! `ds = dz (1 - tanh(s / c)^2)`; `dq += scale ds k`; `dk += scale ds q`. A sink is a key with `v = 0`, so
//! it takes `-p_sink delta`.

use attn_core::{Error, ForwardResults, Gradients, Inputs, Problem, TensorView};

use super::{Head, ReferenceGradients, add_scaled, check_enabled, dot};
use crate::elements;
use crate::rows::{kv_place, kv_places, q_place, q_places, query_rows};

/// Computes gradients in f64 and writes them, each element rounded once.
///
/// # Errors
/// As [`Inputs::check`], [`ForwardResults::check`] and [`Gradients::check`]; [`Error::Unsupported`] when the
/// problem disables [`super::NAME`]. Nothing is written then.
pub fn backward(
    problem: &Problem,
    inputs: &Inputs<'_>,
    results: &ForwardResults<'_>,
    mut gradients: Gradients<'_>,
) -> Result<(), Error> {
    check_enabled(problem)?;
    inputs.check(problem)?;
    results.check(problem)?;
    gradients.check(problem, inputs)?;
    let result = backward_f64(problem, inputs, &results.d_o)?;
    elements::write(&mut gradients.dq, &result.dq);
    elements::write(&mut gradients.dk, &result.dk);
    elements::write(&mut gradients.dv, &result.dv);
    if let (Some(to), Some(from)) = (&mut gradients.dsinks, &result.dsinks) {
        elements::write_view(to, from);
    }
    if let (Some(to), Some(from)) = (&mut gradients.dbias, &result.dbias) {
        elements::write_view(to, from);
    }
    Ok(())
}

/// Computes gradients in f64, those of sinks and bias wherever there are sinks and a bias.
///
/// Key-side gradients of a paged call, which has no arrangement of its own, are packed; those of an
/// fp8 cache are with respect to the real keys and values, after the scale.
///
/// # Errors
/// As [`Inputs::check`]; [`Error::Layout`] when `d_o` is not shaped as the output.
pub fn backward_f64(
    problem: &Problem,
    inputs: &Inputs<'_>,
    d_o: &TensorView<'_>,
) -> Result<ReferenceGradients, Error> {
    inputs.check(problem)?;
    let l = problem.lengths();
    let (heads, kv_heads) = (problem.q_heads(), problem.kv_heads());
    let (dim, value_dim) = (problem.head_dim(), problem.value_dim());
    check_d_o(problem, d_o)?;
    let mut out = ReferenceGradients {
        dq: vec![0.0; q_places(problem) * heads * dim],
        dk: vec![0.0; kv_places(problem) * kv_heads * dim],
        dv: vec![0.0; kv_places(problem) * kv_heads * value_dim],
        dsinks: inputs.sinks.as_ref().map(|_| vec![0.0; heads]),
        dbias: inputs.bias.as_ref().map(|bias| vec![0.0; bias.layout().len()]),
    };
    for sequence in 0..l.batch() {
        for head in 0..heads {
            let this = Head::new(problem, inputs, sequence, head)?;
            let d_o: Vec<f64> = query_rows(problem, "do", d_o, sequence, head)?
                .into_iter()
                .map(f64::from)
                .collect();
            let kv_head = head / problem.group();
            for row in 0..l.q(sequence) {
                let scores = this.scores(row);
                let softmax = this.softmax(&scores);
                let mut o = vec![0.0; value_dim];
                let kept = this.kept(row, &softmax.weights);
                this.weighted_values(&kept, &mut o);
                let d_o = &d_o[row * value_dim..][..value_dim];
                let delta = dot(&o, d_o);
                if let Some(dsinks) = &mut out.dsinks {
                    dsinks[head] -= softmax.sink_weight * delta;
                }
                let dq_at = (q_place(problem, sequence, row) * heads + head) * dim;
                for (key, score) in scores.iter().enumerate() {
                    if score.value == f64::NEG_INFINITY {
                        continue;
                    }
                    let p = softmax.weights[key];
                    let place = kv_place(problem, sequence, key) * kv_heads + kv_head;
                    add_scaled(&mut out.dv[place * value_dim..][..value_dim], kept[key], d_o);
                    let dz = p * (this.keep(row, key) * dot(d_o, this.v(key)) - delta);
                    if let (Some(dbias), Some(bias)) = (&mut out.dbias, &inputs.bias) {
                        dbias[bias_place(bias.shape(), [sequence, head, row, key])] += dz;
                    }
                    let ds =
                        dz * this.softcap.map_or(1.0, |c| 1.0 - (score.raw / c).tanh().powi(2));
                    add_scaled(&mut out.dq[dq_at..][..dim], this.scale * ds, this.k(key));
                    add_scaled(&mut out.dk[place * dim..][..dim], this.scale * ds, this.q(row));
                }
            }
        }
    }
    Ok(out)
}

pub(crate) fn check_d_o(problem: &Problem, d_o: &TensorView<'_>) -> Result<(), Error> {
    let rest = [problem.q_heads(), problem.value_dim()];
    let expected = problem.lengths().q_shape(problem.q_arrangement(), &rest);
    if d_o.shape() == expected.as_slice() {
        return Ok(());
    }
    Err(Error::layout("do", format!("shape {expected:?}"), format!("{:?}", d_o.shape())))
}

/// The row-major position in a bias of the entry that a pair reads; extents of 1 are shared.
pub(crate) fn bias_place(shape: &[usize], pair: [usize; 4]) -> usize {
    let missing = pair.len() - shape.len();
    shape
        .iter()
        .zip(&pair[missing..])
        .fold(0, |at, (&extent, &i)| at * extent + if extent == 1 { 0 } else { i })
}
