// What one block of a backward does: a tile of keys of one KV head, and the tiles of query rows
// that see some of them.
//
// Tiles of keys and of rows meet where the band lets some row of one see some key of the other, by
// its bounds alone: the rows that meet a tile of keys, and the keys that meet a tile of rows, are
// ranges, and each is computed from the other's (`meet`), so that all blocks agree on who adds to a
// tile of rows, and in which order.
// Who executes: `backward_unit_of` all lanes of a warp; the rest any thread.
// The invariant: `keys` holds keys that some row of the sequence sees and no others, so that
// storage outside is never read.

#pragma once

#include "attn/backward_rows.cuh"
#include "attn/band.cuh"
#include "attn/locate.cuh"
#include "base/backward_params.cuh"

namespace attn {

struct BackwardUnit {
  Sequence sequence;
  Band band;
  i32 kv_head;
  i32 index;    // of the tile of keys
  i32 first;    // first key of the tile
  i32 written;  // end of the keys of the sequence that are written, padding included
  i32 lo;       // keys that are read
  i32 hi;
  i32 row_tile;  // tiles of query rows that meet this one
  i32 row_tiles_end;
  i64 padded;  // padded row of row 0

  // The tile's first and last query row that exist.
  template <int BLOCK_M>
  __device__ i32 bottom(i32 tile) const {
    return min_of(tile * BLOCK_M + BLOCK_M, sequence.q_len) - 1;
  }
};

// Keys of a sequence that are written.
__device__ inline i32 written_keys(const BackwardParams& p, const Sequence& s) {
  return p.written_keys >= 0 ? p.written_keys : s.kv_len;
}

// The unit of a block, in the order in which blocks begin. BLOCK_M, BLOCK_N: rows and keys of a
// tile.
//
// Of one KV head the tiles that meet most rows come first, since what begins last had better be
// short. With DETERMINISTIC under a bound to the right the last tile comes first: it is the first
// to add to its first tile of rows, the tile before it the first one step later, and so none waits.
template <int BLOCK_M, int BLOCK_N>
__device__ BackwardUnit backward_unit_of(const BackwardParams& p, u32 block) {
  BackwardUnit unit;
  const ForwardParams& call = p.call;
  const u32 kv_heads = u32(p.kv_heads);
  u32 index;
  if (call.uniform_units.value != 0) {
    const u32 units = call.uniform_units.value * kv_heads;
    const u32 s = block / units;
    index = block - s * units;
    unit.sequence = equal_sequence(call, s);
  } else {
    const i32 place = find_sequence(call.unit_starts, call.batch, block / kv_heads);
    index = block - u32(call.unit_starts[place]) * kv_heads;
    unit.sequence = sequence_at(call, i32(call.sequences[place]));
  }
  const Sequence& s = unit.sequence;
  unit.band = Band(call, s.q_len, s.kv_len);
  unit.written = written_keys(p, s);
  const i32 tiles = ceil_div(unit.written, BLOCK_N);
  unit.kv_head = i32(index) / tiles;
  const i32 place = i32(index) - unit.kv_head * tiles;
  const bool is_reversed = (p.flags & DETERMINISTIC) && call.right >= 0;
  unit.index = is_reversed ? tiles - 1 - place : place;
  unit.first = unit.index * BLOCK_N;
  unit.padded = first_padded_row(p, s.index);
  unit.lo = max_of(unit.first, unit.band.lo());
  unit.hi = min_of(unit.first + BLOCK_N, unit.band.hi());
  // The first row that sees past the tile's first key, and the end of those that see before its
  // end.
  const Band& band = unit.band;
  const i32 shift = s.q_len - s.kv_len;
  const i32 row = band.right < 0 ? 0 : clamp_of(unit.first - band.right + shift, 0, s.q_len);
  const i32 row_end =
      band.left < 0 ? s.q_len : clamp_of(unit.first + BLOCK_N + band.left + shift, 0, s.q_len);
  unit.row_tile = row / BLOCK_M;
  unit.row_tiles_end = unit.lo < unit.hi ? ceil_div(row_end, BLOCK_M) : 0;
  return unit;
}

// How many tiles of keys add to a tile of query rows before this one does.
template <int BLOCK_M, int BLOCK_N>
__device__ i32 turn_of(const BackwardParams& p, const BackwardUnit& unit, i32 tile) {
  if (p.call.right < 0) return unit.index - unit.band.lo(tile * BLOCK_M) / BLOCK_N;
  const i32 end = unit.band.hi(unit.bottom<BLOCK_M>(tile));
  return (end - 1) / BLOCK_N - unit.index;
}

}  // namespace attn
