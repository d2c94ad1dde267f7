//! Score transforms and masks of one sequence and one group of query heads, applied to a tile.
//!
//! Invariant: the order is scale, soft-cap, bias and `ALiBi`, mask, as in [`attn_core::Problem`], and what a
//! mask hides becomes -inf by selection, so that a NaN under it does not survive. Every option is a
//! pass over a tile in L1 that a call without the option does not make; the plain call folds the
//! scale into the exponent.
//!
//! Rows are flattened: row `r` of a group is position `r / group` and head `r % group` of it, so that one
//! tile holds all heads of a position and K and V are read once for the group.

use std::ops::Range;

use attn_core::{Band, BlockMask, DropoutMask, Error, Inputs, Mask, Problem, TileClass, View};

use super::simd::{DropLanes, LANE_GROUP, Simd};
use super::workspace::{carve, lines};

/// The rules of one sequence and KV head.
#[derive(Debug)]
pub(crate) struct ScoreRules<'a> {
    simd: Simd,
    band: Band,
    q_len: usize,
    kv_len: usize,
    group: usize,
    scale: f32,
    softcap: Option<f32>,
    /// Whether the scale is left to the exponent.
    plain: bool,
    /// What makes stored queries real: 1, but for fp8 ones.
    stored_query: f32,
    /// One slope a head of the group, or none.
    slopes: Vec<f32>,
    /// One plane a head of the group, or none.
    bias: Vec<View<'a, f32>>,
    /// One mask a head of the group, or none where the band is all.
    masks: Vec<Mask<'a>>,
    /// Sequence and first query head, where weights are dropped by.
    place: (usize, usize),
    dropout: Option<DropoutMask>,
}

/// The part of a tile that is computed, and what must be hidden in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Visit {
    /// Keys to compute: the smallest interval that holds the visible ones, to whole blocks of a
    /// block mask.
    pub(crate) keys: Range<usize>,
    /// Some pair is outside the band.
    banded: bool,
    /// Some pair may be hidden by the block mask or the boolean mask.
    marked: bool,
}

impl<'a> ScoreRules<'a> {
    /// The rules for one sequence and KV head of a checked call.
    ///
    /// # Errors
    /// As [`Inputs::check`], for data that was not checked.
    pub(crate) fn new(
        simd: Simd,
        problem: &Problem,
        inputs: &Inputs<'a>,
        sequence: usize,
        kv_head: usize,
    ) -> Result<Self, Error> {
        let group = problem.group();
        let heads = kv_head * group..(kv_head + 1) * group;
        let slopes = match &inputs.alibi {
            None => Vec::new(),
            Some(slopes) => heads.clone().map(|h| slopes.get(&[h]).unwrap_or(0.0)).collect(),
        };
        let mut bias = Vec::new();
        let mut masks = Vec::new();
        for head in heads {
            bias.extend(inputs.bias_of(problem, sequence, head)?);
            if problem.has_mask() || problem.block_mask().is_some() {
                masks.push(inputs.mask_of(problem, sequence, head)?);
            }
        }
        let (scale, softcap) = (problem.scale(), problem.softcap());
        let lengths = problem.lengths();
        // With a factor of 0 a hidden score would become -inf * 0, and an infinite factor loses
        // every score: such scales go through the explicit pass.
        let exponent = scale.abs() * std::f32::consts::LOG2_E;
        let plain =
            softcap.is_none() && slopes.is_empty() && bias.is_empty() && exponent.is_normal();
        Ok(Self {
            simd,
            band: problem.band(),
            q_len: lengths.q(sequence),
            kv_len: lengths.kv(sequence),
            group,
            scale,
            softcap,
            plain,
            stored_query: inputs.q_scale_of(sequence, kv_head),
            slopes,
            bias,
            masks,
            place: (sequence, kv_head * group),
            dropout: inputs.dropout_of(problem),
        })
    }

    /// Query heads of the group.
    pub(crate) fn group(&self) -> usize {
        self.group
    }

