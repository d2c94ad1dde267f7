//! The reference against numbers worked out by hand, and against itself under changes that may not matter.
//!
//! The invariant: no expected value here comes from code under test. Scores are chosen as logarithms, so
//! that weights are small fractions.

use attn_core::{
    Arrangement, DType, Inputs, Outputs, PageOrder, Problem, ProblemSpec, TensorView,
    TensorViewMut, View, ViewMut,
};

use super::*;
use crate::case::{Case, Hiding, Scales};
use crate::storage::Placement;

/// One head of dim 1 with q = 1 and scale 1: the keys are the scores.
struct Row {
    spec: ProblemSpec,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Row {
    fn new(rows: usize, scores: &[f64], values: &[f32]) -> Self {
        let mut spec = ProblemSpec::new(DType::F32, 1, 1, 1, &[rows], &[scores.len()]);
        spec.scale = Some(1.0);
        let k = scores.iter().map(|&s| crate::elements::to_f32(s)).collect();
        Self { spec, q: vec![1.0; rows], k, v: values.to_vec() }
    }

    fn run<'a>(&'a self, edit: impl FnOnce(&mut Inputs<'a>)) -> Reference {
        let view = |x| View::contiguous("x", x, &[x.len(), 1, 1]).map(TensorView::F32).unwrap();
        let mut inputs = Inputs::dense(view(&self.q), view(&self.k), view(&self.v));
        edit(&mut inputs);
        forward_f64(&Problem::new(self.spec.clone()).unwrap(), &inputs).unwrap()
    }
}

fn near(got: &[f64], want: &[f64]) {
    let close = |(g, w): (&f64, &f64)| g == w || (g - w).abs() < 1e-6;
    assert!(got.len() == want.len() && got.iter().zip(want).all(close), "{got:?} for {want:?}");
}

const INF: f64 = f64::INFINITY;

#[test]
fn weights_are_those_of_the_definition() {
    // Weights 1 : 2 : 1.
    let r = Row::new(1, &[0.0, 2f64.ln(), 0.0], &[4.0, 8.0, 12.0]).run(|_| {});
    near(&r.o, &[8.0]);
    near(&r.lse, &[4f64.ln()]);
}

#[test]
fn causal_is_aligned_to_the_last_key() {
    let mut row = Row::new(2, &[0.0; 4], &[3.0, 6.0, 9.0, 42.0]);
    row.spec.causal = true;
    let r = row.run(|_| {});
    near(&r.o, &[6.0, 15.0]);
    near(&r.lse, &[3f64.ln(), 4f64.ln()]);
    // More rows than keys: the first two see nothing.
    let mut row = Row::new(4, &[0.0; 2], &[3.0, 6.0]);
    row.spec.causal = true;
    let r = row.run(|_| {});
    near(&r.o, &[0.0, 0.0, 3.0, 4.5]);
    near(&r.lse, &[-INF, -INF, 0.0, 2f64.ln()]);
}

#[test]
fn windows_are_inclusive() {
    let mut row = Row::new(4, &[0.0; 4], &[1.0, 10.0, 100.0, 1000.0]);
    (row.spec.window_left, row.spec.window_right) = (Some(1), Some(0));
    near(&row.run(|_| {}).o, &[1.0, 5.5, 55.0, 550.0]);
    (row.spec.window_left, row.spec.window_right) = (Some(0), Some(1));
    near(&row.run(|_| {}).o, &[5.5, 55.0, 550.0, 1000.0]);
}

#[test]
fn bias_comes_after_the_softcap() {
    // tanh(ln 2) = (4 - 1) / (4 + 1) = 0.6; c = 1 caps ln 2 to 0.6, and the bias brings it to ln 3.
    let mut row = Row::new(1, &[2f64.ln(), 0.0], &[8.0, 4.0]);
    row.spec.softcap = Some(1.0);
    row.spec.bias = true;
    let bias = [crate::elements::to_f32(3f64.ln() - 0.6), 0.0];
    let r = row.run(|i| i.bias = Some(View::contiguous("bias", &bias, &[1, 2]).unwrap()));
    near(&r.o, &[7.0]);
    near(&r.lse, &[4f64.ln()]);
}

#[test]
fn alibi_counts_distance_on_both_sides() {
    // Row 1 of 3 rows over 3 keys sits at key 1; a slope of ln 2 halves per step of distance.
    let mut row = Row::new(3, &[0.0; 3], &[4.0, 8.0, 16.0]);
    row.spec.alibi = true;
    let slope = [std::f32::consts::LN_2];
    let r = row.run(|i| i.alibi = Some(View::contiguous("alibi", &slope, &[1]).unwrap()));
    near(&r.o[1..2], &[(2.0 + 8.0 + 8.0) / 2.0]);
    near(&r.lse[..1], &[1.75f64.ln()]);
}

#[test]
fn sink_joins_the_denominator_only() {
    let mut row = Row::new(1, &[0.0], &[6.0]);
    row.spec.sinks = true;
    // A soft-cap must not touch the sink.
    row.spec.softcap = Some(0.5);
    let sink = [crate::elements::to_f32(2f64.ln())];
    let r = row.run(|i| i.sinks = Some(View::contiguous("sinks", &sink, &[1]).unwrap()));
    near(&r.o, &[2.0]);
    near(&r.lse, &[3f64.ln()]);
}

#[test]
fn sink_is_the_lse_of_a_row_without_keys() {
    let mut row = Row::new(1, &[], &[]);
    near(&row.run(|_| {}).lse, &[-INF]);
    row.spec.sinks = true;
    let sink = [2.5];
    let r = row.run(|i| i.sinks = Some(View::contiguous("sinks", &sink, &[1]).unwrap()));
    near(&r.o, &[0.0]);
    near(&r.lse, &[2.5]);
}

#[test]
fn masks_and_infinite_bias_hide_keys_and_their_nan() {
    let nan = f32::NAN;
    let mut row = Row::new(1, &[0.0, f64::NAN, 0.0], &[2.0, nan, 4.0]);
    row.spec.mask = true;
    let keep = [1u8, 0, 7];
    let r = row.run(|i| i.mask = Some(View::contiguous("mask", &keep, &[1, 3]).unwrap()));
    near(&r.o, &[3.0]);
    let mut row = Row::new(1, &[0.0; 3], &[2.0, nan, 4.0]);
    row.spec.bias = true;
    let bias = [0.0, f32::NEG_INFINITY, 0.0];
    let r = row.run(|i| i.bias = Some(View::contiguous("bias", &bias, &[1, 3]).unwrap()));
    near(&r.o, &[3.0]);
}

#[test]
fn visible_nan_is_not_mistaken_for_no_key() {
    let r = Row::new(1, &[f64::NAN], &[1.0]).run(|_| {});
    assert!(r.o[0].is_nan() && r.lse[0].is_nan());
}

#[test]
fn huge_scores_of_either_sign_stay_finite() {
    for level in [1e5, -1e5] {
        let r = Row::new(1, &[level, level], &[2.0, 4.0]).run(|_| {});
        near(&r.o, &[3.0]);
        near(&r.lse, &[level + 2f64.ln()]);
    }
}

#[test]
fn query_heads_of_a_group_read_their_kv_head() {
    let mut spec = ProblemSpec::new(DType::F32, 4, 2, 1, &[1], &[1]);
    spec.scale = Some(1.0);
    let (q, k, v) = ([1f32; 4], [0f32; 2], [5f32, 7.0]);
    let inputs = Inputs::dense(
        TensorView::F32(View::contiguous("q", &q, &[1, 4, 1]).unwrap()),
        TensorView::F32(View::contiguous("k", &k, &[1, 2, 1]).unwrap()),
        TensorView::F32(View::contiguous("v", &v, &[1, 2, 1]).unwrap()),
    );
    near(&forward_f64(&Problem::new(spec).unwrap(), &inputs).unwrap().o, &[5.0, 5.0, 7.0, 7.0]);
}

#[test]
fn default_scale_is_one_over_the_root_of_head_dim() {
    let spec = ProblemSpec::new(DType::F32, 1, 1, 4, &[1], &[2]);
    let k = [crate::elements::to_f32(3f64.ln()), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    let inputs = |q, v| {
        Inputs::dense(
            TensorView::F32(View::contiguous("q", q, &[1, 1, 4]).unwrap()),
            TensorView::F32(View::contiguous("k", &k, &[2, 1, 4]).unwrap()),
            TensorView::F32(View::contiguous("v", v, &[2, 1, 4]).unwrap()),
        )
    };
    let r = forward_f64(
        &Problem::new(spec).unwrap(),
        &inputs(&[2.0, 0.0, 0.0, 0.0], &[4.0, 0.0, 0.0, 0.0, 8.0, 0.0, 0.0, 0.0]),
    );
    near(&r.unwrap().o[..1], &[5.0]);
}

fn reference(case: &Case) -> Reference {
    case.build().unwrap().expected().unwrap().reference.clone()
}

/// Equal names give equal values, so only the storage differs.
fn stored_case() -> Case {
    Case::new("stored", DType::F32, (4, 2), 8, &[5, 0, 3], &[7, 2, 9]).causal().sinks()
}

#[test]
fn storage_does_not_change_the_result() {
    let want = reference(&stored_case());
    for placement in [
        Placement::Gaps,
        Placement::HeadsFirst,
        Placement::Reversed,
        Placement::InnermostTwo,
        Placement::InterleavedKv,
    ] {
        assert_eq!(reference(&stored_case().kv_at(placement)), want, "k, v {placement:?}");
        assert_eq!(reference(&stored_case().q_at(placement)), want, "q {placement:?}");
    }
    for order in [PageOrder::Nhd, PageOrder::Hnd] {
        for size in [1, 2, 16] {
            assert_eq!(reference(&stored_case().paged(order, size)), want, "{order} {size}");
        }
    }
}

#[test]
fn padding_does_not_change_the_rows() {
    let (packed, padded) = (reference(&stored_case()), reference(&stored_case().padded()));
    let width = 4 * 8;
    assert_eq!(padded.o.len(), 3 * 5 * width);
    assert_eq!(padded.o[..5 * width], packed.o[..5 * width]);
    assert_eq!(padded.o[10 * width..13 * width], packed.o[5 * width..]);
    assert!(padded.o[5 * width..10 * width].iter().all(|&x| x == 0.0));
    assert!(padded.lse[13 * 4..].iter().all(|&x| x == -INF));
}

#[test]
fn fp8_values_are_stored_times_scale() {
    // A scale moves no bit of the stored value it multiplies, so per-head scales of 1 are no scales.
    let case =
        Case::new("fp8", DType::F32, (2, 2), 8, &[3], &[5]).fp8(DType::F8E4M3, Scales::PerHead);
    let data = case.build().unwrap();
    let scaled = data.inputs().unwrap();
    let plain = Inputs { k_scale: None, v_scale: None, ..scaled.clone() };
    let one = [1f32];
    let ones = Inputs {
        k_scale: Some(View::contiguous("k_scale", &one, &[]).unwrap()),
        v_scale: Some(View::contiguous("v_scale", &one, &[1]).unwrap()),
        ..scaled.clone()
    };
    let run = |inputs| forward_f64(data.problem(), inputs).unwrap();
    assert_eq!(run(&plain), run(&ones));
    assert_ne!(run(&plain), run(&scaled));
    // Doubling the scale of values doubles the output.
    let two = [2f32];
    let twice =
        Inputs { v_scale: Some(View::contiguous("v_scale", &two, &[]).unwrap()), ..plain.clone() };
    let (once, twice) = (run(&plain), run(&twice));
    near(&twice.o, &once.o.iter().map(|x| 2.0 * x).collect::<Vec<_>>());
}

#[test]
fn sampled_rows_are_those_of_the_whole() {
    let data = stored_case().bias("bhqk", Hiding::Some).build().unwrap();
    let whole = &data.expected().unwrap().reference;
    let inputs = data.inputs().unwrap();
    let some = forward_rows(data.problem(), &inputs, &[(2, 1), (0, 4), (2, 0)]).unwrap();
    for (n, at) in [6, 4, 5].into_iter().enumerate() {
        assert_eq!(some.o[n * 32..][..32], whole.o[at * 32..][..32]);
        assert_eq!(some.lse[n * 4..][..4], whole.lse[at * 4..][..4]);
    }
    for outside in [(3, 0), (1, 0), (0, 5)] {
        assert!(forward_rows(data.problem(), &inputs, &[outside]).is_err());
    }
}

#[test]
fn failed_forward_writes_nothing() {
    let data = stored_case().build().unwrap();
    let inputs = data.inputs().unwrap();
    let (mut o, mut lse) = (vec![7f32; 8 * 32], vec![7f32; 8 * 4]);
    let mut run = |problem: &Problem, inputs: &Inputs<'_>| {
        let outputs = Outputs {
            o: TensorViewMut::F32(ViewMut::contiguous("o", &mut o, &[8, 4, 8]).unwrap()),
            lse: Some(ViewMut::contiguous("lse", &mut lse, &[8, 4]).unwrap()),
        };
        let failed = forward(problem, inputs, outputs).is_err();
        failed && o.iter().chain(&lse).all(|&x| x == 7.0)
    };
    let mut spec = data.problem().spec().clone();
    spec.options.disabled_kernels = vec![NAME.to_owned()];
    assert!(run(&Problem::new(spec).unwrap(), &inputs));
    assert!(run(data.problem(), &Inputs { sinks: None, ..inputs.clone() }));
    let mut spec = data.problem().spec().clone();
    spec.q_arrangement = Arrangement::Padded;
    assert!(run(&Problem::new(spec).unwrap(), &inputs));
    assert!(!run(data.problem(), &inputs));
}

#[test]
fn lse_may_be_left_out() {
    let data = stored_case().build().unwrap();
    let mut o = vec![f32::NAN; 8 * 32];
    let view = ViewMut::contiguous("o", &mut o, &[8, 4, 8]).unwrap();
    let outputs = Outputs { o: TensorViewMut::F32(view), lse: None };
    forward(data.problem(), &data.inputs().unwrap(), outputs).unwrap();
    assert!(o.iter().all(|x| x.is_finite()));
}
