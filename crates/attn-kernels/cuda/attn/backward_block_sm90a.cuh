// The shared memory of a Hopper backward block.
//
// Shared memory, from a multiple of 1024: keys [BLOCK_N, HEAD_DIM]; values [BLOCK_N, VALUE_DIM],
// whose place serves the results in the end; query tiles [QUERY_STAGES, BLOCK_M, HEAD_DIM];
// gradients of output [GRADIENT_STAGES, BLOCK_M, VALUE_DIM]; gradients of scores [2, BLOCK_M,
// BLOCK_N]; weights, the same, where rows are wide; keys that are 1, ONE_BYTES; f32 sums
// for dQ, SUM_STRIDE of each consumer; f32 log-sum-exps [QUERY_STAGES,
// BLOCK_M] and row sums of dO * O [GRADIENT_STAGES, BLOCK_M]; barriers of 8 bytes: keys, values,
// queries full, empty [QUERY_STAGES], gradients full, empty [GRADIENT_STAGES]. The full barriers
// have one arrival, the producer's, and count bytes; the empty ones have one of each
// thread of the consumers.

#pragma once

#include "attn/backward_tile_sm90a.cuh"
#include "attn/ring.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "tile/descriptor.cuh"

namespace attn {

__host__ __device__ constexpr u32 tile_bytes(int rows, int columns) {
  return u32(rows * tile::panels_of(columns, config::ELEMENT_BYTES)) * tile::PANEL_ROW_BYTES;
}
constexpr u32 KEY_BYTES = tile_bytes(config::BLOCK_N, config::HEAD_DIM);
constexpr u32 VALUE_BYTES = tile_bytes(config::BLOCK_N, config::VALUE_DIM);
constexpr u32 QUERY_BYTES = tile_bytes(config::BLOCK_M, config::HEAD_DIM);
constexpr u32 GRADIENT_BYTES = tile_bytes(config::BLOCK_M, config::VALUE_DIM);
constexpr u32 SLOPE_BYTES = tile_bytes(config::BLOCK_M, config::BLOCK_N);
constexpr u32 ROW_BYTES = config::BLOCK_M * 4;

// A square of a consumer's part of a tile of dQ: 64 x 64 sums. It is in memory as its threads hold
// it, in fours (SUMS_IN_FOURS), so that neither way meets a bank twice and one copy takes it all.
constexpr int SUM_EDGE = 64;
constexpr int SUMS = SUM_EDGE * SUM_EDGE / config::WARPGROUP;
constexpr u32 SUM_BYTES = SUM_EDGE * SUM_EDGE * 4;
// Next to them the sums of as many rows' gradients of scores.
constexpr u32 ROW_SUM_BYTES = SUM_EDGE * 4;
constexpr u32 SUM_STRIDE = SUM_BYTES + ROW_SUM_BYTES;
// Keys that are 1, of one step of a product: dS times one of them is the sum of dS. Sixteen rows of
// a panel or, as an operand of its own, 128 bytes.
constexpr u32 ONE_BYTES = config::IS_WIDE ? 128 : 16 * tile::PANEL_ROW_BYTES;
static_assert(config::CONSUMERS * config::SQUARES * SUM_BYTES ==
              config::BLOCK_M * config::HEAD_DIM * 4);

struct Block {
  u32 keys;
  u32 values;
  Ring<config::QUERY_STAGES> queries;
  Ring<config::GRADIENT_STAGES> gradients;
  u32 slopes;
  u32 weights;  // where rows are wide
  u32 ones;
  u32 sums;
  u32 lse2;
  u32 delta;
  u32 keys_full;
  u32 values_full;

  __device__ explicit Block(u32 memory) {
    using namespace config;
    keys = memory;
    values = keys + KEY_BYTES;
    queries.tiles = values + VALUE_BYTES;
    gradients.tiles = queries.tiles + QUERY_STAGES * QUERY_BYTES;
    slopes = gradients.tiles + GRADIENT_STAGES * GRADIENT_BYTES;
    weights = slopes + 2 * SLOPE_BYTES;
    ones = weights + (IS_WIDE ? 2 * SLOPE_BYTES : 0);
    sums = ones + ONE_BYTES;
    lse2 = sums + CONSUMERS * SUM_STRIDE;
    delta = lse2 + QUERY_STAGES * ROW_BYTES;
    keys_full = delta + GRADIENT_STAGES * ROW_BYTES;
    values_full = keys_full + 8;
    queries.place_barriers(values_full + 8);
    gradients.place_barriers(queries.end());
  }

  __device__ u32 query_tile(u32 count) const { return queries.tile<QUERY_BYTES>(count); }
  __device__ u32 gradient_tile(u32 count) const { return gradients.tile<GRADIENT_BYTES>(count); }
  __device__ u32 slope_tile(u32 count) const { return slopes + count % 2 * SLOPE_BYTES; }
  __device__ u32 weight_tile(u32 count) const { return weights + count % 2 * SLOPE_BYTES; }
  __device__ u32 lse2_of(u32 count) const {
    return lse2 + count % config::QUERY_STAGES * ROW_BYTES;
  }
  __device__ u32 delta_of(u32 count) const {
    return delta + count % config::GRADIENT_STAGES * ROW_BYTES;
  }

  // All threads, before the barrier that starts the block.
  __device__ void fill_ones() const {
    constexpr u32 ONES = config::DTYPE == DType::bf16 ? 0x3F803F80u : 0x3C003C00u;
    if (threadIdx.x < ONE_BYTES / 16) {
      ptx::st_shared_v4_b32(ones + threadIdx.x * 16, {{ONES, ONES, ONES, ONES}});
    }
    ptx::fence_proxy_async_shared();
  }

  // One thread, before the barrier that starts the block.
  __device__ void init() const {
    ptx::mbarrier_init(keys_full, 1);
    ptx::mbarrier_init(values_full, 1);
    queries.init(1, config::CONSUMERS * config::WARPGROUP);
    gradients.init(1, config::CONSUMERS * config::WARPGROUP);
    ptx::fence_mbarrier_init();
  }
};

// Named barriers: the consumers' gradients of scores are all there; a consumer alone; its sums are
// there; they have been read; the consumers' weights are all there.
constexpr u32 SLOPE_BARRIER = 1;
constexpr u32 OWN_BARRIER = 2;
constexpr u32 SUM_FULL_BARRIER = OWN_BARRIER + config::CONSUMERS;
constexpr u32 SUM_EMPTY_BARRIER = SUM_FULL_BARRIER + config::CONSUMERS;
constexpr u32 WEIGHT_BARRIER = SUM_EMPTY_BARRIER + config::CONSUMERS;
// Threads that meet over sums: a consumer and the warp that moves them.
constexpr u32 SUM_THREADS = config::WARPGROUP + WARP;

}  // namespace attn
