// The attention of the union of two disjoint key sets, from the state of each.
//
// Source: Milakov, Gimelshein, arXiv:1805.02867, section 3.1; Dao et al., arXiv:2205.14135,
// appendix B.
// Tensors: a, b, o [rows, heads, dim]; their LSEs f32 [rows, heads], natural logarithm; any strides
// with innermost 1, any for the LSEs.
// Who executes: one warp for each (row, head), 4 a block, any grid; a warp takes every n-th. No
// shared memory.
// The invariant: (anything, -inf) is neutral to the bit of the other state, and the order of the
// two does not matter to the bit. A side without weight is not read; a NaN in an LSE spreads. o may
// be a or b.
// What it does not do: more than two states.

#include "attn/locate.cuh"
#include "base/dtype.cuh"
#include "base/params.cuh"
#include "ptx/convert.cuh"
#include "ptx/griddepcontrol.cuh"
#include "tile/piece.cuh"

namespace attn {

namespace merge_states {

using Pieces = tile::Pieces<config::DTYPE>;
using Bits = Pieces::Bits;

constexpr int THREADS = 128;

// Shares of the two states in their union.
struct Shares {
  float a;
  float b;
  float lse;
};

__device__ Shares shares_of(float a, float b) {
  // NaN compares false, and must not look like an empty side.
  if (a == NEG_INF) return {0.0f, b == NEG_INF ? 0.0f : 1.0f, b};
  if (b == NEG_INF) return {1.0f, 0.0f, a};
  const float top = fmaxf(a, b);
  const float of_a = expf(a - top);
  const float of_b = expf(b - top);
  const float total = of_a + of_b;
  // One of the two is 1, so the product is the other one, or NaN.
  return {of_a / total, of_b / total, top + log1pf(of_a * of_b)};
}

__device__ void merge(const MergeStatesParams& p, i64 unit) {
  const i64 row = unit / p.heads;
  const i64 head = unit - row * p.heads;
  const auto lse_at = [&](const Rows& rows) {
    return static_cast<float*>(rows.data) + row_offset(rows, 0, row, head);
  };
  const auto row_at = [&](const Rows& rows) {
    return static_cast<Bits*>(rows.data) + row_offset(rows, 0, row, head);
  };
  const Shares shares = shares_of(*lse_at(p.a_lse), *lse_at(p.b_lse));
  // Every lane has read the LSEs before one of them may be overwritten.
  __syncwarp();
  const Bits* a = row_at(p.a);
  const Bits* b = row_at(p.b);
  Bits* o = row_at(p.o);
  for (i32 at = threadIdx.x % WARP * tile::PIECE; at < p.dim; at += WARP * tile::PIECE) {
    float x[tile::PIECE] = {};
    float y[tile::PIECE] = {};
    if (shares.a != 0.0f) Pieces::load(a, at, p.dim, x);
    if (shares.b != 0.0f) Pieces::load(b, at, p.dim, y);
#pragma unroll
    for (int i = 0; i < tile::PIECE; ++i) {
      // Not contracted: a fused sum would depend on which of the two is first. A side that is not
      // there adds nothing, not even to a zero's sign.
      const float of_a = __fmul_rn(x[i], shares.a);
      const float of_b = __fmul_rn(y[i], shares.b);
      x[i] = shares.b == 0.0f ? of_a : shares.a == 0.0f ? of_b : __fadd_rn(of_a, of_b);
    }
    Pieces::store(o, at, p.dim, x);
  }
  if (threadIdx.x % WARP == 0) *lse_at(p.lse) = shares.lse;
}

}  // namespace merge_states

extern "C" __global__ void __launch_bounds__(merge_states::THREADS)
    attn_merge_states(const __grid_constant__ MergeStatesParams p) {
  // The states may be those of the launch before this one.
  ptx::griddepcontrol_wait<__CUDA_ARCH__>();
  ptx::griddepcontrol_launch_dependents<__CUDA_ARCH__>();
  constexpr int WARPS = merge_states::THREADS / WARP;
  const i64 units = p.rows * p.heads;
  const i64 first = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / WARP;
  const i64 step = static_cast<i64>(gridDim.x) * WARPS;
  for (i64 unit = first; unit < units; unit += step) merge_states::merge(p, unit);
}

}  // namespace attn
