// Query rows of a backward between its launches: which sequence a tile of padded rows is of, and
// where its rows are.
//
// Tensors: the workspace of BackwardParams. Who executes: `row_tile_of` all lanes of a warp, the
// rest any thread. No shared memory.

#pragma once

#include "attn/locate.cuh"
#include "base/backward_params.cuh"

namespace attn {

// The padded row of row 0 of a sequence.
__device__ inline i64 first_padded_row(const BackwardParams& p, i32 sequence) {
  const i64 tile = p.uniform_tiles.value != 0 ? i64(sequence) * p.uniform_tiles.value
                                              : p.tile_starts[sequence];
  return tile * ROW_TILE;
}

// ROW_TILE padded rows.
struct RowTile {
  Sequence sequence;
  i32 first;   // row of the sequence
  i64 padded;  // padded row
};

// Tile `tile` of all.
__device__ inline RowTile row_tile_of(const BackwardParams& p, u32 tile) {
  RowTile t;
  i64 before;
  if (p.uniform_tiles.value != 0) {
    const u32 s = p.uniform_tiles.divide(tile);
    t.sequence = equal_sequence(p.call, s);
    before = i64(s) * p.uniform_tiles.value;
  } else {
    const i32 s = find_sequence(p.tile_starts, p.call.batch, tile);
    t.sequence = sequence_at(p.call, s);
    before = p.tile_starts[s];
  }
  t.first = i32(tile - before) * ROW_TILE;
  t.padded = i64(tile) * ROW_TILE;
  return t;
}

}  // namespace attn
