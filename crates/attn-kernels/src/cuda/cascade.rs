//! Cascade attention on the device: shared prefixes attended once for all rows that share them, then the rest, then one merge.
//!
//! Source: Juravsky et al., "Hydragen", arXiv:2402.05099, section 3; the merge is that of [`CudaEngine::merge_states`].
//!
//! The invariant: every check of both calls comes before the first launch, and the three launches are in stream order, so that
//! the merge reads what the calls wrote. A run of a prepared plan neither allocates nor copies; the intermediate states
//! lie in the caller's outputs (the suffix) and in the workspace (the prefix).
//!
//! Numerics: the state of each call is rounded to the type of the output before they are merged, which a single call does not do. With
//! the shares `a + b = 1` of the two in a row's weights, and `u` the unit roundoff of that type, an output errs by at most
//! `u * (a |o_prefix| + b |o_suffix|)` more than a call's own; where the two do not cancel each other, which takes values of
//! opposite signs on both sides of the cut, that is one more rounding of the output.

use std::sync::Arc;

use attn_core::{Cascade, CascadePlan, DType, Pass, Plan, Problem, Strided};
use cudarc::driver::CudaStream;

use super::call::{Inputs, KvTensors, Outputs, check_memory};
use super::config;
use super::engine::{CudaEngine, check_plan};
use super::forward;
use super::tensor::{DeviceTensorMut, DeviceView, DeviceViewMut};
use super::workspace::Workspace;
use crate::error::Error;
use crate::launch::{self, DeviceBuffer, check_context};

/// The block tables of a cascade's two calls, as [`attn_core::Cascade::write_tables`] writes them.
#[derive(Debug, Clone)]
pub struct CascadeTables<'a> {
    /// `[parts, prefix_width or more]`: the shared pages of each part of the prefix call.
    pub prefix: DeviceView<'a, i32>,
    /// `[batch, suffix_width or more]`: each sequence's pages but the shared ones.
    pub suffix: DeviceView<'a, i32>,
}

/// Scratch memory of cascades on one stream: a [`Workspace`] for their calls, and the states that are merged.
///
/// It grows and never shrinks; drop it to give the memory back.
///
/// ```
/// assert_eq!(attn_kernels::cuda::CascadeWorkspace::new().bytes(), 0);
/// ```
#[derive(Debug, Default)]
pub struct CascadeWorkspace {
    forward: Workspace,
    states: Option<States>,
}

/// Memory for intermediate states.
#[derive(Debug)]
struct States {
    /// Output of the prefix call, in the output's type.
    o: DeviceBuffer,
    /// LSE of the prefix call, f32.
    lse: DeviceBuffer,
    /// LSE of the suffix call, f32, where the caller wants none.
    suffix_lse: DeviceBuffer,
}

impl States {
    fn buffers(&self) -> [&DeviceBuffer; 3] {
        [&self.o, &self.lse, &self.suffix_lse]
    }
}

/// Bytes of [`States`] that a problem needs: of the outputs, and of the LSE.
fn state_bytes(problem: &Problem) -> (usize, usize) {
    let rows = problem.lengths().total_q().saturating_mul(problem.q_heads());
    let o = rows.saturating_mul(problem.value_dim()).saturating_mul(problem.out_dtype().size());
    (o, rows.saturating_mul(DType::F32.size()))
}

