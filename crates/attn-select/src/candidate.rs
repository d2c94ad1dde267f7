//! What every kernel is asked, whatever its family.
//!
//! The invariant: a kernel whose description does not cover the call never becomes a plan. Each check
//! is one statement under the cause that makes it necessary; the families add theirs, and decide
//! tile, split and workspace.

use attn_core::{
    Bytes, DeviceCaps, Engine, Family, Features, KernelDesc, Options, Phase, Problem, Refusal,
    Split, Tile,
};

use crate::{backward, decode, general, heuristics, prefill};

/// A problem on a machine, with what is computed once for all candidates.
pub(crate) struct Call<'a> {
    pub(crate) problem: &'a Problem,
    pub(crate) caps: &'a DeviceCaps,
    catalogue: &'a [KernelDesc],
    required: Features,
}

/// What a candidate must meet to accept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standard {
    /// Run the call, and not be expected to run it slower than another kind of kernel.
    Fastest,
    /// Run the call.
    Possible,
}

/// How a kernel would run the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fit {
    pub(crate) tile: Tile,
    pub(crate) split: Split,
    pub(crate) shared_memory: Bytes,
    pub(crate) reason: &'static str,
}

impl<'a> Call<'a> {
    pub(crate) fn new(
        problem: &'a Problem,
        caps: &'a DeviceCaps,
        catalogue: &'a [KernelDesc],
    ) -> Self {
        Self { problem, caps, catalogue, required: Features::required_by(problem) }
    }

    pub(crate) fn options(&self) -> &'a Options {
        self.problem.options()
    }

    /// How `kernel` would run the call, or why it does not.
    pub(crate) fn judge(&self, kernel: &KernelDesc, standard: Standard) -> Result<Fit, Refusal> {
        self.check_caller(kernel)?;
        self.check_machine(kernel)?;
        self.check_types(kernel)?;
        self.check_features(kernel)?;
        match kernel.family {
            Family::Prefill => prefill::fit(self, kernel),
            Family::Decode => decode::fit(self, kernel, standard),
            Family::General => general::fit(self, kernel),
            Family::Backward => backward::fit(self, kernel),
        }
    }

    /// Whether a device has a kernel for the call that divides keys as `kernel` does, and whose tiles of query rows a
    /// sequence's rows fill.
    pub(crate) fn has_row_tiles_beside(&self, kernel: &KernelDesc) -> bool {
        // The rows alone rule most calls out, before another kernel is judged.
        heuristics::has_wide_rows(self.problem)
            && self.catalogue.iter().any(|other| {
                let is_rival = other.engine == kernel.engine && other.family == Family::Prefill;
                is_rival
                    && other.divides_keys
                    && self
                        .judge(other, Standard::Fastest)
                        .is_ok_and(|fit| heuristics::packs_group(self.problem, fit.tile))
            })
    }

    fn check_caller(&self, kernel: &KernelDesc) -> Result<(), Refusal> {
        // The caller knows something about this kernel that no description says.
        if self.options().disabled_kernels.iter().any(|name| name == kernel.name) {
            return Err(Refusal::Disabled);
        }
        // The two passes have different inputs and outputs.
        if kernel.pass() != self.problem.pass() {
            return Err(Refusal::Pass(kernel.pass()));
        }
        // A forced phase rules out the other one. A general kernel is of neither, and gradients come from one
        // family: both accept.
        let phase = match kernel.family {
            Family::Prefill => Some(Phase::Prefill),
            Family::Decode => Some(Phase::Decode),
            Family::General | Family::Backward => None,
        };
        if let (Some(own), Some(forced)) = (phase, self.options().phase)
            && own != forced
        {
            return Err(Refusal::Phase(forced));
        }
        Ok(())
    }

    fn check_machine(&self, kernel: &KernelDesc) -> Result<(), Refusal> {
        // The host is always there; a device may not be.
        let device = match (kernel.engine, &self.caps.cuda) {
            (Engine::Cpu, _) => return Ok(()),
            (engine, None) => return Err(Refusal::NoDevice(engine)),
            (_, Some(device)) => device,
        };
        // Instructions that an older device lacks.
        if let Some(needs) = kernel.min_compute
            && device.compute < needs
        {
            return Err(Refusal::Compute { needs, has: device.compute });
        }
        // Instructions of one architecture, which the next one lacks.
        if let Some(takes) = kernel.max_compute
            && device.compute > takes
        {
            return Err(Refusal::ComputePast { takes, has: device.compute });
        }
        Ok(())
    }

    fn check_types(&self, kernel: &KernelDesc) -> Result<(), Refusal> {
        let (q, kv) = (self.problem.q_dtype(), self.problem.kv_dtype());
        // Queries are loaded, and outputs rounded, by code made for their type.
        if !kernel.q_dtypes.contains(&q) {
            return Err(Refusal::DType { operand: "q", got: q });
        }
        // The same for keys and values, whose type may be an fp8 cache's.
        if !kernel.kv_dtypes.contains(&kv) {
            return Err(Refusal::DType { operand: "kv", got: kv });
        }
        // A row of queries or keys has to fit the kernel's registers and loads.
        let (dim, takes) = (self.problem.head_dim(), kernel.head_dims);
        if !takes.accepts(dim) {
            return Err(Refusal::Dim { field: "head_dim", takes, got: dim });
        }
        // A row of values and its accumulator likewise.
        let (dim, takes) = (self.problem.value_dim(), kernel.value_dims);
        if !takes.accepts(dim) {
            return Err(Refusal::Dim { field: "value_dim", takes, got: dim });
        }
        // Kernels for few rows hold all rows of a sequence at once.
        let got = self.problem.lengths().longest_q();
        if let Some(most) = kernel.max_query_rows
            && got > most
        {
            return Err(Refusal::QueryRows { most, got });
        }
        Ok(())
    }

    fn check_features(&self, kernel: &KernelDesc) -> Result<(), Refusal> {
        // Code for one kind of storage would read another kind as if it were its own.
        if let Some(absent) = kernel.requires.minus(self.required).iter().next() {
            return Err(Refusal::Requires(absent));
        }
        // Dropping an option would give a wrong result without a word.
        match self.required.minus(kernel.features).iter().next() {
            Some(missing) => Err(Refusal::Feature(missing)),
            None => Ok(()),
        }
    }
}
