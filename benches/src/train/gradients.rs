//! The check before training: the engine's gradients against the f64 reference's.
//!
//! The invariant: the attention's own gradients meet the error rule of every engine, in the type that it computes in. Gradients of
//! weights are sums over what the attention gave, in f32 for every contestant: they may be twice as far from a layer on the
//! reference's attention as a materialised layer's are, of all tensors the worst, and one rounding. The materialised layer
//! rounds where the type does: in 16 bits it is the worst of the rule's own evaluations. The reference starts from what the
//! type leaves of the data, so that a loss which no engine can help grants none of them anything.

use std::io::Write;

use attn_core::{DType, ErrorRule, Pass};
use attn_reference::compare::{judge, largest_error, magnitude};
use attn_reference::random::Random;
use attn_reference::{Comparison, materialised, naive};

use super::TrainError;
use super::attention::{Attention, Data, DataGradients, Values};
use super::baseline::Baseline;
use super::layer::Layer;
use super::materialised::Materialised;
use super::network::{Batch, Parameters, step};
use super::reference::Reference;

/// Checks one step from these weights, and says how close it came.
pub(super) fn check(
    out: &mut impl Write,
    layer: &Layer,
    parameters: &Parameters,
    attention: &mut dyn Attention,
    stream: &[u64; 2],
    batch: &Batch,
) -> Result<(), TrainError> {
    for (tensor, comparison) in attention_errors(layer, attention, stream)? {
        writeln!(out, "{tensor}: {comparison}")?;
        if !comparison.is_within() {
            return Err(TrainError::Gradient {
                tensor,
                limit: comparison.limit,
                got: comparison.worst_abs,
            });
        }
    }
    let of = |attention: &mut dyn Attention| {
        step(layer, parameters, attention, stream, batch).map(|(_, gradients)| gradients)
    };
    let mut want = of(&mut Reference::new(&layer.shape)?)?;
    let mut got = of(attention)?;
    let (tensor, worst) = furthest(&mut got, &mut want);
    let mut other = 0f64;
    for mut baseline in baselines(layer)? {
        let (_, error) = furthest(&mut of(&mut *baseline)?, &mut want);
        other = other.max(error);
    }
    let limit = 2.0 * other + f64::from(f32::EPSILON);
    writeln!(
        out,
        "weights: {} on {} {worst:.2e} of the largest gradient from the reference ({tensor}), materialised {other:.2e}",
        attention.name(),
        attention.engine(),
    )?;
    // Written so that NaN fails.
    if worst <= limit { Ok(()) } else { Err(TrainError::Gradient { tensor, limit, got: worst }) }
}

/// What the attention is held against, in the type that it computes in.
fn baselines(layer: &Layer) -> Result<Vec<Box<dyn Attention>>, TrainError> {
    let shape = &layer.shape;
    if shape.dtype == DType::F32 {
        return Ok(vec![Box::new(Materialised::new(shape)?)]);
    }
    let all = Baseline::all(shape)?.into_iter();
    Ok(all.map(|one| Box::new(one) as Box<dyn Attention>).collect())
}

/// The attention's gradients on normal data of its type, judged.
fn attention_errors(
    layer: &Layer,
    attention: &mut dyn Attention,
    stream: &[u64; 2],
) -> Result<[(&'static str, Comparison); 3], TrainError> {
    let shape = &layer.shape;
    let mut random = Random::new(stream[0] ^ 0xA77);
    let mut normal = |width: usize| -> Vec<f32> {
        (0..shape.tokens() * width).map(|_| shape.dtype.round(random.normal())).collect()
    };
    let (q, d_o) = (normal(shape.width()), normal(shape.width()));
    let (k, v) = (normal(shape.kv_width()), normal(shape.kv_width()));
    let slopes = shape.slopes();
    let data = Data { q: &q, k: &k, v: &v, slopes: &slopes, stream };
    let mut o = vec![0.0; q.len()];
    let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
    attention.forward(&data, &mut o)?;
    let to = DataGradients { dq: &mut dq, dk: &mut dk, dv: &mut dv };
    attention.backward(&data, &o, &d_o, to)?;
    let problem = shape.problem(Pass::Backward)?;
    let (data, d_o) = (data.rounded(&problem), Values::new(&d_o, &problem));
    let (inputs, d_o) = (data.inputs(&problem)?, d_o.rows("do", shape.heads, &problem)?);
    let want = naive::backward_f64(&problem, &inputs, &d_o)?;
    let baseline = materialised::backward_error(&problem, &inputs, &d_o, &want)?;
    let rule = ErrorRule::new(problem.out_dtype());
    let one = |got: &[f32], want: &[f64], baseline| judge(rule, &wide(got), want, baseline);
    Ok([
        ("dq", one(&dq, &want.dq, baseline.dq)),
        ("dk", one(&dk, &want.dk, baseline.dk)),
        ("dv", one(&dv, &want.dv, baseline.dv)),
    ])
}

/// The tensor whose gradient is furthest from what is wanted, relative to the largest element of it.
fn furthest(got: &mut Parameters, want: &mut Parameters) -> (&'static str, f64) {
    let mut worst = ("none", 0.0);
    for ((name, got), (_, want)) in got.all_mut().into_iter().zip(want.all_mut()) {
        let want = wide(want);
        let error = largest_error(&wide(got), &want) / magnitude(&want);
        // A NaN is further than anything.
        if error > worst.1 || error.is_nan() {
            worst = (name, error);
        }
    }
    worst
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| f64::from(x)).collect()
}
