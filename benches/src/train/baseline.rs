//! Attention as a straightforward computation in its own type has it: what an engine in 16 bits is held against.
//!
//! The invariant: it is the baseline of the error rule, one evaluation of it, inside the same layer as the engine, so that what
//! the layer makes of the attention's roundings is the same for both.

use attn_core::{Pass, Problem};
use attn_reference::materialised::{self, Evaluation};

use super::TrainError;
use super::attention::{Attention, Data, DataGradients, Memory, Shape, Values};
use super::reference::{write, write_gradients};

/// The baseline as a layer's attention; it keeps nothing.
#[derive(Debug)]
pub(super) struct Baseline {
    forward: Problem,
    backward: Problem,
    evaluation: Evaluation,
}

impl Baseline {
    /// Every evaluation that the shape's type has.
    pub(super) fn all(shape: &Shape) -> Result<Vec<Self>, TrainError> {
        let (forward, backward) = (shape.problem(Pass::Forward)?, shape.problem(Pass::Backward)?);
        let of =
            |&evaluation| Self { forward: forward.clone(), backward: backward.clone(), evaluation };
        Ok(Evaluation::of(shape.dtype).iter().map(of).collect())
    }
}

impl Attention for Baseline {
    fn name(&self) -> &'static str {
        "baseline"
    }

    fn forward(&mut self, data: &Data<'_>, o: &mut [f32]) -> Result<(), TrainError> {
        let problem = &self.forward;
        let data = data.rounded(problem);
        let got = materialised::forward(problem, &data.inputs(problem)?, self.evaluation)?;
        write(o, &got.o);
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
        let inputs = data.inputs(problem)?;
        let got = materialised::backward(problem, &inputs, &d_o, self.evaluation)?;
        write_gradients(gradients, &got);
        Ok(())
    }

    fn memory(&self) -> Memory {
        Memory::default()
    }
}
