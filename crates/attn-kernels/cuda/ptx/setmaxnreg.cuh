// Registers moved between warpgroups of a block.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#miscellaneous-instructions-setmaxnreg

#pragma once

#include "base/types.cuh"

namespace attn::ptx {

// setmaxnreg.inc.sync.aligned.u32 N: waits for and takes registers, up to N a thread, a multiple of
// 8. Minimum sm_90a; all warps of a warpgroup.
template <int N>
__device__ inline void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

// setmaxnreg.dec.sync.aligned.u32 N: gives registers back, down to N a thread.
template <int N>
__device__ inline void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

}  // namespace attn::ptx
