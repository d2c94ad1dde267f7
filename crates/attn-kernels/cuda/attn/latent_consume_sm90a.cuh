// The consumers of a block over a latent cache: two warpgroups that hold the same 64 query rows and
// one half of the output's columns each.
//
// Source: J. Shah et al., "FlashAttention-3", arXiv:2407.08608, section 3, for a value that no one
// warpgroup's registers hold.
// The first consumer multiplies queries and keys, makes weights of the scores and hands them on as
// they lie in its registers: the same thread of the second one takes them up, for both hold the
// same rows. Then both multiply them with their columns of the rows that the scores came from: the
// first half of a tile's keys while the exponentials of the second half are on their way. The
// scores of the next tile are asked for behind the products of this one.
// Registers: output [OWN_COLUMNS / 2] in f32, of the first consumer also scores [BLOCK_N / 2]; lane
// l of warp w has rows 16 w + l / 4 and 8 more, and of every eight columns 2 (l % 4) and the next.
// Who executes: all warps of both consumers, converged.
// The invariant: no register of a product that may be under way is touched; a stage is given back
// by every warp once, when no product of it reads the tile.

#pragma once

#include "attn/hide.cuh"
#include "attn/latent_block_sm90a.cuh"
#include "attn/latent_softmax_sm90a.cuh"
#include "ptx/barrier.cuh"
#include "ptx/shared.cuh"
#include "ptx/wgmma.cuh"

namespace attn::latent {

using Output = float[OWN_COLUMNS / 2];
// Of two rows and a piece of a tile's keys, two to a word.
using Weights = u32[PIECE_PRODUCTS * 4];

// Starts S = Q K^T on a tile.
__device__ inline void multiply_keys(const Block& block, i32 count, warp::Scores& s) {
  using Product = ptx::Wgmma<config::BLOCK_N, config::Q_DTYPE>;
  const tile::Operand a = tile::columns_operand(block.queries);
  const tile::Operand b = tile::columns_operand(block.tile(count));
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < config::HEAD_DIM / 16; ++step) {
    Product::ss(reinterpret_cast<float (&)[config::BLOCK_N / 2]>(s),
                a.columns<config::BLOCK_M>(step), b.columns<config::BLOCK_N>(step), step != 0);
  }
  ptx::wgmma_commit_group();
}

// Starts O += P V on a consumer's columns of a piece of a tile.
__device__ inline void multiply_values(const Block& block, i32 count, int piece, u32 consumer,
                                       const Weights& weights, Output& output) {
  using Product = ptx::Wgmma<OWN_COLUMNS, config::Q_DTYPE>;
  const u32 own = consumer * (OWN_COLUMNS / PANEL_COLUMNS) * PANEL_BYTES;
  const tile::Operand b = tile::rows_operand<config::BLOCK_N>(block.tile(count) + own);
  ptx::wgmma_fence();
#pragma unroll
  for (int step = 0; step < PIECE_PRODUCTS; ++step) {
    const u32 a[4] = {weights[step * 4], weights[step * 4 + 1], weights[step * 4 + 2],
                      weights[step * 4 + 3]};
    Product::rs(output, a, b.rows(piece * PIECE_PRODUCTS + step), 1);
  }
  ptx::wgmma_commit_group();
}

// Gives a tile back; the warp's products on it have ended.
__device__ inline void release(const Block& block, i32 count) {
  if (threadIdx.x % WARP == 0) ptx::mbarrier_arrive(block.empty_of(count));
}

// Rescales what was summed, where any row of the warp has a factor.
__device__ inline void rescale(const float (&factor)[2], Output& output) {
  if (!__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) return;
#pragma unroll
  for (int j = 0; j < OWN_COLUMNS / 2; ++j) output[j] *= factor[j / 2 % 2];
}

// The words that the consumers hand over: weights, and a factor for each row.
struct Handover {
  u32 weights;    // of the thread
  float* factor;  // of the thread's first row; the other one is 8 on

  __device__ Handover(const Block& block, float* factors) {
    const u32 thread = threadIdx.x % WARPGROUP;
    weights = block.weights + thread * 16;
    factor = factors + thread / WARP * 16 + thread % WARP / 4;
  }

  // Of the words of a product a thread has 16 bytes.
  __device__ u32 at(int piece, int step) const {
    return weights + u32(piece * PIECE_PRODUCTS + step) * (WARPGROUP * 16);
  }

