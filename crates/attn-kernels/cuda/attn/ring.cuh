// Tiles that pass through a few stages of shared memory, from a producer to those who read them.
//
// Who executes: any thread. Barriers of 8 bytes, one pair a stage; both sides walk the ring with a
// count of tiles, from which stage and parity follow.

#pragma once

#include "base/types.cuh"
#include "ptx/mbarrier.cuh"

namespace attn {

// Waits for the phase of a barrier.
__device__ inline void wait(u32 barrier, u32 parity) {
  while (!ptx::mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// Tiles of one operand that pass through STAGES stages.
template <u32 STAGES>
struct Ring {
  u32 tiles;
  u32 full;
  u32 empty;

  template <u32 BYTES>
  __device__ u32 tile(u32 count) const {
    return tiles + count % STAGES * BYTES;
  }
  __device__ u32 full_of(u32 count) const { return full + count % STAGES * 8; }
  __device__ u32 empty_of(u32 count) const { return empty + count % STAGES * 8; }

  // The producer: until the stage of tile `count` has been given back, which the first ones need
  // not be.
  __device__ void wait_empty(u32 count) const {
    const u32 round = count / STAGES;
    if (round > 0) wait(empty_of(count), (round - 1) & 1);
  }
  __device__ void wait_full(u32 count) const { wait(full_of(count), count / STAGES & 1); }

  __device__ void place_barriers(u32 at) {
    full = at;
    empty = full + STAGES * 8;
  }
  __device__ u32 end() const { return empty + STAGES * 8; }

  __device__ void init(u32 writers, u32 readers) const {
    for (u32 stage = 0; stage < STAGES; ++stage) {
      ptx::mbarrier_init(full_of(stage), writers);
      ptx::mbarrier_init(empty_of(stage), readers);
    }
  }
};

}  // namespace attn
