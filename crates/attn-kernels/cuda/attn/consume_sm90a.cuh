// A consumer of a Hopper block: a warpgroup with 64 query rows that takes the tiles of keys as they
// land.
//
// Source: J. Shah et al., "FlashAttention-3", arXiv:2407.08608, algorithm 2: the scores of the next
// tile are computed while the weights of this one meet their values, and the softmax of one
// warpgroup runs while the other one's products do (section 3.1, by named barriers).
// Registers: those of attn/softmax_sm90a.cuh, and output [VALUE_DIM / 2] in f32, in the same
// places.
// Who executes: all warps of a consumer, converged.
// The invariant: no register of a product that may be under way is touched; a stage is given back
// once, by one thread, when no product of the warpgroup reads it.

#pragma once

#include "attn/produce_sm90a.cuh"
#include "attn/ring_sm90a.cuh"
#include "attn/softmax_sm90a.cuh"
#include "attn/write_sm90a.cuh"
#include "ptx/barrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"

namespace attn {

// Named barriers: 1 + consumer for taking turns, 1 + CONSUMERS + consumer for one warpgroup alone.
constexpr u32 TURN_BARRIER = 1;
constexpr u32 OWN_BARRIER = TURN_BARRIER + config::CONSUMERS;

// A value that all lanes of a warp have alike. Through a shuffle the compiler knows that they do,
// and keeps what follows from it, descriptors first of all, in uniform registers: products would
// wait for their way there.
__device__ inline i32 one_of_warp(i32 x) { return __shfl_sync(~0u, x, 0); }

struct Consumer : Softmax {
  static constexpr int OUTPUTS = config::VALUE_DIM / 2;
  using Product = ptx::Wgmma<config::BLOCK_N, config::DTYPE>;
  using Sum = ptx::Wgmma<config::VALUE_DIM, config::DTYPE>;

  const Block& block;
  const u32 consumer;
  u32 taken = 0;            // tiles whose values have been met
  u32 units = 0;            // tiles of queries that have been met
  u32 order = 0;            // units that were handed out
  bool has_output = false;  // of the present unit
  Keys seen;                // by all of this consumer's rows of the sequence, by band and length

  float output[OUTPUTS];

  __device__ Consumer(const ForwardParams& params, const Block& memory, u32 index)
      : Softmax(params), block(memory), consumer(index) {}

  __device__ bool leads() const { return threadIdx.x % config::WARPGROUP == 0; }

  // Waits for this warpgroup's turn at the products, and gives the turn on. With three consumers
  // the turn goes round.
  __device__ void take_turn() const {
    ptx::bar_sync(TURN_BARRIER + consumer, 2 * config::WARPGROUP);
  }
  __device__ void give_turn() const {
    ptx::bar_arrive(TURN_BARRIER + (consumer + 1) % config::CONSUMERS, 2 * config::WARPGROUP);
  }

  // Starts S = Q K^T on a tile of keys, with the queries of the present unit.
  __device__ void multiply_keys(u32 count) {
    const u32 own_rows = consumer * config::CONSUMER_ROWS * tile::PANEL_ROW_BYTES;
    const tile::Operand a =
        tile::columns_operand(block.queries.tile<QUERY_BYTES>(units) + own_rows);
    const tile::Operand b = tile::columns_operand(block.keys.tile<KEY_BYTES>(count));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < config::HEAD_DIM / config::PRODUCT_STEP; ++step) {
      Product::ss(scores, a.columns<config::BLOCK_M>(step), b.columns<config::BLOCK_N>(step),
                  step != 0);
    }
    ptx::wgmma_commit_group();
  }

