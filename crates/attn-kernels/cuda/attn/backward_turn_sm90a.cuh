// In which order tiles of keys add to a tile of rows, where the sums must not depend on timing.
//
// A tile of rows counts those that have added. Under a causal bound or window the first is the last
// that its rows see, for that one starts there; then those before it, each of which has come from
// rows above by then: the blocks run along a diagonal, and none waits. Where rows see all keys, a
// cohort of blocks starts at as many different tiles of rows and goes round, and the order is that
// of their coming by. Who executes: any thread, alone.
// The invariant: a block waits for blocks that were launched before it, or in its own cohort, which
// is small enough to run at once; and in virtual time, in which each block visits a tile of rows a
// step, nobody waits for a later step.

#pragma once

#include "attn/backward_tile_sm90a.cuh"

namespace attn {

// How many tiles of keys add to a tile of rows before this one does.
__device__ inline i32 rank_of(const KeyTile& keys, i32 tile) {
  using namespace config;
  const i32 own = keys.index();
  const i32 top = tile * BLOCK_M;
  if (is_diagonal(keys.band)) {
    const i32 bottom = min_of(top + BLOCK_M, keys.sequence.q_len) - 1;
    return (keys.band.hi(bottom) - 1) / BLOCK_N - own;
  }
  if (!is_open(keys.band)) return own - keys.band.lo(top) / BLOCK_N;
  const i32 base = own / COHORT * COHORT;
  const i32 size = min_of(keys.tiles - base, COHORT);
  // So many of the cohort have started at this tile or above.
  const i32 above = min_of(ceil_div((tile + 1) * size, keys.hi), size);
  const i32 place = own - base;
  return base + (place < above ? above - 1 - place : above + size - 1 - place);
}

}  // namespace attn
