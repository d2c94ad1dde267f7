// Where things are: the sequence of a unit of work, and the row of a token in dense or paged
// storage.
//
// Tensors: prefix sums i64 [count + 1]; Rows as base/params.cuh describes them; block tables i32
// [sequence, column]. Who executes: find_sequence a whole warp, the rest any thread. No shared
// memory.
// The invariant: products with strides are 64-bit, and a page id from the table is compared with
// the number of pages before it becomes an address.
// What it does not do: bounds of rows and keys (attn/band.cuh).

#pragma once

#include "base/params.cuh"
#include "base/types.cuh"

namespace attn {

// The sequence s with starts[s] <= x < starts[s + 1], where starts [count + 1] never falls and
// starts[0] <= x < starts[count]. An empty sequence is never answered.
//
// A 32-way search: each round every lane looks at one boundary, so up to 32 sequences cost one
// load. All lanes of the warp call it, with the same arguments.
__device__ inline i32 find_sequence(const i64* starts, i32 count, i64 x) {
  const i32 lane = threadIdx.x % WARP;
  i32 lo = 0;
  i32 hi = count;
  while (hi - lo > 1) {
    const i32 step = (hi - lo - 1) / WARP + 1;
    const i32 at = lo + lane * step;
    // Boundary lo is known to hold; the others hold in the order of the lanes.
    const bool holds = lane == 0 || (at < hi && starts[at] <= x);
    const i32 last = __popc(__ballot_sync(0xFFFFFFFFu, holds)) - 1;
    lo += last * step;
    hi = min_of(lo + step, hi);
  }
  return lo;
}

// One sequence of a batch.
struct Sequence {
  i32 index;
  i32 q_len;
  i32 kv_len;
  i64 q_first;   // row of its first query among Rows::row: 0 where padded
  i64 kv_first;  // row of its first key: 0 where padded; unused where paged
};

__device__ inline Sequence sequence_at(const ForwardParams& p, i32 index) {
  const i64 q = p.q_starts[index];
  const i64 kv = p.kv_starts[index];
  return {index, i32(p.q_starts[index + 1] - q), i32(p.kv_starts[index + 1] - kv),
          p.flags & Q_PADDED ? 0 : q, p.flags & KV_PADDED ? 0 : kv};
}

// Sequence `s` where all are equal.
__device__ inline Sequence equal_sequence(const ForwardParams& p, u32 s) {
  return {i32(s), p.uniform_q, p.uniform_kv, p.flags & Q_PADDED ? 0 : i64(s) * p.uniform_q,
          p.flags & KV_PADDED ? 0 : i64(s) * p.uniform_kv};
}

// Query rows of a sequence that are written: those past q_len are padding.
__device__ inline i32 written_rows(const ForwardParams& p, const Sequence& s) {
  return p.padded_rows >= 0 ? p.padded_rows : s.q_len;
}

// Element 0 of a row, in elements from Rows::data. `outer` is the sequence or the page.
__device__ inline i64 row_offset(const Rows& rows, i64 outer, i64 row, i64 head) {
  return outer * rows.sequence + row * rows.row + head * rows.head;
}

// Element 0 of row `row` of a sequence in q, o or lse.
__device__ inline i64 query_offset(const Rows& rows, const Sequence& s, i32 row, i32 head) {
  return row_offset(rows, s.index, s.q_first + row, head);
}

// The place of a token in K and V: the sequence and its row, or the page and its slot.
struct Place {
  i64 outer;  // -1: the page is outside the cache, and the token's K and V count as NaN
  i64 row;
};

__device__ inline bool is_stored(const Place& place) { return place.outer >= 0; }

__device__ inline i64 row_offset(const Rows& rows, const Place& place, i64 head) {
  return row_offset(rows, place.outer, place.row, head);
}

// The page in a column of a sequence's row of the table, or -1 for an id outside the cache.
__device__ inline i64 page_at(const BlockTable& table, i32 sequence, i32 column) {
  const i64 page = table.data[sequence * table.sequence + column * table.column];
  return page >= 0 && page < table.pages ? page : -1;
}

// The place of key `key` in 0..kv_len.
__device__ inline Place key_place(const ForwardParams& p, const Sequence& s, i32 key) {
  if (p.flags & PAGED) {
    const i32 column = i32(p.table.page_size.divide(u32(key)));
    return {page_at(p.table, s.index, column), key - column * i32(p.table.page_size.value)};
  }
  return {s.index, s.kv_first + key};
}

// The f32 of a sequence and head, or `absent` where the tensor is.
__device__ inline float per_head(const PerHead& x, i64 sequence, i64 head, float absent) {
  return x.data == nullptr ? absent : x.data[sequence * x.sequence + head * x.head];
}

// The entry of a map, which is present.
template <typename T>
__device__ T pair_at(const Pairs& map, i64 sequence, i64 head, i64 row, i64 key) {
  const i64 offset = sequence * map.sequence + head * map.head + row * map.row + key * map.key;
  return static_cast<const T*>(map.data)[offset];
}

}  // namespace attn
