//! Transposes between row-major tensors and tiles with queries along the lanes.
//!
//! Invariant: [`Simd::transpose`] proves from the slice lengths that every square it moves is inside
//! both operands. Q and O are transposed once for a whole pass over the keys, which for short causal
//! sequences is a tenth of the time when elements are moved one by one: hence squares in registers.

use super::product::reach;
use super::{Kernel, Lanes, Simd};

/// Side of the squares that are moved at a time.
pub(super) const SQUARE: usize = 8;

impl Simd {
    /// Writes `dst[col * dst_stride + row] = src[row * src_stride + col]`.
    ///
    /// Shapes: `src` `[rows, cols]` rows `src_stride` apart, `dst` `[cols, rows]` rows `dst_stride`
    /// apart, strides in elements.
    ///
    /// # Panics
    /// When an operand is shorter than its shape: an error of the engine, not of its input.
    pub(crate) fn transpose(
        self,
        src: &[f32],
        src_stride: usize,
        (rows, cols): (usize, usize),
        dst: &mut [f32],
        dst_stride: usize,
    ) {
        let fits = |rows, cols, stride, len| reach(rows, cols, stride).is_some_and(|n| n <= len);
        assert!(fits(rows, cols, src_stride, src.len()), "source holds its shape");
        assert!(fits(cols, rows, dst_stride, dst.len()), "destination holds its shape");
        assert!(cols < 2 || dst_stride >= rows, "rows of the destination do not overlap");
        self.dispatch(Transpose { src, src_stride, rows, cols, dst, dst_stride });
    }
}

struct Transpose<'a> {
    src: &'a [f32],
    src_stride: usize,
    rows: usize,
    cols: usize,
    dst: &'a mut [f32],
    dst_stride: usize,
}

impl Kernel for Transpose<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let Self { src, src_stride, rows, cols, dst, dst_stride } = self;
        let (whole_rows, whole_cols) = (rows - rows % SQUARE, cols - cols % SQUARE);
        for row in (0..whole_rows).step_by(SQUARE) {
            for col in (0..whole_cols).step_by(SQUARE) {
                let from = src.as_ptr().wrapping_add(row * src_stride + col);
                let to = dst.as_mut_ptr().wrapping_add(col * dst_stride + row);
                // SAFETY: `Simd::transpose` checked that both shapes fit; the square ends within
                // `rows` and `cols`.
                unsafe { l.transpose_square(from, src_stride, to, dst_stride) };
            }
        }
        for row in 0..rows {
            let from = if row < whole_rows { whole_cols } else { 0 };
            for col in from..cols {
                dst[col * dst_stride + row] = src[row * src_stride + col];
            }
        }
    }
}

/// [`Simd::transpose`] without vectors, for the few rows of a decode step.
pub(crate) fn transpose(
    src: &[f32],
    src_stride: usize,
    (rows, cols): (usize, usize),
    dst: &mut [f32],
    dst_stride: usize,
) {
    for row in 0..rows {
        for col in 0..cols {
            dst[col * dst_stride + row] = src[row * src_stride + col];
        }
    }
}