impl CascadeWorkspace {
    /// A workspace without memory.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Device memory in use, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let states = self.states.iter().flat_map(States::buffers);
        self.forward.bytes() + states.map(|buffer| buffer.bytes() as u64).sum::<u64>()
    }

    /// Whether a run of the plan needs nothing more.
    #[must_use]
    pub fn is_prepared(&self, plan: &CascadePlan) -> bool {
        self.holds(plan.cascade().problem())
            && self.forward.is_prepared(plan.prefix())
            && self.forward.is_prepared(plan.suffix())
    }

    /// Writes `byte` over everything that a run writes before it reads, in stream order: for tests of just that.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn fill(&mut self, stream: &Arc<CudaStream>, byte: u8) -> Result<(), Error> {
        self.forward.fill(stream, byte)?;
        let Some(States { o, lse, suffix_lse }) = &mut self.states else {
            return Ok(());
        };
        [o, lse, suffix_lse].into_iter().try_for_each(|buffer| buffer.fill(stream, byte))
    }

    fn holds(&self, problem: &Problem) -> bool {
        let (o, lse) = state_bytes(problem);
        self.states.as_ref().is_some_and(|states| {
            states.o.bytes() >= o && states.lse.bytes() >= lse && states.suffix_lse.bytes() >= lse
        })
    }

    fn reserve(
        &mut self,
        engine: &CudaEngine,
        problem: &Problem,
        stream: &CudaStream,
    ) -> Result<(), Error> {
        if self.holds(problem) {
            return Ok(());
        }
        if launch::is_capturing(stream)? {
            let expected =
                "a cascade that was prepared before the capture (`CudaEngine::prepare_cascade`)";
            let got = format!("{} query rows", problem.lengths().total_q());
            return Err(Error::Workspace { expected, got });
        }
        let (o, lse) = state_bytes(problem);
        // A quarter more, so that a batch that grows by a sequence now and then finds room, and never less than there is:
        // of two batches that take turns one may have the larger outputs and the other the larger LSEs.
        let held = |of: fn(&States) -> &DeviceBuffer| {
            self.states.as_ref().map_or(0, |states| of(states).bytes())
        };
        let room = |bytes: usize, held: usize| {
            engine.alloc(if bytes > held { bytes.saturating_add(bytes / 4) } else { held })
        };
        self.states = Some(States {
            o: room(o, held(|states| &states.o))?,
            lse: room(lse, held(|states| &states.lse))?,
            suffix_lse: room(lse, held(|states| &states.suffix_lse))?,
        });
        Ok(())
    }
}

impl CudaEngine {
    /// Compiles, loads and allocates what a cascade needs, so that its runs on this workspace and stream do none of it.
    ///
    /// # Errors
    /// As [`CudaEngine::prepare`], for each of the two calls; what was prepared before a failure stays.
    pub fn prepare_cascade(
        &self,
        plan: &CascadePlan,
        workspace: &mut CascadeWorkspace,
        stream: &Arc<CudaStream>,
    ) -> Result<(), Error> {
        self.prepare(plan.prefix(), &mut workspace.forward, stream)?;
        self.prepare(plan.suffix(), &mut workspace.forward, stream)?;
        let problem = plan.cascade().problem();
        self.auxiliary(&config::merge_states_spec(problem.out_dtype()), stream)?;
        workspace.reserve(self, problem, stream)
    }

