//! Products of a few rows with rows that lie anywhere in storage: the two halves of a decode step.
//!
//! Invariant: every stored row is read in place, once, and in its stored type, wherever its page is.
//! A decode step is bound by the bytes of the cache, so nothing is widened in memory first (beyond the
//! rows at hand, in L1). A pass takes a tile of tokens with all its heads, a few tokens at a time, in
//! the order in which they are stored, and asks meanwhile for the tile that the next pass reads:
//! hardware prefetchers stop at the end of a 4 KiB page and cannot follow a block table, the caller
//! can.
//!
//! Rows are given by where they start rather than by a stride, so that a tile may span pages of any
//! size and its sums do not depend on where the page boundaries are.
//!
//! In the scores a vector holds spans of 8 of one key's elements, once for each of two queries: half the
//! horizontal sums of one query a vector, and half the loads of four queries a vector. With as few
//! queries as one KV head has, [`super::Product`] leaves most lanes empty.

use std::ops::Range;

use attn_core::DType;

use super::widen::load_partial;
use super::{Kernel, LANE_GROUP, Lanes, Simd, Widen};

/// Bytes that one prefetch brings.
const LINE: usize = 64;
/// Rows of queries, and of widened keys, are filled up with 0 to a multiple of this: the widest span.
const SPAN: usize = 8;
/// Queries are filled up with 0 to a multiple of this: those of the widest tile.
const QUERIES: usize = 4;
/// Tokens of a visit.
///
/// PERF: twice as many read twice as many 4 KiB pages at a time; streaming a shuffled cache with the
/// arithmetic of four queries then reached 0.75 of a plain read loop instead of 0.85.
const TOKENS: usize = 4;
/// Most rows of a tile.
pub(crate) const MAX_ROWS: usize = 64;

/// Where the rows of a tile start, each the index of an element.
///
/// Invariants: `lowest..=highest` holds every start, so one comparison checks a whole tile.
#[derive(Clone, Debug)]
pub(crate) struct RowStarts {
    starts: [usize; MAX_ROWS],
    count: usize,
    lowest: usize,
    highest: usize,
}

impl RowStarts {
    /// No rows.
    pub(crate) const NONE: Self =
        Self { starts: [0; MAX_ROWS], count: 0, lowest: usize::MAX, highest: 0 };

    /// Adds a row; `None` when there are [`MAX_ROWS`] already.
    pub(crate) fn push(&mut self, start: usize) -> Option<()> {
        *self.starts.get_mut(self.count)? = start;
        self.count += 1;
        self.lowest = self.lowest.min(start);
        self.highest = self.highest.max(start);
        Some(())
    }

    /// The starts, in the order in which they were added.
    pub(crate) fn as_slice(&self) -> &[usize] {
        &self.starts[..self.count]
    }
}

/// A tile of stored rows: some tokens, all heads of each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scattered<'a, E> {
    /// The storage.
    pub(crate) data: &'a [E],
    /// Where the rows of head 0 start, one a token.
    pub(crate) starts: &'a RowStarts,
    /// From a head to the next.
    pub(crate) head_step: isize,
    /// Elements of a row.
    pub(crate) dim: usize,
    /// Whether one head's rows of a page are adjacent, rather than one token's heads.
    pub(crate) head_major: bool,
}

