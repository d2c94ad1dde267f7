// Which tiles of keys a block visits under a block mask: two bits a tile, made once from the mask.
//
// Bit t of `seen`: some row of the block's tile may see some key of tile t by the block mask; bit t
// of `whole`: all rows see all of it. Tiles past the capacity count as seen and not whole, which
// costs time and never a result.
// Who executes: `fill` every thread of the block, then a barrier; the rest any thread.
// Shared memory: this struct, 4096 bytes.
// What it does not do: hide single keys of a tile that is visited (attn/hide.cuh).

#pragma once

#include "attn/block_mask.cuh"
#include "attn/unit.cuh"
#include "base/config.cuh"

namespace attn {

struct Visits {
  static constexpr i32 WORDS = 512;

  u32 seen[WORDS];
  u32 whole[WORDS];

  __device__ void fill(const ForwardParams& p, const Unit& unit, i32 tiles) {
    const i32 lane = i32(threadIdx.x) % WARP;
    const i32 words = min_of(ceil_div(tiles, 32), WORDS);
    for (i32 word = i32(threadIdx.x) / WARP; word < words; word += config::THREADS / WARP) {
      const i32 tile = word * 32 + lane;
      bool any = false;
      bool all = true;
      if (tile < tiles) {
        const i32 first = unit.keys.lo + tile * config::BLOCK_N;
        look_at_blocks(p, unit, first, min_of(first + config::BLOCK_N, unit.keys.hi), any, all);
      }
      const u32 seen_bits = __ballot_sync(~0u, any);
      const u32 whole_bits = __ballot_sync(~0u, all);
      if (lane == 0) {
        seen[word] = seen_bits;
        whole[word] = whole_bits;
      }
    }
  }

  __device__ bool is_whole(i32 tile) const {
    return tile < WORDS * 32 && (whole[tile / 32] >> (tile % 32) & 1) != 0;
  }

  // The first visited tile at or after `tile`, or `tiles`.
  __device__ i32 next(i32 tile, i32 tiles) const {
    while (tile < tiles && tile < WORDS * 32) {
      const u32 left = seen[tile / 32] >> (tile % 32);
      if (left != 0) return min_of(tile + __ffs(i32(left)) - 1, tiles);
      tile = (tile / 32 + 1) * 32;
    }
    return min_of(tile, tiles);
  }
};

}  // namespace attn
