// What one block of a Hopper backward does: a tile of keys of one KV head, and the tiles of query
// rows that see some of it, for each query head of the group.
//
// Source: a key at place j is seen by the rows i with j - right <= i + kv_len - q_len <= j + left:
// attn/band.cuh, from the side of the keys.
// Who executes: `key_tile` all lanes of a warp; the rest any thread, alone.
// The invariant: a tile of rows is visited exactly if one of its rows sees one of the keys, which
// the rows of the tile can tell as well (attn/backward_turn_sm90a.cuh relies on it).

#pragma once

#include "attn/backward_rows.cuh"
#include "attn/band.cuh"
#include "attn/turns.cuh"
#include "attn/unit.cuh"
#include "base/backward_params.cuh"
#include "base/config_backward_sm90a.cuh"

namespace attn {

struct KeyTile {
  Sequence sequence;
  Band band;
  i32 kv_head;
  i32 first;   // key
  i32 stored;  // keys of the sequence that are written, padding included
  i32 lo;      // tiles of rows lo .. hi are visited, from `start` on around
  i32 hi;
  i32 start;
  i64 padded;  // padded row of the sequence's first row

  __device__ i32 visits(const BackwardParams& p) const {
    return (hi - lo) * i32(p.call.group.value);
  }

  // Rows lo .. hi that see `key`: lo grows with the key, and so does hi up to the sequence's end.
  __device__ Keys rows_of(i32 key) const {
    if (key >= sequence.kv_len) return {0, 0};
    const i32 own = key - (sequence.kv_len - sequence.q_len);
    return {band.right < 0 ? 0 : clamp_of(own - band.right, 0, sequence.q_len),
            band.left < 0 ? sequence.q_len : clamp_of(own + band.left + 1, 0, sequence.q_len)};
  }

  // Keys of the tile, counted from its first one, that some row of the sequence may see: the others
  // are storage that must not reach a result.
  __device__ Keys seen() const { return {band.lo() - first, band.hi() - first}; }
};

// Whether tiles of keys are first seen by later and later rows, so that their blocks, each of which
// starts there, run along a diagonal.
__device__ inline bool is_diagonal(const Band& band) { return band.right >= 0; }

// The tile of keys of this block, by the order in which blocks begin where one waits for another.
__device__ inline KeyTile key_tile(const BackwardParams& p) {
  using namespace config;
  const ForwardParams& call = p.call;
  u32 block = blockIdx.x;
  if constexpr (IS_DETERMINISTIC) {
    block = __shfl_sync(~0u, threadIdx.x % WARP == 0 ? take_ticket(p) : 0, 0);
  }
  const u32 kv_heads = u32(p.kv_heads);
  KeyTile tile;
  u32 units;               // tiles of keys of a sequence
  u32 index;               // of the block, among those of
  u32 columns = kv_heads;  // so many KV heads, of all sequences where they are equal
  if (call.uniform_units.value != 0) {
    units = call.uniform_units.value;
    index = block;
    columns *= u32(call.batch);
  } else {
    const i32 place = find_sequence(call.unit_starts, call.batch, block / kv_heads);
    const i64 first = call.unit_starts[place];
    units = u32(call.unit_starts[place + 1] - first);
    index = block - u32(first) * kv_heads;
    tile.sequence = sequence_at(call, i32(call.sequences[place]));
  }
  // Sections of heads whose rows the second-level cache holds, tile by tile in each: the tiles that
  // most rows see come first under a causal bound, so that short ones fill the end.
  const u32 wanted = u32(max_of(call.section, 1));
  const u32 most = wanted < columns ? wanted : columns;
  const u32 section = index / (most * units) * most;
  const u32 width = columns - section < most ? columns - section : most;
  index -= section * units;
  const i32 inside = i32(index / width);
  const u32 column = section + index - u32(inside) * width;
  const u32 s = column / kv_heads;
  tile.kv_head = i32(column - s * kv_heads);
  if (call.uniform_units.value != 0) tile.sequence = equal_sequence(call, s);
  const Sequence& sequence = tile.sequence;
  tile.band = Band(call, sequence.q_len, sequence.kv_len);
  // Where sums have an order, those that start later wait for those before: the last tile comes
  // first.
  const bool is_reversed = IS_DETERMINISTIC && is_diagonal(tile.band);
  tile.first = (is_reversed ? i32(units) - 1 - inside : inside) * BLOCK_N;
  tile.stored = p.written_keys >= 0 ? p.written_keys : sequence.kv_len;
  tile.padded = first_padded_row(p, sequence.index);

  tile.lo = 0;
  tile.hi = 0;
  // Without query heads nothing sees them.
  if (call.q_heads > 0 && tile.first < sequence.kv_len) {
    const i32 last = min_of(tile.first + BLOCK_N, sequence.kv_len) - 1;
    const i32 top = tile.rows_of(tile.first).lo;
    const i32 end = tile.rows_of(last).hi;
    if (top < end) {
      tile.lo = top / BLOCK_M;
      tile.hi = ceil_div(end, BLOCK_M);
    }
  }
  // Blocks of a head begin with other tiles of rows each, so that they do not all add to the same
  // sums at once: under a bound to the right they do anyway.
  tile.start = tile.lo;
  if (!IS_DETERMINISTIC && !is_diagonal(tile.band) && tile.lo < tile.hi) {
    tile.start += inside % (tile.hi - tile.lo);
  }
  return tile;
}

// The tiles of rows that a block visits, in its order.
struct Walk {
  i32 head;  // of the group
  i32 tile;

  __device__ explicit Walk(const KeyTile& keys) : head(0), tile(keys.start) {}

  __device__ void next(const KeyTile& keys) {
    if (++tile == keys.hi) tile = keys.lo;
    if (tile == keys.start) ++head;
  }
};

}  // namespace attn