impl<E> Scattered<'_, E> {
    fn assert_inside(&self, heads: &Range<usize>) {
        let RowStarts { count, lowest, highest, .. } = *self.starts;
        let inside = |head: usize| {
            let offset = self.head_step.checked_mul(isize::try_from(head).ok()?)?;
            lowest.checked_add_signed(offset)?;
            let end = highest.checked_add_signed(offset)?.checked_add(self.dim)?;
            (end <= self.data.len()).then_some(())
        };
        // A head's offset lies between those of the first and the last.
        let ends = [heads.start, heads.end.saturating_sub(1)];
        let all = || ends.into_iter().all(|head| inside(head).is_some());
        assert!(count == 0 || heads.is_empty() || all(), "rows lie inside their storage");
    }

    /// The base of one head's rows.
    #[inline(always)]
    fn head(&self, head: usize) -> *const E {
        #[expect(clippy::cast_possible_wrap, reason = "a number of heads")]
        self.data.as_ptr().wrapping_offset(self.head_step.wrapping_mul(head as isize))
    }

    /// The rows of a visit. Past the last token the last row stands in.
    #[inline(always)]
    fn rows(&self, head: usize, token: usize) -> [*const E; TOKENS] {
        let (base, last) = (self.head(head), self.starts.count.saturating_sub(1));
        std::array::from_fn(|i| {
            base.wrapping_add(self.starts.starts[(token + i).min(last) % MAX_ROWS])
        })
    }

    /// The visits of a pass over some heads.
    fn visits(&self, heads: &Range<usize>) -> Visits {
        let (count, head_major) = (self.starts.count, self.head_major);
        Visits { token: 0, head: heads.start, count, heads: heads.clone(), head_major }
    }
}

/// First token and head of each visit of a pass, in storage order.
///
/// An iterator rather than a function that takes the visit as a closure: a closure need not be
/// inlined, and then is compiled without the level's instructions.
struct Visits {
    token: usize,
    head: usize,
    count: usize,
    heads: Range<usize>,
    head_major: bool,
}

impl Iterator for Visits {
    type Item = (usize, usize);

    #[inline(always)]
    fn next(&mut self) -> Option<(usize, usize)> {
        if self.token >= self.count || self.head >= self.heads.end {
            return None;
        }
        let visit = (self.token, self.head);
        if self.head_major {
            self.token += TOKENS;
            if self.token >= self.count {
                (self.token, self.head) = (0, self.head + 1);
            }
        } else {
            self.head += 1;
            if self.head == self.heads.end {
                (self.token, self.head) = (self.token + TOKENS, self.heads.start);
            }
        }
        Some(visit)
    }
}

/// Walks the rows of a tile that a later pass reads, in storage order.
struct Ahead<'a, E> {
    tile: Option<Scattered<'a, E>>,
    heads: usize,
    token: usize,
    head: usize,
    /// Rows not yet asked for.
    left: usize,
}

impl<'a, E> Ahead<'a, E> {
    /// Starts at the share of the tile that belongs to a pass from head `first` on.
    fn new(tile: Option<Scattered<'a, E>>, heads: usize, first: usize) -> Self {
        let tokens = tile.as_ref().map_or(0, |tile| tile.starts.count);
        let row = first * tokens;
        let (token, head) = match &tile {
            Some(tile) if !tile.head_major => (row / heads.max(1), row % heads.max(1)),
            _ => (0, first),
        };
        Self { tile, heads, token, head, left: (heads * tokens).saturating_sub(row) }
    }

    /// The next rows. Where there is none left, `instead`, which is being read anyway.
    #[inline(always)]
    fn next(&mut self, instead: [*const E; TOKENS]) -> [*const E; TOKENS] {
        let mut rows = instead;
        let Some(tile) = &self.tile else {
            return rows;
        };
        for row in rows.iter_mut().take(self.left) {
            let start = tile.starts.starts[self.token % MAX_ROWS];
            *row = tile.head(self.head).wrapping_add(start);
            let (inner, end, outer) = if tile.head_major {
                (&mut self.token, tile.starts.count, &mut self.head)
            } else {
                (&mut self.head, self.heads, &mut self.token)
            };
            *inner += 1;
            if *inner == end {
                *inner = 0;
                *outer += 1;
            }
        }
        self.left = self.left.saturating_sub(TOKENS);
        rows
    }
}

/// The heads that a pass takes of a tile, and the tile that the next pass reads.
#[derive(Clone, Debug)]
pub(crate) struct Pass<'a, E> {
    /// Rows to read.
    pub(crate) tile: Scattered<'a, E>,
    /// All heads there are.
    pub(crate) all_heads: usize,
    /// Heads to compute.
    pub(crate) heads: Range<usize>,
    /// Rows to bring into the second-level cache meanwhile: all of them over all heads.
    pub(crate) ahead: Option<Scattered<'a, E>>,
}

