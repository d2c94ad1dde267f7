//! The online softmax step, over score tiles with queries in the lanes.
//!
//! Invariant: running maxima are in the base-2 scaled domain (`score * c`, `c = scale * log2 e`), a
//! column that has seen no visible key has maximum -inf and sum 0, and no such state makes a
//! NaN: the shift then is 0 and every weight 2^-inf = 0. A NaN score makes its row NaN, never
//! silently 0.
//!
//! Source: Milakov and Gimelshein, arXiv:1805.02867, algorithm 3, in the base-2 form of
//! FlashAttention-2, arXiv:2307.08691, section 3.1.

use super::{Kernel, LANE_GROUP, Lanes, Simd};

/// What [`Simd::softmax_columns`] carries from tile to tile; one entry a column.
#[derive(Debug)]
pub(crate) struct ColumnState<'a> {
    /// Largest `score * c` so far, -inf before the first visible key.
    pub(crate) max: &'a mut [f32],
    /// Sum of `2^(score * c - max)` so far.
    pub(crate) sum: &'a mut [f32],
    /// Out: the factor by which earlier weighted values must be rescaled.
    pub(crate) rescale: &'a mut [f32],
}

impl Simd {
    /// Turns a tile of scores into weights, in place, and updates the running state.
    ///
    /// Shapes: `tile` `[rows, width]` dense, row = key, column = query; `width` is a multiple of
    /// [`LANE_GROUP`] and the length of each part of `state`.
    /// Invariants: `c >= 0`.
    ///
    /// # Panics
    /// When the lengths do not match: an error of the engine, not of its input.
    pub(crate) fn softmax_columns(
        self,
        tile: &mut [f32],
        width: usize,
        c: f32,
        state: ColumnState<'_>,
    ) {
        assert!(
            width > 0 && width.is_multiple_of(LANE_GROUP),
            "width {width} in groups of {LANE_GROUP}"
        );
        assert_eq!(tile.len() % width, 0, "the tile is made of whole rows");
        let lengths = [state.max.len(), state.sum.len(), state.rescale.len()];
        assert_eq!(lengths, [width; 3], "one state entry a column");
        self.dispatch(SoftmaxColumns { tile, width, c, state });
    }

    /// Replaces each score by `2^(score * c - shift[column])`, in place.
    ///
    /// With `shift = lse * log2 e` these are the weights that the forward pass normalised; a column
    /// without a visible key must be given a shift of +inf, for which every weight is 0.
    ///
    /// # Panics
    /// When the lengths do not match: an error of the engine, not of its input.
    pub(crate) fn exp2_columns(self, tile: &mut [f32], width: usize, c: f32, shift: &[f32]) {
        assert!(
            width > 0 && width.is_multiple_of(LANE_GROUP),
            "width {width} in groups of {LANE_GROUP}"
        );
        assert_eq!(tile.len() % width, 0, "the tile is made of whole rows");
        assert_eq!(shift.len(), width, "one shift a column");
        self.dispatch(Exp2Columns { tile, width, c, shift });
    }
}

struct SoftmaxColumns<'a> {
    tile: &'a mut [f32],
    width: usize,
    c: f32,
    state: ColumnState<'a>,
}

impl Kernel for SoftmaxColumns<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Self { tile, width, c, state } = self;
        let rows = tile.len() / width;
        let base = tile.as_mut_ptr();
        let low = l.splat(f32::NEG_INFINITY);
        let zero = l.splat(0.0);
        let c = l.splat(c);
        for col in (0..width).step_by(L::LANES) {
            // Four partial results: one chain of maxima or sums would wait for its own latency.
            let mut max = [low; 4];
            for row in 0..rows {
                // SAFETY: row < rows and col + LANES <= width, so the vector is inside the tile.
                let x = unsafe { l.load(base.wrapping_add(row * width + col)) };
                max[row % 4] = l.max(x, max[row % 4]);
            }
            let tile_max = l.max(l.max(max[0], max[1]), l.max(max[2], max[3]));
            // SAFETY: the state has `width` entries.
            let old_max = unsafe { l.load(state.max.as_ptr().wrapping_add(col)) };
            // A tile maximum of -inf times c = 0 is NaN, which `max` passes over.
            let new_max = l.max(l.mul(tile_max, c), old_max);
            let shift = l.select_lt(low, new_max, new_max, zero);
            let rescale = l.exp2(l.sub(old_max, shift));
            let mut sum = [zero; 4];
            for row in 0..rows {
                let at = base.wrapping_add(row * width + col);
                // SAFETY: as above.
                let x = unsafe { l.load(at) };
                let weight = l.exp2(l.sub(l.mul(x, c), shift));
                // SAFETY: as above.
                unsafe { l.store(weight, at) };
                sum[row % 4] = l.add(sum[row % 4], weight);
            }
            let tile_sum = l.add(l.add(sum[0], sum[1]), l.add(sum[2], sum[3]));
            let sum_at = state.sum.as_mut_ptr().wrapping_add(col);
            // SAFETY: the state has `width` entries.
            let old_sum = unsafe { l.load(sum_at) };
            // SAFETY: the state has `width` entries.
            unsafe { l.store(l.fma(old_sum, rescale, tile_sum), sum_at) };
            // SAFETY: the state has `width` entries.
            unsafe { l.store(new_max, state.max.as_mut_ptr().wrapping_add(col)) };
            // SAFETY: the state has `width` entries.
            unsafe { l.store(rescale, state.rescale.as_mut_ptr().wrapping_add(col)) };
        }
    }
}

struct Exp2Columns<'a> {
    tile: &'a mut [f32],
    width: usize,
    c: f32,
    shift: &'a [f32],
}

impl Kernel for Exp2Columns<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let c = l.splat(self.c);
        for row in self.tile.chunks_exact_mut(self.width) {
            let lanes = row.chunks_exact_mut(L::LANES).zip(self.shift.chunks_exact(L::LANES));
            for (x, shift) in lanes {
                // SAFETY: the chunk has LANES elements.
                let shift = unsafe { l.load(shift.as_ptr()) };
                // SAFETY: the chunk has LANES elements.
                let score = unsafe { l.load(x.as_ptr()) };
                let weight = l.exp2(l.sub(l.mul(score, c), shift));
                // SAFETY: the chunk has LANES elements.
                unsafe { l.store(weight, x.as_mut_ptr()) };
            }
        }
    }
}
