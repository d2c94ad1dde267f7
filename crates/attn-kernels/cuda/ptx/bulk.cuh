// Bulk copies and sums of contiguous bytes.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-non-tensor-copy
//
// Who executes: one thread, for all of the bytes; addresses and sizes on 16 bytes. Minimum sm_90.

#pragma once

#include "base/types.cuh"

namespace attn::ptx {

// cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes: `barrier` counts the bytes.
__device__ inline void cp_async_bulk(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32: each f32 is added to the one in
// global memory, atomically and in no order.
__device__ inline void cp_reduce_async_bulk_add_f32(float* to, u32 from, u32 bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
      "r"(from), "r"(bytes)
      : "memory");
}

// cp.async.bulk.commit_group: the thread's bulk operations since the last one form a group.
__device__ inline void cp_async_bulk_commit_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// cp.async.bulk.wait_group N: all but the N latest groups have ended, and what they wrote is there.
template <int N>
__device__ inline void cp_async_bulk_wait_group() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// cp.async.bulk.wait_group.read N: all but the N latest groups have read what they copy.
template <int N>
__device__ inline void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// fence.proxy.async.global: the thread's bulk operations on global memory and its plain accesses
// are in order.
__device__ inline void fence_proxy_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace attn::ptx
