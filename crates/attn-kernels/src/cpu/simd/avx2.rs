//! The AVX2 vectors: 8 f32, with FMA and F16C.
//!
//! Invariant: an [`Avx2`] exists only inside [`run`], whose caller vouches for the instructions. Plain
//! AVX without FMA is not a level: processors that have it alone are rare and slow enough for the
//! portable code.

use std::arch::x86_64::{
    __m128i, __m256, __m256i, _CMP_LT_OQ, _mm_and_si128, _mm_blendv_epi8, _mm_cmpeq_epi16,
    _mm_cvtepu8_epi16, _mm_loadl_epi64, _mm_loadu_si128, _mm_or_si128, _mm_set1_epi16,
    _mm_slli_epi16, _mm256_add_epi32, _mm256_add_ps, _mm256_and_ps, _mm256_andnot_ps,
    _mm256_blendv_ps, _mm256_castps_si256, _mm256_castsi256_ps, _mm256_cmp_ps,
    _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_div_ps, _mm256_fmadd_ps, _mm256_hadd_ps,
    _mm256_loadu_ps, _mm256_max_ps, _mm256_min_ps, _mm256_mul_ps, _mm256_or_ps,
    _mm256_permute2f128_ps, _mm256_set1_epi32, _mm256_set1_ps, _mm256_shuffle_ps,
    _mm256_slli_epi32, _mm256_storeu_ps, _mm256_sub_ps, _mm256_unpackhi_ps, _mm256_unpacklo_ps,
};

use half::{bf16, f16};

use super::Kernel;
use super::lanes::{EXP2_CENTRED, Lanes, ROUNDING, polynomial};

/// Proof that the AVX2, FMA and F16C instructions may be executed.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

/// Runs a kernel with AVX2, FMA and F16C enabled.
///
/// # Safety
/// The processor has AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx2(()))
}

/// Moves a transposed square of 8 by 8 f32, in three rounds that swap blocks of 1, 2 and 4.
///
/// # Safety
/// The processor has AVX; memory as [`Lanes::transpose_square`] says.
#[inline(always)]
#[expect(clippy::multiple_unsafe_ops_per_block, reason = "register operations of one argument")]
pub(super) unsafe fn transpose_square(
    src: *const f32,
    src_stride: usize,
    dst: *mut f32,
    dst_stride: usize,
) {
    // SAFETY: the caller vouches for AVX and for 8 readable rows of 8.
    let r: [__m256; 8] =
        std::array::from_fn(|i| unsafe { _mm256_loadu_ps(src.wrapping_add(i * src_stride)) });
    // SAFETY: the caller vouches for AVX.
    let columns = unsafe {
        let (a, b) = (_mm256_unpacklo_ps(r[0], r[1]), _mm256_unpackhi_ps(r[0], r[1]));
        let (c, d) = (_mm256_unpacklo_ps(r[2], r[3]), _mm256_unpackhi_ps(r[2], r[3]));
        let (e, f) = (_mm256_unpacklo_ps(r[4], r[5]), _mm256_unpackhi_ps(r[4], r[5]));
        let (g, h) = (_mm256_unpacklo_ps(r[6], r[7]), _mm256_unpackhi_ps(r[6], r[7]));
        let (a, c, b, d) = (
            _mm256_shuffle_ps::<LOW_PAIRS>(a, c),
            _mm256_shuffle_ps::<HIGH_PAIRS>(a, c),
            _mm256_shuffle_ps::<LOW_PAIRS>(b, d),
            _mm256_shuffle_ps::<HIGH_PAIRS>(b, d),
        );
        let (e, g, f, h) = (
            _mm256_shuffle_ps::<LOW_PAIRS>(e, g),
            _mm256_shuffle_ps::<HIGH_PAIRS>(e, g),
            _mm256_shuffle_ps::<LOW_PAIRS>(f, h),
            _mm256_shuffle_ps::<HIGH_PAIRS>(f, h),
        );
        [
            _mm256_permute2f128_ps::<LOW_HALVES>(a, e),
            _mm256_permute2f128_ps::<LOW_HALVES>(c, g),
            _mm256_permute2f128_ps::<LOW_HALVES>(b, f),
            _mm256_permute2f128_ps::<LOW_HALVES>(d, h),
            _mm256_permute2f128_ps::<HIGH_HALVES>(a, e),
            _mm256_permute2f128_ps::<HIGH_HALVES>(c, g),
            _mm256_permute2f128_ps::<HIGH_HALVES>(b, f),
            _mm256_permute2f128_ps::<HIGH_HALVES>(d, h),
        ]
    };
    for (i, column) in columns.into_iter().enumerate() {
        // SAFETY: the caller vouches for AVX and for 8 writable rows of 8.
        unsafe { _mm256_storeu_ps(dst.wrapping_add(i * dst_stride), column) };
    }
}

