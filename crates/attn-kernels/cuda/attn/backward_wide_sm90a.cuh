// A consumer of a Hopper backward block for wide rows: a warpgroup that has the same 64 keys as the
// other one, half of the rows of a tile's scores, and half of the columns of all gradients.
//
// Source: as attn/backward_consume_sm90a.cuh. Weights and the gradients of scores of both consumers
// meet in shared memory, from where P^T, dS^T and dS are first operands of dV += P^T dO, dK += dS^T
// Q and dQ = dS K. There is no room to stage dQ: it is added to memory from registers.
// Overlap: products follow one another as dV, dQ of a tile, S of the next, dK, dP; the exponentials
// run beside dK and dP, and dQ moves out beside S.
// Registers: sums of keys and of values [HEAD_DIM / 4] throughout, and for dQ; scores and their
// gradients [SCORE_ROWS / 2].
// Who executes: all warps of a consumer, converged.
// The invariant: that of attn/backward_consume_sm90a.cuh, for weights as for gradients of scores.

#pragma once

#include "attn/backward_scores_sm90a.cuh"
#include "attn/backward_turn_sm90a.cuh"
#include "ptx/global.cuh"

namespace attn {

template <int HEAD_DIM>
struct WideGradient : Scores {
  static constexpr int COLUMNS = HEAD_DIM / config::CONSUMERS;
  static constexpr int OWN_SUMS = COLUMNS / 2;
  static constexpr int SQUARES = COLUMNS / SUM_EDGE;
  using Sum = ptx::Wgmma<COLUMNS, config::DTYPE>;
  using Ones = ptx::Wgmma<8, config::DTYPE>;

  float key_sums[OWN_SUMS];
  float value_sums[OWN_SUMS];
  float sums[OWN_SUMS];
  float row_sums[4];

  using Scores::Scores;

  // The consumer's columns of a tile of ROWS rows.
  template <int ROWS>
  __device__ u32 own_columns(u32 tile) const {
    return tile + consumer * SQUARES * ROWS * tile::PANEL_ROW_BYTES;
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

  // Adds the consumer's part of dQ of a tile of rows, in its turn where sums have an order.
  __device__ void add_sums(const Walk& walk) {
    ptx::opaque_all(sums);
    if constexpr (config::HAS_ROW_SUMS) ptx::opaque_all(row_sums);
    const i32 head = keys.kv_head * i32(p.call.group.value) + walk.head;
    const i64 padded = keys.padded + walk.tile * config::BLOCK_M;
    u32* const turn = turn_at(p, head, padded);
    const u32 thread = ptx::opaque(threadIdx.x) % config::WARPGROUP;
    if constexpr (config::IS_DETERMINISTIC) {
      if (thread == 0) {
        const u32 before = rank_of(keys, walk.tile) * config::CONSUMERS;
        while (ptx::ld_acquire_gpu_b32(turn) < before) {
        }
      }
      ptx::bar_sync(OWN_BARRIER + consumer, config::WARPGROUP);
    }
    float* const to = p.dq_sum + (head * p.padded_rows + padded) * HEAD_DIM +
                      i64(consumer * (SQUARES * SUM_EDGE * SUM_EDGE) + thread * 4);
#pragma unroll
    for (int j = 0; j < OWN_SUMS / 4; ++j) {
      ptx::red_global_add_v4_f32<__CUDA_ARCH__>(to + j * config::WARPGROUP * 4, sums[j * 4],
                                                sums[j * 4 + 1], sums[j * 4 + 2], sums[j * 4 + 3]);
    }
    // Both consumers have the sums of all rows.
    if (config::HAS_ROW_SUMS && consumer == 0 && thread % 4 == 0) {
      float* const row = p.row_sums + head * p.padded_rows + padded +
                         i32(thread / WARP * WARP_KEYS + thread % WARP / 4);
      ptx::red_global_add_f32(row, row_sums[0]);
      ptx::red_global_add_f32(row + 8, row_sums[2]);
    }
    if constexpr (config::IS_DETERMINISTIC) {
      ptx::fence_acq_rel_gpu();
      ptx::bar_sync(OWN_BARRIER + consumer, config::WARPGROUP);
      if (thread == 0) end_turn(turn);
    }
  }

  // Lays weights and gradients of the scores of tile `count` down, starts dV and dQ when the other
  // consumer has done so, and sees dV end.
  __device__ void give(u32 count) {
    differentiate_tile(count);
    lay_down(block.weight_tile(count) + own_rows(), weights);
    ptx::fence_proxy_async_shared();
    ptx::bar_sync(SLOPE_BARRIER, config::CONSUMERS * config::WARPGROUP);
    start_sum(value_sums, block.weight_tile(count), block.gradient_tile(count), count > 0);
    start_rows(count);
    ptx::wgmma_wait_group<1>();
    release(block.gradients.empty_of(count));
  }

  __device__ void start_keys(u32 count) {
    start_sum(key_sums, block.slope_tile(count), block.query_tile(count), count > 0);
  }

  // All tiles of rows, and the results.
  __device__ void run() {
    const u32 visits = u32(keys.visits(p));
    if (visits > 0) {
      Walk walk(keys);
      start(one_of_warp(walk.tile * config::BLOCK_M));
#pragma unroll 1
      for (u32 count = 1; count < visits; ++count) {
        give(count - 1);
        Walk next = walk;
        next.next(keys);
        const i32 row = one_of_warp(next.tile * config::BLOCK_M);
        block.queries.wait_full(count);
        clear_past<HEAD_DIM>(block.query_tile(count), row);
        start_scores(count);
        ptx::wgmma_wait_group<1>();
        add_sums(walk);
        start_keys(count - 1);
        take(count, row);
        ptx::wgmma_wait_group<2>();
        weigh_tile(count, row);
        ptx::wgmma_wait_group<1>();
        release(block.queries.empty_of(count - 1));
        ptx::wgmma_wait_group<0>();
        walk = next;
      }
      give(visits - 1);
      start_keys(visits - 1);
      ptx::wgmma_wait_group<1>();
      add_sums(walk);
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