impl<E> Pass<'_, E> {
    /// Asks for one row of each page of the tile ahead before all others: address translations that
    /// miss then run side by side, not one after another, each in the way of the arithmetic.
    ///
    /// PERF: a decode step over a shuffled cache in 4 KiB pages gained 5 % (f32) to 10 % (bf16).
    #[inline(always)]
    fn translate(&self) {
        let Some(tile) = &self.ahead else {
            return;
        };
        if self.heads.start > 0 {
            return;
        }
        let starts = tile.starts.as_slice();
        if tile.head_major {
            for head in 0..self.all_heads {
                for start in starts.iter().step_by(LANE_GROUP) {
                    prefetch(tile.head(head).wrapping_add(*start));
                }
            }
        } else {
            for start in starts {
                prefetch(tile.data.as_ptr().wrapping_add(*start));
            }
        }
    }
}

/// What [`Simd::softmax_rows`] carries from tile to tile; one entry, or one output, a row.
#[derive(Debug)]
pub(crate) struct RowState<'a> {
    /// Largest `score * c` so far, -inf before the first visible key.
    pub(crate) max: &'a mut [f32],
    /// Sum of `2^(score * c - max)` so far.
    pub(crate) sum: &'a mut [f32],
    /// Weighted values so far.
    pub(crate) o: &'a mut [f32],
}

/// Elements of `count` packed queries of `dim`.
pub(crate) const fn packed_len(count: usize, dim: usize) -> usize {
    (count.next_multiple_of(QUERIES) * dim.next_multiple_of(SPAN)).next_multiple_of(LANE_GROUP)
}

/// Elements of the scratch that [`Simd::score_rows`] widens keys of `dim` into.
pub(crate) const fn widened_len(dim: usize) -> usize {
    TOKENS * dim.next_multiple_of(SPAN)
}

impl Simd {
    /// Writes one query to its place among packed queries.
    ///
    /// Shapes: `packed` [`packed_len`]`(count, dim)`, all 0 before the first query is packed.
    /// Invariants: the order of elements within `packed` is that of this level.
    ///
    /// # Panics
    /// When `packed` is too short: an error of the engine, not of its input.
    pub(crate) fn pack_query(self, index: usize, query: &[f32], packed: &mut [f32]) {
        self.dispatch(PackQuery { index, query, packed });
    }

    /// `out[head, query, key] = queries[head, query, :] . key row`, and -inf past the keys.
    ///
    /// Shapes: `queries` `[heads]` of `rows` packed by [`Simd::pack_query`]; `out` `[heads, rows, width]`
    /// dense, `width` a multiple of [`LANE_GROUP`] that is at least the number of keys; both with all
    /// heads, of which those of the pass are used; `block` scratch of [`widened_len`].
    ///
    /// # Panics
    /// When an operand is shorter than its shape: an error of the engine, not of its input.
    pub(crate) fn score_rows<E: Widen>(
        self,
        queries: &[f32],
        rows: usize,
        keys: &Pass<'_, E>,
        block: &mut [f32],
        out: &mut [f32],
        width: usize,
    ) {
        keys.tile.assert_inside(&keys.heads);
        let (dim, heads) = (keys.tile.dim, keys.all_heads);
        assert!(keys.heads.end <= heads, "heads of the pass exist");
        assert!(width > 0 && width.is_multiple_of(LANE_GROUP), "width {width} in lane groups");
        assert!(width >= keys.tile.starts.count, "a column for each key");
        let scores = heads.checked_mul(rows).and_then(|n| n.checked_mul(width));
        assert_eq!(Some(out.len()), scores, "scores are dense rows");
        let packed = heads.checked_mul(packed_len(rows, dim));
        assert!(packed.is_some_and(|n| n <= queries.len()), "queries hold their shape");
        assert!(block.len() >= widened_len(dim), "the block holds the widened keys");
        self.dispatch(ScoreRows { queries, rows, keys, block, out, width });
    }