/// `vshufps` control: the lower two elements of each operand's 128-bit half.
const LOW_PAIRS: i32 = 0x44;
/// `vshufps` control: the upper two elements of each operand's 128-bit half.
const HIGH_PAIRS: i32 = 0xEE;
/// `vperm2f128` control: the lower halves of both operands.
const LOW_HALVES: i32 = 0x20;
/// `vperm2f128` control: the upper halves of both operands.
const HIGH_HALVES: i32 = 0x31;

impl Avx2 {
    /// The lanes as an array, for the rare horizontal steps.
    #[inline(always)]
    fn lanes(self, x: __m256) -> [f32; 8] {
        let mut lanes = [0.0; 8];
        // SAFETY: the array holds the 8 f32 of a vector.
        unsafe { self.store(x, lanes.as_mut_ptr()) };
        lanes
    }
}

impl Lanes for Avx2 {
    type V = __m256;
    const LANES: usize = 8;
    const SPAN: usize = 8;

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        // SAFETY: `self` proves that AVX is there.
        unsafe { _mm256_set1_ps(x) }
    }

    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves that AVX is there.
        unsafe { _mm256_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves that AVX is there.
        unsafe { _mm256_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves that AVX is there.
        unsafe { _mm256_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves that AVX is there.
        unsafe { _mm256_div_ps(a, b) }
    }

    #[inline(always)]
    fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: `self` proves that FMA is there.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        // SAFETY: `self` proves that AVX is there.
        unsafe { _mm256_max_ps(a, b) }
    }

    #[inline(always)]
    #[expect(clippy::multiple_unsafe_ops_per_block, reason = "register operations of one argument")]
    fn abs(self, x: __m256) -> __m256 {
        // SAFETY: `self` proves that AVX is there.
        unsafe { _mm256_andnot_ps(_mm256_set1_ps(-0.0), x) }
    }

    #[inline(always)]
    #[expect(clippy::multiple_unsafe_ops_per_block, reason = "register operations of one argument")]
    fn copysign(self, x: __m256, sign: __m256) -> __m256 {
        // SAFETY: `self` proves that AVX is there.
        unsafe {
            let bit = _mm256_set1_ps(-0.0);
            _mm256_or_ps(_mm256_andnot_ps(bit, x), _mm256_and_ps(bit, sign))
        }
    }

    #[inline(always)]
    #[expect(clippy::multiple_unsafe_ops_per_block, reason = "register operations of one argument")]
    fn select_lt(self, a: __m256, b: __m256, yes: __m256, no: __m256) -> __m256 {
        // SAFETY: `self` proves that AVX is there.
        unsafe { _mm256_blendv_ps(no, yes, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b)) }
    }

    #[inline(always)]
    #[expect(clippy::multiple_unsafe_ops_per_block, reason = "register operations of one argument")]
    fn exp2(self, x: __m256) -> __m256 {
        // The clamps keep NaN (the second operand wins) and make 2^n either 0 (n = -127, an
        // exponent field of 0) or a normal number. The integer n sits in the low bits of the
        // rounded sum; the bits of the rounding constant leave by the shift.
        // SAFETY: `self` proves that AVX2 and FMA are there.
        unsafe {
            let x = _mm256_min_ps(_mm256_set1_ps(127.0), x);
            let x = _mm256_max_ps(_mm256_set1_ps(-127.0), x);
            let shifted = _mm256_add_ps(x, _mm256_set1_ps(ROUNDING));
            let n = _mm256_sub_ps(shifted, _mm256_set1_ps(ROUNDING));
            let p = polynomial(self, &EXP2_CENTRED, _mm256_sub_ps(x, n));
            let bias = _mm256_set1_epi32(127 << 23);
            let scale = _mm256_slli_epi32::<23>(_mm256_castps_si256(shifted));
            _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_add_epi32(scale, bias)))
        }
    }

    #[inline(always)]
    fn sum(self, x: __m256) -> f32 {
        let x = self.lanes(x);
        ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]))
    }

    #[inline(always)]
    #[expect(clippy::multiple_unsafe_ops_per_block, reason = "register operations of one argument")]
    fn span_sums(self, a: [__m256; 4], b: [__m256; 4], out: &mut [[f32; 4]; 4]) {
        // SAFETY: `self` proves that AVX is there; `out` holds more than the 8 f32 that are stored.
        unsafe {
            let a = _mm256_hadd_ps(_mm256_hadd_ps(a[0], a[1]), _mm256_hadd_ps(a[2], a[3]));
            let b = _mm256_hadd_ps(_mm256_hadd_ps(b[0], b[1]), _mm256_hadd_ps(b[2], b[3]));
            let low = _mm256_permute2f128_ps::<0x20>(a, b);
            let high = _mm256_permute2f128_ps::<0x31>(a, b);
            _mm256_storeu_ps(out.as_mut_ptr().cast::<f32>(), _mm256_add_ps(low, high));
        }
    }

    #[inline(always)]
    fn maximum(self, x: __m256) -> f32 {
        self.lanes(x).into_iter().fold(f32::NEG_INFINITY, f32::max)
    }

    #[inline(always)]
    unsafe fn load(self, src: *const f32) -> __m256 {
        // SAFETY: the caller vouches for 8 readable f32.
        unsafe { _mm256_loadu_ps(src) }
    }

    #[inline(always)]
    unsafe fn load_span(self, src: *const f32) -> __m256 {
        // SAFETY: the caller vouches for 8 readable f32, and a vector is one span.
        unsafe { self.load(src) }
    }

    #[inline(always)]
    unsafe fn store(self, x: __m256, dst: *mut f32) {
        // SAFETY: the caller vouches for 8 writable f32.
        unsafe { _mm256_storeu_ps(dst, x) }
    }

    #[inline(always)]
    unsafe fn transpose_square(
        self,
        src: *const f32,
        src_stride: usize,
        dst: *mut f32,
        dst_stride: usize,
    ) {
        // SAFETY: `self` proves that AVX is there; the caller vouches for the memory.
        unsafe { transpose_square(src, src_stride, dst, dst_stride) }
    }

    #[inline(always)]
    #[expect(clippy::multiple_unsafe_ops_per_block, reason = "one load, then register operations")]
    unsafe fn load_f16(self, src: *const f16) -> __m256 {
        // SAFETY: the caller vouches for 8 readable f16, which are 16 bytes.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(src.cast::<__m128i>())) }
    }

    #[inline(always)]
    #[expect(clippy::multiple_unsafe_ops_per_block, reason = "one load, then register operations")]
    unsafe fn load_bf16(self, src: *const bf16) -> __m256 {
        // SAFETY: the caller vouches for 8 readable bf16, which are 16 bytes.
        unsafe {
            let wide: __m256i = _mm256_cvtepu16_epi32(_mm_loadu_si128(src.cast::<__m128i>()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    #[expect(clippy::multiple_unsafe_ops_per_block, reason = "one load, then register operations")]
    unsafe fn load_e4m3(self, src: *const u8) -> __m256 {
        // Moved into the fields of an f16 the exponent is 8 too small, also for subnormals; the NaN
        // patterns are replaced by an f16 NaN.
        // SAFETY: the caller vouches for 8 readable bytes, which is all that this load touches.
        unsafe {
            let x = _mm_cvtepu8_epi16(_mm_loadl_epi64(src.cast::<__m128i>()));
            let magnitude = _mm_and_si128(x, _mm_set1_epi16(0x7f));
            let sign = _mm_slli_epi16::<8>(_mm_and_si128(x, _mm_set1_epi16(0x80)));
            let nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f));
            let bits = _mm_or_si128(_mm_slli_epi16::<7>(magnitude), sign);
            let bits = _mm_blendv_epi8(bits, _mm_set1_epi16(0x7e00), nan);
            _mm256_mul_ps(_mm256_cvtph_ps(bits), _mm256_set1_ps(256.0))
        }
    }

    #[inline(always)]
    #[expect(clippy::multiple_unsafe_ops_per_block, reason = "one load, then register operations")]
    unsafe fn load_e5m2(self, src: *const u8) -> __m256 {
        // An e5m2 is the upper byte of an f16.
        // SAFETY: the caller vouches for 8 readable bytes, which is all that this load touches.
        unsafe {
            let x = _mm_cvtepu8_epi16(_mm_loadl_epi64(src.cast::<__m128i>()));
            _mm256_cvtph_ps(_mm_slli_epi16::<8>(x))
        }
    }
}
