// What a lane of a Hopper backward consumer makes of the scores of a tile and of their gradients.
//
// Source: T. Dao, "FlashAttention-2", arXiv:2307.08691, algorithm 2, lines 11 to 14: P = exp(S -
// L), dS = P (dP - D); of a soft-cap c, S = c tanh(x / c), whose slope is 1 - tanh(x / c)^2.
// Registers: scores and their gradients transposed, [64 keys, SCORE_ROWS rows] over a
// warpgroup in
// f32. Lane l of warp w has keys 16 w + l / 4 and 8 more; of every eight rows, 2 (l % 4) and the
// next. In pairs of rows they are what a product takes as its first operand.
// Who executes: all lanes of a warp, converged.
// The invariant: what is hidden has the weight 0, whatever its score; a row past the sequence has a
// log-sum-exp of +inf.

#pragma once

#include "attn/backward_tile_sm90a.cuh"
#include "attn/tanh.cuh"
#include "ptx/half.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/opaque.cuh"
#include "ptx/shared.cuh"

namespace attn {

constexpr int SCORES = config::SCORE_ROWS / 2;
// Words of pairs of 16 bits.
constexpr int PAIRS = SCORES / 2;

// Whether gradients of scores are made of weights as they were rounded, which leaves the others'
// registers to the next tile's scores. The slope of a soft-cap needs these; wide rows have them.
constexpr bool HAS_PAIRS = !config::IS_WIDE && !config::IS_CAPPED;

__device__ inline u32 round_pair(float lo, float hi) {
  return config::DTYPE == DType::bf16 ? ptx::cvt_rn_bf16x2_f32(lo, hi)
                                      : ptx::cvt_rn_f16x2_f32(lo, hi);
}

__device__ inline void unpack(u32 pair, float& lo, float& hi) {
  if constexpr (config::DTYPE == DType::bf16) {
    lo = __uint_as_float(pair << 16);
    hi = __uint_as_float(pair & 0xFFFF0000u);
  } else {
    lo = ptx::cvt_f32_f16(u16(pair));
    hi = ptx::cvt_f32_f16(u16(pair >> 16));
  }
}

// How many of a lane's rows are among the first `rows` ones from its first row on: it has two of
// every eight.
__device__ inline i32 own_rows(i32 rows) { return (rows >> 3) * 2 + min_of(rows & 7, 2); }

__device__ inline u32 low_bits(i32 count) {
  return count >= 32 ? ~0u : (1u << max_of(count, 0)) - 1;
}

// The lane's rows that see its keys, of which `key` is the first; a bit a row, in their order.
struct Seen {
  u32 bits[2];

  // All of them.
  __device__ Seen() : bits{~0u, ~0u} {}
  // `row`: the first one of the tile.
  __device__ Seen(const KeyTile& keys, i32 key, i32 row) {
    static_assert(SCORES / 2 <= 32);
    const i32 first = row + i32(ptx::opaque(threadIdx.x) % 4 * 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Keys rows = keys.rows_of(key + half * 8);
      bits[half] = low_bits(own_rows(rows.hi - first)) & ~low_bits(own_rows(rows.lo - first));
    }
  }

  __device__ bool has(i32 half, i32 row) const { return bits[half] & 1u << row; }
};

// Weights of scores, in place. `lse2`: of the tile's rows. IS_CUT: some pairs are hidden.
template <bool IS_CUT>
__device__ void weigh(const ForwardParams& call, const Seen& seen, u32 lse2,
                      float (&scores)[SCORES]) {
  const u32 own = lse2 + ptx::opaque(threadIdx.x) % 4 * 8;
  const float factor =
      config::IS_CAPPED ? call.scale * ptx::rcp_approx_ftz_f32(call.softcap) : 0.0f;
  const float unit = config::IS_CAPPED ? call.softcap : call.scale * LOG2E;
#pragma unroll
  for (int j = 0; j < SCORES / 4; ++j) {
    float shift[2];
    ptx::ld_shared_v2_f32(shift, own + j * 32);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float* const pair = scores + j * 4 + half * 2;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float x = pair[e];
        if constexpr (config::IS_CAPPED) {
          // One after the other: many at once have no registers.
          x = tanh_of(__uint_as_float(ptx::opaque(__float_as_uint(x))) * factor);
        }
        // With a cap the log-sum-exp is natural, as NATURAL has it.
        x = config::IS_CAPPED ? (x * unit - shift[e]) * LOG2E : __fmaf_rn(x, unit, -shift[e]);
        x = ptx::ex2_approx_ftz_f32(x);
        pair[e] = !IS_CUT || seen.has(half, j * 2 + e) ? x : 0.0f;
      }
    }
  }
}

