// New rows of a cache, written by the blocks that attend to them.
//
// Tensors: k_new, v_new [query rows, kv_heads, head_dim | value_dim], a row for each query row; the
// caches they go to, in pages. Who executes: all threads of a block, which meet after it. No shared
// memory.
// The invariant: the new keys of a sequence are its last ones, one a query row, so that each is seen
// by its own row and is among the keys of some unit. A unit writes those that it reads, and no
// other: it waits for no other block, and several of one KV head write the same bytes. A key whose
// page is outside the cache is not written.
// What it does not do: fp8 caches, whose rows are to be scaled (kernel/append_kv.cu); rotate.

#pragma once

#include "attn/key_rows.cuh"
#include "attn/unit.cuh"
#include "base/config.cuh"
#include "ptx/global.cuh"

namespace attn {

// Whether the block has written rows.
template <typename Source>
__device__ bool append_rows(const ForwardParams& p, const Unit& unit, const Source& keys) {
  constexpr i32 CHUNK = 8;  // elements of 16 bytes
  const i32 before = unit.sequence.kv_len - unit.sequence.q_len;
  const i32 first = max_of(unit.keys.lo, before);
  const i32 k_chunks = p.head_dim / CHUNK;
  const i32 chunks = k_chunks + p.value_dim / CHUNK;
  if (first >= unit.keys.hi) return false;
  for (i32 i = i32(threadIdx.x); i < (unit.keys.hi - first) * chunks; i += config::THREADS) {
    const i32 key = first + i / chunks;
    const i32 chunk = i % chunks;
    const i32 page = keys.page_of(p, key);
    if (page < 0 || page >= p.table.pages) continue;
    const auto row = keys.row(p, key, page);
    const bool is_key = chunk < k_chunks;
    const Rows& from = is_key ? p.k_new : p.v_new;
    const i32 column = (is_key ? chunk : chunk - k_chunks) * CHUNK;
    const i64 at =
        row_offset(from, 0, unit.sequence.q_first + key - before, unit.kv_head) + column;
    u8* to = const_cast<u8*>(is_key ? row.k : row.v) + column * size_of(config::KV_DTYPE);
    *reinterpret_cast<Vec16*>(to) =
        *reinterpret_cast<const Vec16*>(static_cast<const u16*>(from.data) + at);
  }
  return true;
}

}  // namespace attn
