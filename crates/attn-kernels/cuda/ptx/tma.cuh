// The tensor memory accelerator: boxes of a tensor map to shared memory.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-cp-async-bulk-tensor

#pragma once

#include "base/types.cuh"

namespace attn::ptx {

// What the host encoded (cuTensorMapEncodeTiled); a kernel takes it by value as __grid_constant__.
struct alignas(128) TensorMap {
  u64 opaque[16];
};

// cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes: the box at (x, y, z,
// w), x the innermost axis; elements outside the tensor are 0. `barrier` counts the bytes of the
// whole box. Minimum sm_90; one thread.
__device__ inline void cp_async_bulk_tensor_4d(u32 to, const TensorMap* map, i32 x, i32 y, i32 z,
                                               i32 w, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
      : "memory");
}

// prefetch.tensormap: the map into the cache of descriptors. Minimum sm_90; one thread.
__device__ inline void prefetch_tensormap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// fence.proxy.async.shared::cta: the thread's earlier accesses to shared memory are seen by the
// copy engine and by warpgroup products that follow a barrier. Minimum sm_90.
__device__ inline void fence_proxy_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace attn::ptx
