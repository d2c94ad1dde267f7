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
// once, by one thread, when no product of the warpgroup reads it. Shared memory that a consumer
// writes for the other's products is in two copies, which take turns: who has met the other at the
// barrier of one has seen its products of the copy before end.

#pragma once

#include "attn/backward_block_sm90a.cuh"
#include "attn/backward_write_sm90a.cuh"
#include "ptx/barrier.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

namespace attn {

// A value that all lanes of a warp have alike, and that the compiler keeps in uniform registers.
__device__ inline i32 one_of_warp(i32 x) { return __shfl_sync(~0u, x, 0); }

struct KeyGradient {
  using Score = ptx::Wgmma<config::BLOCK_M, config::DTYPE>;
  using KeySum = ptx::Wgmma<config::HEAD_DIM, config::DTYPE>;
  using ValueSum = ptx::Wgmma<config::VALUE_DIM, config::DTYPE>;
  using RowSum = ptx::Wgmma<SUM_EDGE, config::DTYPE>;
  static constexpr int STEP = 16;  // elements that a product sums

  const BackwardParams& p;
  const Block& block;
  const KeyTile& keys;
  const u32 consumer;
  Keys all;  // rows that see all of this consumer's keys

  float key_sums[config::HEAD_DIM / 2];
  float value_sums[config::VALUE_DIM / 2];
  float scores[SCORES];
  float slopes[SCORES];
  u32 weights[PAIRS];
  float sums[SUMS];

  __device__ KeyGradient(const BackwardParams& params, const Block& memory, const KeyTile& tile,
                         u32 index)
      : p(params), block(memory), keys(tile), consumer(index) {
    const i32 first = keys.first + i32(consumer) * config::CONSUMER_KEYS;
    all = {one_of_warp(keys.rows_of(first + config::CONSUMER_KEYS - 1).lo),
           one_of_warp(keys.rows_of(first).hi)};
    if (first + config::CONSUMER_KEYS > keys.sequence.kv_len) all.hi = 0;
  }

  __device__ void release(u32 barrier) const {
    if (ptx::opaque(threadIdx.x) % config::WARPGROUP == 0) ptx::mbarrier_arrive(barrier);
  }

  // Clears rows lo .. hi of a tile of ROWS rows of DIM columns. Both consumers clear the same.
  template <int ROWS, int DIM>
  __device__ void clear(u32 tile, i32 lo, i32 hi) const {
    constexpr i32 PIECES = 8;
    for (i32 piece = lo * PIECES + i32(ptx::opaque(threadIdx.x)) % config::WARPGROUP; piece < hi * PIECES;
         piece += config::WARPGROUP) {
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
    const tile::Operand a = tile::columns_operand(
        block.keys + consumer * config::CONSUMER_KEYS * tile::PANEL_ROW_BYTES);
    const tile::Operand b = tile::columns_operand(block.query_tile(count));
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
    const tile::Operand a = tile::columns_operand(
        block.values + consumer * config::CONSUMER_KEYS * tile::PANEL_ROW_BYTES);
    const tile::Operand b = tile::columns_operand(block.gradient_tile(count));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < config::VALUE_DIM / STEP; ++step) {
      Score::ss(slopes, a.columns<config::BLOCK_N>(step), b.columns<config::BLOCK_M>(step),
                step != 0);
    }
    ptx::wgmma_commit_group();
  }

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
    const tile::Operand b = tile::rows_operand<config::BLOCK_N>(block.keys + own_panel);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < config::BLOCK_N / STEP; ++step) {
      RowSum::ss_trans_b(sums, a.columns<config::BLOCK_M>(step), b.rows(step), step != 0);
    }
    ptx::wgmma_commit_group();
  }

  // Hands the part of dQ to the warp that moves it.
  __device__ void hand_sums() {
    ptx::opaque_all(sums);
    const u32 own = block.sums + consumer * SUM_BYTES + ptx::opaque(threadIdx.x) % config::WARPGROUP * 16;
    ptx::bar_sync(SUM_EMPTY_BARRIER + consumer, SUM_THREADS);
#pragma unroll
    for (int j = 0; j < SUMS / 4; ++j) {
      ptx::st_shared_v4_f32(own + j * config::WARPGROUP * 16, sums[j * 4], sums[j * 4 + 1],
                            sums[j * 4 + 2], sums[j * 4 + 3]);
    }
    ptx::fence_proxy_async_shared();
    ptx::bar_arrive(SUM_FULL_BARRIER + consumer, SUM_THREADS);
  }

  // The lane's first key.
  __device__ i32 own_key() const {
    const i32 thread = i32(ptx::opaque(threadIdx.x) % config::WARPGROUP);
    return keys.first + i32(consumer) * config::CONSUMER_KEYS + thread / WARP * WARP_KEYS +
           thread % WARP / 4;
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
    const bool is_cut = row < all.lo || row + config::BLOCK_M > all.hi;
    if (config::IS_CAPPED || is_cut) {
      weigh<true>(p.call, Seen(keys, own_key(), row), block.lse2_of(count), scores);
    } else {
      weigh<false>(p.call, Seen(), block.lse2_of(count), scores);
    }
  }

  // Makes gradients of the scores of tile `count`, starts dV and dQ, and sees dV end: products end
  // in their order, so that it is as good as over when dQ has been started.
  __device__ void give(u32 count) {
    ptx::opaque_all(slopes);
    differentiate(p.call, block.lse2_of(count), block.delta_of(count),
                  block.slope_tile(count) + consumer * config::BLOCK_M * tile::PANEL_ROW_BYTES,
                  scores, slopes, weights);
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
      wait_keys<config::HEAD_DIM>(block.keys, block.keys_full);
      block.queries.wait_full(0);
      clear_past<config::HEAD_DIM>(block.query_tile(0), row);
      start_scores(0);
      wait_keys<config::VALUE_DIM>(block.values, block.values_full);
      take(0, row);
      ptx::wgmma_wait_group<1>();
      weigh_tile(0, row);
      ptx::wgmma_wait_group<0>();
      // A turn of the loop begins where dK of the tile before is under way and nothing else: the
      // compiler follows no other product around it.
#pragma unroll 1
      for (u32 count = 1; count < visits; ++count) {
        give(count - 1);
        walk.next(keys);
        row = one_of_warp(walk.tile * config::BLOCK_M);
        block.queries.wait_full(count);
        clear_past<config::HEAD_DIM>(block.query_tile(count), row);
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
        i32(consumer) * config::CONSUMER_KEYS + one_of_warp(i32(threadIdx.x) / WARP % 4) * WARP_KEYS;
    const u32 panel = block.values + u32(inside) * tile::PANEL_ROW_BYTES;
    const i32 first = keys.first + inside;
    write_keys(p.dv, keys, first, p.call.value_dim, 1.0f, panel, value_sums);
    write_keys(p.dk, keys, first, p.call.head_dim, p.call.scale, panel, key_sums);
  }
};

}  // namespace attn