    /// The online softmax step over rows of scores, in place; rescales the outputs whose row found a
    /// larger score.
    ///
    /// Shapes: `tile` `[rows, width]` dense, row = query, column = key, `width` a multiple of
    /// [`LANE_GROUP`]; there is one entry of each part of `state` a row, and one row of `o`.
    /// Invariants: `c` is positive and finite.
    ///
    /// # Panics
    /// When the lengths do not match: an error of the engine, not of its input.
    pub(crate) fn softmax_rows(self, tile: &mut [f32], width: usize, c: f32, state: RowState<'_>) {
        assert!(width > 0 && width.is_multiple_of(LANE_GROUP), "width {width} in lane groups");
        assert_eq!(tile.len() % width, 0, "the tile is made of whole rows");
        let rows = tile.len() / width;
        assert_eq!([state.max.len(), state.sum.len()], [rows; 2], "one state entry a row");
        assert!(rows == 0 || state.o.len().is_multiple_of(rows), "one output a row");
        if rows > 0 {
            self.dispatch(SoftmaxRows { tile, width, c, state });
        }
    }

    /// `out[head, row, :] += sum over keys of weights[head, row, key] * value row`.
    ///
    /// Shapes: `weights` `[heads, rows, width]` dense of which the first columns, one a value, are used;
    /// `out` `[heads, rows, dim]` dense; both with all heads, of which those of the pass are used.
    ///
    /// # Panics
    /// When an operand is shorter than its shape: an error of the engine, not of its input.
    pub(crate) fn weigh_rows<E: Widen>(
        self,
        weights: &[f32],
        width: usize,
        values: &Pass<'_, E>,
        rows: usize,
        out: &mut [f32],
    ) {
        values.tile.assert_inside(&values.heads);
        assert!(values.heads.end <= values.all_heads, "heads of the pass exist");
        assert!(width >= values.tile.starts.count, "a weight for each value");
        let all = values.all_heads.checked_mul(rows);
        let weighed = all.and_then(|n| n.checked_mul(width));
        assert_eq!(Some(weights.len()), weighed, "weights are dense rows");
        let results = all.and_then(|n| n.checked_mul(values.tile.dim));
        assert_eq!(Some(out.len()), results, "results are dense rows");
        self.dispatch(WeighRows { weights, width, values, rows, out });
    }
}

/// Queries of a tile: two vectors of them, so that with four keys there are eight sums, as many as two
/// multiplies a cycle of four cycles each keep busy.
const fn group<L: Lanes>() -> usize {
    2 * L::LANES / L::SPAN
}

struct PackQuery<'a> {
    index: usize,
    query: &'a [f32],
    packed: &'a mut [f32],
}

impl Kernel for PackQuery<'_> {
    type Output = ();

    /// Tiles of queries follow one another; a tile holds, span by span, that span of each of its
    /// queries.
    #[inline(always)]
    fn run<L: Lanes>(self, _: L) {
        let (tile, place) = (self.index / group::<L>(), self.index % group::<L>());
        let spans = self.query.len().next_multiple_of(SPAN) / L::SPAN;
        let first = tile * spans * 2 * L::LANES + place * L::SPAN;
        for (i, span) in self.query.chunks(L::SPAN).enumerate() {
            let at = first + i * 2 * L::LANES;
            self.packed[at..at + span.len()].copy_from_slice(span);
        }
    }
}

struct ScoreRows<'a, E> {
    queries: &'a [f32],
    rows: usize,
    keys: &'a Pass<'a, E>,
    block: &'a mut [f32],
    out: &'a mut [f32],
    width: usize,
}

