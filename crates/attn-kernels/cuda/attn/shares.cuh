// What the parts of a row weigh in their join.
//
// Source: Milakov, Gimelshein, arXiv:1805.02867, section 3.1: softmax states join by weights
// exp(lse - max).
// Who executes: any thread, alone. LSEs are natural, -inf for a part without visible keys.
// The invariant: a part without weight does not count, whatever its values are.

#pragma once

#include "base/types.cuh"
#include "ptx/math.cuh"

namespace attn {

namespace merge {

constexpr int COLUMNS = 4;  // of a lane

struct Four {
  float x[COLUMNS];

  // A part without weight does not count.
  __device__ void add(float share, const Vec16& part) {
#pragma unroll
    for (int j = 0; j < COLUMNS; ++j) {
      x[j] += share * (share == 0.0f ? 0.0f : __uint_as_float(part.word[j]));
    }
  }
};

// What a part with this LSE weighs relative to the largest one.
__device__ inline float share_of(float lse, float max) {
  return lse == NEG_INF ? 0.0f : ptx::ex2_approx_ftz_f32((lse - max) * LOG2E);
}

// The join of all parts and the sink.
struct Join {
  float factor;  // of the sum of all rows by their shares
  float lse;

  // `sum`: of the shares. A NaN LSE loses every maximum and makes a NaN of the sum.
  __device__ Join(float max, float sum, float sink) {
    // The sink's own value where it is all there is: two roundings of logarithms would not give it
    // back.
    if (sum == 0.0f) {
      factor = 0.0f;
      lse = sink;
      return;
    }
    if (sink != NEG_INF) sum += ptx::ex2_approx_ftz_f32((sink - max) * LOG2E);
    factor = ptx::rcp_approx_ftz_f32(sum);
    lse = __fmaf_rn(LN2, ptx::lg2_approx_f32(sum), max);
  }
};

}  // namespace merge

}  // namespace attn
