// Keys brought near while the launch before this one ends.
//
// A launch that overlaps with the one before it may not read what that one writes. It may ask for
// it: a prefetch into the second-level cache, where all writes go, reads nothing. So the first keys
// are on their way while the device has little else to do.
// Tensors: k, v and the block table. Who executes: all threads of a block, before they wait.
// The invariant: what is read here may be stale, and decides nothing but what is asked for, all of
// it inside the cache; it is read past the first-level cache, where it would stay.

#pragma once

#include "attn/key_rows.cuh"
#include "attn/unit.cuh"
#include "base/config.cuh"
#include "ptx/global.cuh"

namespace attn {

// Keys that are brought near: a tile of each team.
constexpr i32 NEAR_KEYS = config::TEAMS * config::BLOCK_N;

template <typename Source>
__device__ void bring_near(const ForwardParams& p, const Unit& unit, const Source& keys) {
  using namespace config;
  constexpr i32 LINE = 128;
  const i32 end = min_of(unit.keys.hi, unit.keys.lo + NEAR_KEYS);
  for (i32 key = unit.keys.lo + i32(threadIdx.x); key < end; key += THREADS) {
    typename Source::Row row;
    if constexpr (IS_PAGED) {
      row = keys.row(p, key, i32(ptx::ld_global_cg_b32(keys.entry_of(p, key))));
    } else {
      row = keys.first(p, key);
    }
#pragma unroll
    for (i32 at = 0; at < HEAD_DIM * size_of(KV_DTYPE); at += LINE) {
      if (at < p.head_dim * size_of(KV_DTYPE)) ptx::prefetch_global_l2(row.k + at);
    }
#pragma unroll
    for (i32 at = 0; at < VALUE_DIM * size_of(KV_DTYPE); at += LINE) {
      if (at < p.value_dim * size_of(KV_DTYPE)) ptx::prefetch_global_l2(row.v + at);
    }
  }
}

}  // namespace attn