impl<E: Widen> Kernel for ScoreRows<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self, l: L) {
        self.keys.translate();
        let Pass { tile, all_heads, heads, ahead } = self.keys;
        let dim = tile.dim;
        let in_place = E::DTYPE == DType::F32 && dim.is_multiple_of(SPAN);
        let mut ahead = Ahead::new(*ahead, *all_heads, heads.start);
        for (token, head) in tile.visits(heads) {
            let rows = tile.rows(head, token);
            let ahead = ahead.next(rows);
            if in_place {
                let rows = rows.map(|row| row.cast::<f32>());
                let ahead = ahead.map(|row| row.cast::<f32>());
                self.visit::<L, true>(l, token, head, rows, ahead);
            } else {
                let rows = self.widen(l, rows, ahead);
                self.visit::<L, false>(l, token, head, rows, rows);
            }
        }
        let (keys, rows) = (tile.starts.count, self.rows * self.width);
        for row in self.out[heads.start * rows..heads.end * rows].chunks_exact_mut(self.width) {
            row[keys..].fill(f32::NEG_INFINITY);
        }
    }
}

impl<E: Widen> ScoreRows<'_, E> {
    /// Copies the keys to the block as f32, their last span filled up with 0.
    #[inline(always)]
    fn widen<L: Lanes>(
        &mut self,
        l: L,
        rows: [*const E; TOKENS],
        ahead: [*const E; TOKENS],
    ) -> [*const f32; TOKENS] {
        let dim = self.keys.tile.dim;
        let (stride, whole) = (dim.next_multiple_of(SPAN), dim - dim % L::LANES);
        let line = LINE / size_of::<E>();
        let base = self.block.as_mut_ptr();
        for (i, (row, ahead)) in rows.into_iter().zip(ahead).enumerate() {
            let dst = base.wrapping_add(i * stride);
            for at in (0..whole).step_by(L::LANES) {
                if at.is_multiple_of(line) {
                    prefetch(ahead.wrapping_add(at));
                }
                // SAFETY: `Simd::score_rows` checked that the row's `dim` elements are inside the
                // storage; `at + LANES` is at most `dim`.
                let x = unsafe { E::load(l, row.wrapping_add(at)) };
                // SAFETY: `Simd::score_rows` checked that the block holds TOKENS rows of `stride`.
                unsafe { l.store(x, dst.wrapping_add(at)) };
            }
            if whole < dim {
                prefetch(ahead.wrapping_add(whole));
                // SAFETY: as for the loads above.
                let tail =
                    unsafe { std::slice::from_raw_parts(row.wrapping_add(whole), dim - whole) };
                // Through the same pointer: a borrow of the block would end its use for the next row.
                for (n, x) in tail.iter().enumerate() {
                    // SAFETY: `whole + n` is below `dim`, and the block holds rows of `stride >= dim`.
                    unsafe { dst.wrapping_add(whole + n).write(x.to_f32()) };
                }
            }
            for at in dim..stride {
                // SAFETY: the block holds rows of `stride`.
                unsafe { dst.wrapping_add(at).write(0.0) };
            }
        }
        let base = base.cast_const();
        std::array::from_fn(|i| base.wrapping_add(i * stride))
    }

    /// The products of [`TOKENS`] keys with all queries of their head.
    #[inline(always)]
    fn visit<L: Lanes, const FETCH: bool>(
        &mut self,
        l: L,
        token: usize,
        head: usize,
        rows: [*const f32; TOKENS],
        ahead: [*const f32; TOKENS],
    ) {
        let mut query = 0;
        while query < self.rows {
            // The first queries to meet these keys also fetch.
            if FETCH && query == 0 {
                self.tile::<L, true>(l, query, token, head, rows, ahead);
            } else {
                self.tile::<L, false>(l, query, token, head, rows, ahead);
            }
            query += group::<L>();
        }
    }

    #[inline(always)]
    fn tile<L: Lanes, const FETCH: bool>(
        &mut self,
        l: L,
        query: usize,
        token: usize,
        head: usize,
        mut rows: [*const f32; TOKENS],
        mut ahead: [*const f32; TOKENS],
    ) {
        let dim = self.keys.tile.dim;
        let spans = dim.next_multiple_of(SPAN) / L::SPAN;
        let first = head * packed_len(self.rows, dim) + query * spans * L::SPAN;
        let mut queries = self.queries.as_ptr().wrapping_add(first);
        let mut acc = [[l.splat(0.0); TOKENS]; 2];
        // Four lanes would sum 32 products of a row of 128 each, whose rounding the error rule does not
        // grant; two chains are as exact as eight lanes.
        let few = L::LANES < 8;
        let mut odd = acc;
        for i in 0..spans {
            if FETCH && (i * L::SPAN).is_multiple_of(LINE / size_of::<f32>()) {
                for ahead in &mut ahead {
                    prefetch(*ahead);
                    *ahead = ahead.wrapping_add(LINE / size_of::<f32>());
                }
            }
            // SAFETY: `Simd::score_rows` checked that the packed queries are all there.
            let a = unsafe { l.load(queries) };
            // SAFETY: as above.
            let b = unsafe { l.load(queries.wrapping_add(L::LANES)) };
            queries = queries.wrapping_add(2 * L::LANES);
            let acc = if few && i % 2 == 1 { &mut odd } else { &mut acc };
            for (j, row) in rows.iter_mut().enumerate() {
                // SAFETY: the row holds `spans` spans: `dim` elements of a checked row of the storage,
                // or a row of the block.
                let k = unsafe { l.load_span(*row) };
                *row = row.wrapping_add(L::SPAN);
                acc[0][j] = l.fma(a, k, acc[0][j]);
                acc[1][j] = l.fma(b, k, acc[1][j]);
            }
        }
        if few {
            for (acc, odd) in acc.as_flattened_mut().iter_mut().zip(odd.as_flattened()) {
                *acc = l.add(*acc, *odd);
            }
        }
        let mut sums = [[0.0f32; TOKENS]; QUERIES];
        l.span_sums(acc[0], acc[1], &mut sums);
        let rows = head * self.rows + query;
        for (i, sums) in sums[..group::<L>().min(self.rows - query)].iter().enumerate() {
            // Columns past the keys are there, for `width` is in lane groups.
            let start = (rows + i) * self.width + token;
            self.out[start..start + TOKENS].copy_from_slice(sums);
        }
    }
}

