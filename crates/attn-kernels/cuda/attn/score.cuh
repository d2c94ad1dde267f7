// The score of one (row, key) pair from its product q.k, with every option, as the definition has
// it.
//
// Source: s = scale * q.k; s = softcap * tanh(s / softcap); s += bias - alibi * |p - j|, p = i +
// kv_len - q_len; then the masks. Tensors: the maps of ForwardParams.
// Who executes: any thread, alone. Scores are natural-log weights: this is the plain form that the
// naive kernel takes; the tiled ones fold constants (attn/hide.cuh).
// What it does not do: the band, which the caller's range of keys already is.

#pragma once

#include "attn/band.cuh"
#include "attn/locate.cuh"
#include "base/params.cuh"
#include "base/types.cuh"

namespace attn {

// One query row of one head.
struct ScoreRow {
  i32 sequence;
  i32 head;
  i32 row;
  i32 position;  // among the keys
  float scale;   // of q.k, the scale of stored keys included
};

// Whether the mask and the block mask keep a pair.
__device__ inline bool is_kept(const ForwardParams& p, const ScoreRow& r, i32 key) {
  if (p.mask.data != nullptr && pair_at<u8>(p.mask, r.sequence, r.head, r.row, key) == 0) {
    return false;
  }
  if (p.block_mask.data == nullptr) return true;
  const i32 block_row = static_cast<i32>(p.block_q.divide(r.row));
  const i32 block_key = static_cast<i32>(p.block_kv.divide(key));
  return pair_at<u8>(p.block_mask, r.sequence, r.head, block_row, block_key) != 0;
}

// -inf for a hidden key, whatever its product; NaN in a visible one stays.
__device__ inline float score(const ForwardParams& p, const ScoreRow& r, i32 key, float product) {
  if (!is_kept(p, r, key)) return NEG_INF;
  float s = r.scale * product;
  if (p.softcap > 0.0f) s = p.softcap * tanhf(s / p.softcap);
  if (p.bias.data != nullptr) s += pair_at<float>(p.bias, r.sequence, r.head, r.row, key);
  if (p.alibi.data != nullptr) {
    const float slope = per_head(p.alibi, r.sequence, r.head, 0.0f);
    s -= slope * static_cast<float>(abs(r.position - key));
  }
  return s;
}

}  // namespace attn
