// Whose turn it is to add to a tile of query rows.
//
// Blocks that add floats to the same place in whatever order they come give other bits each time.
// Under DETERMINISTIC a block waits until as many blocks have added to a tile as its place says.
// Blocks take their units by a ticket, so that those before it have begun: the first of all that
// are under way waits for nobody, and so they all end.
// Tensors: turns and counter of BackwardParams. Who executes: as each function says.

#pragma once

#include "base/backward_params.cuh"
#include "ptx/global.cuh"

namespace attn {

// The number of this block in the order in which blocks begin; one thread of the block.
__device__ inline u32 take_ticket(const BackwardParams& p) {
  if (!(p.flags & DETERMINISTIC)) return blockIdx.x;
  return ptx::atom_acq_rel_gpu_add_u32(p.call.counter, 1);
}

// The turn of the tile of rows that starts at a padded row of a head.
__device__ inline u32* turn_at(const BackwardParams& p, i32 head, i64 padded) {
  return p.turns + head * p.turn_stride + padded / TURN_ROWS;
}

// Waits until `before` blocks have added; one thread of the block, which meets the others after.
__device__ inline void wait_turn(const u32* turn, u32 before) {
  while (ptx::ld_acquire_gpu_b32(turn) != before) {
  }
}

// The next block may add; one thread of the block, after all have added and met.
__device__ inline void end_turn(u32* turn) { ptx::atom_acq_rel_gpu_add_u32(turn, 1); }

}  // namespace attn
