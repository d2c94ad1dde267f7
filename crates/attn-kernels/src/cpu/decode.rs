//! Forward attention divided by keys: few query rows against a long, usually paged, cache.
//!
//! Invariant: every byte of K and V that some row may see is read once, in storage order, whatever the
//! number of query heads that share it; and the bits of a sequence depend on its own lengths and on
//! the plan's split alone, never on the number of threads, the other sequences or the page size.
//!
//! A task is a part of one sequence's keys and takes all KV heads along. The usual division, by head,
//! visits a page of `[slot, head, dim]` rows once a head, an eighth of it at a time, and neither the
//! prefetchers nor the open memory row survive that. Parts leave `(o, max, sum)` in scratch and are
//! merged in order once all are there, with the sink, which belongs to the row and not to a part.
//!
//! Source: Flash-Decoding (Dao, Haziza, Massa, Sizov, 2023) for the division; PagedAttention,
//! arXiv:2309.06180, for the pages.

use std::ops::Range;

use attn_core::{
    Arrangement, Error, Inputs, KvView, Outputs, Plan, Problem, Split, TensorView, Tile, View,
};
use parking_lot::Mutex;

use super::prefill::{OutputRows, unchecked};
use super::scores::ScoreRules;
use super::simd::{LANE_GROUP, MAX_ROWS, Simd, Widen, packed_len, widened_len};
use super::workers::Workers;
use super::workspace::lines;

mod chunk;
mod parts;
mod store;
#[cfg(test)]
mod tests;

use parts::PartLayout;

/// Query rows that the score rules are applied to at a time.
const RULE_ROWS: usize = 48;

/// Scratch of a call on `threads` workers, in f32.
pub(crate) fn workspace(problem: &Problem, tile: Tile, split: Split, threads: usize) -> usize {
    let sizes = Sizes::new(problem, tile);
    (0..problem.lengths().batch())
        .map(|sequence| Keys::new(problem, split, sequence).parts_len(problem, sequence))
        .fold(sizes.worker_len(problem).saturating_mul(threads), usize::saturating_add)
}

/// Runs a forward plan, whose `split` divides the visible keys of each sequence.
///
/// Of the plan's tile only `kv` matters, in whole lane groups up to [`MAX_ROWS`]: all query rows of a
/// sequence meet a tile of keys together.
///
/// # Errors
/// As [`Inputs::check`], for data that was not checked.
///
/// # Panics
/// When `scratch` is shorter than [`workspace`] says: an error of the engine.
pub(crate) fn forward(
    workers: &Workers<'_>,
    plan: &Plan,
    inputs: &Inputs<'_>,
    outputs: &mut Outputs<'_>,
    scratch: &mut [f32],
) -> Result<(), Error> {
    let (k, v, table) = match &inputs.kv {
        KvView::Dense { k, v } => (k, v, None),
        KvView::Paged { k_cache, v_cache, block_table, .. } => {
            (k_cache, v_cache, Some(block_table))
        }
    };
    let (simd, problem) = (workers.simd, &plan.problem);
    let sizes = Sizes::new(problem, plan.tile);
    macro_rules! by_type {
        ($($kind:ident)*) => {
            match (k, v) {
                $((TensorView::$kind(k), TensorView::$kind(v)) => {
                    let cache = Cache { k, v, table };
                    Call { simd, problem, inputs, sizes, split: plan.split, cache }
                        .run(workers, outputs, scratch)
                })*
                (k, v) => Err(Error::layout("v", k.dtype().name(), v.dtype())),
            }
        };
    }
    by_type!(F32 F16 BF16 F8E4M3 F8E5M2)
}

/// Extents of the scratch of one worker.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    /// Keys of a tile, and the distance between rows of scores.
    keys: usize,
    kv_heads: usize,
    head_dim: usize,
    value_dim: usize,
    /// Query rows that share one KV head, of the longest sequence.
    group_rows: usize,
}

