// The shared memory of a Hopper block: queries, rings of key and value tiles, and the barriers
// between the producer and the consumers.
//
// Shared memory, from a multiple of 1024: QUERY_STAGES query tiles [BLOCK_M, HEAD_DIM]; STAGES key
// tiles [BLOCK_N, HEAD_DIM]; STAGES value tiles [BLOCK_N, VALUE_DIM], of fp8 [VALUE_DIM, BLOCK_N];
// fp8: STAGES value tiles as they are stored [BLOCK_N, VALUE_DIM]; panels of output, 128 bytes of
// each query row; barriers of 8 bytes: queries full, empty [QUERY_STAGES]; keys full, empty
// [STAGES]; values full, empty [STAGES]; stored values full, empty [STAGES]; units full, empty
// [HANDED_SLOTS], wanted; under a block mask visits of 2 bytes [HANDED_SLOTS, most_visits].
// The full barrier of a copied tile has one arrival, the producer's, and counts bytes; its empty
// one has one of each consumer, whose products read it. Of what is transposed, the threads that do
// it arrive on either side. The barriers of a unit have one of each thread that writes or reads it.
// All walk the rings with a count of tiles, from which stage and parity follow.

#pragma once

#include "attn/ring.cuh"
#include "attn/unit.cuh"
#include "base/config_sm90a.cuh"
#include "tile/descriptor.cuh"

namespace attn {

__host__ __device__ constexpr u32 tile_bytes(int rows, int columns) {
  return u32(rows * tile::panels_of(columns, config::ELEMENT_BYTES)) * tile::PANEL_ROW_BYTES;
}
constexpr u32 QUERY_BYTES = tile_bytes(config::BLOCK_M, config::HEAD_DIM);
constexpr u32 KEY_BYTES = tile_bytes(config::BLOCK_N, config::HEAD_DIM);
constexpr u32 STORED_VALUE_BYTES = tile_bytes(config::BLOCK_N, config::VALUE_DIM);
constexpr u32 VALUE_BYTES =
    config::IS_FP8 ? tile_bytes(config::VALUE_DIM, config::BLOCK_N) : STORED_VALUE_BYTES;

// Threads that transpose values of fp8: two warps.
constexpr u32 TRANSPOSERS = config::IS_FP8 ? 2 * WARP : 0;

// Where the results of a unit that is a part go. Only instances with parts keep it.
template <bool HAS_PARTS>
struct OwnPartials {
  __device__ void find_partials(const ForwardParams&, const Unit&) {}
  __device__ PartialRows partials_of(const Unit&) const { return {}; }
};
template <>
struct OwnPartials<true> {
  i64 partial_first;

  __device__ void find_partials(const ForwardParams& p, const Unit& unit) {
    partial_first = unit.parts > 1 ? partial_first_of(p, unit.sequence, unit.rows, unit.parts) : 0;
  }
  __device__ PartialRows partials_of(const Unit& unit) const {
    return {unit.parts > 1, partial_first, unit.part, unit.rows};
  }
};

// A unit as the producer hands it to the consumers, which read it where it is: registers are for
// products.
struct Handed : OwnPartials<config::HAS_PARTS> {
  Unit unit;
  bool is_unit;
  i32 visits;  // under a block mask, tiles of keys that the unit visits
};

// The host counts the most there are (src/cuda/config/hopper.rs).
static_assert(sizeof(Handed) == (config::HAS_PARTS ? 112 : 104));

// A visit of a unit under a block mask: the tile's number, and whether some row does not see all of
// it.
struct Visit {
  u16 word;

  static constexpr u32 CUT = 1 << 15;

  __device__ i32 tile() const { return word & (CUT - 1); }
  __device__ bool is_cut() const { return (word & CUT) != 0; }
};

// Units that may be handed out and not yet given back: short ones pass through quickly.
constexpr u32 HANDED_SLOTS = 4;

struct Block {
  Ring<config::QUERY_STAGES> queries;
  Ring<config::STAGES> keys;
  Ring<config::STAGES> values;
  Ring<config::STAGES> stored_values;  // fp8: as they are copied
  u32 panels;                          // of output, one of each warp (attn/write_sm90a.cuh)
  u32 handed_full;
  u32 handed_empty;
  u32 wanted;  // the next unit
  Handed* handed;
  Visit* visits;  // [HANDED_SLOTS, most_visits]
  i32 most_visits;

  // `memory` and `generic`: the same place, as a shared and as a generic address.
  __device__ Block(u32 memory, u8* generic, Handed* slots, i32 visits_of_unit)
      : handed(slots), most_visits(visits_of_unit) {
    queries.tiles = memory;
    keys.tiles = queries.tiles + config::QUERY_STAGES * QUERY_BYTES;
    values.tiles = keys.tiles + config::STAGES * KEY_BYTES;
    stored_values.tiles = values.tiles + config::STAGES * VALUE_BYTES;
    panels = stored_values.tiles + (config::IS_FP8 ? config::STAGES * STORED_VALUE_BYTES : 0);
    queries.place_barriers(panels + config::BLOCK_M * tile::PANEL_ROW_BYTES);
    keys.place_barriers(queries.end());
    values.place_barriers(keys.end());
    stored_values.place_barriers(values.end());
    handed_full = config::IS_FP8 ? stored_values.end() : values.end();
    handed_empty = handed_full + HANDED_SLOTS * 8;
    wanted = handed_empty + HANDED_SLOTS * 8;
    visits = reinterpret_cast<Visit*>(generic + (wanted + 8 - memory));
  }

  __device__ Handed& handed_of(u32 count) const { return handed[count % HANDED_SLOTS]; }
  __device__ Visit* visits_of(u32 count) const {
    return visits + count % HANDED_SLOTS * u32(most_visits);
  }
  __device__ u32 handed_full_of(u32 count) const { return handed_full + count % HANDED_SLOTS * 8; }
  __device__ u32 handed_empty_of(u32 count) const {
    return handed_empty + count % HANDED_SLOTS * 8;
  }

  // One thread, before the barrier that starts the block.
  __device__ void init() const {
    // Every thread that reads a unit: the consumers, the copying lanes and those that transpose.
    constexpr u32 READERS =
        config::CONSUMERS * config::WARPGROUP + config::COPY_LANES + TRANSPOSERS;
    queries.init(1, config::CONSUMERS);
    keys.init(1, config::CONSUMERS);
    values.init(config::IS_FP8 ? TRANSPOSERS : 1, config::CONSUMERS);
    if (config::IS_FP8) stored_values.init(1, TRANSPOSERS);
    for (u32 slot = 0; slot < HANDED_SLOTS; ++slot) {
      ptx::mbarrier_init(handed_full_of(slot), WARP);
      ptx::mbarrier_init(handed_empty_of(slot), READERS);
    }
    ptx::mbarrier_init(wanted, 1);
    ptx::fence_mbarrier_init();
  }
};

}  // namespace attn
