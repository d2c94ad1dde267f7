// The one place that reads the macros of a Hopper forward instance.
//
// The names are those of base/config.cuh where the meaning is; the two are never included together.

#pragma once

#include "base/types.cuh"

#if !defined(ATTN_DTYPE) || !defined(ATTN_HEAD_DIM) || !defined(ATTN_VALUE_DIM)
#error "ATTN_DTYPE, ATTN_HEAD_DIM and ATTN_VALUE_DIM: expected the type and padded dimensions"
#endif
#if !defined(ATTN_GENERAL) || !defined(ATTN_BLOCKED) || !defined(ATTN_PAGED) || \
    !defined(ATTN_BOX_ROWS)
#error \
    "ATTN_GENERAL, ATTN_BLOCKED, ATTN_PAGED and ATTN_BOX_ROWS: expected the options and where keys are"
#endif
#if !defined(ATTN_CONSUMERS) || !defined(ATTN_BLOCK_N) || !defined(ATTN_STAGES) || \
    !defined(ATTN_QUERY_STAGES) || !defined(ATTN_PACKED) || !defined(ATTN_PARTS)
#error \
    "ATTN_CONSUMERS, ATTN_BLOCK_N, ATTN_STAGES, ATTN_QUERY_STAGES, ATTN_PACKED, ATTN_PARTS: expected the block"
#endif

namespace attn::config {

constexpr DType DTYPE = static_cast<DType>(ATTN_DTYPE);
// Queries, keys and values of fp8 have a scale for each sequence and KV head, and a wider output.
constexpr bool IS_FP8 = DTYPE == DType::e4m3;
constexpr DType OUT_DTYPE = IS_FP8 ? DType::bf16 : DTYPE;
constexpr int ELEMENT_BYTES = size_of(DTYPE);
// Elements that one product sums: 32 bytes.
constexpr int PRODUCT_STEP = 32 / ELEMENT_BYTES;
// Dimensions of the tiles; the call's own may be smaller, and what lies between is zero.
constexpr int HEAD_DIM = ATTN_HEAD_DIM;
constexpr int VALUE_DIM = ATTN_VALUE_DIM;
// Options of the scores but the band: none, any of them, or a soft-cap alone, which leaves scores
// small enough for the plain instance's exponents.
constexpr bool IS_GENERAL = ATTN_GENERAL == 1;
constexpr bool IS_CAPPED = ATTN_GENERAL == 2;
constexpr bool IS_PAGED = ATTN_PAGED != 0;
// Rows of several heads share a tile.
constexpr bool IS_PACKED = ATTN_PACKED != 0;
// Keys of a sequence may be split, each part a unit of its own (kernel/merge_parts.cu).
constexpr bool HAS_PARTS = ATTN_PARTS != 0;
// Under a block mask only the tiles that some row of a unit sees are met.
constexpr bool IS_BLOCKED = ATTN_BLOCKED != 0;

// How many powers of two a row's maximum may stay behind, so that the output is rescaled once in
// many tiles. 16-bit floats lose nothing up to 2^8. Of fp8 a maximum never does: that would leave
// the row's largest weight to be rounded, by up to a sixteenth.
constexpr float LATE_EXPONENT = IS_FP8 ? 0.0f : 8.0f;
// By how many powers of two weights are larger than relative to the maximum. e4m3 has full
// precision from 2^-6 to 2^8: weights of 2^-14 of the maximum and more keep it.
constexpr float WEIGHT_EXPONENT = IS_FP8 ? 8.0f : 0.0f;
// Weights have few exponents.
constexpr bool HAS_NARROW_WEIGHTS = IS_FP8;

// A consumer is a warpgroup of 64 query rows; one more warpgroup, the producer, has the tiles
// copied.
constexpr int WARPGROUP = 128;
constexpr int CONSUMERS = ATTN_CONSUMERS;
constexpr int CONSUMER_ROWS = 64;
constexpr int BLOCK_M = CONSUMERS * CONSUMER_ROWS;
constexpr int BLOCK_N = ATTN_BLOCK_N;
// Rows of keys that are copied at once: a tile, or what divides pages and tiles.
constexpr int BOX_ROWS = ATTN_BOX_ROWS;
// Lanes of the copying warp that work: pages are copied box by box.
constexpr int COPY_LANES = IS_PAGED ? WARP : 1;
constexpr int STAGES = ATTN_STAGES;
// Two tiles of queries where they fit: the next unit's land while the present one's are in use.
constexpr int QUERY_STAGES = ATTN_QUERY_STAGES;
constexpr int THREADS = (CONSUMERS + 1) * WARPGROUP;

// Registers of a thread: what the producer leaves is for the accumulators. A block is launched with
// 65536 over its threads, in multiples of 8, and that many is all that its warpgroups can share.
constexpr int LAUNCH_REGISTERS = 65536 / THREADS / 8 * 8;
constexpr bool IS_BUSY_PRODUCER = IS_BLOCKED || IS_FP8;
constexpr int PRODUCER_REGISTERS = IS_BUSY_PRODUCER ? 56 : CONSUMERS == 3 ? 32 : 40;
constexpr int CONSUMER_REGISTERS =
    CONSUMERS == 3 ? (IS_BUSY_PRODUCER ? 152 : 160) : (IS_BUSY_PRODUCER ? 224 : 232);
static_assert(PRODUCER_REGISTERS + CONSUMERS * CONSUMER_REGISTERS <=
              (CONSUMERS + 1) * LAUNCH_REGISTERS);

static_assert(DTYPE == DType::f16 || DTYPE == DType::bf16 || IS_FP8);
static_assert(HEAD_DIM % 64 == 0 && HEAD_DIM <= 256 && VALUE_DIM % 64 == 0 && VALUE_DIM <= 256);
static_assert(BLOCK_N % 16 == 0 && STAGES >= 2);
// Eight rows are the period of the swizzle.
static_assert(BLOCK_N % BOX_ROWS == 0 && BOX_ROWS % 8 == 0 && BLOCK_N / BOX_ROWS <= 32);
static_assert(CONSUMERS == 2 || CONSUMERS == 3);
// Values are transposed 32 keys at a time.
static_assert(!IS_FP8 || BLOCK_N % 32 == 0);

}  // namespace attn::config
