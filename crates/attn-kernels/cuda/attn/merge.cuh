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
// parts in order, so equal calls give equal bits. A part without weight does not count, whatever
// its values are. Sinks are counted here, once, and nowhere else for these sequences. value_dim is
// a multiple of 4; partial rows and rows of o start on 16 bytes. What it does not do: choose the
// parts (attn/split.cuh).

#pragma once

#include "attn/rows.cuh"
#include "attn/softmax.cuh"
#include "attn/split.cuh"
#include "attn/unit.cuh"
#include "ptx/global.cuh"
#include "tile/reduce.cuh"

namespace attn {

namespace merge {

constexpr int COLUMNS = 4;  // of a lane
constexpr int SLAB = WARP * COLUMNS;
// Parts whose loads are under way at once.
constexpr int AHEAD = 8;

struct Four {
  float x[COLUMNS];
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
  // Loads do not depend on weights, so that AHEAD of them are under way: what a lane has no column
  // for, or a part no weight, is read and does not count.
  const float* const from =
      p.partial_o + parts.first * p.value_dim + (column < p.value_dim ? column : 0);
  const i64 step = parts.step * p.value_dim;
  Four o = {};
  for (i32 start = 0; start < parts.count; start += WARP) {
    const float weight = join.weight(start == 0 ? own : part_lse(p, parts, start + lane));
    const i32 count = min_of(WARP, parts.count - start);
    for (i32 first = 0; first < count; first += AHEAD) {
      Vec16 loaded[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        const i32 part = min_of(start + first + i, parts.count - 1);
        loaded[i] = ptx::ld_global_cg_v4_b32(from + part * step);
      }
#pragma unroll
      for (int i = 0; i < AHEAD; ++i) {
        // A lane past the last part has no weight.
        const float w = __shfl_sync(~0u, weight, first + i);
#pragma unroll
        for (int j = 0; j < COLUMNS; ++j) {
          o.x[j] += w * (w == 0.0f ? 0.0f : __uint_as_float(loaded[i].word[j]));
        }
      }
    }
  }
  return o;
}

__device__ inline void write_four(const ForwardParams& p, const Unit& unit, i32 position, i32 head,
                                  i32 column, const Four& o) {
  if (column >= p.value_dim) return;
  ptx::st_global_v2_b32(query_row<u16>(p.o, unit, position, head) + column,
                        warp::round_pair(o.x[0], o.x[1]), warp::round_pair(o.x[2], o.x[3]));
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
  u32* count = nullptr;
  if (threadIdx.x == 0) {
    const i32 position = unit.position(p, 0);
    count = p.counter + partial_row(p, p.partial_starts[unit.sequence.index], 0, unit.rows,
                                    position, unit.head_of(p, 0, position));
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    // What the block has written is behind the barrier, and what others have is read past the
    // first-level cache.
    __threadfence();
    is_last = atomicAdd(count, 1u) == u32(unit.parts) - 1;
    if (is_last) *count = 0;
    __threadfence();
  }
  __syncthreads();
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
