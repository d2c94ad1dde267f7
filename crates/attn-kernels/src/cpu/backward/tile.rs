//! One tile of (query rows, keys): its weights, and the gradient of its scores.
//!
//! The invariant: all passes meet the same recomputed weights, because only this file makes them. A
//! weight is `exp2(s - shift)`, where the shift is about the row's LSE, so nothing overflows whatever the
//! size of the scores; a row without keys has the shift +inf, which makes every weight 0. What is left
//! to multiply a row's weights by, its factor, goes into the other side of the products that sum over
//! rows.
//!
//! Tiles are transposed, row = key and column = query row (see [`crate::cpu::simd`]). Columns past
//! the last query row of a tile hold anything, even NaN: no product sums over them.

use std::ops::Range;

use attn_core::{Error, KvView, Problem};

use super::statistics::Statistics;
use super::{Call, Sizes, TILE_KEYS, TILE_ROWS, area, unchecked};
use crate::cpu::rows::StoredRows;
use crate::cpu::scores::{ScoreRules, Visit, tile_width};
use crate::cpu::simd::{Order, Product, Start, transpose};
use crate::cpu::workspace::carve;

/// One sequence and KV head: its rules and its stored rows.
pub(super) struct Head<'c, 'a> {
    pub(super) call: &'c Call<'c, 'a>,
    pub(super) sequence: usize,
    pub(super) kv_head: usize,
    pub(super) rules: ScoreRules<'a>,
    /// Keys that some row of the sequence may read.
    seen: Range<usize>,
    q: StoredRows<'a>,
    k: StoredRows<'a>,
    v: StoredRows<'a>,
    d_o: StoredRows<'a>,
}

/// Query rows of a tile and their output gradients, one line a row.
pub(super) struct Lines<'s> {
    /// `[TILE_ROWS, key_stride]`.
    pub(super) q: &'s mut [f32],
    /// `[TILE_ROWS, value_stride]`.
    pub(super) d_o: &'s mut [f32],
}

/// The same for whole tiles, transposed tile by tile, with the statistics of each row.
pub(super) struct Columns<'s> {
    /// `[tile][head_dim, width]`.
    q: &'s mut [f32],
    /// `[tile][value_dim, width]`.
    d_o: &'s mut [f32],
    shift: &'s mut [f32],
    delta: &'s mut [f32],
}

/// A tile's part of [`Columns`].
pub(super) struct TileColumns<'s> {
    pub(super) rows: Range<usize>,
    pub(super) width: usize,
    q: &'s [f32],
    pub(super) d_o: &'s [f32],
    shift: &'s [f32],
    delta: &'s [f32],
}

/// Consecutive keys and values, one line a key.
pub(super) struct KeyBlock<'s> {
    /// First key.
    start: usize,
    /// `[keys, key_stride]`.
    k: &'s mut [f32],
    /// `[keys, value_stride]`.
    v: &'s mut [f32],
}

/// The pairs of a tile, each `[keys, width]`.
pub(super) struct Pair<'s> {
    /// Weights.
    pub(super) p: &'s mut [f32],
    /// Gradient of the scores.
    pub(super) ds: &'s mut [f32],
    /// Scores after the soft-cap; empty without one.
    pub(super) capped: &'s mut [f32],
    /// What dropout multiplies the weights by, 0 or a factor; empty without it.
    keep: &'s mut [f32],
    /// For the score rules.
    rest: &'s mut [f32],
}

impl<'c, 'a> Head<'c, 'a> {
    pub(super) fn new(
        call: &'c Call<'c, 'a>,
        sequence: usize,
        kv_head: usize,
    ) -> Result<Self, Error> {
        let Call { problem, inputs, results, .. } = *call;
        let KvView::Dense { k, v } = &inputs.kv else {
            return Err(Error::invalid("kv", "dense keys and values", "a paged cache"));
        };
        let rules = ScoreRules::new(call.simd, problem, inputs, sequence, kv_head)?;
        Ok(Self {
            call,
            sequence,
            kv_head,
            seen: rules.keys(0..rules.rows()),
            rules,
            q: StoredRows::queries(problem, &inputs.q, sequence).ok_or_else(unchecked)?,
            k: StoredRows::cached(problem, k, None, sequence).ok_or_else(unchecked)?,
            v: StoredRows::cached(problem, v, None, sequence).ok_or_else(unchecked)?,
            d_o: StoredRows::queries(problem, &results.d_o, sequence).ok_or_else(unchecked)?,
        })
    }

