//! Gradients by recomputation: tiled, over worker threads, for any dense [`Problem`].
//!
//! The invariant: every element of a gradient is summed by one task, over tiles on a grid that starts
//! at row 0 and key 0 of its sequence, in grid order. So the bits depend on neither the number of
//! threads, the block sizes of the plan nor the other sequences, and there is nothing to reduce at
//! the end. Scores and their gradients exist one tile at a time; nothing is rounded to the stored
//! type but the results.
//!
//! Passes over the same tiles, the first two always:
//!
//! - [`queries`]: a task owns a block of query rows, sums their dQ and their [`statistics`], and walks the
//!   keys;
//! - [`keys`]: a task owns a block of keys, sums their dK and dV, and walks the query rows;
//! - [`bias`]: a task owns cells of the bias, and walks all pairs that they were added to.
//!
//! That is eight matrix products for the five of the usual single pass. A single pass owns either
//! keys or rows and must add the other side's gradient from many tasks: with atomics the bits depend
//! on timing, and with one partial dQ for each block of keys the memory is that of the scores. Owning
//! both costs scores and dP twice; the eighth product corrects dQ for the rounding of what the
//! forward stored.
//!
//! Source: FlashAttention-2, arXiv:2307.08691, algorithm 2, with its loop over the rows of dQ split off.

use attn_core::{
    Arrangement, Error, ForwardResults, Gradients, Inputs, KvStorage, Plan, Problem, Tile,
};
use parking_lot::Mutex;

use super::prefill::unchecked;
use super::simd::{LANE_GROUP, Simd};
use super::workers::Workers;
use super::workspace::carve;

mod bias;
mod keys;
mod output;
mod queries;
mod statistics;
#[cfg(test)]
mod tests;
mod tile;

use output::GradientRows;
use tile::{Lines, Pair};

/// Flattened query rows of a tile: three vectors of AVX-512, as in the forward.
const TILE_ROWS: usize = 48;
/// Keys of a tile: its weights and their gradient, 12 KiB each, stay in the first-level cache.
const TILE_KEYS: usize = 64;
/// Columns by which rows of a block are apart beyond their length: without them, rows of 128 f32
/// fall into an eighth of the sets of a first-level cache.
const ROW_PAD: usize = 16;

/// Scratch of a call on `threads` workers, in f32.
///
/// Invariants: linear in the query rows (three numbers a head) and in the threads; the lengths of keys
/// and values do not matter beyond one block.
pub(crate) fn workspace(problem: &Problem, tile: Tile, threads: usize) -> usize {
    let sizes = Sizes::new(problem, tile);
    let statistics = statistics::scratch_len(problem);
    statistics.saturating_add(sizes.scratch_len(problem).saturating_mul(threads.max(1)))
}

/// Runs a backward plan, whose tile counts the flattened query rows and the keys that one task owns.
///
/// Invariants: every row of dq, dk and dv is written, padding rows with 0; the tile changes the time,
/// never the bits.
///
/// # Errors
/// As [`Inputs::check`], for data that was not checked.
///
/// # Panics
/// When `scratch` is shorter than [`workspace`] says: an error of the engine.
pub(crate) fn gradients(
    workers: &Workers<'_>,
    plan: &Plan,
    inputs: &Inputs<'_>,
    results: &ForwardResults<'_>,
    gradients: &mut Gradients<'_>,
    mut scratch: &mut [f32],
) -> Result<(), Error> {
    let problem = &plan.problem;
    let sizes = Sizes::new(problem, plan.tile);
    let Gradients { dq, dk, dv, dsinks, dbias } = gradients;
    let mut output = GradientRows::new(workers.simd, problem, dq, dk, dv);
    if problem.q_arrangement() == Arrangement::Padded {
        output.clear_query_padding().ok_or_else(unchecked)?;
    }
    if *problem.kv() == KvStorage::Dense(Arrangement::Padded) {
        output.clear_key_padding().ok_or_else(unchecked)?;
    }
    let statistics = carve(&mut scratch, statistics::scratch_len(problem));
    let mut team = Team { workers: *workers, part: sizes.scratch_len(problem), scratch };
    let call = Call { simd: workers.simd, problem, inputs, results, sizes };
    let output = Mutex::new(output);
    let statistics = &queries::run(&mut team, &call, &output, statistics)?;
    keys::run(&mut team, &call, statistics, &output)?;
    if let Some(dsinks) = dsinks {
        statistics::sinks(&mut team, &call, statistics, dsinks)?;
    }
    if let Some(dbias) = dbias {
        bias::run(&mut team, &call, statistics, dbias)?;
    }
    Ok(())
}

