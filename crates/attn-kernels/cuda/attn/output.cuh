// The end of a unit: teams joined, rows divided by their denominators, and written.
//
// A sequence whose keys are one part gets its output here; of more parts each leaves its normalised
// rows and their LSE for attn/merge.cuh. Rows past the sequence's length that are to be written
// (padding) are 0 and -inf.
// Tensors: o, lse and the partial results of ForwardParams. Who executes: all threads of the block,
// behind a barrier after their last tile.
// Shared memory: one team, a 16-bit tile [BLOCK_M, VALUE_DIM] in place of the queries and keys;
// several, f32 [TEAMS, BLOCK_M, VALUE_DIM + 4], then maximum and sum [TEAMS, BLOCK_M] each.
// What it does not do: join parts (attn/merge.cuh).

#pragma once

#include "attn/hide.cuh"
#include "attn/rows.cuh"
#include "attn/softmax.cuh"
#include "attn/split.cuh"
#include "ptx/global.cuh"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"

namespace attn {

// The row of this unit's part among the partial results.
__device__ inline i64 own_partial_row(const ForwardParams& p, const Unit& unit, i32 position,
                                      i32 head) {
  return partial_row(p, p.partial_starts[unit.sequence.index], unit.part, unit.rows, position,
                     head);
}

// Writes the LSE of a row that exists or is padding.
__device__ inline void write_lse(const ForwardParams& p, const Unit& unit, i32 position, i32 head,
                                 float lse) {
  if (position >= unit.rows) return;
  const bool is_row = position < unit.sequence.q_len;
  if (unit.parts > 1) {
    if (is_row) p.partial_lse[own_partial_row(p, unit, position, head)] = lse;
  } else if (p.lse.data != nullptr) {
    *query_row<float>(p.lse, unit, position, head) = is_row ? lse : NEG_INF;
  }
}

// Eight columns of a row that exists or is padding. `x` is already divided.
__device__ inline void write_columns(const ForwardParams& p, const Unit& unit, i32 position,
                                     i32 head, i32 column, const float (&x)[8]) {
  if (position >= unit.rows || column >= p.value_dim) return;
  const bool is_row = position < unit.sequence.q_len;
  if (unit.parts > 1) {
    if (!is_row) return;
    const i64 row = own_partial_row(p, unit, position, head);
    float4* to = reinterpret_cast<float4*>(p.partial_o + row * p.value_dim + column);
    to[0] = make_float4(x[0], x[1], x[2], x[3]);
    to[1] = make_float4(x[4], x[5], x[6], x[7]);
    return;
  }
  Vec16 packed;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    packed.word[word] = is_row ? warp::round_pair(x[word * 2], x[word * 2 + 1]) : 0;
  }
  ptx::st_global_v4_b32(query_row<u16>(p.o, unit, position, head) + column, packed);
}

// One team: through shared memory at `memory`, which no warp reads any more.
__device__ inline void write_alone(const ForwardParams& p, const Unit& unit, i32 warp,
                                   const warp::Softmax& state, const warp::Accumulator& o,
                                   const Exponent& exponent, float v_scale, u32 memory) {
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
      if (threadIdx.x % 4 == 0) write_lse(p, unit, position, head, result.lse);
      if (unit.parts > 1) {
        if (!is_row) continue;
        float* to = p.partial_o + own_partial_row(p, unit, position, head) * p.value_dim +
                    warp::own_column();
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
  if (unit.parts > 1) return;
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

// Several teams, each with the same rows and other keys: joined like parts of the keys.
__device__ inline void write_together(const ForwardParams& p, const Unit& unit, i32 team, i32 warp,
                                      const warp::Softmax& state, const warp::Accumulator& o,
                                      const Exponent& exponent, float v_scale, float* memory) {
  using namespace config;
  // Four more floats a row put rows that lanes write together into different banks.
  constexpr int ROW = VALUE_DIM + 4;
  float* maxima = memory + TEAMS * BLOCK_M * ROW;
  float* sums = maxima + TEAMS * BLOCK_M;
#pragma unroll
  for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
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
  constexpr int LANES = VALUE_DIM / 8;
  for (int index = threadIdx.x; index < BLOCK_M * LANES; index += THREADS) {
    const int row = index / LANES;
    const int column = index % LANES * 8;
    const i32 position = unit.position(p, row);
    const i32 head = unit.head_of(p, row, position);
    float top = NEG_INF;
    for (int t = 0; t < TEAMS; ++t) top = fmaxf(top, maxima[t * BLOCK_M + row]);
    const float shift = exponent.shift(top);
    float sum = 0.0f;
    float x[8] = {};
#pragma unroll
    for (int t = 0; t < TEAMS; ++t) {
      const float share =
          ptx::ex2_approx_ftz_f32(exponent.of_max(maxima[t * BLOCK_M + row], shift));
      sum += sums[t * BLOCK_M + row] * share;
      const float4* from =
          reinterpret_cast<const float4*>(memory + (t * BLOCK_M + row) * ROW + column);
      const float4 lo = from[0];
      const float4 hi = from[1];
      const float part[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] += part[e] * share;
    }
    const bool is_row = position < unit.sequence.q_len;
    const RowResult result =
        finish_row(top, sum, exponent, is_row ? sink_of(p, unit, head) : NEG_INF);
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] *= result.factor * v_scale;
    if (column == 0) write_lse(p, unit, position, head, result.lse);
    write_columns(p, unit, position, head, column, x);
  }
}

}  // namespace attn
