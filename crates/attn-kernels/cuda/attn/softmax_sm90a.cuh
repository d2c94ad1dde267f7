// What a lane of a Hopper consumer makes of the scores of a tile: options and masks, maxima,
// exponentials, weights.
//
// Source: M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867,
// algorithm 3.
// Registers: scores [BLOCK_N / 2] in f32, weights in pairs or, of fp8, in fours. Lane l of warp w
// has rows 16 w + l / 4 and 8 more; of every eight columns, 2 (l % 4) and the next.
// Who executes: all lanes of a warp, converged.
// The invariant: what is hidden is -inf and decides nothing; the sum is of weights as they are, not
// as they are rounded.

#pragma once

#include "attn/exponent.cuh"
#include "attn/options_sm90a.cuh"
#include "attn/row_sm90a.cuh"
#include "attn/unit.cuh"
#include "attn/write_sm90a.cuh"
#include "ptx/half.cuh"
#include "ptx/math.cuh"
#include "ptx/opaque.cuh"

namespace attn {

// Factor of the products of a unit's queries and keys.
__device__ inline float score_scale(const ForwardParams& p, const Unit& unit) {
  if constexpr (!config::IS_FP8) return p.scale;
  const i32 sequence = unit.sequence.index;
  return p.scale * (per_head(p.q_scale, sequence, unit.kv_head, 1.0f) *
                    per_head(p.k_scale, sequence, unit.kv_head, 1.0f));
}

__device__ inline Exponent exponent_of(float scale) {
  return {config::IS_GENERAL || config::IS_CAPPED ? Units{1.0f, LOG2E}
                                                  : Units{scale, scale * LOG2E}};
}

// What a row's output so far must be multiplied by, and whether that of any row of the warp must.
struct Correction {
  bool is_any;
  float factor;
};

// Of the two rows of a lane.
struct Corrections {
  Correction of[2];
};

struct Softmax {
  static constexpr int SCORES = config::BLOCK_N / 2;
  // Partial maxima of a row; three consumers of fp8 have no registers for more.
  static constexpr int TOPS = config::IS_FP8 && config::CONSUMERS == 3 ? 2 : 4;

  const ForwardParams& p;
  // Of the present unit; 16 bits have the same for all.
  Exponent exponent;
  const float slack;  // how far a maximum may stay behind

  // Under a soft-cap: the scores are products still, which the exponent caps by CapLine.
  bool is_near = false;
  float scores[SCORES];
  u32 weights[SCORES * config::ELEMENT_BYTES / 4];
  float max[2];
  float shift[2];  // of the exponents, by the maximum
  float sum[2];
  bool is_far[2];  // fp8: whether any row of the warp is (Exponent::is_far)

  __device__ explicit Softmax(const ForwardParams& params)
      : p(params),
        exponent(exponent_of(params.scale)),
        slack(config::LATE_EXPONENT == 0.0f ? 0.0f : config::LATE_EXPONENT / exponent.units.base2) {
  }

  // Takes over the scales of a unit.
  __device__ void scale_of(const Unit& unit) {
    if constexpr (config::IS_FP8) exponent = exponent_of(score_scale(p, unit));
  }

  // The lane's first flat row; the other one is 8 below.
  __device__ i32 flat_row(const Unit& unit) const {
    const u32 thread = ptx::opaque(threadIdx.x) - u32(config::WARPGROUP);
    return unit.first + i32(thread / WARP * WARP_ROWS + thread % WARP / 4);
  }

