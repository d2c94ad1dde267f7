// Instructions on 16-bit and 8-bit floats, one wrapper each.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cvt
// https://docs.nvidia.com/cuda/parallel-thread-execution/#half-precision-floating-point-instructions-fma
//
// Who executes: any thread, alone. What it does not do: loops, choices between architectures; those
// are in ptx/convert.cuh.

#pragma once

#include "base/types.cuh"

namespace attn::ptx {

// cvt.f32.f16, exact. SM 53.
__device__ inline float cvt_f32_f16(u16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}

// cvt.rn.f16.f32: beyond 65504 to inf, NaN to 0x7FFF. SM 53.
__device__ inline u16 cvt_rn_f16_f32(float x) {
  u16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

// cvt.rn.bf16.f32: beyond the largest to inf, NaN to 0x7FFF. SM 80.
__device__ inline u16 cvt_rn_bf16_f32(float x) {
  u16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}

// cvt.rn.f16x2.f32: `lo` in the low half. SM 80.
__device__ inline u32 cvt_rn_f16x2_f32(float lo, float hi) {
  u32 y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}

// cvt.rn.bf16x2.f32: `lo` in the low half. SM 80.
__device__ inline u32 cvt_rn_bf16x2_f32(float lo, float hi) {
  u32 y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
  return y;
}

// fma.rn.f16x2: a * b + c in both halves, subnormals kept. SM 53.
__device__ inline u32 fma_rn_f16x2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// fma.rn.bf16x2: a * b + c in both halves, subnormals kept. SM 80.
__device__ inline u32 fma_rn_bf16x2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// cvt.rn.f16x2.e4m3x2, exact; NaN to NaN. SM 89: on an older one the call does not compile.
template <int ARCH>
__device__ inline u32 cvt_rn_f16x2_e4m3x2(u16 pair) {
  static_assert(ARCH >= 890, "cvt.rn.f16x2.e4m3x2 needs sm_89");
  u32 y;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(pair));
  return y;
}

// cvt.rn.satfinite.e4m3x2.f32: `lo` in the low byte; beyond 448 to 448, NaN to 0x7F. SM 89.
template <int ARCH>
__device__ inline u16 cvt_rn_satfinite_e4m3x2_f32(float lo, float hi) {
  static_assert(ARCH >= 890, "cvt.rn.satfinite.e4m3x2.f32 needs sm_89");
  u16 y;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(hi), "f"(lo));
  return y;
}

}  // namespace attn::ptx
