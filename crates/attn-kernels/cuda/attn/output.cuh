// The end of a unit: teams joined, rows divided by their denominators, and written.
//
// A sequence whose keys are one part gets its output here; of more parts each leaves its normalised
// rows and their LSE for attn/merge.cuh. Rows past the sequence's length that are to be written
// (padding) are 0 and -inf.
// Tensors: o, lse and the partial results of ForwardParams. Who executes: all threads of the block,
// behind a barrier after their last tile.
// Shared memory: one team, a 16-bit tile [BLOCK_M, VALUE_DIM] in place of the queries and keys;
// several, f32 [TEAMS, BLOCK_M, VALUE_DIM + 4], then maximum and sum [TEAMS, BLOCK_M] each. What
// it does not do: join parts (attn/merge.cuh, attn/exchange.cuh).

#pragma once

#include "attn/hide.cuh"
#include "attn/rows.cuh"
#include "attn/softmax.cuh"
#include "attn/split.cuh"
#include "ptx/global.cuh"
#include "ptx/math.cuh"
#include "ptx/opaque.cuh"
#include "ptx/shared.cuh"

namespace attn {

// Writes the LSE of a row that exists or is padding.
__device__ inline void write_lse(const ForwardParams& p, const Unit& unit,
                                 const PartialRows& partial, i32 position, i32 head, float lse) {
  if (position >= unit.rows) return;
  const bool is_row = position < unit.sequence.q_len;
  if (partial.are_used) {
    if (is_row) p.partial_lse[partial.at(p, position, head)] = lse;
  } else if (p.lse.data != nullptr) {
    *query_row<float>(p.lse, unit, position, head) = is_row ? lse : NEG_INF;
  }
}

// Four columns of a row that exists or is padding. `x` is already divided.
__device__ inline void write_columns(const ForwardParams& p, const Unit& unit,
                                     const PartialRows& partial, i32 position, i32 head, i32 column,
                                     const float4& x) {
  if (position >= unit.rows || column >= p.value_dim) return;
  const bool is_row = position < unit.sequence.q_len;
  if (partial.are_used) {
    if (!is_row) return;
    float* to = p.partial_o + partial.at(p, position, head) * p.value_dim + column;
    *reinterpret_cast<float4*>(to) = x;
  } else {
    ptx::st_global_v2_b32(query_row<u16>(p.o, unit, position, head) + column,
                          is_row ? warp::round_pair(x.x, x.y) : 0,
                          is_row ? warp::round_pair(x.z, x.w) : 0);
  }
}

// One team: through shared memory at `memory`, which no warp reads any more.
__device__ inline void write_alone(const ForwardParams& p, const Unit& unit,
                                   const PartialRows& partial, i32 warp, const warp::Softmax& state,
                                   const warp::Accumulator& o, const Exponent& exponent,
                                   float v_scale, u32 memory) {
  using namespace config;
  using Tile = tile::Panels<BLOCK_M, VALUE_DIM>;
#pragma unroll
  for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i32 row = warp::own_row(warp, i, half);
      const i32 position = unit.position(p, row);
      const i32 head = unit.head_of(p, row, position);
      const float sum = warp::quad_sum(state.sum[i][half]);
      const bool is_row = position < unit.sequence.q_len;
      const float sink = is_row ? sink_of(p, unit, head) : NEG_INF;
      const RowResult result = finish_row(state.max[i][half], sum, exponent, sink);
      const float share = result.factor * v_scale;
      if (ptx::opaque(threadIdx.x) % 4 == 0) {
        write_lse(p, unit, partial, position, head, result.lse);
      }
      if (partial.are_used) {
        if (!is_row) continue;
        float* to = p.partial_o + partial.at(p, position, head) * p.value_dim + warp::own_column();
#pragma unroll
        for (int j = 0; j < warp::VALUE_TILES; ++j) {
          if (j * 8 >= p.value_dim) break;
          *reinterpret_cast<float2*>(to + j * 8) =
              make_float2(o[i][j][half * 2] * share, o[i][j][half * 2 + 1] * share);
        }
      } else {
#pragma unroll
        for (int j = 0; j < warp::VALUE_TILES; ++j) {
          const u32 pair =
              warp::round_pair(o[i][j][half * 2] * share, o[i][j][half * 2 + 1] * share);
          const u32 at = memory + Tile::offset(row, j) + warp::own_column() * 2;
          ptx::st_shared_b32(at, is_row ? pair : 0);
        }
      }
    }
  }
  if (partial.are_used) return;
  __syncthreads();
  constexpr int LANES = Tile::CHUNKS;
  const int chunk = threadIdx.x % LANES;
  for (int row = threadIdx.x / LANES; row < BLOCK_M; row += THREADS / LANES) {
    const i32 position = unit.position(p, row);
    if (position >= unit.rows) break;
    u16* to = query_row<u16>(p.o, unit, position, unit.head_of(p, row, position));
#pragma unroll
    for (int panel = 0; panel < Tile::COUNT; ++panel) {
      const i32 column = panel * Tile::WIDTH + chunk * 8;
      if (column < p.value_dim) {
        ptx::st_global_v4_b32(
            to + column,
            ptx::ld_shared_v4_b32(memory + Tile::offset(row, panel * Tile::CHUNKS + chunk)));
      }
    }
  }
}