    /// Flattened rows of the sequence.
    pub(crate) fn rows(&self) -> usize {
        self.q_len * self.group
    }

    /// Whether products are scores but for the band: no option applies, and the scale is left to the
    /// exponent.
    pub(crate) fn is_plain(&self) -> bool {
        self.plain && self.masks.is_empty()
    }

    /// The factor from scores, after [`Self::apply`], to base-2 exponents.
    pub(crate) fn exponent(&self) -> f32 {
        let scale = if self.plain { self.scale.abs() } else { 1.0 };
        scale * std::f32::consts::LOG2_E
    }

    /// The factor of stored queries before the product: their own scale; and exponents want a non-negative
    /// scale of scores, so the sign of a negative one moves to the queries.
    pub(crate) fn query_factor(&self) -> f32 {
        if self.plain && self.scale < 0.0 { -self.stored_query } else { self.stored_query }
    }

    /// The smallest interval of keys that flattened `rows` may read.
    pub(crate) fn keys(&self, rows: Range<usize>) -> Range<usize> {
        self.band.rows(self.positions(&rows), self.q_len, self.kv_len)
    }

    /// What of `keys` the flattened `rows` must compute; `None` where they see none of them.
    ///
    /// Invariants: the answer depends on `rows` and `keys` alone, not on what else is visited.
    pub(crate) fn visit(&self, rows: Range<usize>, keys: Range<usize>) -> Option<Visit> {
        let positions = self.positions(&rows);
        let visible = self.band.rows(positions.clone(), self.q_len, self.kv_len);
        let mut keys = keys.start.max(visible.start)..keys.end.min(visible.end);
        let mut blocks = self.masks.iter().filter_map(Mask::blocks).peekable();
        if blocks.peek().is_some() {
            // The union over the heads of the group.
            let kept = blocks.filter_map(|blocks| trim(blocks, &positions, keys.clone()));
            keys = kept.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end))?;
        }
        if keys.start >= keys.end {
            return None;
        }
        let marked = self.masks.iter().any(|mask| {
            let whole = |blocks: &BlockMask<'_>| {
                blocks.tile(positions.clone(), keys.clone()) == TileClass::Full
            };
            mask.keep().is_some() || !mask.blocks().is_none_or(whole)
        });
        let class = self.band.tile(positions, keys.clone(), self.q_len, self.kv_len);
        Some(Visit { keys, banded: class != TileClass::Full, marked })
    }

    /// Scratch that [`Self::apply`] needs for tiles of at most `keys` by `width`, in f32.
    pub(crate) fn scratch_len(problem: &Problem, keys: usize, width: usize) -> usize {
        let pairs = problem.has_bias() || problem.has_mask() || problem.block_mask().is_some();
        let planes = if pairs { 2 * lines(keys * width) } else { 0 };
        planes + 2 * lines(width)
    }

    /// Turns products `q.k` into scores whose hidden pairs are -inf, in place.
    ///
    /// Shapes: `tile` `[visit.keys, width]`, column = flattened row `rows.start + column`; columns past
    /// `rows` are computed too and mean nothing.
    ///
    /// # Panics
    /// When `scratch` is shorter than [`Self::scratch_len`]: an error of the engine.
    pub(crate) fn apply(
        &self,
        tile: &mut [f32],
        width: usize,
        rows: Range<usize>,
        visit: &Visit,
        mut scratch: &mut [f32],
    ) {
        let simd = self.simd;
        let first = carve(&mut scratch, width);
        let end = carve(&mut scratch, width);
        let pairs = if visit.marked || !self.bias.is_empty() { tile.len() } else { 0 };
        let by_row = carve(&mut scratch, pairs);
        let by_key = carve(&mut scratch, pairs);
        let keys = visit.keys.len();
        if !self.plain {
            match self.softcap {
                Some(cap) => simd.soft_cap(tile, self.scale, cap),
                None => simd.scale(tile, self.scale),
            }
        }
        if !self.bias.is_empty() {
            self.fill_bias(by_row, rows.clone(), &visit.keys);
            simd.transpose(by_row, keys, (rows.len(), keys), by_key, width);
            simd.add(tile, by_key);
        }
        if !self.slopes.is_empty() {
            first.fill(0.0);
            end.fill(0.0);
            for (i, row) in rows.clone().enumerate() {
                first[i] = self.slopes[row % self.group];
                end[i] = self.relative_position(row / self.group, visit.keys.start);
            }
            simd.subtract_distance(tile, first, end);
        }
        if visit.marked {
            self.fill_marks(by_row, rows.clone(), &visit.keys);
            simd.transpose(by_row, keys, (rows.len(), keys), by_key, width);
            simd.hide_marked(tile, by_key);
        }
        if visit.banded {
            first.fill(0.0);
            end.fill(f32::INFINITY);
            for (i, row) in rows.enumerate() {
                let seen = self.band.row(row / self.group, self.q_len, self.kv_len);
                first[i] = relative(seen.start, &visit.keys);
                end[i] = relative(seen.end, &visit.keys);
            }
            simd.mask_outside(tile, first, end);
        }
    }

    /// Makes the weights that dropout takes 0, once the softmax has summed them.
    ///
    /// Shapes: as [`Self::apply`], for the keys of `keys`.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a call with dropout has less than 2^32 of each"
    )]
    pub(crate) fn drop_columns(
        &self,
        tile: &mut [f32],
        width: usize,
        rows: Range<usize>,
        keys: &Range<usize>,
    ) {
        let Some(mask) = &self.dropout else { return };
        let (sequence, first_head) = self.place;
        for first in (0..rows.len()).step_by(LANE_GROUP) {
            let sequence = sequence as u32;
            let mut lanes = DropLanes { sequence, heads: [0; LANE_GROUP], rows: [0; LANE_GROUP] };
            for (lane, row) in (rows.start + first..rows.end).take(LANE_GROUP).enumerate() {
                lanes.heads[lane] = (first_head + row % self.group) as u32;
                lanes.rows[lane] = (row / self.group) as u32;
            }
            self.simd.drop_lanes(tile, width, first, keys.clone(), &lanes, mask);
        }
    }

    /// The same for the weights of one flattened row, from key `first` on.
    pub(crate) fn drop_row(&self, weights: &mut [f32], row: usize, first: usize) {
        let Some(mask) = &self.dropout else { return };
        let (sequence, head) = (self.place.0, self.place.1 + row % self.group);
        let keys = first..first + weights.len();
        for block in keys.start / 4..keys.end.div_ceil(4) {
            let words = mask.words(sequence, head, row / self.group, block);
            for (key, word) in (block * 4..).zip(words) {
                if word < mask.threshold() && keys.contains(&key) {
                    weights[key - first] = 0.0;
                }
            }
        }
    }

    /// Whether weights are dropped.
    pub(crate) fn drops(&self) -> bool {
        self.dropout.is_some()
    }

    /// What the weights that are not dropped are multiplied by; 1 without dropout.
    pub(crate) fn keep_factor(&self) -> f32 {
        self.dropout.as_ref().map_or(1.0, DropoutMask::factor)
    }

    /// Positions that flattened rows touch.
    fn positions(&self, rows: &Range<usize>) -> Range<usize> {
        match self.group {
            0 => 0..0,
            group => rows.start / group..rows.end.div_ceil(group),
        }
    }

    /// A row's own key position counted from `start`.
    #[expect(clippy::cast_possible_truncation, reason = "a distance of 2^24 tokens may round")]
    fn relative_position(&self, position: usize, start: usize) -> f32 {
        (position as f64 + self.kv_len as f64 - self.q_len as f64 - start as f64) as f32
    }

    /// Writes the bias of each row, one line of keys a row.
    fn fill_bias(&self, lines: &mut [f32], rows: Range<usize>, keys: &Range<usize>) {
        for (line, row) in lines.chunks_mut(keys.len()).zip(rows) {
            let bias = &self.bias[row % self.group];
            read_line(bias, row / self.group, keys, line, |x| x);
        }
    }

    /// Writes -1 for each hidden and 0 for each kept pair, one line of keys a row.
    fn fill_marks(&self, lines: &mut [f32], rows: Range<usize>, keys: &Range<usize>) {
        for (line, row) in lines.chunks_mut(keys.len()).zip(rows) {
            let (mask, position) = (&self.masks[row % self.group], row / self.group);
            match mask.keep() {
                None => line.fill(0.0),
                Some(keep) => {
                    read_line(keep, position, keys, line, |x| if x == 0 { -1.0 } else { 0.0 });
                }
            }
            if let Some(blocks) = mask.blocks() {
                for (part, kept) in block_parts(blocks, position, keys.clone()) {
                    if !kept {
                        line[part.start - keys.start..part.end - keys.start].fill(-1.0);
                    }
                }
            }
        }
    }
}

