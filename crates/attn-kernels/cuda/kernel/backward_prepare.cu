// What a backward needs of each query row, and the sums that it adds to, made 0.
//
// Source: T. Dao, "FlashAttention-2", arXiv:2307.08691, algorithm 2, line 4: D = rowsum(dO o O).
// Tensors: base/backward_params.cuh: o, d_o [rows, q_heads, value_dim], any strides with innermost
// 1; lse f32 [rows, q_heads]; writes lse2, delta, dq_sum, row_sums, turns, the counter, and dbias.
// Who executes: a block of 256 threads for each tile of ROW_TILE padded rows and each head; eight
// lanes share a row. No shared memory.
// The invariant: every word of the workspace that a later launch reads is written, rows past their
// sequence too; sums are f32, in an order that depends on value_dim alone.

#include "attn/backward_rows.cuh"
#include "base/dtype.cuh"
#include "ptx/convert.cuh"
#include "ptx/griddepcontrol.cuh"
#include "tile/piece.cuh"
#include "tile/reduce.cuh"

namespace attn {

namespace backward_prepare {

using Pieces = tile::Pieces<config::DTYPE>;
using Bits = Pieces::Bits;

constexpr int THREADS = 256;
constexpr int LANES = 8;  // of a row
constexpr int ROWS = THREADS / LANES;
constexpr float INF = -NEG_INF;

// The lane's part of dO . O of a row.
__device__ float product(const BackwardParams& p, const Sequence& s, i32 row, i32 head, i32 lane) {
  const Bits* o = static_cast<const Bits*>(p.call.o.data) + query_offset(p.call.o, s, row, head);
  const Bits* d_o = static_cast<const Bits*>(p.d_o.data) + query_offset(p.d_o, s, row, head);
  const i32 dim = p.call.value_dim;
  float sum = 0.0f;
  for (i32 at = lane * tile::PIECE; at < dim; at += LANES * tile::PIECE) {
    float x[tile::PIECE];
    float y[tile::PIECE];
    Pieces::load(o, at, dim, x);
    Pieces::load(d_o, at, dim, y);
#pragma unroll
    for (int i = 0; i < tile::PIECE; ++i) sum = __fmaf_rn(x[i], y[i], sum);
  }
  return sum;
}

// Makes the gradient of the bias 0, all blocks together.
__device__ void clear_bias(const BackwardParams& p) {
  const i32* extents = p.bias_extents;
  const i64 cells = i64(extents[0]) * extents[1] * extents[2] * extents[3];
  float* to = static_cast<float*>(const_cast<void*>(p.dbias.data));
  for (i64 at = i64(blockIdx.x) * THREADS + threadIdx.x; at < cells;
       at += i64(gridDim.x) * THREADS) {
    i64 rest = at;
    const i64 key = rest % extents[3];
    rest /= extents[3];
    const i64 row = rest % extents[2];
    rest /= extents[2];
    const i64 head = rest % extents[1];
    const i64 sequence = rest / extents[1];
    to[sequence * p.dbias.sequence + head * p.dbias.head + row * p.dbias.row +
       key * p.dbias.key] = 0.0f;
  }
}

}  // namespace backward_prepare

extern "C" __global__ void __launch_bounds__(backward_prepare::THREADS)
    attn_backward_prepare(const __grid_constant__ BackwardParams p) {
  using namespace backward_prepare;
  ptx::griddepcontrol_wait<__CUDA_ARCH__>();
  ptx::griddepcontrol_launch_dependents<__CUDA_ARCH__>();
  const u32 heads = u32(p.call.q_heads);
  const u32 index = blockIdx.x / heads;
  const i32 head = i32(blockIdx.x - index * heads);
  const RowTile tile = row_tile_of(p, index);
  const i64 first = head * p.padded_rows + tile.padded;

  float4* sums = reinterpret_cast<float4*>(p.dq_sum + first * p.dq_dim);
  // Rows of the sums are whole vectors: dq_dim is a multiple of 32.
  for (i32 at = threadIdx.x; at < ROW_TILE * p.dq_dim / 4; at += THREADS) sums[at] = float4{};
  if (threadIdx.x < ROW_TILE / TURN_ROWS) {
    p.turns[head * p.turn_stride + tile.padded / TURN_ROWS + threadIdx.x] = 0;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *p.call.counter = 0;
  if (p.dbias.data != nullptr && !(p.flags & BIAS_LAST)) clear_bias(p);

  // What a natural score is multiplied by in the main kernel's exponents: LOG2E, or what the
  // rounding of their factor made of it.
  const double scale = p.call.scale;
  const double unit = scale == 0.0 ? double(LOG2E) : double(p.call.scale * LOG2E) / scale;
  const i32 lane = i32(threadIdx.x) % LANES;
  for (i32 at = i32(threadIdx.x) / LANES; at < ROW_TILE; at += ROWS) {
    const i32 row = tile.first + at;
    const bool is_row = row < tile.sequence.q_len;
    const float own = is_row ? product(p, tile.sequence, row, head, lane) : 0.0f;
    const float delta = tile::warp::sum<LANES>(own);
    if (lane != 0) continue;
    float lse2 = INF;
    if (is_row) {
      const float lse = static_cast<const float*>(
          p.call.lse.data)[query_offset(p.call.lse, tile.sequence, row, head)];
      // A NaN stays one.
      if (lse != NEG_INF) lse2 = p.flags & NATURAL ? lse : float(lse * unit);
    }
    p.lse2[first + at] = lse2;
    p.delta[first + at] = delta;
    p.row_sums[first + at] = 0.0f;
  }
}

}  // namespace attn