// Several teams, each with the same rows and other keys: joined like parts of the keys. What they
// come to goes to `write`, four columns of a flat row, with its LSE, at a time, VALUE_DIM / 4
// threads to a row; the columns are divided.
template <typename Write>
__device__ void write_together(const ForwardParams& p, const Unit& unit, i32 team, i32 warp,
                               const warp::Softmax& state, const warp::Accumulator& o,
                               const Exponent& exponent, float v_scale, float* memory,
                               const Write& write) {
  using namespace config;
  // Four more floats a row put rows that lanes write together into different banks.
  constexpr int ROW = VALUE_DIM + 4;
  const i32 rows = unit.flat_rows(p, BLOCK_M);
  float* maxima = memory + TEAMS * BLOCK_M * ROW;
  float* sums = maxima + TEAMS * BLOCK_M;
#pragma unroll
  for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Of few rows the later halves are empty.
      if ((warp * ROW_TILES + i) * 16 + half * 8 >= rows) break;
      const i32 row = team * BLOCK_M + warp::own_row(warp, i, half);
      const float sum = warp::quad_sum(state.sum[i][half]);
      if (threadIdx.x % 4 == 0) {
        maxima[row] = state.max[i][half];
        sums[row] = sum;
      }
#pragma unroll
      for (int j = 0; j < warp::VALUE_TILES; ++j) {
        *reinterpret_cast<float2*>(memory + row * ROW + j * 8 + warp::own_column()) =
            make_float2(o[i][j][half * 2], o[i][j][half * 2 + 1]);
      }
    }
  }
  __syncthreads();
  constexpr int LANES = VALUE_DIM / 4;
  for (int index = threadIdx.x; index < rows * LANES; index += THREADS) {
    const int row = index / LANES;
    const int column = index % LANES * 4;
    const i32 position = unit.position(p, row);
    const i32 head = unit.head_of(p, row, position);
    float top = NEG_INF;
#pragma unroll
    for (int t = 0; t < TEAMS; ++t) top = fmaxf(top, maxima[t * BLOCK_M + row]);
    const float shift = exponent.shift(top);
    float sum = 0.0f;
    float4 x = {};
#pragma unroll
    for (int t = 0; t < TEAMS; ++t) {
      const float share =
          ptx::ex2_approx_ftz_f32(exponent.of_max(maxima[t * BLOCK_M + row], shift));
      sum += sums[t * BLOCK_M + row] * share;
      const float4 part =
          *reinterpret_cast<const float4*>(memory + (t * BLOCK_M + row) * ROW + column);
      x.x += part.x * share;
      x.y += part.y * share;
      x.z += part.z * share;
      x.w += part.w * share;
    }
    const bool is_row = position < unit.sequence.q_len;
    const RowResult result =
        finish_row(top, sum, exponent, is_row ? sink_of(p, unit, head) : NEG_INF);
    const float factor = result.factor * v_scale;
    write(row, column, position, head,
          float4{x.x * factor, x.y * factor, x.z * factor, x.w * factor}, result.lse);
  }
}

}  // namespace attn
