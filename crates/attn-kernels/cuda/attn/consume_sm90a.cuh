// A consumer of a Hopper block: a warpgroup with 64 query rows that takes the tiles of keys as they land.
//
// Source: J. Shah et al., "FlashAttention-3", arXiv:2407.08608, algorithm 2: the scores of the next tile are computed
// while the weights of this one meet their values, and the softmax of one warpgroup runs while the other one's products
// do (section 3.1, by named barriers).
// Registers: scores [BLOCK_N / 2] and output [VALUE_DIM / 2] in f32, weights [BLOCK_N / 4] in pairs. Lane l of warp w has
// rows 16 w + l / 4 and 8 more; of every eight columns, 2 (l % 4) and the next.
// Who executes: all warps of a consumer, converged.
// The invariant: no register of a product that may be under way is touched; a stage is given back once, by one thread,
// when no product of the warpgroup reads it.

#pragma once

#include "attn/exponent.cuh"
#include "attn/options_sm90a.cuh"
#include "attn/produce_sm90a.cuh"
#include "attn/ring_sm90a.cuh"
#include "ptx/barrier.cuh"
#include "ptx/half.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"

namespace attn {

// Named barriers: 1 + consumer for taking turns, 1 + CONSUMERS + consumer for one warpgroup alone.
constexpr u32 TURN_BARRIER = 1;
constexpr u32 OWN_BARRIER = TURN_BARRIER + config::CONSUMERS;

// What a lane's two rows ended with.
struct Ends {
  float max[2];
  float sum[2];
};

// A value that all lanes of a warp have alike. Through a shuffle the compiler knows that they do, and keeps what follows
// from it, descriptors first of all, in uniform registers: products would wait for their way there.
__device__ inline i32 one_of_warp(i32 x) { return __shfl_sync(~0u, x, 0); }

struct Consumer {
  static constexpr int SCORES = config::BLOCK_N / 2;
  static constexpr int OUTPUTS = config::VALUE_DIM / 2;
  using Product = ptx::Wgmma<config::BLOCK_N, config::DTYPE>;
  using Sum = ptx::Wgmma<config::VALUE_DIM, config::DTYPE>;

  const ForwardParams& p;
  const Block& block;
  const u32 consumer;
  const Exponent exponent;
  // How far a maximum may stay behind: weights up to 2^8 lose nothing, and the output is rescaled once in many tiles.
  const float slack;
  u32 taken = 0;  // tiles whose values have been met
  u32 units = 0;  // tiles of queries that have been met
  u32 order = 0;  // units that were handed out

  float scores[SCORES];
  float output[OUTPUTS];
  u32 weights[SCORES / 2];
  float max[2];
  float sum[2];

  __device__ Consumer(const ForwardParams& params, const Block& memory, u32 index)
      : p(params),
        block(memory),
        consumer(index),
        exponent{config::IS_GENERAL || config::IS_CAPPED ? Units{1.0f, LOG2E}
                                    : Units{params.scale, params.scale * LOG2E}},
        slack(8.0f / exponent.units.base2) {}

  __device__ bool leads() const { return threadIdx.x % config::WARPGROUP == 0; }

  // The lane's row in the block's tile; the other one is 8 below.
  __device__ i32 row() const {
    const i32 thread = i32(threadIdx.x) % config::WARPGROUP;
    return i32(consumer) * config::CONSUMER_ROWS + thread / WARP * 16 + thread % WARP / 4;
  }

  // Waits for this warpgroup's turn at the products, and gives the turn on. With three consumers the turn goes round.
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
    for (int step = 0; step < config::HEAD_DIM / 16; ++step) {
      Product::ss(scores, a.columns<config::BLOCK_M>(step), b.columns<config::BLOCK_N>(step),
                  step != 0);
    }
    ptx::wgmma_commit_group();
  }

