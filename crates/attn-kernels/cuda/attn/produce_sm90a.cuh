// The producer of a Hopper block: one warp that takes units of work, and one that has their tiles
// copied. The other two have work of fp8 alone (attn/transpose_sm90a.cuh).
//
// Units are taken from a counter in global memory, so that blocks that end early take what is left;
// the next unit is taken when few tiles of the present one are left to copy, so that its first ones
// land in time, and no earlier: a unit that is taken is no longer there for a block that runs out
// of work. Keys of a unit come from the last tile to the first: the last one needs the masks, and
// the first products can start on it.
// Pages: a tile is boxes of rows, each within a page, and lane n of the warp asks for box n.
// The invariant: tiles of keys start at the unit's first key, or at the box that holds it; rows
// past the tensor are 0, and rows that no query row sees are for those who read values to clear.

#pragma once

#include "attn/block_mask.cuh"
#include "attn/ring_sm90a.cuh"
#include "attn/schedule.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"

namespace attn {

struct Maps {
  const ptx::TensorMap* q;
  const ptx::TensorMap* k;
  const ptx::TensorMap* v;
};

constexpr i32 PANEL_ELEMENTS = i32(tile::PANEL_ROW_BYTES) / config::ELEMENT_BYTES;

// The first key that a unit has copied: boxes do not cross pages, and a part may begin within one.
// What lies before the unit's own keys is masked.
__device__ inline i32 first_copied(const Keys& keys) {
  return config::HAS_PARTS && config::IS_PAGED ? keys.lo & ~(config::BOX_ROWS - 1) : keys.lo;
}

// Tiles of keys that a unit meets: one, all hidden, where it sees no key, so that all units go one
// way.
__device__ inline i32 key_tiles(const Handed& handed) {
  const Keys& keys = handed.unit.keys;
  const i32 tiles =
      config::IS_BLOCKED ? handed.visits : ceil_div(keys.hi - first_copied(keys), config::BLOCK_N);
  return max_of(tiles, 1);
}

// The first key of the n-th tile that a unit meets, counted from the last one.
__device__ inline i32 met_tile(const Handed& handed, const Visit* visits, i32 n) {
  const i32 tile = config::IS_BLOCKED ? visits[n].tile() : key_tiles(handed) - 1 - n;
  return first_copied(handed.unit.keys) + tile * config::BLOCK_N;
}

// Asks for a box of ROWS rows from `row` on, a panel of columns at a time, in a tile of TILE_ROWS
// rows; one thread.
template <int ROWS, int TILE_ROWS, int DIM>
__device__ void copy_box(u32 to, const ptx::TensorMap* map, i32 head, i32 row, i32 outer,
                         u32 full) {
#pragma unroll
  for (int panel = 0; panel < tile::panels_of(DIM, config::ELEMENT_BYTES); ++panel) {
    ptx::cp_async_bulk_tensor_4d(to + panel * TILE_ROWS * tile::PANEL_ROW_BYTES, map,
                                 panel * PANEL_ELEMENTS, head, row, outer, full);
  }
}

// Where a tile of keys and values is, box by box; lane n has box n.
struct Boxes {
  i32 row;
  i32 outer;  // -1: a page outside the cache
  i32 count;  // boxes with a row of the sequence, the same for all lanes
};

constexpr i32 BOXES = config::BLOCK_N / config::BOX_ROWS;

// The boxes of the tile of keys that starts at `first`.
__device__ inline Boxes boxes_of(const ForwardParams& p, const Sequence& sequence, i32 first) {
  if constexpr (config::IS_PAGED) {
    const i32 count = min_of(ceil_div(sequence.kv_len - first, config::BOX_ROWS), BOXES);
    const i32 lane = i32(threadIdx.x) % WARP;
    if (lane >= count) return {0, 0, count};
    const i32 key = first + lane * config::BOX_ROWS;
    const i32 column = i32(p.table.page_size.divide(u32(key)));
    const i32 page = i32(page_at(p.table, sequence.index, column));
    return {key - column * i32(p.table.page_size.value), page, count};
  } else {
    return {i32(sequence.kv_first) + first, p.flags & KV_PADDED ? sequence.index : 0, 1};
  }
}

// What a page outside the cache answers.
template <int DIM>
__device__ void fill_box(u32 to) {
  const Vec16 nan{{~0u, ~0u, ~0u, ~0u}};
  for (int panel = 0; panel < tile::panels_of(DIM, config::ELEMENT_BYTES); ++panel) {
    for (int piece = 0; piece < config::BOX_ROWS * 8; ++piece) {
      ptx::st_shared_v4_b32(to + (panel * config::BLOCK_N * tile::PANEL_ROW_BYTES + piece * 16),
                            nan);
    }
  }
  ptx::fence_proxy_async_shared();
}

// Asks for a tile of keys or values, all copying lanes; a stage's rows past the last box stay what
// they were.
template <int DIM>
__device__ void copy_tile(u32 to, const ptx::TensorMap* map, i32 head, const Boxes& boxes,
                          u32 full) {
  using namespace config;
  constexpr u32 BOX_BYTES = tile_bytes(BOX_ROWS, DIM);
  if constexpr (IS_PAGED) {
    const i32 lane = i32(threadIdx.x) % WARP;
    const u32 box = to + u32(lane * BOX_ROWS) * tile::PANEL_ROW_BYTES;
    const bool has_box = lane < boxes.count;
    const bool is_stored = has_box && boxes.outer >= 0;
    if (has_box && !is_stored) fill_box<DIM>(box);
    const u32 stored = u32(__popc(__ballot_sync(~0u, is_stored)));
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive_expect_tx(full, stored * BOX_BYTES);
    __syncwarp();
    if (is_stored) copy_box<BOX_ROWS, BLOCK_N, DIM>(box, map, head, boxes.row, boxes.outer, full);
  } else {
    ptx::mbarrier_arrive_expect_tx(full, BOX_BYTES);
    copy_box<BOX_ROWS, BLOCK_N, DIM>(to, map, head, boxes.row, boxes.outer, full);
  }
}

// Lists the tiles of a unit that the block mask lets some row see, from the last to the first. All
// lanes of one warp.
__device__ inline i32 list_visits(const ForwardParams& p, const Unit& unit, i32 tiles,
                                  Visit* visits) {
  const i32 lane = i32(threadIdx.x) % WARP;
  i32 count = 0;
  for (i32 last = tiles - 1; last >= 0; last -= WARP) {
    const i32 tile = last - lane;
    bool any = false;
    bool all = true;
    if (tile >= 0) {
      const i32 first = first_copied(unit.keys) + tile * config::BLOCK_N;
      look_at_blocks(p, unit, first, min_of(first + config::BLOCK_N, unit.keys.hi), any, all);
    }
    const u32 seen = __ballot_sync(~0u, any);
    if (any) {
      visits[count + __popc(seen & ((1u << lane) - 1))] = {u16(u32(tile) | (all ? 0 : Visit::CUT))};
    }
    count += __popc(seen);
  }
  return count;
}

// Takes units and hands them out, to the copying warp as to the consumers. All lanes of one warp.
//
// A warp of its own: finding a unit takes as long as a tile's products, and copies must not wait
// for it.
__device__ inline void hand_out(const ForwardParams& p, const Block& block) {
  const bool leads = threadIdx.x % WARP == 0;
  u32 index = blockIdx.x;
  for (u32 count = 0;; ++count) {
    if (count > 0) wait(block.wanted, (count - 1) & 1);
    if (count >= HANDED_SLOTS) {
      wait(block.handed_empty_of(count), (count / HANDED_SLOTS - 1) & 1);
    }
    Handed& handed = block.handed_of(count);
    const bool is_unit = index < u32(p.work);
    // All lanes write the same: the unit is at home in shared memory, for registers are few here.
    handed.is_unit = is_unit;
    if (is_unit) {
      Unit& unit = handed.unit;
      unit = unit_of<config::BLOCK_M, config::HAS_PARTS>(p, scheduled_task(p, index));
      handed.find_partials(p, unit);
      // Boxes do not cross pages.
      if constexpr (config::IS_PAGED && !config::HAS_PARTS) {
        unit.keys.lo &= ~(config::BOX_ROWS - 1);
      }
      if constexpr (config::IS_BLOCKED) {
        __syncwarp();
        Visit* visits = block.visits_of(count);
        const i32 keys = unit.keys.hi - first_copied(unit.keys);
        handed.visits = list_visits(p, unit, ceil_div(keys, config::BLOCK_N), visits);
        if (handed.visits == 0) {
          visits[0] = {0};
          unit.keys.hi = unit.keys.lo;
        }
      }
    }
    __syncwarp();
    ptx::mbarrier_arrive(block.handed_full_of(count));
    if (!is_unit) break;
    index = __shfl_sync(~0u, leads ? atomicAdd(p.counter, 1u) + gridDim.x : 0, 0);
  }
  // The last block to end leaves the counters as it found them.
  if (leads && atomicAdd(p.counter + 1, 1u) == gridDim.x - 1) {
    p.counter[0] = 0;
    p.counter[1] = 0;
  }
}

// How many tiles of a unit are left to copy when the next one is asked for.
constexpr i32 LAST_TILES = 1;

// Has the tiles of all units copied. All lanes of one warp for pages, whose boxes they share; else
// its first lane, for one that waited beside it could be left behind by two phases.
__device__ inline void copy_tiles(const ForwardParams& p, const Maps& maps, const Block& block) {
  using namespace config;
  const bool leads = !IS_PAGED || threadIdx.x % WARP == 0;
  if (leads) {
    ptx::prefetch_tensormap(maps.q);
    ptx::prefetch_tensormap(maps.k);
    ptx::prefetch_tensormap(maps.v);
  }
  u32 keys = 0;
  u32 values = 0;
  for (u32 count = 0;; ++count) {
    wait(block.handed_full_of(count), count / HANDED_SLOTS & 1);
    const Handed& handed = block.handed_of(count);
    if (!handed.is_unit) break;
    const Unit& unit = handed.unit;
    const i32 kv_head = unit.kv_head;
    const Sequence& sequence = unit.sequence;
    const Visit* visits = block.visits_of(count);
    const i32 tiles = key_tiles(handed);
    const auto copy_keys = [&](const Boxes& boxes) {
      block.keys.wait_empty(keys);
      copy_tile<HEAD_DIM>(block.keys.tile<KEY_BYTES>(keys), maps.k, kv_head, boxes,
                          block.keys.full_of(keys));
      ++keys;
    };
    const auto copy_values = [&](const Boxes& boxes) {
      const Ring<STAGES>& ring = IS_FP8 ? block.stored_values : block.values;
      ring.wait_empty(values);
      copy_tile<VALUE_DIM>(ring.tile<STORED_VALUE_BYTES>(values), maps.v, kv_head, boxes,
                           ring.full_of(values));
      ++values;
    };
    block.queries.wait_empty(count);
    if (leads) {
      const u32 full = block.queries.full_of(count);
      ptx::mbarrier_arrive_expect_tx(full, QUERY_BYTES);
      copy_box<BLOCK_M, BLOCK_M, HEAD_DIM>(
          block.queries.tile<QUERY_BYTES>(count), maps.q, unit.head,
          i32(sequence.q_first) + (IS_PACKED ? unit.top : unit.first),
          p.flags & Q_PADDED ? sequence.index : 0, full);
    }
    Boxes boxes = boxes_of(p, sequence, met_tile(handed, visits, 0));
    copy_keys(boxes);
    if (leads && tiles <= LAST_TILES) ptx::mbarrier_arrive(block.wanted);
    for (i32 n = 1; n < tiles; ++n) {
      if (leads && tiles - n == LAST_TILES) ptx::mbarrier_arrive(block.wanted);
      const Boxes next = boxes_of(p, sequence, met_tile(handed, visits, n));
      copy_keys(next);
      copy_values(boxes);
      boxes = next;
    }
    copy_values(boxes);
    ptx::mbarrier_arrive(block.handed_empty_of(count));
  }
}

}  // namespace attn
