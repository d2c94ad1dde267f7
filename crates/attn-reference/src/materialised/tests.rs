//! The baseline rounds where its definition says, and nowhere else.
//!
//! The invariant: expected values are worked out from the definition by hand, or are properties (an error
//! that grows with the coarseness of the type).

use attn_core::{DType, Inputs, Problem, ProblemSpec, TensorView, View};
use half::bf16;

use super::*;
use crate::case::{Case, Scales};
use crate::naive;

#[test]
fn weights_are_rounded_before_the_values() {
    // Two keys, weights 1 and w = exp(-d) with w between bf16 neighbours; values 0 and 1.
    let mut spec = ProblemSpec::new(DType::BF16, 1, 1, 1, &[1], &[2]);
    spec.scale = Some(1.0);
    let problem = Problem::new(spec).unwrap();
    let one = bf16::from_f32(1.0);
    let (q, k) = ([one], [bf16::ZERO, bf16::from_f32(-0.4)]);
    let v = [bf16::ZERO, one];
    let view = |x, len| TensorView::BF16(View::contiguous("x", x, &[len, 1, 1]).unwrap());
    let inputs = Inputs::dense(view(&q, 1), view(&k, 2), view(&v, 2));
    let w = k[1].to_f32().exp();
    let rounded = bf16::from_f32(w).to_f32();
    assert_ne!(w, rounded);
    let got = forward(&problem, &inputs, Evaluation::Sequential).unwrap();
    let want = bf16::from_f32(rounded / (1.0 + w)).to_f32();
    assert_eq!(got.o, [f64::from(want)]);
    let got = forward(&problem, &inputs, Evaluation::Reversed).unwrap();
    let want = bf16::from_f32(w / (1.0 + w)).to_f32();
    assert_eq!(got.o, [f64::from(want)]);
}

#[test]
fn error_grows_with_the_coarseness_of_the_type() {
    let error = |dtype| {
        let case = Case::new("coarse", dtype, (2, 1), 32, &[20], &[50]);
        let data = case.build().unwrap();
        (data.expected().unwrap().baseline, data.expected_gradients().unwrap().baseline)
    };
    let (f32, f16, bf16) = (error(DType::F32), error(DType::F16), error(DType::BF16));
    assert!(f32.0.o > 0.0 && f32.0.o < 1e-6 && f32.0.lse < 2e-6, "{:?}", f32.0);
    assert!(f16.0.o > 50.0 * f32.0.o && bf16.0.o > 3.0 * f16.0.o);
    let fp8 = Case::new("coarse", DType::F8E4M3, (2, 1), 32, &[20], &[50]).build().unwrap();
    let fp8 = fp8.expected().unwrap().baseline;
    assert!(fp8.o > 3.0 * bf16.0.o && fp8.o < 0.1, "{fp8:?}");
    assert!(fp8.lse > f32.0.lse && fp8.lse < 2e-3, "{fp8:?}");
    assert!(bf16.0.lse < 1e-5, "scores and LSE stay in f32 whatever the type");
    for pick in [|e: &BackwardError| e.dq, |e: &BackwardError| e.dk, |e: &BackwardError| e.dv] {
        let (a, b, c) = (pick(&f32.1), pick(&f16.1), pick(&bf16.1));
        assert!(a > 0.0 && a < 1e-5 && b > 50.0 * a && c > 3.0 * b, "{a} {b} {c}");
    }
}

#[test]
fn fp8_keys_are_dequantised_to_the_type_of_the_queries() {
    // 0.1 as a scale: the product has more bits than bf16, so the LSE shows the rounding of keys.
    let mut spec = ProblemSpec::new(DType::BF16, 1, 1, 1, &[1], &[1]);
    (spec.kv_dtype, spec.scale) = (DType::F8E4M3, Some(1.0));
    let problem = Problem::new(spec).unwrap();
    let (q, kv) = ([bf16::from_f32(1.0)], [attn_core::F8E4M3(0x39)]);
    let scale = [0.1f32];
    let inputs = Inputs {
        k_scale: Some(View::contiguous("k_scale", &scale, &[]).unwrap()),
        ..Inputs::dense(
            TensorView::BF16(View::contiguous("q", &q, &[1, 1, 1]).unwrap()),
            TensorView::F8E4M3(View::contiguous("k", &kv, &[1, 1, 1]).unwrap()),
            TensorView::F8E4M3(View::contiguous("v", &kv, &[1, 1, 1]).unwrap()),
        )
    };
    let product = attn_core::Element::to_f32(kv[0]) * scale[0];
    let want = bf16::from_f32(product).to_f32();
    assert_ne!(product, want);
    for evaluation in [Evaluation::Sequential, Evaluation::Reversed] {
        let got = forward(&problem, &inputs, evaluation).unwrap();
        assert_eq!(got.lse, [f64::from(want)]);
    }
}

