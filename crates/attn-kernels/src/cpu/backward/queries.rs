//! The pass that owns query rows: dQ, and the statistics of the rows that the other passes need.
//!
//! The invariant: a task alone sums over its rows' keys, in order. Its rows, their output gradients
//! and sums stay in the second-level cache, transposed, while tiles of K and V stream past: each is
//! converted once for several tiles of rows.
//!
//! Four products a pair of tiles: scores, dP, `dQ += dS K` and `M += P K`. The last one is why the
//! first delta, the stored output times its gradient, need not be exact: with `d` the exact delta less the
//! first one, known at the end, `dQ = (sum of P (dP - first delta) K - d M) * factor`.

use std::ops::Range;

use attn_core::{Error, View};
use parking_lot::Mutex;

use super::output::GradientRows;
use super::statistics::{self, LARGEST_LSE, RowSums, Statistics, StatisticsMut};
use super::tile::{Columns, Head, KeyBlock, Lines, Pair, TileColumns, tiles};
use super::{Call, Sizes, TILE_KEYS, TILE_ROWS, Team, area, fair_block, unchecked};
use crate::cpu::rows::StoredRows;
use crate::cpu::scores::{Visit, tile_width};
use crate::cpu::simd::{ColumnState, LANE_GROUP, Order, Product, Start, transpose};
use crate::cpu::workspace::carve;

/// A block of flattened query rows of one sequence and KV head.
struct Task<'s> {
    sequence: usize,
    kv_head: usize,
    rows: Range<usize>,
    /// Pairs that the band leaves, roughly: what the time is proportional to.
    cost: usize,
    statistics: StatisticsMut<'s>,
}

/// Scratch of a worker besides that of a tile.
pub(super) fn scratch_len(sizes: &Sizes) -> usize {
    Columns::scratch_len(sizes, sizes.rows)
        .saturating_add(Sums::scratch_len(sizes))
        .saturating_add(KeyBlock::scratch_len(sizes, TILE_KEYS))
        .saturating_add(area([(TILE_ROWS, sizes.value_stride)]))
}

/// Writes dQ of every row, and returns the statistics in `scratch`.
pub(super) fn run<'s>(
    team: &mut Team<'_, '_>,
    call: &Call<'_, '_>,
    output: &Mutex<GradientRows<'_, '_>>,
    mut scratch: &'s mut [f32],
) -> Result<Statistics<'s>, Error> {
    let mut statistics = StatisticsMut::carve(&mut scratch, call.problem);
    let tasks = tasks(call, team.threads(), statistics.reborrow());
    team.run(tasks, |task, part| sum(call, task, part, output))?;
    Ok(statistics.finish())
}

/// The tasks, the longest first so that none starts last.
fn tasks<'s>(
    call: &Call<'_, '_>,
    threads: usize,
    mut statistics: StatisticsMut<'s>,
) -> Vec<Task<'s>> {
    let Call { problem, sizes, .. } = call;
    let (lengths, group) = (problem.lengths(), problem.group());
    let total = lengths.total_q().saturating_mul(problem.q_heads());
    let block = fair_block(sizes.rows, TILE_ROWS, total, threads);
    let mut tasks = Vec::new();
    for sequence in 0..lengths.batch() {
        let (q_len, kv_len) = (lengths.q(sequence), lengths.kv(sequence));
        for kv_head in 0..problem.kv_heads() {
            for rows in tiles(0..q_len * group, block) {
                let positions = rows.start / group..rows.end.div_ceil(group);
                let keys = problem.band().rows(positions, q_len, kv_len).len();
                let cost = keys.saturating_mul(rows.len());
                // Tasks are made in the order of the statistics.
                let statistics = statistics.take(rows.len());
                tasks.push(Task { sequence, kv_head, rows, cost, statistics });
            }
        }
    }
    tasks.sort_by_key(|task| std::cmp::Reverse(task.cost));
    tasks
}

