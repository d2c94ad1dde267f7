// The online softmax of a consumer's rows, whose output lies in other registers than its scores.
//
// Source: M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867,
// algorithm 3.
// Who executes: all lanes of a converged warp; no shared memory.
// The invariant: all weights of a row are relative to one shift; a row that has seen no key has the
// maximum -inf and weights of 0, never NaN. The sum is of weights as they are, not as they are
// rounded.

#pragma once

#include "attn/exponent.cuh"
#include "attn/softmax.cuh"
#include "ptx/math.cuh"

namespace attn::latent {

// How many powers of two a row's maximum may stay behind, so that the output is rescaled once in
// many tiles: 16-bit weights lose nothing up to 2^8.
constexpr float LATE_EXPONENT = 8.0f;

struct Softmax {
  const Exponent exponent;
  const float slack;  // LATE_EXPONENT, in units of the scores
  float max[2] = {NEG_INF, NEG_INF};
  float shift[2];               // of the exponents, by the maximum
  float sum[2] = {0.0f, 0.0f};  // of the lane's own columns

  __device__ explicit Softmax(const Exponent& of)
      : exponent(of), slack(LATE_EXPONENT / of.units.base2) {}

  // Takes over a tile's maxima. The answers are the factors of what was summed before, 1 where it
  // stays as it is.
  __device__ void raise(const warp::Scores& s, float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Two at a time: one after the other would wait for each.
      float tops[2] = {s[0][0][half * 2], s[0][0][half * 2 + 1]};
#pragma unroll
      for (int j = 1; j < warp::KEY_TILES; ++j) {
        tops[0] = fmaxf(tops[0], s[0][j][half * 2]);
        tops[1] = fmaxf(tops[1], s[0][j][half * 2 + 1]);
      }
      const float top = warp::quad_max(fmaxf(tops[0], tops[1]));
      const float before = max[half];
      max[half] = top > before + slack ? top : before;
      shift[half] = exponent.shift(max[half]);
      factor[half] = max[half] == before
                         ? 1.0f
                         : ptx::ex2_approx_ftz_f32(exponent.of_max(before, shift[half]));
      sum[half] *= factor[half];
    }
  }

  // Turns the scores of TILES tiles of eight keys, from the one at FIRST on, into weights.
  template <int FIRST, int TILES>
  __device__ void weigh(warp::Scores& s) {
#pragma unroll
    for (int j = FIRST; j < FIRST + TILES; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& score = s[0][j][e];
        score = ptx::ex2_approx_ftz_f32(exponent.of(score, shift[e / 2]));
        sum[e / 2] += score;
      }
    }
  }
};

}  // namespace attn::latent
