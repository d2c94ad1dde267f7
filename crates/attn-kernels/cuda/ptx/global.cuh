// Loads, stores and prefetches of global memory; any thread, alone. Minimum sm_80.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-st
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-prefetch-prefetchu

#pragma once

#include "base/types.cuh"

namespace attn::ptx {

// st.global.v4.b32, on 16 bytes: one store, where the compiler at times makes four of an
// assignment.
__device__ inline void st_global_v4_b32(void* to, const Vec16& v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.word[0]), "r"(v.word[1]),
               "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}

// st.global.v2.b32, on 8 bytes.
__device__ inline void st_global_v2_b32(void* to, u32 x, u32 y) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(x), "r"(y) : "memory");
}

// ld.global.cg.v4.b32, on 16 bytes: past the first-level cache, which does not see what other
// multiprocessors write.
__device__ inline Vec16 ld_global_cg_v4_b32(const void* from) {
  Vec16 v;
  asm volatile("ld.global.cg.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(from)
               : "memory");
  return v;
}

// ld.global.cg.b32: the same.
__device__ inline u32 ld_global_cg_b32(const void* from) {
  u32 x;
  asm volatile("ld.global.cg.b32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}

// ld.global.cg.f32: the same.
__device__ inline float ld_global_cg_f32(const float* from) {
  float x;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(from) : "memory");
  return x;
}

// prefetch.global.L2: the line of 128 bytes that an address is in.
__device__ inline void prefetch_global_l2(const void* at) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(at));
}

// atom.acq_rel.gpu.global.add.u32: the sum so far; orders what the block wrote before, and what it
// reads after, with other blocks that add.
__device__ inline u32 atom_acq_rel_gpu_add_u32(u32* to, u32 x) {
  u32 before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(to), "r"(x)
               : "memory");
  return before;
}

// ld.acquire.gpu.global.b32: what other blocks wrote before they released this word is seen after.
// Minimum sm_70.
__device__ inline u32 ld_acquire_gpu_b32(const u32* from) {
  u32 x;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}

// fence.acq_rel.gpu: orders this thread's accesses before and after it for the whole device.
// Minimum sm_70.
__device__ inline void fence_acq_rel_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// red.relaxed.gpu.global.add.f32
__device__ inline void red_global_add_f32(float* to, float x) {
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(x) : "memory");
}

// red.relaxed.gpu.global.add.v2.f32, on 8 bytes. SM 90: on an older one the call does not compile.
template <int ARCH>
__device__ inline void red_global_add_v2_f32(float* to, float x, float y) {
  static_assert(ARCH >= 900, "red.global.add.v2.f32 needs sm_90");
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(x), "f"(y)
               : "memory");
}

}  // namespace attn::ptx