  // Starts O += P V on a tile of values.
  __device__ void multiply_values(u32 count) {
    const tile::Operand b =
        tile::rows_operand<config::BLOCK_N>(block.values.tile<VALUE_BYTES>(count));
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < config::BLOCK_N / 16; ++step) {
      const u32 a[4] = {weights[step * 4], weights[step * 4 + 1], weights[step * 4 + 2],
                        weights[step * 4 + 3]};
      Sum::rs(output, a, b.rows(step), 1);
    }
    ptx::wgmma_commit_group();
  }

  // Waits for all products, and not before the exponentials that are in `sum` by now: left to itself the compiler moves
  // the wait to the top of the softmax that the products should run beside. No wait moves across a side effect, and
  // this one, which needs the sum, never comes: no sum is negative.
  __device__ void wait_products() const {
    if (sum[0] < 0.0f) ptx::pmevent();
    ptx::wgmma_wait_group<0>();
  }

  __device__ void release(u32 barrier) const {
    if (leads()) ptx::mbarrier_arrive(barrier);
  }

  // Keys that all rows of a unit see, by band and length.
  __device__ static Keys seen_by_all(const Unit& unit) {
    return {unit.full.lo, min_of(unit.full.hi, unit.keys.hi)};
  }

  // Does to the scores of the tile of keys that starts at `first` what options, masks, band and length want. `is_cut`: the
  // block mask hides some of it.
  __device__ void settle(const Unit& unit, Keys all, i32 first, bool is_cut) {
    const bool is_clear = first >= all.lo && first + config::BLOCK_N <= all.hi;
    // What is hidden must not decide how the rest is computed.
    const bool is_own =
        is_clear && !is_cut && unit.bottom - unit.top == config::BLOCK_M - 1;
    if constexpr (config::IS_CAPPED) cap_scores(p, is_own, scores);
    if constexpr (config::IS_GENERAL) {
      scale_scores(p, is_own, scores);
      if (p.alibi.data != nullptr || p.bias.data != nullptr || p.mask.data != nullptr) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          apply_options(p, unit, unit.position(p, row() + half * 8), first,
                        i32(threadIdx.x) % 4 * 2, half, scores);
        }
      }
    }
    if constexpr (config::IS_BLOCKED) {
      if (is_cut) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          hide_blocks(p, unit, unit.position(p, row() + half * 8), first,
                      i32(threadIdx.x) % 4 * 2, half, scores);
        }
      }
    }
    if (is_clear) return;
    const i32 column = i32(threadIdx.x) % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Keys seen = unit.keys_at(unit.position(p, row() + half * 8));
      const i32 lo = seen.lo - first - column;
      const i32 hi = seen.hi - first - column;
