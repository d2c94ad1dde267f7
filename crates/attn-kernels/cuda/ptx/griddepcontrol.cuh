// Launches that overlap: a kernel that was asked to may begin before the one before it in the
// stream has ended. Minimum sm_90; on processors before it no launch overlaps, and these do
// nothing, for the portable kernels are for both.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-griddepcontrol

#pragma once

#include "base/types.cuh"

namespace attn::ptx {

// griddepcontrol.launch_dependents: the next kernel may begin as soon as every block has said so or
// has ended. Any thread, after the wait: else it could overlap with what this kernel waits for.
template <int ARCH>
__device__ inline void griddepcontrol_launch_dependents() {
  if constexpr (ARCH >= 900) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// griddepcontrol.wait: until the kernels before have ended and what they wrote is there. Every
// thread that reads what those kernels write, or writes global memory; what only a copy wrote may
// be read before.
template <int ARCH>
__device__ inline void griddepcontrol_wait() {
  if constexpr (ARCH >= 900) asm volatile("griddepcontrol.wait;" ::: "memory");
}

}  // namespace attn::ptx
