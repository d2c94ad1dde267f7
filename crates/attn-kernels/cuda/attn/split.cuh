// How the keys of a sequence are divided into parts, and where the results of a part are.
//
// Tensors: partial_o f32 [partial row, value_dim], partial_lse f32 [partial row], natural
// logarithms, -inf for a part in which a row sees no key.
// Who executes: any thread, alone. The host computes the same parts to size the grid and the
// workspace.
// The invariant: the parts cover the keys that some row of the sequence sees, once each, and depend
// on nothing but the lengths of this sequence and the launch's split.
// What it does not do: choose the split.

#pragma once

#include "attn/band.cuh"
#include "base/params.cuh"
#include "base/types.cuh"

namespace attn {

struct Parts {
  i32 lo;  // keys lo .. hi are those that some row of the sequence sees
  i32 hi;
  i32 keys;   // of each part but the last ones, at least 1; part n starts at lo + n * keys
  i32 count;  // at least 1
};

__device__ inline Parts parts_of(const ForwardParams& p, const Band& band) {
  Parts parts;
  parts.lo = band.lo();
  parts.hi = band.hi();
  const i32 len = max_of(parts.hi - parts.lo, 1);
  // A part longer than all keys means the same as one of their length, and its sums could overflow.
  const i32 even = ceil_div(len, clamp_of(p.split_parts, 1, len));
  parts.keys = min_of(max_of(p.split_keys, even), len);
  parts.count = p.flags & FIXED_PARTS ? p.split_parts : ceil_div(len, parts.keys);
  return parts;
}

// The row of a part's result among the partial results. `first`: partial_starts of the sequence;
// `rows`: its rows that are written.
__device__ inline i64 partial_row(const ForwardParams& p, i64 first, i32 part, i32 rows, i32 row,
                                  i32 head) {
  return first + (static_cast<i64>(part) * rows + row) * p.q_heads + head;
}

// Where a part leaves its results.
struct PartialRows {
  bool are_used;  // else they are all there is, and go to the output
  i64 first;      // partial_starts of the sequence
  i32 part;
  i32 rows;

  __device__ i64 at(const ForwardParams& p, i32 row, i32 head) const {
    return partial_row(p, first, part, rows, row, head);
  }
};

}  // namespace attn
