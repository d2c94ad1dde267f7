// Maximum and sum over the lanes of a warp and the threads of a block.
//
// Who executes: all 32 lanes of a warp; all threads of a block. Shared memory: the caller's
// scratch, one float a warp. The invariant: every thread gets the same bits, in an order that
// depends on nothing but THREADS. A maximum ignores NaN, a sum spreads it.
// What it does not do: reductions over part of a warp but for `sum<LANES>`.

#pragma once

#include "base/types.cuh"

namespace attn::tile {

namespace warp {

// The sum over each group of LANES consecutive lanes, LANES a power of two.
template <int LANES = WARP>
__device__ inline float sum(float x) {
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) {
    x += __shfl_xor_sync(0xFFFFFFFFu, x, step);
  }
  return x;
}

__device__ inline float max(float x) {
#pragma unroll
  for (int step = WARP / 2; step > 0; step /= 2) {
    x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFu, x, step));
  }
  return x;
}

}  // namespace warp

namespace block {

// `scratch` [THREADS / 32] is free for the next use when the call returns.
template <int THREADS>
__device__ inline float max(float x, float* scratch) {
  x = warp::max(x);
  if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = x;
  __syncthreads();
  x = scratch[0];
#pragma unroll
  for (int i = 1; i < THREADS / WARP; ++i) x = fmaxf(x, scratch[i]);
  __syncthreads();
  return x;
}

// As max.
template <int THREADS>
__device__ inline float sum(float x, float* scratch) {
  x = warp::sum(x);
  if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = x;
  __syncthreads();
  x = scratch[0];
#pragma unroll
  for (int i = 1; i < THREADS / WARP; ++i) x += scratch[i];
  __syncthreads();
  return x;
}

}  // namespace block

}  // namespace attn::tile
