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

  // An address that all lanes have alike, computed when it is wanted: the compiler would keep those
  // of all products. Narrow rows have registers for them.
  __device__ static u32 fresh(u32 address) {
    if constexpr (config::HEAD_DIM == 64 && !config::IS_CAPPED) return address;
    return u32(one_of_warp(i32(ptx::opaque(address))));
  }

  // The consumer's keys or values.
  __device__ u32 own_tile(u32 tile) const {
    return fresh(tile + u32(own_keys) * tile::PANEL_ROW_BYTES);
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
  __device__ void start_scores(u32 count, float (&scores)[SCORES]) {
    const tile::Operand a = tile::columns_operand(own_tile(block.keys));
    const tile::Operand b = tile::columns_operand(fresh(block.query_tile(count) + own_rows()));
    ptx::forget_all(scores);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < config::HEAD_DIM / STEP; ++step) {
      Score::ss(scores, a.columns<config::BLOCK_N>(step), b.columns<config::BLOCK_M>(step),
                step != 0);
    }
    ptx::wgmma_commit_group();
  }

  // Starts dP^T = V dO^T.
  __device__ void start_slopes(u32 count, float (&slopes)[SCORES]) {
    const tile::Operand a = tile::columns_operand(own_tile(block.values));
    const tile::Operand b = tile::columns_operand(fresh(block.gradient_tile(count) + own_rows()));
    ptx::forget_all(slopes);
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
  __device__ void take(u32 count, i32 row, float (&slopes)[SCORES]) {
    block.gradients.wait_full(count);
    clear_past<config::VALUE_DIM>(block.gradient_tile(count), row);
    start_slopes(count, slopes);
  }

  // Whether some row of the consumer's scores does not see some of its keys. `row`: the first one of
  // the tile.
  __device__ bool is_cut(i32 row) const {
    return row + own_row() < all.lo || row + own_row() + config::SCORE_ROWS > all.hi;
  }

  __device__ Seen seen(i32 row) const { return Seen(keys, own_key(), row + own_row()); }

  // Makes weights of the scores of tile `count`.
  __device__ void weigh_tile(u32 count, i32 row, float (&scores)[SCORES]) const {
    ptx::opaque_all(scores);
    const u32 lse2 = block.lse2_of(count) + u32(own_row()) * 4;
    if (!HAS_PAIRS && (config::IS_CAPPED || is_cut(row))) {
      weigh<true>(p.call, seen(row), lse2, scores);
    } else {
      weigh<false>(p.call, Seen(), lse2, scores);
    }
  }

  // Rounds weights whose gradients are made of pairs. What is hidden is hidden here: there are
  // registers for it.
  __device__ void round_tile(i32 row, float (&scores)[SCORES]) {
    if constexpr (HAS_PAIRS) {
      ptx::opaque_all(scores);
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) weights[i] = round_pair(scores[i * 2], scores[i * 2 + 1]);
      if (is_cut(row)) hide(seen(row), weights);
    }
  }

  // Makes gradients of the scores of tile `count`, and lays them down in their panel.
  __device__ void differentiate_tile(u32 count, float (&scores)[SCORES],
                                     float (&slopes)[SCORES]) {
    ptx::opaque_all(slopes);
    const u32 numbers = u32(own_row()) * 4;
    const u32 panel =
        config::IS_WIDE ? own_rows() : consumer * config::BLOCK_M * tile::PANEL_ROW_BYTES;
    differentiate(p.call, block.lse2_of(count) + numbers, block.delta_of(count) + numbers,
                  block.slope_tile(count) + panel, scores, slopes, weights);
  }

  // Hands a square of dQ to the warp that moves it, and the sums of the gradients of scores of the
  // lane's two rows.
  __device__ void hand(const float* square, float top, float bottom) const {
    const u32 thread = ptx::opaque(threadIdx.x) % config::WARPGROUP;
    const u32 to = fresh(block.sums + consumer * SUM_STRIDE);
    const u32 own = to + thread * 16;
    ptx::bar_sync(SUM_EMPTY_BARRIER + consumer, SUM_THREADS);
#pragma unroll
    for (int j = 0; j < SUMS / 4; ++j) {
      ptx::st_shared_v4_f32(own + j * config::WARPGROUP * 16, square[j * 4], square[j * 4 + 1],
                            square[j * 4 + 2], square[j * 4 + 3]);
    }
    if (config::HAS_ROW_SUMS && thread % 4 == 0) {
      const u32 row = to + SUM_BYTES + (thread / WARP * WARP_KEYS + thread % WARP / 4) * 4;
      ptx::st_shared_f32(row, top);
      ptx::st_shared_f32(row + 8 * 4, bottom);
    }
    ptx::fence_proxy_async_shared();
    ptx::bar_arrive(SUM_FULL_BARRIER + consumer, SUM_THREADS);
  }

  // Waits for keys and values and for the first tile of rows, and makes weights of its scores. In
  // the end nothing is under way.
  __device__ void start(i32 row, float (&scores)[SCORES], float (&slopes)[SCORES]) {
    wait_keys<config::HEAD_DIM>(block.keys, block.keys_full);
    block.queries.wait_full(0);
    clear_past<config::HEAD_DIM>(block.query_tile(0), row);
    start_scores(0, scores);
    wait_keys<config::VALUE_DIM>(block.values, block.values_full);
    ptx::wgmma_wait_group<0>();
    weigh_tile(0, row, scores);
    round_tile(row, scores);
    take(0, row, slopes);
    ptx::wgmma_wait_group<0>();
  }
};

}  // namespace attn
