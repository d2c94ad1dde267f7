// A consumer of a Hopper backward block: a warpgroup with 64 keys that takes the tiles of query
// rows as they land.
//
// Source: T. Dao, "FlashAttention-2", arXiv:2307.08691, algorithm 2; J. Shah et al.,
// "FlashAttention-3", arXiv:2407.08608, section 3.1. Of a tile of rows: S^T = K Q^T and dP^T = V
// dO^T, transposed, so that P^T is the first operand, in registers, of dV += P^T dO; dS in 16 bits
// through shared memory, which dQ = dS K takes of the keys of both consumers, and dK += dS^T Q of
// its own.
// Overlap: a product of n = 64 reads shared memory as fast as it can be read, and a thread's own
// access waits until one ends. So products follow one another as S of the next tile, dQ, dV of this
// one, dP of the next, dK: the exponentials run beside dQ, its sums move out beside dV, which reads
// half as much, and the gradient of the scores is made beside dK. Tiles of 128 rows, and a
// soft-cap, have no registers for that: dV, dQ of a tile, S, dP of the next, dK.
// Registers: sums of keys [HEAD_DIM / 2] and of values [VALUE_DIM / 2] throughout; scores and their
// gradients [BLOCK_M / 2], weights in pairs, sums for dQ.
// Who executes: all warps of a consumer, converged.
// The invariant: no register of a product that may be under way is touched; a stage is given back
// once, by every thread, when no product of it reads it. Shared memory that a consumer
// writes for the other's products is in two copies, which take turns: who has met the other at the
// barrier of one has seen its products of the copy before end.

#pragma once

#include "attn/backward_scores_sm90a.cuh"

namespace attn {

template <int HEAD_DIM, int VALUE_DIM>
struct KeyGradient : Scores {
  // Whether the next tile's scores are under way while this one's gradients are.
  static constexpr bool IS_AHEAD = !config::HAS_ROWS && !config::IS_CAPPED;
  using KeySum = ptx::Wgmma<HEAD_DIM, config::DTYPE>;
  using ValueSum = ptx::Wgmma<VALUE_DIM, config::DTYPE>;
  // One more tile of columns is of keys that are 1.
  static constexpr int EDGE = SUM_EDGE + 8;
  using RowSum = ptx::Wgmma<EDGE, config::DTYPE>;

  float key_sums[HEAD_DIM / 2];
  float value_sums[VALUE_DIM / 2];

  using Scores::Scores;

  // Starts dV += P^T dO.
  __device__ void start_values(u32 count) {
    const tile::Operand b = tile::rows_operand<config::BLOCK_M>(fresh(block.gradient_tile(count)));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < config::BLOCK_M / STEP; ++step) {
      const u32 a[4] = {weights[step * 4], weights[step * 4 + 1], weights[step * 4 + 2],
                        weights[step * 4 + 3]};
      ValueSum::rs(value_sums, a, b.rows(step), step != 0 || count > 0);
    }
    ptx::wgmma_commit_group();
  }

