// The producer of a Hopper backward block: one warp that has tiles copied, and one for each
// consumer that adds its sums to dQ in memory.
//
// Who executes: `copy_tiles` one thread; `move_sums` all lanes of a warp.
// The invariant: rows past the tensor are 0; rows of other sequences are for the consumers to
// clear.

#pragma once

#include "attn/backward_block_sm90a.cuh"
#include "attn/backward_turn_sm90a.cuh"
#include "ptx/barrier.cuh"
#include "ptx/bulk.cuh"
#include "ptx/tma.cuh"

namespace attn {

struct Maps {
  const ptx::TensorMap* q;
  const ptx::TensorMap* k;
  const ptx::TensorMap* v;
  const ptx::TensorMap* d_o;
};

constexpr i32 PANEL_ELEMENTS = i32(tile::PANEL_ROW_BYTES) / config::ELEMENT_BYTES;

// Asks for a tile of ROWS rows from `row` on, a panel of columns at a time.
template <int ROWS, int DIM>
__device__ void copy_tile(u32 to, const ptx::TensorMap* map, i32 head, i32 row, i32 outer,
                          u32 full) {
#pragma unroll
  for (int panel = 0; panel < tile::panels_of(DIM, config::ELEMENT_BYTES); ++panel) {
    ptx::cp_async_bulk_tensor_4d(to + panel * ROWS * tile::PANEL_ROW_BYTES, map,
                                 panel * PANEL_ELEMENTS, head, row, outer, full);
  }
}

__device__ inline void copy_tiles(const BackwardParams& p, const Maps& maps, const Block& block,
                                  const KeyTile& keys) {
  using namespace config;
  const u32 visits = u32(keys.visits(p));
  if (visits == 0) return;
  const Sequence& sequence = keys.sequence;
  const i32 outer = p.call.flags & Q_PADDED ? sequence.index : 0;
  const i32 kv_outer = p.call.flags & KV_PADDED ? sequence.index : 0;
  const i32 key = i32(sequence.kv_first) + keys.first;
  ptx::mbarrier_arrive_expect_tx(block.keys_full, KEY_BYTES);
  copy_tile<BLOCK_N, HEAD_DIM>(block.keys, maps.k, keys.kv_head, key, kv_outer, block.keys_full);
  Walk walk(keys);
  for (u32 n = 0; n < visits; ++n, walk.next(keys)) {
    const i32 head = keys.kv_head * i32(p.call.group.value) + walk.head;
    const i32 row = i32(sequence.q_first) + walk.tile * BLOCK_M;
    const i64 padded = head * p.padded_rows + keys.padded + walk.tile * BLOCK_M;
    block.queries.wait_empty(n);
    const u32 queries_full = block.queries.full_of(n);
    ptx::mbarrier_arrive_expect_tx(queries_full, QUERY_BYTES + ROW_BYTES);
    copy_tile<BLOCK_M, HEAD_DIM>(block.query_tile(n), maps.q, head, row, outer, queries_full);
    ptx::cp_async_bulk(block.lse2_of(n), p.lse2 + padded, ROW_BYTES, queries_full);
    if (n == 0) {
      ptx::mbarrier_arrive_expect_tx(block.values_full, VALUE_BYTES);
      copy_tile<BLOCK_N, VALUE_DIM>(block.values, maps.v, keys.kv_head, key, kv_outer,
                                    block.values_full);
    }
    block.gradients.wait_empty(n);
    const u32 gradients_full = block.gradients.full_of(n);
    ptx::mbarrier_arrive_expect_tx(gradients_full, GRADIENT_BYTES + ROW_BYTES);
    copy_tile<BLOCK_M, VALUE_DIM>(block.gradient_tile(n), maps.d_o, head, row, outer,
                                  gradients_full);
    ptx::cp_async_bulk(block.delta_of(n), p.delta + padded, ROW_BYTES, gradients_full);
  }
}

// Adds the sums of consumer `consumer` to dQ, tile of rows by tile of rows. Where they have an
// order both consumers' warps count their turn, so that a tile of keys counts for two.
__device__ inline void move_sums(const BackwardParams& p, const Block& block, const KeyTile& keys,
                                 u32 consumer) {
  using namespace config;
  const bool leads = threadIdx.x % WARP == 0;
  const u32 sums = block.sums + consumer * SUM_STRIDE;
  // Where both have dQ of a tile they have the same sums of its rows.
  const bool has_row_sums = HAS_ROW_SUMS && (HAS_ROWS || consumer == 0);
  if (keys.lo == keys.hi) return;
  for (Walk walk(keys); walk.head < i32(p.call.group.value); walk.next(keys)) {
    const i32 head = keys.kv_head * i32(p.call.group.value) + walk.head;
    const i64 padded = keys.padded + walk.tile * BLOCK_M;
    const i64 row = head * p.padded_rows + padded;
    float* to = p.dq_sum + row * HEAD_DIM + i64(consumer * (SQUARES * SUM_EDGE * SUM_EDGE));
#pragma unroll 1
    for (int square = 0; square < SQUARES; ++square, to += SUM_EDGE * SUM_EDGE) {
      // What was read may be written again.
      ptx::bar_arrive(SUM_EMPTY_BARRIER + consumer, SUM_THREADS);
      ptx::bar_sync(SUM_FULL_BARRIER + consumer, SUM_THREADS);
      if (leads) {
        if (IS_DETERMINISTIC && square == 0) {
          const u32 before = rank_of(keys, walk.tile) * CONSUMERS;
          while (ptx::ld_acquire_gpu_b32(turn_at(p, head, padded)) < before) {
          }
          ptx::fence_proxy_async_global();
        }
        ptx::cp_reduce_async_bulk_add_f32(to, sums, SUM_BYTES);
        if (has_row_sums && square == 0) {
          ptx::cp_reduce_async_bulk_add_f32(p.row_sums + row + (HAS_ROWS ? consumer * SUM_EDGE : 0),
                                            sums + SUM_BYTES, ROW_SUM_BYTES);
        }
        ptx::cp_async_bulk_commit_group();
        if (IS_DETERMINISTIC && square + 1 == SQUARES) {
          ptx::cp_async_bulk_wait_group<0>();
          ptx::fence_proxy_async_global();
          end_turn(turn_at(p, head, padded));
        } else {
          ptx::cp_async_bulk_wait_group_read<0>();
        }
      }
      __syncwarp();
    }
  }
  // The sums must be in memory before the block ends.
  if (leads) ptx::cp_async_bulk_wait_group<0>();
}

}  // namespace attn
