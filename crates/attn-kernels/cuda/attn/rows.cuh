// Query rows on their way into shared memory, and where the rows of q, o and lse are.
//
// Tensors: q [rows, q_heads, head_dim]. Who executes: all threads of the block; the copy has landed
// when they have waited for their groups and met.
// Shared memory: a 16-bit tile [BLOCK_M, HEAD_DIM] (tile/panel.cuh).
// The invariant: a row past the sequence's length is zero in the tile, and never an address.

#pragma once

#include "attn/unit.cuh"
#include "base/config.cuh"
#include "base/params.cuh"
#include "ptx/cp_async.cuh"
#include "tile/panel.cuh"

namespace attn {

// Element 0 of a query-side row: position `position` of the unit's sequence, head `head`.
template <typename T>
__device__ T* query_row(const Rows& rows, const Unit& unit, i32 position, i32 head) {
  return static_cast<T*>(rows.data) + query_offset(rows, unit.sequence, position, head);
}

// Starts the copy of the unit's query tile; all threads of the block.
__device__ inline void load_queries(const ForwardParams& p, const Unit& unit, u32 tile) {
  using namespace config;
  using Q = tile::Panels<BLOCK_M, HEAD_DIM>;
  constexpr int LANES = Q::CHUNKS;
  constexpr int PASS = THREADS / LANES;
  const int chunk = threadIdx.x % LANES;
#pragma unroll 2
  for (int row = threadIdx.x / LANES; row < BLOCK_M; row += PASS) {
    const i32 position = unit.position(p, row);
    const bool is_row = position < unit.sequence.q_len;
    const i32 head = unit.head_of(p, row, position);
    const u16* from = is_row ? query_row<u16>(p.q, unit, position, head) : nullptr;
#pragma unroll
    for (int panel = 0; panel < Q::COUNT; ++panel) {
      const i32 column = panel * Q::WIDTH + chunk * 8;
      const bool is_there = is_row && column < p.head_dim;
      ptx::cp_async_cg_16(tile + Q::offset(row, panel * Q::CHUNKS + chunk),
                          is_there ? from + column : p.q.data, is_there ? 16 : 0);
    }
  }
}

}  // namespace attn
