//! Forward attention divided by query rows: tiled, with an online softmax, over any [`Problem`].
//!
//! Invariant: the bits of a row depend on its own sequence and on the key tile alone, never on the
//! number of threads, the size of a task or the other sequences: key blocks lie on a grid that starts
//! at key 0, and a row meets them in order. Scores exist one tile at a time.
//!
//! A task is a chunk of flattened query rows (see [`super::scores`]) of one sequence and KV head. It
//! walks the key blocks outermost and converts each to f32 once for all of its rows; queries,
//! outputs and one block of K and V stay in the second-level cache meanwhile. The usual order, query
//! tiles outermost, would convert or transpose K and V for every 48 rows, a tenth of the work.
//!
//! Source: FlashAttention-2, arXiv:2307.08691, algorithm 1, with the loops over a chunk of query
//! tiles exchanged.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use attn_core::{Arrangement, Error, Inputs, KvView, Outputs, Plan, Problem, Tile};
use parking_lot::Mutex;

use super::rows::StoredRows;
use super::scores::{ScoreRules, Visit, tile_width};
use super::simd::{ColumnState, Order, Product, Simd, Start};
use super::workers::Workers;
use super::workspace::{carve, lines};

mod output;
#[cfg(test)]
mod tests;

pub(super) use output::OutputRows;

/// Flattened query rows of a register-blocked tile: three vectors of AVX-512, and a multiple of the
/// narrower tiles of the other levels.
const TILE_ROWS: usize = 48;
/// Extents of blocks are rounded up to a cache line of f32.
const BLOCK_ALIGN: usize = 16;
/// Columns by which rows of K and V blocks are apart beyond their length: without them, rows of 128
/// f32 fall into an eighth of the sets of a first-level cache.
const ROW_PAD: usize = 16;

/// Scratch of a call on `threads` workers, in f32.
pub(crate) fn workspace(problem: &Problem, tile: Tile, threads: usize) -> usize {
    let sizes = Sizes::new(problem, tile);
    sizes.scratch_len(problem).saturating_mul(threads)
}

/// Runs a forward plan, whose tile counts flattened query rows and keys.
///
/// Invariants: a row's bits depend on the plan's `tile.kv` and not on its `tile.q`, which only says how
/// many rows share a converted block. A `tile.q` that keeps queries and outputs within half of the
/// second-level cache and a `tile.kv` of 128 are fastest where it was measured.
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
    let (simd, problem) = (workers.simd, &plan.problem);
    let sizes = Sizes::new(problem, plan.tile);
    let mut output = OutputRows::new(simd, problem, outputs);
    if problem.q_arrangement() == Arrangement::Padded {
        output.fill_padding()?;
    }
    let tasks = tasks(problem, &sizes, workers.pool.current_num_threads());
    let output = Mutex::new(output);
    let call = Call { simd, problem, inputs, sizes, output: &output };
    let next = AtomicUsize::new(0);
    let failure = Mutex::new(None);
    let work = |scratch: &mut [f32]| {
        while let Some(task) = tasks.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(error) = call.run(task, scratch) {
                failure.lock().get_or_insert(error);
            }
        }
    };
    workers.pool.scope(|scope| {
        let parts = scratch.chunks_exact_mut(sizes.scratch_len(problem));
        for part in parts.take(tasks.len()) {
            scope.spawn(|_| work(part));
        }
    });
    match failure.into_inner() {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

/// Extents of the blocks of one call.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    /// Flattened query rows of a task.
    rows: usize,
    /// Keys of a block.
    keys: usize,
    head_dim: usize,
    value_dim: usize,
    /// Distance between rows of a K block.
    key_stride: usize,
    /// Distance between rows of a V block.
    value_stride: usize,
}

impl Sizes {
    fn new(problem: &Problem, tile: Tile) -> Self {
        let stride = |dim: usize| dim.next_multiple_of(BLOCK_ALIGN) + ROW_PAD;
        let longest = problem.lengths().longest_kv().max(1);
        let rows = problem.lengths().longest_q().saturating_mul(problem.group()).max(1);
        Self {
            rows: tile.q.clamp(1, rows).next_multiple_of(TILE_ROWS),
            keys: tile.kv.clamp(1, longest).next_multiple_of(BLOCK_ALIGN),
            head_dim: problem.head_dim(),
            value_dim: problem.value_dim(),
            key_stride: stride(problem.head_dim()),
            value_stride: stride(problem.value_dim()),
        }
    }

