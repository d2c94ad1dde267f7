// Asynchronous copies from global to shared memory.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async

#pragma once

#include "base/types.cuh"

namespace attn::ptx {

// cp.async.cg.shared.global [to], [from], 16, bytes: the first `bytes` (0 to 16) are copied, the
// rest is zero. Both addresses on 16 bytes. Minimum sm_80; any thread.
__device__ inline void cp_async_cg_16(u32 to, const void* from, u32 bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(bytes)
               : "memory");
}

// cp.async.ca.shared.global: 8 bytes; both addresses on 8.
__device__ inline void cp_async_ca_8(u32 shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared), "l"(global) : "memory");
}

// cp.async.commit_group: the thread's copies since the last one form a group.
__device__ inline void cp_async_commit_group() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// cp.async.wait_group N: all but the thread's N latest groups have landed.
template <int N>
__device__ inline void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

}  // namespace attn::ptx