/// Largest maximum whose last place is worth at most half a power of two.
const EXACT_MAX: f32 = 4_194_304.0;

struct SoftmaxRows<'a> {
    tile: &'a mut [f32],
    width: usize,
    c: f32,
    state: RowState<'a>,
}

impl Kernel for SoftmaxRows<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let RowState { max, sum, o } = self.state;
        let dim = o.len() / max.len().max(1);
        let c = l.splat(self.c);
        let low = l.splat(f32::NEG_INFINITY);
        let states = max.iter_mut().zip(sum).enumerate();
        for (row, (i, (max, sum))) in self.tile.chunks_exact_mut(self.width).zip(states) {
            let mut top = low;
            for x in row.chunks_exact(L::LANES) {
                // SAFETY: the chunk has LANES elements.
                top = l.max(unsafe { l.load(x.as_ptr()) }, top);
            }
            let tile_max = l.maximum(top) * self.c;
            // Most tiles do not raise the maximum of their row.
            if tile_max > *max {
                let factor = l.exp2(l.splat(*max - tile_max));
                *sum *= l.maximum(factor);
                *max = tile_max;
                let mut o = o[i * dim..(i + 1) * dim].chunks_exact_mut(L::LANES);
                for x in &mut o {
                    // SAFETY: the chunk has LANES elements.
                    let scaled = l.mul(unsafe { l.load(x.as_ptr()) }, factor);
                    // SAFETY: the chunk has LANES elements.
                    unsafe { l.store(scaled, x.as_mut_ptr()) };
                }
                for x in o.into_remainder() {
                    *x *= l.maximum(factor);
                }
            }
            let shift = if *max == f32::NEG_INFINITY { 0.0 } else { *max };
            // Fused, the product is not rounded: far from 0 that rounding would be the largest error of the
            // weights. But the maximum was rounded, and where its last place is worth several powers of
            // two, the difference of the two would be taken for a score.
            let fused = shift.abs() < EXACT_MAX;
            let shift = l.splat(shift);
            let negative = l.sub(l.splat(0.0), shift);
            let mut total = l.splat(0.0);
            for x in row.chunks_exact_mut(L::LANES) {
                // SAFETY: the chunk has LANES elements.
                let score = unsafe { l.load(x.as_ptr()) };
                let exponent =
                    if fused { l.fma(score, c, negative) } else { l.sub(l.mul(score, c), shift) };
                let weight = l.exp2(exponent);
                total = l.add(total, weight);
                // SAFETY: the chunk has LANES elements.
                unsafe { l.store(weight, x.as_mut_ptr()) };
            }
            *sum += l.sum(total);
        }
    }
}