/// A call in fp8 of one head, keys `k` and values `v` of one element, whose query and scale are 1.
fn fp8_row(
    keys: &[f32],
    values: &[f32],
    sink: Option<f32>,
    evaluation: Evaluation,
) -> (f64, f64, f64) {
    let e4m3 = |values: &[f32]| -> Vec<attn_core::F8E4M3> {
        values.iter().map(|&x| attn_core::Element::from_f32(x)).collect()
    };
    let mut spec = ProblemSpec::new(DType::F8E4M3, 1, 1, 1, &[1], &[keys.len()]);
    (spec.scale, spec.sinks) = (Some(1.0), sink.is_some());
    let problem = Problem::new(spec).unwrap();
    let (q, k, v, sinks) = (e4m3(&[1.0]), e4m3(keys), e4m3(values), sink.into_iter());
    let sinks: Vec<f32> = sinks.collect();
    let view = |x: &'static str, data| View::contiguous(x, data, &[keys.len(), 1, 1]).unwrap();
    let inputs = Inputs {
        sinks: sink.map(|_| View::contiguous("sinks", &sinks, &[1]).unwrap()),
        ..Inputs::dense(
            TensorView::F8E4M3(View::contiguous("q", &q, &[1, 1, 1]).unwrap()),
            TensorView::F8E4M3(view("k", &k)),
            TensorView::F8E4M3(view("v", &v)),
        )
    };
    let got = forward(&problem, &inputs, evaluation).unwrap();
    let exact = naive::forward_f64(&problem, &inputs).unwrap();
    (got.o[0], got.lse[0], exact.o[0])
}

#[test]
fn fp8_weights_are_rounded_relative_to_the_largest_key() {
    // Weights 1 and w = exp(-0.40625); E4M3 has 0.625 and 0.6875 around w = 0.6662.
    let w = (-0.40625f32).exp();
    for evaluation in [Evaluation::Sequential, Evaluation::Reversed, Evaluation::Blocks] {
        let (o, lse, _) = fp8_row(&[0.0, -0.40625], &[0.0, 1.0], None, evaluation);
        assert_eq!(o, f64::from(bf16::from_f32(0.6875 / (1.0 + w)).to_f32()), "{evaluation:?}");
        assert!((lse - f64::from(1.0 + w).ln()).abs() < 1e-6, "of weights that are not rounded");
    }
    // A sink of 20 makes the weights about 2e-9, where E4M3 has nothing: they are rounded as before.
    let (o, _, exact) = fp8_row(&[0.0, -0.40625], &[0.0, 1.0], Some(20.0), Evaluation::Lanes);
    assert!((o / exact - 0.6875 / f64::from(w)).abs() < 5e-3, "{o} {exact}");
}

#[test]
fn fp8_weights_survive_many_keys() {
    // A normalised weight of 1/4096 is 0 in E4M3.
    for evaluation in Evaluation::ALL {
        let (o, _, exact) = fp8_row(&[0.5; 4096], &[1.5; 4096], None, evaluation);
        assert!((o - exact).abs() < 0.03 * exact && exact == 1.5, "{evaluation:?}: {o} {exact}");
    }
}

#[test]
fn fp8_units_keep_fourteen_bits_of_the_largest_term() {
    let unit = Unit::of(DType::F8E4M3);
    let tiny = 2f64.powi(-13);
    assert_eq!(unit.add(1.0, [tiny, tiny].into_iter()), 1.0 + 2.0 * 2f32.powi(-13));
    assert_eq!(unit.add(1.0, [tiny / 2.0, -tiny * 0.9].into_iter()), 1.0);
    assert_eq!(unit.add(0.0, [0.0, 0.0].into_iter()), 0.0);
    assert!(unit.add(f32::NAN, [1.0].into_iter()).is_nan());
    // 16-bit products are added exactly.
    assert_eq!(Unit::of(DType::BF16).add(1.0, [tiny / 2.0; 2].into_iter()), 1.0 + 2f32.powi(-13));
}

