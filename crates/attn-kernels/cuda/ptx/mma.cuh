// Warp matrix instructions.
// https://docs.nvidia.com/cuda/parallel-thread-execution/#warp-level-matrix-instructions
//
// Every lane of a converged warp executes these. Minimum sm_80. Fragments of m16n8k16, with g =
// lane / 4 and t = lane % 4: A rows g and g + 8, columns 2t, 2t + 1 and the same plus 8; B columns
// (n) g, rows (k) 2t, 2t + 1 and the same plus 8; D rows g (d[0], d[1]) and g + 8 (d[2], d[3]),
// columns 2t, 2t + 1.

#pragma once

#include "base/types.cuh"

namespace attn::ptx {

// mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32: d += a b
__device__ inline void mma_m16n8k16_f32_bf16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32: d += a b
__device__ inline void mma_m16n8k16_f32_f16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace attn::ptx