/// Extents of the blocks of one call.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    /// Flattened query rows of a block, whole tiles.
    rows: usize,
    /// Keys of a block, whole tiles.
    keys: usize,
    head_dim: usize,
    value_dim: usize,
    /// Distance between rows of Q, K and their gradients.
    key_stride: usize,
    /// Distance between rows of V, dO and dV.
    value_stride: usize,
}

impl Sizes {
    fn new(problem: &Problem, tile: Tile) -> Self {
        let stride = |dim: usize| padded(dim).saturating_add(ROW_PAD);
        let lengths = problem.lengths();
        let rows = lengths.longest_q().saturating_mul(problem.group()).max(1);
        Self {
            rows: tile.q.clamp(1, rows).next_multiple_of(TILE_ROWS),
            keys: tile.kv.clamp(1, lengths.longest_kv().max(1)).next_multiple_of(TILE_KEYS),
            head_dim: problem.head_dim(),
            value_dim: problem.value_dim(),
            key_stride: stride(problem.head_dim()),
            value_stride: stride(problem.value_dim()),
        }
    }

    /// Scratch of one worker: that of the pass that needs most.
    fn scratch_len(&self, problem: &Problem) -> usize {
        let bias = if problem.wants_dbias() { bias::scratch_len(self) } else { 0 };
        let most = queries::scratch_len(self).max(keys::scratch_len(self)).max(bias);
        most.saturating_add(Lines::scratch_len(self)).saturating_add(Pair::scratch_len(problem))
    }
}

/// `len` rounded up to whole lane groups; saturates, as a problem without rows may state any dimension.
fn padded(len: usize) -> usize {
    len.checked_next_multiple_of(LANE_GROUP).unwrap_or(usize::MAX)
}

/// Scratch of blocks of some rows of some elements each, in f32; saturates.
fn area<const N: usize>(blocks: [(usize, usize); N]) -> usize {
    let areas = blocks.into_iter().map(|(rows, row)| padded(rows.saturating_mul(row)));
    areas.fold(0, usize::saturating_add)
}

/// What the tasks of all passes share.
struct Call<'c, 'a> {
    simd: Simd,
    problem: &'c Problem,
    inputs: &'c Inputs<'a>,
    results: &'c ForwardResults<'a>,
    sizes: Sizes,
}

/// The workers of a call, each with its part of the scratch.
struct Team<'w, 's> {
    workers: Workers<'w>,
    /// Scratch of one worker.
    part: usize,
    scratch: &'s mut [f32],
}

impl Team<'_, '_> {
    fn threads(&self) -> usize {
        self.workers.pool.current_num_threads()
    }

    /// Hands the tasks out in order, each to the next worker that is free; the first error is returned
    /// after the tasks in hand are done.
    fn run<T: Send>(
        &mut self,
        tasks: Vec<T>,
        work: impl Fn(T, &mut [f32]) -> Result<(), Error> + Sync,
    ) -> Result<(), Error> {
        let threads = self.threads().min(tasks.len());
        let queue = Mutex::new(tasks.into_iter());
        let failure = Mutex::new(None);
        let worker = &|part: &mut [f32]| {
            loop {
                // A statement of its own: the lock must not be held while the task runs.
                let task = queue.lock().next();
                let Some(task) = task else { break };
                if let Err(error) = work(task, part) {
                    failure.lock().get_or_insert(error);
                    break;
                }
            }
        };
        let parts = self.scratch.chunks_exact_mut(self.part);
        assert!(parts.len() >= threads, "scratch for {threads} workers");
        self.workers.pool.scope(|scope| {
            for part in parts.take(threads) {
                scope.spawn(move |_| worker(part));
            }
        });
        match failure.into_inner() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }
}

/// Owned extent of a task: `limit`, or less where that would leave workers without a task.
fn fair_block(limit: usize, unit: usize, total: usize, threads: usize) -> usize {
    // Four tasks a thread leave little waiting at the end.
    total.div_ceil(4 * threads.max(1)).next_multiple_of(unit).clamp(unit, limit.max(unit))
}
