// The producers of a block over a latent cache: two warps a stage, which copy every second tile row
// by row through the block table.
//
// Each row is looked up for itself, so that a page may have any size and begin anywhere on 16
// bytes; the tensor memory accelerator would take pages of whole eights of rows alone. Eight lanes
// have a row; entries of the block table are read a tile ahead. A stage's warps wait for their
// copies while those of the other stage ask for the next tile.
// Who executes: the warps behind the consumers, converged.
// The invariant: the block table is read below the end of the unit's keys alone; rows past it are
// zero, for a value that no row may see must not meet even a weight of zero. Of an entry outside
// the cache rows are NaN (attn/key_rows.cuh).
// What it does not do: fp8 caches.

#pragma once

#include "attn/key_rows.cuh"
#include "attn/latent_block_sm90a.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/tma.cuh"

namespace attn::latent {

static_assert(config::HEAD_DIM * 2 <= int(sizeof(NanRow)));

using LatentRows = KeyRows<true, 2>;

constexpr i32 ROW_LANES = i32(tile::PANEL_ROW_BYTES) / 16;
constexpr i32 STAGE_THREADS = PRODUCERS / config::STAGES;
// Rows that a stage's threads copy at a time: one period of the swizzle.
constexpr i32 PASS_ROWS = STAGE_THREADS / ROW_LANES;
constexpr i32 PASSES = config::BLOCK_N / PASS_ROWS;
static_assert(PASS_ROWS == 8);

// Entries of the block table for the thread's rows of a tile.
struct Pages {
  i32 page[PASSES];

  // `first`: key of the tile, of which the thread's first row is `top`; `end`: of the unit's keys.
  __device__ void read(const ForwardParams& p, const LatentRows& rows, i32 first, i32 top,
                       i32 end) {
    if (first >= end) return;
#pragma unroll
    for (i32 pass = 0; pass < PASSES; ++pass) {
      page[pass] = rows.page_of(p, min_of(first + top + pass * PASS_ROWS, end - 1));
    }
  }
};

// Has the tiles of a unit copied.
__device__ inline void produce(const ForwardParams& p, const Unit& unit, const LatentRows& rows,
                               const Block& block) {
  const i32 thread = i32(threadIdx.x) - config::THREADS;
  const i32 own = thread % STAGE_THREADS;
  const i32 lane = own % ROW_LANES;
  const i32 top = own / ROW_LANES;
  const i32 tiles = tiles_of(unit);
  const i32 end = unit.keys.hi;
  i32 count = thread / STAGE_THREADS;
  i32 first = unit.keys.lo + count * config::BLOCK_N;
  // The row's index modulo 8 is `top` in every pass.
  const u32 to = block.tile(count) + u32(top) * tile::PANEL_ROW_BYTES + (u32(lane ^ top) << 4);
  Pages pages;
  pages.read(p, rows, first, top, end);
  for (; count < tiles; count += config::STAGES) {
    block.wait_empty(count);
#pragma unroll
    for (i32 pass = 0; pass < PASSES; ++pass) {
      const i32 at = first + top + pass * PASS_ROWS;
      const bool is_there = at < end;
      // The last key stands in for those past the end: its address is formed and not read.
      const LatentRows::Row row = rows.row(p, min_of(at, end - 1), pages.page[pass]);
      const u8* from = row.k + lane * 16;
#pragma unroll
      for (i32 panel = 0; panel < PANELS; ++panel, from += tile::PANEL_ROW_BYTES) {
        ptx::cp_async_cg_16(
            to + u32(panel) * PANEL_BYTES + u32(pass * PASS_ROWS) * tile::PANEL_ROW_BYTES, from,
            is_there ? 16 : 0);
      }
    }
    ptx::cp_async_commit_group();
    first += config::STAGES * config::BLOCK_N;
    pages.read(p, rows, first, top, end);
    ptx::cp_async_wait_group<0>();
    ptx::fence_proxy_async_shared();
    __syncwarp();
    if (threadIdx.x % WARP == 0) ptx::mbarrier_arrive(block.full_of(count));
  }
}

}  // namespace attn::latent
