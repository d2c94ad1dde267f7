// The hyperbolic tangent of a soft-cap.
//
// Who executes: any thread, alone. The instruction tanh.approx is off by 2^-11.

#pragma once

#include "base/types.cuh"
#include "ptx/math.cuh"

namespace attn {

// Below this the series is within 1e-7 of its size.
constexpr float TANH_NEAR = 0.6f;

// tanh x / x as a series of x^2, lowest power first.
constexpr int TANH_TERMS = 6;
__device__ constexpr float TANH_SERIES[TANH_TERMS] = {
    1.0f, -0.3333333135f, 0.1333292425f, -0.0538751669f, 0.0211163126f, -0.0062764990f};

// tanh x, within 1e-7 of it everywhere: the series near 0, where 1 - 2 / (1 + exp(2x)) cancels, and
// that formula beyond; both are cheaper than a branch.
__device__ inline float tanh_of(float x) {
  const float square = x * x;
  float series = TANH_SERIES[TANH_TERMS - 1];
#pragma unroll
  for (int i = TANH_TERMS - 2; i > 0; --i) series = __fmaf_rn(series, square, TANH_SERIES[i]);
  const float near = __fmaf_rn(series * square, x, x);
  const float power = ptx::ex2_approx_ftz_f32(x * (2.0f * LOG2E));
  const float far = __fmaf_rn(-2.0f, ptx::rcp_approx_ftz_f32(1.0f + power), 1.0f);
  return square < TANH_NEAR * TANH_NEAR ? near : far;
}

}  // namespace attn
