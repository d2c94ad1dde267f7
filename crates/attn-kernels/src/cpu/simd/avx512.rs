//! The AVX-512 vectors: 16 f32.
//!
//! Invariant: an [`Avx512`] exists only inside [`run`], whose caller vouches for the instructions.
//! `vscalefps` and `vreduceps` give `2^x` without a clamp or an integer step, which is why this file
//! does not share the AVX2 exponential. `vdpbf16ps` is not used: on the processors measured it runs
//! at half the rate of an f32 FMA.

use std::arch::x86_64::{
    __m128i, __m256i, __m512, __m512i, _CMP_LT_OQ, _mm_loadu_si128, _mm256_and_si256,
    _mm256_cmpeq_epi16_mask, _mm256_cvtepu8_epi16, _mm256_loadu_ps, _mm256_loadu_si256,
    _mm256_mask_mov_epi16, _mm256_or_si256, _mm256_set1_epi16, _mm256_slli_epi16, _mm512_abs_ps,
    _mm512_add_ps, _mm512_broadcast_f32x8, _mm512_castpd_ps, _mm512_castps_pd, _mm512_castps_si512,
    _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_cvtepu16_epi32, _mm512_cvtph_ps, _mm512_div_ps,
    _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_mask_mov_ps, _mm512_max_ps, _mm512_mul_ps,
    _mm512_reduce_add_ps, _mm512_reduce_max_ps, _mm512_reduce_ps, _mm512_scalef_ps,
    _mm512_set1_epi32, _mm512_set1_ps, _mm512_shuffle_f32x4, _mm512_slli_epi32, _mm512_storeu_ps,
    _mm512_sub_ps, _mm512_ternarylogic_epi32, _mm512_unpackhi_pd, _mm512_unpackhi_ps,
    _mm512_unpacklo_pd, _mm512_unpacklo_ps,
};

use half::{bf16, f16};

use super::lanes::{EXP2_FRACTION, Lanes, polynomial};
use super::{Kernel, avx2};

/// Proof that the AVX-512 instructions may be executed.
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

/// Runs a kernel with AVX-512 enabled.
///
/// # Safety
/// The processor has AVX-512 F, BW, DQ and VL, AVX2, FMA and F16C.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx512(()))
}

/// `vreduceps` control: subtract the floor, zero fraction bits kept.
const MINUS_FLOOR: i32 = 0x01;
/// `vpternlogd` table for `(a & b) | (!a & c)`.
const SELECT_BITS: i32 = 0xCA;

impl Avx512 {
    /// The sums of the quads of four vectors: element `i` of quad `g` of the result is the sum of quad
    /// `g` of vector `i`.
    #[inline(always)]
    #[expect(clippy::multiple_unsafe_ops_per_block, reason = "register operations of one argument")]
    fn quad_sums(self, [a, b, c, d]: [__m512; 4]) -> __m512 {
        // A transpose of each 4 x 4 block whose halves are added on the way.
        // SAFETY: `self` proves that AVX-512 F is there.
        unsafe {
            let ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
            let cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
            let (ab, cd) = (_mm512_castps_pd(ab), _mm512_castps_pd(cd));
            let low = _mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd));
            let high = _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd));
            _mm512_add_ps(low, high)
        }
    }
}

