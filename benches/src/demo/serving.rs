//! One serving step: admit or extend sequences, plan once, attend in every layer.
//!
//! The invariant: between [`Serving::begin`] and the last layer's `attend`, the allocator, the block
//! table, the plan and the cache all describe the same batch. The plan is made once a step and used by
//! every layer, because lengths do not differ between layers.

use std::sync::Arc;
use std::time::Instant;

use attn_core::{
    Bytes, DeviceCaps, HostCaps, Inputs, KvStorage, Outputs, Plan, Problem, ProblemSpec,
    TensorViewMut, View, ViewMut,
};
use attn_kernels::cpu::{CpuEngine, Workspace};
use attn_paged::{Allocator, Config, Namespace, SeqId, Stats};
use attn_select::PlanCache;

use super::cache::PagedCache;
use super::ledger::{Call, Ledger};
use crate::model::Attention;

/// Tokens of a page: the size at which waste stays small and the table short.
pub(crate) const PAGE_SIZE: usize = 16;

/// Sizes of the attention of a model.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) layers: usize,
    pub(crate) q_heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
}

/// Who computes.
#[derive(Debug)]
pub(crate) enum Backend {
    /// The CPU engine with its workspace.
    Cpu(Box<CpuEngine>, Workspace),
    /// The f64 reference, which is slow and exact.
    Reference,
}

