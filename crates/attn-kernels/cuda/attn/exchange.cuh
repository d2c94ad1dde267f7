// Parts of the keys of a sequence that the blocks of a cluster have: each block sends its rows, a
// piece to each of the others, and joins the pieces that it gets.
//
// Source: as attn/merge.cuh.
// Tensors: o, lse. Where parts make several clusters, partial_o of cluster n at the partial row of
// part n; its LSE once for each block, of the rows of which the block has a piece, at the partial
// row of the block's own part; counter, of the blocks of one rank, at that of part `rank`.
// Shared memory, from Exchange::START of a block's dynamic memory: a barrier of 16 bytes, LSE f32
// [blocks, BLOCK_M], then columns f32 [blocks, piece, 4]. Rows are cut into quads of columns, and a
// piece is ceil(rows * QUADS / blocks) of them.
// Who executes: all threads of all blocks of a cluster, whose parts are of one unit.
// The invariant: a block is written to only after all have begun, and ends only after all of its
// pieces have come. The sum runs over the parts in order, so equal calls give equal bits. What it
// does not do: choose the size of a cluster (src/cuda/cluster.rs).

#pragma once

#include "attn/merge.cuh"
#include "attn/output.cuh"
#include "attn/stage.cuh"
#include "ptx/cluster.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/shared.cuh"

namespace attn {

struct Exchange {
  static constexpr i32 QUADS = config::VALUE_DIM / 4;
  // The queries and rings of attn/forward.cuh, or the rows of attn/output.cuh.
  static constexpr u32 START = max_of(
      i32(tile::Panels<config::BLOCK_M, config::HEAD_DIM>::BYTES + config::TEAMS * TEAM_BYTES),
      config::TEAMS* config::BLOCK_M*(config::VALUE_DIM + 6) * 4);

  // Blocks of a cluster, at most.
  static constexpr int MOST = 16;
  static constexpr int BYTES =
      16 + MOST * config::BLOCK_M * 4 + (config::BLOCK_M * QUADS + MOST) * 16;
  // The host counts them (src/cuda/config.rs).
  static_assert(config::BLOCK_M != 16 || config::VALUE_DIM != 128 || BYTES == 9488);

  u32 blocks;  // 1: there is nothing to exchange
  u32 rank;
  i32 rows;   // flat rows of the unit
  i32 piece;  // quads of a block
  u32 barrier;

  __device__ Exchange(const ForwardParams& p, const Unit& unit, u32 memory)
      : blocks(ptx::cluster_nctaid_x<__CUDA_ARCH__>()),
        rank(ptx::cluster_ctaid_x<__CUDA_ARCH__>()),
        rows(unit.flat_rows(p, config::BLOCK_M)),
        piece(ceil_div(rows * QUADS, i32(blocks))),
        barrier(memory + START) {}

  __device__ bool is_any() const { return blocks > 1; }

  // Quads of this block's own piece: the last ones may be shorter.
  __device__ i32 own_quads() const { return clamp_of(rows * QUADS - i32(rank) * piece, 0, piece); }

  __device__ u32 lse_of(u32 block, i32 row) const {
    return barrier + 16 + (block * config::BLOCK_M + u32(row)) * 4;
  }
  __device__ u32 quad_of(u32 block, i32 quad) const {
    return barrier + 16 + blocks * config::BLOCK_M * 4 + (block * u32(piece) + u32(quad)) * 16;
  }

  // Makes the barrier ready; all threads of the block.
  __device__ void begin() const {
    if (threadIdx.x == 0) {
      ptx::mbarrier_init(barrier, 1);
      ptx::fence_mbarrier_init();
      ptx::mbarrier_arrive_expect_tx(barrier, blocks * u32(rows * 4 + own_quads() * 16));
    }
    __syncthreads();
    ptx::barrier_cluster_arrive<__CUDA_ARCH__>();
  }

  // Before the first `send`; all threads of the block.
  __device__ void wait_begun() const { ptx::barrier_cluster_wait<__CUDA_ARCH__>(); }

  // Sends four columns of a row to the block that joins them, and its LSE to all: LANES threads
  // have a row, from column 0 on.
  __device__ void send(i32 row, i32 column, const float4& x, float lse) const {
    const i32 at = row * QUADS + column / 4;
    const u32 to = u32(at / piece);
    const auto there = [&](u32 address, u32 block) {
      return ptx::mapa_shared_cluster<__CUDA_ARCH__>(address, block);
    };
    ptx::st_async_v4_f32<__CUDA_ARCH__>(there(quad_of(rank, at - i32(to) * piece), to), x,
                                        there(barrier, to));
    for (u32 block = u32(column / 4); block < blocks; block += QUADS) {
      ptx::st_async_f32<__CUDA_ARCH__>(there(lse_of(rank, row), block), lse, there(barrier, block));
    }
  }

