//! The reference's gradients against finite differences of the reference's forward.
//!
//! The invariant: every element of every gradient is checked, for every option. Inputs are multiples of 1/64
//! and steps are powers of two, so that a perturbed input is exact in f32; two steps are extrapolated
//! (Richardson), which leaves an error of the fourth order in a step of 1/256.

use attn_core::{
    Arrangement, BlockSizes, DType, Dropout, Inputs, KvStorage, Pass, Problem, ProblemSpec,
    TensorView, View,
};
use attn_reference::naive::{backward_f64, forward_f64};
use attn_reference::random::Random;

/// A call whose tensors can be perturbed.
struct Call {
    spec: ProblemSpec,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    d_o: Vec<f32>,
    sinks: Vec<f32>,
    alibi: Vec<f32>,
    bias: Vec<f32>,
    bias_shape: Vec<usize>,
    mask: Vec<u8>,
    blocks: Vec<u8>,
    dropout: [u64; 2],
}

/// One of a call's tensors.
type Field = fn(&mut Call) -> &mut Vec<f32>;

impl Call {
    fn new(edit: impl FnOnce(&mut ProblemSpec), bias_shape: &[usize]) -> Self {
        let mut spec = ProblemSpec::new(DType::F32, 4, 2, 3, &[3, 2], &[4, 3]);
        (spec.value_dim, spec.pass) = (2, Pass::Backward);
        edit(&mut spec);
        let problem = Problem::new(spec.clone()).unwrap();
        let l = problem.lengths();
        let KvStorage::Dense(kv_at) = *problem.kv() else { panic!("dense") };
        let mut random = Random::new(11);
        // Normal values on a grid of 1/64.
        let mut grid = |shape: &[usize]| -> Vec<f32> {
            (0..shape.iter().product()).map(|_| (random.normal() * 64.0).round() / 64.0).collect()
        };
        let q_at = problem.q_arrangement();
        let (q, d_o) = (grid(&l.q_shape(q_at, &[4, 3])), grid(&l.q_shape(q_at, &[4, 2])));
        let (k, v) = (grid(&l.kv_shape(kv_at, &[2, 3])), grid(&l.kv_shape(kv_at, &[2, 2])));
        let (sinks, alibi, mut bias) = (grid(&[4]), grid(&[4]), grid(bias_shape));
        if let Some(hidden) = bias.iter_mut().step_by(5).nth(1) {
            *hidden = f32::NEG_INFINITY;
        }
        let mask = (0..12).map(|n| u8::from(n % 5 != 2)).collect();
        let blocks = vec![1, 0, 1, 1];
        let (bias_shape, dropout) = (bias_shape.to_vec(), [3, 8]);
        Self { spec, q, k, v, d_o, sinks, alibi, bias, bias_shape, mask, blocks, dropout }
    }

    fn problem(&self) -> Problem {
        Problem::new(self.spec.clone()).unwrap()
    }

    fn with<R>(&self, body: impl FnOnce(&Problem, &Inputs<'_>, &TensorView<'_>) -> R) -> R {
        let problem = self.problem();
        let l = problem.lengths();
        let KvStorage::Dense(kv_at) = *problem.kv() else { panic!("dense") };
        let q_at = problem.q_arrangement();
        let view = |x, shape: &[usize]| TensorView::F32(View::contiguous("x", x, shape).unwrap());
        let mut inputs = Inputs::dense(
            view(&self.q, &l.q_shape(q_at, &[4, 3])),
            view(&self.k, &l.kv_shape(kv_at, &[2, 3])),
            view(&self.v, &l.kv_shape(kv_at, &[2, 2])),
        );
        let per_head = |x| Some(View::contiguous("x", x, &[4]).unwrap());
        if problem.has_sinks() {
            inputs.sinks = per_head(&self.sinks);
        }
        if problem.has_alibi() {
            inputs.alibi = per_head(&self.alibi);
        }
        if problem.has_bias() {
            inputs.bias = Some(View::contiguous("bias", &self.bias, &self.bias_shape).unwrap());
        }
        if problem.has_mask() {
            inputs.mask = Some(View::contiguous("mask", &self.mask, &[3, 4]).unwrap());
        }
        if problem.block_mask().is_some() {
            inputs.block_mask = Some(View::contiguous("blocks", &self.blocks, &[2, 2]).unwrap());
        }
        if problem.dropout().is_some() {
            inputs.dropout = Some(View::contiguous("dropout", &self.dropout, &[2]).unwrap());
        }
        body(&problem, &inputs, &view(&self.d_o, &l.q_shape(q_at, &[4, 2])))
    }

    /// `sum(o * d_o)`.
    fn loss(&self) -> f64 {
        let o = self.with(|problem, inputs, _| forward_f64(problem, inputs).unwrap().o);
        o.iter().zip(&self.d_o).map(|(o, d)| o * f64::from(*d)).sum()
    }

