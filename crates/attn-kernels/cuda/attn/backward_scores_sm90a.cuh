// Scores and their gradients, as a Hopper backward consumer computes them: what rows of all widths
// have in common.
//
// Source: T. Dao, "FlashAttention-2", arXiv:2307.08691, algorithm 2: S^T = K Q^T, dP^T = V dO^T.
// Registers: scores and their gradients [SCORE_ROWS / 2] in f32, weights in pairs
// (attn/backward_weigh_sm90a.cuh). Who executes: all warps of a consumer, converged.
// The invariant: no register of a product that may be under way is touched; storage that no row of
// the sequence sees is cleared before a product reads it.

#pragma once

#include "attn/backward_block_sm90a.cuh"
#include "attn/backward_write_sm90a.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace attn {

// A value that all lanes of a warp have alike, and that the compiler keeps in uniform registers.
__device__ inline i32 one_of_warp(i32 x) { return __shfl_sync(~0u, x, 0); }

// Keys of a consumer.
constexpr int CONSUMER_KEYS = 64;

struct Scores {
  using Score = ptx::Wgmma<config::SCORE_ROWS, config::DTYPE>;
  static constexpr int STEP = 16;  // elements that a product sums

  const BackwardParams& p;
  const Block& block;
  const KeyTile& keys;
  const u32 consumer;
  const i32 own_keys;  // the consumer's first one, counted from the tile's
  Keys all;            // rows that see all of this consumer's keys

  float scores[SCORES];
  float slopes[SCORES];
  u32 weights[PAIRS];

  __device__ Scores(const BackwardParams& params, const Block& memory, const KeyTile& tile,
                    u32 index)
      : p(params),
        block(memory),
        keys(tile),
        consumer(index),
        own_keys(config::IS_WIDE ? 0 : i32(index) * CONSUMER_KEYS) {
    const i32 first = keys.first + own_keys;
    all = {one_of_warp(keys.rows_of(first + CONSUMER_KEYS - 1).lo),
           one_of_warp(keys.rows_of(first).hi)};
    if (first + CONSUMER_KEYS > keys.sequence.kv_len) all.hi = 0;
  }

  // The first row of the consumer's scores, of a tile's.
  __device__ i32 own_row() const {
    return config::IS_WIDE ? i32(consumer) * config::SCORE_ROWS : 0;
  }
  __device__ u32 own_rows() const { return u32(own_row()) * tile::PANEL_ROW_BYTES; }

  // The consumer's keys or values. Where rows are wide, in a way that the compiler computes each
  // product's address when it is wanted: it would keep all of them.
  __device__ u32 own_tile(u32 tile) const {
    if constexpr (config::IS_WIDE) return u32(one_of_warp(i32(ptx::opaque(tile))));
    return tile + u32(own_keys) * tile::PANEL_ROW_BYTES;
  }

  // Gives a stage back. Each thread says so for itself: what a thread has read of it is then ordered
  // before what is copied there next by the barrier alone.
  __device__ void release(u32 barrier) const { ptx::mbarrier_arrive(barrier); }

  // Clears rows lo .. hi of a tile of ROWS rows of DIM columns. Both consumers clear the same.
  template <int ROWS, int DIM>
  __device__ void clear(u32 tile, i32 lo, i32 hi) const {
    constexpr i32 PIECES = 8;
    for (i32 piece = lo * PIECES + i32(ptx::opaque(threadIdx.x)) % config::WARPGROUP;
         piece < hi * PIECES; piece += config::WARPGROUP) {
#pragma unroll
      for (int panel = 0; panel < tile::panels_of(DIM, config::ELEMENT_BYTES); ++panel) {
        ptx::st_shared_v4_b32(tile + panel * ROWS * tile::PANEL_ROW_BYTES + u32(piece) * 16,
                              Vec16{});
      }
    }
    ptx::fence_proxy_async_shared();
    ptx::bar_sync(OWN_BARRIER + consumer, config::WARPGROUP);
  }