  __device__ void write(int piece, const Weights& own) const {
#pragma unroll
    for (int step = 0; step < PIECE_PRODUCTS; ++step) {
      ptx::st_shared_v4_b32(at(piece, step), {own[step * 4], own[step * 4 + 1], own[step * 4 + 2],
                                              own[step * 4 + 3]});
    }
  }

  __device__ void read(int piece, Weights& own) const {
#pragma unroll
    for (int step = 0; step < PIECE_PRODUCTS; ++step) {
      const Vec16 four = ptx::ld_shared_v4_b32(at(piece, step));
#pragma unroll
      for (int i = 0; i < 4; ++i) own[step * 4 + i] = four.word[i];
    }
  }

  __device__ void write_factor(const float (&own)[2]) const {
    if (threadIdx.x % 4 != 0) return;
    factor[0] = own[0];
    factor[8] = own[1];
  }

  __device__ void read_factor(float (&own)[2]) const {
    own[0] = factor[0];
    own[1] = factor[8];
  }
};

// Does to the scores of the tile of keys that starts at `first` what options, masks, band and
// length want.
__device__ inline void settle(const ForwardParams& p, const Unit& unit, i32 first,
                              warp::Scores& s) {
  using namespace config;
  const i32 warp = i32(threadIdx.x) / WARP;
  const bool is_edge = first < unit.full.lo || first + BLOCK_N > min_of(unit.full.hi, unit.keys.hi);
  if constexpr (IS_GENERAL) {
    warp::scale_scores(s, p, p.scale);
    const bool has_blocks = p.block_mask.data != nullptr;
    if (has_blocks || p.bias.data != nullptr || p.mask.data != nullptr || p.alibi.data != nullptr) {
      warp::apply_options(s, p, unit, warp, first, has_blocks);
      return;
    }
  }
  if (is_edge) warp::hide_outside(s, p, unit, warp, first);
}

// Rounds a piece of a tile's weights, hands it to the second consumer, and starts the first one's
// products.
template <int PIECE>
__device__ void hand_over(const Block& block, i32 count, const Handover& handover,
                          const warp::Scores& s, Output& output) {
  constexpr int FIRST = PIECE * warp::KEY_TILES / PIECES;
  Weights weights;
#pragma unroll
  for (int j = 0; j < PIECE_PRODUCTS * 4; ++j) {
    const float* pair = s[0][FIRST + j / 2] + j % 2 * 2;
    weights[j] = warp::round_pair(pair[0], pair[1]);
  }
  handover.write(PIECE, weights);
  ptx::mbarrier_arrive(block.written + PIECE * 8);
  multiply_values(block, count, PIECE, 0, weights, output);
}

// The first consumer: scores, weights, and its columns of the output.
__device__ inline void weigh(const ForwardParams& p, const Unit& unit, const Block& block,
                             const Handover& handover, Softmax& softmax, Output& output) {
  constexpr int TILES = warp::KEY_TILES / PIECES;
  const i32 tiles = tiles_of(unit);
  warp::Scores s;
#pragma unroll 1
  for (i32 count = 0; count < tiles; ++count) {
    block.wait_full(count);
    multiply_keys(block, count, s);
    if (count > 0) {
      ptx::wgmma_wait_group<1>();
      release(block, count - 1);
    }
    ptx::wgmma_wait_group<0>();
    settle(p, unit, unit.keys.lo + count * config::BLOCK_N, s);
    float factor[2];
    softmax.raise(s, factor);
    rescale(factor, output);
    if (count > 0) wait(block.read, u32(count - 1) & 1);
    handover.write_factor(factor);
    softmax.weigh<0, TILES>(s);
    hand_over<0>(block, count, handover, s, output);
    softmax.weigh<TILES, TILES>(s);
    hand_over<1>(block, count, handover, s, output);
  }
  ptx::wgmma_wait_group<0>();
}

// The second consumer: its columns of the output.
__device__ inline void follow(const Unit& unit, const Block& block, const Handover& handover,
                              Output& output) {
  const i32 tiles = tiles_of(unit);
#pragma unroll 1
  for (i32 count = 0; count < tiles; ++count) {
    block.wait_full(count);
    Weights first;
    Weights second;
    float factor[2];
    wait(block.written, u32(count) & 1);
    handover.read_factor(factor);
    handover.read(0, first);
    rescale(factor, output);
    multiply_values(block, count, 0, 1, first, output);
    wait(block.written + 8, u32(count) & 1);
    handover.read(1, second);
    ptx::mbarrier_arrive(block.read);
    multiply_values(block, count, 1, 1, second, output);
    ptx::wgmma_wait_group<0>();
    release(block, count);
  }
}

}  // namespace attn::latent
