// Special registers.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#special-registers-nsmid

#pragma once

#include "base/types.cuh"

namespace attn::ptx {

// %nsmid: multiprocessors, or a few more. Minimum sm_20; any thread.
__device__ inline u32 nsmid() {
  u32 n;
  asm("mov.u32 %0, %%nsmid;" : "=r"(n));
  return n;
}

}  // namespace attn::ptx