  // Starts O += P V on a tile of values.
  __device__ void multiply_values(u32 count) {
    const u32 tile = block.values.tile<VALUE_BYTES>(count);
    const tile::Operand b =
        config::IS_FP8 ? tile::columns_operand(tile) : tile::rows_operand<config::BLOCK_N>(tile);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < config::BLOCK_N / config::PRODUCT_STEP; ++step) {
      const u32 a[4] = {weights[step * 4], weights[step * 4 + 1], weights[step * 4 + 2],
                        weights[step * 4 + 3]};
      Sum::rs(output, a, config::IS_FP8 ? b.columns<config::VALUE_DIM>(step) : b.rows(step),
              step != 0 || has_output);
    }
    has_output = true;
    ptx::wgmma_commit_group();
  }

  // Waits for all products, and not before the exponentials that are in `sum` by now: left to
  // itself the compiler moves the wait to the top of the softmax that the products should run
  // beside. No wait moves across a side effect, and this one, which needs the sum, never comes: no
  // sum is -inf.
  __device__ void wait_products() const {
    if (sum[0] == NEG_INF) ptx::pmevent();
    ptx::wgmma_wait_group<0>();
  }

  __device__ void release(u32 barrier) const {
    if (leads()) ptx::mbarrier_arrive(barrier);
  }

  // Clears rows lo .. hi of a tile of values, which no row of the unit sees: a weight of 0 does not
  // hide a NaN. All consumers clear the same.
  __device__ void clear_values(i32 lo, i32 hi, u32 count) {
    if (lo >= hi) return;
    block.values.wait_full(count);
    const u32 tile = block.values.tile<VALUE_BYTES>(count);
    constexpr i32 PIECES = 8;
    for (i32 piece = lo * PIECES + i32(threadIdx.x) % config::WARPGROUP; piece < hi * PIECES;
         piece += config::WARPGROUP) {
#pragma unroll
      for (int panel = 0; panel < tile::panels_of(config::VALUE_DIM, config::ELEMENT_BYTES);
           ++panel) {
        ptx::st_shared_v4_b32(
            tile + panel * config::BLOCK_N * tile::PANEL_ROW_BYTES + u32(piece) * 16, Vec16{});
      }
    }
    ptx::fence_proxy_async_shared();
    ptx::bar_sync(OWN_BARRIER + consumer, config::WARPGROUP);
  }

  // What is past the sequence in a unit's last tile, and all of it where the unit has no keys.
  __device__ void clear_past(const Unit& unit, i32 first, u32 count) {
    if constexpr (config::IS_FP8) return;  // attn/transpose_sm90a.cuh
    const i32 end = unit.keys.lo < unit.keys.hi ? unit.sequence.kv_len - first : 0;
    clear_values(end, config::BLOCK_N, count);
  }

  // What is before the first key that a row sees, where tiles start with a box of a page.
  __device__ void clear_before(const Unit& unit, i32 first, u32 count) {
    if constexpr (config::IS_PAGED && !config::IS_FP8) {
      clear_values(0, min_of(unit.band.lo(unit.top) - first, config::BLOCK_N), count);
    }
  }

  // Turns the scores of a unit's first tile, or of a later one, into weights under the maxima; the
  // answer is how the output so far must be corrected, if there is any.
  //
  // BESIDE: products of earlier weights are under way. They end, and give `values` back, when one
  // row's exponentials have been started, so that the other's may be rounded into the registers
  // that those weights leave.
  template <bool FIRST, bool BESIDE>
  __device__ Corrections weigh(u32 values) {
    Corrections corrections = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (FIRST) {
        start_row(half);
      } else {
        corrections.of[half] = raise(half);
      }
      if (BESIDE && half == 1) {
        wait_products();
        release(values);
      }
      weigh_row(half);
    }
    round_weights();
    return corrections;
  }

  // Maxima of fp8 grow often, and in one row more often than in both; those of 16 bits hardly ever,
  // and two branches cost more than they save.
  __device__ void correct(const Corrections& corrections) {
    const bool is_any = corrections.of[0].is_any || corrections.of[1].is_any;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!(config::IS_FP8 ? corrections.of[half].is_any : is_any)) continue;
