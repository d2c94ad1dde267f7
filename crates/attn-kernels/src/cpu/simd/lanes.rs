//! The vector operations that kernels are written in.
//!
//! Invariant: a value of a type that implements [`Lanes`] proves that its instructions may be
//! executed, so all register operations are safe and only raw memory access is not. Passing the
//! proof as a value, rather than marking every operation unsafe, leaves in the kernels only those
//! unsafe blocks that need an argument about memory.

use half::{bf16, f16};

/// Bits of `1.5 * 2^23`: adding it to an f32 of small magnitude rounds to the nearest integer and
/// leaves that integer in the low bits of the sum.
pub(super) const ROUNDING: f32 = 12_582_912.0;

/// Coefficients, constant term first, of a polynomial for `2^f`, f in `[-1/2, 1/2]`.
///
/// Source: Remez exchange on the relative error with the constant term held at 1, so that `2^0` is
/// exactly 1; the relative error of the rounded coefficients is 1.6e-8.
pub(super) const EXP2_CENTRED: [f32; 7] = [
    1.0,
    std::f32::consts::LN_2,
    0.240_226_48,
    0.055_503_324,
    0.009_618_437,
    0.001_339_887_4,
    0.000_153_533_62,
];

/// The same for f in `[0, 1]`; relative error 1.3e-8.
#[cfg(target_arch = "x86_64")]
pub(super) const EXP2_FRACTION: [f32; 7] = [
    1.0,
    0.693_147_06,
    0.240_229_31,
    0.055_485_282,
    0.009_675_452,
    0.001_246_784_7,
    0.000_216_129_15,
];

/// Evaluates a polynomial by Horner's rule, constant term first.
#[inline(always)]
pub(super) fn polynomial<L: Lanes, const N: usize>(l: L, c: &[f32; N], x: L::V) -> L::V {
    let mut p = l.splat(c[N - 1]);
    let mut i = N - 1;
    while i > 0 {
        i -= 1;
        p = l.fma(p, x, l.splat(c[i]));
    }
    p
}

/// One level's f32 vectors.
///
/// Units: `LANES` f32 a vector.
/// Invariants: [`super::LANE_GROUP`] is a multiple of `LANES`.
pub(crate) trait Lanes: Copy {
    /// A vector of [`Self::LANES`] f32.
    type V: Copy;

    /// Number of f32 in a vector.
    const LANES: usize;

    /// Neighbouring lanes that [`Self::load_span`] fills alike; divides [`Self::LANES`].
    const SPAN: usize;

    /// The same value in every lane.
    fn splat(self, x: f32) -> Self::V;
    /// `a + b`.
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a - b`.
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b`.
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`.
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, fused where the level has it.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger of the two, and `b` where either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// The magnitude of `x`.
    fn abs(self, x: Self::V) -> Self::V;
    /// The magnitude of `x` with the sign of `sign`.
    fn copysign(self, x: Self::V, sign: Self::V) -> Self::V;
    /// In each lane `yes` where `a < b`, otherwise (NaN included) `no`.
    fn select_lt(self, a: Self::V, b: Self::V, yes: Self::V, no: Self::V) -> Self::V;
    /// `2^x` within 2 ulp for x in `[-126, 127]`; 0 for -inf and far below; NaN for NaN.
    ///
    /// Below -126 the result is 0 or a subnormal number, above 127 it saturates: softmax arguments
    /// never get there.
    fn exp2(self, x: Self::V) -> Self::V;
    /// The sum of the lanes.
    fn sum(self, x: Self::V) -> f32;
    /// The sums of the spans of eight vectors: `out[q][i]` is the sum of span `q` of `a[i]`, and after the
    /// spans of `a` come those of `b`. Entries past both stay as they are.
    fn span_sums(self, a: [Self::V; 4], b: [Self::V; 4], out: &mut [[f32; 4]; 4]);
    /// The largest lane.
    fn maximum(self, x: Self::V) -> f32;

    /// Reads `LANES` f32.
    ///
    /// # Safety
    /// `src` is valid for reading `LANES` f32; no alignment is needed.
    unsafe fn load(self, src: *const f32) -> Self::V;
    /// Reads `SPAN` f32, the same for every span of lanes.
    ///
    /// # Safety
    /// `src` is valid for reading `SPAN` f32; no alignment is needed.
    unsafe fn load_span(self, src: *const f32) -> Self::V;
    /// Writes `LANES` f32.
    ///
    /// # Safety
    /// `dst` is valid for writing `LANES` f32; no alignment is needed.
    unsafe fn store(self, x: Self::V, dst: *mut f32);
    /// Moves a transposed square of 8 by 8 f32.
    ///
    /// # Safety
    /// `src` is valid for reading and `dst` for writing 8 rows of 8 f32, `src_stride` and
    /// `dst_stride` f32 apart.
    unsafe fn transpose_square(
        self,
        src: *const f32,
        src_stride: usize,
        dst: *mut f32,
        dst_stride: usize,
    );
    /// Reads and widens `LANES` f16.
    ///
    /// # Safety
    /// `src` is valid for reading `LANES` f16; no alignment is needed.
    unsafe fn load_f16(self, src: *const f16) -> Self::V;
    /// Reads and widens `LANES` bf16.
    ///
    /// # Safety
    /// `src` is valid for reading `LANES` bf16; no alignment is needed.
    unsafe fn load_bf16(self, src: *const bf16) -> Self::V;
    /// Reads and widens `LANES` e4m3 (the finite variant: no infinity, 0x7f and 0xff are NaN).
    ///
    /// # Safety
    /// `src` is valid for reading `LANES` bytes.
    unsafe fn load_e4m3(self, src: *const u8) -> Self::V;
    /// Reads and widens `LANES` e5m2.
    ///
    /// # Safety
    /// `src` is valid for reading `LANES` bytes.
    unsafe fn load_e5m2(self, src: *const u8) -> Self::V;
}

/// `tanh(x)` within a few ulp, also for small x.
///
/// Source: the split at 0.625 and the odd polynomial below it are those of Cephes `tanhf`
/// (Moshier); above it `1 - 2 / (e^2x + 1)`, which alone would lose the relative accuracy of small
/// arguments.
#[inline(always)]
pub(super) fn tanh<L: Lanes>(l: L, x: L::V) -> L::V {
    let magnitude = l.abs(x);
    let e = l.exp2(l.mul(magnitude, l.splat(2.0 * std::f32::consts::LOG2_E)));
    let one = l.splat(1.0);
    let large = l.sub(one, l.div(l.splat(2.0), l.add(e, one)));
    let z = l.mul(x, x);
    let mut p = l.splat(-0.005_704_988_7);
    for c in [0.020_639_088, -0.053_739_716, 0.133_314_42, -0.333_332_8] {
        p = l.fma(p, z, l.splat(c));
    }
    let small = l.fma(l.mul(p, z), x, x);
    l.select_lt(magnitude, l.splat(0.625), small, l.copysign(large, x))
}
