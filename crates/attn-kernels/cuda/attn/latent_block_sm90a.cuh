// The shared memory of a block over a latent cache, and the barriers between its warpgroups.
//
// Source: DeepSeek-AI, "DeepSeek-V2", arXiv:2405.04434, section 2.1.2, in its absorbed form: a
// cached row is a key of HEAD_DIM elements whose first VALUE_DIM are the value, so that a tile of
// rows is copied once and read by both products.
// Shared memory, from a multiple of 1024: queries [BLOCK_M, HEAD_DIM]; STAGES tiles of latent rows
// [BLOCK_N, HEAD_DIM], all in panels (tile/descriptor.cuh); weights, 16 bytes of each thread of a
// warpgroup for each PRODUCT_KEYS keys. Static: a full and an empty barrier for each stage, and
// what kernel/latent_sm90a.cu declares. The output's rows pass through the place of the queries.
// Who executes: threads 0 .. THREADS are the consumers, two warpgroups with the same 64 rows and
// one half of the value's columns each, of which the first also has the scores; behind them one
// warpgroup of producers.
// The invariant: a stage is full when every warp that copies it says so, and empty when every warp
// of both consumers does.

#pragma once

#include "attn/unit.cuh"
#include "base/config.cuh"
#include "base/types.cuh"
#include "ptx/mbarrier.cuh"
#include "tile/descriptor.cuh"

namespace attn::latent {

constexpr int WARPGROUP = config::TEAM_THREADS;
constexpr int CONSUMERS = config::TEAMS;
constexpr int PRODUCERS = WARPGROUP;
constexpr int BLOCK_THREADS = config::THREADS + PRODUCERS;
// Columns of the value that a consumer sums.
constexpr int OWN_COLUMNS = config::VALUE_DIM / CONSUMERS;
constexpr int PANEL_COLUMNS = int(tile::PANEL_ROW_BYTES) / 2;
constexpr int PANELS = config::HEAD_DIM / PANEL_COLUMNS;
// Keys that one product sums over.
constexpr int PRODUCT_KEYS = 16;
constexpr int PRODUCTS = config::BLOCK_N / PRODUCT_KEYS;
// A tile's weights are made, handed over and met in so many pieces, so that the exponentials of the
// next one run beside the products of this one.
constexpr int PIECES = 2;
constexpr int PIECE_PRODUCTS = PRODUCTS / PIECES;

constexpr u32 PANEL_BYTES = config::BLOCK_N * tile::PANEL_ROW_BYTES;
constexpr u32 QUERY_BYTES = config::BLOCK_M * config::HEAD_DIM * 2;
constexpr u32 TILE_BYTES = config::BLOCK_N * config::HEAD_DIM * 2;

// Registers of a thread after producers have left theirs: of 65536 over 384 threads, in multiples
// of 8.
constexpr int LAUNCH_REGISTERS = 65536 / BLOCK_THREADS / 8 * 8;
constexpr int PRODUCER_REGISTERS = 56;
constexpr int CONSUMER_REGISTERS = 224;
static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <=
              (1 + CONSUMERS) * LAUNCH_REGISTERS);

static_assert(config::IS_PAGED && !config::IS_FP8);
static_assert(WARPGROUP == 4 * WARP && CONSUMERS == 2 && config::STAGES == 2);
static_assert(config::BLOCK_M == 64 && config::BLOCK_N == 64 && config::ROW_TILES == 1);
static_assert(config::HEAD_DIM % PANEL_COLUMNS == 0 && OWN_COLUMNS == 256);

// Barriers of part of a block (ptx/barrier.cuh).
enum Meeting : u32 {
  CONSUMERS_MEET = 1,
  OWN,  // and the next: of one consumer alone
};

// Waits for the phase of a barrier.
__device__ inline void wait(u32 barrier, u32 parity) {
  while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {
  }
}

struct Block {
  u32 queries;
  u32 tiles;
  u32 weights;
  u32 full;   // [STAGES], 8 bytes apart
  u32 empty;  // [STAGES]
  // Of a tile's weights, by the threads of one consumer for the other.
  u32 written;  // [PIECES]
  u32 read;

  static constexpr i32 BARRIERS = 2 * config::STAGES + PIECES + 1;

  // `memory`: dynamic; `barriers`: BARRIERS of them.
  __device__ Block(u32 memory, u32 barriers)
      : queries((memory + tile::SWIZZLE_BYTES - 1) & ~(tile::SWIZZLE_BYTES - 1)),
        tiles(queries + QUERY_BYTES),
        weights(tiles + config::STAGES * TILE_BYTES),
        full(barriers),
        empty(full + config::STAGES * 8),
        written(empty + config::STAGES * 8),
        read(written + PIECES * 8) {}

  // The tiles of a unit are counted; from a count follow stage and parity.
  __device__ static u32 stage_of(i32 count) { return u32(count) % config::STAGES; }
  __device__ u32 tile(i32 count) const { return tiles + stage_of(count) * TILE_BYTES; }
  __device__ u32 full_of(i32 count) const { return full + stage_of(count) * 8; }
  __device__ u32 empty_of(i32 count) const { return empty + stage_of(count) * 8; }

  __device__ void wait_full(i32 count) const {
    wait(full_of(count), u32(count) / config::STAGES & 1);
  }
  // Until the tile before this one in its stage has been given back, which the first need not wait
  // for.
  __device__ void wait_empty(i32 count) const {
    const u32 round = u32(count) / config::STAGES;
    if (round > 0) wait(empty_of(count), (round - 1) & 1);
  }

  // One thread, before the barrier that starts the block.
  __device__ void init() const {
    constexpr u32 COPYING_WARPS = PRODUCERS / WARP / config::STAGES;
    for (i32 stage = 0; stage < config::STAGES; ++stage) {
      ptx::mbarrier_init(full_of(stage), COPYING_WARPS);
      ptx::mbarrier_init(empty_of(stage), config::THREADS / WARP);
    }
    for (i32 piece = 0; piece < PIECES; ++piece) {
      ptx::mbarrier_init(written + u32(piece) * 8, WARPGROUP);
    }
    ptx::mbarrier_init(read, WARPGROUP);
    ptx::fence_mbarrier_init();
  }
};

// Tiles of keys of a unit.
__device__ inline i32 tiles_of(const Unit& unit) {
  return ceil_div(unit.keys.hi - unit.keys.lo, config::BLOCK_N);
}

}  // namespace attn::latent
