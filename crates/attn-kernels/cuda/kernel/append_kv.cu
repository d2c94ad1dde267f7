// Scatters the keys and values of new tokens into the pages of a cache.
//
// Source of the rotation: Su et al., "RoFormer", arXiv:2104.09864, equation 34, in two conventions:
// pairs (x[2i], x[2i + 1]), and halves (x[i], x[i + rotary_dim / 2]).
// Tensors: k [tokens, kv_heads, head_dim], v [tokens, kv_heads, value_dim]; caches [page, slot,
// kv_heads, dim] by strides; slots i64 [tokens]; positions, sequences i32 [tokens]; cos, sin f32
// [positions, rotary_dim / 2].
// Who executes: one warp for each (token, head), 4 a block, any grid; a warp takes every n-th.
// No shared memory.
// The invariant: the arithmetic is f32 and each element is rounded once, keys after their rotation.
// An fp8 cache holds value / scale; what lies past its largest finite value becomes that value, for
// a NaN in a cache would spoil its sequence for good, while infinities and NaN that come in stay
// visible (in e4m3, which has no infinity, as NaN). A token whose slot is outside the cache is not
// written, and one whose position is outside the tables gets NaN for its rotated elements.
// What it does not do: order the writes of tokens that name one slot; rotate queries.

#include "attn/locate.cuh"
#include "base/dtype.cuh"
#include "base/kv_dtype.cuh"
#include "base/params.cuh"
#include "ptx/convert.cuh"
#include "tile/piece.cuh"

namespace attn {

namespace append_kv {

using New = tile::Pieces<config::DTYPE>;
using Cache = tile::Pieces<config::KV_DTYPE>;

constexpr int THREADS = 128;
constexpr int PIECE = tile::PIECE;
constexpr bool IS_FP8 = size_of(config::KV_DTYPE) == 1;

// The angles of one token's position.
struct Rotation {
  const float* cos;  // null: the position is outside the tables
  const float* sin;
  i32 dim;
  bool is_interleaved;

  // Element d of a rotated row from itself and its partner. Each product is rounded, so that any
  // host's f32 arithmetic gives the same bits.
  __device__ float rotate(i32 d, float x, float partner) const {
    if (cos == nullptr) return __int_as_float(0x7FFFFFFF);
    const i32 half = dim / 2;
    const i32 angle = is_interleaved ? d / 2 : d < half ? d : d - half;
    const bool is_first = is_interleaved ? d % 2 == 0 : d < half;
    const float turned = __fmul_rn(partner, sin[angle]);
    return __fmul_rn(x, cos[angle]) + (is_first ? -turned : turned);
  }
};

__device__ Rotation rotation_of(const AppendParams& p, i64 token) {
  Rotation r = {nullptr, nullptr, p.rotary_dim, p.rotary_interleaved != 0};
  if (p.rotary_dim == 0) return r;
  const i64 position = p.positions[token];
  if (position >= 0 && position < p.rotary_rows) {
    r.cos = p.cos + position * p.rotary_row;
    r.sin = p.sin + position * p.rotary_row;
  }
  return r;
}

// Rotates elements at .. at + 8 of a row that has `end`.
__device__ void rotate_piece(const Rotation& r, const New::Bits* row, i32 at, i32 end,
                             float (&x)[PIECE]) {
  float partner[PIECE] = {};
  const i32 half = r.dim / 2;
  if (r.is_interleaved) {
#pragma unroll
    for (int i = 0; i < PIECE; ++i) partner[i] = x[i ^ 1];
  } else if (half % PIECE == 0) {
    New::load(row, at < half ? at + half : at - half, end, partner);
  } else {
    // The piece straddles the halves.
#pragma unroll
    for (int i = 0; i < PIECE; ++i) {
      const i32 d = at + i;
      if (d < r.dim) partner[i] = New::Stored::widen(row[d < half ? d + half : d - half]);
    }
  }
#pragma unroll
  for (int i = 0; i < PIECE; ++i) {
    if (at + i < r.dim) x[i] = r.rotate(at + i, x[i], partner[i]);
  }
}

// Copies a row of `dim` elements, its first rotation.dim ones rotated.
__device__ void copy_row(const New::Bits* from, Cache::Bits* to, i32 dim, float scale,
                         const Rotation& rotation) {
  for (i32 at = threadIdx.x % WARP * PIECE; at < dim; at += WARP * PIECE) {
    float x[PIECE];
    New::load(from, at, dim, x);
    if (at < rotation.dim) rotate_piece(rotation, from, at, dim, x);
    if constexpr (IS_FP8) {
#pragma unroll
      for (int i = 0; i < PIECE; ++i) x[i] /= scale;
    }
    Cache::store(to, at, dim, x);
  }
}

// One token and head; all lanes of a warp.
__device__ void append(const AppendParams& p, i64 unit) {
  const i64 token = unit / p.kv_heads;
  const i64 head = unit - token * p.kv_heads;
  const i64 slot = p.slots[token];
  const i64 page_size = p.page_size.value;
  if (slot < 0 || slot >= p.pages * page_size) return;
  const i64 page = slot / page_size;
  const Place place = {page, slot - page * page_size};
  const i64 sequence = p.sequences == nullptr ? 0 : p.sequences[token];
  const bool is_sequence =
      p.sequences == nullptr || (sequence >= 0 && sequence < p.scale_sequences);

  const auto from = [&](const Rows& rows) {
    return static_cast<const New::Bits*>(rows.data) + row_offset(rows, 0, token, head);
  };
  const auto to = [&](const Rows& rows) {
    return static_cast<Cache::Bits*>(rows.data) + row_offset(rows, place, head);
  };
  const auto scale = [&](const PerHead& scales) {
    if (!is_sequence) return __uint_as_float(0x7FFFFFFFu);
    return IS_FP8 ? per_head(scales, sequence, head, 1.0f) : 1.0f;
  };
  const Rotation none = {nullptr, nullptr, 0, false};
  copy_row(from(p.k), to(p.k_cache), p.head_dim, scale(p.k_scale), rotation_of(p, token));
  copy_row(from(p.v), to(p.v_cache), p.value_dim, scale(p.v_scale), none);
}

}  // namespace append_kv

extern "C" __global__ void __launch_bounds__(append_kv::THREADS)
    attn_append_kv(const __grid_constant__ AppendParams p) {
  constexpr int WARPS = append_kv::THREADS / WARP;
  const i64 units = p.tokens * p.kv_heads;
  const i64 first = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / WARP;
  const i64 step = static_cast<i64>(gridDim.x) * WARPS;
  for (i64 unit = first; unit < units; unit += step) append_kv::append(p, unit);
}

}  // namespace attn