fn sum(
    call: &Call<'_, '_>,
    mut task: Task<'_>,
    scratch: &mut [f32],
    output: &Mutex<GradientRows<'_, '_>>,
) -> Result<(), Error> {
    let Call { problem, sizes, .. } = call;
    let head = Head::new(call, task.sequence, task.kv_head)?;
    let mut rest = scratch;
    let mut lines = Lines::carve(&mut rest, sizes);
    let outputs = carve(&mut rest, TILE_ROWS * sizes.value_stride);
    let mut columns = Columns::carve(&mut rest, sizes, sizes.rows);
    let mut sums = Sums::carve(&mut rest, sizes);
    let mut block = KeyBlock::carve(&mut rest, sizes, TILE_KEYS);
    let mut pair = Pair::carve(&mut rest, problem);
    let row_tiles = || {
        let first = task.rows.start;
        tiles(task.rows.clone(), TILE_ROWS).map(move |rows| (rows.clone(), rows.start - first))
    };
    let results = StoredResults::new(&head)?;
    for (rows, at) in row_tiles() {
        let statistics = task.statistics.part(at..at + rows.len());
        head.load_lines(rows.clone(), &mut lines)?;
        columns.transpose(sizes, rows.len(), at, &lines);
        results.load(&head, rows.clone(), outputs, statistics.shift)?;
        let tile = columns.tile(sizes, rows, at);
        first_deltas(call, outputs, &tile, pair.p, statistics.delta);
        if statistics.shift.iter().any(|lse| lse.is_finite() && lse.abs() > LARGEST_LSE) {
            largest_scores(&head, &tile, &mut block, &mut pair, statistics.shift)?;
        } else {
            statistics.shift.iter_mut().for_each(|lse| *lse = statistics::shift(*lse));
        }
        columns.set_statistics(at, statistics.shift, statistics.delta);
    }
    for keys in head.key_tiles(task.rows.clone()) {
        let mut loaded = false;
        for (rows, at) in row_tiles() {
            let Some(visit) = head.rules.visit(rows.clone(), keys.clone()) else {
                continue;
            };
            if !loaded {
                head.load_keys(keys.clone(), &mut block)?;
                loaded = true;
            }
            let tile = columns.tile(sizes, rows, at);
            head.recompute(&block, &tile, &visit, &mut pair);
            sums.add(&head, &block, &visit, (at, tile.width), &mut pair);
        }
    }
    for (rows, at) in row_tiles() {
        let mut statistics = task.statistics.part(at..at + rows.len());
        sums.finish(&head, rows.clone(), at, &mut statistics, &mut lines);
        output
            .lock()
            .write_queries(task.sequence, task.kv_head, rows, lines.q, sizes)
            .ok_or_else(unchecked)?;
    }
    Ok(())
}

/// The stored output and LSE of one sequence.
struct StoredResults<'a> {
    o: StoredRows<'a>,
    lse: View<'a, f32>,
}

impl<'a> StoredResults<'a> {
    fn new(head: &Head<'_, 'a>) -> Result<Self, Error> {
        let Call { problem, results, .. } = head.call;
        Ok(Self {
            o: StoredRows::queries(problem, &results.o, head.sequence).ok_or_else(unchecked)?,
            lse: problem.q_rows(&results.lse, head.sequence).ok_or_else(unchecked)?,
        })
    }

    /// Reads the outputs of flattened `rows`, one line of `value_stride` a row, and their LSE.
    fn load(
        &self,
        head: &Head<'_, '_>,
        rows: Range<usize>,
        outputs: &mut [f32],
        lse: &mut [f32],
    ) -> Result<(), Error> {
        let group = head.rules.group();
        head.load(&self.o, rows.clone(), 1.0, outputs, head.call.sizes.value_stride)?;
        for (lse, row) in lse.iter_mut().zip(rows) {
            let at = [row / group, head.kv_head * group + row % group];
            *lse = self.lse.get(&at).ok_or_else(unchecked)?;
        }
        Ok(())
    }
}

/// Each row's output times its gradient, summed in the order in which dP is: the score gradients of a
/// row with a single weight are exactly 0.
///
/// All pairs within a lane group are multiplied for the sake of the diagonal, which costs less than a
/// percent of the pass.
fn first_deltas(
    call: &Call<'_, '_>,
    outputs: &[f32],
    tile: &TileColumns<'_>,
    square: &mut [f32],
    deltas: &mut [f32],
) {
    let Call { simd, sizes, .. } = call;
    for (group, deltas) in deltas.chunks_mut(LANE_GROUP).enumerate() {
        let first = group * LANE_GROUP;
        let product = Product {
            rows: deltas.len(),
            cols: LANE_GROUP,
            inner: sizes.value_dim,
            a: &outputs[first * sizes.value_stride..],
            a_stride: sizes.value_stride,
            order: Order::RowMajor,
            b: &tile.d_o[first..],
            b_stride: tile.width,
        };
        simd.product(&product, Start::Zero, square, LANE_GROUP);
        for (i, delta) in deltas.iter_mut().enumerate() {
            *delta = square[i * LANE_GROUP + i];
        }
    }
}

/// Writes the largest score of each row, or its sink's, in base 2: the shifts of rows whose LSE is so
/// large that its rounding alone could make every weight infinite.
#[expect(clippy::cast_possible_truncation, reason = "the rounding to f32 is meant")]
fn largest_scores(
    head: &Head<'_, '_>,
    tile: &TileColumns<'_>,
    block: &mut KeyBlock<'_>,
    pair: &mut Pair<'_>,
    shifts: &mut [f32],
) -> Result<(), Error> {
    let Call { simd, inputs, .. } = head.call;
    let (width, group) = (tile.width, head.rules.group());
    let mut max = [f32::NEG_INFINITY; TILE_ROWS];
    let (mut sum, mut rescale) = ([0.0; TILE_ROWS], [0.0; TILE_ROWS]);
    for keys in head.key_tiles(tile.rows.clone()) {
        let Some(visit) = head.rules.visit(tile.rows.clone(), keys.clone()) else {
            continue;
        };
        head.load_keys(keys, block)?;
        head.scores(block, tile, &visit, pair);
        let state = ColumnState {
            max: &mut max[..width],
            sum: &mut sum[..width],
            rescale: &mut rescale[..width],
        };
        let scores = &mut pair.p[..visit.keys.len() * width];
        simd.softmax_columns(scores, width, head.rules.exponent(), state);
    }
    for ((shift, max), row) in shifts.iter_mut().zip(max).zip(tile.rows.clone()) {
        let q_head = head.kv_head * group + row % group;
        let sink = inputs.sinks.as_ref().and_then(|sinks| sinks.get(&[q_head]));
        let sink = sink.map_or(f64::NEG_INFINITY, |x| f64::from(x) * std::f64::consts::LOG2_E);
        let largest = f64::from(max).max(sink) as f32;
        *shift = if largest == f32::NEG_INFINITY { f32::INFINITY } else { largest };
    }
    Ok(())
}

