// Barriers of part of a block.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-bar
//
// Barrier 0 is __syncthreads'.

#pragma once

#include "base/types.cuh"

namespace attn::ptx {

// bar.sync id, threads: `threads` threads of the block, a multiple of 32, meet at barrier `id`, 0
// to 15, and see what each wrote before. Minimum sm_70; converged warps.
__device__ inline void bar_sync(u32 id, u32 threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// bar.arrive id, threads: as bar.sync, without waiting. Minimum sm_70; converged warps.
__device__ inline void bar_arrive(u32 id, u32 threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// pmevent 0: an event for a performance monitor, and nothing else.
__device__ inline void pmevent() { asm volatile("pmevent 0;"); }

}  // namespace attn::ptx
