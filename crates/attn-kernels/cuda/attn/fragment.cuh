// The two matrix products of a warp: S = Q K^T from shared memory, and O += P V with P in
// registers.
//
// A warp holds ROW_TILES x 16 query rows; of each 16, lane l has rows l / 4 and l / 4 + 8 and, of
// every 8 columns, columns 2 (l % 4) and the next (ptx/mma.cuh). The accumulator of S is, converted
// in place, the A operand of the second product: its columns are the keys that it sums over.
// Source: T. Dao, "FlashAttention-2", arXiv:2307.08691, section 3.3: warps divide the query rows.
// Who executes: all lanes of a converged warp. Shared memory: tiles as tile/panel.cuh lays them
// out. What it does not do: wait for the tiles (attn/forward.cuh).

#pragma once

#include "base/config.cuh"
#include "ptx/half.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "tile/panel.cuh"

namespace attn::warp {

constexpr int KEY_TILES = config::BLOCK_N / 8;
constexpr int VALUE_TILES = config::VALUE_DIM / 8;

using Scores = float[config::ROW_TILES][KEY_TILES][4];
using Accumulator = float[config::ROW_TILES][VALUE_TILES][4];

// d += a b for the call's 16-bit type.
__device__ inline void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (config::Q_DTYPE == DType::bf16) {
    ptx::mma_m16n8k16_f32_bf16(d, a, b0, b1);
  } else {
    ptx::mma_m16n8k16_f32_f16(d, a, b0, b1);
  }
}

// Two f32 rounded to the call's 16-bit type.
__device__ inline u32 round_pair(float lo, float hi) {
  return config::Q_DTYPE == DType::bf16 ? ptx::cvt_rn_bf16x2_f32(lo, hi)
                                        : ptx::cvt_rn_f16x2_f32(lo, hi);
}

// Queries of a warp: kept in registers where they are few enough, else read from shared memory for
// every tile.
struct Queries {
  static constexpr int STEPS = config::HEAD_DIM / 16;
  static constexpr bool IS_KEPT = config::ROW_TILES * STEPS * 4 <= 32;
  using Tile = tile::Panels<config::BLOCK_M, config::HEAD_DIM>;

  u32 address;  // of the lane's row and its chunk of the first step
  u32 kept[IS_KEPT ? STEPS : 1][config::ROW_TILES][4];

  // `tile` has landed.
  __device__ Queries(u32 tile, u32 warp) {
    const u32 lane = threadIdx.x % WARP;
    address = tile + Tile::offset(warp * 16 * config::ROW_TILES + lane % 16, lane / 16);
    if constexpr (IS_KEPT) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) read(kept[step], step);
    }
  }

  __device__ void read(u32 (&a)[config::ROW_TILES][4], int step) const {
#pragma unroll
    for (int i = 0; i < config::ROW_TILES; ++i) {
      ptx::ldmatrix_x4(a[i], Tile::step(address, i * 16, step * 2));
    }
  }

  __device__ void get(u32 (&a)[config::ROW_TILES][4], int step) const {
    if constexpr (IS_KEPT) {
#pragma unroll
      for (int i = 0; i < config::ROW_TILES; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) a[i][j] = kept[step][i][j];
      }
    } else {
      read(a, step);
    }
  }
};

// S = Q K^T over a tile of keys.
__device__ inline void score(Scores& s, const Queries& q, u32 keys) {
  using namespace config;
  using Tile = tile::Panels<BLOCK_N, HEAD_DIM>;
  const u32 lane = threadIdx.x % WARP;
  const u32 address = keys + Tile::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
  for (int i = 0; i < ROW_TILES; ++i) {
#pragma unroll
    for (int j = 0; j < KEY_TILES; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[i][j][e] = 0.0f;
    }
  }
#pragma unroll
  for (int step = 0; step < Queries::STEPS; ++step) {
    u32 a[ROW_TILES][4];
    q.get(a, step);
#pragma unroll
    for (int j = 0; j < KEY_TILES; j += 2) {
      u32 b[4];
      ptx::ldmatrix_x4(b, Tile::step(address, j * 8, step * 2));
#pragma unroll
      for (int i = 0; i < ROW_TILES; ++i) {
        multiply(s[i][j], a[i], b[0], b[1]);
        multiply(s[i][j + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// O += P V over a tile of keys.
__device__ inline void accumulate(Accumulator& o, const Scores& p, u32 values) {
  using namespace config;
  using Tile = tile::Panels<BLOCK_N, VALUE_DIM>;
  const u32 lane = threadIdx.x % WARP;
  const u32 address = values + Tile::offset(lane % 16, lane / 16);
#pragma unroll
  for (int step = 0; step < BLOCK_N / 16; ++step) {
    u32 a[ROW_TILES][4];
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i) {
      a[i][0] = round_pair(p[i][step * 2][0], p[i][step * 2][1]);
      a[i][1] = round_pair(p[i][step * 2][2], p[i][step * 2][3]);
      a[i][2] = round_pair(p[i][step * 2 + 1][0], p[i][step * 2 + 1][1]);
      a[i][3] = round_pair(p[i][step * 2 + 1][2], p[i][step * 2 + 1][3]);
    }
#pragma unroll
    for (int j = 0; j < VALUE_TILES; j += 2) {
      u32 b[4];
      ptx::ldmatrix_x4_trans(b, Tile::step(address, step * 16, j));
#pragma unroll
      for (int i = 0; i < ROW_TILES; ++i) {
        multiply(o[i][j], a[i], b[0], b[1]);
        multiply(o[i][j + 1], a[i], b[2], b[3]);
      }
    }
  }
}

}  // namespace attn::warp