#[test]
fn fp8_queries_are_scaled_and_not_rounded() {
    let mut spec = ProblemSpec::new(DType::F8E4M3, 1, 1, 1, &[1], &[1]);
    spec.scale = Some(1.0);
    let problem = Problem::new(spec).unwrap();
    let (one, scale) = ([attn_core::F8E4M3(0x39)], [0.1f32]);
    let view = || TensorView::F8E4M3(View::contiguous("x", &one, &[1, 1, 1]).unwrap());
    let scale = || Some(View::contiguous("scale", &scale, &[]).unwrap());
    let inputs = Inputs {
        q_scale: scale(),
        k_scale: scale(),
        v_scale: scale(),
        ..Inputs::dense(view(), view(), view())
    };
    let value = attn_core::Element::to_f32(one[0]) * 0.1;
    for evaluation in [Evaluation::Sequential, Evaluation::Reversed, Evaluation::Lanes] {
        let got = forward(&problem, &inputs, evaluation).unwrap();
        assert!((got.lse[0] - f64::from(value * value)).abs() < 1e-8, "{evaluation:?}");
        assert_eq!(got.o, [f64::from(bf16::from_f32(value).to_f32())], "{evaluation:?}");
    }
}

#[test]
fn sampled_rows_are_those_of_the_whole() {
    let case = Case::new("rows", DType::F16, (4, 2), 16, &[5, 3], &[9, 20]).causal();
    let data = case.fp8(DType::F8E5M2, Scales::PerHead).build().unwrap();
    let inputs = data.inputs().unwrap();
    let (rows, width) = ([(1, 2), (0, 0)], 4 * 16);
    for evaluation in Evaluation::ALL {
        let whole = forward(data.problem(), &inputs, evaluation).unwrap();
        let some = forward_rows(data.problem(), &inputs, &rows, evaluation).unwrap();
        assert_eq!(some.o[..width], whole.o[7 * width..][..width]);
        assert_eq!(some.o[width..], whole.o[..width]);
    }
    let reference = naive::forward_rows(data.problem(), &inputs, &rows).unwrap();
    let error = forward_rows_error(data.problem(), &inputs, &rows, &reference).unwrap();
    assert!(error.o > 0.0 && error.o < 0.2, "{error:?}");
}

#[test]
fn rows_without_keys_have_no_error() {
    let case = Case::new("nothing", DType::BF16, (2, 1), 8, &[4], &[0]);
    let data = case.build().unwrap();
    assert_eq!(data.expected().unwrap().baseline, ForwardError { o: 0.0, lse: 0.0 });
    let gradients = data.expected_gradients().unwrap().baseline;
    assert_eq!((gradients.dq, gradients.dk, gradients.dv), (0.0, 0.0, 0.0));
}

#[test]
fn fp8_unit_keeps_14_bits_of_terms_and_of_sums() {
    let unit = Unit::of(DType::F8E4M3);
    let add = |sum: f32, terms: &[f64]| unit.add(sum, terms.iter().copied());
    // 2^13 + 1 has 14 bits, 2^14 + 1 has 15.
    assert_eq!((add(8192.0, &[1.0]), add(16384.0, &[1.0])), (8193.0, 16384.0));
    // Each term has its bits, and their sum has one too many.
    assert_eq!(add(0.0, &[8193.0, 8192.0]), 16384.0);
    // Towards zero on either side.
    assert_eq!(add(-16384.0, &[-1.5, 0.5]), -16384.0);
    assert_eq!(add(0.0, &[448.0, -448.0]), 0.0);
    assert!(add(f32::NAN, &[1.0]).is_nan());
    // Types of 16 bits keep all that an f32 does.
    let exact = Unit::of(DType::BF16).add(16384.0, [1.0].into_iter());
    assert_eq!(exact, 16385.0);
}
