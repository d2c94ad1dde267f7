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
#include "ptx/opaque.cuh"

namespace attn {

// Chunks of 16 columns: warp w has every other one, from chunk w on. Blocks of 32 keys by a chunk.
constexpr i32 WARP_CHUNKS = config::VALUE_DIM / 32;
constexpr i32 CHUNK_BLOCKS = config::BLOCK_N / 32 * WARP_CHUNKS;
// Blocks that are loaded at once, while those before them are turned and stored: more hide the
// loads of narrow values, and of wide ones the products do. A third one has no registers beside
// what pages and lists of tiles take.
constexpr i32 BATCH = config::VALUE_DIM > 64 ? 1 : config::IS_PAGED || config::IS_BLOCKED ? 2 : 3;

// Clears the rows of a tile of stored values that are outside lo .. hi, in the chunks of one warp.
__device__ inline void clear_stored(u32 tile, u32 warp, i32 lo, i32 hi) {
  for (i32 row = i32(threadIdx.x) % WARP; row < config::BLOCK_N; row += WARP) {
    if (row >= lo && row < hi) continue;
    for (i32 i = 0; i < WARP_CHUNKS; ++i) {
      const u32 panel = tile + u32(i / 4 * config::BLOCK_N + row) * tile::PANEL_ROW_BYTES;
      ptx::st_shared_v4_b32(panel + ((u32(i % 4 * 2) ^ warp ^ u32(row % 8)) << 4), Vec16{});
    }
  }
  __syncwarp();
}

// Transposes the chunks of one warp of a tile.
__device__ inline void transpose_tile(u32 from, u32 to, u32 warp) {
  using namespace config;
  const u32 lane = ptx::opaque(threadIdx.x % WARP);
  // Lane l reads 16 columns of key l of a block: matrix m of the four has keys 8 m .. 8 m + 7 in
  // pairs of columns.
  const u32 read = from + lane * tile::PANEL_ROW_BYTES + ((lane % 8 ^ warp) << 4);
  // Lane l writes a row of matrix l / 8, columns' row l % 8: sixteen keys of one column. Even and
  // odd columns take turns, so that the eight rows of a matrix are in eight different places of the
  // swizzle.
  const bool is_late = lane % 8 >= 4;
  const u32 column = lane % 8 * 2 + u32((lane / 8 % 2 != 0) != is_late);
  const u32 write =
      to + (warp * 16 + column) * tile::PANEL_ROW_BYTES + ((lane / 16 ^ column % 8) << 4);
  // What this lane's registers hold is of columns 2 (l / 4) and the next.
  const u32 own = lane < 16 ? 0x6420 : 0x7531;
  const u32 other = lane < 16 ? 0x7531 : 0x6420;
  u32 pairs[2][BATCH][4];
  const auto load = [&](i32 first) {
#pragma unroll
    for (i32 n = first; n < first + BATCH && n < CHUNK_BLOCKS; ++n) {
      const i32 keys = n / WARP_CHUNKS * 32;
      const i32 chunk = n % WARP_CHUNKS;
      const u32 panel = u32(chunk / 4 * BLOCK_N + keys) * tile::PANEL_ROW_BYTES;
      ptx::ldmatrix_x4_trans(pairs[n / BATCH % 2][n % BATCH],
                             (read ^ u32(chunk % 4 * 2) << 4) + panel);
    }
  };
  load(0);
#pragma unroll
  for (i32 first = 0; first < CHUNK_BLOCKS; first += BATCH) {
    load(first + BATCH);
#pragma unroll
    for (i32 n = first; n < first + BATCH && n < CHUNK_BLOCKS; ++n) {
      const i32 place = n / WARP_CHUNKS * 2;
      const u32(&p)[4] = pairs[n / BATCH % 2][n % BATCH];
      const u32 turned[4] = {__byte_perm(p[0], p[1], own), __byte_perm(p[0], p[1], other),
                             __byte_perm(p[2], p[3], own), __byte_perm(p[2], p[3], other)};
      const u32 panel = u32(place / 8 * VALUE_DIM + n % WARP_CHUNKS * 32) * tile::PANEL_ROW_BYTES;
      ptx::stmatrix_x4((write ^ u32(place % 8) << 4) + panel, turned);
    }
  }
}

// Transposes the values of all units. Both warps.
__device__ inline void transpose_values(const ForwardParams& p, const Block& block) {
  using namespace config;
  const u32 warp = threadIdx.x / WARP % 2;
  u32 taken = 0;
  for (u32 count = 0;; ++count) {
    wait(block.handed_full_of(count), count / HANDED_SLOTS & 1);
    const Handed& handed = block.handed_of(count);
    if (!handed.is_unit) break;
    const Unit& unit = handed.unit;
    const Visit* visits = block.visits_of(count);
    const i32 tiles = key_tiles(handed);
    // The last tile, which comes first, may go past the sequence; a unit without keys has nothing
    // else. Tiles of pages start with a box, before the first key that is seen.
    const i32 past =
        unit.keys.lo < unit.keys.hi ? unit.sequence.kv_len - met_tile(handed, visits, 0) : 0;
    const i32 before = IS_PAGED ? unit.band.lo(unit.top) - met_tile(handed, visits, tiles - 1) : 0;
    for (i32 n = 0; n < tiles; ++n, ++taken) {
      const i32 lo = IS_PAGED && n == tiles - 1 ? before : 0;
      const i32 hi = n == 0 ? past : BLOCK_N;
      const u32 from = block.stored_values.tile<STORED_VALUE_BYTES>(taken);
      const u32 to = block.values.tile<VALUE_BYTES>(taken);
      block.stored_values.wait_full(taken);
      block.values.wait_empty(taken);
      if (lo > 0 || hi < BLOCK_N) clear_stored(from, warp, lo, hi);
      transpose_tile(from, to, warp);
      ptx::fence_proxy_async_shared();
      ptx::mbarrier_arrive(block.values.full_of(taken));
      ptx::mbarrier_arrive(block.stored_values.empty_of(taken));
    }
    ptx::mbarrier_arrive(block.handed_empty_of(count));
  }
}

}  // namespace attn
