//! The pass that owns keys: dK and dV.
//!
//! The invariant: a task alone sums the gradients of its keys, over the rows of all query heads of the
//! group in order, so the sum over the group needs no second step. The block's K, V, dK and dV stay
//! in the second-level cache while the query rows stream past, each tile transposed once a block.
//!
//! Four products a pair of tiles: scores, dP, `dV += P dO` and `dK += dS Q`.

use std::ops::Range;

use attn_core::{Band, Error};
use parking_lot::Mutex;

use super::output::GradientRows;
use super::statistics::Statistics;
use super::tile::{Columns, Head, KeyBlock, Lines, Pair, tiles};
use super::{Call, Sizes, TILE_KEYS, TILE_ROWS, Team, fair_block, padded, unchecked};
use crate::cpu::simd::{Order, Product, Start};
use crate::cpu::workspace::carve;

/// A block of keys of one sequence and KV head.
struct Task {
    sequence: usize,
    kv_head: usize,
    keys: Range<usize>,
    /// Positions of the rows that see one of the keys, as far as the band goes.
    positions: Range<usize>,
}

/// Scratch of a worker besides that of a tile.
pub(super) fn scratch_len(sizes: &Sizes) -> usize {
    let keys = KeyBlock::scratch_len(sizes, sizes.keys).saturating_mul(2);
    Columns::scratch_len(sizes, TILE_ROWS).saturating_add(keys)
}

/// Writes dK and dV of every key.
pub(super) fn run(
    team: &mut Team<'_, '_>,
    call: &Call<'_, '_>,
    statistics: &Statistics<'_>,
    output: &Mutex<GradientRows<'_, '_>>,
) -> Result<(), Error> {
    let tasks = tasks(call, team.threads());
    team.run(tasks, |task, part| sum(call, statistics, &task, part, output))
}

/// The tasks, the longest first so that none starts last.
fn tasks(call: &Call<'_, '_>, threads: usize) -> Vec<Task> {
    let Call { problem, sizes, .. } = call;
    let lengths = problem.lengths();
    let total = lengths.total_kv().saturating_mul(problem.kv_heads());
    let block = fair_block(sizes.keys, TILE_KEYS, total, threads);
    let mut tasks = Vec::new();
    for sequence in 0..lengths.batch() {
        let (q_len, kv_len) = (lengths.q(sequence), lengths.kv(sequence));
        for keys in tiles(0..kv_len, block) {
            let positions = positions_of(problem.band(), &keys, q_len, kv_len);
            for kv_head in 0..problem.kv_heads() {
                let (keys, positions) = (keys.clone(), positions.clone());
                tasks.push(Task { sequence, kv_head, keys, positions });
            }
        }
    }
    tasks.sort_by_key(|task| {
        std::cmp::Reverse(task.positions.len().saturating_mul(task.keys.len()))
    });
    tasks
}

/// The rows whose band meets `keys`: both ends of a row's interval grow with the row.
pub(super) fn positions_of(
    band: Band,
    keys: &Range<usize>,
    q_len: usize,
    kv_len: usize,
) -> Range<usize> {
    let count = |holds: &dyn Fn(Range<usize>) -> bool| {
        let (mut low, mut high) = (0, q_len);
        while low < high {
            let middle = low + (high - low) / 2;
            if holds(band.row(middle, q_len, kv_len)) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low
    };
    let first = count(&|seen| seen.end <= keys.start);
    first..count(&|seen| seen.start < keys.end).max(first)
}

fn sum(
    call: &Call<'_, '_>,
    statistics: &Statistics<'_>,
    task: &Task,
    scratch: &mut [f32],
    output: &Mutex<GradientRows<'_, '_>>,
) -> Result<(), Error> {
    let Call { simd, problem, sizes, .. } = call;
    let head = Head::new(call, task.sequence, task.kv_head)?;
    let mut rest = scratch;
    let mut lines = Lines::carve(&mut rest, sizes);
    let mut columns = Columns::carve(&mut rest, sizes, TILE_ROWS);
    let mut block = KeyBlock::carve(&mut rest, sizes, sizes.keys);
    let count = task.keys.len();
    let dk = &mut carve(&mut rest, sizes.keys * sizes.key_stride)[..count * sizes.key_stride];
    let dv = &mut carve(&mut rest, sizes.keys * sizes.value_stride)[..count * sizes.value_stride];
    let mut pair = Pair::carve(&mut rest, problem);
    dk.fill(0.0);
    dv.fill(0.0);
    let mut block_loaded = false;
    let group = head.rules.group();
    let reach = task.positions.start * group..task.positions.end * group;
    // Tiles are taken whole, also where the first rows see nothing: their cut must not depend on
    // the block.
    let first = reach.start - reach.start % TILE_ROWS;
    let end = reach.end.next_multiple_of(TILE_ROWS).min(head.rules.rows());
    for rows in tiles(first..end, TILE_ROWS) {
        let mut rows_loaded = false;
        for keys in tiles(task.keys.clone(), TILE_KEYS) {
            let Some(visit) = head.rules.visit(rows.clone(), keys) else {
                continue;
            };
            if !block_loaded {
                head.load_keys(task.keys.clone(), &mut block)?;
                block_loaded = true;
            }
            if !rows_loaded {
                head.load_rows(statistics, rows.clone(), &mut lines, &mut columns)?;
                rows_loaded = true;
            }
            let tile = columns.tile(sizes, rows.clone(), 0);
            head.recompute(&block, &tile, &visit, &mut pair);
            head.drop(&mut pair, visit.keys.len() * tile.width);
            head.uncap(&mut pair.ds[..visit.keys.len() * tile.width], pair.capped);
            let offset = visit.keys.start - task.keys.start;
            let by_query = |a, b, cols, b_stride| Product {
                rows: visit.keys.len(),
                cols,
                inner: rows.len(),
                a,
                a_stride: tile.width,
                order: Order::RowMajor,
                b,
                b_stride,
            };
            let (cols, stride) = (padded(sizes.value_dim), sizes.value_stride);
            let product = by_query(&*pair.p, &*lines.d_o, cols, stride);
            simd.product(&product, Start::Keep, &mut dv[offset * stride..], stride);
            let (cols, stride) = (padded(sizes.head_dim), sizes.key_stride);
            let product = by_query(&*pair.ds, &*lines.q, cols, stride);
            simd.product(&product, Start::Keep, &mut dk[offset * stride..], stride);
        }
    }
    simd.scale(dk, head.key_gradient_factor());
    output
        .lock()
        .write_keys(task.sequence, task.kv_head, task.keys.clone(), (dk, dv), sizes)
        .ok_or_else(unchecked)
}
