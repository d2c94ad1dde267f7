// From the two products of a tile, S^T = K Q^T and dP^T = V dO^T, to weights and their gradients.
//
// Source: T. Dao, "FlashAttention-2", arXiv:2307.08691, algorithm 2: P = exp(S - L), dS = P o (dP -
// D); before a soft-cap c tanh(s / c) its derivative is 1 - tanh^2.
// Tensors: the maps of ForwardParams, dbias. Who executes: any lane, for the pairs that it holds:
// of a 16 x 8 part of the tile keys lane / 4 and that plus 8, query rows 2 (lane % 4) and the next.
// The invariant: a hidden pair weighs 0 and has no gradient, whatever its products; bias and masks
// are read for rows and keys of the sequence that the band lets meet, and for no other.

#pragma once

#include "attn/backward_unit.cuh"
#include "attn/tanh.cuh"
#include "base/config_backward.cuh"
#include "ptx/global.cuh"
#include "ptx/math.cuh"

namespace attn {

// A tile of query rows of one head against the block's tile of keys.
struct BackwardTile {
  i32 head;
  i32 first;     // row
  bool is_edge;  // band or length hide some pair of it
};

// What is made of one pair.
struct PairGradient {
  float weight;  // P, after dropout
  float d_s;     // the gradient of scale * q.k
};

// Whether the row and key of a pair meet, by band and length.
__device__ inline bool is_in_band(const BackwardUnit& unit, i32 row, i32 key) {
  return row < unit.sequence.q_len && key >= max_of(unit.band.lo(row), unit.lo) &&
         key < min_of(unit.band.hi(row), unit.hi);
}

// Whether the masks keep a pair that meets.
__device__ inline bool is_pair_kept(const ForwardParams& p, i32 sequence, i32 head, i32 row,
                                    i32 key) {
  if (p.mask.data != nullptr && pair_at<u8>(p.mask, sequence, head, row, key) == 0) return false;
  if (p.block_mask.data == nullptr) return true;
  return pair_at<u8>(p.block_mask, sequence, head, i32(p.block_q.divide(u32(row))),
                     i32(p.block_kv.divide(u32(key)))) != 0;
}

// The cell of the bias' gradient that a pair is added to.
__device__ inline float* bias_cell(const Pairs& dbias, i32 sequence, i32 head, i32 row, i32 key) {
  return static_cast<float*>(const_cast<void*>(dbias.data)) + sequence * dbias.sequence +
         head * dbias.head + row * dbias.row + key * dbias.key;
}

// A pair of the plain instance. `factor` is the scale in base 2.
__device__ inline PairGradient plain_pair(float s, float d_p, float lse2, float delta,
                                          float factor) {
  const float weight = ptx::ex2_approx_ftz_f32(__fmaf_rn(s, factor, -lse2));
  return {weight, weight * (d_p - delta)};
}

// A pair with every option; lse2 is natural (NATURAL). `kept`: what dropout multiplies the weight by
// on its way to the output.
__device__ inline PairGradient general_pair(const BackwardParams& p, const BackwardUnit& unit,
                                            i32 head, i32 row, i32 key, float s, float d_p,
                                            float lse, float delta, float kept) {
  const ForwardParams& call = p.call;
  const i32 sequence = unit.sequence.index;
  if (!is_in_band(unit, row, key) || !is_pair_kept(call, sequence, head, row, key)) return {};
  float score = s * call.scale;
  float gain = 1.0f;
  if (call.softcap > 0.0f) {
    const float t = tanh_of(score / call.softcap);
    score = call.softcap * t;
    gain = __fmaf_rn(-t, t, 1.0f);
  }
  if (call.bias.data != nullptr) score += pair_at<float>(call.bias, sequence, head, row, key);
  const float slope = per_head(call.alibi, 0, head, 0.0f);
  const i32 own = unit.band.position(row);
  score -= slope * static_cast<float>(own < key ? key - own : own - key);
  // Only the difference is of a size that exponents have.
  const float weight = ptx::ex2_approx_ftz_f32((score - lse) * LOG2E);
  const float d_z = weight * __fmaf_rn(kept, d_p, -delta);
  if (p.dbias.data != nullptr && !(p.flags & BIAS_LAST)) {
    ptx::red_global_add_f32(bias_cell(p.dbias, sequence, head, row, key), d_z);
  }
  return {weight * kept, d_z * gain};
}

// What a block mask says of a tile: whether it keeps any pair.
template <int BLOCK_M>
__device__ bool meets_blocks(const ForwardParams& p, const BackwardUnit& unit, i32 head, i32 tile) {
  const i32 row_end = i32(p.block_q.divide(u32(unit.bottom<BLOCK_M>(tile))));
  const i32 key_end = i32(p.block_kv.divide(u32(unit.hi - 1)));
  for (i32 row = i32(p.block_q.divide(u32(tile * BLOCK_M))); row <= row_end; ++row) {
    for (i32 key = i32(p.block_kv.divide(u32(unit.lo))); key <= key_end; ++key) {
      if (pair_at<u8>(p.block_mask, unit.sequence.index, head, row, key) != 0) return true;
    }
  }
  return false;
}

}  // namespace attn