    /// Reads the tile of flattened `rows` with its statistics: transposed, and as lines times the factor
    /// of each row.
    pub(super) fn load_rows(
        &self,
        statistics: &Statistics<'_>,
        rows: Range<usize>,
        lines: &mut Lines<'_>,
        columns: &mut Columns<'_>,
    ) -> Result<(), Error> {
        let Call { simd, problem, sizes, .. } = self.call;
        self.load_lines(rows.clone(), lines)?;
        columns.transpose(sizes, rows.len(), 0, lines);
        let of_rows = statistics.rows(problem, self.sequence, self.kv_head, rows);
        columns.set_statistics(0, of_rows.shift, of_rows.delta);
        for (i, &factor) in of_rows.factor.iter().enumerate() {
            simd.scale(&mut lines.q[i * sizes.key_stride..][..sizes.head_dim], factor);
            simd.scale(&mut lines.d_o[i * sizes.value_stride..][..sizes.value_dim], factor);
        }
        Ok(())
    }

    /// Reads the lines of flattened `rows`, of at most a tile.
    pub(super) fn load_lines(
        &self,
        rows: Range<usize>,
        lines: &mut Lines<'_>,
    ) -> Result<(), Error> {
        let Sizes { key_stride, value_stride, .. } = self.call.sizes;
        self.load(&self.q, rows.clone(), self.rules.query_factor(), lines.q, key_stride)?;
        self.load(&self.d_o, rows, 1.0, lines.d_o, value_stride)
    }

    /// Reads `factor *` the flattened `rows` of a query-side tensor, `stride` apart.
    pub(super) fn load(
        &self,
        stored: &StoredRows<'_>,
        rows: Range<usize>,
        factor: f32,
        dst: &mut [f32],
        stride: usize,
    ) -> Result<(), Error> {
        let (group, count) = (self.rules.group(), rows.len());
        // One read for each head of the group: its rows lie a group apart in the tile.
        for (offset, row) in rows.enumerate().take(group) {
            let (token, head) = (row / group, self.kv_head * group + row % group);
            let tokens = token..token + (count - offset).div_ceil(group);
            let dst = &mut dst[offset * stride..];
            stored
                .widen(self.call.simd, head, tokens, factor, dst, group * stride)
                .ok_or_else(unchecked)?;
        }
        Ok(())
    }

    /// The key tiles that hold all that flattened `rows` may see. They are whole, also where the first
    /// keys are not seen: how a sum is cut must not depend on the rows.
    pub(super) fn key_tiles(
        &self,
        rows: Range<usize>,
    ) -> impl Iterator<Item = Range<usize>> + use<> {
        let seen = self.rules.keys(rows);
        let kv_len = self.call.problem.lengths().kv(self.sequence);
        let end = seen.end.next_multiple_of(TILE_KEYS).min(kv_len);
        tiles(seen.start - seen.start % TILE_KEYS..end, TILE_KEYS)
    }

    /// Reads `keys` and their values; those that no row of the sequence sees are not read, but 0.
    pub(super) fn load_keys(
        &self,
        keys: Range<usize>,
        block: &mut KeyBlock<'_>,
    ) -> Result<(), Error> {
        let Call { simd, sizes, .. } = self.call;
        block.start = keys.start;
        let seen =
            self.seen.start.clamp(keys.start, keys.end)..self.seen.end.clamp(keys.start, keys.end);
        let parts = [
            (&self.k, &mut *block.k, sizes.key_stride),
            (&self.v, &mut *block.v, sizes.value_stride),
        ];
        for (stored, dst, stride) in parts {
            dst[..(seen.start - keys.start) * stride].fill(0.0);
            dst[(seen.end.max(seen.start) - keys.start) * stride..keys.len() * stride].fill(0.0);
            let dst = &mut dst[(seen.start - keys.start) * stride..];
            stored
                .widen(*simd, self.kv_head, seen.clone(), 1.0, dst, stride)
                .ok_or_else(unchecked)?;
        }
        Ok(())
    }

