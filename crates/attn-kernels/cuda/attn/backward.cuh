// The backward of one tile of keys: tiles of query rows stream past it.
//
// Source: T. Dao, "FlashAttention-2", arXiv:2307.08691, algorithm 2; transposed scores as in J. Shah
// et al., "FlashAttention-3", arXiv:2407.08608: S^T and dP^T leave the products as the first
// operands of dV += P^T dO and dK += dS^T Q, so that only dS goes through shared memory, for dQ +=
// dS K.
// Tensors: base/backward_params.cuh.
// Who executes: a block of config::THREADS: KEY_WARPS warps along the keys, 16 each. Where SHARERS
// is not 1, so many warps have the same keys, each a part of the query rows of S^T and dP^T and
// alternate pairs of eight columns of dK and dV; P^T goes through shared memory then, too.
// Shared memory, dynamic, bytes: K [BLOCK_N, HEAD_DIM] x 2, V [BLOCK_N, VALUE_DIM] x 2, STAGES x
// Stage::BYTES, dS^T [BLOCK_N, BLOCK_M] x 2, with sharers P^T the same. Static: the unit.
// What it does not do: dQ's scale and rounding (kernel/backward_finish.cu).

#pragma once

#include "attn/backward_score.cuh"
#include "attn/backward_stage.cuh"
#include "attn/backward_unit.cuh"
#include "attn/dropout.cuh"
#include "attn/turns.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/half.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"

namespace attn {

namespace backward {

using namespace config;

using KTile = tile::Panels<BLOCK_N, HEAD_DIM>;
using VTile = tile::Panels<BLOCK_N, VALUE_DIM>;
using Pairs16 = tile::Panels<BLOCK_N, BLOCK_M>;  // P^T or dS^T

constexpr u32 V_AT = KTile::BYTES;
constexpr u32 STAGES_AT = V_AT + VTile::BYTES;
constexpr u32 D_S_AT = STAGES_AT + STAGES * Stage::BYTES;
constexpr u32 P_AT = D_S_AT + Pairs16::BYTES;

constexpr int WARP_ROWS = BLOCK_M / SHARERS;  // query rows of a warp's part of S^T
constexpr int ROW_OCTETS = WARP_ROWS / 8;
// Pairs of eight columns of a warp's part of dK and dV, and of dQ.
constexpr int KEY_PAIRS = HEAD_DIM / 16 / SHARERS;
constexpr int VALUE_PAIRS = VALUE_DIM / 16 / SHARERS;
constexpr int ROW_WARPS = BLOCK_M / 16;
constexpr int COLUMN_WARPS = WARPS / ROW_WARPS;
constexpr int QUERY_PAIRS = (HEAD_DIM / 16 + COLUMN_WARPS - 1) / COLUMN_WARPS;

using Products = float[ROW_OCTETS][4];
// Of 16 keys and 16 query rows: the first operand of a product that sums over the rows.
using Operands = u32[ROW_OCTETS / 2][4];

static_assert(ROW_OCTETS % 2 == 0);

// d += a b for the call's type.
__device__ inline void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (DTYPE == DType::bf16) {
    ptx::mma_m16n8k16_f32_bf16(d, a, b0, b1);
  } else {
    ptx::mma_m16n8k16_f32_f16(d, a, b0, b1);
  }
}

__device__ inline u32 round_pair(float lo, float hi) {
  return DTYPE == DType::bf16 ? ptx::cvt_rn_bf16x2_f32(lo, hi) : ptx::cvt_rn_f16x2_f32(lo, hi);
}

// Where a warp is in the block.
struct WarpPlace {
  int lane;
  int keys;    // first key of its 16, in the tile
  int sharer;  // of its keys
  int rows;    // first query row of its part of S^T, in the tile

