//! Attention by the CPU engine: its forward keeps an LSE, its backward recomputes the scores.
//!
//! The invariant: the plans are made once and serve every step, dropout included, because seed and offset are data.

use attn_core::{Error, ForwardResults, Gradients, Outputs, Plan, Problem, View, ViewMut};
use attn_kernels::cpu::{CpuEngine, Workspace};

use super::TrainError;
use super::attention::{Attention, Data, DataGradients, Memory, Shape, rows, rows_mut};
use super::engine::plans;

/// The CPU engine as a layer's attention.
#[derive(Debug)]
pub(super) struct Fused<'e> {
    engine: &'e CpuEngine,
    forward: Plan,
    backward: Plan,
    lse: Vec<f32>,
    workspace: Workspace,
}

impl<'e> Fused<'e> {
    pub(super) fn new(engine: &'e CpuEngine, shape: &Shape) -> Result<Self, TrainError> {
        let kernels = attn_kernels::catalog_of(attn_core::Engine::Cpu);
        let [forward, backward] = plans(shape, &engine.caps(), kernels)?;
        let lse = vec![0.0; shape.tokens() * shape.heads];
        Ok(Self { engine, forward, backward, lse, workspace: Workspace::new() })
    }
}

fn lse_shape(problem: &Problem) -> [usize; 2] {
    [problem.lengths().total_q(), problem.q_heads()]
}

impl Attention for Fused<'_> {
    fn name(&self) -> &'static str {
        "fused"
    }

    fn plans(&self) -> Vec<&Plan> {
        vec![&self.forward, &self.backward]
    }

    fn forward(&mut self, data: &Data<'_>, o: &mut [f32]) -> Result<(), TrainError> {
        let problem = &self.forward.problem;
        let lse = ViewMut::contiguous("lse", &mut self.lse, &lse_shape(problem))?;
        let o = rows_mut("o", o, problem.q_heads(), problem)?;
        let mut outputs = Outputs { o, lse: Some(lse) };
        let data = data.rounded(problem);
        let inputs = data.inputs(problem)?;
        Ok(self.engine.forward(&self.forward, &inputs, &mut outputs, &mut self.workspace)?)
    }

    fn backward(
        &mut self,
        data: &Data<'_>,
        o: &[f32],
        d_o: &[f32],
        gradients: DataGradients<'_>,
    ) -> Result<(), TrainError> {
        let problem = &self.backward.problem;
        let (heads, kv_heads) = (problem.q_heads(), problem.kv_heads());
        let lse: Result<View<'_, f32>, Error> =
            View::contiguous("lse", &self.lse, &lse_shape(problem));
        let results = ForwardResults {
            o: rows("o", o, heads, problem)?,
            lse: lse?,
            d_o: rows("do", d_o, heads, problem)?,
        };
        let mut gradients = Gradients {
            dq: rows_mut("dq", gradients.dq, heads, problem)?,
            dk: rows_mut("dk", gradients.dk, kv_heads, problem)?,
            dv: rows_mut("dv", gradients.dv, kv_heads, problem)?,
            dsinks: None,
            dbias: None,
        };
        let data = data.rounded(problem);
        let inputs = data.inputs(problem)?;
        let workspace = &mut self.workspace;
        Ok(self.engine.backward(&self.backward, &inputs, &results, &mut gradients, workspace)?)
    }

    fn memory(&self) -> Memory {
        let kept = self.lse.len() * size_of::<f32>();
        Memory { kept: kept as u64, scratch: self.workspace.bytes().0 }
    }
}
