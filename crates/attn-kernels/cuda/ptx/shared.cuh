// Loads and stores of shared memory by its 32-bit address.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#data-movement-and-conversion-instructions-ld
//
// Who executes: any thread, alone; order between threads is the caller's, by barriers. Minimum
// sm_70. Addresses on the width of the access.

#pragma once

#include "base/types.cuh"

namespace attn::ptx {

// ld.shared.v4.b32
__device__ inline Vec16 ld_shared_v4_b32(u32 address) {
  Vec16 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "r"(address)
               : "memory");
  return v;
}

// ld.shared.v2.f32
__device__ inline void ld_shared_v2_f32(float (&x)[2], u32 address) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
               : "=f"(x[0]), "=f"(x[1])
               : "r"(address)
               : "memory");
}

// st.shared.f32
__device__ inline void st_shared_f32(u32 address, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(x) : "memory");
}

// st.shared.v4.f32
__device__ inline void st_shared_v4_f32(u32 address, float x, float y, float z, float w) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x), "f"(y), "f"(z),
               "f"(w)
               : "memory");
}

// st.shared.v4.b32
__device__ inline void st_shared_v4_b32(u32 address, const Vec16& v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.word[0]),
               "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}

// st.shared.b32
__device__ inline void st_shared_b32(u32 address, u32 word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

// ld.shared.f32
__device__ inline float ld_shared_f32(u32 address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}

}  // namespace attn::ptx
