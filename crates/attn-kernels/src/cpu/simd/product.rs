//! The matrix product in registers: every O(rows * keys * dim) loop of the engine.
//!
//! Invariant: [`Simd::product`] proves from the slice lengths that every element the tiles touch is
//! inside its slice; the tiles below it index without checks.
//!
//! A tile keeps `MR x NV` vectors of C in registers while it walks the inner dimension: it loads NV
//! vectors of B and broadcasts MR scalars of A a step. 8 x 3 vectors fill the 32 registers of
//! AVX-512, 6 x 2 the 16 of AVX2; both need fewer loads than multiplies. There is no packing and no
//! blocking of the inner dimension here: the callers' tiles are sized to the caches already.

use super::{Kernel, LANE_GROUP, Lanes, Simd};

/// How the left operand is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Element (row, inner) at `row * a_stride + inner`.
    RowMajor,
    /// Element (row, inner) at `inner * a_stride + row`: the product takes A transposed.
    ColumnMajor,
}

/// What C holds before the product is added.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Start<'a> {
    /// Nothing: C is overwritten, and its old content, NaN included, does not matter.
    Zero,
    /// C as it is.
    Keep,
    /// C with column `j` multiplied by `factors[j]`: the rescaling of an online softmax.
    Scaled(&'a [f32]),
}

/// `C[rows, cols] = start(C) + A[rows, inner] * B[inner, cols]`.
///
/// Shapes: A by `order`; B element (inner, col) at `inner * b_stride + col`; strides in elements.
/// Invariants: `cols` is a multiple of [`LANE_GROUP`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product<'a> {
    /// Rows of A and C.
    pub(crate) rows: usize,
    /// Columns of B and C.
    pub(crate) cols: usize,
    /// Columns of A, rows of B.
    pub(crate) inner: usize,
    /// Left operand.
    pub(crate) a: &'a [f32],
    /// Distance between rows of A as stored.
    pub(crate) a_stride: usize,
    /// Which way A is stored.
    pub(crate) order: Order,
    /// Right operand.
    pub(crate) b: &'a [f32],
    /// Distance between rows of B.
    pub(crate) b_stride: usize,
}

/// Elements that `rows` rows of `cols` at `stride` reach, or `None` on overflow.
pub(super) fn reach(rows: usize, cols: usize, stride: usize) -> Option<usize> {
    match rows.checked_sub(1) {
        None => Some(0),
        Some(last) => last.checked_mul(stride)?.checked_add(cols),
    }
}

impl Simd {
    /// Computes a [`Product`] into `c`, whose rows are `c_stride` apart.
    ///
    /// # Panics
    /// When an operand is shorter than its shape, `cols` is no multiple of [`LANE_GROUP`] or rows
    /// of C overlap: all are errors of the engine, not of its input.
    pub(crate) fn product(self, p: &Product<'_>, start: Start<'_>, c: &mut [f32], c_stride: usize) {
        let fits = |rows, cols, stride, len| reach(rows, cols, stride).is_some_and(|n| n <= len);
        let (a_rows, a_cols) = match p.order {
            Order::RowMajor => (p.rows, p.inner),
            Order::ColumnMajor => (p.inner, p.rows),
        };
        assert!(p.cols.is_multiple_of(LANE_GROUP), "columns {} in groups of {LANE_GROUP}", p.cols);
        assert!(fits(a_rows, a_cols, p.a_stride, p.a.len()), "left operand holds its shape");
        assert!(fits(p.inner, p.cols, p.b_stride, p.b.len()), "right operand holds its shape");
        assert!(fits(p.rows, p.cols, c_stride, c.len()), "result holds its shape");
        assert!(p.rows < 2 || c_stride >= p.cols, "rows of the result do not overlap");
        if let Start::Scaled(factors) = start {
            assert!(factors.len() >= p.cols, "one factor a column");
        }
        if p.rows > 0 && p.cols > 0 {
            self.dispatch(Tiles { p, start, c, c_stride });
        }
    }
}

/// A checked [`Product`] and its result.
struct Tiles<'a> {
    p: &'a Product<'a>,
    start: Start<'a>,
    c: &'a mut [f32],
    c_stride: usize,
}

impl Kernel for Tiles<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        match self.p.order {
            Order::RowMajor => self.columns::<L, true>(l),
            Order::ColumnMajor => self.columns::<L, false>(l),
        }
    }
}

