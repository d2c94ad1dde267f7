// What a launch is told, field by field as the host writes it (src/cuda/params.rs).
//
// Strides are in elements and 64 bits wide: products of a page id, a row or a sequence with a
// stride pass 2^31 in ordinary use. Lengths are 32 bits: the host refuses sequences past 2^29 rows.
// A tensor that is absent has null data.

#pragma once

#include "base/types.cuh"

namespace attn {

// Division of n < 2^31 by a value known at launch: (mulhi(n, multiplier) + n) >> shift.
//
// Source: T. Granlund, P. Montgomery, "Division by Invariant Integers using Multiplication", 1994,
// figure 4.1.
struct Divisor {
  u32 value;
  u32 multiplier;
  u32 shift;
  u32 reserved;

  __device__ u32 divide(u32 n) const { return (__umulhi(n, multiplier) + n) >> shift; }
};

// Rows of a tensor [sequence, row, head, element] with innermost stride 1. Packed: `sequence` is 0
// and rows count from the first one of the batch. A paged cache: `sequence` steps over a page,
// `row` over a slot.
struct Rows {
  void* data;
  i64 sequence;
  i64 row;
  i64 head;
};

// A map over (sequence, head, query row or block, key or block); broadcast axes have stride 0.
struct Pairs {
  const void* data;
  i64 sequence;
  i64 head;
  i64 row;
  i64 key;
};

// One f32 for each head, or for each sequence and head.
struct PerHead {
  const float* data;
  i64 sequence;
  i64 head;
};

// Where the pages of a sequence are: table[sequence, column] is the page of tokens
// column * page_size .. (column + 1) * page_size.
struct BlockTable {
  const i32* data;
  i64 sequence;
  i64 column;
  i64 pages;  // pages of the cache: an id outside 0..pages is answered with NaN, never read
  Divisor page_size;
};

// An entry of a persistent kernel's order: a tile of some blocks of heads, and of parts one. Tiles
// are counted from the end of a sequence, those of its first part first.
struct OrderedTask {
  i32 sequence;
  u32 head_block;
  u32 inside;
};

// A forward call. q, o [rows, q_heads, head_dim | value_dim], lse [rows, q_heads], k, v
// [rows, kv_heads, head_dim | value_dim] or pages.
struct ForwardParams {
  Rows q;
  Rows o;
  Rows lse;
  Rows k;
  Rows v;
  BlockTable table;
  Pairs mask;        // u8, non-zero keeps
  Pairs bias;        // f32
  Pairs block_mask;  // u8 over blocks, non-zero keeps
  PerHead alibi;
  PerHead sinks;
  PerHead q_scale;  // by KV head, as the others
  PerHead k_scale;
  PerHead v_scale;

  // [batch + 1] each, i64: packed rows before each sequence; units of work before each sequence, in
  // the order of `sequences`, a unit being one tile of flat rows and one part of the keys for one
  // block of heads; rows of partial results before each sequence, none where a sequence has a
  // single part. The naive kernel counts rows in place of units, in order.
  const i64* q_starts;
  const i64* kv_starts;
  const i64* unit_starts;
  const i64* partial_starts;
  // Partial results [partial row, value_dim] and their LSE [partial row]; partial row =
  // partial_starts[sequence] + (part * rows + row) * q_heads + head; of clusters see
  // attn/exchange.cuh. Persistent kernels have no partial_starts where sequences are equal
  // (attn/unit.cuh).
  float* partial_o;
  float* partial_lse;

