//! Elementwise passes over score tiles and rows: soft-cap, linear and dense bias, band masks, and the
//! few vector operations of the backward pass.
//!
//! Invariant: a tile is dense `[rows, width]`, row = key, column = query, `width` a multiple of
//! [`LANE_GROUP`]. They are separate passes, not options of the product: a tile sits in L1, a pass
//! costs one percent of the product, and the product stays free of branches.

use super::lanes::tanh;
use super::{Kernel, LANE_GROUP, Lanes, Simd};

impl Simd {
    /// `x = cap * tanh(x * scale / cap)` for each element.
    pub(crate) fn soft_cap(self, x: &mut [f32], scale: f32, cap: f32) {
        let inner = scale / cap;
        self.map(x, SoftCap { inner, cap });
    }

    /// `x *= factor` for each element.
    pub(crate) fn scale(self, x: &mut [f32], factor: f32) {
        self.map(x, Scale { factor });
    }

    /// `x += y` for each element.
    ///
    /// # Panics
    /// When the lengths differ.
    pub(crate) fn add(self, x: &mut [f32], y: &[f32]) {
        self.add_scaled(x, 1.0, y);
    }

    /// `x += factor * y` for each element.
    ///
    /// # Panics
    /// When the lengths differ.
    pub(crate) fn add_scaled(self, x: &mut [f32], factor: f32, y: &[f32]) {
        assert_eq!(x.len(), y.len(), "as many results as elements");
        self.dispatch(AddScaled { x, factor, y });
    }

    /// `tile[row, col] -= slope[col] * |row - origin[col]|`: `ALiBi`.
    ///
    /// # Panics
    /// When the lengths do not match: an error of the engine, not of its input.
    pub(crate) fn subtract_distance(self, tile: &mut [f32], slope: &[f32], origin: &[f32]) {
        check_tile(tile, slope, origin);
        self.dispatch(SubtractDistance { tile, slope, origin });
    }

    /// `tile[row, col] = -inf` where `row < first[col]` or `row >= end[col]`.
    ///
    /// Bounds are row numbers as f32, which are exact up to 2^24.
    ///
    /// # Panics
    /// When the lengths do not match: an error of the engine, not of its input.
    pub(crate) fn mask_outside(self, tile: &mut [f32], first: &[f32], end: &[f32]) {
        check_tile(tile, first, end);
        self.dispatch(MaskOutside { tile, first, end });
    }

    /// `tile = -inf` where the mark at the same place is negative.
    ///
    /// # Panics
    /// When the lengths differ.
    pub(crate) fn hide_marked(self, tile: &mut [f32], marks: &[f32]) {
        assert_eq!(tile.len(), marks.len(), "as many marks as elements");
        self.dispatch(HideMarked { tile, marks });
    }

    /// `x = p * (x - delta[col])` for each element of a tile: the softmax derivative.
    ///
    /// # Panics
    /// When the lengths do not match: an error of the engine, not of its input.
    pub(crate) fn softmax_gradient(self, x: &mut [f32], p: &[f32], delta: &[f32]) {
        check_tile(x, delta, delta);
        assert_eq!(x.len(), p.len(), "as many weights as elements");
        self.dispatch(SoftmaxGradient { x, p, delta });
    }

    fn map<F: Map>(self, x: &mut [f32], f: F) {
        self.dispatch(MapRow { x, f });
    }
}

/// A tile and two per-column vectors have one width, a multiple of the lane group.
fn check_tile(tile: &[f32], a: &[f32], b: &[f32]) {
    let width = a.len();
    assert!(
        width > 0 && width.is_multiple_of(LANE_GROUP),
        "width {width} in groups of {LANE_GROUP}"
    );
    assert_eq!(b.len(), width, "both vectors have one entry a column");
    assert_eq!(tile.len() % width, 0, "the tile is made of whole rows");
}

/// Reads a chunk of exactly LANES elements.
#[inline(always)]
fn read<L: Lanes>(l: L, chunk: &[f32]) -> L::V {
    assert!(chunk.len() >= L::LANES);
    // SAFETY: the chunk has at least LANES elements.
    unsafe { l.load(chunk.as_ptr()) }
}

/// Writes a chunk of exactly LANES elements.
#[inline(always)]
fn write<L: Lanes>(l: L, x: L::V, chunk: &mut [f32]) {
    assert!(chunk.len() >= L::LANES);
    // SAFETY: the chunk has at least LANES elements.
    unsafe { l.store(x, chunk.as_mut_ptr()) }
}

/// A function of one element.
trait Map: Copy {
    fn apply<L: Lanes>(self, l: L, x: L::V) -> L::V;
}

#[derive(Clone, Copy)]
struct SoftCap {
    inner: f32,
    cap: f32,
}

