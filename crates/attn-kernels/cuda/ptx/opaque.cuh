// What no instruction does, but the compiler cannot know.
//
// Who executes: any thread, alone.

#pragma once

#include "base/types.cuh"

namespace attn::ptx {

// The same value, of unknown origin: what follows from it is computed where it is wanted, and not
// once for all, in registers that are needed for something else.
__device__ inline u32 opaque(u32 x) {
  asm volatile("" : "+r"(x));
  return x;
}

template <typename T>
__device__ T* opaque(T* x) {
  asm volatile("" : "+l"(x));
  return x;
}

// The same for registers that a product has written: what follows is computed after the wait for
// the product, for volatile statements keep their order.
template <int COUNT>
__device__ void opaque_all(float (&x)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// Forgets values: a product that writes them, and is told so at run time, else keeps them alive.
template <int COUNT>
__device__ void forget_all(float (&x)[COUNT]) {
#pragma unroll
  for (int i = 0; i < COUNT; ++i) asm volatile("" : "=f"(x[i]));
}

}  // namespace attn::ptx
