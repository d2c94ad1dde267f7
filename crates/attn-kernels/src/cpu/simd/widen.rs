//! Conversion between stored element types and f32.
//!
//! Invariant: widening is exact, narrowing rounds to nearest even, at every level alike; and a
//! kernel that reads a [`Widen`] type converts while it loads. Converting a whole cache before use
//! would double the bytes that a decode step moves, which is all that its time consists of.

use attn_core::{Element, F8E4M3, F8E5M2};
use half::slice::HalfFloatSliceExt as _;
use half::{bf16, f16};

use super::product::reach;
use super::{Kernel, Lanes, Simd};

/// An element type that kernels read as f32.
pub(crate) trait Widen: Element {
    /// Reads and widens a vector.
    ///
    /// # Safety
    /// `src` is valid for reading `L::LANES` elements; no alignment is needed.
    unsafe fn load<L: Lanes>(l: L, src: *const Self) -> L::V;
}

impl Widen for f32 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(l: L, src: *const Self) -> L::V {
        // SAFETY: the caller vouches for the elements.
        unsafe { l.load(src) }
    }
}

impl Widen for f16 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(l: L, src: *const Self) -> L::V {
        // SAFETY: the caller vouches for the elements.
        unsafe { l.load_f16(src) }
    }
}

impl Widen for bf16 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(l: L, src: *const Self) -> L::V {
        // SAFETY: the caller vouches for the elements.
        unsafe { l.load_bf16(src) }
    }
}

impl Widen for F8E4M3 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(l: L, src: *const Self) -> L::V {
        // SAFETY: the caller vouches for the elements, each of which is one byte.
        unsafe { l.load_e4m3(src.cast::<u8>()) }
    }
}

impl Widen for F8E5M2 {
    #[inline(always)]
    unsafe fn load<L: Lanes>(l: L, src: *const Self) -> L::V {
        // SAFETY: the caller vouches for the elements, each of which is one byte.
        unsafe { l.load_e5m2(src.cast::<u8>()) }
    }
}

/// Reads a vector of which only the first `src.len()` lanes exist; the others are 0.
#[inline(always)]
pub(super) fn load_partial<L: Lanes, E: Widen>(l: L, src: &[E]) -> L::V {
    let mut lanes = [E::from_f32(0.0); super::LANE_GROUP];
    lanes[..src.len()].copy_from_slice(src);
    // SAFETY: the array holds LANE_GROUP elements, and no vector has more lanes.
    unsafe { E::load(l, lanes.as_ptr()) }
}

impl Simd {
    /// Writes `src[i] * scale` as f32 to `dst[i]`; a scale of 1 copies exactly.
    ///
    /// # Panics
    /// When the lengths differ.
    pub(crate) fn widen<E: Widen>(self, src: &[E], scale: f32, dst: &mut [f32]) {
        assert_eq!(src.len(), dst.len(), "as many results as elements");
        self.dispatch(WidenRow { src, scale, dst });
    }

    /// Writes `factor *` each of `count` rows of `dim` elements, `src_stride` apart, as f32 rows
    /// `dst_stride` apart; a factor of 1 copies exactly.
    ///
    /// # Panics
    /// When an operand is shorter than its shape: an error of the engine, not of its input.
    pub(crate) fn widen_rows<E: Widen>(
        self,
        src: &[E],
        src_stride: usize,
        (count, dim): (usize, usize),
        factor: f32,
        dst: &mut [f32],
        dst_stride: usize,
    ) {
        let fits = |stride, len| reach(count, dim, stride).is_some_and(|n| n <= len);
        assert!(fits(src_stride, src.len()), "source holds its shape");
        assert!(fits(dst_stride, dst.len()), "destination holds its shape");
        self.dispatch(WidenRows { src, src_stride, count, dim, factor, dst, dst_stride });
    }

    /// Rounds each f32 to f16.
    ///
    /// # Panics
    /// When the lengths differ.
    pub(crate) fn narrow_f16(self, src: &[f32], dst: &mut [f16]) {
        assert_eq!(src.len(), dst.len(), "as many results as elements");
        // `half` itself asks for F16C, and its software path rounds alike.
        dst.convert_from_f32_slice(src);
    }

    /// Rounds each f32 to bf16.
    ///
    /// # Panics
    /// When the lengths differ.
    pub(crate) fn narrow_bf16(self, src: &[f32], dst: &mut [bf16]) {
        assert_eq!(src.len(), dst.len(), "as many results as elements");
        for (dst, &src) in dst.iter_mut().zip(src) {
            *dst = bf16::from_f32(src);
        }
    }
}

struct WidenRow<'a, E> {
    src: &'a [E],
    scale: f32,
    dst: &'a mut [f32],
}

impl<E: Widen> Kernel for WidenRow<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        widen(l, self.src, self.scale, self.dst);
    }
}

struct WidenRows<'a, E> {
    src: &'a [E],
    src_stride: usize,
    count: usize,
    dim: usize,
    factor: f32,
    dst: &'a mut [f32],
    dst_stride: usize,
}

impl<E: Widen> Kernel for WidenRows<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) {
        for row in 0..self.count {
            let src = &self.src[row * self.src_stride..][..self.dim];
            let dst = &mut self.dst[row * self.dst_stride..][..self.dim];
            widen(l, src, self.factor, dst);
        }
    }
}

/// Widens as many elements as both slices have.
#[inline(always)]
fn widen<L: Lanes, E: Widen>(l: L, src: &[E], factor: f32, dst: &mut [f32]) {
    let scale = l.splat(factor);
    let mut src = src.chunks_exact(L::LANES);
    let mut dst = dst.chunks_exact_mut(L::LANES);
    for (src, dst) in (&mut src).zip(&mut dst) {
        // SAFETY: the chunk has LANES elements.
        let x = unsafe { E::load(l, src.as_ptr()) };
        // SAFETY: the chunk has LANES elements.
        unsafe { l.store(l.mul(x, scale), dst.as_mut_ptr()) };
    }
    for (src, dst) in src.remainder().iter().zip(dst.into_remainder()) {
        *dst = src.to_f32() * factor;
    }
}
