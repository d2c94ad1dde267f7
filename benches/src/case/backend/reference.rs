//! The f64 reference as a backend.
//!
//! The invariant: one family of kernels for all phases, split by nothing, so that every option about how
//! to compute holds by itself.

use attn_core::{
    ForwardResults, Gradients, Inputs, OnlineSoftmax, Outputs, Problem, TensorViewMut, ViewMut,
};
use attn_reference::naive;

use super::super::failure::{Failure, Kind};
use super::{Backend, Ran, State};

/// The reference keeps nothing between calls.
pub(super) struct Reference;

fn ran(kernel: &str, plan: &str) -> Ran {
    Ran { kernel: kernel.to_owned(), plan: plan.to_owned() }
}

impl Backend for Reference {
    fn forward(
        &mut self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        outputs: Outputs<'_>,
    ) -> Result<Ran, Failure> {
        naive::forward(problem, inputs, outputs)?;
        Ok(ran(naive::NAME, "the definition in f64, row by row, every score of a row kept"))
    }

    fn backward(
        &mut self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        results: &ForwardResults<'_>,
        gradients: Gradients<'_>,
    ) -> Result<Ran, Failure> {
        naive::backward(problem, inputs, results, gradients)?;
        Ok(ran(naive::NAME, "the chain rule in f64 on a recomputed softmax"))
    }

    fn merge(
        &mut self,
        a: State<'_, '_>,
        b: State<'_, '_>,
        o: &mut TensorViewMut<'_>,
        lse: &mut ViewMut<'_, f32>,
    ) -> Result<Ran, Failure> {
        let &[rows, heads, dim] = a.0.shape() else {
            return Err(Failure::new(Kind::Internal, "merge: expected rank 3"));
        };
        for row in 0..rows {
            for head in 0..heads {
                let mut state = finished(a, row, head, dim);
                state.merge(&finished(b, row, head, dim));
                let (values, total) = state.finish();
                for (d, &value) in values.iter().enumerate() {
                    o.set(&[row, head, d], round(value));
                }
                lse.set(&[row, head], round(total));
            }
        }
        Ok(ran("reference_merge", "the merge of two online softmax states in f64"))
    }
}

fn finished(state: State<'_, '_>, row: usize, head: usize, dim: usize) -> OnlineSoftmax<f64> {
    let value = |d| state.0.get(&[row, head, d]).map_or(f64::NAN, f64::from);
    let output: Vec<f64> = (0..dim).map(value).collect();
    let lse = state.1.get(&[row, head]).map_or(f64::NAN, f64::from);
    OnlineSoftmax::from_finished(&output, lse)
}

#[expect(clippy::cast_possible_truncation, reason = "the rounding to f32 is meant")]
const fn round(x: f64) -> f32 {
    x as f32
}
