// Values of fp8, from rows of keys to rows of columns.
//
// A warpgroup product sums over what is contiguous in shared memory, and 8-bit elements leave it no
// choice: two warps of the producer read a tile [BLOCK_N, VALUE_DIM] as it was copied and write
// [VALUE_DIM, BLOCK_N]. Keys of a row are not in order but where the weights are: a lane's scores
// are keys 2t, 2t + 1 and 8 more of sixteen (t = lane % 4), its four elements of a product's left
// side are neighbours, so that place 4t + e of sixteen is key 2t + e % 2 + e / 2 * 8. That is also
// how elements lie in a lane after a transposed load of pairs.
// Shared memory: attn/ring_sm90a.cuh. Who executes: both warps, each converged, each for half of
// the columns.
// The invariant: what no row of a unit sees of its first and last tile is 0: a weight of 0 does not
// hide a NaN.

#pragma once

#include "attn/produce_sm90a.cuh"
#include "ptx/ldmatrix.cuh"

namespace attn {

// Chunks of 16 columns of either warp.
constexpr i32 WARP_CHUNKS = config::VALUE_DIM / 32;

// Where a row of a chunk of 16 columns is in a tile of stored values.
__device__ inline u32 stored_at(u32 tile, u32 row, u32 chunk) {
  return tile + (chunk / 8 * u32(config::BLOCK_N) + row) * tile::PANEL_ROW_BYTES +
         ((chunk % 8 ^ row % 8) << 4);
}

// Clears those of 32 rows of a tile of stored values, from row `first` on, that are outside lo ..
// hi, in the warp's own columns; lane l has row `first` + l.
__device__ inline void clear_stored(u32 tile, i32 first, u32 chunk, i32 lo, i32 hi) {
  const i32 row = first + i32(threadIdx.x) % WARP;
  if (row < lo || row >= hi) {
    for (u32 i = 0; i < u32(WARP_CHUNKS); ++i) {
      ptx::st_shared_v4_b32(stored_at(tile, u32(row), chunk + i), Vec16{});
    }
  }
  __syncwarp();
}

// Transposes 32 keys of a tile, from key `first` on, in the warp's own columns, from chunk
// `own_chunk` on.
__device__ inline void transpose_keys(u32 from, u32 to, i32 first, u32 own_chunk) {
  using namespace config;
  constexpr u32 BATCH = WARP_CHUNKS % 4 == 0 ? 4 : 2;
  const u32 lane = threadIdx.x % WARP;
  // Lane l reads 16 columns of key `first` + l: matrix m of the four has keys 8 m .. 8 m + 7 in
  // pairs of columns.
  const u32 key = u32(first) + lane;
  // Lane l writes a row of matrix l / 8, columns' row l % 8: sixteen keys of one column. Even and
  // odd columns take turns, so that the eight rows of a matrix are in eight different places of the
  // swizzle.
  const bool is_late = lane % 8 >= 4;
  const u32 column = lane % 8 * 2 + u32((lane / 8 % 2 != 0) != is_late);
  const u32 place = u32(first) / 16 + lane / 16;
  const u32 row = to + (place / 8 * u32(VALUE_DIM) + column) * tile::PANEL_ROW_BYTES +
                  ((place % 8 ^ column % 8) << 4);
  // What this lane's registers hold is of columns 2 (l / 4) and the next.
  const u32 own = lane < 16 ? 0x6420 : 0x7531;
  const u32 other = lane < 16 ? 0x7531 : 0x6420;
#pragma unroll 1
  for (u32 batch = own_chunk; batch < own_chunk + WARP_CHUNKS; batch += BATCH) {
    u32 pairs[BATCH][4];
#pragma unroll
    for (u32 i = 0; i < BATCH; ++i) {
      ptx::ldmatrix_x4_trans(pairs[i], stored_at(from, key, batch + i));
    }
#pragma unroll
    for (u32 i = 0; i < BATCH; ++i) {
      const u32(&p)[4] = pairs[i];
      const u32 turned[4] = {__byte_perm(p[0], p[1], own), __byte_perm(p[0], p[1], other),
                             __byte_perm(p[2], p[3], own), __byte_perm(p[2], p[3], other)};
      ptx::stmatrix_x4(row + (batch + i) * 16 * tile::PANEL_ROW_BYTES, turned);
    }
  }
}

// Transposes the values of all units. Both warps.
__device__ inline void transpose_values(const ForwardParams& p, const Block& block) {
  using namespace config;
  const u32 chunk = threadIdx.x / WARP % 2 * WARP_CHUNKS;
  u32 taken = 0;
  for (u32 count = 0;; ++count) {
    wait(block.handed_full_of(count), count / HANDED_SLOTS & 1);
    const Handed& handed = block.handed_of(count);
    if (!handed.is_unit) break;
    const Unit& unit = handed.unit;
    const Visit* visits = block.visits_of(count);
    const i32 tiles = key_tiles(handed);
    for (i32 n = 0; n < tiles; ++n, ++taken) {
      const i32 first = met_tile(handed, visits, n);
      i32 lo = 0;
      i32 hi = BLOCK_N;
      // The last tile may go past the sequence; a unit without keys has nothing else.
      if (n == 0) hi = unit.keys.lo < unit.keys.hi ? unit.sequence.kv_len - first : 0;
      // Tiles of pages start with a box, before the first key that is seen.
      if (IS_PAGED && n == tiles - 1) lo = unit.band.lo(unit.top) - first;
      const u32 from = block.stored_values.tile<STORED_VALUE_BYTES>(taken);
      const u32 to = block.values.tile<VALUE_BYTES>(taken);
      block.stored_values.wait_full(taken);
      block.values.wait_empty(taken);
#pragma unroll 1
      for (i32 key = 0; key < BLOCK_N; key += 32) {
        if (key < lo || key + 32 > hi) clear_stored(from, key, chunk, lo, hi);
        transpose_keys(from, to, key, chunk);
      }
      ptx::fence_proxy_async_shared();
      ptx::mbarrier_arrive(block.values.full_of(taken));
      ptx::mbarrier_arrive(block.stored_values.empty_of(taken));
    }
    ptx::mbarrier_arrive(block.handed_empty_of(count));
  }
}

}  // namespace attn
