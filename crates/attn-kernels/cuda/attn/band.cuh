// The keys of a row under causal and window bounds.
//
// Source: row i of a sequence sits at key position p = i + kv_len - q_len (bottom-right alignment)
// and sees p - left ..= p + right, an open side being unbounded; causal is right = 0. The same
// intervals as attn-core's `Band`.
// Who executes: any thread, alone; no memory is touched.
// The invariant: with lengths up to 2^29 nothing overflows 32 bits, whatever the window.
// What it does not do: other masks (attn/score.cuh).

#pragma once

#include "base/params.cuh"
#include "base/types.cuh"

namespace attn {

// Every sequence fits in a window this wide: a wider one means the same, and its sums would
// overflow.
constexpr i32 WIDEST_WINDOW = 1 << 29;

// The bounds of one sequence. Both ends of a row's keys grow with the row, for rows past q_len too,
// so those of a tile's first and last row enclose the ones between.
struct Band {
  i32 left;   // -1 is open
  i32 right;  // -1 is open
  i32 q_len;
  i32 kv_len;

  Band() = default;

  __device__ Band(const ForwardParams& p, i32 q_len, i32 kv_len)
      : left(min_of(p.left, WIDEST_WINDOW)),
        right(min_of(p.right, WIDEST_WINDOW)),
        q_len(q_len),
        kv_len(kv_len) {}

  // The row's own position among the keys; negative where there are more rows than keys.
  __device__ i32 position(i32 row) const { return row + kv_len - q_len; }

  // The first key that `row` sees.
  __device__ i32 lo(i32 row) const {
    return left < 0 ? 0 : clamp_of(position(row) - left, 0, kv_len);
  }

  // The end of the keys that `row` sees: lo where it sees none.
  __device__ i32 hi(i32 row) const {
    const i32 end = right < 0 ? kv_len : clamp_of(position(row) + right + 1, 0, kv_len);
    return max_of(end, lo(row));
  }

  // lo() .. hi() hold the keys of every row of the sequence: what lies outside is storage that none
  // of them may read.
  __device__ i32 lo() const { return q_len == 0 ? 0 : lo(0); }
  __device__ i32 hi() const { return q_len == 0 ? 0 : max_of(hi(q_len - 1), lo()); }
};

}  // namespace attn
