// Joins the results of the parts into which the keys of sequences were split, after the launch that
// computed them.
//
// Source: as attn/shares.cuh. A launch of its own, for parts of a hundred rows are megabytes, and
// one block, the last of the kernel before, would read them alone.
// Tensors: partial_o f32 [partial row, value_dim], partial_lse f32 [partial row] as attn/split.cuh
// lays them out; o [rows, q_heads, value_dim] in the type of the output; lse [rows, q_heads].
// Who executes: a block for each row that is written and query head, of one to four warps.
// Shared memory: f32 [warps, 128].
// The invariant: parts are summed in groups of 16, in order, and the groups in order, whatever the
// number of warps, so that equal calls give equal bits. Sinks are counted here, once, and nowhere
// else for these sequences; padding is 0 and -inf. Rows of sequences in one part are not touched.
// value_dim is a multiple of 4; partial rows and rows of o start on 16 bytes.
// What it does not do: choose the parts (attn/split.cuh).

#include "attn/shares.cuh"
#include "attn/split.cuh"
#include "attn/unit.cuh"
#include "base/dtype.cuh"
#include "base/params.cuh"
#include "ptx/global.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/half.cuh"
#include "tile/reduce.cuh"

namespace attn {

namespace merge_parts {

using merge::COLUMNS;
using merge::Four;

constexpr u32 MOST_WARPS = 4;
constexpr i32 SLAB = WARP * COLUMNS;
// Parts that a warp has under way at once.
constexpr i32 GROUP = 16;

static_assert(config::DTYPE == DType::f16 || config::DTYPE == DType::bf16);

__device__ u32 round_pair(float lo, float hi) {
  return config::DTYPE == DType::bf16 ? ptx::cvt_rn_bf16x2_f32(lo, hi)
                                      : ptx::cvt_rn_f16x2_f32(lo, hi);
}

// A row that is written.
struct Place {
  Sequence sequence;
  i32 position;
};

// The row `row` of all; all lanes of a warp.
__device__ Place place_of(const ForwardParams& p, i64 row) {
  const bool are_equal = p.uniform_units.value != 0;
  if (are_equal || p.padded_rows >= 0) {
    const u32 rows = u32(p.padded_rows >= 0 ? p.padded_rows : p.uniform_q);
    const u32 s = u32(row) / rows;
    return {are_equal ? equal_sequence(p, s) : sequence_at(p, i32(s)), i32(u32(row) - s * rows)};
  }
  const i32 s = find_sequence(p.q_starts, p.batch, row);
  return {sequence_at(p, s), i32(row - p.q_starts[s])};
}

// The parts of a row of one head.
struct Row {
  i32 parts;
  i64 step;  // from a part to the next, in rows
  const float* lse;
  const float* four;  // the lane's first columns

  __device__ float lse_of(i32 part) const {
    return part < parts ? ptx::ld_global_cg_f32(lse + part * step) : NEG_INF;
  }