  i32 batch;
  i32 q_heads;
  i32 head_dim;
  i32 value_dim;
  Divisor group;    // query heads that share a KV head
  Divisor pack;     // query heads whose rows share a tile: 1, or the group
  i32 padded_rows;  // rows of every sequence that are written: the longest, or -1 where packed
  u32 flags;
  i32 left;   // keys to the left that a row sees, -1 is open
  i32 right;  // keys to the right that a row sees, -1 is open
  float scale;
  float softcap;     // 0 is none
  i32 split_keys;    // fewest keys of a part
  i32 split_parts;   // most parts
  Divisor block_q;   // query rows of a mask block
  Divisor block_kv;  // keys of a mask block
  // Where all sequences have equal lengths: units of each, and the lengths, so that a block finds
  // its unit without a load. Value 0 where they differ.
  Divisor uniform_units;
  i32 uniform_q;
  i32 uniform_kv;
  // Words that are 0 between launches: of split keys one for each partial row (attn/merge.cuh), of
  // persistent kernels two. Of these also the order of the tiles of unequal sequences, the units of
  // all blocks of heads, and the blocks of heads of a section or, in an order, of an entry
  // (attn/schedule.cuh).
  u32* counter;
  const OrderedTask* order;
  i32 work;
  i32 section;
  i32 most_visits;  // tiles of keys that a unit may visit under a block mask
  i32 reserved;
  // The sequences in the order in which blocks take them, [batch].
  const i64* sequences;
  // Rows for the last keys of each sequence, one a query row, which the decode kernels write to
  // their pages first (attn/append.cuh); null where all keys are there.
  Rows k_new;
  Rows v_new;
  // Dropout: one number each, read by the kernel; null without.
  const u64* seed;
  const u64* offset;
  u32 drop_below;     // a weight whose random word is less is dropped (attn/dropout.cuh)
  float keep_factor;  // of the others; 1 without dropout
};

// Bits of ForwardParams::flags.
constexpr u32 Q_PADDED = 1;
constexpr u32 KV_PADDED = 2;
constexpr u32 PAGED = 4;
// Every sequence has split_parts parts, whatever its length: the last ones may be empty.
constexpr u32 FIXED_PARTS = 8;

// The union of two attention states over disjoint keys. a, b, o [rows, heads, dim]; LSEs [rows,
// heads], natural logarithm. `sequence` strides are unused.
struct MergeStatesParams {
  Rows a;
  Rows a_lse;
  Rows b;
  Rows b_lse;
  Rows o;
  Rows lse;
  i64 rows;
  i32 heads;
  i32 dim;
};

// New keys and values scattered into pages. k, v [tokens, kv_heads, dim] (`row` stride a token),
// caches with `sequence` as page and `row` as slot stride.
struct AppendParams {
  Rows k;
  Rows v;
  Rows k_cache;
  Rows v_cache;
  const i64* slots;      // [tokens]: page * page_size + slot; outside the cache: not written
  const i32* positions;  // [tokens], for rotary; null without
  const i32* sequences;  // [tokens], to find a (sequence, head) scale; null: scales have none
  const float* cos;      // [positions, rotary_dim / 2]
  const float* sin;
  i64 rotary_row;   // stride of cos and sin
  i64 rotary_rows;  // rows of cos and sin: past them, what would be rotated is NaN
  PerHead k_scale;  // fp8 caches: stored = value / scale
  PerHead v_scale;
  i64 tokens;
  i64 pages;
  Divisor page_size;
  i32 kv_heads;
  i32 head_dim;
  i32 value_dim;
  i32 rotary_dim;          // leading elements of a key that are rotated, 0 is none
  u32 rotary_interleaved;  // 0: halves (x[i], x[i + rotary_dim / 2]); 1: pairs (x[2i], x[2i + 1])
  i32 scale_sequences;     // sequences of the scales: a token of another one is written as NaN
};

// Pages copied inside a cache, for copy-on-write. Strides in bytes.
struct CopyBlocksParams {
  Rows k;  // `sequence` page, `row` slot, `head` head
  Rows v;
  const i32* pairs;  // [count, 2]: from, to; ids outside 0..pages are not touched
  i64 count;
  i64 pages;
  i32 page_size;
  i32 kv_heads;
  i32 k_bytes;  // bytes of a key row
  i32 v_bytes;
};

static_assert(sizeof(ForwardParams) == 760 && sizeof(MergeStatesParams) == 208);
static_assert(sizeof(AppendParams) == 288 && sizeof(CopyBlocksParams) == 104);

}  // namespace attn