  // Starts dK += dS^T Q: dS from shared memory, where it is for dQ as well, and leaves registers.
  __device__ void start_keys(u32 count) {
    const tile::Operand a = tile::rows_operand<config::BLOCK_M>(
        fresh(block.slope_tile(count) + consumer * config::BLOCK_M * tile::PANEL_ROW_BYTES));
    const tile::Operand b = tile::rows_operand<config::BLOCK_M>(fresh(block.query_tile(count)));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < config::BLOCK_M / STEP; ++step) {
      KeySum::ss_trans_ab(key_sums, a.rows(step), b.rows(step), step != 0 || count > 0);
    }
    ptx::wgmma_commit_group();
  }

  float scores[SCORES];
  float slopes[SCORES];
  float sums[EDGE / 2];

  // Starts this consumer's part of dQ = dS K of tile `count`.
  __device__ void start_rows(u32 count) {
    const u32 own_rows = config::HAS_ROWS ? consumer * SUM_EDGE * tile::PANEL_ROW_BYTES : 0;
    const u32 own_panel =
        config::HAS_ROWS ? 0 : consumer * config::BLOCK_N * tile::PANEL_ROW_BYTES;
    const tile::Operand a = tile::columns_operand(fresh(block.slope_tile(count) + own_rows));
    const tile::Operand b =
        tile::rows_operand_beside(fresh(block.keys + own_panel), fresh(block.ones));
    ptx::forget_all(sums);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < config::BLOCK_N / STEP; ++step) {
      RowSum::ss_trans_b(sums, a.columns<config::BLOCK_M>(step), b.rows_beside(step), step != 0);
    }
    ptx::wgmma_commit_group();
  }

  // Hands the part of dQ to the warp that moves it.
  __device__ void hand_sums() {
    ptx::opaque_all(sums);
    hand(sums, sums[EDGE / 2 - 4], sums[EDGE / 2 - 2]);
  }

  // Starts the scores of tile `count`.
  __device__ void ask_scores(u32 count, i32 row) {
    block.queries.wait_full(count);
    clear_past<HEAD_DIM>(block.query_tile(count), row);
    start_scores(count, scores);
  }

  // What is made of tile `count`, and then the weights of the next one, whose first row is `row`.
  __device__ void step(u32 count, i32 row) {
    differentiate_tile(count, scores, slopes);
    ptx::fence_proxy_async_shared();
    start_values(count);
    ptx::bar_sync(SLOPE_BARRIER, config::CONSUMERS * config::WARPGROUP);
    start_rows(count);
    // Products end in their order: dK of the tile before, too.
    ptx::wgmma_wait_group<1>();
    release(block.gradients.empty_of(count));
    if (count > 0) release(block.queries.empty_of(count - 1));
    ask_scores(count + 1, row);
    ptx::wgmma_wait_group<1>();
    hand_sums();
    if constexpr (config::IS_CAPPED) {
      // Nor have its exponentials and the gradients of the weights.
      ptx::wgmma_wait_group<0>();
      weigh_tile(count + 1, row, scores);
    }
    take(count + 1, row, slopes);
    start_keys(count);
    if constexpr (!config::IS_CAPPED) {
      ptx::wgmma_wait_group<2>();
      weigh_tile(count + 1, row, scores);
      round_tile(row, scores);
    }
    ptx::wgmma_wait_group<1>();
  }

  // The same, the next tile's scores under way beside this one's products.
  __device__ void step_ahead(u32 count, i32 row) {
    differentiate_tile(count, scores, slopes);
    ask_scores(count + 1, row);
    ptx::fence_proxy_async_shared();
    ptx::bar_sync(SLOPE_BARRIER, config::CONSUMERS * config::WARPGROUP);
    start_rows(count);
    start_values(count);
    // Products end in their order: dK of the tile before, too.
    ptx::wgmma_wait_group<2>();
    if (count > 0) release(block.queries.empty_of(count - 1));
    weigh_tile(count + 1, row, scores);
    ptx::wgmma_wait_group<1>();
    hand_sums();
    take(count + 1, row, slopes);
    start_keys(count);
    ptx::wgmma_wait_group<2>();
    release(block.gradients.empty_of(count));
    round_tile(row, scores);
    ptx::wgmma_wait_group<1>();
  }

  // The same of the last tile.
  __device__ void finish(u32 count) {
    differentiate_tile(count, scores, slopes);
    ptx::fence_proxy_async_shared();
    ptx::bar_sync(SLOPE_BARRIER, config::CONSUMERS * config::WARPGROUP);
    start_rows(count);
    start_values(count);
    start_keys(count);
    ptx::wgmma_wait_group<2>();
    hand_sums();
    ptx::wgmma_wait_group<0>();
  }

  // All tiles of rows, and the results.
  __device__ void run() {
    const u32 visits = u32(keys.visits(p));
    if (visits > 0) {
      i32 row = one_of_warp(keys.start * config::BLOCK_M);
      start(row, scores, slopes);
      // A turn of the loop begins where dK of the tile before is under way and nothing else: the
      // compiler follows no other product around it.
      const auto next = [&] {
        row += config::BLOCK_M;
        row = one_of_warp(row == keys.hi * config::BLOCK_M ? keys.lo * config::BLOCK_M : row);
        return row;
      };
      u32 count = 0;
#pragma unroll 1
      for (; count + 1 < visits; ++count) {
        if constexpr (IS_AHEAD) {
          step_ahead(count, next());
        } else {
          step(count, next());
        }
      }
      finish(count);
    } else {
#pragma unroll
      for (float& x : key_sums) x = 0.0f;
#pragma unroll
      for (float& x : value_sums) x = 0.0f;
    }
    ptx::opaque_all(key_sums);
    ptx::opaque_all(value_sums);
    // The consumer's own values are read no more, by no warp of it.
    ptx::bar_sync(OWN_BARRIER + consumer, config::WARPGROUP);
    const i32 inside =
        i32(consumer) * CONSUMER_KEYS + one_of_warp(i32(threadIdx.x) / WARP % 4) * WARP_KEYS;
    const u32 panel = block.values + u32(inside) * tile::PANEL_ROW_BYTES;
    const i32 first = keys.first + inside;
    write_keys(p.dv, keys, first, 0, p.call.value_dim, 1.0f, panel, value_sums);
    write_keys(p.dk, keys, first, 0, p.call.head_dim, p.call.scale, panel, key_sums);
  }
};

}  // namespace attn
