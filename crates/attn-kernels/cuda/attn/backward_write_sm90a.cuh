// What a Hopper backward consumer ends with: gradients of its keys or values, written by way of
// shared memory.
//
// A warp lays a panel of its 16 rows down, eight lanes take a row of it up, and write whole lines;
// as attn/write_sm90a.cuh does with output.
// Shared memory: 16 rows of 128 bytes a warp. Who executes: all lanes of a warp, converged.

#pragma once

#include "attn/backward_weigh_sm90a.cuh"
#include "ptx/global.cuh"
#include "ptx/opaque.cuh"

namespace attn {

constexpr i32 WARP_KEYS = 16;

// Writes columns `column` .. `dim` of the warp's keys, as many as it has sums, of which `key` is
// the first in the sequence: sums times `factor`, 0 past the sequence's length, nothing past
// `stored`. `panel`: the warp's own.
template <int SUMS_OF_ROW>
__device__ void write_keys(const Rows& to, const KeyTile& keys, i32 key, i32 column, i32 dim,
                           float factor, u32 panel, float (&sums)[SUMS_OF_ROW]) {
  const u32 lane = ptx::opaque(threadIdx.x % WARP);
  const i32 own = key + i32(lane / 4);
  const u32 down = panel + lane % WARP_KEYS * tile::PANEL_ROW_BYTES + ((lane / 16 ^ lane % 8) << 4);
  const u32 up = panel + lane / 8 * tile::PANEL_ROW_BYTES + ((lane / 8 ^ lane % 8) << 4);
  const i32 line = key + i32(lane / 8);
  u16* const lines =
      static_cast<u16*>(to.data) + column + lane % 8 * 8 +
      row_offset(to, keys.sequence.index, keys.sequence.kv_first + line, keys.kv_head);
  const bool is_key[2] = {own < keys.sequence.kv_len, own + 8 < keys.sequence.kv_len};
#pragma unroll
  for (int part = 0; part < SUMS_OF_ROW / 32; ++part) {
    __syncwarp();
#pragma unroll
    for (int piece = 0; piece < 8; piece += 2) {
      u32 pairs[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int at = part * 32 + (piece + m / 2) * 4 + m % 2 * 2;
        pairs[m] = is_key[m % 2] ? round_pair(sums[at] * factor, sums[at + 1] * factor) : 0;
      }
      ptx::stmatrix_x4(down ^ u32(piece) << 4, pairs);
    }
    __syncwarp();
    if (column + part * 64 + i32(lane % 8 * 8) >= dim) continue;
#pragma unroll
    for (int i = 0; i < WARP_KEYS / 4; ++i) {
      const Vec16 vector =
          ptx::ld_shared_v4_b32((up ^ u32(i % 2 * 4) << 4) + u32(i * 4) * tile::PANEL_ROW_BYTES);
      if (line + i * 4 < keys.stored) {
        ptx::st_global_v4_b32(lines + part * 64 + i * 4 * to.row, vector);
      }
    }
  }
}

}  // namespace attn
