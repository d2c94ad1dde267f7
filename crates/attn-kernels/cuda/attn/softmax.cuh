// The online softmax of a warp's rows.
//
// Source: M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867,
// algorithm 3; T. Dao et al., "FlashAttention", arXiv:2205.14135, algorithm 1, with the division
// moved behind the last tile.
// Who executes: all lanes of a converged warp; no shared memory.
// The invariant: weights are exp2(score * factor - round(max * factor)), under one rounding of the
// product for all of them. Scores stay as they are; the factor that makes them base-2 logarithms,
// which is positive, joins the exponent's multiply-add. A row that has seen no key has the maximum
// -inf, and 0 takes its place in the exponent: exp2(-inf - 0) is 0, where -inf - -inf would be NaN.

#pragma once

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
  __device__ void push(Scores& s, Accumulator& o, float factor) {
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
        shift[half] = now == NEG_INF ? 0.0f : now * factor;
        // The product is rounded as it was when it shifted the weights so far. A fused one would
        // move them by what the rounding moved, once more with every tile in which another row's
        // maximum grows.
        correction[half] = ptx::ex2_approx_ftz_f32(__fmul_rn(before, factor) - shift[half]);
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
          const float weight =
              ptx::ex2_approx_ftz_f32(__fmaf_rn(s[i][j][e], factor, -shift[e / 2]));
          s[i][j][e] = weight;
          sum[i][e / 2] += weight;
        }
      }
    }
  }
};

}  // namespace attn::warp

namespace attn {

// A row's share of the output: what its sum of weighted values is multiplied by, and its LSE.
struct RowResult {
  float factor;
  float lse;
};

// Ends a row whose largest score is `max` and whose denominator, relative to exp2(round(max *
// factor)), is `sum`. `scale` turns scores into natural logarithms and `factor` into base 2; `sink`
// is a natural score, -inf for none.
//
// The LSE is max * scale plus what is small beside it. max * factor would carry three roundings of
// a large number; what its rounding moved in the exponents is taken back exactly.
__device__ inline RowResult finish_row(float max, float sum, float scale, float factor,
                                       float sink) {
  if (max == NEG_INF) {
    // No key was seen: NaN scores leave no maximum but a NaN sum.
    return {sum == sum ? 0.0f : sum, sum == sum ? sink : sum};
  }
  const float moved = __fmaf_rn(max, factor, -(max * factor));
  const float own = __fmaf_rn(max, scale, LN2 * (ptx::lg2_approx_f32(sum) - moved));
  if (sink == NEG_INF) return {1.0f / sum, own};
  const float top = fmaxf(own, sink);
  const float share = ptx::ex2_approx_ftz_f32((own - top) * LOG2E);
  const float total = share + ptx::ex2_approx_ftz_f32((sink - top) * LOG2E);
  return {share / (total * sum), __fmaf_rn(LN2, ptx::lg2_approx_f32(total), top)};
}

// The score of a head's sink, where this unit is the one to count it.
__device__ inline float sink_of(const ForwardParams& p, const Unit& unit, i32 head) {
  return unit.parts > 1 || p.sinks.data == nullptr ? NEG_INF : per_head(p.sinks, 0, head, NEG_INF);
}

}  // namespace attn