// Makes weights 0 that are hidden.
__device__ inline void hide(const Seen& seen, u32 (&weights)[PAIRS]) {
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    const i32 row = i / 2 * 2;
    weights[i] &= (seen.has(i % 2, row) ? 0xFFFFu : 0) | (seen.has(i % 2, row + 1) ? ~0xFFFFu : 0);
  }
}

// The slope of the soft-cap at a score, from its weight exp(score - lse): a logarithm more is
// cheaper than registers that keep it. Of a weight of 0 it is any finite number.
__device__ inline float cap_slope(float weight, float lse, float per_unit) {
  const float tanh = __fmaf_rn(ptx::lg2_approx_f32(weight), LN2, lse) * per_unit;
  return fmaxf(__fmaf_rn(-tanh, tanh, 1.0f), 0.0f);
}

// Where a lane lays rows of pairs down: in a panel of 64 keys, at the warp's own 16, from the row
// that `panel` starts with.
__device__ inline u32 laid_rows(u32 panel) {
  const u32 thread = ptx::opaque(threadIdx.x);
  const u32 lane = thread % WARP;
  // Matrix m of four is of keys 8 (m % 2) .. and of rows 8 (m / 2) ..; a lane has the address of
  // one of its rows.
  const u32 chunk = thread / WARP % 4 * 2 + lane / 8 % 2;
  return panel + (lane / 16 * 8 + lane % 8) * tile::PANEL_ROW_BYTES + ((chunk ^ lane % 8) << 4);
}

// Makes pairs of weights, and of the gradients of scores, which it lays down as rows. `lse2`,
// `delta`: of the tile's rows.
__device__ inline void differentiate(const ForwardParams& call, u32 lse2, u32 delta, u32 panel,
                                     const float (&scores)[SCORES], const float (&slopes)[SCORES],
                                     u32 (&weights)[PAIRS]) {
  const u32 column = ptx::opaque(threadIdx.x) % 4 * 8;
  const u32 own = delta + column;
  const u32 own_lse2 = lse2 + column;
  const float per_unit = config::IS_CAPPED ? ptx::rcp_approx_ftz_f32(call.softcap) : 0.0f;
  const u32 down = laid_rows(panel);
#pragma unroll
  for (int step = 0; step < PAIRS / 4; ++step) {
    u32 changes[4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float sum[2];
      ptx::ld_shared_v2_f32(sum, own + (step * 2 + j) * 32);
      float shift[2];
      if constexpr (config::IS_CAPPED) {
        ptx::ld_shared_v2_f32(shift, own_lse2 + (step * 2 + j) * 32);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int word = step * 4 + j * 2 + half;
        float x = scores[word * 2];
        float y = scores[word * 2 + 1];
        if constexpr (HAS_PAIRS) {
          unpack(weights[word], x, y);
        } else {
          weights[word] = round_pair(x, y);
        }
        if constexpr (config::IS_CAPPED) {
          x *= cap_slope(x, shift[0], per_unit);
          y *= cap_slope(y, shift[1], per_unit);
        }
        changes[j * 2 + half] =
            round_pair(x * (slopes[word * 2] - sum[0]), y * (slopes[word * 2 + 1] - sum[1]));
      }
    }
    ptx::stmatrix_x4_trans(down + step * 16 * tile::PANEL_ROW_BYTES, changes);
  }
}

// Lays pairs of weights down as rows.
__device__ inline void lay_down(u32 panel, const u32 (&weights)[PAIRS]) {
  const u32 down = laid_rows(panel);
#pragma unroll
  for (int step = 0; step < PAIRS / 4; ++step) {
    const u32 four[4] = {weights[step * 4], weights[step * 4 + 1], weights[step * 4 + 2],
                         weights[step * 4 + 3]};
    ptx::stmatrix_x4_trans(down + step * 16 * tile::PANEL_ROW_BYTES, four);
  }
}

}  // namespace attn