    fn slope(&mut self, field: Field, at: usize) -> f64 {
        let mut central = |step: f32| {
            let before = field(self)[at];
            field(self)[at] = before + step;
            let above = self.loss();
            field(self)[at] = before - step;
            let below = self.loss();
            field(self)[at] = before;
            (above - below) / (2.0 * f64::from(step))
        };
        let (coarse, fine) = (central(1.0 / 256.0), central(1.0 / 512.0));
        (4.0 * fine - coarse) / 3.0
    }

    fn check(mut self, what: &str) {
        let got = self.with(|problem, inputs, d_o| backward_f64(problem, inputs, d_o).unwrap());
        let mut tensors: Vec<(&str, Vec<f64>, Field)> = vec![
            ("dq", got.dq, |c| &mut c.q),
            ("dk", got.dk, |c| &mut c.k),
            ("dv", got.dv, |c| &mut c.v),
        ];
        if self.spec.sinks {
            tensors.push(("dsinks", got.dsinks.unwrap(), |c| &mut c.sinks));
        }
        if self.spec.bias {
            tensors.push(("dbias", got.dbias.unwrap(), |c| &mut c.bias));
        }
        for (name, gradient, field) in tensors {
            assert_eq!(gradient.len(), field(&mut self).len(), "{what} {name}");
            let mut any = false;
            for (at, &got) in gradient.iter().enumerate() {
                let want = self.slope(field, at);
                assert!((got - want).abs() < 1e-7, "{what} {name}[{at}]: {got} for {want}");
                any |= want.abs() > 1e-3;
            }
            assert!(any, "{what} {name}: nothing to find");
        }
    }
}

#[test]
fn gradients_match_differences_of_plain_attention() {
    Call::new(|_| {}, &[]).check("plain");
    Call::new(|s| s.scale = Some(-0.4), &[]).check("scale");
    Call::new(|s| (s.q_heads, s.kv_heads) = (4, 2), &[]).check("groups");
}

#[test]
fn gradients_match_differences_under_masks() {
    Call::new(|s| s.causal = true, &[]).check("causal");
    Call::new(|s| (s.window_left, s.window_right) = (Some(1), Some(0)), &[]).check("window");
    Call::new(|s| s.mask = true, &[]).check("mask");
    Call::new(|s| s.block_mask = Some(BlockSizes { q: 2, kv: 2 }), &[]).check("blocks");
}

#[test]
fn gradients_match_differences_of_rows_without_keys() {
    let edit = |s: &mut ProblemSpec| {
        (s.q_lens, s.kv_lens) = (vec![3, 2], vec![2, 0]);
        s.causal = true;
    };
    Call::new(edit, &[]).check("more rows than keys");
    Call::new(
        |s| {
            edit(s);
            s.sinks = true;
        },
        &[],
    )
    .check("with sinks");
}

#[test]
fn gradients_match_differences_under_score_transforms() {
    Call::new(|s| s.softcap = Some(0.7), &[]).check("softcap");
    Call::new(|s| s.alibi = true, &[]).check("alibi");
    Call::new(|s| s.sinks = true, &[]).check("sinks");
    for shape in [
        &[3, 4][..],
        &[1, 4],
        &[3, 1],
        &[4, 3, 4],
        &[4, 1, 1],
        &[2, 4, 3, 4],
        &[2, 1, 3, 4],
        &[1, 4, 1, 4],
        &[2, 4, 3, 1],
    ] {
        // Without a sink, a bias that is the same for all keys of a row changes nothing.
        Call::new(|s| (s.bias, s.sinks) = (true, true), shape).check(&format!("bias {shape:?}"));
    }
}

#[test]
fn gradients_match_differences_under_dropout() {
    for p in [0.2, 0.5, 0.8] {
        Call::new(|s| s.dropout = Some(Dropout { p }), &[]).check(&format!("dropout of {p}"));
    }
    let edit = |s: &mut ProblemSpec| {
        (s.causal, s.sinks, s.softcap) = (true, true, Some(0.9));
        s.dropout = Some(Dropout { p: 0.4 });
    };
    Call::new(edit, &[]).check("dropout beside sinks");
}

#[test]
fn gradients_match_differences_of_everything_at_once() {
    let edit = |s: &mut ProblemSpec| {
        (s.causal, s.mask, s.bias, s.alibi, s.sinks) = (true, true, true, true, true);
        s.softcap = Some(0.9);
        s.scale = Some(0.8);
        s.window_left = Some(2);
        s.block_mask = Some(BlockSizes { q: 2, kv: 2 });
        s.dropout = Some(Dropout { p: 0.3 });
    };
    Call::new(edit, &[2, 4, 3, 4]).check("packed");
    // Padding is part of the tensors here, and its gradients must be 0 as the differences are.
    let padded = |s: &mut ProblemSpec| {
        edit(s);
        s.q_arrangement = Arrangement::Padded;
        s.kv = KvStorage::Dense(Arrangement::Padded);
    };
    Call::new(padded, &[4, 3, 4]).check("padded");
}
