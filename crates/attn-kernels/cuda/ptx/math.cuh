// Approximate arithmetic of the special-function unit.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions
//
// Who executes: any thread, alone. Minimum sm_20.

#pragma once

#include "base/types.cuh"

namespace attn::ptx {

// ex2.approx.ftz.f32: 2^x, relative error 2^-22.5; -inf gives 0.
__device__ inline float ex2_approx_ftz_f32(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// lg2.approx.f32: log2 x, absolute error 2^-22 near 1; 0 gives -inf.
__device__ inline float lg2_approx_f32(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// rcp.approx.ftz.f32: 1 / x within one unit in the last place; inf gives 0.
__device__ inline float rcp_approx_ftz_f32(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace attn::ptx
