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