    /// Runs a cascade in stream order: the prefix call, the suffix call, and the merge of their states in place.
    ///
    /// `inputs` and `outputs` are those of the whole call, with its block table. `tables` are the tables of the two calls; without
    /// any they are views of the whole call's, where there are such ([`attn_core::Cascade::table_views`]: one prefix that all
    /// sequences share, or groups of equal sizes and prefixes). That the sequences of a group have the same pages in the
    /// prefix is not checked: a kernel reads those of the table that it is given.
    ///
    /// # Errors
    /// As [`CudaEngine::forward`], for each of the two calls; [`Error::Call`] for tables of other shapes, for a block table without
    /// such views, and for fp8 scales of each sequence, since a shared page has one. Nothing was launched then.
    pub fn cascade(
        &self,
        plan: &CascadePlan,
        inputs: &Inputs<'_>,
        tables: Option<&CascadeTables<'_>>,
        outputs: &mut Outputs<'_>,
        workspace: &mut CascadeWorkspace,
        stream: &Arc<CudaStream>,
    ) -> Result<(), Error> {
        check_context(self.context(), stream.context())?;
        let cascade = plan.cascade();
        let problem = cascade.problem();
        inputs.layout().check(problem)?;
        outputs.layout().check(problem)?;
        Cascade::check_scales(&inputs.layout())?;
        let tables = match tables {
            Some(tables) => tables.clone(),
            None => views(plan, inputs)?,
        };
        let sinks = inputs.sinks.clone();
        let prefix = Inputs { sinks: None, ..with_table(inputs, tables.prefix) };
        let suffix = Inputs { sinks, ..with_table(inputs, tables.suffix) };
        for (inputs, plan) in [(&prefix, plan.prefix()), (&suffix, plan.suffix())] {
            inputs.layout().check(&plan.problem)?;
            check_memory(self.context(), inputs.memory().chain(outputs.memory()))?;
            check_rows(plan, inputs, outputs)?;
        }
        if outputs.layout().o.layout.is_empty() {
            let caps = self.caps();
            return check_plan(plan.prefix(), &caps, Pass::Forward)
                .and_then(|()| check_plan(plan.suffix(), &caps, Pass::Forward));
        }
        self.prepare_cascade(plan, workspace, stream)?;

        let CascadeWorkspace { forward, states } = workspace;
        let Some(States { o, lse, suffix_lse }) = states else {
            let expected = "the states of a prepared cascade";
            return Err(Error::Workspace { expected, got: "none".to_owned() });
        };
        let (heads, dim) = (problem.q_heads(), problem.value_dim());
        let (shape, dtype) = ([problem.lengths().total_q(), heads, dim], problem.out_dtype());
        let mut shared = Outputs {
            o: DeviceTensorMut::contiguous("prefix o", o, dtype, &shape)?,
            lse: Some(DeviceViewMut::contiguous("prefix lse", lse, &shape[..2])?),
        };
        let own_lse = match &mut outputs.lse {
            Some(lse) => lse.reborrow(),
            None => DeviceViewMut::contiguous("suffix lse", suffix_lse, &shape[..2])?,
        };
        let mut own = Outputs { o: outputs.o.reborrow(), lse: Some(own_lse) };
        self.forward(plan.prefix(), &prefix, &mut shared, forward, stream)?;
        self.forward(plan.suffix(), &suffix, &mut own, forward, stream)?;
        let (Some(of_prefix), Some(of_suffix)) = (shared.lse, &mut own.lse) else {
            return Ok(());
        };
        let (o, lse) = (own.o.tensor().clone(), of_suffix.view().clone());
        let first = (shared.o.tensor(), of_prefix.view());
        self.merge_states(first, (&o, &lse), &mut own.o, of_suffix, stream)
    }
}

/// The inputs with another block table.
fn with_table<'a>(inputs: &Inputs<'a>, table: DeviceView<'a, i32>) -> Inputs<'a> {
    let mut inputs = inputs.clone();
    if let KvTensors::Paged { block_table, .. } = &mut inputs.kv {
        *block_table = table;
    }
    inputs
}

/// The tables of both calls as views of the whole call's.
fn views<'a>(plan: &CascadePlan, inputs: &Inputs<'a>) -> Result<CascadeTables<'a>, Error> {
    let KvTensors::Paged { block_table, .. } = &inputs.kv else {
        return Err(
            attn_core::Error::invalid("kv", "a paged cache", "dense keys and values").into()
        );
    };
    let (prefix, suffix) = plan.cascade().table_views(block_table.layout())?;
    let view = |layout: Strided| DeviceView::new("block_table", block_table.memory(), layout);
    Ok(CascadeTables { prefix: view(prefix)?, suffix: view(suffix)? })
}

/// Checks what kernel and merge load rows by, so that the second launch does not refuse what the first one took.
fn check_rows(plan: &Plan, inputs: &Inputs<'_>, outputs: &Outputs<'_>) -> Result<(), Error> {
    if plan.family != attn_core::Family::General && !outputs.layout().o.layout.is_empty() {
        forward::check_alignment(inputs, outputs)?;
    }
    for (field, layout) in [("q", inputs.q.layout()), ("o", outputs.o.tensor().layout())] {
        if !layout.is_row_contiguous() {
            let got = format!("strides {:?}", layout.strides());
            return Err(attn_core::Error::layout(field, "innermost stride 1", got).into());
        }
    }
    Ok(())
}
