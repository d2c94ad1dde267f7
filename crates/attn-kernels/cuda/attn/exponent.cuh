// From scores to exponents of two, and from a row's sums to its result.
//
// Source: M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867,
// algorithm 3.
// Who executes: any thread, alone; no shared memory. Included behind a config, which says whether
// scores come with options (config::IS_GENERAL), and by which power of two weights are larger than
// their exponents say (config::WEIGHT_EXPONENT).
// The invariant: all weights of a row are relative to one shift, that of its maximum, under one
// rounding; a row that has seen no key has the maximum -inf and weights of 0, never NaN.

#pragma once

#include "attn/unit.cuh"
#include "base/params.cuh"
#include "ptx/math.cuh"

namespace attn {

// What turns scores into natural and into base-2 logarithms.
struct Units {
  float natural;
  float base2;
};

// How scores become exponents of two, relative to a row's maximum.
//
// The plain instance leaves scores as the product made them and multiplies in the exponent: one
// fused instruction a score. The options leave natural logarithms, of any finite size (an additive
// mask of the lowest float is in use), which only the difference to the maximum brings into range.
// A shift is finite from below, so that -inf minus it is -inf and not NaN.
struct Exponent {
  static constexpr float LOWEST = -3.402823466e38f;

  Units units;

  __device__ float shift(float max) const {
    if constexpr (config::IS_GENERAL) return fmaxf(max, LOWEST);
    return fmaxf(__fmul_rn(max, units.base2), LOWEST) - config::WEIGHT_EXPONENT;
  }

  // Beyond this the rounding of a shift moves weights of fp8 out of the few exponents they have:
  // such rows are made relative to their maximum score by score.
  static constexpr float FAR = 16384.0f;

  // That of a row which has seen no key is not. No branch, of which && would be one.
  __device__ bool is_far(float shift) const {
    if constexpr (!config::HAS_NARROW_WEIGHTS || config::IS_GENERAL) return false;
    return (fabsf(shift) > FAR) & (fabsf(shift) < -LOWEST);
  }

  __device__ float of(float score, float shift) const {
    if constexpr (config::IS_GENERAL) {
      return (score - shift) * units.base2 + config::WEIGHT_EXPONENT;
    }
    return __fmaf_rn(score, units.base2, -shift);
  }

  // The exponent of an earlier maximum. Its product is rounded as it was when it shifted the
  // weights so far: a fused one would move them by what the rounding moved, once more with every
  // tile in which another row's maximum grows.
  __device__ float of_max(float before, float shift) const {
    if constexpr (config::IS_GENERAL) return (before - shift) * units.base2;
    return __fmul_rn(before, units.base2) - config::WEIGHT_EXPONENT - shift;
  }

  // How far the exponents of a row that ended with this maximum are above those relative to it:
  // what rounding moved, and the weights' own exponent.
  __device__ float moved(float max) const {
    if (config::IS_GENERAL || is_far(shift(max))) return config::WEIGHT_EXPONENT;
    return __fmaf_rn(max, units.base2, -shift(max));
  }
};

// A row's share of the output: what its sum of weighted values is multiplied by, and its LSE.
struct RowResult {
  float factor;
  float lse;
};

// Ends a row whose largest score is `max` and whose denominator, relative to the exponents' shift,
// is `sum`; `sink` is a natural score, -inf for none.
//
// The LSE is max * scale plus what is small beside it. Its base-2 form would carry three roundings
// of a large number; what the shift's rounding moved in the exponents is taken back exactly.
__device__ inline RowResult finish_row(float max, float sum, const Exponent& exponent, float sink) {
  // No key was seen, or all are past the range of exponents. NaN scores leave a NaN sum.
  if (max == NEG_INF || sum == 0.0f) return {sum == sum ? 0.0f : sum, sum == sum ? sink : sum};
  const float small = LN2 * (ptx::lg2_approx_f32(sum) - exponent.moved(max));
  const float own = __fmaf_rn(max, exponent.units.natural, small);
  if (sink == NEG_INF) return {ptx::rcp_approx_ftz_f32(sum), own};
  const float top = fmaxf(own, sink);
  const float share = ptx::ex2_approx_ftz_f32((own - top) * LOG2E);
  const float total = share + ptx::ex2_approx_ftz_f32((sink - top) * LOG2E);
  return {share / (total * sum), __fmaf_rn(LN2, ptx::lg2_approx_f32(total), top)};
}

// The score of a head's sink, where this unit is the one to count it.
__device__ inline float sink_of(const ForwardParams& p, const Unit& unit, i32 head) {
  return unit.parts > 1 || p.sinks.data == nullptr ? NEG_INF : per_head(p.sinks, 0, head, NEG_INF);
}

}  // namespace attn
