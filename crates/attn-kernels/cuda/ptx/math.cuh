// Scalar arithmetic of the special-function unit, and barriers of part of a block.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#floating-point-instructions

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

// rcp.approx.ftz.f32: 1 / x, within one unit in the last place; inf gives 0.
__device__ inline float rcp_approx_ftz_f32(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// bar.sync id, threads: `threads` threads of the block meet, a multiple of 32.
__device__ inline void bar_sync(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace attn::ptx
