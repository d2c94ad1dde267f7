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

// A consumer is a warpgroup of 64 keys; one more warpgroup has tiles copied and sums moved out.
constexpr int WARPGROUP = 128;
constexpr int CONSUMERS = 2;
constexpr int CONSUMER_KEYS = 64;
constexpr int BLOCK_N = CONSUMERS * CONSUMER_KEYS;
// Query rows of a tile: what leaves a consumer registers for a row of sums of keys and of values.
constexpr int BLOCK_M = HEAD_DIM == 64 ? 128 : 64;
// Tiles in flight. Queries are read from the first product of a tile to the last one, which runs
// beside the first one of the next tile.
constexpr int QUERY_STAGES = 3;
constexpr int GRADIENT_STAGES = 2;
constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;

// Registers of a thread: what the producer leaves is for the sums.
constexpr int PRODUCER_REGISTERS = 24;
constexpr int CONSUMER_REGISTERS = 240;

static_assert(DTYPE == DType::f16 || DTYPE == DType::bf16);
static_assert((HEAD_DIM == 64 || HEAD_DIM == 128) && (VALUE_DIM == 64 || VALUE_DIM == 128));
static_assert(VALUE_DIM <= HEAD_DIM);

}  // namespace attn::config
