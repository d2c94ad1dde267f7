//! Which keys a query row may see, and what a whole tile of them amounts to.
//!
//! The invariant: [`Mask::tile`] never answers [`TileClass::Skip`] for a tile with a visible key, nor
//! [`TileClass::Full`] for one with a hidden key; band and block-sparse tiles are answered exactly. It is
//! kept in one place because an engine with its own arithmetic here is the classic source of an off-by-one at
//! a tile edge: the tiled model walks by it, and engines that trim their tiles further are held to
//! [`Mask::sees`] pair by pair.

use std::ops::Range;

use crate::error::Error;
use crate::view::View;

/// What a tile of (query rows, keys) needs from the inner loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum TileClass {
    /// No row sees any key: the tile is not visited.
    Skip,
    /// Every row sees every key: no comparison is needed.
    Full,
    /// Some pairs are hidden: each must be tested.
    Partial,
}

impl TileClass {
    /// The class of the intersection of two masks whose classes on a tile are known.
    ///
    /// Two partial masks may be disjoint, so `Partial` here means "at most partial".
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Skip, _) | (_, Self::Skip) => Self::Skip,
            (Self::Full, Self::Full) => Self::Full,
            _ => Self::Partial,
        }
    }
}

/// Causal and window bounds: the keys of one row form one interval.
///
/// Row `i` of a sequence with `q_len` rows and `kv_len` keys sits at key position
/// `p = i + kv_len - q_len` (bottom-right alignment) and sees `p - left ..= p + right`, an open side
/// being unbounded. Causal is `right = 0`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Band {
    /// Keys to the left of the row's own position that it sees; `None` is all of them.
    pub left: Option<usize>,
    /// Keys to the right of the row's own position that it sees; `None` is all of them.
    pub right: Option<usize>,
}

impl Band {
    /// No bound on either side.
    pub const OPEN: Self = Self { left: None, right: None };
    /// Causal: nothing to the right.
    pub const CAUSAL: Self = Self { left: None, right: Some(0) };

    /// The band of a causal flag and a window; causal tightens the right side to 0.
    #[must_use]
    pub const fn new(causal: bool, left: Option<usize>, right: Option<usize>) -> Self {
        Self { left, right: if causal { Some(0) } else { right } }
    }

    /// Whether no row is bounded on either side.
    #[must_use]
    pub const fn is_open(self) -> bool {
        self.left.is_none() && self.right.is_none()
    }

    /// The keys that `row` sees; empty when the interval misses `0..kv_len`.
    #[must_use]
    pub fn row(self, row: usize, q_len: usize, kv_len: usize) -> Range<usize> {
        // In i128 the sums cannot overflow, whatever the window: a left bound of i64::MAX is a
        // legal way to say "open".
        let position = row as i128 + kv_len as i128 - q_len as i128;
        let clamp = |x: i128| usize::try_from(x.clamp(0, kv_len as i128)).unwrap_or(0);
        let lo = self.left.map_or(0, |left| clamp(position - left as i128));
        let hi = self.right.map_or(kv_len, |right| clamp(position + right as i128 + 1));
        lo..hi.max(lo)
    }

    /// The smallest interval that holds the keys of every row in `rows`; what lies outside is storage
    /// that these rows must not read. Bounds of rows without keys do not widen it.
    #[must_use]
    pub fn rows(self, rows: Range<usize>, q_len: usize, kv_len: usize) -> Range<usize> {
        if rows.is_empty() {
            return 0..0;
        }
        // Both ends grow with the row, so the first row has the lowest start and the last row the
        // highest end; an empty interval at either end contributes its (clamped) boundary only.
        let first = self.row(rows.start, q_len, kv_len);
        let last = self.row(rows.end - 1, q_len, kv_len);
        if last.end <= first.start { first.start..first.start } else { first.start..last.end }
    }

    /// (row, key) pairs that are visible, in closed form; saturating.
    #[must_use]
    pub fn pairs(self, q_len: usize, kv_len: usize) -> u64 {
        let (rows, keys) = (q_len as i128, kv_len as i128);
        let offset = keys - rows;
        // Each end of a row's interval is its position plus a constant, clamped to the keys; the ends
        // never cross, so the sum of lengths is the difference of two sums.
        let sum = |shift: i128| {
            let zeros = (-shift).clamp(0, rows);
            let full = (keys - shift).clamp(0, rows).max(zeros);
            let ramp = full - zeros;
            ramp.saturating_mul(zeros + full - 1 + 2 * shift) / 2
                + (rows - full).saturating_mul(keys)
        };
        let ends = self.right.map_or(rows.saturating_mul(keys), |r| sum(offset + r as i128 + 1));
        let starts = self.left.map_or(0, |l| sum(offset - l as i128));
        u64::try_from(ends - starts).unwrap_or(u64::MAX)
    }

