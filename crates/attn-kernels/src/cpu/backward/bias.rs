//! The pass that owns cells of the bias: their gradient, where it is wanted.
//!
//! The invariant: a cell is summed by one task over everything it was broadcast to, sequences, heads,
//! rows and keys in that order, and written once. A task owns a tile's worth of cells along the axes
//! that the bias has, and walks the axes that it lacks; so there is as much parallel work as the bias
//! has extent, and never a partial gradient in memory.
//!
//! It recomputes scores and dP once more. Adding to the bias from the pass over query rows would
//! save these two products for a bias without broadcast axes, and need a lock or a reduction for
//! every other.

use std::ops::Range;

use attn_core::{Error, ViewMut};
use parking_lot::Mutex;

use super::statistics::Statistics;
use super::tile::{Columns, Head, KeyBlock, Lines, Pair, tiles};
use super::{Call, Sizes, TILE_KEYS, TILE_ROWS, Team, area, fair_block, unchecked};
use crate::cpu::simd::transpose;
use crate::cpu::workspace::carve;

/// The cells of a task; an axis that the bias lacks is `None`, and is walked.
struct Cells {
    sequence: Option<usize>,
    /// KV head, and heads of its group.
    heads: Option<(usize, Range<usize>)>,
    positions: Option<Range<usize>>,
    keys: Option<Range<usize>>,
}

/// Scratch of a worker besides that of a tile.
pub(super) fn scratch_len(sizes: &Sizes) -> usize {
    Columns::scratch_len(sizes, TILE_ROWS)
        .saturating_add(KeyBlock::scratch_len(sizes, TILE_KEYS))
        .saturating_add(area([(TILE_ROWS, sizes.keys)]))
}

/// Writes every cell of `dbias`.
pub(super) fn run(
    team: &mut Team<'_, '_>,
    call: &Call<'_, '_>,
    statistics: &Statistics<'_>,
    dbias: &mut ViewMut<'_, f32>,
) -> Result<(), Error> {
    let tasks = tasks(call, dbias.shape(), team.threads());
    let dbias = Mutex::new(dbias);
    team.run(tasks, |cells, part| sum(call, statistics, &cells, part, &dbias))
}

fn tasks(call: &Call<'_, '_>, shape: &[usize], threads: usize) -> Vec<Cells> {
    let Call { problem, sizes, .. } = call;
    let lengths = problem.lengths();
    let group = problem.group();
    // Axes are aligned from the right; those that are missing or of extent 1 repeat.
    let extent = |from_right: usize| shape.len().checked_sub(from_right).map_or(1, |i| shape[i]);
    let owned = |from_right: usize, full: usize| extent(from_right) == full && full != 1;
    let one_of = |axis: usize, full: usize| match owned(axis, full) {
        true => (0..full).map(Some).collect(),
        false => vec![None],
    };
    let parts_of = |axis: usize, full: usize, size: usize| match owned(axis, full) {
        true => tiles(0..full, size).map(Some).collect(),
        false => vec![None],
    };
    let head_step = group.clamp(1, TILE_ROWS);
    let heads: Vec<_> = match owned(3, problem.q_heads()) {
        true => (0..problem.kv_heads())
            .flat_map(|kv_head| tiles(0..group, head_step).map(move |g| Some((kv_head, g))))
            .collect(),
        false => vec![None],
    };
    let block = fair_block(sizes.keys, TILE_KEYS, lengths.longest_kv(), threads);
    let positions = parts_of(2, lengths.longest_q(), TILE_ROWS / head_step);
    let keys = parts_of(1, lengths.longest_kv(), block);
    let mut tasks = Vec::new();
    for sequence in one_of(4, lengths.batch()) {
        for heads in &heads {
            for positions in &positions {
                for keys in &keys {
                    let (heads, positions, keys) = (heads.clone(), positions.clone(), keys.clone());
                    tasks.push(Cells { sequence, heads, positions, keys });
                }
            }
        }
    }
    tasks
}

impl Cells {
    /// The line of `sums` to which flattened row `row` belongs.
    fn line(&self, row: usize, group: usize) -> usize {
        let (position, head) = (row / group, row % group);
        let (heads, head) = match &self.heads {
            None => (1, 0),
            Some((_, heads)) => (heads.len(), head - heads.start),
        };
        self.positions.as_ref().map_or(0, |p| position - p.start) * heads + head
    }

    /// The tiles of flattened rows of one sequence and KV head that were added to these cells.
    fn row_tiles(&self, q_len: usize, group: usize) -> Vec<Range<usize>> {
        let heads = self.heads.as_ref().map_or(0..group, |(_, heads)| heads.clone());
        let positions = self.positions.clone().unwrap_or(0..q_len);
        let positions = positions.start.min(q_len)..positions.end.min(q_len);
        let head_step = group.clamp(1, TILE_ROWS);
        let mut all = Vec::new();
        for heads in tiles(heads, head_step) {
            // Several positions only where all heads of the group fit: then rows are consecutive.
            for positions in tiles(positions.clone(), TILE_ROWS / head_step) {
                let first = positions.start * group + heads.start;
                all.push(first..(positions.end - 1) * group + heads.end);
            }
        }
        all
    }
}