    fn scratch_len(&self, problem: &Problem) -> usize {
        lines(self.rows * self.head_dim)
            + lines(self.rows * self.value_dim)
            + 2 * lines(self.rows)
            + lines(self.keys * self.key_stride)
            + lines(self.keys * self.value_stride)
            + lines(TILE_ROWS * self.keys.max(self.head_dim).max(self.value_dim))
            + lines(TILE_ROWS)
            + ScoreRules::scratch_len(problem, self.keys, TILE_ROWS)
    }
}

/// A chunk of flattened query rows of one sequence and KV head.
#[derive(Debug)]
struct Task {
    sequence: usize,
    kv_head: usize,
    rows: Range<usize>,
    /// Keys that the chunk's rows reach, times its rows: what its time is proportional to.
    cost: u64,
}

/// The tasks of a call, the longest first so that none starts last.
fn tasks(problem: &Problem, sizes: &Sizes, threads: usize) -> Vec<Task> {
    let (lengths, group) = (problem.lengths(), problem.group());
    let total: usize = lengths.total_q().saturating_mul(problem.q_heads());
    // Four tasks a thread leave little waiting at the end; a chunk is not made smaller than two
    // tiles for it.
    let fair = total.div_ceil(4 * threads.max(1)).max(2 * TILE_ROWS);
    let chunk_rows = sizes.rows.min(fair.next_multiple_of(TILE_ROWS));
    let mut tasks = Vec::new();
    for sequence in 0..lengths.batch() {
        let (q_len, kv_len) = (lengths.q(sequence), lengths.kv(sequence));
        let tiles = (q_len * group).div_ceil(TILE_ROWS);
        if tiles == 0 {
            continue;
        }
        // Chunks of equal size: a short last one would use a converted block badly.
        let chunks = tiles.div_ceil(chunk_rows / TILE_ROWS);
        for chunk in 0..chunks {
            let first = tiles * chunk / chunks * TILE_ROWS;
            let end = (tiles * (chunk + 1) / chunks * TILE_ROWS).min(q_len * group);
            let positions = first / group..end.div_ceil(group);
            let keys = problem.band().rows(positions, q_len, kv_len).len();
            let cost = (keys as u64).saturating_mul((end - first) as u64);
            for kv_head in 0..problem.kv_heads() {
                tasks.push(Task { sequence, kv_head, rows: first..end, cost });
            }
        }
    }
    tasks.sort_by_key(|task| std::cmp::Reverse(task.cost));
    tasks
}

/// What all tasks of a call share.
struct Call<'c, 'a, 'o> {
    simd: Simd,
    problem: &'c Problem,
    inputs: &'c Inputs<'a>,
    sizes: Sizes,
    output: &'c Mutex<OutputRows<'c, 'o>>,
}

/// The scratch of a task.
struct Scratch<'s> {
    /// Queries, transposed by tile: `[tile][head_dim, width]`.
    queries: &'s mut [f32],
    /// Unnormalised outputs, transposed by tile: `[tile][value_dim, width]`.
    outputs: &'s mut [f32],
    max: &'s mut [f32],
    sum: &'s mut [f32],
    /// K block `[keys, key_stride]`.
    keys: &'s mut [f32],
    /// V block `[keys, value_stride]`.
    values: &'s mut [f32],
    /// Scores `[keys, width]`, and rows on their way in and out.
    tile: &'s mut [f32],
    rescale: &'s mut [f32],
    /// For the score rules.
    rest: &'s mut [f32],
}

/// K and V of a task.
struct Stored<'a> {
    keys: StoredRows<'a>,
    values: StoredRows<'a>,
    key_factor: f32,
    value_factor: f32,
}