  __device__ WarpPlace()
      : lane(threadIdx.x % WARP),
        keys(threadIdx.x / WARP % KEY_WARPS * 16),
        sharer(threadIdx.x / WARP / KEY_WARPS),
        rows(sharer * WARP_ROWS) {}
};

// S^T = A B^T over the columns of both: 16 keys of the tile `keys` with WARP_ROWS rows of `rows`.
template <int DIM>
__device__ void multiply_rows(Products& s, const WarpPlace& at, u32 keys, u32 rows) {
  using A = tile::Panels<BLOCK_N, DIM>;
  using B = tile::Panels<BLOCK_M, DIM>;
  const u32 a_at = keys + A::offset(at.keys + at.lane % 16, at.lane / 16);
  const u32 b_at = rows + B::offset(at.rows + at.lane % 8 + at.lane / 16 * 8, at.lane / 8 % 2);
#pragma unroll
  for (int j = 0; j < ROW_OCTETS; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[j][e] = 0.0f;
  }
#pragma unroll
  for (int step = 0; step < DIM / 16; ++step) {
    u32 a[4];
    ptx::ldmatrix_x4(a, A::step(a_at, 0, step * 2));
#pragma unroll
    for (int j = 0; j < ROW_OCTETS; j += 2) {
      u32 b[4];
      ptx::ldmatrix_x4(b, B::step(b_at, j * 8, step * 2));
      multiply(s[j], a, b[0], b[1]);
      multiply(s[j + 1], a, b[2], b[3]);
    }
  }
}

// D += A B over the query rows of the tile: A are P^T or dS^T of the warp's keys, in registers or,
// with sharers, at `pairs`; B are `rows`, of which the warp has alternate pairs of octets of
// columns.
template <int DIM, int PAIRS>
__device__ void add_rows(float (&d)[PAIRS * 2][4], const Operands& operands, const WarpPlace& at,
                         u32 pairs, u32 rows) {
  using B = tile::Panels<BLOCK_M, DIM>;
  const u32 b_at = rows + B::offset(at.lane % 16, at.sharer * 2 + at.lane / 16);
  const u32 a_at = pairs + Pairs16::offset(at.keys + at.lane % 16, at.lane / 16);
#pragma unroll
  for (int step = 0; step < BLOCK_M / 16; ++step) {
    u32 a[4];
    if constexpr (SHARERS == 1) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[i] = operands[step][i];
    } else {
      ptx::ldmatrix_x4(a, Pairs16::step(a_at, 0, step * 2));
    }
#pragma unroll
    for (int j = 0; j < PAIRS; ++j) {
      u32 b[4];
      ptx::ldmatrix_x4_trans(b, B::step(b_at, step * 16, j * 2 * SHARERS));
      multiply(d[j * 2], a, b[0], b[1]);
      multiply(d[j * 2 + 1], a, b[2], b[3]);
    }
  }
}

// Leaves P^T or dS^T of the warp where all can read it.
__device__ inline void store_pairs(const Operands& operands, const WarpPlace& at, u32 pairs) {
  const int row = at.keys + at.lane / 4;
#pragma unroll
  for (int step = 0; step < ROW_OCTETS / 2; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 to = pairs + Pairs16::offset(row + i % 2 * 8, at.rows / 8 + step * 2 + i / 2);
      ptx::st_shared_b32(to + at.lane % 4 * 4, operands[step][i]);
    }
  }
}

// Bit 2 j + e: dropout keeps the lane's pair of row e of its two of octet j of two, and of its key
// of an octet of keys that starts at `key`, a multiple of four. `row`: the first one of octet 0.
//
// A call of the generator makes the words of four keys of a row; of the four lanes that hold these
// keys and the same four rows each draws for one row.
__device__ inline u32 draw(const Dropout& dropout, const BackwardUnit& unit, i32 head, i32 row,
                           i32 key) {
  const u32 lane = threadIdx.x % WARP;
  const u32 own = lane / 4 % 4;
  const Words words = dropout.words(unit.sequence.index, head, row + i32(own / 2 * 8 + own % 2),
                                    key / 4 + i32(lane / 16));
  u32 drawn = 0;
#pragma unroll
  for (int n = 0; n < 4; ++n) drawn |= u32(dropout.keeps(words.word[n])) << n;
  u32 kept = 0;
#pragma unroll
  for (u32 n = 0; n < 4; ++n) {
    kept |= (__shfl_sync(~0u, drawn, (lane & ~12u) | n << 2) >> own & 1) << n;
  }
  return kept;
}

