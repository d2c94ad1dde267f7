// Dropout of a warp's tile of weights.
//
// A call of the generator makes the words of four neighbouring keys of a row, of which a lane holds
// two (attn/fragment.cuh), and of two rows; so of two lanes that share four keys each draws for one
// of their rows, and they exchange the outcomes: one call for each four weights of a lane.
// Who executes: all lanes of a converged warp; no shared memory.
// The invariant: what is dropped is what attn/dropout.cuh says, whatever key the tile starts with.

#pragma once

#include "attn/dropout.cuh"
#include "attn/fragment.cuh"
#include "attn/hide.cuh"
#include "attn/unit.cuh"

namespace attn::warp {

static_assert(KEY_TILES <= 8, "four bits for each eight columns in one word");

// Bit 4 j + e of `kept[half]`: the weight of column e of eight columns j is kept. `first` is a
// multiple of four.
__device__ inline void draw_shared(u32 (&kept)[2], const Dropout& dropout, i32 sequence,
                                   const i32 (&position)[2], const i32 (&head)[2], i32 first) {
  const u32 lane = threadIdx.x % WARP;
  const bool is_odd = lane % 2 != 0;
  const i32 row = is_odd ? position[1] : position[0];
  const i32 row_head = is_odd ? head[1] : head[0];
  const i32 block = first / 4 + i32(lane % 4 / 2);
  u32 own = 0;
  // Each draw is a chain of ten products; several overlap.
#pragma unroll 4
  for (int j = 0; j < KEY_TILES; ++j) {
    const Words words = dropout.words(sequence, row_head, row, block + j * 2);
#pragma unroll
    for (int n = 0; n < 4; ++n) own |= u32(dropout.keeps(words.word[n])) << (j * 4 + n);
  }
  const u32 other = __shfl_xor_sync(~0u, own, 1);
  // The odd lane's columns are the last two of four.
  kept[0] = (is_odd ? other : own) >> (lane % 2 * 2);
  kept[1] = (is_odd ? own : other) >> (lane % 2 * 2);
}

// The same for any `first`: a lane's two keys may be of two fours.
__device__ inline void draw_alone(u32 (&kept)[2], const Dropout& dropout, i32 sequence,
                                  const i32 (&position)[2], const i32 (&head)[2], i32 first) {
  const i32 key = first + own_column();
  const u32 phase = u32(key) % 4;
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const i32 row = half == 0 ? position[0] : position[1];
    const i32 row_head = half == 0 ? head[0] : head[1];
    u32 bits = 0;
#pragma unroll 2
    for (int j = 0; j < KEY_TILES; ++j) {
      const i32 block = key / 4 + j * 2;
      const Words words = dropout.words(sequence, row_head, row, block);
      const u32 second = phase == 3 ? dropout.words(sequence, row_head, row, block + 1).word[0]
                                    : words.at(phase + 1);
      bits |= u32(dropout.keeps(words.at(phase))) << (j * 4);
      bits |= u32(dropout.keeps(second)) << (j * 4 + 1);
    }
    if (half == 0) {
      kept[0] = bits;
    } else {
      kept[1] = bits;
    }
  }
}

// Makes the dropped weights of the tile of keys that starts at `first` 0.
__device__ inline void drop(Scores& s, const Dropout& dropout, const ForwardParams& p,
                            const Unit& unit, i32 warp, i32 first) {
  using namespace config;
#pragma unroll
  for (int i = 0; i < ROW_TILES; ++i) {
    i32 position[2];
    i32 head[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i32 row = own_row(warp, i, half);
      position[half] = unit.position(p, row);
      head[half] = unit.head_of(p, row, position[half]);
    }
    u32 kept[2];
    if (first % 4 == 0) {
      draw_shared(kept, dropout, unit.sequence.index, position, head, first);
    } else {
      draw_alone(kept, dropout, unit.sequence.index, position, head, first);
    }
#pragma unroll
    for (int j = 0; j < KEY_TILES; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if ((kept[e / 2] >> (j * 4 + e % 2) & 1) == 0) s[i][j][e] = 0.0f;
      }
    }
  }
}

}  // namespace attn::warp
