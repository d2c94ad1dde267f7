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
#include "attn/shares.cuh"
#include "attn/softmax.cuh"
#include "attn/split.cuh"
#include "attn/unit.cuh"
#include "ptx/global.cuh"
#include "ptx/math.cuh"
#include "ptx/opaque.cuh"
#include "tile/reduce.cuh"

namespace attn {

namespace merge {

constexpr int SLAB = WARP * COLUMNS;
// Parts whose loads are under way at once: one for each lane's share.
constexpr int AHEAD = 32;

// A row of one head that is written, and its partial results; all lanes of a warp.
struct Row {
  i32 position;
  i32 head;
  i32 parts;
  i64 step;           // from a part to the next, in rows
  const float* lse;   // of the first part
  const float* four;  // of the first part, the lane's first columns

  // `row` is flat.
  __device__ Row(const ForwardParams& p, const Unit& unit, i64 partial_first, i32 row) {
    const i32 lane = i32(threadIdx.x % WARP);
    position = unit.position(p, row);
    head = unit.head_of(p, row, position);
    // Padding has no parts.
    parts = position < unit.sequence.q_len ? unit.parts : 0;
    const i64 first = partial_row(p, partial_first, 0, unit.rows, position, head);
    step = i64(unit.rows) * p.q_heads;
    lse = ptx::opaque(p.partial_lse + first);
    // What a lane has no column for is read and does not count.
    four = ptx::opaque(p.partial_o + first * p.value_dim +
                       (lane * COLUMNS < p.value_dim ? lane * COLUMNS : 0));
  }

  __device__ bool is_written(const Unit& unit) const { return position < unit.rows; }

  __device__ float lse_of(i32 part) const {
    return part < parts ? ptx::ld_global_cg_f32(lse + part * step) : NEG_INF;
  }

  // Starts the loads of AHEAD parts from `start` on, `slab` columns on.
  __device__ void load(const ForwardParams& p, i32 slab, i32 start, Vec16 (&loaded)[AHEAD]) const {
    const i64 next = step * p.value_dim;
    const float* from = four + start * next + slab;
    if (i32(threadIdx.x % WARP) * COLUMNS + slab >= p.value_dim) from -= slab;
#pragma unroll
    for (int i = 0; i < AHEAD; ++i, from += next) {
      if (start + i < parts) loaded[i] = ptx::ld_global_cg_v4_b32(from);
    }
  }

  __device__ void join(const ForwardParams& p, const Unit& unit) const {
    const i32 lane = i32(threadIdx.x % WARP);
    // Loads do not depend on shares, so that they are one way to memory and back with those of the
    // LSEs.
    Vec16 loaded[AHEAD] = {};
    const float own = lse_of(lane);
    load(p, 0, 0, loaded);
    const float sink = position < unit.sequence.q_len
                           ? per_head(p.sinks, unit.sequence.index, head, NEG_INF)
                           : NEG_INF;
    float max = own;
    for (i32 part = lane + WARP; part < parts; part += WARP) max = fmaxf(max, lse_of(part));
    max = fmaxf(tile::warp::max(max), sink);
    const float own_share = share_of(own, max);
    float lse = 0.0f;
    for (i32 slab = 0; slab < p.value_dim; slab += SLAB) {
      Four o = {};
      float share = own_share;
      // In the order of the parts, as attn/exchange.cuh sums them: its bits are those of this.
      float sum = 0.0f;
      for (i32 start = 0; start < parts; start += AHEAD) {
        if (slab + start > 0) load(p, slab, start, loaded);
        if (start > 0) share = share_of(lse_of(start + lane), max);
#pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
          // Few parts are most common. A lane past the last one has no share.
          if (i % 8 == 0 && start + i >= parts) break;
          const float own = __shfl_sync(~0u, share, i);
          sum += own;
          o.add(own, loaded[i]);
        }
      }
      const Join all(max, sum, sink);
      lse = all.lse;
      const i32 column = slab + lane * COLUMNS;
      if (column < p.value_dim) {
        ptx::st_global_v2_b32(query_row<u16>(p.o, unit, position, head) + column,
                              warp::round_pair(o.x[0] * all.factor, o.x[1] * all.factor),
                              warp::round_pair(o.x[2] * all.factor, o.x[3] * all.factor));
      }
    }
    if (p.lse.data != nullptr && lane == 0) {
      *query_row<float>(p.lse, unit, position, head) = lse;
    }
  }
};

}  // namespace merge

// Counts a result of a unit's rows as done, which the block has written, and answers whether it was
// the last of `count`. `counter` says which of the unit's, of which there is one a part: 0 for
// parts, the rank for clusters. It is back at 0 then.
__device__ inline bool ends_last(const ForwardParams& p, const Unit& unit, i64 partial_first,
                                 i32 counter, i32 count) {
  __shared__ bool is_last;
  u32* ended = nullptr;
  if (threadIdx.x == 0) {
    const i32 position = unit.position(p, 0);
    const i32 head = unit.head_of(p, 0, position);
    ended = p.counter + partial_row(p, partial_first, counter, unit.rows, position, head);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    // What the block has written is behind the barrier, and what others have is read past the
    // first-level cache.
    is_last = ptx::atom_acq_rel_gpu_add_u32(ended, 1) == u32(count) - 1;
    if (is_last) *ended = 0;
  }
  __syncthreads();
  return is_last;
}

// After a part of a unit's rows is written: the block that ends last joins all of them.
__device__ inline void end_part(const ForwardParams& p, const Unit& unit, i64 partial_first) {
  constexpr i32 WARPS = config::THREADS / WARP;
  const i32 warp = i32(threadIdx.x) / WARP;
  // Addresses are formed while the count is on its way.
  merge::Row row(p, unit, partial_first, warp);
  if (!ends_last(p, unit, partial_first, 0, unit.parts)) return;
  for (i32 flat = warp;;) {
    if (!row.is_written(unit)) return;
    row.join(p, unit);
    flat += WARPS;
    if (flat >= config::BLOCK_M) return;
    row = merge::Row(p, unit, partial_first, flat);
  }
}

}  // namespace attn
