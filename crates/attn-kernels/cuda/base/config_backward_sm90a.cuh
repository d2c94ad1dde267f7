// The one place that reads the macros of a Hopper backward instance.
//
// Names are those of base/config_sm90a.cuh where the meaning is; the two are never included
// together.

#pragma once

#include "base/types.cuh"

#if !defined(ATTN_DTYPE) || !defined(ATTN_HEAD_DIM) || !defined(ATTN_VALUE_DIM)
#error "ATTN_DTYPE, ATTN_HEAD_DIM and ATTN_VALUE_DIM: expected the type and padded dimensions"
#endif
#if !defined(ATTN_CAPPED) || !defined(ATTN_DETERMINISTIC)
#error "ATTN_CAPPED and ATTN_DETERMINISTIC: expected the options"
#endif

namespace attn::config {

constexpr DType DTYPE = static_cast<DType>(ATTN_DTYPE);
constexpr int ELEMENT_BYTES = 2;
// Dimensions of the tiles; the call's own may be smaller, and what lies between is zero.
constexpr int HEAD_DIM = ATTN_HEAD_DIM;
constexpr int VALUE_DIM = ATTN_VALUE_DIM;
constexpr bool IS_CAPPED = ATTN_CAPPED != 0;
constexpr bool IS_DETERMINISTIC = ATTN_DETERMINISTIC != 0;
// Sums over the keys of the gradients of scores (ROW_SUMS).
constexpr bool HAS_ROW_SUMS = !IS_CAPPED;

// Two consumers, warpgroups; one more has tiles copied and sums moved out. Each has 64 keys of its
// own, with all columns. Sums of wide rows do not fit: there they have the same 64 keys, each its
// half of the rows of a score and of the columns of a gradient.
constexpr int WARPGROUP = 128;
constexpr int CONSUMERS = 2;
constexpr bool IS_WIDE = HEAD_DIM > 128;
constexpr int BLOCK_N = IS_WIDE ? 64 : 128;
// Query rows of a tile: what leaves a consumer registers for its sums.
constexpr int BLOCK_M = HEAD_DIM == 64 ? 128 : 64;
// Of which a consumer has the scores.
constexpr int SCORE_ROWS = IS_WIDE ? BLOCK_M / CONSUMERS : BLOCK_M;
// dQ of a tile is so many squares of 64 x 64 sums of each consumer: of rows of its own where tiles
// have rows for both, else of other columns than the other's.
constexpr bool HAS_ROWS = BLOCK_M == 128;
constexpr int SQUARES = IS_WIDE ? 2 : 1;
// Tiles in flight. Queries are read from the first product of a tile to the last one, which runs
// beside the first one of the next tile; there is no room for more wide ones.
constexpr int QUERY_STAGES = IS_WIDE ? 2 : 3;
constexpr int GRADIENT_STAGES = IS_WIDE ? 1 : 2;
constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;

// Registers of a thread: what the producer leaves is for the sums.
constexpr int PRODUCER_REGISTERS = 24;
constexpr int CONSUMER_REGISTERS = 240;

static_assert(DTYPE == DType::f16 || DTYPE == DType::bf16);
static_assert(HEAD_DIM == 64 || HEAD_DIM == 128 || HEAD_DIM == 256);
static_assert(VALUE_DIM <= HEAD_DIM && VALUE_DIM % 64 == 0);
static_assert(!IS_WIDE || VALUE_DIM == HEAD_DIM);

}  // namespace attn::config
