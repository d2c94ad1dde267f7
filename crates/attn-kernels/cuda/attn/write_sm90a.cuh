// What a Hopper consumer's rows end with: their LSE, and their output by way of shared memory.
//
// A lane holds two columns of every eight of two rows, of which memory would take 4 bytes at a
// time. A warp lays a panel of its 16 rows down, eight lanes take a row of it up, and write whole
// lines.
// Shared memory: 16 rows of 128 bytes a warp, pieces of 16 bytes exchanged by the row's index
// modulo 8, so that neither way meets a bank twice. Who executes: all lanes of a warp, converged.

#pragma once

#include "attn/exponent.cuh"
#include "attn/row_sm90a.cuh"
#include "attn/split.cuh"
#include "base/config_sm90a.cuh"
#include "ptx/global.cuh"
#include "ptx/half.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/opaque.cuh"
#include "ptx/shared.cuh"

namespace attn {

// Rows of a warp, and what it lays down of them at a time.
constexpr i32 WARP_ROWS = 16;
constexpr u32 PANEL_BYTES = WARP_ROWS * tile::PANEL_ROW_BYTES;

// What a lane's two rows ended with.
struct Ends {
  float max[2];
  float sum[2];
};

// The sum over the four lanes of a row.
__device__ inline float over_row(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

__device__ inline u32 round_pair(float lo, float hi) {
  return config::OUT_DTYPE == DType::bf16 ? ptx::cvt_rn_bf16x2_f32(lo, hi)
                                          : ptx::cvt_rn_f16x2_f32(lo, hi);
}

// Ends the lane's two rows, of which `flat` is the first, and writes their LSE; the answers are
// what their sums of values are multiplied by. `partial`: where the LSEs of parts go.
__device__ inline void finish_rows(const ForwardParams& p, const Unit& unit,
                                   const PartialRows& partial, i32 flat, const Exponent& exponent,
                                   const Ends& ends, float (&factor)[2]) {
  const float v_scale =
      config::IS_FP8 ? per_head(p.v_scale, unit.sequence.index, unit.kv_head, 1.0f) : 1.0f;
  float* const lse = static_cast<float*>(p.lse.data);
  const bool writes = lse != nullptr && threadIdx.x % 4 == 0;
  const i64 place = query_offset(p.lse, unit.sequence, flat, unit.head);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Row row = row_of(p, unit, flat + half * 8);
    const float total = over_row(ends.sum[half]);
    const bool is_row = row.position < unit.sequence.q_len;
    const float sink = is_row ? sink_of(p, unit, row.head) : NEG_INF;
    const RowResult result = finish_row(ends.max[half], total, exponent, sink);
    if (config::HAS_PARTS && partial.are_used) {
      if (is_row && threadIdx.x % 4 == 0) {
        p.partial_lse[partial.at(p, row.position, row.head)] = result.lse;
      }
    } else if (writes && row.position < unit.rows) {
      const i64 own = config::IS_PACKED ? query_offset(p.lse, unit.sequence, row.position, row.head)
                                        : place + half * 8 * p.lse.row;
      lse[own] = is_row ? result.lse : NEG_INF;
    }
    factor[half] = result.factor * v_scale;
  }
}

// Leaves the lane's two rows of a part, of which `flat` is the first, to kernel/merge_parts.cu.
// Four lanes fill a sector of 32 bytes.
template <int OUTPUTS>
__device__ void write_part(const ForwardParams& p, const Unit& unit, const PartialRows& partial,
                           i32 flat, const float (&factor)[2], const float (&output)[OUTPUTS]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Row row = row_of(p, unit, flat + half * 8);
    if (row.position >= unit.sequence.q_len) continue;
    float* to = p.partial_o + partial.at(p, row.position, row.head) * p.value_dim +
                ptx::opaque(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int j = 0; j < OUTPUTS / 4; ++j) {
      if (j * 8 >= p.value_dim) break;
      const int at = j * 4 + half * 2;
      *reinterpret_cast<float2*>(to + j * 8) =
          make_float2(output[at] * factor[half], output[at + 1] * factor[half]);
    }
  }
}

// Writes the output of a warp's rows, of which `first` is the first flat one. Of padding it makes 0
// of `output`, which may be anything, and of `factor`. `panel`: the warp's own.
template <int OUTPUTS>
__device__ void write_rows(const ForwardParams& p, const Unit& unit, i32 first, float (&factor)[2],
                           u32 panel, float (&output)[OUTPUTS]) {
  const u32 lane = ptx::opaque(threadIdx.x % WARP);
  const i32 own = first + i32(lane / 4);
  const bool is_row[2] = {row_of(p, unit, own).position < unit.sequence.q_len,
                          row_of(p, unit, own + 8).position < unit.sequence.q_len};
  if (!__all_sync(~0u, is_row[0] && is_row[1])) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (is_row[half]) continue;
      factor[half] = 0.0f;
#pragma unroll
      for (int j = 0; j < OUTPUTS / 2; ++j) output[j / 2 * 4 + half * 2 + j % 2] = 0.0f;
    }
  }
  // Pieces of 16 bytes are swizzled by the row. Matrix m of four is of rows 8 (m % 2) .. and of
  // piece m / 2; a lane reads a piece of row lane / 8, of 4 more and so on.
  const u32 down = panel + lane % WARP_ROWS * tile::PANEL_ROW_BYTES + ((lane / 16 ^ lane % 8) << 4);
  const u32 up = panel + lane / 8 * tile::PANEL_ROW_BYTES + ((lane / 8 ^ lane % 8) << 4);
  const i32 own_line = first + i32(lane / 8);
  u16* const column = static_cast<u16*>(p.o.data) + lane % 8 * 8;
  u16* const own_lines = column + query_offset(p.o, unit.sequence, own_line, unit.head);
  const i64 four_rows = p.o.row * 4;
  const i32 columns = p.value_dim - i32(lane % 8 * 8);
  const i32 lines = unit.rows - own_line;
#pragma unroll
  for (int part = 0; part < OUTPUTS / 32; ++part) {
    __syncwarp();
#pragma unroll
    for (int piece = 0; piece < 8; piece += 2) {
      u32 pairs[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int at = part * 32 + (piece + m / 2) * 4 + m % 2 * 2;
        pairs[m] = round_pair(output[at] * factor[m % 2], output[at + 1] * factor[m % 2]);
      }
      ptx::stmatrix_x4(down ^ u32(piece) << 4, pairs);
    }
    __syncwarp();
    if (part * 64 >= columns) continue;
    u16* next = own_lines;
#pragma unroll
    for (int i = 0; i < WARP_ROWS / 4; ++i, next += four_rows) {
      u16* to = next;
      bool is_written = i * 4 < lines;
      if constexpr (config::IS_PACKED) {
        const Row row = row_of(p, unit, own_line + i * 4);
        to = column + query_offset(p.o, unit.sequence, row.position, row.head);
        is_written = row.position < unit.rows;
      }
      const Vec16 line =
          ptx::ld_shared_v4_b32((up ^ u32(i % 2 * 4) << 4) + u32(i * 4) * tile::PANEL_ROW_BYTES);
      if (is_written) ptx::st_global_v4_b32(to + part * 64, line);
    }
  }
}

}  // namespace attn
