//! What [`Mask`] says of a tile, against the definition applied to every pair of the tile.
//!
//! The definition is written out here from the conventions and not taken from [`Mask::sees`], so that
//! an error which both share would show.

use std::ops::Range;

use arbitrary::Arbitrary;
use attn_core::{Band, BlockMask, Mask, TileClass, View};

/// A mask and a tile of it.
#[derive(Debug, Arbitrary)]
pub struct Input {
    q_len: u8,
    kv_len: u8,
    causal: bool,
    left: Option<Bound>,
    right: Option<Bound>,
    blocks: Option<Blocks>,
    keep: Option<u64>,
    row: u8,
    rows: u8,
    key: u8,
    keys: u8,
}

/// A window bound: near the tile's edges, or near the ends of its type.
#[derive(Debug, Clone, Copy, Arbitrary)]
enum Bound {
    Small(u8),
    Huge(u8),
}

#[derive(Debug, Arbitrary)]
struct Blocks {
    rows: u8,
    keys: u8,
    keep: u64,
}

impl Bound {
    fn get(self) -> usize {
        match self {
            Self::Small(x) => usize::from(x % 64),
            Self::Huge(x) => usize::MAX - usize::from(x),
        }
    }
}

/// Checks the class of the tile, the pairs in it and the interval of its keys.
pub fn check(input: &Input) {
    let q_len = usize::from(input.q_len % 48);
    let kv_len = usize::from(input.kv_len % 48);
    let rows = range(input.row, input.rows, q_len);
    let keys = range(input.key, input.keys, kv_len);
    let (left, right) = (input.left.map(Bound::get), input.right.map(Bound::get));

    let block_sizes = input
        .blocks
        .as_ref()
        .map_or((1, 1), |b| (1 + usize::from(b.rows % 9), 1 + usize::from(b.keys % 9)));
    let block_shape = [q_len.div_ceil(block_sizes.0), kv_len.div_ceil(block_sizes.1)];
    let block_map = input.blocks.as_ref().map(|b| cycle(b.keep, block_shape));
    let keep_map = input.keep.map(|k| cycle(k, [q_len, kv_len]));

    let mut mask = Mask::new(Band::new(input.causal, left, right), q_len, kv_len);
    if let Some(map) = &block_map {
        let view = View::contiguous("block_mask", map, &block_shape).expect("sized to its shape");
        let blocks = BlockMask::new(block_sizes.0, block_sizes.1, view).expect("sizes from 1");
        mask = mask.with_blocks(blocks);
    }
    if let Some(map) = &keep_map {
        let view = View::contiguous("mask", map, &[q_len, kv_len]).expect("sized to its shape");
        mask = mask.with_keep(view).expect("sized to the lengths");
    }

    let in_band = |row: usize, key: usize| {
        let (row, key) = (row as i128, key as i128);
        let position = row + kv_len as i128 - q_len as i128;
        (!input.causal || key <= position)
            && left.is_none_or(|w| position - w as i128 <= key)
            && (input.causal || right.is_none_or(|w| key <= position + w as i128))
    };
    let visible = |row: usize, key: usize| {
        let block = row / block_sizes.0 * block_shape[1] + key / block_sizes.1;
        in_band(row, key)
            && block_map.as_ref().is_none_or(|m| m[block] != 0)
            && keep_map.as_ref().is_none_or(|m| m[row * kv_len + key] != 0)
    };

    let (mut seen, mut pairs) = (0, 0);
    let interval = mask.keys(rows.clone());
    assert!(interval.start <= interval.end && interval.end <= kv_len, "{interval:?}");
    for row in rows.clone() {
        for key in keys.clone() {
            assert_eq!(mask.sees(row, key), visible(row, key), "row {row}, key {key}");
            assert!(!in_band(row, key) || interval.contains(&key), "key {key} not in {interval:?}");
            seen += usize::from(visible(row, key));
            pairs += 1;
        }
    }

    let class = mask.tile(rows, keys);
    match class {
        TileClass::Skip => assert_eq!(seen, 0, "a visible key in a skipped tile"),
        TileClass::Full => assert_eq!(seen, pairs, "a hidden key in a full tile"),
        // A boolean map may leave a tile partial; a band and a block mask are classed exactly.
        TileClass::Partial => {
            assert!(keep_map.is_some() || (0 < seen && seen < pairs), "{seen} of {pairs} seen");
        }
    }
}

/// A range within `0..=length` from two bytes.
fn range(start: u8, length: u8, end: usize) -> Range<usize> {
    let start = usize::from(start) % (end + 1);
    start..start + usize::from(length) % (end - start + 1)
}

/// A map of this shape, filled by repeating 64 bits.
fn cycle(bits: u64, shape: [usize; 2]) -> Vec<u8> {
    (0..shape[0] * shape[1]).map(|i| u8::from(bits >> (i % 64) & 1 == 1)).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn mask_tiles_hold_on_seeded_inputs() {
        crate::seeded::run(20_000, super::check);
    }
}