  // Starts the loads of a group. Columns that the lane does not have are read and do not count.
  __device__ void load(i32 value_dim, i32 slab, i32 first, Vec16 (&loaded)[GROUP]) const {
    const i64 next = step * value_dim;
    const i32 column = slab + i32(threadIdx.x) % WARP * COLUMNS;
    const float* from = four + first * next + (column < value_dim ? column : 0);
#pragma unroll
    for (i32 i = 0; i < GROUP; ++i, from += next) {
      if (first + i < parts) loaded[i] = ptx::ld_global_cg_v4_b32(from);
    }
  }
};

__device__ void merge(const ForwardParams& p) {
  __shared__ float4 sums[MOST_WARPS][WARP];
  const i32 lane = i32(threadIdx.x) % WARP;
  const i32 warp = i32(threadIdx.x) / WARP;
  const i32 warps = i32(blockDim.x) / WARP;
  const i64 index = blockIdx.x / u32(p.q_heads);
  const i32 head = i32(blockIdx.x - u32(index) * u32(p.q_heads));
  // Lengths are there before the launch that this one waits for.
  const Place place = place_of(p, index);
  const Sequence& sequence = place.sequence;
  const i32 rows = written_rows(p, sequence);
  const Parts parts = parts_of(p, Band(p, sequence.q_len, sequence.kv_len));
  const bool is_row = place.position < sequence.q_len;
  const i64 first =
      partial_row(p, parts.count > 1 ? partial_first_of(p, sequence, rows, parts.count) : 0, 0,
                  rows, place.position, head);
  const Row row = {is_row ? parts.count : 0, i64(rows) * p.q_heads, p.partial_lse + first,
                   p.partial_o + first * p.value_dim};
  const float sink = is_row ? per_head(p.sinks, sequence.index, head, NEG_INF) : NEG_INF;

  ptx::griddepcontrol_wait<__CUDA_ARCH__>();
  ptx::griddepcontrol_launch_dependents<__CUDA_ARCH__>();
  if (parts.count == 1) return;

  // One way to memory and back with those of the LSEs.
  Vec16 loaded[GROUP] = {};
  row.load(p.value_dim, 0, warp * GROUP, loaded);
  float max = sink;
  for (i32 part = lane; part < row.parts; part += WARP) max = fmaxf(max, row.lse_of(part));
  max = tile::warp::max(max);
  float sum = 0.0f;
  for (i32 part = lane; part < row.parts; part += WARP) {
    sum += merge::share_of(row.lse_of(part), max);
  }
  const merge::Join all(max, tile::warp::sum(sum), sink);

  const i64 own = query_offset(p.o, sequence, place.position, head);
  u16* const to = static_cast<u16*>(p.o.data) + own;
  for (i32 slab = 0; slab < p.value_dim; slab += SLAB) {
    Four total = {};
    for (i32 start = 0; start < row.parts; start += warps * GROUP) {
      const i32 group = start + warp * GROUP;
      if (slab + start > 0) row.load(p.value_dim, slab, group, loaded);
      const float share =
          merge::share_of(lane < GROUP ? row.lse_of(group + lane) : NEG_INF, max);
      Four o = {};
#pragma unroll
      for (i32 i = 0; i < GROUP; ++i) {
        // Few parts are most common.
        if (i % 4 == 0 && group + i >= row.parts) break;
        o.add(__shfl_sync(~0u, share, i), loaded[i]);
      }
      if (warps > 1) {
        sums[warp][lane] = {o.x[0], o.x[1], o.x[2], o.x[3]};
        __syncthreads();
      }
      for (i32 other = 0; other < warps && start + other * GROUP < row.parts; ++other) {
        const float4 x =
            warps > 1 ? sums[other][lane] : float4{o.x[0], o.x[1], o.x[2], o.x[3]};
        total.x[0] += x.x;
        total.x[1] += x.y;
        total.x[2] += x.z;
        total.x[3] += x.w;
      }
      // The sums are read before they are written again.
      if (warps > 1) __syncthreads();
    }
    const i32 column = slab + lane * COLUMNS;
    if (warp == 0 && column < p.value_dim) {
      ptx::st_global_v2_b32(to + column,
                            round_pair(total.x[0] * all.factor, total.x[1] * all.factor),
                            round_pair(total.x[2] * all.factor, total.x[3] * all.factor));
    }
  }
  if (p.lse.data != nullptr && threadIdx.x == 0) {
    static_cast<float*>(p.lse.data)[query_offset(p.lse, sequence, place.position, head)] = all.lse;
  }
}

}  // namespace merge_parts

}  // namespace attn

extern "C" __global__ void __launch_bounds__(attn::merge_parts::MOST_WARPS* attn::WARP)
    attn_merge_parts(const __grid_constant__ attn::ForwardParams p) {
  attn::merge_parts::merge(p);
}
