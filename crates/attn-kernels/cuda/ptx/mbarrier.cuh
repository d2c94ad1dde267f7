// Barriers in shared memory that count arrivals and bytes.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-mbarrier
//
// Who executes: any thread. Minimum sm_90 (sm_80 for what does not count bytes). An address is of 8
// bytes, on 8.

#pragma once

#include "base/types.cuh"

namespace attn::ptx {

// mbarrier.init.shared::cta.b64 [barrier], arrivals.
__device__ inline void mbarrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// fence.mbarrier_init.release.cluster: initialised barriers are seen by the copy engine.
__device__ inline void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// mbarrier.arrive.shared::cta.b64 _, [barrier].
__device__ inline void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// mbarrier.arrive.expect_tx.shared::cta.b64 _, [barrier], bytes: arrives, and the phase also waits
// for so many bytes.
__device__ inline void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// mbarrier.try_wait.parity.shared::cta.b64: whether the phase of this parity has ended; waits up to
// 10 ms for it, for a warp that asks again and again takes issue slots from the others.
__device__ inline bool mbarrier_try_wait_parity(u32 barrier, u32 parity) {
  u32 has_ended;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3; selp.u32 %0, 1, "
      "0, p; "
      "}"
      : "=r"(has_ended)
      : "r"(barrier), "r"(parity), "r"(10'000'000)
      : "memory");
  return has_ended != 0;
}

// The same with .acquire.cluster: what other blocks of the cluster have sent is there.
__device__ inline bool mbarrier_try_wait_parity_cluster(u32 barrier, u32 parity) {
  u32 has_ended;
  asm volatile(
      "{ .reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; "
      "selp.u32 %0, 1, 0, p; }"
      : "=r"(has_ended)
      : "r"(barrier), "r"(parity)
      : "memory");
  return has_ended != 0;
}

}  // namespace attn::ptx