/// What can go wrong in a step.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ServingError {
    /// The call was refused.
    #[error(transparent)]
    Call(#[from] attn_core::Error),
    /// The pool refused.
    #[error(transparent)]
    Pool(#[from] attn_paged::Error),
    /// The engine refused or failed.
    #[error(transparent)]
    Engine(#[from] attn_kernels::Error),
    /// No kernel was chosen.
    #[error(transparent)]
    Select(#[from] attn_select::Error),
    /// A layer was attended before a step began.
    #[error("attend: expected a step to have begun, got none")]
    NoStep,
}

/// The batch of one step.
#[derive(Debug)]
struct Step {
    phase: &'static str,
    plan: Arc<Plan>,
    slots: Vec<i64>,
    table: Vec<i32>,
    batch: usize,
    width: usize,
    bytes: u64,
    sampled: bool,
}

/// Allocator, pages, engine and books of the demo.
#[derive(Debug)]
pub(crate) struct Serving {
    shape: Shape,
    backend: Backend,
    plans: PlanCache,
    allocator: Allocator,
    cache: PagedCache,
    step: Option<Step>,
    ledger: Ledger,
}

impl Serving {
    /// An empty cache with room for `tokens` tokens.
    pub(crate) fn new(shape: Shape, tokens: usize, backend: Backend) -> Result<Self, ServingError> {
        let pages = tokens.div_ceil(PAGE_SIZE);
        let Shape { layers, kv_heads, head_dim, .. } = shape;
        let caps = match &backend {
            Backend::Cpu(engine, _) => engine.caps(),
            Backend::Reference => DeviceCaps { host: HostCaps::default(), cuda: None },
        };
        Ok(Self {
            shape,
            backend,
            plans: PlanCache::new(caps, attn_kernels::catalog(), 64),
            allocator: Allocator::new(Config::new(pages, PAGE_SIZE))?,
            cache: PagedCache::new(layers, pages, PAGE_SIZE, kv_heads, head_dim)?,
            step: None,
            ledger: Ledger::default(),
        })
    }

    /// Admits a prompt; the second result is how many of its tokens the prefix cache supplied.
    pub(crate) fn admit(&mut self, tokens: &[u32]) -> Result<(SeqId, usize), ServingError> {
        let allocation = self.allocator.alloc(tokens, Namespace::DEFAULT)?;
        Ok((allocation.seq, allocation.hit))
    }

    /// Appends a token to a sequence, copying a shared page where needed.
    pub(crate) fn append(&mut self, seq: SeqId, token: u32) -> Result<(), ServingError> {
        if let Some(copy) = self.allocator.append_one(seq, token)? {
            self.cache.copy_page(copy);
        }
        Ok(())
    }

    /// States that the keys and values of a sequence exist, so that its full blocks can be shared.
    pub(crate) fn commit(&mut self, seq: SeqId) -> Result<(), ServingError> {
        let len = self.allocator.len(seq)?;
        Ok(self.allocator.commit(seq, len)?)
    }

    /// Plans a step in which each sequence's tokens from `first` on are new.
    ///
    /// `sampled` steps are compared with the f64 reference on the first, middle and last layer.
    pub(crate) fn begin(
        &mut self,
        phase: &'static str,
        batch: &[(SeqId, usize)],
        sampled: bool,
    ) -> Result<(), ServingError> {
        let seqs: Vec<SeqId> = batch.iter().map(|&(seq, _)| seq).collect();
        let (mut q_lens, mut kv_lens, mut slots) = (Vec::new(), Vec::new(), Vec::new());
        let mut width = 1;
        for &(seq, first) in batch {
            let len = self.allocator.len(seq)?;
            let at = slots.len();
            slots.resize(at + len.saturating_sub(first), 0);
            self.allocator.write_slots(seq, first, &mut slots[at..])?;
            q_lens.push(len - first);
            kv_lens.push(len);
            width = width.max(self.allocator.blocks(seq)?.len());
        }
        let mut table = vec![0; seqs.len() * width];
        self.allocator.write_padded_table(&seqs, width, &mut table)?;
        let Shape { q_heads, kv_heads, head_dim, .. } = self.shape;
        let layout = self.cache.layout().clone();
        let mut spec =
            ProblemSpec::new(layout.dtype(), q_heads, kv_heads, head_dim, &q_lens, &kv_lens);
        spec.causal = true;
        spec.kv = KvStorage::Paged(layout);
        let problem = Problem::new(spec)?;
        let plan = self.plans.choose(&problem)?;
        let rows =
            2 * kv_heads * problem.lengths().total_kv() + 2 * q_heads * problem.lengths().total_q();
        let bytes = (rows * head_dim * size_of::<f32>()) as u64;
        let batch = seqs.len();
        self.step = Some(Step { phase, plan, slots, table, batch, width, bytes, sampled });
        Ok(())
    }

    /// Notes the state of the cache at the end of a phase.
    pub(crate) fn end_phase(&mut self, phase: &'static str) {
        let stats = self.allocator.stats();
        self.ledger.note_blocks(phase, stats);
    }

    /// The books so far.
    pub(crate) const fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// The pool's statistics.
    pub(crate) fn stats(&self) -> Stats {
        self.allocator.stats()
    }
}

impl Attention for Serving {
    type Error = ServingError;

    fn attend(
        &mut self,
        layer: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        o: &mut [f32],
    ) -> Result<(), ServingError> {
        let step = self.step.as_ref().ok_or(ServingError::NoStep)?;
        self.cache.write(layer, &step.slots, k, v);
        let problem = &step.plan.problem;
        let rows = problem.lengths().total_q();
        let shape = [rows, self.shape.q_heads, self.shape.head_dim];
        let table = View::contiguous("block_table", &step.table, &[step.batch, step.width])?;
        let q = View::contiguous("q", q, &shape)?;
        let inputs = Inputs::new(q.into(), self.cache.view(layer, table)?);
        let mut outputs =
            Outputs { o: TensorViewMut::F32(ViewMut::contiguous("o", o, &shape)?), lse: None };
        let start = Instant::now();
        let (kernel, reason, workspace) = match &mut self.backend {
            Backend::Cpu(engine, workspace) => {
                engine.forward(&step.plan, &inputs, &mut outputs, workspace)?;
                (step.plan.kernel, step.plan.reason, workspace.bytes())
            }
            Backend::Reference => {
                attn_reference::naive::forward(problem, &inputs, outputs)?;
                (attn_reference::naive::NAME, "the caller asked for the reference", Bytes::ZERO)
            }
        };
        let time = start.elapsed();
        let layers = self.shape.layers;
        let sampled = step.sampled && [0, layers / 2, layers - 1].contains(&layer);
        let worst = match sampled {
            true => Some(worst_error(problem, &inputs, o)?),
            false => None,
        };
        let (phase, plan, bytes) = (step.phase, &step.plan, step.bytes);
        let call = Call { phase, kernel, reason, plan, time, bytes, workspace, worst };
        self.ledger.enter(call);
        Ok(())
    }
}

/// The largest distance of an output from the f64 reference of the same call.
fn worst_error(problem: &Problem, inputs: &Inputs<'_>, o: &[f32]) -> Result<f64, ServingError> {
    let want = attn_reference::naive::forward_f64(problem, inputs)?;
    let errors = o.iter().zip(&want.o).map(|(&got, &want)| {
        let error = (f64::from(got) - want).abs();
        if error.is_nan() { f64::INFINITY } else { error }
    });
    Ok(errors.fold(0.0, f64::max))
}
