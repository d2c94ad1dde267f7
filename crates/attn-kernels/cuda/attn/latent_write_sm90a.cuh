// The end of a unit over a latent cache: rows divided by their denominators, and written.
//
// As attn/output.cuh for one team, with the columns of a row in two warpgroups.
// Tensors: o, lse and the partial results of ForwardParams.
// Who executes: all warps of both consumers, behind their last product.
// Shared memory: a 16-bit tile [BLOCK_M, VALUE_DIM] in place of the queries; a factor for each row.
// What it does not do: join parts (attn/merge.cuh).

#pragma once

#include "attn/latent_consume_sm90a.cuh"
#include "attn/output.cuh"

namespace attn::latent {

// Ends the rows of the first consumer, which has their sums, and leaves each one's factor for both.
__device__ inline void finish_rows(const ForwardParams& p, const Unit& unit,
                                   const PartialRows& partial, const Softmax& softmax,
                                   float* factors) {
  const i32 warp = i32(threadIdx.x) / WARP;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const i32 row = warp::own_row(warp, 0, half);
    const i32 position = unit.position(p, row);
    const i32 head = unit.head_of(p, row, position);
    const float sum = warp::quad_sum(softmax.sum[half]);
    const bool is_row = position < unit.sequence.q_len;
    const float sink = is_row ? sink_of(p, unit, head) : NEG_INF;
    const RowResult result = finish_row(softmax.max[half], sum, softmax.exponent, sink);
    if (threadIdx.x % 4 == 0) {
      write_lse(p, unit, partial, position, head, result.lse);
      factors[row] = result.factor;
    }
  }
}

// Writes a consumer's columns of all rows. `memory`: the place of the queries.
__device__ inline void write_output(const ForwardParams& p, const Unit& unit,
                                    const PartialRows& partial, u32 consumer, const float* factors,
                                    u32 memory, const Output& output) {
  using Tile = tile::Panels<config::BLOCK_M, config::VALUE_DIM>;
  const i32 thread = i32(threadIdx.x) % WARPGROUP;
  const i32 first = i32(consumer) * OWN_COLUMNS;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const i32 row = warp::own_row(thread / WARP, 0, half);
    const i32 position = unit.position(p, row);
    const bool is_row = position < unit.sequence.q_len;
    const float factor = factors[row];
    if (partial.are_used) {
      if (!is_row) continue;
      const i32 head = unit.head_of(p, row, position);
      float* to = p.partial_o + partial.at(p, position, head) * config::VALUE_DIM + first +
                  warp::own_column();
#pragma unroll
      for (int j = 0; j < OWN_COLUMNS / 8; ++j) {
        *reinterpret_cast<float2*>(to + j * 8) =
            make_float2(output[j * 4 + half * 2] * factor, output[j * 4 + half * 2 + 1] * factor);
      }
    } else {
#pragma unroll
      for (int j = 0; j < OWN_COLUMNS / 8; ++j) {
        const u32 pair = warp::round_pair(output[j * 4 + half * 2] * factor,
                                          output[j * 4 + half * 2 + 1] * factor);
        const u32 at = memory + Tile::offset(row, first / 8 + j) + warp::own_column() * 2;
        ptx::st_shared_b32(at, is_row ? pair : 0);
      }
    }
  }
  if (partial.are_used) return;
  ptx::bar_sync(OWN + consumer, WARPGROUP);
  constexpr i32 LANES = Tile::CHUNKS;
  const i32 chunk = thread % LANES;
  for (i32 row = thread / LANES; row < config::BLOCK_M; row += WARPGROUP / LANES) {
    const i32 position = unit.position(p, row);
    if (position >= unit.rows) break;
    u16* to = query_row<u16>(p.o, unit, position, unit.head_of(p, row, position));
#pragma unroll
    for (i32 column = 0; column < OWN_COLUMNS; column += Tile::WIDTH) {
      const i32 own = first + column + chunk * 8;
      ptx::st_global_v4_b32(to + own, ptx::ld_shared_v4_b32(memory + Tile::offset(row, own / 8)));
    }
  }
}

}  // namespace attn::latent
