// A consumer of a Hopper backward block for wide rows: a warpgroup that has the same 64 keys as the
// other one, half of the rows of a tile's scores, and half of the columns of all gradients.
//
// Source: as attn/backward_consume_sm90a.cuh. Weights and the gradients of scores of both consumers
// meet in shared memory, from where P^T, dS^T and dS are first operands of dV += P^T dO, dK += dS^T
// Q and dQ = dS K.
// Overlap: products follow one another as dQ, dK of a tile, S, dP, dV of the next; the exponentials
// run beside dP, the gradient of the scores beside dV. There is room for half of a consumer's sums
// for dQ at a time: a square moves out beside dK, the other beside dV.
// Registers: sums of keys and of values [HEAD_DIM / 4] throughout, and for dQ; scores and their
// gradients [SCORE_ROWS / 2].
// Who executes: all warps of a consumer, converged.
// The invariant: that of attn/backward_consume_sm90a.cuh, for weights as for gradients of scores.

#pragma once

#include "attn/backward_scores_sm90a.cuh"

namespace attn {

template <int HEAD_DIM>
struct WideGradient : Scores {
  static constexpr int COLUMNS = HEAD_DIM / config::CONSUMERS;
  static constexpr int OWN_SUMS = COLUMNS / 2;
  using Sum = ptx::Wgmma<COLUMNS, config::DTYPE>;
  using Ones = ptx::Wgmma<8, config::DTYPE>;

  float key_sums[OWN_SUMS];
  float value_sums[OWN_SUMS];
  float sums[OWN_SUMS];
  float row_sums[4];
  float scores[SCORES];
  float slopes[SCORES];

  using Scores::Scores;

  // The consumer's columns of a tile of ROWS rows.
  template <int ROWS>
  __device__ u32 own_columns(u32 tile) const {
    return tile + consumer * config::SQUARES * ROWS * tile::PANEL_ROW_BYTES;
  }

  // Starts TO += X^T Y, of pairs [BLOCK_M, 64 keys] and of a tile of rows.
  __device__ void start_sum(float (&to)[OWN_SUMS], u32 pairs, u32 rows, bool has_sum) const {
    const tile::Operand a = tile::rows_operand<config::BLOCK_M>(pairs);
    const tile::Operand b = tile::rows_operand<config::BLOCK_M>(own_columns<config::BLOCK_M>(rows));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < config::BLOCK_M / STEP; ++step) {
      Sum::ss_trans_ab(to, a.rows(step), b.rows(step), step != 0 || has_sum);
    }
    ptx::wgmma_commit_group();
  }

  // Starts dQ = dS K.
  __device__ void start_rows(u32 count) {
    const tile::Operand a = tile::columns_operand(block.slope_tile(count));
    const tile::Operand b =
        tile::rows_operand<config::BLOCK_N>(own_columns<config::BLOCK_N>(block.keys));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < config::BLOCK_N / STEP; ++step) {
      Sum::ss_trans_b(sums, a.columns<config::BLOCK_M>(step), b.rows(step), step != 0);
    }
    if constexpr (config::HAS_ROW_SUMS) {
      // Next to two panels there is no third place for keys that are 1: a product of their own.
      const u64 ones = tile::alike_operand(block.ones);
#pragma unroll
      for (int step = 0; step < config::BLOCK_N / STEP; ++step) {
        Ones::ss(row_sums, a.columns<config::BLOCK_M>(step), ones, step != 0);
      }
    }
    ptx::wgmma_commit_group();
  }

  // Hands a square of the consumer's part of dQ to the warp that moves it.
  template <int SQUARE>
  __device__ void hand_sums() {
    if constexpr (SQUARE == 0) ptx::opaque_all(sums);
    if constexpr (config::HAS_ROW_SUMS) ptx::opaque_all(row_sums);
    hand(sums + SQUARE * SUMS, row_sums[0], row_sums[2]);
  }

  // Makes weights of the scores of tile `count` in `scores`, lays them down, and starts dV when the
  // other consumer has done so.
  __device__ void give_weights(u32 count, i32 row) {
    weigh_tile(count, row, scores);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) weights[i] = round_pair(scores[i * 2], scores[i * 2 + 1]);
    lay_down(block.weight_tile(count) + own_rows(), weights);
    ptx::fence_proxy_async_shared();
    ptx::bar_sync(WEIGHT_BARRIER, config::CONSUMERS * config::WARPGROUP);
    start_sum(value_sums, block.weight_tile(count), block.gradient_tile(count), count > 0);
  }

  // Lays the gradients of the scores of tile `count` down, and starts dQ and dK when the other
  // consumer has done so.
  __device__ void give_slopes(u32 count) {
    differentiate_tile(count, scores, slopes);
    ptx::fence_proxy_async_shared();
    ptx::wgmma_wait_group<0>();
    release(block.gradients.empty_of(count));
    ptx::bar_sync(SLOPE_BARRIER, config::CONSUMERS * config::WARPGROUP);
    start_rows(count);
    start_sum(key_sums, block.slope_tile(count), block.query_tile(count), count > 0);
  }

  // All tiles of rows, and the results.
  __device__ void run() {
    const u32 visits = u32(keys.visits(p));
    if (visits > 0) {
      Walk walk(keys);
      i32 row = one_of_warp(walk.tile * config::BLOCK_M);
      wait_keys<HEAD_DIM>(block.keys, block.keys_full);
      block.queries.wait_full(0);
      clear_past<HEAD_DIM>(block.query_tile(0), row);
      start_scores(0, scores);
      wait_keys<HEAD_DIM>(block.values, block.values_full);
      take(0, row, slopes);
      ptx::wgmma_wait_group<1>();
      give_weights(0, row);
      ptx::wgmma_wait_group<1>();
      // A turn of the loop begins where dV is under way and nothing else: the compiler follows no
      // other product around it.
#pragma unroll 1
      for (u32 count = 1; count < visits; ++count) {
        give_slopes(count - 1);
        walk.next(keys);
        row = one_of_warp(walk.tile * config::BLOCK_M);
        block.queries.wait_full(count);
        clear_past<HEAD_DIM>(block.query_tile(count), row);
        start_scores(count, scores);
        ptx::wgmma_wait_group<2>();
        hand_sums<0>();
        take(count, row, slopes);
        ptx::wgmma_wait_group<1>();
        release(block.queries.empty_of(count - 1));
        give_weights(count, row);
        hand_sums<1>();
        ptx::wgmma_wait_group<1>();
      }
      give_slopes(visits - 1);
      ptx::wgmma_wait_group<1>();
      hand_sums<0>();
      hand_sums<1>();
      ptx::wgmma_wait_group<0>();
    } else {
#pragma unroll
      for (float& x : key_sums) x = 0.0f;
#pragma unroll
      for (float& x : value_sums) x = 0.0f;
    }
    ptx::opaque_all(key_sums);
    ptx::opaque_all(value_sums);
    // Values are read no more: both consumers have met since the last product that did.
    const i32 inside = one_of_warp(i32(threadIdx.x) / WARP % 4) * WARP_KEYS;
    const u32 panel =
        block.values + (consumer * config::BLOCK_N + u32(inside)) * tile::PANEL_ROW_BYTES;
    const i32 first = keys.first + inside;
    const i32 column = i32(consumer) * COLUMNS;
    write_keys(p.dv, keys, first, column, p.call.value_dim, 1.0f, panel, value_sums);
    write_keys(p.dk, keys, first, column, p.call.head_dim, p.call.scale, panel, key_sums);
  }
};

}  // namespace attn
