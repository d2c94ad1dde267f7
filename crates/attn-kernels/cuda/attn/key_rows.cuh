// Where the key and value rows of one sequence and KV head are: in order, or in pages.
//
// Who executes: any thread, alone.
// The invariant: addresses are formed in 64 bits, and the block table is read below the sequence's
// length alone; an entry outside the cache is answered with a row of NaN bits, never with an
// address outside the cache. What it does not do: read the rows. In order, a row past the end has
// an address, which its caller gives to copies of no bytes.

#pragma once

#include "attn/locate.cuh"
#include "base/params.cuh"

namespace attn {

// A row of NaN in every stored type, of the largest dimension, 576 elements of 16 bits: what a key
// of an invalid page reads.
struct alignas(16) NanRow {
  u32 words[288];

  __device__ constexpr NanRow() : words{} {
    for (u32& word : words) word = ~0u;
  }
};
__device__ const NanRow NAN_ROW;

// The rows of one sequence and KV head. ELEMENT: bytes of a stored element.
template <bool PAGED, int ELEMENT>
struct KeyRows {
  const u8* k;  // of key 0, or of slot 0 of page 0
  const u8* v;
  const i32* table;  // of the sequence

  // The addresses of a row's key and value.
  struct Row {
    const u8* k;
    const u8* v;
  };

  KeyRows() = default;

  __device__ KeyRows(const ForwardParams& p, const Sequence& sequence, i32 kv_head) {
    const i64 outer = PAGED ? 0 : sequence.index;
    const i64 first = PAGED ? 0 : sequence.kv_first;
    k = static_cast<const u8*>(p.k.data) + row_offset(p.k, outer, first, kv_head) * ELEMENT;
    v = static_cast<const u8*>(p.v.data) + row_offset(p.v, outer, first, kv_head) * ELEMENT;
    table = PAGED ? p.table.data + sequence.index * p.table.sequence : nullptr;
  }

  // The row of key `key`, in order; in pages nothing yet, which `row` and `next` look up.
  __device__ Row first(const ForwardParams& p, i32 key) const {
    if constexpr (PAGED) return {};
    return {k + key * p.k.row * ELEMENT, v + key * p.v.row * ELEMENT};
  }

  // The entry of the block table for key `key`, which is in the sequence.
  __device__ const i32* entry_of(const ForwardParams& p, i32 key) const {
    return table + p.table.page_size.divide(u32(key)) * p.table.column;
  }
  __device__ i32 page_of(const ForwardParams& p, i32 key) const { return *entry_of(p, key); }

  // The row of key `key` in the page of that entry.
  __device__ Row row(const ForwardParams& p, i32 key, i32 page) const {
    if (page < 0 || page >= p.table.pages) {
      const u8* nan = reinterpret_cast<const u8*>(&NAN_ROW);
      return {nan, nan};
    }
    const i32 slot = key - i32(p.table.page_size.divide(u32(key)) * p.table.page_size.value);
    return {k + row_offset(p.k, page, slot, 0) * ELEMENT,
            v + row_offset(p.v, page, slot, 0) * ELEMENT};
  }

  // The row of key `key`, which is in the sequence; in order, simply `rows` after that of `at`.
  __device__ Row next(const ForwardParams& p, const Row& at, i32 key, i32 rows) const {
    if constexpr (PAGED) {
      return row(p, key, page_of(p, key));
    } else {
      return {at.k + rows * p.k.row * ELEMENT, at.v + rows * p.v.row * ELEMENT};
    }
  }
};

}  // namespace attn