    /// Recomputes the weights of a tile and the gradient of its scores after the soft-cap, which is
    /// that of the bias.
    pub(super) fn recompute(
        &self,
        block: &KeyBlock<'_>,
        tile: &TileColumns<'_>,
        visit: &Visit,
        pair: &mut Pair<'_>,
    ) {
        let simd = self.call.simd;
        self.scores(block, tile, visit, pair);
        self.weight_gradients(block, tile, visit, pair);
        let count = visit.keys.len() * tile.width;
        let (p, ds) = (&mut pair.p[..count], &mut pair.ds[..count]);
        if self.rules.drops() {
            let keep = &mut pair.keep[..count];
            keep.fill(self.rules.keep_factor());
            self.rules.drop_columns(keep, tile.width, tile.rows.clone(), &visit.keys);
            simd.multiply(ds, keep);
        }
        simd.exp2_columns(p, tile.width, self.rules.exponent(), tile.shift);
        simd.softmax_gradient(ds, p, tile.delta);
    }

    /// Makes the first `count` weights of a recomputed tile those that met the values: with dropout some are 0.
    pub(super) fn drop(&self, pair: &mut Pair<'_>, count: usize) {
        if self.rules.drops() {
            self.call.simd.multiply(&mut pair.p[..count], &pair.keep[..count]);
        }
    }

    /// Writes the scores of a tile to `pair.p`, those that masks hide being -inf.
    pub(super) fn scores(
        &self,
        block: &KeyBlock<'_>,
        tile: &TileColumns<'_>,
        visit: &Visit,
        pair: &mut Pair<'_>,
    ) {
        let Call { simd, sizes, problem, .. } = self.call;
        let (count, width) = (visit.keys.len(), tile.width);
        let p = &mut pair.p[..count * width];
        let product = Product {
            rows: count,
            cols: width,
            inner: sizes.head_dim,
            a: block.keys_from(sizes, visit.keys.start),
            a_stride: sizes.key_stride,
            order: Order::RowMajor,
            b: tile.q,
            b_stride: width,
        };
        simd.product(&product, Start::Zero, p, width);
        if let Some(cap) = problem.softcap() {
            let capped = &mut pair.capped[..count * width];
            capped.copy_from_slice(p);
            simd.soft_cap(capped, problem.scale(), cap);
        }
        self.rules.apply(p, width, tile.rows.clone(), visit, pair.rest);
    }

    /// Writes dP, the gradients of a tile's weights, to `pair.ds`.
    pub(super) fn weight_gradients(
        &self,
        block: &KeyBlock<'_>,
        tile: &TileColumns<'_>,
        visit: &Visit,
        pair: &mut Pair<'_>,
    ) {
        let Call { simd, sizes, .. } = self.call;
        let (count, width) = (visit.keys.len(), tile.width);
        let product = Product {
            rows: count,
            cols: width,
            inner: sizes.value_dim,
            a: &block.v[(visit.keys.start - block.start) * sizes.value_stride..],
            a_stride: sizes.value_stride,
            order: Order::RowMajor,
            b: tile.d_o,
            b_stride: width,
        };
        simd.product(&product, Start::Zero, &mut pair.ds[..count * width], width);
    }

    /// Multiplies the pairs of a tile by the derivative of the soft-cap at their scores: that of
    /// `c * tanh(s / c)` is `1 - tanh^2`. Nothing without a soft-cap.
    pub(super) fn uncap(&self, pairs: &mut [f32], capped: &[f32]) {
        let Some(cap) = self.call.problem.softcap() else {
            return;
        };
        let inverse = cap.recip();
        for (x, capped) in pairs.iter_mut().zip(capped) {
            let tanh = capped * inverse;
            *x *= 1.0 - tanh * tanh;
        }
    }

    /// The factor of dK, which is summed over the lines of a tile, with their sign.
    pub(super) fn key_gradient_factor(&self) -> f32 {
        self.call.problem.scale() * self.rules.query_factor()
    }
}

impl<'s> Lines<'s> {
    pub(super) fn carve(rest: &mut &'s mut [f32], sizes: &Sizes) -> Self {
        Self {
            q: carve(rest, TILE_ROWS * sizes.key_stride),
            d_o: carve(rest, TILE_ROWS * sizes.value_stride),
        }
    }

