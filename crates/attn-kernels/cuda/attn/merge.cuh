// Joins the results of the parts into which the keys of a sequence were split, in the block that
// ends last.
//
// Source: Milakov, Gimelshein, arXiv:1805.02867, section 3.1: softmax states join by weights
// exp(lse - max).
// Tensors: partial_o f32 [partial row, value_dim], partial_lse f32 [partial row], natural as the
// LSE that is written, because base 2 would round a large one once more, and -inf for a part
// without visible keys; o [rows, q_heads, value_dim]; lse [rows, q_heads]; counter u32 [partial
// row], 0 between launches.
// Who executes: all threads of a block, one warp a row of the unit's tile.
// The invariant: which block is the last is chance, and what it does is not: the sum runs over the
// parts in order, so equal calls give equal bits. A part without weight is not read. Sinks are
// counted here, once, and nowhere else for these sequences. value_dim is a multiple of 4; partial
// rows and rows of o start on 16 bytes.
// What it does not do: choose the parts (attn/split.cuh).

#pragma once

#include "attn/exponent.cuh"
#include "attn/rows.cuh"
#include "attn/split.cuh"
#include "attn/unit.cuh"
#include "base/dtype.cuh"
#include "ptx/convert.cuh"
#include "ptx/global.cuh"
#include "tile/reduce.cuh"

namespace attn {

namespace merge {

using Out = ptx::Stored<config::DTYPE>;

constexpr int COLUMNS = 4;  // of a lane
constexpr int SLAB = WARP * COLUMNS;
// Parts whose loads are under way at once.
constexpr int AHEAD = 8;

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

__device__ inline float part_lse(const ForwardParams& p, const PartRows& parts, i32 part) {
  return part < parts.count ? ptx::ld_global_cg_f32(p.partial_lse + parts.at(part)) : NEG_INF;
}

// A NaN LSE loses every maximum and makes a NaN of the sum. `own`: the lane's part of the first
// WARP.
__device__ inline Join join_parts(const ForwardParams& p, const PartRows& parts, float own,
                                  float sink) {
  const i32 lane = i32(threadIdx.x % WARP);
  float max = own;
  for (i32 part = lane + WARP; part < parts.count; part += WARP) {
    max = fmaxf(max, part_lse(p, parts, part));
  }
  const bool has_sink = sink != NEG_INF;
  max = tile::warp::max(max);
  if (has_sink) max = fmaxf(max, sink);
  float sum = own == NEG_INF ? 0.0f : exp2f((own - max) * LOG2E);
  for (i32 part = lane + WARP; part < parts.count; part += WARP) {
    const float lse = part_lse(p, parts, part);
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
__device__ inline Four weighted_sum(const ForwardParams& p, const PartRows& parts, const Join& join,
                                    float own, i32 column) {
  const i32 lane = i32(threadIdx.x % WARP);
  const bool has_column = column < p.value_dim;
  Four o = {};
  for (i32 start = 0; start < parts.count; start += WARP) {
    const float weight = join.weight(start == 0 ? own : part_lse(p, parts, start + lane));
    const i32 count = min_of(WARP, parts.count - start);
    for (i32 first = 0; first < count; first += AHEAD) {
      Vec16 loaded[AHEAD];
      float w[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        // A lane past the last part has no weight.
        w[i] = __shfl_sync(~0u, weight, first + i);
        loaded[i] = Vec16{};
        if (has_column && w[i] != 0.0f) {
          loaded[i] = ptx::ld_global_cg_v4_b32(p.partial_o +
                                               parts.at(start + first + i) * p.value_dim + column);
        }
      }
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) o.x[j] += w[i] * __uint_as_float(loaded[i].word[j]);
      }
    }
  }
  return o;
}

__device__ inline void write_four(const ForwardParams& p, const Unit& unit, i32 position, i32 head,
                                  i32 column, const Four& o) {
  if (column >= p.value_dim) return;
  Packed packed;
#pragma unroll
  for (int j = 0; j < COLUMNS; ++j) packed.x[j] = Out::narrow(o.x[j]);
  Out::Bits* to = query_row<Out::Bits>(p.o, unit, position, head) + column;
  *reinterpret_cast<Packed*>(to) = packed;
}

// One written row of one head; all lanes of a warp.
__device__ inline void row(const ForwardParams& p, const Unit& unit, i32 position, i32 head) {
  const i32 lane = i32(threadIdx.x % WARP);
  const bool is_row = position < unit.sequence.q_len;
  const i64 start = p.partial_starts[unit.sequence.index];
  const PartRows parts = {is_row ? unit.parts : 0,
                          partial_row(p, start, 0, unit.rows, position, head),
                          i64(unit.rows) * p.q_heads};
  const float own = part_lse(p, parts, lane);
  const float sink = is_row ? per_head(p.sinks, unit.sequence.index, head, NEG_INF) : NEG_INF;
  const Join join = join_parts(p, parts, own, sink);
  for (i32 slab = 0; slab < p.value_dim; slab += SLAB) {
    const i32 column = slab + lane * COLUMNS;
    write_four(p, unit, position, head, column, weighted_sum(p, parts, join, own, column));
  }
  if (p.lse.data != nullptr && lane == 0) {
    *query_row<float>(p.lse, unit, position, head) = join.lse;
  }
}

}  // namespace merge

// Counts a part of a unit's rows as done, its results written, and answers whether it was the last
// one. The count is back at 0 then.
__device__ inline bool ends_last(const ForwardParams& p, const Unit& unit) {
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const i32 position = unit.position(p, 0);
    const i64 slot = partial_row(p, p.partial_starts[unit.sequence.index], 0, unit.rows, position,
                                 unit.head_of(p, 0, position));
    u32* const count = p.counter + slot;
    is_last = atomicAdd(count, 1u) == u32(unit.parts) - 1;
    if (is_last) *count = 0;
  }
  __syncthreads();
  __threadfence();
  return is_last;
}

// Joins the parts of a unit's rows.
__device__ inline void merge_parts(const ForwardParams& p, const Unit& unit) {
  constexpr i32 WARPS = config::THREADS / WARP;
  for (i32 flat = i32(threadIdx.x) / WARP; flat < config::BLOCK_M; flat += WARPS) {
    const i32 position = unit.position(p, flat);
    if (position >= unit.rows) return;
    merge::row(p, unit, position, unit.head_of(p, flat, position));
  }
}

}  // namespace attn
