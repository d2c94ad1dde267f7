// The element types of q and o of a forward, for the kernels that need no more of an instance than
// its types.
//
// The tiled kernels read theirs, with the rest of an instance, in base/config.cuh.

#pragma once

#include "base/types.cuh"

#ifndef ATTN_DTYPE
#error "ATTN_DTYPE: expected 0 (f32), 1 (f16), 2 (bf16) or 3 (e4m3), the element type of q"
#endif

namespace attn::config {

constexpr DType Q_DTYPE = static_cast<DType>(ATTN_DTYPE);
static_assert(ATTN_DTYPE >= 0 && ATTN_DTYPE <= 3);
// Outputs have the type of the queries, bf16 where these are fp8.
constexpr DType OUT_DTYPE = size_of(Q_DTYPE) == 1 ? DType::bf16 : Q_DTYPE;

}  // namespace attn::config