#pragma unroll
      for (int j = 0; j < OUTPUTS / 2; ++j) {
        output[j / 2 * 4 + half * 2 + j % 2] *= corrections.of[half].factor;
      }
    }
  }

  // The next unit that the producer hands out, or null. It stays where it is until it is given
  // back.
  __device__ const Handed* next() {
    const Handed& handed = block.handed_of(order);
    wait(block.handed_full_of(order), order / HANDED_SLOTS & 1);
    ++order;
    return one_of_warp(handed.is_unit) ? &handed : nullptr;
  }

  // Writes a unit's rows and gives it back: the last but one that was handed out, if only as the
  // end. By now the next unit's scales may be in place.
  __device__ void finish(const Handed& handed, const Ends& ends) {
    const Unit& unit = handed.unit;
    const Exponent own = config::IS_FP8 ? exponent_of(score_scale(p, unit)) : exponent;
    float factor[2];
    const PartialRows partial = handed.partials_of(unit);
    finish_rows(p, unit, partial, flat_row(unit), own, ends, factor);
    const u32 warp = (threadIdx.x - u32(config::WARPGROUP)) / WARP;
    if (config::HAS_PARTS && partial.are_used) {
      write_part(p, unit, partial, flat_row(unit), factor, output);
    } else {
      write_rows(p, unit, unit.first + i32(warp * WARP_ROWS), factor,
                 block.panels + warp * PANEL_BYTES, output);
    }
    has_output = false;
    ptx::mbarrier_arrive(block.handed_empty_of(order - 2));
  }

  __device__ static i32 tiles_of(const Handed& handed) { return one_of_warp(key_tiles(handed)); }

  // The first key of the n-th tile of the unit that was handed out last, and whether the block mask
  // cuts it.
  __device__ i32 met(const Handed& handed, i32 n) const {
    return one_of_warp(met_tile(handed, block.visits_of(order - 1), n));
  }
  __device__ bool is_cut(i32 n) const {
    return config::IS_BLOCKED && one_of_warp(block.visits_of(order - 1)[n].is_cut());
  }

  // The tile that this consumer begins the unit with, which was handed out last: the first one, or
  // the second where the band hides all of the first from its rows. The keys of what is left out
  // are given back unseen at its turn, which is passed on, and its values must be at the next one:
  // with a turn, all others have given the one before, and so what they had in the same stage.
  // `count`: the first tile.
  __device__ i32 start_of(const Handed& handed, u32 count) {
    const Unit& unit = handed.unit;
    const i32 flat = unit.first + i32(consumer) * config::CONSUMER_ROWS;
    const i32 top = row_of(p, unit, flat).position;
    const i32 last = row_of(p, unit, flat + config::CONSUMER_ROWS - 1).position;
    const i32 bottom = min_of(last, unit.bottom);
    const i32 lo = unit.band.lo(bottom);
    seen = {one_of_warp(config::HAS_PARTS ? max_of(lo, unit.keys.lo) : lo),
            one_of_warp(min_of(unit.band.hi(top), unit.keys.hi))};
    const i32 end = one_of_warp(unit.band.hi(bottom));
    if (end > met(handed, 0) || tiles_of(handed) < 2) return 0;
    take_turn();
    release(block.keys.empty_of(count));
    give_turn();
    return 1;
  }

  // The first tile of a unit that joins no other: its scores, with no products beside them. The
  // answer is its number.
  __device__ i32 begin(const Handed& handed) {
    const Unit& unit = handed.unit;
    const i32 start = start_of(handed, taken);
    taken += u32(start);
    const i32 first = met(handed, start);
    block.queries.wait_full(units);
    block.keys.wait_full(taken);
    take_turn();
    if (start > 0) release(block.values.empty_of(taken - 1));
    multiply_keys(taken);
    give_turn();
    ptx::wgmma_wait_group<0>();
    release(block.keys.empty_of(taken));
    scale_of(unit);
    settle(unit, seen, first, is_cut(start));
    weigh<true, false>(0);
    clear_past(unit, first, taken);
    return start;
  }

  // Scores of tile `next` of keys beside the values of this one. The unit of the keys is the
  // present one.
  __device__ void start_both(u32 next) {
    block.keys.wait_full(next);
    take_turn();
    multiply_keys(next);
    block.values.wait_full(taken);
    multiply_values(taken);
    give_turn();
    ptx::wgmma_wait_group<1>();
    release(block.keys.empty_of(next));
  }

  // The tiles of a unit after `start`, to the first keys; the scores of `start` are weights
  // already. Leaves the values of the first keys to be met.
  __device__ void attend(const Handed& handed, i32 start) {
    const Unit& unit = handed.unit;
    i32 first = met(handed, start);
    const i32 tiles = tiles_of(handed);
#pragma unroll 1
    for (i32 n = start + 1; n < tiles; ++n, ++taken) {
      start_both(taken + 1);
      if constexpr (config::IS_BLOCKED) {
        first = met(handed, n);
      } else {
        first -= config::BLOCK_N;
      }
      settle(unit, seen, first, is_cut(n));
      correct(weigh<false, true>(block.values.empty_of(taken)));
    }
    release(block.queries.empty_of(units));
    ++units;
    clear_before(unit, first, taken);
  }

  // From the last values of a unit to the first scores of the next one, which run beside them, so
  // that the boundary between units is as busy as their middle. The answer is the number of the
  // next unit's tile.
  __device__ i32 join(const Handed& handed, const Handed& following) {
    const Unit& next = following.unit;
    const i32 start = start_of(following, taken + 1);
    const i32 first = met(following, start);
    block.queries.wait_full(units);
    start_both(taken + 1 + u32(start));
    if (start > 0) release(block.values.empty_of(taken + 1));
    settle(next, seen, first, is_cut(start));
    const Ends ends = {{max[0], max[1]}, {sum[0], sum[1]}};
    scale_of(next);
    weigh<true, true>(block.values.empty_of(taken));
    finish(handed, ends);
    taken += 1 + u32(start);
    clear_past(next, first, taken);
    return start;
  }

  // The last values of a unit that no other one joins.
  __device__ void end(const Handed& handed) {
    block.values.wait_full(taken);
    multiply_values(taken);
    ptx::wgmma_wait_group<0>();
    release(block.values.empty_of(taken));
    ++taken;
    finish(handed, {{max[0], max[1]}, {sum[0], sum[1]}});
  }

  // Whether any row of this consumer is written.
  __device__ bool has_rows(const Unit& unit) const {
    return one_of_warp(unit.first + i32(consumer) * config::CONSUMER_ROWS <
                       flat_rows(p, unit.rows));
  }

  // A unit of which this consumer has no row, after one that has ended: gives its tiles back as
  // they land, and passes its turns on.
  __device__ void pass(const Handed& handed) {
    const i32 tiles = tiles_of(handed);
    block.queries.wait_full(units);
#pragma unroll 1
    for (i32 n = 0; n < tiles; ++n, ++taken) {
      block.keys.wait_full(taken);
      take_turn();
      give_turn();
      release(block.keys.empty_of(taken));
      block.values.wait_full(taken);
      // No warp may still wait for what is given back: two phases could leave it behind.
      ptx::bar_sync(OWN_BARRIER + consumer, config::WARPGROUP);
      release(block.values.empty_of(taken));
    }
    release(block.queries.empty_of(units));
    ++units;
    ptx::mbarrier_arrive(block.handed_empty_of(order - 1));
  }

  // All units that the producer hands out.
  __device__ void run() {
    const Handed* handed = nullptr;  // the unit whose last values are to be met
    for (;;) {
      const Handed* following = next();
      const bool is_met = following != nullptr && has_rows(following->unit);
      i32 start;
      if (handed != nullptr && is_met) {
        start = join(*handed, *following);
      } else {
        if (handed != nullptr) end(*handed);
        if (following == nullptr) break;
        if (!is_met) {
          pass(*following);
          handed = nullptr;
          continue;
        }
        start = begin(*following);
      }
      attend(*following, start);
      handed = following;
    }
  }
};

}  // namespace attn
