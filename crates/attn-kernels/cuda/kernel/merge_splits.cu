// Joins the results of the parts into which the keys of a sequence were split.
//
// Source: Milakov, Gimelshein, arXiv:1805.02867, section 3.1: softmax states join by weights
// exp(lse - max).
// Tensors: partial_o f32 [partial row, value_dim], partial_lse f32 [partial row], natural as the
// LSE that is written, because base 2 would round a large one once more, and -inf for a part
// without visible keys; o [rows, q_heads, value_dim]; lse [rows, q_heads]; unit_starts [batch + 1]
// are the written rows before each sequence.
// Who executes: one warp for each (written row, head), 4 a block, any grid; a warp takes every
// n-th.
// No shared memory.
// The invariant: sequences with one part are not touched; a part without weight is not read; the
// sum runs over the parts in order, so equal calls give equal bits. Sinks are counted here, once,
// and nowhere else for these sequences. value_dim is a multiple of 4; partial rows and rows of o
// start on 16 bytes.
// What it does not do: choose the parts (attn/split.cuh).

#include "attn/band.cuh"
#include "attn/locate.cuh"
#include "attn/split.cuh"
#include "base/dtype.cuh"
#include "base/params.cuh"
#include "ptx/convert.cuh"
#include "tile/reduce.cuh"

namespace attn {

namespace merge_splits {

using Out = ptx::Stored<config::DTYPE>;

constexpr int THREADS = 128;
// Of an SM. Without a figure ptxas for sm_90a spills rather than go past 48 registers.
constexpr int MIN_BLOCKS = 8;
constexpr u32 ALL = 0xFFFFFFFFu;
constexpr int COLUMNS = 4;  // of a lane
constexpr int SLAB = WARP * COLUMNS;

struct Four {
  float x[COLUMNS];
};

// A lane's columns of o: one access, as rows of o start on 16 bytes wherever keys are split.
struct alignas(COLUMNS * sizeof(Out::Bits)) Packed {
  Out::Bits x[COLUMNS];
};

// Where the parts of one (row, head) are: part n is n * step rows on.
struct PartRows {
  i32 count;
  i64 first;
  i64 step;

  __device__ i64 at(i32 part) const { return first + part * step; }
};

// The join of all parts and the sink: the weight of a part is exp(lse - max) / sum.
struct Join {
  float max;
  float sum;  // 0: no part has weight and there is no sink
  float lse;

  __device__ float weight(float part_lse) const {
    return part_lse == NEG_INF ? 0.0f : exp2f((part_lse - max) * LOG2E) / sum;
  }
};

// A NaN LSE loses every maximum and makes a NaN of the sum.
__device__ Join join_parts(const ForwardParams& p, const PartRows& parts, float sink) {
  const i32 lane = threadIdx.x % WARP;
  float max = NEG_INF;
  for (i32 part = lane; part < parts.count; part += WARP) {
    max = fmaxf(max, p.partial_lse[parts.at(part)]);
  }
  const bool has_sink = sink != NEG_INF;
  max = tile::warp::max(max);
  if (has_sink) max = fmaxf(max, sink);
  float sum = 0.0f;
  for (i32 part = lane; part < parts.count; part += WARP) {
    const float lse = p.partial_lse[parts.at(part)];
    sum += lse == NEG_INF ? 0.0f : exp2f((lse - max) * LOG2E);
  }
  sum = tile::warp::sum(sum);
  // The sink's own value where it is all there is: two roundings of logarithms would not give it
  // back.
  if (sum == 0.0f) return {max, has_sink ? 1.0f : 0.0f, sink};
  if (has_sink) sum += exp2f((sink - max) * LOG2E);
  return {max, sum, __fmaf_rn(LN2, log2f(sum), max)};
}

// The lane's columns of o from `column` on. All lanes call it: weights go round by shuffles.
__device__ Four weighted_sum(const ForwardParams& p, const PartRows& parts, const Join& join,
                             i32 column) {
  const i32 lane = threadIdx.x % WARP;
  Four o = {};
  for (i32 start = 0; start < parts.count; start += WARP) {
    const i32 mine = start + lane;
    const float weight = mine < parts.count ? join.weight(p.partial_lse[parts.at(mine)]) : 0.0f;
    const i32 count = min_of(WARP, parts.count - start);
#pragma unroll 4
    for (i32 i = 0; i < count; ++i) {
      const float w = __shfl_sync(ALL, weight, i);
      if (w == 0.0f || column >= p.value_dim) continue;
      const float* row = p.partial_o + parts.at(start + i) * p.value_dim + column;
      const Vec16 four = *reinterpret_cast<const Vec16*>(row);
#pragma unroll
      for (int j = 0; j < COLUMNS; ++j) o.x[j] += w * __uint_as_float(four.word[j]);
    }
  }
  return o;
}

__device__ void write_row(const ForwardParams& p, const Sequence& s, i32 row, i32 head, i32 column,
                          const Four& o) {
  if (column >= p.value_dim) return;
  Out::Bits* to = static_cast<Out::Bits*>(p.o.data) + query_offset(p.o, s, row, head) + column;
  Packed packed;
#pragma unroll
  for (int j = 0; j < COLUMNS; ++j) packed.x[j] = Out::narrow(o.x[j]);
  *reinterpret_cast<Packed*>(to) = packed;
}

__device__ void write_lse(const ForwardParams& p, const Sequence& s, i32 row, i32 head, float lse) {
  if (p.lse.data == nullptr || threadIdx.x % WARP != 0) return;
  static_cast<float*>(p.lse.data)[query_offset(p.lse, s, row, head)] = lse;
}

// One written row of one head; all lanes of a warp.
__device__ void merge(const ForwardParams& p, i64 unit) {
  const i64 written = unit / p.q_heads;
  const i32 head = static_cast<i32>(unit - written * p.q_heads);
  const i32 index = find_sequence(p.unit_starts, p.batch, written);
  const Sequence s = sequence_at(p, index);
  const i32 row = static_cast<i32>(written - p.unit_starts[index]);
  const i32 count = parts_of(p, Band(p, s.q_len, s.kv_len)).count;
  if (count == 1) return;

  const i32 first_column = threadIdx.x % WARP * COLUMNS;
  if (row >= s.q_len) {
    for (i32 slab = 0; slab < p.value_dim; slab += SLAB) {
      write_row(p, s, row, head, slab + first_column, Four{});
    }
    write_lse(p, s, row, head, NEG_INF);
    return;
  }
  const i32 rows = written_rows(p, s);
  const i64 start = partial_row(p, p.partial_starts[index], 0, rows, row, head);
  const PartRows parts = {count, start, static_cast<i64>(rows) * p.q_heads};
  const Join join = join_parts(p, parts, per_head(p.sinks, index, head, NEG_INF));
  for (i32 slab = 0; slab < p.value_dim; slab += SLAB) {
    const Four o = weighted_sum(p, parts, join, slab + first_column);
    write_row(p, s, row, head, slab + first_column, o);
  }
  write_lse(p, s, row, head, join.lse);
}

}  // namespace merge_splits

extern "C" __global__ void __launch_bounds__(merge_splits::THREADS, merge_splits::MIN_BLOCKS)
    attn_merge_splits(const __grid_constant__ ForwardParams p) {
  constexpr int WARPS = merge_splits::THREADS / WARP;
  const i64 units = p.unit_starts[p.batch] * p.q_heads;
  const i64 first = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / WARP;
  const i64 step = static_cast<i64>(gridDim.x) * WARPS;
  for (i64 unit = first; unit < units; unit += step) merge_splits::merge(p, unit);
}

}  // namespace attn