    pub(super) fn scratch_len(sizes: &Sizes) -> usize {
        area([(TILE_ROWS, sizes.key_stride), (TILE_ROWS, sizes.value_stride)])
    }
}

impl<'s> Columns<'s> {
    /// For `rows` flattened rows, whole tiles.
    pub(super) fn carve(rest: &mut &'s mut [f32], sizes: &Sizes, rows: usize) -> Self {
        Self {
            q: carve(rest, rows * sizes.head_dim),
            d_o: carve(rest, rows * sizes.value_dim),
            shift: carve(rest, rows),
            delta: carve(rest, rows),
        }
    }

    pub(super) fn scratch_len(sizes: &Sizes, rows: usize) -> usize {
        area([(rows, sizes.head_dim), (rows, sizes.value_dim), (rows, 1), (rows, 1)])
    }

    /// Transposes the first `count` lines into the columns from `at`.
    pub(super) fn transpose(&mut self, sizes: &Sizes, count: usize, at: usize, lines: &Lines<'_>) {
        let (width, dim) = (tile_width(count), sizes.head_dim);
        transpose(lines.q, sizes.key_stride, (count, dim), &mut self.q[at * dim..], width);
        let dim = sizes.value_dim;
        transpose(lines.d_o, sizes.value_stride, (count, dim), &mut self.d_o[at * dim..], width);
    }

    /// Gives the columns from `at` their rows' shifts and deltas.
    pub(super) fn set_statistics(&mut self, at: usize, shift: &[f32], delta: &[f32]) {
        self.shift[at..at + shift.len()].copy_from_slice(shift);
        self.delta[at..at + delta.len()].copy_from_slice(delta);
    }

    /// The tile of `rows`, whose columns start at `at`.
    pub(super) fn tile(&self, sizes: &Sizes, rows: Range<usize>, at: usize) -> TileColumns<'_> {
        let width = tile_width(rows.len());
        TileColumns {
            rows,
            width,
            q: &self.q[at * sizes.head_dim..(at + width) * sizes.head_dim],
            d_o: &self.d_o[at * sizes.value_dim..(at + width) * sizes.value_dim],
            shift: &self.shift[at..at + width],
            delta: &self.delta[at..at + width],
        }
    }
}

impl<'s> KeyBlock<'s> {
    pub(super) fn carve(rest: &mut &'s mut [f32], sizes: &Sizes, keys: usize) -> Self {
        Self {
            start: 0,
            k: carve(rest, keys * sizes.key_stride),
            v: carve(rest, keys * sizes.value_stride),
        }
    }

    pub(super) fn scratch_len(sizes: &Sizes, keys: usize) -> usize {
        area([(keys, sizes.key_stride), (keys, sizes.value_stride)])
    }

    /// The lines of K from `key` on.
    pub(super) fn keys_from(&self, sizes: &Sizes, key: usize) -> &[f32] {
        &self.k[(key - self.start) * sizes.key_stride..]
    }
}

impl<'s> Pair<'s> {
    pub(super) fn carve(rest: &mut &'s mut [f32], problem: &Problem) -> Self {
        let pairs = TILE_KEYS * TILE_ROWS;
        Self {
            p: carve(rest, pairs),
            ds: carve(rest, pairs),
            capped: carve(rest, if problem.softcap().is_some() { pairs } else { 0 }),
            keep: carve(rest, if problem.dropout().is_some() { pairs } else { 0 }),
            rest: carve(rest, ScoreRules::scratch_len(problem, TILE_KEYS, TILE_ROWS)),
        }
    }

    pub(super) fn scratch_len(problem: &Problem) -> usize {
        let options = [problem.softcap().is_some(), problem.dropout().is_some()];
        let planes = 2 + options.into_iter().filter(|&has| has).count();
        let rules = ScoreRules::scratch_len(problem, TILE_KEYS, TILE_ROWS);
        area([(planes * TILE_KEYS, TILE_ROWS), (1, rules)])
    }
}

/// The tiles of `range` on a grid of `size` that starts at 0; the first and last may be cut.
pub(super) fn tiles(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let first = if range.is_empty() { range.end } else { range.start - range.start % size };
    (first..range.end)
        .step_by(size)
        .map(move |start| start.max(range.start)..(start + size).min(range.end))
}
