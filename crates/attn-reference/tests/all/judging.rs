//! The judge refuses engines with the classic faults, and says which case and element showed it.
//!
//! The invariant: each fault is the naive engine on a call with one thing wrong, so nothing but the fault
//! can be what is refused.

use std::collections::BTreeSet;

use attn_core::{DType, Error, Gradients, Inputs, Outputs, Problem, ProblemSpec, TensorViewMut};
use attn_reference::{
    Case, CaseData, Failure, ForwardVerdict, Placement, corpus, judge_backward, judge_forward,
    judge_rows, naive,
};

/// The naive engine on an edited call.
fn faulty(
    case: &CaseData,
    edit: impl Fn(&mut ProblemSpec, &mut Inputs<'_>),
) -> Result<ForwardVerdict, Failure<Error>> {
    judge_forward(case, |problem, inputs, outputs| {
        let (mut spec, mut inputs) = (problem.spec().clone(), inputs.clone());
        edit(&mut spec, &mut inputs);
        naive::forward(&Problem::new(spec)?, &inputs, outputs)
    })
}

/// One thing that an engine could get wrong.
struct Fault {
    name: &'static str,
    /// Which cases it touches.
    touches: fn(&ProblemSpec) -> bool,
    edit: fn(&mut ProblemSpec, &mut Inputs<'_>),
    /// Touched cases on which the fault changes no result.
    harmless: &'static [&'static str],
}

const FAULTS: [Fault; 11] = [
    Fault {
        name: "causal ignored",
        touches: |s| s.causal,
        edit: |s, _| s.causal = false,
        // The last row sees every key anyway.
        harmless: &["causal/1x65", "causal/window_decode", "regression/window_first_tile_lost"],
    },
    Fault {
        name: "left window one short",
        touches: |s| s.window_left.is_some_and(|left| left > 0),
        edit: |s, _| s.window_left = s.window_left.map(|left| left - 1),
        harmless: &["causal/window_huge", "causal/window_i32_max"],
    },
    Fault {
        name: "right window ignored",
        touches: |s| s.window_right.is_some() && !s.causal,
        edit: |s, _| s.window_right = None,
        harmless: &["causal/window_huge"],
    },
    Fault {
        name: "soft-cap ignored",
        touches: |s| s.softcap.is_some(),
        edit: |s, _| s.softcap = None,
        harmless: &[],
    },
    Fault {
        name: "bias ignored",
        touches: |s| s.bias,
        edit: |s, i| (s.bias, i.bias) = (false, None),
        harmless: &[],
    },
    Fault {
        name: "slopes ignored",
        touches: |s| s.alibi,
        edit: |s, i| (s.alibi, i.alibi) = (false, None),
        harmless: &[],
    },
    Fault {
        name: "sinks ignored",
        touches: |s| s.sinks,
        edit: |s, i| (s.sinks, i.sinks) = (false, None),
        harmless: &["scores/sinks_hidden", "scores/sinks_negligible"],
    },
    Fault {
        name: "mask ignored",
        touches: |s| s.mask,
        edit: |s, i| (s.mask, i.mask) = (false, None),
        harmless: &[],
    },
    Fault {
        name: "block mask ignored",
        touches: |s| s.block_mask.is_some(),
        edit: |s, i| (s.block_mask, i.block_mask) = (None, None),
        harmless: &[],
    },
    Fault {
        name: "scale of queries ignored",
        touches: |s| s.q_dtype.is_fp8(),
        edit: |_, i| i.q_scale = None,
        harmless: &["fp8/q_none_k_none", "fp8/q_none_k_scalar"],
    },
    Fault {
        name: "scale of keys ignored",
        touches: |s| s.kv_dtype.is_fp8(),
        edit: |_, i| i.k_scale = None,
        harmless: &[
            "fp8/q_none_k_none",
            "fp8/q_per_head_k_none",
            "paged/decode_e4m3_unscaled",
            "paged/decode_e5m2_unscaled",
            "paged/dense_e4m3_unscaled",
            "paged/dense_e5m2_unscaled",
        ],
    },
];

#[test]
fn judge_refuses_every_ignored_option() {
    let cases: Vec<(Case, CaseData)> = corpus()
        .into_iter()
        .map(|case| {
            let data = case.build().unwrap();
            (case, data)
        })
        .collect();
    for Fault { name, touches, edit, harmless } in FAULTS {
        let touched = || cases.iter().filter(|(case, _)| touches(&case.spec));
        let passed: BTreeSet<&str> = touched()
            .filter(|(_, data)| faulty(data, edit).is_ok())
            .map(|(case, _)| case.name.as_str())
            .collect();
        assert_eq!(passed, harmless.iter().copied().collect(), "{name}");
        assert!(touched().count() > passed.len() + 3, "{name}: too few cases show it");
    }
}

#[test]
fn judge_refuses_one_percent_of_scale() {
    let case = Case::new("scale", DType::BF16, (2, 1), 64, &[20], &[65]).build().unwrap();
    let nudge = |s: &mut ProblemSpec, _: &mut Inputs<'_>| s.scale = Some(0.125 * 1.01);
    // The weights of a bf16 call are this coarse, but its LSE is not.
    assert!(matches!(faulty(&case, nudge), Err(Failure::Wrong { tensor: "lse" | "o", .. })));
}

fn plain() -> CaseData {
    Case::new("plain", DType::F32, (2, 1), 8, &[3, 1], &[5, 4]).padded().build().unwrap()
}

#[test]
fn judge_refuses_what_was_not_written() {
    let nothing = |_: &Problem, _: &Inputs<'_>, _: Outputs<'_>| Ok::<(), Error>(());
    let err = judge_forward(&plain(), nothing).unwrap_err();
    assert!(matches!(&err, Failure::Wrong { tensor: "o", .. }), "{err}");
    // Padding rows count: only sequence 0 has three rows.
    let rows_only = |problem: &Problem, inputs: &Inputs<'_>, mut outputs: Outputs<'_>| {
        let reborrowed = Outputs { o: outputs.o.reborrow(), lse: None };
        naive::forward(problem, inputs, reborrowed)?;
        let lse = naive::forward_f64(problem, inputs)?.lse;
        for (n, &lse) in lse.iter().enumerate().filter(|(_, lse)| lse.is_finite()) {
            let view = outputs.lse.as_mut().unwrap();
            #[expect(clippy::cast_possible_truncation, reason = "the rounding is meant")]
            view.set(&[n / 6, n / 2 % 3, n % 2], lse as f32);
        }
        Ok::<(), Error>(())
    };
    let err = judge_forward(&plain(), rows_only).unwrap_err().to_string();
    assert!(err.contains("lse is wrong") && err.contains("first at [1, 1, 0]: got NaN"), "{err}");
}

#[test]
fn judge_refuses_a_coarser_output() {
    let coarse = |problem: &Problem, inputs: &Inputs<'_>, mut outputs: Outputs<'_>| {
        naive::forward(problem, inputs, Outputs { o: outputs.o.reborrow(), lse: outputs.lse })?;
        let TensorViewMut::F32(o) = &mut outputs.o else { panic!("f32") };
        let kept = o.get(&[0, 0, 0, 0]).unwrap();
        o.set(&[0, 0, 0, 0], DType::BF16.round(kept));
        Ok::<(), Error>(())
    };
    let err = judge_forward(&plain(), coarse).unwrap_err().to_string();
    assert!(
        err.contains("plain: o is wrong") && err.contains("1 bad, first at [0, 0, 0, 0]"),
        "{err}"
    );
}

#[test]
fn judge_keeps_the_engines_own_error() {
    let refuses = |_: &Problem, _: &Inputs<'_>, _: Outputs<'_>| Err("not today");
    match judge_forward(&plain(), refuses) {
        Err(Failure::Engine { case, source }) => {
            assert_eq!((case.as_str(), source), ("plain", "not today"));
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn judge_refuses_gradients_with_a_fault() {
    let case =
        Case::new("gradients", DType::F32, (4, 2), 8, &[6], &[9]).causal().sinks().build().unwrap();
    let run = |edit: fn(&mut ProblemSpec)| {
        judge_backward(&case, |problem, inputs, results, gradients| {
            let mut spec = problem.spec().clone();
            edit(&mut spec);
            naive::backward(&Problem::new(spec)?, inputs, results, gradients)
        })
    };
    assert!(run(|_| {}).is_ok());
    let err = run(|s| s.causal = false).unwrap_err();
    assert!(matches!(err, Failure::Wrong { tensor: "dq", .. }), "{err}");
    let unwritten = judge_backward(&case, |problem, inputs, results, gradients: Gradients<'_>| {
        let mut spec = problem.spec().clone();
        spec.want_dsinks = false;
        let gradients = Gradients { dsinks: None, ..gradients };
        naive::backward(&Problem::new(spec)?, inputs, results, gradients)
    });
    assert!(matches!(unwritten, Err(Failure::Wrong { tensor: "dsinks", .. })), "{unwritten:?}");
}

#[test]
fn judge_refuses_a_backward_of_a_cache() {
    let case = Case::new("cache", DType::F32, (2, 1), 8, &[1], &[9]);
    let case = case.paged(attn_core::PageOrder::Nhd, 4).build().unwrap();
    assert!(case.backward_problem().is_none());
    assert!(matches!(judge_backward(&case, naive::backward), Err(Failure::Case { .. })));
}

#[test]
fn sampled_rows_are_judged_like_whole_outputs() {
    let case = Case::new("long", DType::F16, (4, 2), 32, &[40, 3], &[300, 9]).causal();
    let case = case.outputs_at(Placement::HeadsFirst).build().unwrap();
    let (problem, inputs) = (case.problem(), case.inputs().unwrap());
    let shape = [43, 4, 32];
    let (mut o, mut lse) = (vec![half::f16::NAN; 43 * 4 * 32], vec![f32::NAN; 43 * 4]);
    naive::forward(
        problem,
        &inputs,
        Outputs {
            o: TensorViewMut::F16(attn_core::ViewMut::contiguous("o", &mut o, &shape).unwrap()),
            lse: Some(attn_core::ViewMut::contiguous("lse", &mut lse, &shape[..2]).unwrap()),
        },
    )
    .unwrap();
    o[(41 * 4 + 2) * 32 + 7] = half::f16::from_f32(9.0);
    let judged = |rows: &[(usize, usize)]| {
        let o = attn_core::View::contiguous("o", &o, &shape).unwrap();
        let lse = attn_core::View::contiguous("lse", &lse, &shape[..2]).unwrap();
        judge_rows(problem, &inputs, rows, &attn_core::TensorView::F16(o), &lse).unwrap()
    };
    let good = judged(&[(0, 0), (0, 39), (1, 2)]);
    assert!(good.o.is_within() && good.lse.is_within(), "{good}");
    let bad = judged(&[(0, 0), (1, 1)]).o;
    assert_eq!(bad.first_bad.map(|m| bad.index_of(m.index)), Some(vec![1, 2, 7]));
}