impl Sizes {
    fn new(problem: &Problem, tile: Tile) -> Self {
        Self {
            keys: tile.kv.clamp(1, MAX_ROWS).next_multiple_of(LANE_GROUP),
            kv_heads: problem.kv_heads(),
            head_dim: problem.head_dim(),
            value_dim: problem.value_dim(),
            group_rows: problem.lengths().longest_q() * problem.group(),
        }
    }

    /// Elements of a worker's scratch.
    fn worker_len(&self, problem: &Problem) -> usize {
        self.queries_len(self.group_rows)
            + self.scores_len(self.group_rows)
            + lines(widened_len(self.head_dim))
            + lines(self.head_dim)
            + lines(self.keys * self.head_dim)
            + lines(self.keys * self.value_dim)
            + lines(rule_keys(self.keys) * RULE_ROWS)
            + ScoreRules::scratch_len(problem, rule_keys(self.keys), RULE_ROWS)
    }

    /// Elements of the packed queries of all heads.
    const fn queries_len(&self, rows: usize) -> usize {
        self.kv_heads * packed_len(rows, self.head_dim)
    }

    /// Elements of the scores of all heads; `keys` is in lane groups.
    const fn scores_len(&self, rows: usize) -> usize {
        self.kv_heads * rows * self.keys
    }
}

/// Keys of a tile of score rules, whose first key is rounded down to a multiple of a few.
const fn rule_keys(keys: usize) -> usize {
    keys + LANE_GROUP
}

/// How the keys of one sequence are divided.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Keys {
    /// The keys that some row may see, by causal and window bounds. The rest is neither read nor
    /// divided, so that a window in a long cache leaves no part empty.
    visible: Range<usize>,
    /// Keys of a part.
    part: usize,
    /// Number of parts.
    parts: usize,
}

impl Keys {
    fn new(problem: &Problem, split: Split, sequence: usize) -> Self {
        let (q_len, kv_len) = (problem.lengths().q(sequence), problem.lengths().kv(sequence));
        let visible = problem.band().rows(0..q_len, q_len, kv_len);
        let (part, parts) = (split.keys(visible.len()), split.parts(visible.len()));
        Self { visible, part, parts }
    }

    /// The keys of one part; empty for the only part of a sequence without visible keys.
    fn part(&self, part: usize) -> Range<usize> {
        // A part may be longer than any sequence.
        let start = self.visible.start.saturating_add(part.saturating_mul(self.part));
        start.min(self.visible.end)..start.saturating_add(self.part).min(self.visible.end)
    }

    /// Scratch of all parts, in f32.
    fn parts_len(&self, problem: &Problem, sequence: usize) -> usize {
        PartLayout::new(problem, sequence).len().saturating_mul(self.parts)
    }
}

/// Keys and values as stored.
#[derive(Debug, Clone, Copy)]
struct Cache<'c, 'a, E> {
    k: &'c View<'a, E>,
    v: &'c View<'a, E>,
    table: Option<&'c View<'a, i32>>,
}

/// What all tasks of a call share.
struct Call<'c, 'a, E> {
    simd: Simd,
    problem: &'c Problem,
    inputs: &'c Inputs<'a>,
    sizes: Sizes,
    split: Split,
    cache: Cache<'c, 'a, E>,
}

/// One part of one sequence's keys, and the scratch that its result goes to.
struct Task<'s> {
    sequence: usize,
    keys: Range<usize>,
    result: &'s mut [f32],
}

/// The tasks of a call, in storage order; handing one out cuts its result off the scratch.
struct Queue<'p, 's> {
    problem: &'p Problem,
    split: Split,
    sequence: usize,
    part: usize,
    rest: &'s mut [f32],
}

impl<'s> Iterator for Queue<'_, 's> {
    type Item = Task<'s>;

    fn next(&mut self) -> Option<Task<'s>> {
        if self.sequence >= self.problem.lengths().batch() {
            return None;
        }
        let sequence = self.sequence;
        let division = Keys::new(self.problem, self.split, sequence);
        let keys = division.part(self.part);
        let len = PartLayout::new(self.problem, sequence).len();
        let (result, rest) = std::mem::take(&mut self.rest).split_at_mut(len);
        self.rest = rest;
        self.part += 1;
        if self.part == division.parts {
            (self.sequence, self.part) = (sequence + 1, 0);
        }
        Some(Task { sequence, keys, result })
    }
}

