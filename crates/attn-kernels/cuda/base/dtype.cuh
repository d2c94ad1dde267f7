// The element type of q and o, for the kernels that need no more of an instance than its types.
//
// The forward kernels read theirs, with the rest of an instance, in base/config.cuh.

#pragma once

#include "base/types.cuh"

#ifndef ATTN_DTYPE
#error "ATTN_DTYPE: expected 0 (f32), 1 (f16) or 2 (bf16), the element type of q and o"
#endif

namespace attn::config {

constexpr DType DTYPE = static_cast<DType>(ATTN_DTYPE);
static_assert(DTYPE == DType::f32 || DTYPE == DType::f16 || DTYPE == DType::bf16);

}  // namespace attn::config