impl Lanes for Avx512 {
    type V = __m512;
    const LANES: usize = 16;
    const SPAN: usize = 8;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: `self` proves that AVX-512 F is there.
        unsafe { _mm512_set1_ps(x) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves that AVX-512 F is there.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves that AVX-512 F is there.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves that AVX-512 F is there.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves that AVX-512 F is there.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: `self` proves that AVX-512 F is there.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves that AVX-512 F is there.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn abs(self, x: __m512) -> __m512 {
        // SAFETY: `self` proves that AVX-512 F is there.
        unsafe { _mm512_abs_ps(x) }
    }

    #[inline(always)]
    #[expect(clippy::multiple_unsafe_ops_per_block, reason = "register operations of one argument")]
    fn copysign(self, x: __m512, sign: __m512) -> __m512 {
        // SAFETY: `self` proves that AVX-512 F is there.
        unsafe {
            let magnitude = _mm512_set1_epi32(i32::MAX);
            _mm512_castsi512_ps(_mm512_ternarylogic_epi32::<SELECT_BITS>(
                magnitude,
                _mm512_castps_si512(x),
                _mm512_castps_si512(sign),
            ))
        }
    }

    #[inline(always)]
    #[expect(clippy::multiple_unsafe_ops_per_block, reason = "register operations of one argument")]
    fn select_lt(self, a: __m512, b: __m512, yes: __m512, no: __m512) -> __m512 {
        // SAFETY: `self` proves that AVX-512 F is there.
        unsafe { _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), yes) }
    }

    #[inline(always)]
    fn exp2(self, x: __m512) -> __m512 {
        // `vscalefps` multiplies by 2^floor(x), so the polynomial sees x - floor(x). For -inf the
        // fraction is defined as 0 and the scale as 0.
        // SAFETY: `self` proves that AVX-512 DQ is there.
        let fraction = unsafe { _mm512_reduce_ps::<MINUS_FLOOR>(x) };
        let p = polynomial(self, &EXP2_FRACTION, fraction);
        // SAFETY: `self` proves that AVX-512 F is there.
        unsafe { _mm512_scalef_ps(p, x) }
    }

    #[inline(always)]
    fn sum(self, x: __m512) -> f32 {
        // SAFETY: `self` proves that AVX-512 F is there.
        unsafe { _mm512_reduce_add_ps(x) }
    }

    #[inline(always)]
    #[expect(clippy::multiple_unsafe_ops_per_block, reason = "register operations of one argument")]
    fn span_sums(self, a: [__m512; 4], b: [__m512; 4], out: &mut [[f32; 4]; 4]) {
        let (a, b) = (self.quad_sums(a), self.quad_sums(b));
        // SAFETY: `self` proves that AVX-512 F is there; `out` holds the 16 f32 that are stored.
        unsafe {
            // A span is two quads, next to one another.
            let even = _mm512_shuffle_f32x4::<0b_10_00_10_00>(a, b);
            let odd = _mm512_shuffle_f32x4::<0b_11_01_11_01>(a, b);
            _mm512_storeu_ps(out.as_mut_ptr().cast::<f32>(), _mm512_add_ps(even, odd));
        }
    }

    #[inline(always)]
    fn maximum(self, x: __m512) -> f32 {
        // SAFETY: `self` proves that AVX-512 F is there.
        unsafe { _mm512_reduce_max_ps(x) }
    }

    #[inline(always)]
    unsafe fn load(self, src: *const f32) -> __m512 {
        // SAFETY: the caller vouches for 16 readable f32.
        unsafe { _mm512_loadu_ps(src) }
    }

    #[inline(always)]
    #[expect(clippy::multiple_unsafe_ops_per_block, reason = "one load, then register operations")]
    unsafe fn load_span(self, src: *const f32) -> __m512 {
        // SAFETY: the caller vouches for 8 readable f32.
        unsafe { _mm512_broadcast_f32x8(_mm256_loadu_ps(src)) }
    }

    #[inline(always)]
    unsafe fn store(self, x: __m512, dst: *mut f32) {
        // SAFETY: the caller vouches for 16 writable f32.
        unsafe { _mm512_storeu_ps(dst, x) }
    }

    #[inline(always)]
    unsafe fn transpose_square(
        self,
        src: *const f32,
        src_stride: usize,
        dst: *mut f32,
        dst_stride: usize,
    ) {
        // Squares of 8 fill a cache line by halves; those of 16 need twice the shuffles a row.
        // SAFETY: `self` proves that AVX is there; the caller vouches for the memory.
        unsafe { avx2::transpose_square(src, src_stride, dst, dst_stride) }
    }

    #[inline(always)]
    #[expect(clippy::multiple_unsafe_ops_per_block, reason = "one load, then register operations")]
    unsafe fn load_f16(self, src: *const f16) -> __m512 {
        // SAFETY: the caller vouches for 16 readable f16, which are 32 bytes.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(src.cast::<__m256i>())) }
    }

    #[inline(always)]
    #[expect(clippy::multiple_unsafe_ops_per_block, reason = "one load, then register operations")]
    unsafe fn load_bf16(self, src: *const bf16) -> __m512 {
        // SAFETY: the caller vouches for 16 readable bf16, which are 32 bytes.
        unsafe {
            let wide: __m512i = _mm512_cvtepu16_epi32(_mm256_loadu_si256(src.cast::<__m256i>()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    #[expect(clippy::multiple_unsafe_ops_per_block, reason = "one load, then register operations")]
    unsafe fn load_e4m3(self, src: *const u8) -> __m512 {
        // Moved into the fields of an f16 the exponent is 8 too small, also for subnormals; the NaN
        // patterns are replaced by an f16 NaN.
        // SAFETY: the caller vouches for 16 readable bytes.
        unsafe {
            let x = _mm256_cvtepu8_epi16(_mm_loadu_si128(src.cast::<__m128i>()));
            let magnitude = _mm256_and_si256(x, _mm256_set1_epi16(0x7f));
            let sign = _mm256_slli_epi16::<8>(_mm256_and_si256(x, _mm256_set1_epi16(0x80)));
            let nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7f));
            let bits = _mm256_or_si256(_mm256_slli_epi16::<7>(magnitude), sign);
            let bits = _mm256_mask_mov_epi16(bits, nan, _mm256_set1_epi16(0x7e00));
            _mm512_mul_ps(_mm512_cvtph_ps(bits), _mm512_set1_ps(256.0))
        }
    }

    #[inline(always)]
    #[expect(clippy::multiple_unsafe_ops_per_block, reason = "one load, then register operations")]
    unsafe fn load_e5m2(self, src: *const u8) -> __m512 {
        // An e5m2 is the upper byte of an f16.
        // SAFETY: the caller vouches for 16 readable bytes.
        unsafe {
            let x = _mm256_cvtepu8_epi16(_mm_loadu_si128(src.cast::<__m128i>()));
            _mm512_cvtph_ps(_mm256_slli_epi16::<8>(x))
        }
    }
}
