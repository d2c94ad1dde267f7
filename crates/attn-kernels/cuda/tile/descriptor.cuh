// How a warpgroup product finds a tile in shared memory.
//
// Source: PTX ISA, "Matrix descriptor": bits 0-13 the address, 16-29 the leading and 32-45 the
// stride byte offset, all over 16; bits 62-63 the swizzle, 1 being 128 bytes. A tile is cut into
// panels of 128 bytes of columns of all its rows, each row's 16-byte pieces exchanged by the row's
// index modulo 8, which is what the copy engine writes under a swizzle of 128 bytes (tile/panel.cuh
// has the same map). Panels start on 1024 bytes.

#pragma once

#include "base/types.cuh"

namespace attn::tile {

constexpr u32 PANEL_ROW_BYTES = 128;
// What a product takes of a row: 16 elements of 16 bits, 32 of 8.
constexpr u32 STEP_BYTES = 32;
// Eight rows, one period of the swizzle.
constexpr u32 SWIZZLE_BYTES = 1024;

// A tile as a product takes it: the low word of its descriptor, which moves by bytes / 16; the high
// word is one for all.
struct Operand {
  static constexpr u64 HIGH = u64(SWIZZLE_BYTES >> 4 | 1u << 30) << 32;

  u32 low;

  __device__ u64 at(u32 bytes) const { return HIGH | (low + (bytes >> 4)); }

  // 32 bytes of columns of a tile of ROWS rows whose product sums over columns: k contiguous.
  template <int ROWS>
  __device__ u64 columns(u32 step) const {
    const u32 bytes = step * STEP_BYTES;
    return at(bytes / PANEL_ROW_BYTES * ROWS * PANEL_ROW_BYTES + bytes % PANEL_ROW_BYTES);
  }

  // Sixteen rows of a tile of 16-bit elements whose product sums over rows: n contiguous.
  __device__ u64 rows(u32 step) const { return at(step * 16 * PANEL_ROW_BYTES); }

  // The same of one panel, next to whose columns more come from one place, whatever the step
  // (rows_operand_beside).
  __device__ u64 rows_beside(u32 step) const {
    const u32 bytes = step * 16 * PANEL_ROW_BYTES;
    return HIGH | (low + (bytes >> 4) - (bytes >> 4 << 16));
  }
};

// Panels of rows of so many elements.
__host__ __device__ constexpr i32 panels_of(i32 elements, i32 element_bytes) {
  return ceil_div(elements * element_bytes, i32(PANEL_ROW_BYTES));
}

// A tile whose product sums over columns.
__device__ inline Operand columns_operand(u32 tile) { return {tile >> 4}; }

// A tile of ROWS rows whose product sums over rows: its panels are ROWS rows apart.
template <int ROWS>
__device__ Operand rows_operand(u32 tile) {
  return {tile >> 4 | ROWS * PANEL_ROW_BYTES >> 4 << 16};
}

// A panel whose product sums over rows, and sixteen rows of a panel somewhere after it that have
// the columns past its own.
__device__ inline Operand rows_operand_beside(u32 panel, u32 beside) {
  return {panel >> 4 | (beside - panel) >> 4 << 16};
}

// Eight columns of elements that are all alike: 128 bytes serve for every row, without a swizzle.
__device__ inline u64 alike_operand(u32 bytes) { return bytes >> 4; }

}  // namespace attn::tile