  // Where quad `i` of the block's own piece is.
  struct Spot {
    i32 column;
    i32 row;
    i32 position;
    i32 head;
    bool is_row;
  };
  __device__ Spot spot_of(const ForwardParams& p, const Unit& unit, i32 i) const {
    const i32 at = i32(rank) * piece + i;
    const i32 row = at / QUADS;
    const i32 position = unit.position(p, row);
    return {at % QUADS * 4, row, position, unit.head_of(p, row, position),
            position < unit.sequence.q_len};
  }

  // A quad of a row's columns, and its LSE.
  struct Quad {
    float4 x;
    float lse;
  };

  // Joins `count` results, of which `lse_of` and `columns_of` answer the n-th one's.
  template <typename Lse, typename Columns>
  __device__ static Quad join_quad(i32 count, float sink, const Lse& lse_of,
                                   const Columns& columns_of) {
    float max = sink;
    for (i32 n = 0; n < count; ++n) max = fmaxf(max, lse_of(n));
    float sum = 0.0f;
    merge::Four o = {};
#pragma unroll 4
    for (i32 n = 0; n < count; ++n) {
      const float share = merge::share_of(lse_of(n), max);
      sum += share;
      o.add(share, columns_of(n));
    }
    const merge::Join all(max, sum, sink);
    return {{o.x[0] * all.factor, o.x[1] * all.factor, o.x[2] * all.factor, o.x[3] * all.factor},
            all.lse};
  }

  __device__ static float sink_at(const ForwardParams& p, const Unit& unit, const Spot& at) {
    return at.is_row ? per_head(p.sinks, unit.sequence.index, at.head, NEG_INF) : NEG_INF;
  }

  // Joins this block's piece of what all of the cluster have sent: the output, where these are all
  // parts, else a result of the cluster, whose LSEs each block writes for itself.
  __device__ void join(const ForwardParams& p, const Unit& unit, const PartialRows& partial) const {
    while (!ptx::mbarrier_try_wait_parity_cluster(barrier, 0)) {
    }
    const PartialRows own = {partial.are_used, partial.first, unit.part, unit.rows};
    for (i32 i = i32(threadIdx.x); i < own_quads(); i += config::THREADS) {
      const Spot at = spot_of(p, unit, i);
      const float sink = partial.are_used ? NEG_INF : sink_at(p, unit, at);
      const Quad quad = join_quad(
          i32(blocks), sink, [&](i32 n) { return ptx::ld_shared_f32(lse_of(u32(n), at.row)); },
          [&](i32 n) { return ptx::ld_shared_v4_b32(quad_of(u32(n), i)); });
      write_columns(p, unit, partial, at.position, at.head, at.column, quad.x);
      if (at.column == 0 || (partial.are_used && i == 0)) {
        write_lse(p, unit, own, at.position, at.head, quad.lse);
      }
    }
  }

  // After the results of a cluster are written: of the blocks that have the same piece the one that
  // ends last joins it.
  __device__ void join_clusters(const ForwardParams& p, const Unit& unit, i64 partial_first,
                                i32 clusters) const {
    if (!ends_last(p, unit, partial_first, i32(rank), clusters)) return;
    const PartialRows whole = {false, 0, 0, 0};
    for (i32 i = i32(threadIdx.x); i < own_quads(); i += config::THREADS) {
      const Spot at = spot_of(p, unit, i);
      if (at.column >= p.value_dim) continue;
      const auto row_of = [&](i32 part) {
        return partial_row(p, partial_first, part, unit.rows, at.position, at.head);
      };
      const Quad quad = join_quad(
          at.is_row ? clusters : 0, sink_at(p, unit, at),
          [&](i32 n) {
            return ptx::ld_global_cg_f32(p.partial_lse + row_of(n * i32(blocks) + i32(rank)));
          },
          [&](i32 n) {
            return ptx::ld_global_cg_v4_b32(p.partial_o + row_of(n) * p.value_dim + at.column);
          });
      write_columns(p, unit, whole, at.position, at.head, at.column, quad.x);
      if (at.column == 0) write_lse(p, unit, whole, at.position, at.head, quad.lse);
    }
  }
};

}  // namespace attn
