// A tile of 16-bit rows in shared memory, cut into swizzled panels.
//
// A panel holds 64 columns (128 bytes) of every row, or 32 (64 bytes) where the dimension is no
// multiple of 64. Inside a panel the 16-byte chunk c of row r lies at chunk c ^ f(r), f(r) = r % 8
// for wide panels and (r / 2) % 4 for narrow ones, so that eight rows at one chunk, which is what a
// phase of ldmatrix and of a store touches, lie in eight different groups of banks.

#pragma once

#include "base/types.cuh"

namespace attn::tile {

// Geometry of a tile of ROWS rows of DIM 16-bit elements.
template <int ROWS, int DIM>
struct Panels {
  static constexpr int WIDTH = DIM % 64 == 0 ? 64 : 32;  // columns of a panel
  static constexpr int COUNT = DIM / WIDTH;
  static constexpr int CHUNKS = WIDTH / 8;  // 16-byte chunks of a row of a panel
  static constexpr u32 ROW_BYTES = WIDTH * 2;
  static constexpr u32 PANEL_BYTES = ROWS * ROW_BYTES;
  static constexpr u32 BYTES = COUNT * PANEL_BYTES;

  // Where the swizzle moves chunk 0 of a row.
  __device__ static constexpr u32 swizzle(u32 row) { return WIDTH == 64 ? row % 8 : row / 2 % 4; }

  // The byte offset of chunk `chunk` (of all DIM / 8) of `row`.
  __device__ static constexpr u32 offset(u32 row, u32 chunk) {
    const u32 column = (chunk % CHUNKS) ^ swizzle(row);
    return chunk / CHUNKS * PANEL_BYTES + row * ROW_BYTES + column * 16;
  }

  // The address of the chunk `chunks` on from that at `address`, `rows` rows below. `chunks` is
  // even and counts from an address in the first pair of chunks, `rows` a multiple of 8: both known
  // to the compiler, so that an unrolled loop over a tile costs one exclusive or for each pair of
  // chunks of a panel. Tiles start on 128 bytes.
  __device__ static constexpr u32 step(u32 address, u32 rows, u32 chunks) {
    return (address ^ (chunks % CHUNKS * 16)) + chunks / CHUNKS * PANEL_BYTES + rows * ROW_BYTES;
  }
};

// The 32-bit address of generic shared memory.
__device__ inline u32 shared_address(const void* pointer) {
  return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

}  // namespace attn::tile