impl Call<'_, '_, '_> {
    fn run(&self, task: &Task, scratch: &mut [f32]) -> Result<(), Error> {
        let Self { problem, inputs, sizes, .. } = *self;
        let rules = ScoreRules::new(self.simd, problem, inputs, task.sequence, task.kv_head)?;
        let mut rest = scratch;
        let mut scratch = Scratch {
            queries: carve(&mut rest, sizes.rows * sizes.head_dim),
            outputs: carve(&mut rest, sizes.rows * sizes.value_dim),
            max: carve(&mut rest, sizes.rows),
            sum: carve(&mut rest, sizes.rows),
            keys: carve(&mut rest, sizes.keys * sizes.key_stride),
            values: carve(&mut rest, sizes.keys * sizes.value_stride),
            tile: carve(&mut rest, TILE_ROWS * sizes.keys.max(sizes.head_dim).max(sizes.value_dim)),
            rescale: carve(&mut rest, TILE_ROWS),
            rest,
        };
        let stored = self.stored(task).ok_or_else(unchecked)?;
        self.load_queries(task, &rules, &mut scratch).ok_or_else(unchecked)?;
        self.walk(task, &rules, &stored, &mut scratch).ok_or_else(unchecked)?;
        self.finish(task, &rules, &mut scratch)
    }

    fn stored(&self, task: &Task) -> Option<Stored<'_>> {
        let (problem, inputs) = (self.problem, self.inputs);
        let (k, v, table) = match &inputs.kv {
            KvView::Dense { k, v } => (k, v, None),
            KvView::Paged { k_cache, v_cache, block_table, .. } => {
                (k_cache, v_cache, Some(block_table))
            }
        };
        Some(Stored {
            keys: StoredRows::cached(problem, k, table, task.sequence)?,
            values: StoredRows::cached(problem, v, table, task.sequence)?,
            key_factor: inputs.k_scale_of(task.sequence, task.kv_head),
            value_factor: inputs.v_scale_of(task.sequence, task.kv_head),
        })
    }

    /// Reads and transposes the chunk's queries, and clears its state.
    fn load_queries(&self, task: &Task, rules: &ScoreRules<'_>, s: &mut Scratch<'_>) -> Option<()> {
        let (dim, group) = (self.sizes.head_dim, rules.group());
        let queries = StoredRows::queries(self.problem, &self.inputs.q, task.sequence)?;
        for (rows, at) in tiles(task) {
            let width = tile_width(rows.len());
            let staging = &mut s.tile[..rows.len() * dim];
            // A head's rows are every `group`-th, from its first in the tile.
            for first in rows.clone().take(group) {
                let (token, head) = (first / group, task.kv_head * group + first % group);
                let count = (rows.end - first).div_ceil(group);
                let (dst, stride) = (&mut staging[(first - rows.start) * dim..], group * dim);
                let factor = rules.query_factor();
                queries.widen(self.simd, head, token..token + count, factor, dst, stride)?;
            }
            let tile = &mut s.queries[at * dim..(at + width) * dim];
            if width > rows.len() {
                tile.fill(0.0);
            }
            self.simd.transpose(staging, dim, (rows.len(), dim), tile, width);
        }
        s.outputs.fill(0.0);
        s.max.fill(f32::NEG_INFINITY);
        s.sum.fill(0.0);
        Some(())
    }

    /// The passes over the key blocks.
    fn walk(
        &self,
        task: &Task,
        rules: &ScoreRules<'_>,
        stored: &Stored<'_>,
        s: &mut Scratch<'_>,
    ) -> Option<()> {
        let size = self.sizes.keys;
        let reach = rules.keys(task.rows.clone());
        for block in reach.start / size..reach.end.div_ceil(size) {
            // Keys outside the chunk's reach may be unwritten storage: they are not loaded.
            let keys = (block * size).max(reach.start)..((block + 1) * size).min(reach.end);
            let mut loaded = false;
            for (rows, at) in tiles(task) {
                let Some(visit) = rules.visit(rows.clone(), keys.clone()) else {
                    continue;
                };
                if !loaded {
                    self.load_block(task, stored, keys.clone(), s)?;
                    loaded = true;
                }
                let visited = visit.keys.start - keys.start..visit.keys.end - keys.start;
                self.tile(rules, rows, at, visited, &visit, s);
            }
        }
        Some(())
    }

    /// Converts a block of K and V.
    fn load_block(
        &self,
        task: &Task,
        stored: &Stored<'_>,
        keys: Range<usize>,
        s: &mut Scratch<'_>,
    ) -> Option<()> {
        let Sizes { key_stride, value_stride, .. } = self.sizes;
        let (simd, head) = (self.simd, task.kv_head);
        stored.keys.widen(simd, head, keys.clone(), stored.key_factor, s.keys, key_stride)?;
        stored.values.widen(simd, head, keys, stored.value_factor, s.values, value_stride)
    }

    /// One tile of rows against the visited part of a block.
    fn tile(
        &self,
        rules: &ScoreRules<'_>,
        rows: Range<usize>,
        at: usize,
        visited: Range<usize>,
        visit: &Visit,
        s: &mut Scratch<'_>,
    ) {
        let Sizes { head_dim, value_dim, key_stride, value_stride, .. } = self.sizes;
        let width = tile_width(rows.len());
        let scores = &mut s.tile[..visited.len() * width];
        let product = Product {
            rows: visited.len(),
            cols: width,
            inner: head_dim,
            a: &s.keys[visited.start * key_stride..],
            a_stride: key_stride,
            order: Order::RowMajor,
            b: &s.queries[at * head_dim..],
            b_stride: width,
        };
        self.simd.product(&product, Start::Zero, scores, width);
        rules.apply(scores, width, rows.clone(), visit, s.rest);
        let rescale = &mut s.rescale[..width];
        let state = ColumnState {
            max: &mut s.max[at..at + width],
            sum: &mut s.sum[at..at + width],
            rescale,
        };
        self.simd.softmax_columns(scores, width, rules.exponent(), state);
        rules.drop_columns(scores, width, rows, &visit.keys);
        let product = Product {
            rows: value_dim,
            cols: width,
            inner: visited.len(),
            a: &s.values[visited.start * value_stride..],
            a_stride: value_stride,
            order: Order::ColumnMajor,
            b: scores,
            b_stride: width,
        };
        let outputs = &mut s.outputs[at * value_dim..(at + width) * value_dim];
        self.simd.product(&product, Start::Scaled(&s.rescale[..width]), outputs, width);
    }

    /// Normalises, transposes and writes the chunk's outputs.
    fn finish(
        &self,
        task: &Task,
        rules: &ScoreRules<'_>,
        s: &mut Scratch<'_>,
    ) -> Result<(), Error> {
        let dim = self.sizes.value_dim;
        for (rows, at) in tiles(task) {
            let (width, count) = (tile_width(rows.len()), rows.len());
            let staging = &mut s.tile[..count * dim];
            let outputs = &s.outputs[at * dim..(at + width) * dim];
            self.simd.transpose(outputs, width, (dim, count), staging, dim);
            for (i, row) in rows.clone().enumerate() {
                let head = task.kv_head * rules.group() + row % rules.group();
                let sink = self.inputs.sinks.as_ref().and_then(|sinks| sinks.get(&[head]));
                let total = Total::new(s.max[at + i], s.sum[at + i], sink);
                s.sum[at + i] = total.lse;
                let line = &mut staging[i * dim..(i + 1) * dim];
                match total.factor {
                    Some(factor) => self.simd.scale(line, factor * rules.keep_factor()),
                    None => line.fill(0.0),
                }
            }
            let lse = &s.sum[at..at + count];
            self.output
                .lock()
                .write(task.sequence, task.kv_head, rows, staging, lse)
                .ok_or_else(unchecked)?;
        }
        Ok(())
    }
}

