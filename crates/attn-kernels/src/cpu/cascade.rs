//! Cascade attention on the host: shared prefixes attended once for all rows that share them, then the rest, then one merge.
//!
//! Source: Juravsky et al., "Hydragen", arXiv:2402.05099, section 3.
//!
//! The invariant: both calls are the engine's own forwards over the caller's tensors, of which only the block tables differ;
//! their states are scratch, and the outputs are written by the merge alone.
//!
//! Numerics: as of the device's cascade, each state is rounded to the output's type before the merge, whose weights come from
//! LSEs in f32: of outputs in f32 and scores around 30, as a soft-cap leaves them, that is 1e-6 of a weight, which the error
//! rule for f32 does not always allow.

use attn_core::{
    Bytes, Cascade, CascadePlan, DType, Error as CoreError, Inputs, KvView, Outputs, Plan,
    TensorView, TensorViewMut, View, ViewMut,
};

use super::engine::CpuEngine;
use super::workspace::{Workspace, carve, lines};
use crate::error::Error;

/// The block tables of a cascade's two calls, as [`attn_core::Cascade::write_tables`] writes them.
#[derive(Debug, Clone)]
pub struct CascadeTables<'a> {
    /// `[parts, prefix_width or more]`: the shared pages of each part of the prefix call.
    pub prefix: View<'a, i32>,
    /// `[batch, suffix_width or more]`: each sequence's pages but the shared ones.
    pub suffix: View<'a, i32>,
}

/// Scratch of cascades: that of their calls, and the states that are merged.
///
/// ```
/// assert_eq!(attn_kernels::cpu::CascadeWorkspace::new().bytes().0, 0);
/// ```
#[derive(Debug, Default)]
pub struct CascadeWorkspace {
    forward: Workspace,
    states: Workspace,
}

impl CascadeWorkspace {
    /// A workspace without memory; it grows to what the calls need.
    #[must_use]
    pub const fn new() -> Self {
        Self { forward: Workspace::new(), states: Workspace::new() }
    }

    /// Bytes held.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        self.forward.bytes() + self.states.bytes()
    }
}

impl CpuEngine {
    /// Runs a cascade: the prefix call, the suffix call, and the merge of their states.
    ///
    /// `inputs` and `outputs` are those of the whole call, with its block table. `tables` are the tables of the two calls; without
    /// any they are views of the whole call's, where there are such ([`attn_core::Cascade::table_views`]). That the sequences
    /// of a group have the same pages in the prefix is not checked.
    ///
    /// # Errors
    /// As [`CpuEngine::forward`], for each of the two calls; [`Error::Call`] for a block table without such views, and for fp8
    /// scales of each sequence, since a shared page has one. The outputs were not written then.
    pub fn cascade(
        &self,
        plan: &CascadePlan,
        inputs: &Inputs<'_>,
        tables: Option<&CascadeTables<'_>>,
        outputs: &mut Outputs<'_>,
        workspace: &mut CascadeWorkspace,
    ) -> Result<(), Error> {
        let problem = plan.cascade().problem();
        inputs.check(problem)?;
        outputs.check(problem)?;
        Cascade::check_scales(&inputs.layout())?;
        let tables = match tables {
            Some(tables) => tables.clone(),
            None => views(plan, inputs)?,
        };
        let [rows, heads, dim] =
            [problem.lengths().total_q(), problem.q_heads(), problem.value_dim()];
        let (shape, dtype) = ([rows, heads, dim], problem.out_dtype());
        let lses = rows.saturating_mul(heads);
        // Two elements of 16 bits are one of 32.
        let held = lses.saturating_mul(dim).saturating_mul(dtype.size()).div_ceil(4);
        let CascadeWorkspace { forward, states } = workspace;
        let needed = lines(held).saturating_mul(2).saturating_add(lines(lses).saturating_mul(3));
        let mut rest = states.reserve(needed)?;
        let mut state = || (carve(&mut rest, held), carve(&mut rest, lses));
        let (prefix, suffix) = (state(), state());
        let lse = carve(&mut rest, lses);

        let sinks = inputs.sinks.clone();
        let of_prefix = Inputs { sinks: None, ..with_table(inputs, tables.prefix) };
        let of_suffix = Inputs { sinks, ..with_table(inputs, tables.suffix) };
        let mut run = |plan: &Plan, inputs: &Inputs<'_>, state: (&mut [f32], &mut [f32])| {
            let mut outputs = Outputs {
                o: elements_mut(dtype, state.0, &shape)?,
                lse: Some(ViewMut::contiguous("lse", state.1, &shape[..2])?),
            };
            self.forward(plan, inputs, &mut outputs, forward)
        };
        run(plan.prefix(), &of_prefix, (&mut *prefix.0, &mut *prefix.1))?;
        run(plan.suffix(), &of_suffix, (&mut *suffix.0, &mut *suffix.1))?;

