// The forward pass of one unit: tiles of keys stream past a tile of queries.
//
// Source: T. Dao, "FlashAttention-2", arXiv:2307.08691, algorithm 1; split-KV as in T. Dao et al.,
// "Flash-Decoding", 2023.
// Tensors: base/params.cuh.
// Who executes: a block of config::THREADS; its teams take turns at tiles of keys.
// Shared memory, dynamic, bytes: queries [BLOCK_M, HEAD_DIM] x 2, then TEAMS rings of TEAM_BYTES
// (attn/stage.cuh); the output reuses all of it (attn/output.cuh); behind it what a cluster
// exchanges (attn/exchange.cuh). Static: what the block's threads know alike, and in the general
// instance the visits (attn/visit.cuh). What it does not do: choose sizes (the host does).

#pragma once

#include "attn/append.cuh"
#include "attn/drop_tile.cuh"
#include "attn/exchange.cuh"
#include "attn/hide.cuh"
#include "attn/merge.cuh"
#include "attn/near.cuh"
#include "attn/output.cuh"
#include "attn/rows.cuh"
#include "attn/softmax.cuh"
#include "attn/stage.cuh"
#include "attn/unit.cuh"
#include "attn/visit.cuh"
#include "ptx/barrier.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/special.cuh"

namespace attn {

namespace team {

// The threads of the calling thread's team meet.
__device__ inline void sync() {
  using namespace config;
  if constexpr (TEAMS == 1) {
    __syncthreads();
  } else if constexpr (TEAM_WARPS == 1) {
    __syncwarp();
  } else {
    ptx::bar_sync(1 + threadIdx.x / TEAM_THREADS, TEAM_THREADS);
  }
}

}  // namespace team

// How the keys of a unit are divided among blocks.
enum class Division {
  none,
  parts,     // joined by the block that ends last
  clusters,  // parts that are neighbours may share a cluster, which joins them
};

template <Division DIVISION>
__device__ void forward(const ForwardParams& p) {
  using namespace config;
  constexpr bool HAS_PARTS = DIVISION != Division::none;
  constexpr bool CAN_EXCHANGE = DIVISION == Division::clusters;
  // A team that is alone does not leave its rows where they can be sent.
  static_assert(!CAN_EXCHANGE || TEAMS > 1);
  static_assert(HEAD_DIM <= 256 && VALUE_DIM <= 256);
  extern __shared__ __align__(128) u8 memory[];
  __shared__ Visits visits;
  // What all threads know alike lives here: accumulators leave few registers.
  __shared__ Unit unit;
  __shared__ KeyRows<IS_PAGED, size_of(KV_DTYPE)> keys;

  __shared__ i64 partial_first;  // partial_starts of the sequence
  [[maybe_unused]] __shared__ Dropout dropout;

  const i32 thread = i32(threadIdx.x);
  if (thread < WARP) {
    // Of parameters and of tables that a copy wrote, which no launch overlaps with: these are there
    // before the launch before this one has ended.
    const Unit own = unit_of<BLOCK_M, CAN_EXCHANGE>(p, blockIdx.x);
    if (thread == 0) {
      unit = own;
      keys = KeyRows<IS_PAGED, size_of(KV_DTYPE)>(p, own.sequence, own.kv_head);
    }
  }
  __syncthreads();
  // Blocks that come later have nothing to wait for.
  if (__CUDA_ARCH__ >= 900 && HAS_PARTS && blockIdx.x < ptx::nsmid() * MIN_BLOCKS) {
    bring_near(p, unit, keys);
  }
  ptx::griddepcontrol_wait<__CUDA_ARCH__>();
  ptx::griddepcontrol_launch_dependents<__CUDA_ARCH__>();
  if constexpr (HAS_PARTS && IS_PAGED && !IS_FP8) {
    if (p.k_new.data != nullptr && append_rows(p, unit, keys)) __syncthreads();
  }
  // A kernel before this one may have written them.
  if constexpr (HAS_DROPOUT) {
    if (thread == 0) dropout = Dropout::of(p);
  }
  const i32 team = thread / TEAM_THREADS;
  const i32 warp = thread % TEAM_THREADS / WARP;
  const u32 queries = tile::shared_address(memory);
  const u32 ring = queries + tile::Panels<BLOCK_M, HEAD_DIM>::BYTES + u32(team) * TEAM_BYTES;
  const float k_scale =
      IS_FP8 ? per_head(p.k_scale, unit.sequence.index, unit.kv_head, 1.0f) : 1.0f;
  // Of the output: what is left of the weights is multiplied there, once.
  const float v_scale =
      (IS_FP8 ? per_head(p.v_scale, unit.sequence.index, unit.kv_head, 1.0f) : 1.0f) *
      (HAS_DROPOUT ? p.keep_factor : 1.0f);
  // The plain instance's scale is positive, which the host sees to.
  const float scale = p.scale * k_scale;
  const Exponent exponent{IS_GENERAL ? Units{1.0f, LOG2E} : Units{scale, scale * LOG2E}};

  load_queries(p, unit, queries);
  if (HAS_PARTS && thread == 0 && unit.parts > 1) {
    ptx::cp_async_ca_8(tile::shared_address(&partial_first),
                       p.partial_starts + unit.sequence.index);
  }
  ptx::cp_async_commit_group();

  // Options that say something of each pair of a row and a key.
  const bool has_pairs =
      p.bias.data != nullptr || p.mask.data != nullptr || p.alibi.data != nullptr;
  const bool is_sparse = IS_GENERAL && p.block_mask.data != nullptr;
  if (is_sparse) {
    visits.fill(p, unit, ceil_div(unit.keys.hi - unit.keys.lo, BLOCK_N));
    __syncthreads();
  }
  // The first key of the visited tile that is `skip` visited tiles on from the tile at `first`,
  // itself visited where skip is not 0; past the keys where there is none.
  const auto visit = [&](i32 first, i32 skip) {
    if (!is_sparse) return first + skip * BLOCK_N;
    const i32 tiles = ceil_div(unit.keys.hi - unit.keys.lo, BLOCK_N);
    i32 tile = visits.next((first - unit.keys.lo) / BLOCK_N, tiles);
    for (; skip > 0; --skip) tile = visits.next(tile + 1, tiles);
    return unit.keys.lo + tile * BLOCK_N;
  };

  i32 first = visit(unit.keys.lo, team);
  i32 ahead = first;
  Entry entry;
  entry.read(p, keys, ahead, unit.keys.hi);
#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    if (ahead < unit.keys.hi) {
      load_stage(p, keys, entry, ring, stage, ahead, unit.keys.hi);
      ahead = visit(ahead, TEAMS);
      entry.read(p, keys, ahead, unit.keys.hi);
    }
    ptx::cp_async_commit_group();
  }
  const Exchange exchange(p, unit, queries);
  if (CAN_EXCHANGE && exchange.is_any()) exchange.begin();
  ptx::cp_async_wait_group<STAGES - 1>();
  __syncthreads();
  const warp::Queries q(queries, u32(warp));

  warp::Softmax softmax;
  warp::Accumulator o = {};
  int stage = 0;
  while (first < unit.keys.hi) {
    ptx::cp_async_wait_group<STAGES - 2>();
    team::sync();
    if constexpr (IS_FP8) {
      widen_stage(ring, stage);
      team::sync();
    }
    // The stage that the barrier showed to be consumed.
    if constexpr (!IS_GENERAL) ahead = first + (STAGES - 1) * TEAMS * BLOCK_N;
    if (ahead < unit.keys.hi) {
      const int free = stage == 0 ? STAGES - 1 : stage - 1;
      load_stage(p, keys, entry, ring, free, ahead, unit.keys.hi);
      ahead = visit(ahead, TEAMS);
      entry.read(p, keys, ahead, unit.keys.hi);
    }
    ptx::cp_async_commit_group();

    const u32 tile = tile_of(ring, stage);
    warp::Scores s;
    warp::score(s, q, tile);
    // Whether band, part or length hide some key of the tile from some row.
    const bool is_edge =
        first < unit.full.lo || first + BLOCK_N > min_of(unit.full.hi, unit.keys.hi);
    if constexpr (IS_GENERAL) {
      warp::scale_scores(s, p, scale);
      const bool is_cut = is_sparse && !visits.is_whole((first - unit.keys.lo) / BLOCK_N);
      if (has_pairs || is_cut) {
        warp::apply_options(s, p, unit, warp, first, is_cut);
      } else if (is_edge) {
        warp::hide_outside(s, p, unit, warp, first);
      }
    } else if (is_edge) {
      warp::hide_outside(s, p, unit, warp, first);
    }
    softmax.push(s, o, exponent);
    // The denominator has every weight, dropped or not.
    if constexpr (HAS_DROPOUT) warp::drop(s, dropout, p, unit, warp, first);
    warp::accumulate(o, s, tile + KTile::BYTES);

    first = visit(first, TEAMS);
    stage = stage == STAGES - 1 ? 0 : stage + 1;
  }
  __syncthreads();
  const bool is_exchanged = CAN_EXCHANGE && exchange.is_any();
  const i32 blocks = is_exchanged ? i32(exchange.blocks) : 1;
  const i32 results = CAN_EXCHANGE ? unit.parts / blocks : unit.parts;
  const i32 result = CAN_EXCHANGE ? unit.part / blocks : unit.part;
  const i64 first_result = HAS_PARTS && unit.parts > 1 ? partial_first : 0;
  const PartialRows partial = {results > 1, first_result, result, unit.rows};
  if constexpr (TEAMS == 1) {
    write_alone(p, unit, partial, warp, softmax, o, exponent, v_scale, queries);
  } else {
    if (is_exchanged) exchange.wait_begun();
    write_together(p, unit, team, warp, softmax, o, exponent, v_scale,
                   reinterpret_cast<float*>(memory),
                   [&](i32 row, i32 column, i32 position, i32 head, const float4& x, float lse) {
                     if (is_exchanged) {
                       const bool is_row = position < unit.sequence.q_len;
                       exchange.send(row, column, is_row ? x : float4{}, is_row ? lse : NEG_INF);
                       return;
                     }
                     write_columns(p, unit, partial, position, head, column, x);
                     if (column == 0) write_lse(p, unit, partial, position, head, lse);
                   });
  }
  if (is_exchanged) {
    exchange.join(p, unit, partial);
    if (results > 1) exchange.join_clusters(p, unit, partial_first, results);
  } else if (HAS_PARTS && results > 1) {
    end_part(p, unit, partial_first);
  }
}

}  // namespace attn
