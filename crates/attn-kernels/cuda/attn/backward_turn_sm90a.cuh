// In which order tiles of keys add to a tile of rows, where the sums must not depend on timing.
//
// A tile of rows counts those that have added (attn/turns.cuh). Under a causal bound or window the
// first is the last that its rows see, for that one starts there; then those before it, each of
// which has come from rows above by then: the blocks run along a diagonal, and hardly one waits.
// Where rows see keys to their right without a bound, the tiles come in order: each block follows
// the one before it at a distance that it keeps. Who executes: any thread, alone.
// The invariant: a block waits for none but those that began before it, which attn/turns.cuh has
// end.

#pragma once

#include "attn/backward_tile_sm90a.cuh"

namespace attn {

// How many tiles of keys add to a tile of rows before this one does.
__device__ inline u32 rank_of(const KeyTile& keys, i32 tile) {
  using namespace config;
  const i32 own = keys.first / BLOCK_N;
  const i32 top = tile * BLOCK_M;
  if (!is_diagonal(keys.band)) return u32(own - keys.band.lo(top) / BLOCK_N);
  const i32 bottom = min_of(top + BLOCK_M, keys.sequence.q_len) - 1;
  return u32((keys.band.hi(bottom) - 1) / BLOCK_N - own);
}

}  // namespace attn
