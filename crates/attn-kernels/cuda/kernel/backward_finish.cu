// The end of a backward: sums of dQ to the caller's tensor, and the gradient of the sinks.
//
// Tensors: base/backward_params.cuh: reads dq_sum, lse2, delta and sinks; writes dq [rows, q_heads,
// head_dim], any strides with innermost 1, rows of padding as 0, and dsinks f32 [q_heads].
// Who executes: a block of 256 threads for each tile of ROW_TILE padded rows and each head; where
// the gradient of the sinks is wanted, one more for each head. Shared memory: scratch of the
// reduction, 32 bytes.
// The invariant: each element is scaled and rounded once; the sum over rows is one block's, in an
// order that depends on the number of padded rows alone.

#include "attn/backward_rows.cuh"
#include "base/dtype.cuh"
#include "ptx/convert.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "tile/piece.cuh"
#include "tile/reduce.cuh"

namespace attn {

namespace backward_finish {

using Pieces = tile::Pieces<config::DTYPE>;
using Sums = tile::Pieces<DType::f32>;
using Bits = Pieces::Bits;

constexpr int THREADS = 256;
constexpr int LANES = 8;  // of a row
constexpr int ROWS = THREADS / LANES;

// Eight columns of a row of sums in fours, from `column` on; `row`: counted from padded row 0.
__device__ void load_fours(const BackwardParams& p, i32 head, i64 row, i32 column,
                           float (&x)[tile::PIECE]) {
  constexpr i32 EDGE = 64;
  const i64 square = (head * p.padded_rows + row) / EDGE * (p.dq_dim / EDGE) + column / EDGE;
  const i32 own = i32(row % EDGE);
  const float* from = p.dq_sum + square * (EDGE * EDGE) +
                      (column % EDGE / 8 * (EDGE * 2) + own / 16 * WARP + own % 8 * 4) * 4 +
                      own % 16 / 8 * 2;
#pragma unroll
  for (int i = 0; i < tile::PIECE / 2; ++i) {
    const float2 pair = *reinterpret_cast<const float2*>(from + i * 4);
    x[i * 2] = pair.x;
    x[i * 2 + 1] = pair.y;
  }
}

__device__ void write_rows(const BackwardParams& p, u32 index, i32 head) {
  const RowTile tile = row_tile_of(p, index);
  const i32 written = written_rows(p.call, tile.sequence);
  const i32 dim = p.call.head_dim;
  const i32 lane = i32(threadIdx.x) % LANES;
  for (i32 at = i32(threadIdx.x) / LANES; at < ROW_TILE; at += ROWS) {
    const i32 row = tile.first + at;
    if (row >= written) break;
    const float scale = row < tile.sequence.q_len ? p.call.scale : 0.0f;
    const float* from = p.dq_sum + (head * p.padded_rows + tile.padded + at) * p.dq_dim;
    Bits* to = static_cast<Bits*>(p.dq.data) + query_offset(p.dq, tile.sequence, row, head);
    for (i32 column = lane * tile::PIECE; column < dim; column += LANES * tile::PIECE) {
      float x[tile::PIECE];
      if (p.flags & SUMS_IN_FOURS) {
        load_fours(p, head, tile.padded + at, column, x);
      } else {
        Sums::load(from, column, dim, x);
      }
#pragma unroll
      for (int i = 0; i < tile::PIECE; ++i) x[i] *= scale;
      Pieces::store(to, column, dim, x);
    }
  }
}

// A sink is a key whose value is 0: its weight times -delta, over all rows.
__device__ void write_sink(const BackwardParams& p, i32 head, float* scratch) {
  const float sink = per_head(p.call.sinks, 0, head, NEG_INF) * LOG2E;
  const float* lse2 = p.lse2 + head * p.padded_rows;
  const float* delta = p.delta + head * p.padded_rows;
  float sum = 0.0f;
  for (i64 row = threadIdx.x; row < p.padded_rows; row += THREADS) {
    sum = __fmaf_rn(ptx::ex2_approx_ftz_f32(sink - lse2[row]), delta[row], sum);
  }
  sum = tile::block::sum<THREADS>(sum, scratch);
  float* to = static_cast<float*>(const_cast<float*>(p.dsinks.data)) + head * p.dsinks.head;
  // A head without a sink has the sink -inf, which weighs nothing.
  if (threadIdx.x == 0) *to = 0.0f - sum;
}

}  // namespace backward_finish

extern "C" __global__ void __launch_bounds__(backward_finish::THREADS)
    attn_backward_finish(const __grid_constant__ BackwardParams p) {
  using namespace backward_finish;
  __shared__ float scratch[THREADS / WARP];
  ptx::griddepcontrol_wait<__CUDA_ARCH__>();
  ptx::griddepcontrol_launch_dependents<__CUDA_ARCH__>();
  const u32 heads = u32(p.call.q_heads);
  const u32 index = blockIdx.x / heads;
  const i32 head = i32(blockIdx.x - index * heads);
  if (index < u32(p.row_tiles)) {
    write_rows(p, index, head);
  } else {
    write_sink(p, head, scratch);
  }
}

}  // namespace attn
