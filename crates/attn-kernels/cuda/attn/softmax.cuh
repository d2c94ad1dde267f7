// The online softmax of a warp's rows.
//
// Source: M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867,
// algorithm 3; T. Dao et al., "FlashAttention", arXiv:2205.14135, algorithm 1, with the division
// moved behind the last tile.
// Who executes: all lanes of a converged warp; no shared memory.
// The invariant: all weights of a row are relative to one shift, that of its maximum, under one
// rounding; a row that has seen no key has the maximum -inf and weights of 0, never NaN.

#pragma once

#include "attn/exponent.cuh"
#include "attn/fragment.cuh"
#include "ptx/math.cuh"

namespace attn::warp {

// The largest of the four lanes that share a row.
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

struct Softmax {
  float max[config::ROW_TILES][2];  // of the scores as they are
  float sum[config::ROW_TILES][2];  // of the lane's own columns

  __device__ Softmax() {
#pragma unroll
    for (int i = 0; i < config::ROW_TILES; ++i) {
      max[i][0] = max[i][1] = NEG_INF;
      sum[i][0] = sum[i][1] = 0.0f;
    }
  }

  // Turns a tile's scores into weights, and rescales what was summed under a smaller maximum.
  __device__ void push(Scores& s, Accumulator& o, const Exponent& exponent) {
    using namespace config;
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) {
      float shift[2];
      float correction[2];
      bool has_grown = false;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = s[i][0][half * 2];
#pragma unroll
        for (int j = 0; j < KEY_TILES; ++j) {
          top = fmaxf(top, fmaxf(s[i][j][half * 2], s[i][j][half * 2 + 1]));
        }
        const float before = max[i][half];
        const float now = fmaxf(before, quad_max(top));
        has_grown |= now != before;
        max[i][half] = now;
        shift[half] = exponent.shift(now);
        correction[half] = ptx::ex2_approx_ftz_f32(exponent.of_max(before, shift[half]));
      }
      // Most tiles after the first few leave every maximum of a warp where it was.
      if (__any_sync(~0u, has_grown)) {
#pragma unroll
        for (int half = 0; half < 2; ++half) sum[i][half] *= correction[half];
#pragma unroll
        for (int j = 0; j < VALUE_TILES; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) o[i][j][e] *= correction[e / 2];
        }
      }
#pragma unroll
      for (int j = 0; j < KEY_TILES; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float weight = ptx::ex2_approx_ftz_f32(exponent.of(s[i][j][e], shift[e / 2]));
          s[i][j][e] = weight;
          sum[i][e / 2] += weight;
        }
      }
    }
  }
};

}  // namespace attn::warp
