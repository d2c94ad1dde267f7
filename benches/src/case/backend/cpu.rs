//! The CPU engine as a backend: problem, `choose`, engine, as any caller composes them.
//!
//! The invariant: engine, plans and workspace are kept from case to case, because that is how they are
//! used, and because what one call leaves behind must not reach the next.

use attn_core::{ForwardResults, Gradients, Inputs, Outputs, Problem, TensorViewMut, ViewMut};
use attn_kernels::cpu::{CpuEngine, Workspace};
use attn_select::PlanCache;

use super::super::failure::{Failure, Kind};
use super::{Backend, PLANS, Ran, State};

pub(super) struct Cpu {
    engine: CpuEngine,
    plans: PlanCache,
    workspace: Workspace,
}

impl Cpu {
    /// # Errors
    /// `device` when the threads cannot be started.
    pub(super) fn new() -> Result<Self, Failure> {
        let engine = CpuEngine::new().map_err(|error| Failure::new(Kind::Device, error))?;
        let plans = PlanCache::new(engine.caps(), attn_kernels::catalog(), PLANS);
        Ok(Self { engine, plans, workspace: Workspace::new() })
    }
}

impl Backend for Cpu {
    fn forward(
        &mut self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        mut outputs: Outputs<'_>,
    ) -> Result<Ran, Failure> {
        let plan = self.plans.choose(problem)?;
        self.engine.forward(&plan, inputs, &mut outputs, &mut self.workspace)?;
        Ok(Ran::of(&plan))
    }

    fn backward(
        &mut self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        results: &ForwardResults<'_>,
        mut gradients: Gradients<'_>,
    ) -> Result<Ran, Failure> {
        let plan = self.plans.choose(problem)?;
        self.engine.backward(&plan, inputs, results, &mut gradients, &mut self.workspace)?;
        Ok(Ran::of(&plan))
    }

    fn merge(
        &mut self,
        a: State<'_, '_>,
        b: State<'_, '_>,
        o: &mut TensorViewMut<'_>,
        lse: &mut ViewMut<'_, f32>,
    ) -> Result<Ran, Failure> {
        self.engine.merge(a, b, o, lse)?;
        let plan = "two states, row by row, weighted by their share of the denominator";
        Ok(Ran { kernel: "cpu_merge".to_owned(), plan: plan.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use attn_core::{Bytes, DType, Pass, ProblemSpec, TensorView, View};

    use super::*;

    /// Runs a dense f32 problem of zeros and says what the plan promised and what the engine held.
    fn promised_and_held(spec: ProblemSpec) -> (&'static str, Bytes, Bytes) {
        let engine = CpuEngine::new().unwrap();
        let problem = Problem::new(spec).unwrap();
        let plan = attn_select::choose(&problem, &engine.caps(), attn_kernels::catalog()).unwrap();
        let (l, at) = (problem.lengths(), problem.q_arrangement());
        let (heads, kv_heads) = (problem.q_heads(), problem.kv_heads());
        let q = Zeros::new(&l.q_shape(at, &[heads, problem.head_dim()]));
        let k = Zeros::new(&l.kv_shape(at, &[kv_heads, problem.head_dim()]));
        let v = Zeros::new(&l.kv_shape(at, &[kv_heads, problem.value_dim()]));
        let pairs = [l.longest_q(), l.longest_kv()];
        let bias = Zeros::new(&pairs);
        let mask = vec![1u8; pairs.iter().product()];
        let mut inputs = Inputs::dense(q.tensor(), k.tensor(), v.tensor());
        if problem.has_mask() {
            inputs.mask = Some(View::contiguous("mask", &mask, &pairs).unwrap());
        }
        if problem.has_bias() {
            inputs.bias = Some(bias.view());
        }
        let mut o = Zeros::new(&l.q_shape(at, &[heads, problem.value_dim()]));
        let mut lse = Zeros::new(&l.q_shape(at, &[heads]));
        let mut workspace = Workspace::new();
        if problem.pass() == Pass::Forward {
            let mut outputs = Outputs { o: o.tensor_mut(), lse: Some(lse.view_mut()) };
            engine.forward(&plan, &inputs, &mut outputs, &mut workspace).unwrap();
        } else {
            let d_o = o.clone();
            let results = ForwardResults { o: o.tensor(), lse: lse.view(), d_o: d_o.tensor() };
            let (mut dq, mut dk, mut dv, mut dbias) =
                (q.clone(), k.clone(), v.clone(), bias.clone());
            let mut gradients = Gradients {
                dq: dq.tensor_mut(),
                dk: dk.tensor_mut(),
                dv: dv.tensor_mut(),
                dsinks: None,
                dbias: problem.wants_dbias().then(|| dbias.view_mut()),
            };
            engine.backward(&plan, &inputs, &results, &mut gradients, &mut workspace).unwrap();
        }
        (plan.kernel, plan.workspace, workspace.bytes())
    }

    /// A contiguous f32 tensor.
    #[derive(Clone)]
    struct Zeros {
        data: Vec<f32>,
        shape: Vec<usize>,
    }

    impl Zeros {
        fn new(shape: &[usize]) -> Self {
            Self { data: vec![0.0; shape.iter().product()], shape: shape.to_vec() }
        }

        fn view(&self) -> View<'_, f32> {
            View::contiguous("x", &self.data, &self.shape).unwrap()
        }

        fn tensor(&self) -> TensorView<'_> {
            TensorView::F32(self.view())
        }

        fn view_mut(&mut self) -> ViewMut<'_, f32> {
            ViewMut::contiguous("x", &mut self.data, &self.shape).unwrap()
        }

        fn tensor_mut(&mut self) -> TensorViewMut<'_> {
            TensorViewMut::F32(self.view_mut())
        }
    }

    #[test]
    fn cpu_plan_states_the_workspace() {
        let prompt = ProblemSpec::new(DType::F32, 6, 2, 72, &[100, 0, 7], &[300, 5, 7]);
        let mut masked = prompt.clone();
        (masked.mask, masked.value_dim) = (true, 40);
        let step = ProblemSpec::new(DType::F32, 6, 2, 72, &[1, 2, 0], &[900, 33, 5]);
        let mut windowed = step.clone();
        (windowed.mask, windowed.window_left, windowed.causal) = (true, Some(200), true);
        windowed.options.num_splits = Some(3);
        let mut backward = prompt.clone();
        backward.pass = Pass::Backward;
        let mut biased = masked.clone();
        (biased.pass, biased.bias, biased.want_dbias) = (Pass::Backward, true, true);
        biased.softcap = Some(3.0);
        for (spec, expected) in [
            (prompt, "cpu_prefill"),
            (masked, "cpu_prefill"),
            (step, "cpu_decode"),
            (windowed, "cpu_decode"),
            (backward, "cpu_backward"),
            (biased, "cpu_backward"),
        ] {
            let (kernel, promised, held) = promised_and_held(spec);
            assert_eq!(kernel, expected);
            assert_eq!(held, promised, "{kernel}");
        }
    }
}