/// The tiles of a task: their flattened rows, and where their columns start in the chunk.
fn tiles(task: &Task) -> impl Iterator<Item = (Range<usize>, usize)> + use<> {
    let Range { start, end } = task.rows;
    (start..end)
        .step_by(TILE_ROWS)
        .map(move |first| (first..(first + TILE_ROWS).min(end), first - start))
}

/// The denominator of a row.
pub(super) struct Total {
    /// Factor of the unnormalised output; `None` when no key has weight, and the output is 0.
    pub(super) factor: Option<f32>,
    /// Natural log of the whole denominator.
    pub(super) lse: f32,
}

impl Total {
    /// From the base-2 running maximum and the sum relative to it.
    #[expect(clippy::cast_possible_truncation, reason = "the rounding to f32 is meant")]
    pub(super) fn new(max: f32, sum: f32, sink: Option<f32>) -> Self {
        // The sum tells, not the maximum: with a NaN among the scores the maximum may be -inf too.
        if sum == 0.0 {
            return Self { factor: None, lse: sink.unwrap_or(f32::NEG_INFINITY) };
        }
        let (max, sum) = (f64::from(max), f64::from(sum));
        let Some(sink) = sink else {
            let lse = (max + sum.log2()) * std::f64::consts::LN_2;
            return Self { factor: Some((1.0 / sum) as f32), lse: lse as f32 };
        };
        let sink = f64::from(sink) * std::f64::consts::LOG2_E;
        let top = max.max(sink);
        let scaled = (max - top).exp2();
        let total = sum * scaled + (sink - top).exp2();
        let lse = (top + total.log2()) * std::f64::consts::LN_2;
        Self { factor: Some((scaled / total) as f32), lse: lse as f32 }
    }
}

/// What is returned where data does not cover the problem, though [`Inputs::check`] accepts only
/// data that does.
pub(super) fn unchecked() -> Error {
    Error::invalid("inputs", "tensors that cover the problem", "a row or page outside its storage")
}
