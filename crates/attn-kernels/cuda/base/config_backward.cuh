// The one place that reads the macros of a backward instance of the portable kernel.

#pragma once

#include "base/types.cuh"

#if !defined(ATTN_DTYPE) || !defined(ATTN_HEAD_DIM) || !defined(ATTN_VALUE_DIM)
#error "ATTN_DTYPE, ATTN_HEAD_DIM and ATTN_VALUE_DIM: expected the type and padded dimensions"
#endif
#if !defined(ATTN_GENERAL)
#error "ATTN_GENERAL: expected 0 or 1"
#endif
#if !defined(ATTN_BLOCK_M) || !defined(ATTN_KEY_WARPS) || !defined(ATTN_SHARERS) || \
    !defined(ATTN_STAGES)
#error "ATTN_BLOCK_M, ATTN_KEY_WARPS, ATTN_SHARERS and ATTN_STAGES: expected the shape of a block"
#endif

namespace attn::config {

constexpr DType DTYPE = static_cast<DType>(ATTN_DTYPE);
// Dimensions of the tiles; the call's own may be smaller, and what lies between is zero.
constexpr int HEAD_DIM = ATTN_HEAD_DIM;
constexpr int VALUE_DIM = ATTN_VALUE_DIM;
// Scores take options beyond the band: soft-cap, bias, ALiBi, masks.
constexpr bool IS_GENERAL = ATTN_GENERAL;

// Query rows and keys of a tile. Warps lie along the keys, 16 each; SHARERS of them have the same
// keys, each its part of the query rows of a score and of the columns of a gradient.
constexpr int BLOCK_M = ATTN_BLOCK_M;
constexpr int KEY_WARPS = ATTN_KEY_WARPS;
constexpr int SHARERS = ATTN_SHARERS;
constexpr int BLOCK_N = 16 * KEY_WARPS;
constexpr int WARPS = KEY_WARPS * SHARERS;
constexpr int THREADS = WARP * WARPS;
// Tiles of query rows that are in shared memory at once: 1, or the next while one is in use.
constexpr int STAGES = ATTN_STAGES;

static_assert(DTYPE == DType::f16 || DTYPE == DType::bf16);
static_assert(HEAD_DIM % 32 == 0 && HEAD_DIM <= 256 && VALUE_DIM % 32 == 0 && VALUE_DIM <= 256);
static_assert(STAGES == 1 || STAGES == 2);
// A tile of query rows lies in a tile of padded rows.
static_assert(128 % BLOCK_M == 0 && BLOCK_M % (16 * SHARERS) == 0 && WARPS % (BLOCK_M / 16) == 0);
// Sharers take pairs of eight columns in turn.
static_assert(HEAD_DIM % (16 * SHARERS) == 0 && VALUE_DIM % (16 * SHARERS) == 0);

}  // namespace attn::config
