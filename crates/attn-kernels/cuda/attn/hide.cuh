// What becomes of scores between the product and the softmax: the band for every instance, and the
// options of the general one.
//
// Order: scale, soft-cap, bias and ALiBi, masks. A hidden score is -inf.
// Tensors: the maps of ForwardParams. Who executes: any lane, for the scores that it holds.
// The invariant: bias and masks are read for keys that the row may see by band and length, and for
// no other.

#pragma once

#include "attn/fragment.cuh"
#include "attn/tanh.cuh"
#include "attn/unit.cuh"
#include "ptx/math.cuh"

namespace attn::warp {

// Row `half` of row tile `i` of this lane, as a row of the block's tile.
__device__ inline i32 own_row(i32 warp, int i, int half) {
  return warp * 16 * config::ROW_TILES + i * 16 + half * 8 + i32(threadIdx.x) % WARP / 4;
}

// The lane's first column of a tile of eight.
__device__ inline i32 own_column() { return i32(threadIdx.x) % 4 * 2; }

// Hides what band, part and length hide in the tile of keys that starts at `first`.
__device__ inline void hide_outside(Scores& s, const ForwardParams& p, const Unit& unit, i32 warp,
                                    i32 first) {
  using namespace config;
#pragma unroll
  for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Keys keys = unit.keys_at(unit.position(p, own_row(warp, i, half)));
      const i32 lo = keys.lo - first - own_column();
      const i32 hi = keys.hi - first - own_column();
#pragma unroll
      for (int j = 0; j < KEY_TILES; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const i32 key = j * 8 + e;
          if (key < lo || key >= hi) s[i][j][half * 2 + e] = NEG_INF;
        }
      }
    }
  }
}

// Makes products natural scores: scale and soft-cap.
__device__ inline void scale_scores(Scores& s, const ForwardParams& p, float scale) {
  using namespace config;
  const bool is_capped = p.softcap > 0.0f;
  const float factor = is_capped ? scale / p.softcap : scale;
#pragma unroll
  for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
    for (int j = 0; j < KEY_TILES; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[i][j][e] *= factor;
    }
  }
  if (!is_capped) return;
#pragma unroll
  for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
    for (int j = 0; j < KEY_TILES; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[i][j][e] = p.softcap * tanh_of(s[i][j][e]);
    }
  }
}

// Adds bias and ALiBi to natural scores, and hides what masks and band hide. `is_cut`: some key of
// the tile is outside some row's block mask.
__device__ inline void apply_options(Scores& s, const ForwardParams& p, const Unit& unit, i32 warp,
                                     i32 first, bool is_cut) {
  using namespace config;
  const i32 sequence = unit.sequence.index;
#pragma unroll
  for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i32 row = own_row(warp, i, half);
      const i32 position = unit.position(p, row);
      const i32 head = unit.head_of(p, row, position);
      const bool is_row = position < unit.sequence.q_len;
      const Keys keys = unit.keys_at(position);
      const i32 lo = is_row ? keys.lo : 0;
      const i32 hi = is_row ? keys.hi : 0;
      const float slope = is_row ? per_head(p.alibi, 0, head, 0.0f) : 0.0f;
      const i32 own = unit.band.position(position);
      const float* bias = static_cast<const float*>(p.bias.data);
      const u8* mask = static_cast<const u8*>(p.mask.data);
      const u8* blocks = is_cut ? static_cast<const u8*>(p.block_mask.data) : nullptr;
      if (bias) bias += sequence * p.bias.sequence + head * p.bias.head + position * p.bias.row;
      if (mask) mask += sequence * p.mask.sequence + head * p.mask.head + position * p.mask.row;
      if (blocks) {
        blocks += sequence * p.block_mask.sequence + head * p.block_mask.head +
                  i64(p.block_q.divide(u32(position))) * p.block_mask.row;
      }
#pragma unroll
      for (int j = 0; j < KEY_TILES; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = s[i][j][half * 2 + e];
          const i32 key = first + own_column() + j * 8 + e;
          bool is_seen = key >= lo && key < hi;
          if (is_seen) {
            if (bias) score += bias[key * p.bias.key];
            score -= slope * static_cast<float>(own < key ? key - own : own - key);
            if (mask) is_seen = mask[key * p.mask.key] != 0;
            if (blocks && is_seen) {
              is_seen = blocks[i64(p.block_kv.divide(u32(key))) * p.block_mask.key] != 0;
            }
          }
          if (!is_seen) score = NEG_INF;
        }
      }
    }
  }
}

}  // namespace attn::warp
