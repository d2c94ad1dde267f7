// Conversions between f32, f16, bf16, fp8 e4m3 and fp8 e5m2, by their bits.
//
// Source: OCP 8-bit floating point specification, revision 1.0, section 5: e4m3 has bias 7, largest
// 448 and no infinity (0x7F is NaN); e5m2 is the upper byte of an f16. The same results as
// attn-core's dtype.rs.
// Who executes: any thread, alone; no shared memory.
// The invariant: widening is exact, subnormals and signed zeros included, NaN stays NaN and
// infinity infinity; narrowing rounds to nearest, ties to even. Both hold on every architecture
// from sm_80: what an older one has no instruction for is integer code here, chosen at compile
// time. That is why several instructions stand in this folder: each function is one conversion, and
// one instruction where the architecture has it.
// What it does not do: scale (the caller multiplies), load, store.

#pragma once

#include "base/types.cuh"
#include "ptx/half.cuh"

namespace attn::ptx {

// Four widened elements: two pairs, in the order of the bytes they came from.
struct Half4 {
  u32 lo;
  u32 hi;
};

// f16 and bf16.

__device__ inline float f32_from_f16(u16 x) { return cvt_f32_f16(x); }
__device__ inline u16 f16_from_f32(float x) { return cvt_rn_f16_f32(x); }

// A bf16 is the upper half of an f32.
__device__ inline float f32_from_bf16(u16 x) { return __uint_as_float(u32(x) << 16); }
__device__ inline u16 bf16_from_f32(float x) { return cvt_rn_bf16_f32(x); }

// fp8 to f32, one element.

// The exponent and mantissa are moved to their places in an f32, subnormals to f32 subnormals, and
// the product with a power of two puts the bias right: one exact multiplication, no branch.
__device__ inline float f32_from_e4m3(u8 x) {
  const u32 magnitude = u32(x & 0x7F) << 20;
  const float value = __fmul_rn(__uint_as_float(magnitude), 0x1p120f);
  const u32 bits = magnitude == 0x07F00000u ? 0x7FFFFFFFu : __float_as_uint(value);
  return __uint_as_float(bits | u32(x & 0x80) << 24);
}

__device__ inline float f32_from_e5m2(u8 x) { return cvt_f32_f16(u16(u16(x) << 8)); }

// fp8 to pairs, four elements of one word.

// Each byte becomes the upper one of an f16.
__device__ inline Half4 f16x2_from_e5m2(u32 bytes) {
  return {__byte_perm(bytes, 0, 0x1404), __byte_perm(bytes, 0, 0x3424)};
}

// Two e4m3 in the upper bytes of two halves, the lower bytes 0, to f16x2 without the instruction.
//
// Their bits one place lower are an f16 of 2^-8 the value, so the product with 2^8 is exact. The
// addend is -0, which keeps signed zeros; under a NaN (all of exponent and mantissa set, so that
// adding the lowest place carries out of them) it is one less, which is a NaN's pattern.
__device__ inline u32 f16x2_from_spread_e4m3(u32 spread) {
  const u32 x = (spread & 0x80008000u) | ((spread & 0x7F007F00u) >> 1);
  const u32 nan = ((x + 0x00800080u) >> 14) & 0x00010001u;
  return fma_rn_f16x2(x, 0x5C005C00u, 0x80008000u - nan);
}

__device__ inline Half4 f16x2_from_e4m3(u32 bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  return {cvt_rn_f16x2_e4m3x2<__CUDA_ARCH__>(u16(bytes & 0xFFFF)),
          cvt_rn_f16x2_e4m3x2<__CUDA_ARCH__>(u16(bytes >> 16))};
#else
  return {f16x2_from_spread_e4m3(__byte_perm(bytes, 0, 0x1404)),
          f16x2_from_spread_e4m3(__byte_perm(bytes, 0, 0x3424))};
#endif
}

// As f16x2_from_spread_e4m3, four places lower and with 2^120: a bf16 has an f32's exponent.
__device__ inline u32 bf16x2_from_spread_e4m3(u32 spread) {
  const u32 x = (spread & 0x80008000u) | ((spread & 0x7F007F00u) >> 4);
  const u32 nan = ((x + 0x00100010u) >> 11) & 0x00010001u;
  return fma_rn_bf16x2(x, 0x7B807B80u, 0x80008000u - nan);
}

__device__ inline Half4 bf16x2_from_e4m3(u32 bytes) {
  return {bf16x2_from_spread_e4m3(__byte_perm(bytes, 0, 0x1404)),
          bf16x2_from_spread_e4m3(__byte_perm(bytes, 0, 0x3424))};
}

// Two e5m2 in the upper bytes of two halves, the lower bytes 0, to bf16x2.
//
// The product with 2^112 maps exponent 31 to 143 = 0b10001111; infinities and NaN get the three
// bits that are missing to 255 and keep their mantissa.
__device__ inline u32 bf16x2_from_spread_e5m2(u32 spread) {
  const u32 x = (spread & 0x80008000u) | ((spread & 0x7F007F00u) >> 3);
  const u32 top = (x + 0x00800080u) & 0x10001000u;
  return fma_rn_bf16x2(x, 0x77807780u, 0x80008000u) | ((top << 2) - (top >> 1));
}

__device__ inline Half4 bf16x2_from_e5m2(u32 bytes) {
  return {bf16x2_from_spread_e5m2(__byte_perm(bytes, 0, 0x1404)),
          bf16x2_from_spread_e5m2(__byte_perm(bytes, 0, 0x3424))};
}

// f32 to fp8.

// The nearest pattern of a format with MANTISSA bits and this BIAS. A finite value that rounds past
// LARGEST becomes LARGEST: a NaN in a cache would spoil its sequence for good. Infinity becomes
// BEYOND, and NaN stays one.
//
// Patterns of one sign are consecutive integers in value order, so a carry into the next binade is
// the addition itself; below the smallest normal value, adding a power of two whose last place is
// the spacing of the subnormals makes the adder round.
template <int MANTISSA, int BIAS, u32 LARGEST, u32 BEYOND>
__device__ inline u8 fp8_from_f32(float x) {
  constexpr int DROPPED = 23 - MANTISSA;
  constexpr u32 SMALLEST_NORMAL = u32(128 - BIAS) << 23;
  constexpr u32 ROUNDER = u32(128 - BIAS + DROPPED) << 23;
  const u32 bits = __float_as_uint(x);
  const u32 magnitude = bits & 0x7FFFFFFFu;
  const u32 sign = (bits >> 24) & 0x80u;
  if (magnitude > 0x7F800000u) return u8(sign | 0x7Fu);
  u32 code;
  if (magnitude < SMALLEST_NORMAL) {
    const float sum = __fadd_rn(__uint_as_float(magnitude), __uint_as_float(ROUNDER));
    code = __float_as_uint(sum) - ROUNDER;
  } else {
    const u32 even = (magnitude >> DROPPED) & 1u;
    const u32 rounded = magnitude + ((1u << (DROPPED - 1)) - 1u) + even;
    code = (rounded >> DROPPED) - (u32(127 - BIAS) << MANTISSA);
  }
  if (code > LARGEST) code = magnitude == 0x7F800000u ? BEYOND : LARGEST;
  return u8(sign | code);
}

__device__ inline u8 e4m3_from_f32(float x) { return fp8_from_f32<3, 7, 0x7E, 0x7F>(x); }
__device__ inline u8 e5m2_from_f32(float x) { return fp8_from_f32<2, 15, 0x7B, 0x7C>(x); }

// Element types as types: `Bits` is what is stored.

template <DType TYPE>
struct Stored;

template <>
struct Stored<DType::f32> {
  using Bits = float;
  __device__ static float widen(Bits x) { return x; }
  __device__ static Bits narrow(float x) { return x; }
};

template <>
struct Stored<DType::f16> {
  using Bits = u16;
  __device__ static float widen(Bits x) { return f32_from_f16(x); }
  __device__ static Bits narrow(float x) { return f16_from_f32(x); }
};

template <>
struct Stored<DType::bf16> {
  using Bits = u16;
  __device__ static float widen(Bits x) { return f32_from_bf16(x); }
  __device__ static Bits narrow(float x) { return bf16_from_f32(x); }
};

template <>
struct Stored<DType::e4m3> {
  using Bits = u8;
  __device__ static float widen(Bits x) { return f32_from_e4m3(x); }
  __device__ static Bits narrow(float x) { return e4m3_from_f32(x); }
};

template <>
struct Stored<DType::e5m2> {
  using Bits = u8;
  __device__ static float widen(Bits x) { return f32_from_e5m2(x); }
  __device__ static Bits narrow(float x) { return e5m2_from_f32(x); }
};

}  // namespace attn::ptx