    /// The class of a tile under the band alone; exact.
    #[must_use]
    pub fn tile(
        self,
        rows: Range<usize>,
        keys: Range<usize>,
        q_len: usize,
        kv_len: usize,
    ) -> TileClass {
        if rows.is_empty() || keys.is_empty() {
            return TileClass::Skip;
        }
        let (first, last) =
            (self.row(rows.start, q_len, kv_len), self.row(rows.end - 1, q_len, kv_len));
        // Full: the row with the lowest end and the row with the highest start hold all keys.
        if last.start <= keys.start && keys.end <= first.end {
            return TileClass::Full;
        }
        // Ends grow by at most one key a row, so the union over rows has no holes between non-empty
        // intervals: the tile is empty when the keys miss the union.
        let union = self.rows(rows, q_len, kv_len);
        if union.start.max(keys.start) >= union.end.min(keys.end) {
            TileClass::Skip
        } else {
            TileClass::Partial
        }
    }
}

/// One sequence's and one head's block mask: which blocks of (`block_q`, `block_kv`) are visited.
///
/// Blocks count from row 0 and key 0 of the sequence. Shape of the view: `[q_blocks, kv_blocks]`, non-zero
/// keeps.
#[derive(Debug, Clone)]
pub struct BlockMask<'a> {
    block_q: usize,
    block_kv: usize,
    keep: View<'a, u8>,
}

impl<'a> BlockMask<'a> {
    /// Binds block sizes to the map of one sequence and head.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a block size of 0 or a view that is not of rank 2.
    pub fn new(block_q: usize, block_kv: usize, keep: View<'a, u8>) -> Result<Self, Error> {
        if block_q == 0 || block_kv == 0 {
            let got = format!("{block_q} x {block_kv}");
            return Err(Error::invalid("block_mask", "block sizes of at least 1", got));
        }
        if keep.shape().len() != 2 {
            return Err(Error::invalid("block_mask", "rank 2", format!("{:?}", keep.shape())));
        }
        Ok(Self { block_q, block_kv, keep })
    }

    /// Query rows of a block.
    #[must_use]
    pub const fn block_q(&self) -> usize {
        self.block_q
    }

    /// Keys of a block.
    #[must_use]
    pub const fn block_kv(&self) -> usize {
        self.block_kv
    }

    /// Whether the block of this pair is visited. Rows and keys past the map are not.
    #[must_use]
    pub fn keeps(&self, row: usize, key: usize) -> bool {
        self.keep.get(&[row / self.block_q, key / self.block_kv]).is_some_and(|x| x != 0)
    }

    /// The class of a tile under the block mask alone; exact.
    #[must_use]
    pub fn tile(&self, rows: Range<usize>, keys: Range<usize>) -> TileClass {
        if rows.is_empty() || keys.is_empty() {
            return TileClass::Skip;
        }
        let blocks = |r: &Range<usize>, size: usize| r.start / size..r.end.div_ceil(size);
        let (mut any, mut all) = (false, true);
        for row in blocks(&rows, self.block_q) {
            for key in blocks(&keys, self.block_kv) {
                let keep = self.keep.get(&[row, key]).is_some_and(|x| x != 0);
                any |= keep;
                all &= keep;
                if any && !all {
                    return TileClass::Partial;
                }
            }
        }
        if all { TileClass::Full } else { TileClass::Skip }
    }
}

/// The mask of one sequence and one head, bound to its lengths and its data.
///
/// Intersection of three: the [`Band`], an optional [`BlockMask`] and an optional boolean map
/// `[rows, keys]` whose non-zero entries keep. Extents of 1 in the boolean map broadcast.
#[derive(Debug, Clone)]
pub struct Mask<'a> {
    band: Band,
    q_len: usize,
    kv_len: usize,
    blocks: Option<BlockMask<'a>>,
    keep: Option<View<'a, u8>>,
}