fn sum(
    call: &Call<'_, '_>,
    statistics: &Statistics<'_>,
    cells: &Cells,
    scratch: &mut [f32],
    dbias: &Mutex<&mut ViewMut<'_, f32>>,
) -> Result<(), Error> {
    let Call { problem, sizes, .. } = call;
    let lengths = problem.lengths();
    let mut rest = scratch;
    let mut work = Work {
        lines: Lines::carve(&mut rest, sizes),
        columns: Columns::carve(&mut rest, sizes, TILE_ROWS),
        block: KeyBlock::carve(&mut rest, sizes, TILE_KEYS),
        sums: carve(&mut rest, TILE_ROWS * sizes.keys),
        pair: Pair::carve(&mut rest, problem),
        statistics,
    };
    work.sums.fill(0.0);
    for sequence in cells.sequence.map_or(0..lengths.batch(), |s| s..s + 1) {
        let kv_heads = cells.heads.as_ref().map_or(0..problem.kv_heads(), |(h, _)| *h..h + 1);
        for kv_head in kv_heads {
            let head = Head::new(call, sequence, kv_head)?;
            for rows in cells.row_tiles(lengths.q(sequence), problem.group()) {
                work.add(&head, cells, rows)?;
            }
        }
    }
    write(call, cells, work.sums, &mut dbias.lock()).ok_or_else(unchecked)
}

/// The scratch of a task.
struct Work<'s> {
    statistics: &'s Statistics<'s>,
    lines: Lines<'s>,
    columns: Columns<'s>,
    block: KeyBlock<'s>,
    /// One line of keys a row of cells, or one number where the bias has no key axis.
    sums: &'s mut [f32],
    pair: Pair<'s>,
}

impl Work<'_> {
    /// Adds the score gradients of one tile of rows.
    fn add(&mut self, head: &Head<'_, '_>, cells: &Cells, rows: Range<usize>) -> Result<(), Error> {
        let Call { simd, problem, sizes, .. } = head.call;
        let kv_len = problem.lengths().kv(head.sequence);
        let keys = cells.keys.clone().unwrap_or(0..kv_len);
        let first_key = keys.start;
        let (sequence, kv_head) = (head.sequence, head.kv_head);
        let factors = self.statistics.rows(problem, sequence, kv_head, rows.clone()).factor;
        let mut loaded = false;
        for keys in tiles(keys.start.min(kv_len)..keys.end.min(kv_len), TILE_KEYS) {
            let Some(visit) = head.rules.visit(rows.clone(), keys.clone()) else {
                continue;
            };
            if !loaded {
                head.load_rows(self.statistics, rows.clone(), &mut self.lines, &mut self.columns)?;
                loaded = true;
            }
            head.load_keys(keys, &mut self.block)?;
            let tile = self.columns.tile(sizes, rows.clone(), 0);
            head.recompute(&self.block, &tile, &visit, &mut self.pair);
            // The weights are not needed any more: their place takes the gradient by rows.
            let Pair { p: by_row, ds, .. } = &mut self.pair;
            let count = visit.keys.len();
            transpose(ds, tile.width, (count, rows.len()), by_row, count);
            for ((row, gradient), &factor) in
                rows.clone().zip(by_row.chunks_mut(count)).zip(factors)
            {
                simd.scale(gradient, factor);
                let line = cells.line(row, problem.group());
                if cells.keys.is_some() {
                    let at = line * sizes.keys + visit.keys.start - first_key;
                    simd.add(&mut self.sums[at..at + count], gradient);
                } else {
                    self.sums[line] += total(gradient);
                }
            }
        }
        Ok(())
    }
}

/// The sum, in f64: over a row's keys the gradients cancel.
#[expect(clippy::cast_possible_truncation, reason = "the rounding to f32 is meant")]
fn total(gradient: &[f32]) -> f32 {
    gradient.iter().map(|&x| f64::from(x)).sum::<f64>() as f32
}

fn write(
    call: &Call<'_, '_>,
    cells: &Cells,
    sums: &[f32],
    dbias: &mut ViewMut<'_, f32>,
) -> Option<()> {
    let rank = dbias.shape().len();
    let contiguous = dbias.layout().is_row_contiguous();
    let group = call.problem.group();
    let sequence = cells.sequence.unwrap_or(0);
    let (first_head, heads) = match &cells.heads {
        None => (0, 1),
        Some((kv_head, heads)) => (kv_head * group + heads.start, heads.len()),
    };
    let positions = cells.positions.clone().unwrap_or(0..1);
    let stride = if cells.keys.is_some() { call.sizes.keys } else { 1 };
    let keys = cells.keys.clone().unwrap_or(0..1);
    for (i, position) in positions.enumerate() {
        for head in 0..heads {
            let line = &sums[(i * heads + head) * stride..][..keys.len()];
            let mut at = [sequence, first_head + head, position, 0];
            if contiguous {
                let row = dbias.row_mut(&at[4 - rank..3])?;
                row.get_mut(keys.clone())?.copy_from_slice(line);
                continue;
            }
            for (key, &x) in keys.clone().zip(line) {
                at[3] = key;
                dbias.set(&at[4 - rank..], x).then_some(())?;
            }
        }
    }
    Some(())
}
