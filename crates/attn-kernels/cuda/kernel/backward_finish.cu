// The end of a backward: sums of dQ to the caller's tensor, and the gradient of the sinks.
//
// Tensors: base/backward_params.cuh: reads dq_sum, row_sums, lse2, delta, k and sinks; writes dq
// [rows, q_heads, head_dim], any strides with innermost 1, rows of padding as 0, and dsinks f32
// [q_heads].
// Who executes: a block of 256 threads for each tile of ROW_TILE padded rows and each head; where
// the gradient of the sinks is wanted, one more for each head. Shared memory: scratch of the
// reduction, 32 bytes, and the mean key and its parts, 9216 bytes.
// The invariant: each element is scaled and rounded once; the sum over rows is one block's, in an
// order that depends on the number of padded rows alone.

#include "attn/backward_rows.cuh"
#include "attn/band.cuh"
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
constexpr int WARPS = THREADS / WARP;
// The largest dimension of a key, and keys of a mean: enough for what random ones differ by to be
// small in it.
constexpr int MOST_DIM = 256;
constexpr i32 MEAN_KEYS = 128;

// The weight of a row's sink.
__device__ float sink_weight(const BackwardParams& p, i32 head, i64 at) {
  const float sink = per_head(p.call.sinks, 0, head, NEG_INF);
  const float lse2 = p.lse2[at];
  return ptx::ex2_approx_ftz_f32(p.flags & NATURAL ? (sink - lse2) * LOG2E : sink * LOG2E - lse2);
}

struct Mean {
  float key[MOST_DIM];
  float part[WARPS][MOST_DIM];
};

// The mean of the first keys that rows of the tile see by the band.
__device__ void mean_key(const BackwardParams& p, const RowTile& tile, i32 head, Mean& mean) {
  const ForwardParams& call = p.call;
  const Sequence& s = tile.sequence;
  const Band band(call, s.q_len, s.kv_len);
  const i32 dim = call.head_dim;
  const i32 last = min_of(tile.first + ROW_TILE, s.q_len) - 1;
  const i32 lo = last < tile.first ? 0 : band.lo(tile.first);
  const i32 hi = last < tile.first ? 0 : min_of(band.hi(last), lo + MEAN_KEYS);
  const Bits* keys = static_cast<const Bits*>(call.k.data) +
                     row_offset(call.k, s.index, s.kv_first, call.group.divide(u32(head)));
  const i32 lane = i32(threadIdx.x) % LANES;
  const i32 warp = i32(threadIdx.x) / WARP;
  // All lanes of a warp take every turn: they meet in the sum.
  for (i32 first = 0; first < dim; first += LANES * tile::PIECE) {
    const i32 column = first + lane * tile::PIECE;
    float sum[tile::PIECE] = {};
    for (i32 key = lo + i32(threadIdx.x) / LANES; key < hi; key += ROWS) {
      float x[tile::PIECE];
      Pieces::load(keys + key * call.k.row, column, dim, x);
#pragma unroll
      for (int i = 0; i < tile::PIECE; ++i) sum[i] += x[i];
    }
#pragma unroll
    for (int i = 0; i < tile::PIECE; ++i) {
      // Over the groups of lanes of the warp, which have other keys.
#pragma unroll
      for (int step = LANES; step < WARP; step *= 2) {
        sum[i] += __shfl_xor_sync(0xFFFFFFFFu, sum[i], step);
      }
      if (i32(threadIdx.x) % WARP < LANES) mean.part[warp][column + i] = sum[i];
    }
  }
  __syncthreads();
  for (i32 column = threadIdx.x; column < dim; column += THREADS) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < WARPS; ++i) sum += mean.part[i][column];
    mean.key[column] = hi > lo ? sum / float(hi - lo) : 0.0f;
  }
  __syncthreads();
}

// How far the sum of a row's dS is from what it would be without rounding: 0, or a sink's share.
__device__ float excess(const BackwardParams& p, i32 head, i64 at) {
  float due = 0.0f;
  if (p.call.sinks.data != nullptr) due = sink_weight(p, head, at) * p.delta[at];
  return p.row_sums[at] - due;
}

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

__device__ void write_rows(const BackwardParams& p, u32 index, i32 head, Mean& mean) {
  const RowTile tile = row_tile_of(p, index);
  const i32 written = written_rows(p.call, tile.sequence);
  const i32 dim = p.call.head_dim;
  const bool is_corrected = p.flags & ROW_SUMS;
  if (is_corrected) mean_key(p, tile, head, mean);
  const i32 lane = i32(threadIdx.x) % LANES;
  for (i32 at = i32(threadIdx.x) / LANES; at < ROW_TILE; at += ROWS) {
    const i32 row = tile.first + at;
    if (row >= written) break;
    const float scale = row < tile.sequence.q_len ? p.call.scale : 0.0f;
    const i64 padded = head * p.padded_rows + tile.padded + at;
    const float* from = p.dq_sum + padded * p.dq_dim;
    const float over = is_corrected && scale != 0.0f ? excess(p, head, padded) : 0.0f;
    Bits* to = static_cast<Bits*>(p.dq.data) + query_offset(p.dq, tile.sequence, row, head);
    for (i32 column = lane * tile::PIECE; column < dim; column += LANES * tile::PIECE) {
      float x[tile::PIECE];
      if (p.flags & SUMS_IN_FOURS) {
        load_fours(p, head, tile.padded + at, column, x);
      } else {
        Sums::load(from, column, dim, x);
      }
#pragma unroll
      for (int i = 0; i < tile::PIECE; ++i) {
        // Whatever the mean is, a row without excess keeps its sums.
        if (over != 0.0f && column + i < dim) x[i] = __fmaf_rn(-over, mean.key[column + i], x[i]);
        x[i] *= scale;
      }
      Pieces::store(to, column, dim, x);
    }
  }
}

// A sink is a key whose value is 0: its weight times -delta, over all rows.
__device__ void write_sink(const BackwardParams& p, i32 head, float* scratch) {
  const i64 first = head * p.padded_rows;
  float sum = 0.0f;
  for (i64 row = threadIdx.x; row < p.padded_rows; row += THREADS) {
    sum = __fmaf_rn(sink_weight(p, head, first + row), p.delta[first + row], sum);
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
  __shared__ float scratch[WARPS];
  __shared__ Mean mean;
  ptx::griddepcontrol_wait<__CUDA_ARCH__>();
  ptx::griddepcontrol_launch_dependents<__CUDA_ARCH__>();
  const u32 heads = u32(p.call.q_heads);
  const u32 index = blockIdx.x / heads;
  const i32 head = i32(blockIdx.x - index * heads);
  if (index < u32(p.row_tiles)) {
    write_rows(p, index, head, mean);
  } else {
    write_sink(p, head, scratch);
  }
}

}  // namespace attn
