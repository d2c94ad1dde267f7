// What one block does: a tile of flat query rows of a block of heads, and the keys that it meets.
//
// Flat rows: `pack` query heads of one position are consecutive rows, so that a tile reads each key
// once for all of them; flat row f is position f / pack and head f % pack of the block of heads.
// Units of a sequence are numbered [block of heads, part of the keys, tile of rows], or with tiles
// before parts where neighbouring parts may share a cluster; the tile with the most keys under a
// causal bound first.
// Who executes: `unit_of` all lanes of a warp; the rest any thread.
// The invariant: `keys` holds what some row of the tile sees and nothing that every row of it is
// forbidden by band or part, so that storage outside is never read.

#pragma once

#include "attn/band.cuh"
#include "attn/locate.cuh"
#include "attn/split.cuh"
#include "base/params.cuh"

namespace attn {

// Keys lo .. hi.
struct Keys {
  i32 lo;
  i32 hi;
};

struct Unit {
  Sequence sequence;
  Band band;
  i32 head;  // first query head
  i32 kv_head;
  i32 part;
  i32 parts;
  i32 first;  // first flat row of the tile
  i32 rows;   // rows of the sequence that are written, padding included
  i32 top;    // positions of the tile's first and last row; top > bottom where all are padding
  i32 bottom;
  Keys keys;
  Keys full;  // keys that every row sees, by the band

  // The position of a flat row of the tile.
  __device__ i32 position(const ForwardParams& p, i32 row) const {
    return i32(p.pack.divide(u32(first + row)));
  }

  // The query head of a flat row of the tile at `position`.
  __device__ i32 head_of(const ForwardParams& p, i32 row, i32 position) const {
    return head + first + row - position * i32(p.pack.value);
  }

  // Flat rows of the tile that are written: BLOCK_M or fewer.
  __device__ i32 flat_rows(const ForwardParams& p, i32 block_m) const {
    return min_of(i32(u32(rows) * p.pack.value) - first, block_m);
  }

  // The keys that the row at `position` may see, by band and part.
  __device__ Keys keys_at(i32 position) const {
    return {max_of(band.lo(position), keys.lo), min_of(band.hi(position), keys.hi)};
  }
};

// Where a unit is among those of its sequence: `inside` counts parts and tiles of one block of
// heads.
struct Task {
  Sequence sequence;
  u32 head_block;
  u32 inside;
};

// Where the partial results of a sequence begin: of equal ones each has as many, and no load is
// needed.
__device__ inline i64 partial_first_of(const ForwardParams& p, const Sequence& sequence, i32 rows,
                                       i32 parts) {
  if (p.uniform_units.value == 0) return p.partial_starts[sequence.index];
  return i64(sequence.index) * parts * rows * p.q_heads;
}

// Blocks in their own order: sequence by sequence, where lengths differ the one with the most keys
// first.
__device__ inline Task task_of(const ForwardParams& p, u32 block) {
  const u32 head_blocks = u32(p.q_heads) / p.pack.value;
  Task task;
  u32 units;
  u32 index;
  if (p.uniform_units.value != 0) {
    units = p.uniform_units.value;
    const u32 s = p.uniform_units.divide(block / head_blocks);
    index = block - s * units * head_blocks;
    task.sequence = equal_sequence(p, s);
  } else {
    const i32 place = find_sequence(p.unit_starts, p.batch, block / head_blocks);
    const i64 first = p.unit_starts[place];
    units = u32(p.unit_starts[place + 1] - first);
    index = block - u32(first) * head_blocks;
    task.sequence = sequence_at(p, i32(p.sequences[place]));
  }
  task.head_block = index / units;
  task.inside = index - task.head_block * units;
  return task;
}

// The unit of a task. BLOCK_M: flat rows of a tile. HAS_PARTS: keys may be split. ARE_NEIGHBOURS:
// parts come one after the other.
template <int BLOCK_M, bool HAS_PARTS = true, bool ARE_NEIGHBOURS = false>
__device__ Unit unit_of(const ForwardParams& p, const Task& task) {
  Unit unit;
  const u32 inside = task.inside;
  unit.sequence = task.sequence;
  unit.band = Band(p, unit.sequence.q_len, unit.sequence.kv_len);
  unit.rows = written_rows(p, unit.sequence);
  unit.head = i32(task.head_block * p.pack.value);
  unit.kv_head = i32(p.group.divide(u32(unit.head)));

  // Flat rows are fewer than 2^31.
  const u32 row_tiles = (u32(unit.rows) * p.pack.value + BLOCK_M - 1) / BLOCK_M;
  const Parts parts =
      HAS_PARTS ? parts_of(p, unit.band) : Parts{0, unit.sequence.kv_len, unit.sequence.kv_len, 1};
  const u32 inner = ARE_NEIGHBOURS ? u32(parts.count) : row_tiles;
  const u32 outer = HAS_PARTS ? inside / inner : 0;
  const u32 within = inside - outer * inner;
  unit.part = i32(ARE_NEIGHBOURS ? within : outer);
  unit.first = i32(row_tiles - 1 - (ARE_NEIGHBOURS ? outer : within)) * BLOCK_M;

  unit.parts = parts.count;
  unit.top = unit.position(p, 0);
  unit.bottom = min_of(unit.position(p, BLOCK_M - 1), unit.sequence.q_len - 1);
  unit.full = {unit.band.lo(unit.bottom), unit.band.hi(unit.top)};
  const i32 first = parts.lo + unit.part * parts.keys;
  const i32 end = parts.hi - first < parts.keys ? parts.hi : first + parts.keys;
  unit.keys.lo = max_of(unit.band.lo(unit.top), first);
  unit.keys.hi = min_of(unit.band.hi(unit.bottom), end);
  // Padding rows alone, or a part of which these rows see nothing.
  if (unit.top > unit.bottom || unit.keys.hi < unit.keys.lo) unit.keys.hi = unit.keys.lo;
  return unit;
}

// The unit of block `block`.
template <int BLOCK_M, bool ARE_NEIGHBOURS = false>
__device__ Unit unit_of(const ForwardParams& p, u32 block) {
  return unit_of<BLOCK_M, true, ARE_NEIGHBOURS>(p, task_of(p, block));
}

}  // namespace attn