impl Map for SoftCap {
    #[inline(always)]
    fn apply<L: Lanes>(self, l: L, x: L::V) -> L::V {
        l.mul(tanh(l, l.mul(x, l.splat(self.inner))), l.splat(self.cap))
    }
}

#[derive(Clone, Copy)]
struct Scale {
    factor: f32,
}

impl Map for Scale {
    #[inline(always)]
    fn apply<L: Lanes>(self, l: L, x: L::V) -> L::V {
        l.mul(x, l.splat(self.factor))
    }
}

struct MapRow<'a, F> {
    x: &'a mut [f32],
    f: F,
}

impl<F: Map> Kernel for MapRow<'_, F> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let mut chunks = self.x.chunks_exact_mut(L::LANES);
        for x in &mut chunks {
            let y = self.f.apply(l, read(l, x));
            write(l, y, x);
        }
        let tail = chunks.into_remainder();
        if !tail.is_empty() {
            let mut lanes = [0.0; LANE_GROUP];
            lanes[..tail.len()].copy_from_slice(tail);
            let y = self.f.apply(l, read(l, &lanes));
            write(l, y, &mut lanes);
            tail.copy_from_slice(&lanes[..tail.len()]);
        }
    }
}

struct AddScaled<'a> {
    x: &'a mut [f32],
    factor: f32,
    y: &'a [f32],
}

impl Kernel for AddScaled<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let factor = l.splat(self.factor);
        let mut x = self.x.chunks_exact_mut(L::LANES);
        let mut y = self.y.chunks_exact(L::LANES);
        for (x, y) in (&mut x).zip(&mut y) {
            write(l, l.fma(read(l, y), factor, read(l, x)), x);
        }
        for (x, y) in x.into_remainder().iter_mut().zip(y.remainder()) {
            *x += self.factor * y;
        }
    }
}

/// Applies a function of (row number, tile, two column vectors) to each vector of a tile.
#[inline(always)]
fn columns<L: Lanes>(
    l: L,
    tile: &mut [f32],
    a: &[f32],
    b: &[f32],
    f: impl Fn(L::V, L::V, L::V, L::V) -> L::V,
) {
    let one = l.splat(1.0);
    let mut number = l.splat(0.0);
    for row in tile.chunks_exact_mut(a.len()) {
        let columns = a.chunks_exact(L::LANES).zip(b.chunks_exact(L::LANES));
        for (x, (a, b)) in row.chunks_exact_mut(L::LANES).zip(columns) {
            write(l, f(number, read(l, x), read(l, a), read(l, b)), x);
        }
        number = l.add(number, one);
    }
}

struct SubtractDistance<'a> {
    tile: &'a mut [f32],
    slope: &'a [f32],
    origin: &'a [f32],
}

impl Kernel for SubtractDistance<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        columns(l, self.tile, self.slope, self.origin, |row, x, slope, origin| {
            l.sub(x, l.mul(slope, l.abs(l.sub(row, origin))))
        });
    }
}

struct MaskOutside<'a> {
    tile: &'a mut [f32],
    first: &'a [f32],
    end: &'a [f32],
}

impl Kernel for MaskOutside<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let hidden = l.splat(f32::NEG_INFINITY);
        columns(l, self.tile, self.first, self.end, |row, x, first, end| {
            l.select_lt(row, first, hidden, l.select_lt(row, end, x, hidden))
        });
    }
}

struct HideMarked<'a> {
    tile: &'a mut [f32],
    marks: &'a [f32],
}

impl Kernel for HideMarked<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let (zero, hidden) = (l.splat(0.0), l.splat(f32::NEG_INFINITY));
        let mut tile = self.tile.chunks_exact_mut(L::LANES);
        let mut marks = self.marks.chunks_exact(L::LANES);
        for (x, mark) in (&mut tile).zip(&mut marks) {
            write(l, l.select_lt(read(l, mark), zero, hidden, read(l, x)), x);
        }
        for (x, &mark) in tile.into_remainder().iter_mut().zip(marks.remainder()) {
            if mark < 0.0 {
                *x = f32::NEG_INFINITY;
            }
        }
    }
}

struct SoftmaxGradient<'a> {
    x: &'a mut [f32],
    p: &'a [f32],
    delta: &'a [f32],
}

impl Kernel for SoftmaxGradient<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        let width = self.delta.len();
        for (x, p) in self.x.chunks_exact_mut(width).zip(self.p.chunks_exact(width)) {
            let vectors = x.chunks_exact_mut(L::LANES).zip(p.chunks_exact(L::LANES));
            for ((x, p), delta) in vectors.zip(self.delta.chunks_exact(L::LANES)) {
                write(l, l.mul(read(l, p), l.sub(read(l, x), read(l, delta))), x);
            }
        }
    }
}