/// The sums of a task's rows over the keys, transposed tile by tile.
struct Sums<'s> {
    /// Score gradients times keys: `[tile][head_dim, width]`.
    gradient_keys: &'s mut [f32],
    /// Weights times keys, likewise.
    weight_keys: &'s mut [f32],
    /// Score gradients after the soft-cap, one sum a row.
    gradients: &'s mut [f32],
    /// Weights, one sum a row.
    weights: &'s mut [f32],
}

impl<'s> Sums<'s> {
    /// Sums of nothing.
    fn carve(rest: &mut &'s mut [f32], sizes: &Sizes) -> Self {
        let sums = Self {
            gradient_keys: carve(rest, sizes.rows * sizes.head_dim),
            weight_keys: carve(rest, sizes.rows * sizes.head_dim),
            gradients: carve(rest, sizes.rows),
            weights: carve(rest, sizes.rows),
        };
        sums.gradient_keys.fill(0.0);
        sums.weight_keys.fill(0.0);
        sums.gradients.fill(0.0);
        sums.weights.fill(0.0);
        sums
    }

    fn scratch_len(sizes: &Sizes) -> usize {
        let (rows, dim) = (sizes.rows, sizes.head_dim);
        area([(rows, dim), (rows, dim), (rows, 1), (rows, 1)])
    }

    /// Adds a recomputed tile to the `width` columns from `at`; the pair is used up.
    fn add(
        &mut self,
        head: &Head<'_, '_>,
        block: &KeyBlock<'_>,
        visit: &Visit,
        (at, width): (usize, usize),
        pair: &mut Pair<'_>,
    ) {
        let Call { simd, sizes, .. } = head.call;
        let (dim, count) = (sizes.head_dim, visit.keys.len());
        let sums = at..at + width;
        simd.add_columns(&pair.p[..count * width], &mut self.weights[sums.clone()]);
        simd.add_columns(&pair.ds[..count * width], &mut self.gradients[sums]);
        head.uncap(&mut pair.p[..count * width], pair.capped);
        head.uncap(&mut pair.ds[..count * width], pair.capped);
        for (pairs, sums) in
            [(&*pair.p, &mut *self.weight_keys), (&*pair.ds, &mut *self.gradient_keys)]
        {
            let product = Product {
                rows: dim,
                cols: width,
                inner: count,
                a: block.keys_from(sizes, visit.keys.start),
                a_stride: sizes.key_stride,
                order: Order::ColumnMajor,
                b: pairs,
                b_stride: width,
            };
            simd.product(&product, Start::Keep, &mut sums[at * dim..], width);
        }
    }

    /// Writes the final statistics of the tile of `rows`, and its dQ to the lines of queries.
    fn finish(
        &mut self,
        head: &Head<'_, '_>,
        rows: Range<usize>,
        at: usize,
        statistics: &mut StatisticsMut<'_>,
        lines: &mut Lines<'_>,
    ) {
        let Call { problem, inputs, sizes, .. } = head.call;
        let (dim, group, count) = (sizes.head_dim, head.rules.group(), rows.len());
        let (mut factor, mut above) = ([0.0; TILE_ROWS], [0.0; TILE_ROWS]);
        for (i, row) in rows.enumerate() {
            let q_head = head.kv_head * group + row % group;
            let sums = RowSums {
                shift: statistics.shift[i],
                first_delta: statistics.delta[i],
                weights: self.weights[at + i],
                gradients: self.gradients[at + i],
                sink: inputs.sinks.as_ref().and_then(|sinks| sinks.get(&[q_head])),
            };
            (statistics.factor[i], statistics.delta[i], above[i]) = sums.finish();
            // Scores are scaled, and so are the gradients of what they are made of.
            factor[i] = statistics.factor[i] * problem.scale();
        }
        let width = tile_width(count);
        let part = at * dim..(at + width) * dim;
        let dq = &mut self.gradient_keys[part.clone()];
        let lanes = dq.chunks_exact_mut(width).zip(self.weight_keys[part].chunks_exact(width));
        for (dq, mean) in lanes {
            for (i, (dq, mean)) in dq.iter_mut().zip(mean).enumerate() {
                *dq = (*dq - above[i] * mean) * factor[i];
            }
        }
        transpose(dq, width, (dim, count), lines.q, sizes.key_stride);
    }
}