        let view = |lse| View::contiguous("lse", lse, &shape[..2]);
        let a = (elements(dtype, prefix.0, &shape)?, view(prefix.1)?);
        let b = (elements(dtype, suffix.0, &shape)?, view(suffix.1)?);
        let mut lse = match &mut outputs.lse {
            Some(lse) => lse.reborrow(),
            None => ViewMut::contiguous("lse", lse, &shape[..2])?,
        };
        self.merge((&a.0, &a.1), (&b.0, &b.1), &mut outputs.o, &mut lse)
    }
}

/// The inputs with another block table.
fn with_table<'a>(inputs: &Inputs<'a>, table: View<'a, i32>) -> Inputs<'a> {
    let mut inputs = inputs.clone();
    if let KvView::Paged { block_table, .. } = &mut inputs.kv {
        *block_table = table;
    }
    inputs
}

/// The tables of both calls as views of the whole call's.
fn views<'a>(plan: &CascadePlan, inputs: &Inputs<'a>) -> Result<CascadeTables<'a>, CoreError> {
    let KvView::Paged { block_table, .. } = &inputs.kv else {
        return Err(CoreError::invalid("kv", "a paged cache", "dense keys and values"));
    };
    let (prefix, suffix) = plan.cascade().table_views(block_table.layout())?;
    let view = |layout| View::new("block_table", block_table.data(), layout);
    Ok(CascadeTables { prefix: view(prefix)?, suffix: view(suffix)? })
}

/// Scratch as an output of a type.
fn elements_mut<'a>(
    dtype: DType,
    scratch: &'a mut [f32],
    shape: &[usize; 3],
) -> Result<TensorViewMut<'a>, CoreError> {
    let count = shape.iter().product();
    match dtype {
        DType::F16 => {
            let elements = bytemuck::cast_slice_mut(scratch);
            ViewMut::contiguous("o", &mut elements[..count], shape).map(TensorViewMut::F16)
        }
        DType::BF16 => {
            let elements = bytemuck::cast_slice_mut(scratch);
            ViewMut::contiguous("o", &mut elements[..count], shape).map(TensorViewMut::BF16)
        }
        _ => ViewMut::contiguous("o", scratch, shape).map(TensorViewMut::F32),
    }
}

/// The same, to be read.
fn elements<'a>(
    dtype: DType,
    scratch: &'a [f32],
    shape: &[usize; 3],
) -> Result<TensorView<'a>, CoreError> {
    let count = shape.iter().product();
    match dtype {
        DType::F16 => {
            let elements: &[half::f16] = bytemuck::cast_slice(scratch);
            View::contiguous("o", &elements[..count], shape).map(TensorView::F16)
        }
        DType::BF16 => {
            let elements: &[half::bf16] = bytemuck::cast_slice(scratch);
            View::contiguous("o", &elements[..count], shape).map(TensorView::BF16)
        }
        _ => View::contiguous("o", scratch, shape).map(TensorView::F32),
    }
}