#pragma unroll
      for (int j = 0; j < config::BLOCK_N / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const i32 key = j * 8 + e;
          if (key < lo || key >= hi) scores[j * 4 + half * 2 + e] = NEG_INF;
        }
      }
    }
  }

  // Clears rows lo .. hi of a tile of values, which no row of the unit sees: a weight of 0 does not hide a NaN. All
  // consumers clear the same.
  __device__ void clear_values(i32 lo, i32 hi, u32 count) {
    if (lo >= hi) return;
    block.values.wait_full(count);
    const u32 tile = block.values.tile<VALUE_BYTES>(count);
    constexpr i32 PIECES = 8;
    for (i32 piece = lo * PIECES + i32(threadIdx.x) % config::WARPGROUP; piece < hi * PIECES;
         piece += config::WARPGROUP) {
#pragma unroll
      for (int panel = 0; panel < config::VALUE_DIM / 64; ++panel) {
        ptx::st_shared_v4_b32(
            tile + panel * config::BLOCK_N * tile::PANEL_ROW_BYTES + u32(piece) * 16, Vec16{});
      }
    }
    ptx::fence_proxy_async_shared();
    ptx::bar_sync(OWN_BARRIER + consumer, config::WARPGROUP);
  }

  // What is past the sequence in a unit's last tile, and all of it where the unit has no keys.
  __device__ void clear_past(const Unit& unit, i32 first, u32 count) {
    const i32 end = unit.keys.lo < unit.keys.hi ? unit.sequence.kv_len - first : 0;
    clear_values(end, config::BLOCK_N, count);
  }

  // What is before the first key that a row sees, where tiles start with a box of a page.
  __device__ void clear_before(const Unit& unit, i32 first, u32 count) {
    if constexpr (config::IS_PAGED) {
      clear_values(0, min_of(unit.band.lo(unit.top) - first, config::BLOCK_N), count);
    }
  }

  // Starts the rows anew.
  __device__ void reset_rows() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      max[half] = NEG_INF;
      sum[half] = 0.0f;
    }
  }

  // The new maximum of one of the lane's two rows: its shift, and whether it has grown; `correction` is what the row's
  // output so far must be multiplied by.
  __device__ bool raise(int half, float& shift, float& correction) {
    float top = scores[half * 2];
#pragma unroll
    for (int j = 0; j < SCORES; j += 4) {
      top = fmaxf(top, fmaxf(scores[j + half * 2], scores[j + half * 2 + 1]));
    }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const float before = max[half];
    const bool grows = top > before + slack || before == NEG_INF;
    if (grows) max[half] = top;
    shift = exponent.shift(max[half]);
    correction = ptx::ex2_approx_ftz_f32(exponent.of_max(before, shift));
    sum[half] *= correction;
    return max[half] != before;
  }

  __device__ void weigh_row(int half, float shift) {
#pragma unroll
    for (int j = 0; j < SCORES / 2; ++j) {
      float& score = scores[j / 2 * 4 + half * 2 + j % 2];
      score = ptx::ex2_approx_ftz_f32(exponent.of(score, shift));
      sum[half] += score;
    }
  }

  // Turns scores into weights under the maxima; `correction` is what the output so far must be multiplied by, and the
  // answer whether any row of the warp needs it.
  //
  // BESIDE: products of earlier weights are under way. They end, and give `values` back, when one row's exponentials
  // have been started, so that the other's may be rounded into the registers that those weights leave.
  template <bool BESIDE>
  __device__ bool weigh(float (&correction)[2], u32 values) {
    float shift[2];
    bool has_grown = raise(0, shift[0], correction[0]);
    weigh_row(0, shift[0]);
    has_grown |= raise(1, shift[1], correction[1]);
    if constexpr (BESIDE) {
      wait_products();
      release(values);
    }
    weigh_row(1, shift[1]);
    round_weights();
    return __any_sync(~0u, has_grown);
  }

  __device__ void round_weights() {
#pragma unroll
    for (int j = 0; j < SCORES / 2; ++j) {
      weights[j] = config::DTYPE == DType::bf16
                       ? ptx::cvt_rn_bf16x2_f32(scores[j * 2], scores[j * 2 + 1])
                       : ptx::cvt_rn_f16x2_f32(scores[j * 2], scores[j * 2 + 1]);
    }
  }

  __device__ void clear_output() {
#pragma unroll
    for (int j = 0; j < OUTPUTS; ++j) output[j] = 0.0f;
  }

  __device__ void rescale(const float (&correction)[2]) {
#pragma unroll
    for (int j = 0; j < OUTPUTS; ++j) output[j] *= correction[j / 2 % 2];
  }

  // The next unit that the producer hands out, or null. It stays where it is until it is given back.
  __device__ const Handed* next() {
    const Handed& handed = block.handed_of(order);
    wait(block.handed_full_of(order), order / HANDED_SLOTS & 1);
    ++order;
    return one_of_warp(handed.is_unit) ? &handed : nullptr;
  }

  // Writes a unit's rows and gives it back: the last but one that was handed out, if only as the end.
  __device__ void finish(const Unit& unit, const Ends& ends) const {
    write(unit, ends);
    ptx::mbarrier_arrive(block.handed_empty_of(order - 2));
  }

  __device__ static i32 tiles_of(const Handed& handed) { return one_of_warp(key_tiles(handed)); }

  // The first key of the n-th tile of the unit that was handed out last, and whether the block mask cuts it.
  __device__ i32 met(const Handed& handed, i32 n) const {
    return one_of_warp(met_tile(handed, block.visits_of(order - 1), n));
  }
  __device__ bool is_cut(i32 n) const {
    return config::IS_BLOCKED && one_of_warp(block.visits_of(order - 1)[n].is_cut());
  }

  // The first tile of a unit that follows nothing: its scores, with no products beside them.
  __device__ void begin(const Handed& handed) {
    const Unit& unit = handed.unit;
    const i32 first = met(handed, 0);
    block.queries.wait_full(units);
    block.keys.wait_full(taken);
    take_turn();
    multiply_keys(taken);
    give_turn();
    ptx::wgmma_wait_group<0>();
    release(block.keys.empty_of(taken));
    settle(unit, seen_by_all(unit), first, is_cut(0));
    float correction[2];
    weigh<false>(correction, 0);
    clear_past(unit, first, taken);
  }

  // Scores of the next tile of keys beside the values of this one. The unit of the keys is the present one.
  __device__ void start_both() {
    block.keys.wait_full(taken + 1);
    take_turn();
    multiply_keys(taken + 1);
    block.values.wait_full(taken);
    multiply_values(taken);
    give_turn();
    ptx::wgmma_wait_group<1>();
    release(block.keys.empty_of(taken + 1));
  }

  // The tiles of a unit, from the last to the first; the scores of the last one are weights already. Leaves the values
  // of the first one to be met.
  __device__ void attend(const Handed& handed) {
    const Unit& unit = handed.unit;
    float correction[2];
    i32 first = met(handed, 0);
    const Keys all = seen_by_all(unit);
    const i32 tiles = tiles_of(handed);
#pragma unroll 1
    for (i32 n = 1; n < tiles; ++n, ++taken) {
      start_both();
      if constexpr (config::IS_BLOCKED) {
        first = met(handed, n);
      } else {
        first -= config::BLOCK_N;
      }
      settle(unit, all, first, is_cut(n));
      if (weigh<true>(correction, block.values.empty_of(taken))) rescale(correction);
    }
    release(block.queries.empty_of(units));
    ++units;
    clear_before(unit, first, taken);
  }

  // From the last values of a unit to the first scores of the next one, which run beside them, so that the boundary
  // between units is as busy as their middle.
  __device__ void join(const Handed& handed, const Handed& following) {
    const Unit& next = following.unit;
    const i32 first = met(following, 0);
    block.queries.wait_full(units);
    start_both();
    settle(next, seen_by_all(next), first, is_cut(0));
    const Ends ends{{max[0], max[1]}, {sum[0], sum[1]}};
    reset_rows();
    float correction[2];
    weigh<true>(correction, block.values.empty_of(taken));
    finish(handed.unit, ends);
    clear_output();
    ++taken;
    clear_past(next, first, taken);
  }

  // The last values of the last unit.
  __device__ void end(const Unit& unit) {
    block.values.wait_full(taken);
    multiply_values(taken);
    ptx::wgmma_wait_group<0>();
    release(block.values.empty_of(taken));
    ++taken;
    finish(unit, {{max[0], max[1]}, {sum[0], sum[1]}});
  }

  // All units that the producer hands out; a block has one at least.
  __device__ void run() {
    const Handed* handed = next();
    clear_output();
    reset_rows();
    begin(*handed);
    for (;;) {
      attend(*handed);
      const Handed* following = next();
      if (following == nullptr) break;
      join(*handed, *following);
      handed = following;
    }
    end(handed->unit);
  }

  // Divides the rows and writes them, padding included.
  __device__ void write(const Unit& unit, const Ends& ends) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i32 position = unit.position(p, row() + half * 8);
      const i32 head = unit.head;
      float total = ends.sum[half];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      const bool is_row = position < unit.sequence.q_len;
      const float sink = is_row ? sink_of(p, unit, head) : NEG_INF;
      const RowResult result = finish_row(ends.max[half], total, exponent, sink);
      const bool is_written = position < unit.rows;
      if (is_written && threadIdx.x % 4 == 0 && p.lse.data != nullptr) {
        static_cast<float*>(p.lse.data)[query_offset(p.lse, unit.sequence, position, head)] =
            is_row ? result.lse : NEG_INF;
      }
      u16* to = static_cast<u16*>(p.o.data) + query_offset(p.o, unit.sequence, position, head);
