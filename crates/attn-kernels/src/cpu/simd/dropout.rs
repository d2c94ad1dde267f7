//! Dropout of a tile's weights: the generator for as many columns at a time as a vector has lanes.
//!
//! Invariant: an element is dropped by its place and nothing else, so the answer is that of
//! [`DropoutMask::keeps`] at every level. Kept elements are left as they are: the factor of a whole row is
//! cheaper to apply once, to its output. The loops over lanes are plain, for integer multiplications
//! are what a compiler vectorises by itself once the instructions are enabled.

use std::ops::Range;

use attn_core::DropoutMask;
use attn_core::philox::philox4x32_10;

use super::{Kernel, LANE_GROUP, Lanes, Simd};

/// Where the columns of a lane group are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DropLanes {
    /// Sequence of the batch.
    pub(crate) sequence: u32,
    /// Query head of each column.
    pub(crate) heads: [u32; LANE_GROUP],
    /// Query row of each column.
    pub(crate) rows: [u32; LANE_GROUP],
}

impl Simd {
    /// Writes 0 to the dropped elements of the lane group that starts at column `first` of a tile.
    ///
    /// Shapes: `tile` `[keys, width]` dense, row = key, column = query.
    ///
    /// # Panics
    /// When the lengths do not match: an error of the engine, not of its input.
    pub(crate) fn drop_lanes(
        self,
        tile: &mut [f32],
        width: usize,
        first: usize,
        keys: Range<usize>,
        lanes: &DropLanes,
        mask: &DropoutMask,
    ) {
        assert_eq!(tile.len(), keys.len() * width, "one row a key");
        assert!(first + LANE_GROUP <= width, "a lane group from {first} of {width} columns");
        self.dispatch(Drop { tile, width, first, keys, lanes, mask });
    }

    /// `x *= y` for each element.
    ///
    /// # Panics
    /// When the lengths differ.
    pub(crate) fn multiply(self, x: &mut [f32], y: &[f32]) {
        assert_eq!(x.len(), y.len(), "as many factors as elements");
        self.dispatch(Multiply { x, y });
    }
}

struct Drop<'a> {
    tile: &'a mut [f32],
    width: usize,
    first: usize,
    keys: Range<usize>,
    lanes: &'a DropLanes,
    mask: &'a DropoutMask,
}

impl Kernel for Drop<'_> {
    type Output = ();

    #[inline(always)]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "keys of a call with dropout are below 2^32"
    )]
    fn run<L: Lanes>(self, _: L) {
        let Self { tile, width, first, keys, lanes, mask } = self;
        let (key, threshold) = (mask.key(), mask.threshold());
        for block in keys.start / 4..keys.end.div_ceil(4) {
            let mut words = [[0u32; LANE_GROUP]; 4];
            for lane in 0..LANE_GROUP {
                let counter = [block as u32, lanes.rows[lane], lanes.heads[lane], lanes.sequence];
                let drawn = philox4x32_10(counter, key);
                for (word, drawn) in words.iter_mut().zip(drawn) {
                    word[lane] = drawn;
                }
            }
            let in_block = (block * 4).max(keys.start)..(block * 4 + 4).min(keys.end);
            for at in in_block {
                let start = (at - keys.start) * width + first;
                let line = &mut tile[start..start + LANE_GROUP];
                for (x, word) in line.iter_mut().zip(words[at % 4]) {
                    *x = if word < threshold { 0.0 } else { *x };
                }
            }
        }
    }
}

struct Multiply<'a> {
    x: &'a mut [f32],
    y: &'a [f32],
}

impl Kernel for Multiply<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, _: L) {
        for (x, y) in self.x.iter_mut().zip(self.y) {
            *x *= y;
        }
    }
}

#[cfg(test)]
mod tests {
    use attn_core::Dropout;

    use super::*;
    use crate::cpu::Level;

    #[test]
    fn lanes_drop_what_the_mask_drops_at_every_level() {
        let mask = DropoutMask::new(Dropout { p: 0.4 }, 5, 6);
        let mut lanes = DropLanes { sequence: 3, heads: [0; LANE_GROUP], rows: [0; LANE_GROUP] };
        for (lane, n) in (0..).zip(0..LANE_GROUP) {
            (lanes.heads[n], lanes.rows[n]) = (lane % 3, 100 + lane / 3);
        }
        for level in Level::ALL {
            let Some(simd) = Simd::with_level(level) else { continue };
            for keys in [0..0, 0..4, 3..4, 5..18, 2..3] {
                let (width, first) = (2 * LANE_GROUP, LANE_GROUP);
                let mut tile = vec![2.0; keys.len() * width];
                simd.drop_lanes(&mut tile, width, first, keys.clone(), &lanes, &mask);
                for (n, x) in tile.iter().enumerate() {
                    let (key, column) = (keys.start + n / width, n % width);
                    let is_kept = column < first || {
                        let lane = column - first;
                        mask.keeps(3, lane % 3, 100 + lane / 3, key)
                    };
                    assert_eq!(*x, if is_kept { 2.0 } else { 0.0 }, "{level:?} {keys:?} {n}");
                }
            }
        }
    }
}
