// What the launches of a backward are told, field by field as the host writes it
// (src/cuda/backward/params.rs).
//
// A backward is three launches with the same parameters: backward_prepare, one main kernel, and
// backward_finish. The workspace between them counts query rows in padded rows: those of each
// sequence start on a multiple of ROW_TILE, so that a tile of rows lies in one sequence, is on 16
// bytes, and may be copied whole.

#pragma once

#include "base/params.cuh"

namespace attn {

// Padded rows of a sequence are a multiple of this: tiles of query rows divide it.
constexpr i32 ROW_TILE = 128;
// A turn counts for this many padded rows: a tile of rows that starts at padded row r has
// turns[head * turn_stride + r / TURN_ROWS], so that tiles of this many rows and more have one
// each.
constexpr i32 TURN_ROWS = 16;

// A backward call.
//
// `call` holds what the forward was told: q, k, v, o, lse, masks, bias, slopes and sinks, the band
// and the scores' options, and the lengths. Of its fields the backward reads otherwise:
// unit_starts [batch + 1] counts tiles of keys, in the order of `sequences`, a unit being one tile
// of keys of one KV head; uniform_units are those of each where all sequences are equal; pack,
// partial results, parts and work are unused.
//
// Workspace, padded row = tile_starts[sequence] * ROW_TILE + row:
//   lse2   f32 [q_heads, padded_rows]: log-sum-exp in base 2, in the units of scale * LOG2E as f32
//          has it, so that q.k * (scale * LOG2E) - lse2 errs by no more than lse2's own rounding;
//          with NATURAL as the forward wrote it. +inf for rows past the sequence and for rows that
//          see no key and have no sink: weights are 0 there, never NaN.
//   delta  f32 [q_heads, padded_rows]: the sum of dO * O over a row; 0 for rows past the sequence.
//   dq_sum f32 [q_heads, padded_rows, dq_dim]: the sum of dS K, without the scale; prepare makes it
//          0, the main kernel adds, finish scales and rounds.
//   row_sums f32 [q_heads, padded_rows]: with ROW_SUMS the sum over all keys of dS as it was
//          rounded; prepare makes it 0, the main kernel adds, in the same turn as to dq_sum. It
//          would be a sink's weight times delta if neither dS nor delta, which is made of a rounded
//          o, erred: finish takes the excess times a mean key from dQ, which is what the errors
//          come to where keys have a large component in common.
//   turns  u32 [q_heads, padded_rows / TURN_ROWS]: how many tiles of keys have added to dq_sum of a
//          tile of rows; prepare makes it 0. Unused without DETERMINISTIC.
//   call.counter u32 [1]: the blocks of the main kernel that have begun; prepare makes it 0.
// The naive kernel has `factor` in place of dq_sum, and lse2 is the row's largest score, natural: a
// weight is exp(score - lse2) * factor there.
// dk and dv are written by the main kernel, rows of padding too: a block sums them over the query
// heads of its KV head.
struct BackwardParams {
  ForwardParams call;
  Rows d_o;
  Rows dq;
  Rows dk;
  Rows dv;
  // The gradient of the bias, f32; broadcast axes have stride 0 and extent 1 in `bias_extents`
  // [sequence, head, row, key]. Null where it is not wanted. prepare makes it 0 and the main kernel
  // adds to it, or, with BIAS_LAST, a pass of its own writes it.
  Pairs dbias;
  // The gradient of the sinks, f32 [q_heads]; `data` is written, null where it is not wanted.
  PerHead dsinks;
  float* lse2;
  float* delta;
  float* dq_sum;
  float* row_sums;
  float* factor;  // f32 [q_heads, padded_rows]; null but for the naive kernel
  u32* turns;
  // [batch + 1]: tiles of ROW_TILE padded rows before each sequence; null where all are equal.
  const i64* tile_starts;
  i64 padded_rows;  // of all sequences
  i64 turn_stride;  // padded_rows / TURN_ROWS
  // Tiles of ROW_TILE padded rows of each sequence where all are equal; value 0 where they differ.
  Divisor uniform_tiles;
  i32 dq_dim;        // elements of a row of dq_sum, at least head_dim
  i32 row_tiles;     // tiles of ROW_TILE padded rows of all sequences
  i32 key_tiles;     // units: tiles of keys of all sequences, of one KV head
  i32 written_keys;  // keys of every sequence that are written: the longest, or -1 where packed
  i32 kv_heads;
  u32 flags;
  // What a launch of several passes is at: backward_naive.
  i32 phase;
  i32 bias_extents[4];
  i32 reserved;
};

// Bits of BackwardParams::flags.
//
// dq_sum is added to in an order that depends on the problem alone.
constexpr u32 DETERMINISTIC = 1;
// The gradient of the bias is left to backward_naive, which sums it in an order of its own.
constexpr u32 BIAS_LAST = 2;
// lse2 is a natural logarithm, for scores of any finite size.
constexpr u32 NATURAL = 4;
// The main kernel adds to row_sums. Not under a soft-cap, whose derivative the sums would need.
constexpr u32 ROW_SUMS = 8;
// dq_sum is in squares of 64 padded rows and 64 columns, those of a row one after the other, each
// as a warpgroup product leaves it: [8 columns][16 rows][lane] of four, lane l with columns 2 (l %
// 4) and the next of rows l / 4 and 8 more.
constexpr u32 SUMS_IN_FOURS = 16;

static_assert(sizeof(BackwardParams) == sizeof(ForwardParams) + 328);

}  // namespace attn