impl<'a> Mask<'a> {
    /// A mask with a band only.
    #[must_use]
    pub const fn new(band: Band, q_len: usize, kv_len: usize) -> Self {
        Self { band, q_len, kv_len, blocks: None, keep: None }
    }

    /// Adds a block mask.
    #[must_use]
    pub fn with_blocks(mut self, blocks: BlockMask<'a>) -> Self {
        self.blocks = Some(blocks);
        self
    }

    /// Adds a boolean map `[rows, keys]`; extents of 1 broadcast.
    ///
    /// # Errors
    /// [`Error::Invalid`] for another rank or for extents that are neither 1 nor large enough.
    pub fn with_keep(mut self, keep: View<'a, u8>) -> Result<Self, Error> {
        let ok = keep.shape().len() == 2
            && (keep.shape()[0] == 1 || keep.shape()[0] >= self.q_len)
            && (keep.shape()[1] == 1 || keep.shape()[1] >= self.kv_len);
        if !ok {
            return Err(Error::invalid(
                "mask",
                format!("[1 or {}, 1 or {}]", self.q_len, self.kv_len),
                format!("{:?}", keep.shape()),
            ));
        }
        self.keep = Some(keep);
        Ok(self)
    }

    /// The causal and window bounds.
    #[must_use]
    pub const fn band(&self) -> Band {
        self.band
    }

    /// The block mask, if there is one.
    #[must_use]
    pub const fn blocks(&self) -> Option<&BlockMask<'a>> {
        self.blocks.as_ref()
    }

    /// The boolean map, if there is one.
    #[must_use]
    pub const fn keep(&self) -> Option<&View<'a, u8>> {
        self.keep.as_ref()
    }

    /// Whether row `row` sees key `key`.
    #[must_use]
    pub fn sees(&self, row: usize, key: usize) -> bool {
        self.band.row(row, self.q_len, self.kv_len).contains(&key)
            && self.blocks.as_ref().is_none_or(|b| b.keeps(row, key))
            && self.keep.as_ref().is_none_or(|k| keep_at(k, row, key))
    }

    /// The smallest interval of keys that `rows` may read, by causal and window bounds.
    #[must_use]
    pub fn keys(&self, rows: Range<usize>) -> Range<usize> {
        self.band.rows(rows, self.q_len, self.kv_len)
    }

    /// The class of a tile.
    ///
    /// A boolean map makes every visited tile [`TileClass::Partial`]: finding out otherwise would
    /// read the map twice.
    #[must_use]
    pub fn tile(&self, rows: Range<usize>, keys: Range<usize>) -> TileClass {
        let band = self.band.tile(rows.clone(), keys.clone(), self.q_len, self.kv_len);
        if band == TileClass::Skip {
            return band;
        }
        let class = match &self.blocks {
            None => band,
            Some(blocks) => band.and(blocks.tile(rows.clone(), keys.clone())),
        };
        // Two partial maps can still be disjoint: the block grid is walked against the band.
        let class = match (&self.blocks, class, band) {
            (Some(blocks), TileClass::Partial, TileClass::Partial)
                if !self.any_block_meets_band(blocks, &rows, &keys) =>
            {
                TileClass::Skip
            }
            _ => class,
        };
        match (&self.keep, class) {
            (Some(_), TileClass::Full) => TileClass::Partial,
            _ => class,
        }
    }

    fn any_block_meets_band(
        &self,
        blocks: &BlockMask<'_>,
        rows: &Range<usize>,
        keys: &Range<usize>,
    ) -> bool {
        let mut row = rows.start;
        while row < rows.end {
            let row_end = ((row / blocks.block_q + 1) * blocks.block_q).min(rows.end);
            let mut key = keys.start;
            while key < keys.end {
                let key_end = ((key / blocks.block_kv + 1) * blocks.block_kv).min(keys.end);
                let met = self.band.tile(row..row_end, key..key_end, self.q_len, self.kv_len);
                if blocks.keeps(row, key) && met != TileClass::Skip {
                    return true;
                }
                key = key_end;
            }
            row = row_end;
        }
        false
    }
}

/// An entry of a boolean map whose extents of 1 broadcast.
fn keep_at(keep: &View<'_, u8>, row: usize, key: usize) -> bool {
    let index = |extent: usize, i: usize| if extent == 1 { 0 } else { i };
    let at = [index(keep.shape()[0], row), index(keep.shape()[1], key)];
    keep.get(&at).is_some_and(|x| x != 0)
}

#[cfg(test)]
mod tests;