  // Does to the scores of the tile of keys that starts at `first` what options, masks, band and
  // length want. `all`: the keys that all of the consumer's rows see. `is_cut`: the block mask
  // hides some of the tile.
  __device__ void settle(const Unit& unit, Keys all, i32 first, bool is_cut) {
    const bool is_clear = first >= all.lo && first + config::BLOCK_N <= all.hi;
    // What is hidden must not decide how the rest is computed.
    const bool is_own =
        is_clear && !is_cut && flat_rows(p, unit.bottom - unit.top + 1) == config::BLOCK_M;
    if constexpr (config::IS_CAPPED) {
      // Weights of fp8 have no room below a bound.
      constexpr bool MAY_LEAVE = !config::IS_FP8;
      is_near = cap_scores<MAY_LEAVE>(score_scale(p, unit), p.softcap, is_own, scores);
    }
    if constexpr (config::IS_GENERAL) {
      scale_scores(score_scale(p, unit), p.softcap, is_own, scores);
      if (p.alibi.data != nullptr || p.bias.data != nullptr || p.mask.data != nullptr) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          apply_options(p, unit, row_of(p, unit, flat_row(unit) + half * 8), first,
                        i32(threadIdx.x % 4 * 2), half, scores);
        }
      }
    }
    if constexpr (config::IS_BLOCKED) {
      if (is_cut) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          hide_blocks(p, unit, row_of(p, unit, flat_row(unit) + half * 8), first,
                      i32(threadIdx.x % 4 * 2), half, scores);
        }
      }
    }
    if (is_clear) return;
    const i32 start = first + i32(threadIdx.x % 4 * 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Keys seen = unit.keys_at(row_of(p, unit, flat_row(unit) + half * 8).position);
      const i32 lo = own_keys(seen.lo - start);
      const i32 hi = own_keys(seen.hi - start);
#pragma unroll
      for (int word = 0; word < SCORES / 2; word += 32) {
        const u32 bits = low_bits(hi - word) & ~low_bits(lo - word);
#pragma unroll
        for (int i = 0; i < 32 && word + i < SCORES / 2; ++i) {
          float& score = scores[(word + i) / 2 * 4 + half * 2 + i % 2];
          score = bits & 1u << i ? score : NEG_INF;
        }
      }
    }
  }

  // How many of a lane's keys in a row are among the first `keys` ones from its first key on: it
  // has two of every eight.
  __device__ static i32 own_keys(i32 keys) { return (keys >> 3) * 2 + min_of(keys & 7, 2); }

  __device__ static u32 low_bits(i32 count) {
    return count >= 32 ? ~0u : (1u << max_of(count, 0)) - 1;
  }

  // A bound that serves in place of a maximum, whatever the scores are: weights of the lowest are
  // e^-10 then, and f16 still has ten bits of them.
  static constexpr float MOST_BOUND = 5.0f;

  // The largest score of one of the lane's two rows, or a bound that serves as well.
  __device__ float top_of(int half) const {
    if constexpr (config::IS_CAPPED) {
      const float bound = p.softcap * TANH_NEAREST;
      if (is_near && bound <= MOST_BOUND) return bound;
    }
    // TOPS at a time: one after the other would wait for each.
    float tops[TOPS];
#pragma unroll
    for (int j = 0; j < SCORES / 2; ++j) {
      const float score = scores[j / 2 * 4 + half * 2 + j % 2];
      tops[j % TOPS] = j < TOPS ? score : fmaxf(tops[j % TOPS], score);
    }
    float top = tops[0];
#pragma unroll
    for (int j = 1; j < TOPS; ++j) top = fmaxf(top, tops[j]);
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    if constexpr (config::IS_CAPPED) {
      // The cap keeps the order.
      if (is_near) top *= line(1.0f).at(top);
    }
    return top;
  }

  __device__ CapLine line(float unit) const { return {p.scale, p.scale / p.softcap, unit}; }

  // Takes over a maximum of a row.
  __device__ void shift_by(int half, float top) {
    max[half] = top;
    shift[half] = exponent.shift(top);
    if constexpr (config::IS_FP8) is_far[half] = __any_sync(~0u, exponent.is_far(shift[half]));
  }

  // The first tile of a row.
  __device__ void start_row(int half) {
    sum[half] = 0.0f;
    shift_by(half, top_of(half));
  }

  // A later tile of a row. Of 16 bits most leave all maxima of a warp as they are, and one vote
  // says so. Of fp8 one in three does not, and to compute what stays as it is takes less time than
  // to wait for the vote.
  __device__ Correction raise(int half) {
    const float top = top_of(half);
    const float before = max[half];
    const bool grows = top > before + slack;
    if constexpr (!config::IS_FP8) {
      if (!__any_sync(~0u, grows)) return {false, 1.0f};
    }
    shift_by(half, grows ? top : before);
    const float factor = ptx::ex2_approx_ftz_f32(exponent.is_far(shift[half])
                                                     ? (before - max[half]) * exponent.units.base2
                                                     : exponent.of_max(before, shift[half]));
    sum[half] *= factor;
    return {config::IS_FP8 ? __any_sync(~0u, grows) != 0 : true, factor};
  }

  // Makes the scores of a row relative to its maximum, where the exponents' shift would be too
  // coarse; the answer is the shift that is left. Rows that are near stay bit by bit what they are:
  // others of the warp, which may belong to no sequence, must not decide how they are computed.
  __device__ float come_near(int half) {
    const bool is_far_row = exponent.is_far(shift[half]);
    const float near = is_far_row ? max[half] : 0.0f;
#pragma unroll
    for (int j = 0; j < SCORES / 2; ++j) scores[j / 2 * 4 + half * 2 + j % 2] -= near;
    return is_far_row ? -config::WEIGHT_EXPONENT : shift[half];
  }

  __device__ void weigh_row(int half) {
    if (config::IS_CAPPED && !config::IS_FP8 && is_near) {
      const CapLine exponents = line(LOG2E);
#pragma unroll
      for (int j = 0; j < SCORES / 2; ++j) {
        float& score = scores[j / 2 * 4 + half * 2 + j % 2];
        score = ptx::ex2_approx_ftz_f32(__fmaf_rn(score, exponents.at(score), -shift[half]));
        sum[half] += score;
      }
      return;
    }
    const float own = config::IS_FP8 && is_far[half] ? come_near(half) : shift[half];
#pragma unroll
    for (int j = 0; j < SCORES / 2; ++j) {
      float& score = scores[j / 2 * 4 + half * 2 + j % 2];
      score = ptx::ex2_approx_ftz_f32(exponent.of(score, own));
      sum[half] += score;
    }
  }

  __device__ void round_weights() {
    if constexpr (config::IS_FP8) {
      // Of sixteen keys: a lane's first two and the two 8 keys on, for either row
      // (attn/transpose_sm90a.cuh).
#pragma unroll
      for (int j = 0; j < SCORES / 8; ++j) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* own = scores + j * 8 + half * 2;
          weights[j * 2 + half] =
              u32(ptx::cvt_rn_satfinite_e4m3x2_f32<__CUDA_ARCH__>(own[0], own[1])) |
              u32(ptx::cvt_rn_satfinite_e4m3x2_f32<__CUDA_ARCH__>(own[4], own[5])) << 16;
        }
      }
    } else {
#pragma unroll
      for (int j = 0; j < SCORES / 2; ++j)
        weights[j] = round_pair(scores[j * 2], scores[j * 2 + 1]);
    }
  }
};

}  // namespace attn
