// Clusters: blocks that run at one time, near each other, and write to each other's shared memory.
// Minimum sm_90; on processors before it a block is a cluster of its own and nothing here is ever
// called but the first two, for the portable kernels are for both.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#special-registers-cluster-nctaid
// https://docs.nvidia.com/cuda/parallel-thread-execution/#parallel-synchronization-and-communication-instructions-barrier-cluster
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st-async

#pragma once

#include "base/types.cuh"

namespace attn::ptx {

// %cluster_nctaid.x: blocks of the cluster.
template <int ARCH>
__device__ inline u32 cluster_nctaid_x() {
  u32 x = 1;
  if constexpr (ARCH >= 900) asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(x));
  return x;
}

// %cluster_ctaid.x: which of them this block is.
template <int ARCH>
__device__ inline u32 cluster_ctaid_x() {
  u32 x = 0;
  if constexpr (ARCH >= 900) asm("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(x));
  return x;
}

// barrier.cluster.arrive.relaxed.aligned: all threads of the block, once. Orders no memory.
template <int ARCH>
__device__ inline void barrier_cluster_arrive() {
  if constexpr (ARCH >= 900) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

// barrier.cluster.wait.aligned: until all threads of all blocks have arrived.
template <int ARCH>
__device__ inline void barrier_cluster_wait() {
  if constexpr (ARCH >= 900) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
}

// mapa.shared::cluster.u32: where block `rank` of the cluster has what is at `address` here.
template <int ARCH>
__device__ inline u32 mapa_shared_cluster(u32 address, u32 rank) {
  u32 there = address;
  if constexpr (ARCH >= 900) {
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  }
  return there;
}

// st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32: 16 bytes on 16, which `barrier`, in
// the same block, counts when they are there.
template <int ARCH>
__device__ inline void st_async_v4_f32(u32 to, const float4& x, u32 barrier) {
  if constexpr (ARCH >= 900) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(to),
        "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(barrier)
        : "memory");
  }
}

// The same of one f32.
template <int ARCH>
__device__ inline void st_async_f32(u32 to, float x, u32 barrier) {
  if constexpr (ARCH >= 900) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(to),
        "f"(x), "r"(barrier)
        : "memory");
  }
}

}  // namespace attn::ptx
