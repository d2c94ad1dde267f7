//! The portable vectors: 4 f32 in an array, in plain Rust.
//!
//! Invariant: no intrinsic, and no fused multiply-add or run-time test for f16 conversion: without
//! hardware support either would be a call for each element. Four lanes are what the baseline of every common architecture
//! holds in a register, so that the compiler can keep a tile in registers.

use half::{bf16, f16};

use super::lanes::{EXP2_CENTRED, Lanes, ROUNDING, polynomial};
use super::transpose::SQUARE;

/// Needs no proof: plain Rust runs everywhere.
#[derive(Clone, Copy)]
pub(super) struct Portable;

/// An e4m3 pattern's value: in the fields of an f16 the exponent is 8 too small, also for subnormals.
#[inline(always)]
fn e4m3_to_f32(bits: u8) -> f32 {
    if bits & 0x7f == 0x7f {
        return f32::NAN;
    }
    let sign = u16::from(bits & 0x80) << 8;
    f16::from_bits(sign | (u16::from(bits & 0x7f) << 7)).to_f32_const() * 256.0
}

/// An e5m2 pattern's value: it is the upper byte of an f16.
#[inline(always)]
fn e5m2_to_f32(bits: u8) -> f32 {
    f16::from_bits(u16::from(bits) << 8).to_f32_const()
}

/// Applies a function to each pair of lanes.
#[inline(always)]
fn zip(a: [f32; 4], b: [f32; 4], f: impl Fn(f32, f32) -> f32) -> [f32; 4] {
    [f(a[0], b[0]), f(a[1], b[1]), f(a[2], b[2]), f(a[3], b[3])]
}

impl Lanes for Portable {
    type V = [f32; 4];
    const LANES: usize = 4;
    const SPAN: usize = 4;

    #[inline(always)]
    fn splat(self, x: f32) -> [f32; 4] {
        [x; 4]
    }

    #[inline(always)]
    fn add(self, a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        zip(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        zip(a, b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        zip(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        zip(a, b, |a, b| a / b)
    }

    #[inline(always)]
    fn fma(self, a: [f32; 4], b: [f32; 4], c: [f32; 4]) -> [f32; 4] {
        self.add(self.mul(a, b), c)
    }

    #[inline(always)]
    fn max(self, a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        zip(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn abs(self, x: [f32; 4]) -> [f32; 4] {
        x.map(f32::abs)
    }

    #[inline(always)]
    fn copysign(self, x: [f32; 4], sign: [f32; 4]) -> [f32; 4] {
        zip(x, sign, f32::copysign)
    }

    #[inline(always)]
    fn select_lt(self, a: [f32; 4], b: [f32; 4], yes: [f32; 4], no: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| if a[i] < b[i] { yes[i] } else { no[i] })
    }

    #[inline(always)]
    fn exp2(self, x: [f32; 4]) -> [f32; 4] {
        // The clamps keep NaN and make 2^n either 0 (n = -127, an exponent field of 0) or a normal
        // number. The integer n sits in the low bits of the rounded sum; the bits of the rounding
        // constant leave by the shift.
        let x = x.map(|x| if x > 127.0 { 127.0 } else { x });
        let x = x.map(|x| if x < -127.0 { -127.0 } else { x });
        let shifted = x.map(|x| x + ROUNDING);
        let n = shifted.map(|s| s - ROUNDING);
        let p = polynomial(self, &EXP2_CENTRED, self.sub(x, n));
        let scale = shifted.map(|s| f32::from_bits((s.to_bits() << 23).wrapping_add(127 << 23)));
        self.mul(p, scale)
    }

    #[inline(always)]
    fn sum(self, x: [f32; 4]) -> f32 {
        (x[0] + x[2]) + (x[1] + x[3])
    }

    #[inline(always)]
    fn span_sums(self, a: [[f32; 4]; 4], b: [[f32; 4]; 4], out: &mut [[f32; 4]; 4]) {
        out[0] = a.map(|x| self.sum(x));
        out[1] = b.map(|x| self.sum(x));
    }

    #[inline(always)]
    fn maximum(self, x: [f32; 4]) -> f32 {
        x.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }

    #[inline(always)]
    unsafe fn load(self, src: *const f32) -> [f32; 4] {
        // SAFETY: the caller vouches for 4 readable f32; an f32 array has the alignment of f32.
        unsafe { src.cast::<[f32; 4]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn load_span(self, src: *const f32) -> [f32; 4] {
        // SAFETY: the caller vouches for 4 readable f32, and a vector is one span.
        unsafe { self.load(src) }
    }

    #[inline(always)]
    unsafe fn store(self, x: [f32; 4], dst: *mut f32) {
        // SAFETY: the caller vouches for 4 writable f32.
        unsafe { dst.cast::<[f32; 4]>().write_unaligned(x) }
    }

    #[inline(always)]
    unsafe fn transpose_square(
        self,
        src: *const f32,
        src_stride: usize,
        dst: *mut f32,
        dst_stride: usize,
    ) {
        for row in 0..SQUARE {
            for col in 0..SQUARE {
                // SAFETY: the caller vouches for 8 readable rows of 8.
                let x = unsafe { *src.wrapping_add(row * src_stride + col) };
                // SAFETY: the caller vouches for 8 writable rows of 8.
                unsafe { *dst.wrapping_add(col * dst_stride + row) = x };
            }
        }
    }

    #[inline(always)]
    unsafe fn load_f16(self, src: *const f16) -> [f32; 4] {
        // SAFETY: the caller vouches for 4 readable f16.
        unsafe { src.cast::<[f16; 4]>().read_unaligned() }.map(f16::to_f32_const)
    }

    #[inline(always)]
    unsafe fn load_bf16(self, src: *const bf16) -> [f32; 4] {
        // SAFETY: the caller vouches for 4 readable bf16.
        let bits = unsafe { src.cast::<[bf16; 4]>().read_unaligned() };
        bits.map(|x| f32::from_bits(u32::from(x.to_bits()) << 16))
    }

    #[inline(always)]
    unsafe fn load_e4m3(self, src: *const u8) -> [f32; 4] {
        // SAFETY: the caller vouches for 4 readable bytes.
        unsafe { src.cast::<[u8; 4]>().read_unaligned() }.map(e4m3_to_f32)
    }

    #[inline(always)]
    unsafe fn load_e5m2(self, src: *const u8) -> [f32; 4] {
        // SAFETY: the caller vouches for 4 readable bytes.
        unsafe { src.cast::<[u8; 4]>().read_unaligned() }.map(e5m2_to_f32)
    }
}
