// The element type of k, v and their caches, for the kernels that need no more of an instance than
// its types.
//
// The forward kernels read theirs, with the rest of an instance, in base/config.cuh.

#pragma once

#include "base/types.cuh"

#ifndef ATTN_KV_DTYPE
#error "ATTN_KV_DTYPE: expected 0 (f32), 1 (f16), 2 (bf16), 3 (e4m3) or 4 (e5m2), the type of k, v"
#endif

namespace attn::config {

constexpr DType KV_DTYPE = static_cast<DType>(ATTN_KV_DTYPE);
static_assert(ATTN_KV_DTYPE >= 0 && ATTN_KV_DTYPE <= 4);

}  // namespace attn::config