#pragma unroll
      for (int group = 0; group < config::VALUE_DIM / 32; ++group) {
        u32 pairs[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = (group * 4 + j) * 4 + half * 2;
          const float lo = output[at] * result.factor;
          const float hi = output[at + 1] * result.factor;
          pairs[j] = !is_row ? 0
                     : config::DTYPE == DType::bf16 ? ptx::cvt_rn_bf16x2_f32(lo, hi)
                                                    : ptx::cvt_rn_f16x2_f32(lo, hi);
        }
        const i32 column = (group * 4 + i32(threadIdx.x) % 4) * 8;
        const Vec16 piece = exchange(pairs);
        if (is_written && column < p.value_dim) *reinterpret_cast<Vec16*>(to + column) = piece;
      }
    }
  }

  // Lane l of a quad has pair l of four pieces; after it, all pairs of piece l: two steps of a transposition.
  __device__ static Vec16 exchange(const u32 (&pairs)[4]) {
    const bool is_odd = threadIdx.x & 1;
    const bool is_high = threadIdx.x & 2;
    const u32 a = __shfl_xor_sync(~0u, is_odd ? pairs[0] : pairs[1], 1);
    const u32 b = __shfl_xor_sync(~0u, is_odd ? pairs[2] : pairs[3], 1);
    const u32 near[2] = {is_odd ? a : pairs[0], is_odd ? pairs[1] : a};
    const u32 far[2] = {is_odd ? b : pairs[2], is_odd ? pairs[3] : b};
    const u32 c = __shfl_xor_sync(~0u, is_high ? near[0] : far[0], 2);
    const u32 d = __shfl_xor_sync(~0u, is_high ? near[1] : far[1], 2);
    return is_high ? Vec16{{c, d, far[0], far[1]}} : Vec16{{near[0], near[1], c, d}};
  }
};

}  // namespace attn