// Weights and gradients of the warp's pairs of a tile, rounded to the call's type.
__device__ inline void weigh(const BackwardParams& p, const BackwardUnit& unit,
                             const BackwardTile& tile, const WarpPlace& at,
                             const Dropout& dropout, const Products& s,
                             const Products& d_p, const float* numbers, Operands& weights,
                             Operands& d_s) {
  const float factor = p.call.scale * LOG2E;
  const i32 key = unit.first + at.keys + at.lane / 4;
  const int own = at.rows + at.lane % 4 * 2;
#pragma unroll
  for (int step = 0; step < ROW_OCTETS / 2; ++step) {
    u32 kept[2] = {~0u, ~0u};
    if (IS_GENERAL && p.call.seed != nullptr) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        kept[half] = draw(dropout, unit, tile.head, tile.first + own + step * 16,
                          unit.first + at.keys + half * 8);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // As the products' elements become those of an operand: keys and that plus 8, then rows.
      const int j = step * 2 + i / 2;
      const int half = i % 2;
      const float2 lse2 = *reinterpret_cast<const float2*>(numbers + own + j * 8);
      const float2 delta = *reinterpret_cast<const float2*>(numbers + BLOCK_M + own + j * 8);
      PairGradient pair[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float row_lse2 = e == 0 ? lse2.x : lse2.y;
        const float row_delta = e == 0 ? delta.x : delta.y;
        const float score = s[j][half * 2 + e];
        const float d = d_p[j][half * 2 + e];
        const i32 row = tile.first + own + j * 8 + e;
        if constexpr (IS_GENERAL) {
          const float share = kept[half] >> (i / 2 * 2 + e) & 1 ? p.call.keep_factor : 0.0f;
          pair[e] = general_pair(p, unit, tile.head, row, key + half * 8, score, d, row_lse2,
                                 row_delta, share);
        } else {
          pair[e] = plain_pair(score, d, row_lse2, row_delta, factor);
          if (tile.is_edge && !is_in_band(unit, row, key + half * 8)) pair[e] = {};
        }
      }
      weights[step][i] = round_pair(pair[0].weight, pair[1].weight);
      d_s[step][i] = round_pair(pair[0].d_s, pair[1].d_s);
    }
  }
}

// Two ones of the call's type.
constexpr u32 ONES = DTYPE == DType::bf16 ? 0x3F803F80u : 0x3C003C00u;

// Adds dS K of the tile to the sums of dQ, and the sum of dS over its keys to those of the rows.
__device__ inline void add_queries(const BackwardParams& p, i64 padded, i32 head, u32 keys,
                                   u32 d_s) {
  const int lane = threadIdx.x % WARP;
  const int warp = threadIdx.x / WARP;
  const int rows = warp % ROW_WARPS;
  const int column_warp = warp / ROW_WARPS;
  float d[QUERY_PAIRS * 2][4] = {};
  float sums[4] = {};
  const u32 a_at = d_s + Pairs16::offset(lane % 8 + lane / 16 * 8, rows * 2 + lane / 8 % 2);
  const u32 b_at = keys + KTile::offset(lane % 16, column_warp * 2 + lane / 16);
#pragma unroll
  for (int step = 0; step < BLOCK_N / 16; ++step) {
    u32 a[4];
    ptx::ldmatrix_x4_trans(a, Pairs16::step(a_at, step * 16, 0));
    // The sum over the keys is one more column, of keys that are 1.
    if (column_warp == 0) multiply(sums, a, ONES, ONES);
#pragma unroll
    for (int j = 0; j < QUERY_PAIRS; ++j) {
      if (j * COLUMN_WARPS + column_warp >= HEAD_DIM / 16) break;
      u32 b[4];
      ptx::ldmatrix_x4_trans(b, KTile::step(b_at, step * 16, j * 2 * COLUMN_WARPS));
      multiply(d[j * 2], a, b[0], b[1]);
      multiply(d[j * 2 + 1], a, b[2], b[3]);
    }
  }
  const i64 row = head * p.padded_rows + padded + rows * 16 + lane / 4;
  if (column_warp == 0 && lane % 4 == 0 && p.flags & ROW_SUMS) {
    ptx::red_global_add_f32(p.row_sums + row, sums[0]);
    ptx::red_global_add_f32(p.row_sums + row + 8, sums[2]);
  }
  float* to = p.dq_sum + row * p.dq_dim + column_warp * 16 + lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < QUERY_PAIRS; ++j) {
    if (j * COLUMN_WARPS + column_warp >= HEAD_DIM / 16) break;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float* cell = to + i / 2 * 8 * p.dq_dim + j * COLUMN_WARPS * 16 + i % 2 * 8;
      const float x = d[j * 2 + i % 2][i / 2 * 2];
      const float y = d[j * 2 + i % 2][i / 2 * 2 + 1];
      if constexpr (__CUDA_ARCH__ >= 900) {
        ptx::red_global_add_v2_f32<__CUDA_ARCH__>(cell, x, y);
      } else {
        ptx::red_global_add_f32(cell, x);
        ptx::red_global_add_f32(cell + 1, y);
      }
    }
  }
}