struct WeighRows<'a, E> {
    weights: &'a [f32],
    width: usize,
    values: &'a Pass<'a, E>,
    rows: usize,
    out: &'a mut [f32],
}

/// One visit of [`WeighRows`].
#[derive(Clone, Copy)]
struct Weighing<E> {
    /// Row of `weights` and `out`, heads counted in.
    row: usize,
    token: usize,
    count: usize,
    rows: [*const E; TOKENS],
    ahead: [*const E; TOKENS],
}

impl<E: Widen> Kernel for WeighRows<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(mut self, l: L) {
        self.values.translate();
        let Pass { tile, all_heads, heads, ahead } = self.values;
        let mut ahead = Ahead::new(*ahead, *all_heads, heads.start);
        for (token, head) in tile.visits(heads) {
            let rows = tile.rows(head, token);
            let ahead = ahead.next(rows);
            let count = TOKENS.min(tile.starts.count - token);
            let mut row = 0;
            while row < self.rows {
                let visit = Weighing { row: head * self.rows + row, token, count, rows, ahead };
                // The first rows to weigh these values also fetch.
                row += match (self.rows - row, row) {
                    (4.., 0) => self.dims::<L, 4, true>(l, &visit),
                    (4.., _) => self.dims::<L, 4, false>(l, &visit),
                    (2.., 0) => self.dims::<L, 2, true>(l, &visit),
                    (2.., _) => self.dims::<L, 2, false>(l, &visit),
                    (_, 0) => self.dims::<L, 1, true>(l, &visit),
                    _ => self.dims::<L, 1, false>(l, &visit),
                };
            }
        }
    }
}

