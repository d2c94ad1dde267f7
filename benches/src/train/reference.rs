//! Attention by the f64 reference, for the gradients that the others must match.
//!
//! The invariant: of what the shape's type leaves of queries, keys, values and the output's gradient, nothing but the last
//! rounding to f32 is lost here.

use attn_core::{Pass, Problem};
use attn_reference::{ReferenceGradients, naive};

use super::TrainError;
use super::attention::{Attention, Data, DataGradients, Memory, Shape, Values};

/// The reference as a layer's attention; it keeps nothing.
#[derive(Debug)]
pub(super) struct Reference {
    forward: Problem,
    backward: Problem,
}

impl Reference {
    pub(super) fn new(shape: &Shape) -> Result<Self, TrainError> {
        let (forward, backward) = (shape.problem(Pass::Forward)?, shape.problem(Pass::Backward)?);
        Ok(Self { forward, backward })
    }
}

/// Rounds to f32.
#[expect(clippy::cast_possible_truncation, reason = "the rounding to f32 is meant")]
pub(super) fn write(to: &mut [f32], from: &[f64]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = *from as f32;
    }
}

/// The same of the gradients of a call.
pub(super) fn write_gradients(to: DataGradients<'_>, from: &ReferenceGradients) {
    write(to.dq, &from.dq);
    write(to.dk, &from.dk);
    write(to.dv, &from.dv);
}

impl Attention for Reference {
    fn name(&self) -> &'static str {
        "reference"
    }

    fn forward(&mut self, data: &Data<'_>, o: &mut [f32]) -> Result<(), TrainError> {
        let data = data.rounded(&self.forward);
        write(o, &naive::forward_f64(&self.forward, &data.inputs(&self.forward)?)?.o);
        Ok(())
    }

    fn backward(
        &mut self,
        data: &Data<'_>,
        _: &[f32],
        d_o: &[f32],
        gradients: DataGradients<'_>,
    ) -> Result<(), TrainError> {
        let problem = &self.backward;
        let (data, d_o) = (data.rounded(problem), Values::new(d_o, problem));
        let d_o = d_o.rows("do", problem.q_heads(), problem)?;
        let got = naive::backward_f64(problem, &data.inputs(problem)?, &d_o)?;
        write_gradients(gradients, &got);
        Ok(())
    }

    fn memory(&self) -> Memory {
        Memory::default()
    }
}