impl<E: Widen> Call<'_, '_, E> {
    fn run(
        &self,
        workers: &Workers<'_>,
        outputs: &mut Outputs<'_>,
        scratch: &mut [f32],
    ) -> Result<(), Error> {
        let worker_len = self.sizes.worker_len(self.problem);
        let threads = workers.pool.current_num_threads();
        let (own, results) = scratch.split_at_mut(worker_len * threads);
        let failure = Mutex::new(None);
        // One hop into the pool for both passes: a decode step may take no longer than waking it.
        workers.pool.install(|| {
            self.partial_results(workers, own, results, &failure);
            if failure.lock().is_none() {
                self.merge_and_write(workers, outputs, results, &failure);
            }
        });
        match failure.into_inner() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Every part of every sequence, the workers taking the next one as they finish.
    fn partial_results(
        &self,
        workers: &Workers<'_>,
        own: &mut [f32],
        results: &mut [f32],
        failure: &Mutex<Option<Error>>,
    ) {
        let (problem, split) = (self.problem, self.split);
        let queue = Mutex::new(Queue { problem, split, sequence: 0, part: 0, rest: results });
        let work = |own: &mut [f32]| {
            loop {
                // Its own statement: the lock is not held while the task runs.
                let task = queue.lock().next();
                let Some(task) = task else { return };
                if let Err(error) = self.run_task(task, own) {
                    failure.lock().get_or_insert(error);
                    return;
                }
            }
        };
        workers.pool.scope(|scope| {
            for own in own.chunks_exact_mut(self.sizes.worker_len(problem).max(1)) {
                scope.spawn(|_| work(own));
            }
        });
    }

    /// Joins the parts of each sequence, normalises and writes.
    fn merge_and_write(
        &self,
        workers: &Workers<'_>,
        outputs: &mut Outputs<'_>,
        mut results: &mut [f32],
        failure: &Mutex<Option<Error>>,
    ) {
        let mut output = OutputRows::new(self.simd, self.problem, outputs);
        if self.problem.q_arrangement() == Arrangement::Padded
            && let Err(error) = output.fill_padding()
        {
            failure.lock().get_or_insert(error);
            return;
        }
        let output = Mutex::new(output);
        workers.pool.scope(|scope| {
            for sequence in 0..self.problem.lengths().batch() {
                let len =
                    Keys::new(self.problem, self.split, sequence).parts_len(self.problem, sequence);
                let (parts, rest) = std::mem::take(&mut results).split_at_mut(len);
                results = rest;
                let output = &output;
                scope.spawn(move |_| {
                    if self.finish(sequence, parts, output).is_none() {
                        failure.lock().get_or_insert_with(unchecked);
                    }
                });
            }
        });
    }

    /// One sequence's rows, from its parts to the output.
    fn finish(
        &self,
        sequence: usize,
        parts: &mut [f32],
        output: &Mutex<OutputRows<'_, '_>>,
    ) -> Option<()> {
        let (problem, inputs) = (self.problem, self.inputs);
        let layout = PartLayout::new(problem, sequence);
        let rows = problem.lengths().q(sequence) * problem.group();
        if rows == 0 {
            return Some(());
        }
        let state = layout.merge(self.simd, parts);
        let keep = inputs.dropout_of(problem).map_or(1.0, |mask| mask.factor());
        layout.finish(self.simd, state, |row| {
            let kv_head = row / rows;
            let head = kv_head * problem.group() + row % rows % problem.group();
            let sink = inputs.sinks.as_ref().and_then(|sinks| sinks.get(&[head]));
            (inputs.v_scale_of(sequence, kv_head) * keep, sink)
        });
        let (o, lse) = layout.finished(parts);
        let heads = o.chunks_exact(rows * self.sizes.value_dim).zip(lse.chunks_exact(rows));
        let mut output = output.lock();
        for (kv_head, (o, lse)) in heads.enumerate() {
            output.write(sequence, kv_head, 0..rows, o, lse)?;
        }
        Some(())
    }
}
