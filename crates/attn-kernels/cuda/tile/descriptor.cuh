// How a warpgroup product finds a tile of 16-bit elements in shared memory.
//
// Source: PTX ISA, "Matrix descriptor": bits 0-13 the address, 16-29 the leading and 32-45 the stride byte offset, all
// over 16; bits 62-63 the swizzle, 1 being 128 bytes.
// A tile is cut into panels of 64 columns (128 bytes) of all its rows, each row's 16-byte pieces exchanged by the row's
// index modulo 8, which is what the copy engine writes under a swizzle of 128 bytes (tile/panel.cuh has the same map).
// Panels start on 1024 bytes.

#pragma once

#include "base/types.cuh"

namespace attn::tile {

constexpr u32 PANEL_COLUMNS = 64;
constexpr u32 PANEL_ROW_BYTES = 128;
// Eight rows, one period of the swizzle.
constexpr u32 SWIZZLE_BYTES = 1024;

// A tile as a product takes it: the low word of its descriptor, which moves by bytes / 16; the high word is one for all.
struct Operand {
  static constexpr u64 HIGH = u64(SWIZZLE_BYTES >> 4 | 1u << 30) << 32;

  u32 low;

  __device__ u64 at(u32 bytes) const { return HIGH | (low + (bytes >> 4)); }

  // Sixteen columns of a tile of ROWS rows whose product sums over columns: k contiguous.
  template <int ROWS>
  __device__ u64 columns(u32 step) const {
    return at(step * 16 / PANEL_COLUMNS * ROWS * PANEL_ROW_BYTES + step * 16 % PANEL_COLUMNS * 2);
  }

  // Sixteen rows of a tile whose product sums over rows: n contiguous.
  __device__ u64 rows(u32 step) const { return at(step * 16 * PANEL_ROW_BYTES); }
};

// A tile whose product sums over columns.
__device__ inline Operand columns_operand(u32 tile) { return {tile >> 4}; }

// A tile of ROWS rows whose product sums over rows: its panels are ROWS rows apart.
template <int ROWS>
__device__ Operand rows_operand(u32 tile) {
  return {tile >> 4 | ROWS * PANEL_ROW_BYTES >> 4 << 16};
}

}  // namespace attn::tile
