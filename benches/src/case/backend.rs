//! Who computes the tensors of a case, behind one trait.
//!
//! The invariant: a backend lives as long as the process and keeps what an engine keeps from call to
//! call. It gets data that was found to fit the problem, and refuses what it does not do.

mod cpu;
mod cuda;
mod reference;

use attn_core::{
    ForwardResults, Gradients, Inputs, Outputs, Plan, Problem, TensorView, TensorViewMut, View,
    ViewMut,
};

use super::BackendName;
use super::failure::Failure;

/// Plans kept; more than the cases of a file.
const PLANS: usize = 256;

/// What ran.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ran {
    /// The kernel's name.
    pub(crate) kernel: String,
    /// How it ran and why it was chosen.
    pub(crate) plan: String,
}

impl Ran {
    fn of(plan: &Plan) -> Self {
        Self { kernel: plan.kernel.to_owned(), plan: attn_select::explain(plan).to_string() }
    }
}

/// An attention state: output and LSE.
pub(crate) type State<'s, 'a> = (&'s TensorView<'a>, &'s View<'a, f32>);

/// Computes the tensors of a case.
pub(crate) trait Backend {
    /// Whether there is anything to compute with; asked before a case's tensors are read.
    ///
    /// # Errors
    /// `device`.
    fn check(&self) -> Result<(), Failure> {
        Ok(())
    }

    /// Writes output and LSE.
    ///
    /// # Errors
    /// What the engine refuses.
    fn forward(
        &mut self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        outputs: Outputs<'_>,
    ) -> Result<Ran, Failure>;

    /// Writes gradients.
    ///
    /// # Errors
    /// What the engine refuses.
    fn backward(
        &mut self,
        problem: &Problem,
        inputs: &Inputs<'_>,
        results: &ForwardResults<'_>,
        gradients: Gradients<'_>,
    ) -> Result<Ran, Failure>;

    /// Writes the state over the keys of both.
    ///
    /// # Errors
    /// What the engine refuses.
    fn merge(
        &mut self,
        a: State<'_, '_>,
        b: State<'_, '_>,
        o: &mut TensorViewMut<'_>,
        lse: &mut ViewMut<'_, f32>,
    ) -> Result<Ran, Failure>;
}

/// A backend that lives as long as the result. One that cannot be had answers every call with the reason.
pub(crate) fn open(name: BackendName) -> Box<dyn Backend> {
    let failure = match name {
        BackendName::Reference => return Box::new(reference::Reference),
        BackendName::Cpu => match cpu::Cpu::new() {
            Ok(cpu) => return Box::new(cpu),
            Err(failure) => failure,
        },
        BackendName::Cuda => match cuda::Cuda::new() {
            Ok(cuda) => return Box::new(cuda),
            Err(failure) => failure,
        },
    };
    Box::new(Absent { failure })
}

/// A backend that is not there.
struct Absent {
    failure: Failure,
}

impl Backend for Absent {
    fn check(&self) -> Result<(), Failure> {
        Err(self.failure.clone())
    }

    fn forward(&mut self, _: &Problem, _: &Inputs<'_>, _: Outputs<'_>) -> Result<Ran, Failure> {
        Err(self.failure.clone())
    }

    fn backward(
        &mut self,
        _: &Problem,
        _: &Inputs<'_>,
        _: &ForwardResults<'_>,
        _: Gradients<'_>,
    ) -> Result<Ran, Failure> {
        Err(self.failure.clone())
    }

    fn merge(
        &mut self,
        _: State<'_, '_>,
        _: State<'_, '_>,
        _: &mut TensorViewMut<'_>,
        _: &mut ViewMut<'_, f32>,
    ) -> Result<Ran, Failure> {
        Err(self.failure.clone())
    }
}