// Writes the warp's part of dK or dV.
template <int PAIRS>
__device__ void write_keys(const Rows& rows, const BackwardUnit& unit, const WarpPlace& at,
                           const float (&d)[PAIRS * 2][4], float scale, i32 dim) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const i32 key = unit.first + at.keys + at.lane / 4 + half * 8;
    if (key >= unit.written) continue;
    u16* to = static_cast<u16*>(rows.data) + row_offset(rows, unit.sequence.index,
                                                        unit.sequence.kv_first + key, unit.kv_head);
#pragma unroll
    for (int j = 0; j < PAIRS * 2; ++j) {
      const i32 column = (j / 2 * SHARERS + at.sharer) * 16 + j % 2 * 8 + at.lane % 4 * 2;
      if (column >= dim) continue;
      *reinterpret_cast<u32*>(to + column) =
          round_pair(d[j][half * 2] * scale, d[j][half * 2 + 1] * scale);
    }
  }
}

// The tiles of query rows that a unit meets, head by head.
struct Walk {
  i32 head;
  i32 tile;

  __device__ bool is_done(i32 head_end) const { return head >= head_end; }
};

}  // namespace backward

__device__ inline void backward_tiles(const BackwardParams& p) {
  using namespace backward;
  extern __shared__ __align__(128) u8 memory[];
  __shared__ BackwardUnit unit;
  __shared__ Dropout dropout;
  const int thread = threadIdx.x;
  ptx::griddepcontrol_wait<__CUDA_ARCH__>();
  ptx::griddepcontrol_launch_dependents<__CUDA_ARCH__>();
  if (thread < WARP) {
    u32 block = thread == 0 ? take_ticket(p) : 0;
    block = __shfl_sync(0xFFFFFFFFu, block, 0);
    const BackwardUnit own = backward_unit_of<BLOCK_M, BLOCK_N>(p, block);
    if (thread == 0) {
      unit = own;
      if (IS_GENERAL && p.call.seed != nullptr) dropout = Dropout::of(p.call);
    }
  }
  __syncthreads();
  const u32 base = tile::shared_address(memory);
  const bool is_ordered = p.flags & DETERMINISTIC;
  const bool is_sparse = IS_GENERAL && p.call.block_mask.data != nullptr;
  // None where there are no query heads.
  const i32 group = p.call.q_heads == 0 ? 0 : i32(p.call.group.value);
  const i32 head_end = (unit.kv_head + 1) * group;
  const WarpPlace at;

  // Steps to the tile of rows after `walk`, or to the first one; tiles that a block mask empties
  // are left out, but for those whose turn this block has to take.
  const auto settle = [&](Walk walk) {
    while (!walk.is_done(head_end)) {
      if (walk.tile >= unit.row_tiles_end) {
        walk = {walk.head + 1, unit.row_tile};
        continue;
      }
      if (!is_sparse || is_ordered ||
          meets_blocks<BLOCK_M>(p.call, unit, walk.head, walk.tile)) {
        break;
      }
      ++walk.tile;
    }
    return walk;
  };

  float d_k[KEY_PAIRS * 2][4] = {};
  float d_v[VALUE_PAIRS * 2][4] = {};
  const bool is_any = unit.row_tile < unit.row_tiles_end;
  Walk walk = is_any ? settle({unit.kv_head * group, unit.row_tile}) : Walk{head_end, 0};
  if (!walk.is_done(head_end)) {
    const ForwardParams& call = p.call;
    const Sequence& s = unit.sequence;
    const auto keys_of = [&](const Rows& rows) {
      return static_cast<const u16*>(rows.data) +
             row_offset(rows, s.index, s.kv_first, unit.kv_head);
    };
    copy_rows<BLOCK_N, HEAD_DIM>(base, keys_of(call.k), call.k.row, unit.first, unit.lo, unit.hi,
                                 call.head_dim);
    copy_rows<BLOCK_N, VALUE_DIM>(base + V_AT, keys_of(call.v), call.v.row, unit.first, unit.lo,
                                  unit.hi, call.value_dim);
    load_stage(p, unit, walk.head, walk.tile, base + STAGES_AT);
    ptx::cp_async_commit_group();
  }
  int stage = 0;
  u32* ended = nullptr;  // the turn of the tile before, where it is thread 0's to end
  while (!walk.is_done(head_end)) {
    const u32 here = base + STAGES_AT + stage * Stage::BYTES;
    ptx::cp_async_wait_group<0>();
    // Also: all are done with the tile before, and have added to its rows.
    if (is_ordered) ptx::fence_acq_rel_gpu();
    __syncthreads();
    if (ended != nullptr) end_turn(ended);
    const Walk next = settle({walk.head, walk.tile + 1});
    if (STAGES == 2 && !next.is_done(head_end)) {
      load_stage(p, unit, next.head, next.tile, base + STAGES_AT + (stage ^ 1) * Stage::BYTES);
      ptx::cp_async_commit_group();
    }

    BackwardTile tile;
    tile.head = walk.head;
    tile.first = walk.tile * BLOCK_M;
    const i32 bottom = unit.bottom<BLOCK_M>(walk.tile);
    // Rows past the sequence weigh nothing by their log-sum-exp.
    tile.is_edge = unit.first < max_of(unit.band.lo(bottom), unit.lo) ||
                   unit.first + BLOCK_N > min_of(unit.band.hi(tile.first), unit.hi);
    Operands weights;
    Operands d_s;
    {
      Products s;
      Products d_p;
      multiply_rows<VALUE_DIM>(d_p, at, base + V_AT, here + Stage::D_O);
      multiply_rows<HEAD_DIM>(s, at, base, here);
      const u8* numbers = memory + STAGES_AT + stage * Stage::BYTES + Stage::LSE2;
      weigh(p, unit, tile, at, dropout, s, d_p, reinterpret_cast<const float*>(numbers), weights, d_s);
    }
    store_pairs(d_s, at, base + D_S_AT);
    if constexpr (SHARERS == 1) {
      add_rows<VALUE_DIM, VALUE_PAIRS>(d_v, weights, at, 0, here + Stage::D_O);
    } else {
      store_pairs(weights, at, base + P_AT);
    }
    const i64 padded = unit.padded + tile.first;
    if (is_ordered && thread == 0) {
      ended = turn_at(p, walk.head, padded);
      wait_turn(ended, u32(turn_of<BLOCK_M, BLOCK_N>(p, unit, walk.tile)));
    }
    __syncthreads();
    if constexpr (SHARERS != 1) {
      add_rows<VALUE_DIM, VALUE_PAIRS>(d_v, weights, at, base + P_AT, here + Stage::D_O);
    }
    add_rows<HEAD_DIM, KEY_PAIRS>(d_k, d_s, at, base + D_S_AT, here);
    if (STAGES == 1 && !next.is_done(head_end)) {
      // All are done with the only stage.
      __syncthreads();
      load_stage(p, unit, next.head, next.tile, here);
      ptx::cp_async_commit_group();
    }
    add_queries(p, padded, walk.head, base, base + D_S_AT);
    walk = next;
    if constexpr (STAGES == 2) stage ^= 1;
  }
  if (is_ordered) {
    ptx::fence_acq_rel_gpu();
    __syncthreads();
    if (ended != nullptr) end_turn(ended);
  }
  write_keys<KEY_PAIRS>(p.dk, unit, at, d_k, p.call.scale, p.call.head_dim);
  write_keys<VALUE_PAIRS>(p.dv, unit, at, d_v, 1.0f, p.call.value_dim);
}

}  // namespace attn