/// A key bound counted from the first visited key, clamped to the visit: exact in f32.
fn relative(bound: usize, keys: &Range<usize>) -> f32 {
    (bound.clamp(keys.start, keys.end) - keys.start) as f32
}

/// Reads `view[row, keys]` whatever its strides; extents of 1 broadcast.
fn read_line<T: Copy>(
    view: &View<'_, T>,
    row: usize,
    keys: &Range<usize>,
    line: &mut [f32],
    convert: impl Fn(T) -> f32,
) {
    let (shape, strides) = (view.shape(), view.layout().strides());
    let row = if shape[0] == 1 { 0 } else { row };
    let step = if shape[1] == 1 { 0 } else { strides[1] };
    let first = if shape[1] == 1 { 0 } else { keys.start };
    let Some(start) = view.layout().index(&[row, first]) else {
        // Checked inputs cover every row and key of their sequence.
        line.fill(f32::NAN);
        return;
    };
    let data = view.data();
    match step {
        0 => line.fill(convert(data[start])),
        1 => {
            for (x, &y) in line.iter_mut().zip(&data[start..]) {
                *x = convert(y);
            }
        }
        _ => {
            for (x, key) in line.iter_mut().zip(keys.clone()) {
                let at = if shape[1] == 1 { 0 } else { key };
                *x = view.get(&[row, at]).map_or(f32::NAN, &convert);
            }
        }
    }
}

