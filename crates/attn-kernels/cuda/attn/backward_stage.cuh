// Tiles of a backward on their way into shared memory.
//
// Who executes: all threads of the block. The invariant: a row outside its range is zero in the
// tile and its memory is not read; columns past the call's dimensions are zero.
// What it does not do: commit, wait, or bar (attn/backward.cuh).

#pragma once

#include "attn/backward_unit.cuh"
#include "base/config_backward.cuh"
#include "ptx/cp_async.cuh"
#include "tile/panel.cuh"

namespace attn {

// Starts the copies of rows first .. first + ROWS of `rows`, of which lo .. hi exist. `base` is
// element 0 of row 0.
template <int ROWS, int DIM>
__device__ void copy_rows(u32 tile, const u16* base, i64 stride, i32 first, i32 lo, i32 hi,
                          i32 dim) {
  using Tile = tile::Panels<ROWS, DIM>;
  constexpr int LANES = Tile::CHUNKS;
  constexpr int PASS = config::THREADS / LANES;
  const int chunk = threadIdx.x % LANES;
#pragma unroll
  for (int pass = 0; pass < (ROWS + PASS - 1) / PASS; ++pass) {
    const int at = threadIdx.x / LANES + pass * PASS;
    if (ROWS % PASS != 0 && at >= ROWS) break;
    const i32 row = first + at;
    const bool is_row = row >= lo && row < hi;
    const u16* from = base + (is_row ? row : lo) * stride + chunk * 8;
#pragma unroll
    for (int panel = 0; panel < Tile::COUNT; ++panel) {
      const i32 column = panel * Tile::WIDTH + chunk * 8;
      const bool is_there = is_row && column < dim;
      ptx::cp_async_cg_16(tile + Tile::offset(at, panel * LANES + chunk),
                          is_there ? from + panel * Tile::WIDTH : base, is_there ? 16 : 0);
    }
  }
}

// One stage: query rows, their output's gradient, and their two numbers.
struct Stage {
  using Q = tile::Panels<config::BLOCK_M, config::HEAD_DIM>;
  using D_o = tile::Panels<config::BLOCK_M, config::VALUE_DIM>;
  static constexpr u32 D_O = Q::BYTES;
  static constexpr u32 LSE2 = D_O + D_o::BYTES;
  static constexpr u32 DELTA = LSE2 + config::BLOCK_M * 4;
  static constexpr u32 BYTES = DELTA + config::BLOCK_M * 4;
};

// Starts the copies of a tile of query rows of a head.
__device__ inline void load_stage(const BackwardParams& p, const BackwardUnit& unit, i32 head,
                                  i32 tile, u32 stage) {
  using namespace config;
  const i32 first = tile * BLOCK_M;
  const Sequence& s = unit.sequence;
  const u16* q = static_cast<const u16*>(p.call.q.data) + query_offset(p.call.q, s, 0, head);
  const u16* d_o = static_cast<const u16*>(p.d_o.data) + query_offset(p.d_o, s, 0, head);
  copy_rows<BLOCK_M, HEAD_DIM>(stage, q, p.call.q.row, first, first, s.q_len, p.call.head_dim);
  copy_rows<BLOCK_M, VALUE_DIM>(stage + Stage::D_O, d_o, p.d_o.row, first, first, s.q_len,
                                p.call.value_dim);
  constexpr int VECTORS = BLOCK_M / 4;
  const int thread = threadIdx.x;
  if (thread < 2 * VECTORS) {
    const float* from = (thread < VECTORS ? p.lse2 : p.delta) + head * p.padded_rows +
                        unit.padded + first + thread % VECTORS * 4;
    ptx::cp_async_cg_16(stage + Stage::LSE2 + thread * 16, from, 16);
  }
}

}  // namespace attn
