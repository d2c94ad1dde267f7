// A consumer of a Hopper backward block: a warpgroup with 64 keys that takes the tiles of query
// rows as they land.
//
// Source: T. Dao, "FlashAttention-2", arXiv:2307.08691, algorithm 2; J. Shah et al.,
// "FlashAttention-3", arXiv:2407.08608, section 3.1. Of a tile of rows: S^T = K Q^T and dP^T = V
// dO^T, transposed, so that P^T is the first operand, in registers, of dV += P^T dO; dS in 16 bits
// through shared memory, which dQ = dS K takes of the keys of both consumers, and dK += dS^T Q of
// its own.
// Overlap: products follow one another as dV, dQ of a tile, S, dP of the next, dK; the exponentials
// and the gradient of the scores run beside dP and dK, and dQ moves out beside S.
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
  using KeySum = ptx::Wgmma<HEAD_DIM, config::DTYPE>;
  using ValueSum = ptx::Wgmma<VALUE_DIM, config::DTYPE>;
  // One more tile of columns is of keys that are 1.
  static constexpr int EDGE = SUM_EDGE + 8;
  using RowSum = ptx::Wgmma<EDGE, config::DTYPE>;

  float key_sums[HEAD_DIM / 2];
  float value_sums[VALUE_DIM / 2];
  float sums[EDGE / 2];

  using Scores::Scores;

  // Starts dV += P^T dO.
  __device__ void start_values(u32 count) {
    const tile::Operand b = tile::rows_operand<config::BLOCK_M>(block.gradient_tile(count));
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
        block.slope_tile(count) + consumer * config::BLOCK_M * tile::PANEL_ROW_BYTES);
    const tile::Operand b = tile::rows_operand<config::BLOCK_M>(block.query_tile(count));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < config::BLOCK_M / STEP; ++step) {
      KeySum::ss_trans_ab(key_sums, a.rows(step), b.rows(step), step != 0 || count > 0);
    }
    ptx::wgmma_commit_group();
  }

  // Starts this consumer's part of dQ = dS K: rows of its own where a tile has 128, else columns.
  __device__ void start_rows(u32 count) {
    constexpr bool HAS_ROWS = config::BLOCK_M == config::CONSUMERS * SUM_EDGE;
    const u32 own_rows = HAS_ROWS ? consumer * SUM_EDGE * tile::PANEL_ROW_BYTES : 0;
    const u32 own_panel = HAS_ROWS ? 0 : consumer * config::BLOCK_N * tile::PANEL_ROW_BYTES;
    const tile::Operand a = tile::columns_operand(block.slope_tile(count) + own_rows);
    const tile::Operand b = tile::rows_operand_beside(block.keys + own_panel, block.ones);
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
    const u32 thread = ptx::opaque(threadIdx.x) % config::WARPGROUP;
    const u32 to = block.sums + consumer * SUM_STRIDE;
    const u32 own = to + thread * 16;
    ptx::bar_sync(SUM_EMPTY_BARRIER + consumer, SUM_THREADS);
#pragma unroll
    for (int j = 0; j < SUMS / 4; ++j) {
      ptx::st_shared_v4_f32(own + j * config::WARPGROUP * 16, sums[j * 4], sums[j * 4 + 1],
                            sums[j * 4 + 2], sums[j * 4 + 3]);
    }
    if (config::HAS_ROW_SUMS && thread % 4 == 0) {
      const u32 row = to + SUM_BYTES + (thread / WARP * WARP_KEYS + thread % WARP / 4) * 4;
      ptx::st_shared_f32(row, sums[EDGE / 2 - 4]);
      ptx::st_shared_f32(row + 8 * 4, sums[EDGE / 2 - 2]);
    }
    ptx::fence_proxy_async_shared();
    ptx::bar_arrive(SUM_FULL_BARRIER + consumer, SUM_THREADS);
  }

  // Makes gradients of the scores of tile `count`, starts dV and dQ, and sees dV end: products end
  // in their order, so that it is as good as over when dQ has been started.
  __device__ void give(u32 count) {
    differentiate_tile(count);
    ptx::fence_proxy_async_shared();
    start_values(count);
    ptx::bar_sync(SLOPE_BARRIER, config::CONSUMERS * config::WARPGROUP);
    start_rows(count);
    ptx::wgmma_wait_group<1>();
    release(block.gradients.empty_of(count));
    if (count > 0) release(block.queries.empty_of(count - 1));
  }

  // All tiles of rows, and the results.
  __device__ void run() {
    const u32 visits = u32(keys.visits(p));
    if (visits > 0) {
      Walk walk(keys);
      i32 row = one_of_warp(walk.tile * config::BLOCK_M);
      start(row);
      // A turn of the loop begins where dK of the tile before is under way and nothing else: the
      // compiler follows no other product around it.
#pragma unroll 1
      for (u32 count = 1; count < visits; ++count) {
        give(count - 1);
        walk.next(keys);
        row = one_of_warp(walk.tile * config::BLOCK_M);
        block.queries.wait_full(count);
        clear_past<HEAD_DIM>(block.query_tile(count), row);
        start_scores(count);
        ptx::wgmma_wait_group<1>();
        hand_sums();
        take(count, row);
        start_keys(count - 1);
        ptx::wgmma_wait_group<2>();
        weigh_tile(count, row);
        ptx::wgmma_wait_group<1>();
      }
      give(visits - 1);
      start_keys(visits - 1);
      ptx::wgmma_wait_group<1>();
      hand_sums();
      ptx::wgmma_wait_group<0>();
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