/// Cuts `keys` down to the first and last block that one of the rows keeps; `None` where none is.
fn trim(
    blocks: &BlockMask<'_>,
    positions: &Range<usize>,
    keys: Range<usize>,
) -> Option<Range<usize>> {
    let mut kept: Option<Range<usize>> = None;
    let mut at = keys.start;
    while at < keys.end {
        let end = ((at / blocks.block_kv() + 1) * blocks.block_kv()).min(keys.end);
        if blocks.tile(positions.clone(), at..end) != TileClass::Skip {
            kept = Some(kept.map_or(at, |k| k.start)..end);
        }
        at = end;
    }
    kept
}

/// The parts of `keys` that lie in one block each, and whether the row keeps them.
fn block_parts<'b>(
    blocks: &'b BlockMask<'_>,
    row: usize,
    keys: Range<usize>,
) -> impl Iterator<Item = (Range<usize>, bool)> + 'b {
    let mut at = keys.start;
    std::iter::from_fn(move || {
        if at >= keys.end {
            return None;
        }
        let end = ((at / blocks.block_kv() + 1) * blocks.block_kv()).min(keys.end);
        let part = at..end;
        at = end;
        Some((part.clone(), blocks.keeps(row, part.start)))
    })
}

/// Width of the tile that holds `rows` columns.
pub(crate) fn tile_width(rows: usize) -> usize {
    rows.next_multiple_of(LANE_GROUP)
}