impl<E: Widen> WeighRows<'_, E> {
    /// All of `ROWS` rows; returns their number.
    #[inline(always)]
    fn dims<L: Lanes, const ROWS: usize, const FETCH: bool>(
        &mut self,
        l: L,
        visit: &Weighing<E>,
    ) -> usize {
        let dim = self.values.tile.dim;
        let whole = dim - dim % L::LANES;
        let mut at = 0;
        while at < whole {
            let left = (whole - at) / L::LANES;
            at += if L::LANES == 16 && left >= 4 {
                self.tile::<L, ROWS, 4, FETCH>(l, visit, at)
            } else if left >= 2 {
                self.tile::<L, ROWS, 2, FETCH>(l, visit, at)
            } else {
                self.tile::<L, ROWS, 1, FETCH>(l, visit, at)
            };
        }
        if whole < dim {
            self.tail::<L, ROWS, FETCH>(l, visit, whole);
        }
        ROWS
    }

    /// `NV` vectors of `ROWS` rows of the result; returns the number of elements of a row.
    #[inline(always)]
    fn tile<L: Lanes, const ROWS: usize, const NV: usize, const FETCH: bool>(
        &mut self,
        l: L,
        visit: &Weighing<E>,
        at: usize,
    ) -> usize {
        let dim = self.values.tile.dim;
        let line = LINE / size_of::<E>();
        let base = self.out.as_mut_ptr();
        let outs: [*mut f32; ROWS] =
            std::array::from_fn(|i| base.wrapping_add((visit.row + i) * dim + at));
        let weights: [*const f32; ROWS] = std::array::from_fn(|i| {
            self.weights.as_ptr().wrapping_add((visit.row + i) * self.width + visit.token)
        });
        let mut acc = [[l.splat(0.0); NV]; ROWS];
        for (acc, src) in acc.iter_mut().zip(outs) {
            for (j, acc) in acc.iter_mut().enumerate() {
                // SAFETY: `Simd::weigh_rows` checked that all rows of `dim` fit, and the tile ends
                // within `dim`.
                *acc = unsafe { l.load(src.wrapping_add(j * L::LANES)) };
            }
        }
        for key in 0..visit.count {
            let src = visit.rows[key].wrapping_add(at);
            if FETCH {
                let ahead = visit.ahead[key];
                // A line holds one vector or several, whole.
                for j in 0..NV {
                    let at = at + j * L::LANES;
                    if (j * L::LANES).is_multiple_of(line) || at.is_multiple_of(line) {
                        prefetch(ahead.wrapping_add(at));
                    }
                }
            }
            let mut v = [l.splat(0.0); NV];
            for (j, v) in v.iter_mut().enumerate() {
                // SAFETY: `Simd::weigh_rows` checked that the row's `dim` elements are inside the
                // storage, and the tile ends within `dim`.
                *v = unsafe { E::load(l, src.wrapping_add(j * L::LANES)) };
            }
            for (acc, weight) in acc.iter_mut().zip(weights) {
                // SAFETY: `Simd::weigh_rows` checked that the weights are rows of `width`, and there
                // are at most `width` values.
                let x = l.splat(unsafe { *weight.wrapping_add(key) });
                for (acc, &v) in acc.iter_mut().zip(&v) {
                    *acc = l.fma(x, v, *acc);
                }
            }
        }
        for (acc, dst) in acc.iter().zip(outs) {
            for (j, &acc) in acc.iter().enumerate() {
                // SAFETY: as for the load above.
                unsafe { l.store(acc, dst.wrapping_add(j * L::LANES)) };
            }
        }
        NV * L::LANES
    }

    /// The elements past the last whole vector.
    #[inline(always)]
    fn tail<L: Lanes, const ROWS: usize, const FETCH: bool>(
        &mut self,
        l: L,
        visit: &Weighing<E>,
        whole: usize,
    ) {
        let dim = self.values.tile.dim;
        let at = |i: usize| (visit.row + i) * dim + whole..(visit.row + i + 1) * dim;
        let mut acc = [l.splat(0.0); ROWS];
        for (i, acc) in acc.iter_mut().enumerate() {
            *acc = load_partial(l, &self.out[at(i)]);
        }
        for key in 0..visit.count {
            if FETCH {
                prefetch(visit.ahead[key].wrapping_add(whole));
            }
            let src = visit.rows[key].wrapping_add(whole);
            // SAFETY: `Simd::weigh_rows` checked that the row's `dim` elements are inside the storage.
            let v = load_partial(l, unsafe { std::slice::from_raw_parts(src, dim - whole) });
            for (i, acc) in acc.iter_mut().enumerate() {
                let x = l.splat(self.weights[(visit.row + i) * self.width + visit.token + key]);
                *acc = l.fma(x, v, *acc);
            }
        }
        for (i, acc) in acc.iter().enumerate() {
            let mut lanes = [0.0; LANE_GROUP];
            // SAFETY: the array holds LANE_GROUP elements, and no vector has more lanes.
            unsafe { l.store(*acc, lanes.as_mut_ptr()) };
            self.out[at(i)].copy_from_slice(&lanes[..dim - whole]);
        }
    }
}

/// Asks for a cache line to be brought into the second-level cache.
#[inline(always)]
pub(super) fn prefetch<E>(at: *const E) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a prefetch is a hint: it reads nothing into the program and does not fault,
        // whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast::<i8>()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

#[cfg(test)]
mod tests;
