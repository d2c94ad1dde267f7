// The one place that reads the macros of a forward instance.
//
// An instance is made by `-D ATTN_*`; a missing or impossible value stops the compiler here, so
// that no kernel body ever tests a macro.

#pragma once

#include "base/types.cuh"

#if !defined(ATTN_DTYPE) || !defined(ATTN_KV_DTYPE)
#error "ATTN_DTYPE and ATTN_KV_DTYPE: expected element types of q and of k, v"
#endif
#if !defined(ATTN_HEAD_DIM) || !defined(ATTN_VALUE_DIM)
#error "ATTN_HEAD_DIM and ATTN_VALUE_DIM: expected padded dimensions"
#endif
#if !defined(ATTN_PAGED) || !defined(ATTN_GENERAL)
#error "ATTN_PAGED and ATTN_GENERAL: expected 0 or 1"
#endif
#if !defined(ATTN_DROPOUT)
#error "ATTN_DROPOUT: expected 0 or 1"
#endif
#if !defined(ATTN_ROW_TILES) || !defined(ATTN_TEAM_WARPS) || !defined(ATTN_TEAMS)
#error "ATTN_ROW_TILES, ATTN_TEAM_WARPS and ATTN_TEAMS: expected the shape of a block"
#endif
#if !defined(ATTN_BLOCK_N) || !defined(ATTN_STAGES) || !defined(ATTN_MIN_BLOCKS)
#error "ATTN_BLOCK_N, ATTN_STAGES and ATTN_MIN_BLOCKS: expected the shape of the pipeline"
#endif

namespace attn::config {

constexpr DType Q_DTYPE = static_cast<DType>(ATTN_DTYPE);
constexpr DType KV_DTYPE = static_cast<DType>(ATTN_KV_DTYPE);
// Dimensions of the tiles; the call's own may be smaller, and what lies between is zero.
constexpr int HEAD_DIM = ATTN_HEAD_DIM;
constexpr int VALUE_DIM = ATTN_VALUE_DIM;
// Keys are found through a block table.
constexpr bool IS_PAGED = ATTN_PAGED;
// Scores take options beyond the band: soft-cap, bias, ALiBi, masks, a scale that is not positive.
constexpr bool IS_GENERAL = ATTN_GENERAL;
// Weights are dropped.
constexpr bool HAS_DROPOUT = ATTN_DROPOUT;

// A team is the warps that share tiles of keys; its warps lie along the query rows. Teams of a
// block hold the same query rows and take turns at the tiles of keys.
constexpr int ROW_TILES = ATTN_ROW_TILES;  // of 16 rows, a warp
constexpr int TEAM_WARPS = ATTN_TEAM_WARPS;
constexpr int TEAMS = ATTN_TEAMS;
constexpr int BLOCK_M = 16 * ROW_TILES * TEAM_WARPS;
constexpr int BLOCK_N = ATTN_BLOCK_N;
constexpr int STAGES = ATTN_STAGES;
constexpr int TEAM_THREADS = WARP * TEAM_WARPS;
constexpr int THREADS = TEAM_THREADS * TEAMS;
constexpr int MIN_BLOCKS = ATTN_MIN_BLOCKS;

constexpr bool IS_FP8 = size_of(KV_DTYPE) == 1;
// Powers of two by which weights are larger than relative to their row's shift: none for 16 bits.
constexpr float WEIGHT_EXPONENT = 0.0f;
constexpr bool HAS_NARROW_WEIGHTS = false;

static_assert(Q_DTYPE == DType::f16 || Q_DTYPE == DType::bf16);
static_assert(KV_DTYPE == Q_DTYPE || IS_FP8);
static_assert(HEAD_DIM % 32 == 0 && VALUE_DIM % 32 == 0);
// An accumulator is a warp's own; of latent rows two warpgroups share it (kernel/latent_sm90a.cu).
static_assert(HEAD_DIM <= 576 && VALUE_DIM <= 512);
static_assert(BLOCK_N % 16 == 0 && STAGES >= 2 && TEAMS >= 1 && ROW_TILES >= 1);

}  // namespace attn::config
