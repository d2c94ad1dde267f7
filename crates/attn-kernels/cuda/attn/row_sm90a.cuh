// A row of a Hopper unit: where it is, and of which head.
//
// Who executes: any thread, alone.

#pragma once

#include "attn/unit.cuh"
#include "base/config_sm90a.cuh"

namespace attn {

struct Row {
  i32 position;
  i32 head;
};

// The flat row `flat` of a unit's sequence and block of heads.
__device__ inline Row row_of(const ForwardParams& p, const Unit& unit, i32 flat) {
  if constexpr (!config::IS_PACKED) return {flat, unit.head};
  const i32 position = i32(p.pack.divide(u32(flat)));
  return {position, unit.head + flat - position * i32(p.pack.value)};
}

// Flat rows of so many positions.
__device__ inline i32 flat_rows(const ForwardParams& p, i32 positions) {
  return config::IS_PACKED ? positions * i32(p.pack.value) : positions;
}

}  // namespace attn