  // Clears the rows of a tile of queries or gradients that are past the sequence: a weight of 0
  // does not hide a NaN.
  template <int DIM>
  __device__ void clear_past(u32 tile, i32 row) const {
    const i32 end = keys.sequence.q_len - row;
    if (end < config::BLOCK_M) clear<config::BLOCK_M, DIM>(tile, end, config::BLOCK_M);
  }

  // Waits for keys or values, and clears what no row of the sequence sees.
  template <int DIM>
  __device__ void wait_keys(u32 tile, u32 full) const {
    wait(full, 0);
    const Keys seen = keys.seen();
    if (seen.lo > 0) clear<config::BLOCK_N, DIM>(tile, 0, min_of(seen.lo, config::BLOCK_N));
    if (seen.hi < config::BLOCK_N) {
      clear<config::BLOCK_N, DIM>(tile, max_of(seen.hi, 0), config::BLOCK_N);
    }
  }

  // Starts S^T = K Q^T on the count-th tile of queries.
  __device__ void start_scores(u32 count) {
    const tile::Operand a = tile::columns_operand(own_tile(block.keys));
    const tile::Operand b = tile::columns_operand(block.query_tile(count) + own_rows());
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < config::HEAD_DIM / STEP; ++step) {
      Score::ss(scores, a.columns<config::BLOCK_N>(step), b.columns<config::BLOCK_M>(step),
                step != 0);
    }
    ptx::wgmma_commit_group();
  }

  // Starts dP^T = V dO^T.
  __device__ void start_slopes(u32 count) {
    const tile::Operand a = tile::columns_operand(own_tile(block.values));
    const tile::Operand b = tile::columns_operand(block.gradient_tile(count) + own_rows());
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < config::VALUE_DIM / STEP; ++step) {
      Score::ss(slopes, a.columns<config::BLOCK_N>(step), b.columns<config::BLOCK_M>(step),
                step != 0);
    }
    ptx::wgmma_commit_group();
  }

  // The lane's first key.
  __device__ i32 own_key() const {
    const i32 thread = i32(ptx::opaque(threadIdx.x) % config::WARPGROUP);
    return keys.first + own_keys + thread / WARP * WARP_KEYS + thread % WARP / 4;
  }

  // Starts the gradients of the weights of tile `count`.
  __device__ void take(u32 count, i32 row) {
    block.gradients.wait_full(count);
    clear_past<config::VALUE_DIM>(block.gradient_tile(count), row);
    start_slopes(count);
  }

  // Makes weights of the scores of tile `count`.
  __device__ void weigh_tile(u32 count, i32 row) {
    ptx::opaque_all(scores);
    const i32 first = row + own_row();
    const bool is_cut = first < all.lo || first + config::SCORE_ROWS > all.hi;
    const u32 lse2 = block.lse2_of(count) + u32(own_row()) * 4;
    if (config::IS_CAPPED || is_cut) {
      weigh<true>(p.call, Seen(keys, own_key(), first), lse2, scores);
    } else {
      weigh<false>(p.call, Seen(), lse2, scores);
    }
  }

  // Makes gradients of the scores of tile `count`, and lays them down in their panel.
  __device__ void differentiate_tile(u32 count) {
    ptx::opaque_all(slopes);
    const u32 numbers = u32(own_row()) * 4;
    const u32 panel =
        config::IS_WIDE ? own_rows() : consumer * config::BLOCK_M * tile::PANEL_ROW_BYTES;
    differentiate(p.call, block.lse2_of(count) + numbers, block.delta_of(count) + numbers,
                  block.slope_tile(count) + panel, scores, slopes, weights);
  }

  // Waits for keys and values and for the first tile of rows, and makes weights of its scores. In
  // the end nothing is under way.
  __device__ void start(i32 row) {
    wait_keys<config::HEAD_DIM>(block.keys, block.keys_full);
    block.queries.wait_full(0);
    clear_past<config::HEAD_DIM>(block.query_tile(0), row);
    start_scores(0);
    wait_keys<config::VALUE_DIM>(block.values, block.values_full);
    take(0, row);
    ptx::wgmma_wait_group<1>();
    weigh_tile(0, row);
    ptx::wgmma_wait_group<0>();
  }
};

}  // namespace attn