impl Tiles<'_> {
    /// Walks panels of columns; the widest tile that fits is taken each time.
    #[inline(always)]
    fn columns<L: Lanes, const ROWS: bool>(mut self, l: L) {
        let mut col = 0;
        while col < self.p.cols {
            let left = (self.p.cols - col) / L::LANES;
            if L::LANES == 16 {
                match left {
                    1 => self.panel::<L, 8, 1, ROWS>(l, &mut col),
                    2 => self.panel::<L, 8, 2, ROWS>(l, &mut col),
                    _ => self.panel::<L, 8, 3, ROWS>(l, &mut col),
                }
            } else if L::LANES == 8 {
                self.panel::<L, 6, 2, ROWS>(l, &mut col);
            } else {
                self.panel::<L, 4, 2, ROWS>(l, &mut col);
            }
        }
    }

    /// All rows of one panel of NV vectors of columns.
    #[inline(always)]
    fn panel<L: Lanes, const MR: usize, const NV: usize, const ROWS: bool>(
        &mut self,
        l: L,
        col: &mut usize,
    ) {
        let mut row = 0;
        while row < self.p.rows {
            let left = self.p.rows - row;
            if left >= MR {
                self.tile::<L, MR, NV, ROWS>(l, &mut row, *col);
            } else if left >= 4 {
                self.tile::<L, 4, NV, ROWS>(l, &mut row, *col);
            } else if left >= 2 {
                self.tile::<L, 2, NV, ROWS>(l, &mut row, *col);
            } else {
                self.tile::<L, 1, NV, ROWS>(l, &mut row, *col);
            }
        }
        *col += NV * L::LANES;
    }

    /// One tile of MR rows by NV vectors; advances `row`.
    #[inline(always)]
    fn tile<L: Lanes, const MR: usize, const NV: usize, const ROWS: bool>(
        &mut self,
        l: L,
        row: &mut usize,
        col: usize,
    ) {
        let p = self.p;
        let (row_step, inner_step) = if ROWS { (p.a_stride, 1) } else { (1, p.a_stride) };
        let mut a = p.a.as_ptr().wrapping_add(*row * row_step);
        let mut b = p.b.as_ptr().wrapping_add(col);
        let mut acc = [[l.splat(0.0); NV]; MR];
        for _ in 0..p.inner {
            let mut bv = [l.splat(0.0); NV];
            for (j, v) in bv.iter_mut().enumerate() {
                // SAFETY: `Simd::product` checked that B holds `inner` rows of `cols` elements; this
                // is one of them at `col + j * LANES`, and a panel ends within `cols`.
                *v = unsafe { l.load(b.wrapping_add(j * L::LANES)) };
            }
            for (i, acc) in acc.iter_mut().enumerate() {
                // SAFETY: `Simd::product` checked that A holds `rows` by `inner` elements in its
                // order; `row + i` is below `rows`.
                let x = l.splat(unsafe { *a.wrapping_add(i * row_step) });
                for (acc, &bv) in acc.iter_mut().zip(&bv) {
                    *acc = l.fma(x, bv, *acc);
                }
            }
            a = a.wrapping_add(inner_step);
            b = b.wrapping_add(p.b_stride);
        }
        for (i, acc) in acc.iter().enumerate() {
            let c = self.c.as_mut_ptr().wrapping_add((*row + i) * self.c_stride + col);
            for (j, &acc) in acc.iter().enumerate() {
                let c = c.wrapping_add(j * L::LANES);
                let value = match self.start {
                    Start::Zero => acc,
                    Start::Keep => {
                        // SAFETY: `Simd::product` checked that C holds `rows` rows of `cols`.
                        let old = unsafe { l.load(c) };
                        l.add(old, acc)
                    }
                    Start::Scaled(factors) => {
                        // SAFETY: as above.
                        let old = unsafe { l.load(c) };
                        let at = factors.as_ptr().wrapping_add(col + j * L::LANES);
                        // SAFETY: `Simd::product` checked that there is a factor for each column.
                        let factor = unsafe { l.load(at) };
                        l.fma(old, factor, acc)
                    }
                };
                // SAFETY: `Simd::product` checked that C holds `rows` rows of `cols`.
                unsafe { l.store(value, c) };
            }
        }
        *row += MR;
    }
}
