//! Sums of a tile's columns.
//!
//! Invariant: a column is summed in [`PARTS`] interleaved parts that are added pairwise, so equal
//! elements do not drift, and the order depends on the row numbers alone. A product with a row of ones
//! would do the same work in one chain, whose error grows with the number of rows.

use super::{Kernel, LANE_GROUP, Lanes, Simd};

/// Interleaved partial sums of a column.
const PARTS: usize = 8;

impl Simd {
    /// `sums[col] += sum of tile[.., col]`.
    ///
    /// Shapes: `tile` `[rows, width]` dense, `width` the length of `sums`, a multiple of [`LANE_GROUP`].
    ///
    /// # Panics
    /// When the lengths do not match: an error of the engine, not of its input.
    pub(crate) fn add_columns(self, tile: &[f32], sums: &mut [f32]) {
        let width = sums.len();
        assert!(
            width > 0 && width.is_multiple_of(LANE_GROUP),
            "width {width} in groups of {LANE_GROUP}"
        );
        assert_eq!(tile.len() % width, 0, "the tile is made of whole rows");
        self.dispatch(AddColumns { tile, sums });
    }
}

struct AddColumns<'a> {
    tile: &'a [f32],
    sums: &'a mut [f32],
}

impl Kernel for AddColumns<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let width = self.sums.len();
        for col in (0..width).step_by(L::LANES) {
            let mut parts = [l.splat(0.0); PARTS];
            for (row, line) in self.tile.chunks_exact(width).enumerate() {
                // SAFETY: a line has `width` elements, and col + LANES <= width.
                let x = unsafe { l.load(line.as_ptr().wrapping_add(col)) };
                parts[row % PARTS] = l.add(parts[row % PARTS], x);
            }
            let mut half = PARTS / 2;
            while half > 0 {
                for i in 0..half {
                    parts[i] = l.add(parts[i], parts[i + half]);
                }
                half /= 2;
            }
            let at = self.sums.as_mut_ptr().wrapping_add(col);
            // SAFETY: there are `width` sums, and col + LANES <= width.
            let old = unsafe { l.load(at) };
            // SAFETY: as above.
            unsafe { l.store(l.add(old, parts[0]), at) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    #[test]
    fn add_columns_sums_each_column_at_every_level() {
        for simd in Level::ALL.into_iter().filter_map(Simd::with_level) {
            for (rows, width) in [(0, 16), (1, 16), (7, 48), (64, 32)] {
                let tile: Vec<f32> = (0..rows * width).map(|i| (i % 31) as f32 - 12.0).collect();
                let mut sums: Vec<f32> = (0..width).map(|col| col as f32).collect();
                simd.add_columns(&tile, &mut sums);
                for (col, &sum) in sums.iter().enumerate() {
                    let column = tile.iter().skip(col).step_by(width);
                    assert_eq!(sum, col as f32 + column.sum::<f32>(), "{rows} x {width}, {col}");
                }
            }
        }
    }

    #[test]
    fn add_columns_does_not_drift_over_equal_elements() {
        for simd in Level::ALL.into_iter().filter_map(Simd::with_level) {
            let mut sums = [0.0; LANE_GROUP];
            simd.add_columns(&[0.1; 64 * LANE_GROUP], &mut sums);
            assert!(sums.iter().all(|sum| (sum - 6.4).abs() <= 2.0 * 6.4 * f32::EPSILON));
        }
    }
}
