// What options make of the scores of a Hopper consumer: soft-cap, bias, ALiBi and the boolean mask.
//
// Order: scale, soft-cap, bias and ALiBi, masks. Scores become natural; a hidden one is -inf. The
// band is the caller's.
// Tensors: the maps of ForwardParams. Who executes: all warps of a consumer, converged.
// The invariant: bias and mask are read for keys that the row may see by band and length, and for
// no other.

#pragma once

#include "attn/row_sm90a.cuh"
#include "attn/tanh.cuh"
#include "attn/unit.cuh"
#include "base/config_sm90a.cuh"

namespace attn {

// softcap tanh(scale s / softcap) / s as a series of s^2, with scale and cap in its coefficients.
template <int TERMS>
struct CapSeries {
  float coefficient[TERMS];

  __device__ CapSeries(float scale, float square) {
    float power = scale;
#pragma unroll
    for (int i = 0; i < TERMS; ++i) {
      coefficient[i] = TANH_SERIES[i] * power;
      power *= square;
    }
  }

  __device__ float at(float square) const {
    float sum = coefficient[TERMS - 1];
#pragma unroll
    for (int i = TERMS - 2; i >= 0; --i) sum = __fmaf_rn(sum, square, coefficient[i]);
    return sum;
  }
};

// Below this tanh x / x is a line in x^2 within 1.7e-6, the least there is.
constexpr float TANH_NEAREST = 0.1f;

// softcap tanh(scale s / softcap) / s of a product s that is far below the cap, times `unit`.
struct CapLine {
  float one;
  float square;

  __device__ CapLine(float scale, float factor, float unit)
      // The square of a large factor, whose scores are all 0 here, must not be infinite.
      : one(0.99999834f * scale * unit),
        square(-0.3320053f * scale * fminf(factor * factor, 1e30f) * unit) {}

  __device__ float at(float s) const { return __fmaf_rn(square, s * s, one); }
};

// Makes products natural scores under a soft-cap. Where all of the warp's are near enough for
// CapLine it may leave them and answer true, so that the line can be part of the exponent.
//
// Scores far below the cap, which most are, need no special function, of which the softmax has
// enough. `is_own`: all of the tile belongs to visible pairs, so that looking at it cannot let
// anything else change a bit.
template <bool MAY_LEAVE, int SCORES>
__device__ bool cap_scores(float scale, float softcap, bool is_own, float (&scores)[SCORES]) {
  const float factor = scale / softcap;
  // Four at a time: one after the other would wait for each.
  float tops[4] = {};
#pragma unroll
  for (int j = 0; j < SCORES; ++j) tops[j % 4] = fmaxf(tops[j % 4], fabsf(scores[j]));
  float largest = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
  largest = is_own ? largest * fabsf(factor) : 1.0f;
  if (__all_sync(~0u, largest < TANH_NEAREST)) {
    if (MAY_LEAVE) return true;
    const CapLine line(scale, factor, 1.0f);
#pragma unroll
    for (int j = 0; j < SCORES; ++j) scores[j] *= line.at(scores[j]);
  } else if (__all_sync(~0u, largest < TANH_NEAR)) {
    const CapSeries<TANH_TERMS> series(scale, factor * factor);
#pragma unroll
    for (int j = 0; j < SCORES; ++j) scores[j] *= series.at(scores[j] * scores[j]);
  } else {
#pragma unroll
    for (int j = 0; j < SCORES; ++j) scores[j] = softcap * tanh_of(scores[j] * factor);
  }
  return false;
}

// Makes products natural scores.
template <int SCORES>
__device__ void scale_scores(float scale, float softcap, bool is_own, float (&scores)[SCORES]) {
  if (softcap > 0.0f) {
    cap_scores<false>(scale, softcap, is_own, scores);
    return;
  }
#pragma unroll
  for (int j = 0; j < SCORES; ++j) scores[j] *= scale;
}

// Adds bias and ALiBi to the natural scores of a row, and hides what the boolean mask hides. The
// lane has columns `column` and the next of every eight keys from `first` on; `half` says which of
// its two rows this is.
template <int SCORES>
__device__ void apply_options(const ForwardParams& p, const Unit& unit, const Row& row, i32 first,
                              i32 column, int half, float (&scores)[SCORES]) {
  const i32 position = row.position;
  if (position >= unit.sequence.q_len) return;
  const Keys seen = unit.keys_at(position);
  const i32 sequence = unit.sequence.index;
  const i32 head = row.head;
  const i32 own = unit.band.position(position);
  const float slope = per_head(p.alibi, 0, head, 0.0f);
  const float* bias = static_cast<const float*>(p.bias.data);
  const u8* mask = static_cast<const u8*>(p.mask.data);
  if (bias) bias += sequence * p.bias.sequence + head * p.bias.head + position * p.bias.row;
  if (mask) mask += sequence * p.mask.sequence + head * p.mask.head + position * p.mask.row;
#pragma unroll
  for (int j = 0; j < SCORES / 4; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float& score = scores[j * 4 + half * 2 + e];
      const i32 key = first + column + j * 8 + e;
      if (key < seen.lo || key >= seen.hi) continue;
      if (bias) score += bias[key * p.bias.key];
      score -= slope * static_cast<float>(own < key ? key - own : own - key);
      if (mask && mask[key * p.mask.key] == 0) score = NEG_INF;
    }
  }
}

// Hides what the block mask hides of a row; arguments as above.
template <int SCORES>
__device__ void hide_blocks(const ForwardParams& p, const Unit& unit, const Row& row, i32 first,
                            i32 column, int half, float (&scores)[SCORES]) {
  const i32 position = row.position;
  if (position >= unit.sequence.q_len) return;
  const Keys seen = unit.keys_at(position);
  const Pairs& map = p.block_mask;
  const u8* blocks = static_cast<const u8*>(map.data) + unit.sequence.index * map.sequence +
                     row.head * map.head + i64(p.block_q.divide(u32(position))) * map.row;
#pragma unroll
  for (int j = 0; j < SCORES / 4; ++j) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const i32 key = first + column + j * 8 + e;
      if (key < seen.lo || key >= seen.hi) continue;
      if (blocks[i64(p.block_kv.divide(u32(key))) * map.key] == 0) {
        scores[j * 4 + half * 2 + e] = NEG_INF;
      }
    }
  }
}

}  // namespace attn
