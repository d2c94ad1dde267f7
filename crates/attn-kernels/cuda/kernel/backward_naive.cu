// Gradients by the definition, in passes: what no tiled kernel takes, and what they are compared
// with on a device.
//
// Source: the chain rule as attn-reference writes it: dv += p d_o; dz = p (d_o . v - delta); the
// bias takes dz; before a soft-cap ds = dz (1 - tanh^2); dq += scale ds k; dk += scale ds q; a sink
// takes -p delta.
// Tensors: base/backward_params.cuh, dense k and v, any strides with innermost 1, any dimensions.
// Of the workspace lse2, delta and `factor`: lse2 is the row's largest score here, natural, and a
// weight is exp(score - lse2) * factor, with its denominator summed here: a log-sum-exp in f32 is
// too coarse for f32. o and lse are not read, for o is rounded.
// Who executes: 128 threads a block, any grid: ROWS, for each (written row, head), writes dq and
// the row's numbers; KEYS, for each (written key, KV head), dk and dv; BIAS, a warp for each cell
// of the bias, dbias; SINKS, for each head, dsinks. BIAS also serves the tiled kernels, whose
// weights have no factor.
// Shared memory, bytes: 0 weights, then 512 gradients f32 [128], 1024 scratch of reductions f32
// [4].
// The invariant: f32 throughout, one rounding of each gradient; every sum is one block's or one
// warp's, in an order that depends on the problem alone; pairs outside the band are not addressed.
// What it does not do: share work between rows, so its time is rows * keys * dimensions.

#include "attn/backward_rows.cuh"
#include "attn/band.cuh"
#include "attn/dropout.cuh"
#include "attn/locate.cuh"
#include "attn/score.cuh"
#include "base/backward_params.cuh"
#include "base/dtype.cuh"
#include "ptx/convert.cuh"
#include "tile/reduce.cuh"

namespace attn {

namespace backward_naive {

using Element = ptx::Stored<config::DTYPE>;
using Bits = Element::Bits;

// BackwardParams::phase.
enum Phase : i32 { ROWS = 0, KEYS = 1, BIAS = 2, SINKS = 3 };

constexpr int THREADS = 128;
constexpr int CHUNK = THREADS;  // pairs at a time
constexpr int LANES = 8;        // threads that share a product
constexpr int COLUMNS = 4;      // of a gradient, a thread
constexpr int SLAB = THREADS * COLUMNS;
constexpr float INF = -NEG_INF;

struct Shared {
  float weight[CHUNK];
  float d_s[CHUNK];
  float scratch[THREADS / WARP];
};

// What a score and its gradient are made of, beside the products.
struct Score {
  float value;  // the final one, -inf for a hidden pair
  float gain;   // of the soft-cap
};

__device__ const Bits* query_row(const Rows& rows, const Sequence& s, i32 row, i32 head) {
  return static_cast<const Bits*>(rows.data) + query_offset(rows, s, row, head);
}

__device__ Bits* key_row(const Rows& rows, const Sequence& s, i32 key, i32 kv_head) {
  return static_cast<Bits*>(rows.data) + row_offset(rows, s.index, s.kv_first + key, kv_head);
}

__device__ float product(const Bits* a, const Bits* b, i32 dim, i32 from, i32 step) {
  float sum = 0.0f;
#pragma unroll 4
  for (i32 d = from; d < dim; d += step) {
    sum = __fmaf_rn(Element::widen(a[d]), Element::widen(b[d]), sum);
  }
  return sum;
}

__device__ Score score_of(const ForwardParams& p, const Sequence& s, i32 head, i32 row, i32 key,
                          float product) {
  const Band band(p, s.q_len, s.kv_len);
  const ScoreRow scores = {s.index, head, row, band.position(row), p.scale};
  const float value = score(p, scores, key, product);
  if (p.softcap <= 0.0f) return {value, 1.0f};
  const float t = tanhf(p.scale * product / p.softcap);
  return {value, 1.0f - t * t};
}

// What dropout multiplies the weight of a pair by on its way to the output.
__device__ float kept_of(const ForwardParams& p, const Dropout& dropout, const Sequence& s,
                         i32 head, i32 row, i32 key) {
  if (p.seed == nullptr) return 1.0f;
  return dropout.keeps(s.index, head, row, key) ? p.keep_factor : 0.0f;
}

__device__ i64 number_at(const BackwardParams& p, const Sequence& s, i32 row, i32 head) {
  return head * p.padded_rows + first_padded_row(p, s.index) + row;
}

// A weight relative to the row's largest score; the difference alone is of any size that exponents
// have.
__device__ float relative(float score, float max) { return exp2f((score - max) * LOG2E); }

// The weight of a pair whose row's numbers are at `at`.
__device__ float weight_of(const BackwardParams& p, float score, i64 at) {
  if (p.flags & NATURAL) return relative(score, p.lse2[at]);
  return relative(score, p.lse2[at]) * p.factor[at];
}

// The sequence of written row or key `n` of all, `padded` of each or as `starts` has them.
__device__ Sequence sequence_of(const BackwardParams& p, const i64* starts, i32 padded, i64 n,
                                i32& at) {
  const ForwardParams& call = p.call;
  i32 s;
  if (padded >= 0) {
    s = i32(n / padded);
    at = i32(n - i64(s) * padded);
  } else {
    s = find_sequence(starts, call.batch, n);
    at = i32(n - starts[s]);
  }
  return sequence_at(call, s);
}

// The two products of up to CHUNK pairs of one row and of consecutive keys, into shared memory.
template <typename Pair>
__device__ void multiply(Shared& shared, i32 count, const Pair& pair) {
  const i32 lane = i32(threadIdx.x) % LANES;
  // All threads of a warp take every turn: they meet in the sum.
  for (i32 start = 0; start < count; start += THREADS / LANES) {
    const i32 n = start + i32(threadIdx.x) / LANES;
    float qk = 0.0f;
    float dov = 0.0f;
    if (n < count) pair(n, lane, qk, dov);
    qk = tile::warp::sum<LANES>(qk);
    dov = tile::warp::sum<LANES>(dov);
    if (lane == 0 && n < count) {
      shared.weight[n] = qk;
      shared.d_s[n] = dov;
    }
  }
  __syncthreads();
}

__device__ void rows(const BackwardParams& p, const Dropout& dropout, i64 unit, Shared& shared) {
  const ForwardParams& call = p.call;
  const i64 written = unit / call.q_heads;
  const i32 head = i32(unit - written * call.q_heads);
  const i32 kv_head = i32(call.group.divide(head));
  i32 row;
  const Sequence s = sequence_of(p, call.q_starts, call.padded_rows, written, row);
  Bits* dq = static_cast<Bits*>(p.dq.data) + query_offset(p.dq, s, row, head);
  const Band band(call, s.q_len, s.kv_len);
  const bool is_row = row < s.q_len;
  const i32 lo = is_row ? band.lo(row) : 0;
  const i32 hi = is_row ? band.hi(row) : 0;
  const Bits* q = is_row ? query_row(call.q, s, row, head) : nullptr;
  const Bits* d_o = is_row ? query_row(p.d_o, s, row, head) : nullptr;
  const auto multiply_keys = [&](i32 first, i32 count) {
    multiply(shared, count, [&](i32 n, i32 lane, float& qk, float& dov) {
      qk = product(q, key_row(call.k, s, first + n, kv_head), call.head_dim, lane, LANES);
      dov = product(d_o, key_row(call.v, s, first + n, kv_head), call.value_dim, lane, LANES);
    });
  };

  // The row's largest score, its denominator, and the sum of weights times their gradients.
  float max = NEG_INF;
  float sum = 0.0f;
  float delta = 0.0f;
  for (i32 first = lo; first < hi; first += CHUNK) {
    const i32 count = min_of(CHUNK, hi - first);
    multiply_keys(first, count);
    const i32 n = threadIdx.x;
    float score = NEG_INF;
    float gradient = 0.0f;
    if (n < count) {
      score = score_of(call, s, head, row, first + n, shared.weight[n]).value;
      gradient = shared.d_s[n] * kept_of(call, dropout, s, head, row, first + n);
    }
    const float top = fmaxf(max, tile::block::max<THREADS>(score, shared.scratch));
    if (top != max) {
      const float factor = relative(max, top);
      sum *= factor;
      delta *= factor;
      max = top;
    }
    if (score != NEG_INF) {
      const float weight = relative(score, max);
      sum += weight;
      delta = __fmaf_rn(weight, gradient, delta);
    }
  }
  sum = tile::block::sum<THREADS>(sum, shared.scratch);
  delta = tile::block::sum<THREADS>(delta, shared.scratch);
  const float sink = per_head(call.sinks, 0, head, NEG_INF);
  const float own_max = max;
  max = fmaxf(max, sink);
  float shift = INF;
  float factor = 0.0f;
  if (max != NEG_INF && is_row) {
    const float rescale = relative(own_max, max);
    sum *= rescale;
    delta *= rescale;
    shift = max;
    if (sink != NEG_INF) sum += relative(sink, max);
    factor = 1.0f / sum;
    delta *= factor;
  }
  if (is_row && threadIdx.x == 0) {
    const i64 at = number_at(p, s, row, head);
    p.lse2[at] = shift;
    p.factor[at] = factor;
    p.delta[at] = delta;
  }

  for (i32 slab = 0; slab < call.head_dim; slab += SLAB) {
    float d[COLUMNS] = {};
    for (i32 first = lo; first < hi; first += CHUNK) {
      const i32 count = min_of(CHUNK, hi - first);
      multiply_keys(first, count);
      const i32 n = threadIdx.x;
      float d_s = 0.0f;
      if (n < count) {
        const Score score = score_of(call, s, head, row, first + n, shared.weight[n]);
        if (score.value != NEG_INF) {
          const float weight = relative(score.value, shift) * factor;
          const float kept = kept_of(call, dropout, s, head, row, first + n);
          d_s = weight * (kept * shared.d_s[n] - delta) * score.gain;
        }
      }
      __syncthreads();
      shared.d_s[n] = d_s;
      __syncthreads();
      for (i32 n = 0; n < count; ++n) {
        const float d_s = shared.d_s[n];
        // A hidden key is not read, for it may be NaN.
        if (d_s == 0.0f) continue;
        const Bits* k = key_row(call.k, s, first + n, kv_head);
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
          const i32 column = slab + i32(threadIdx.x) + i * THREADS;
          if (column < call.head_dim) d[i] = __fmaf_rn(d_s, Element::widen(k[column]), d[i]);
        }
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) {
      const i32 column = slab + i32(threadIdx.x) + i * THREADS;
      if (column < call.head_dim) dq[column] = Element::narrow(d[i] * call.scale);
    }
  }
}

// Rows of a sequence that see a key, by the band.
__device__ void rows_of(const Band& band, i32 key, i32& lo, i32& hi) {
  const i32 shift = band.q_len - band.kv_len;
  lo = band.right < 0 ? 0 : clamp_of(key - band.right + shift, 0, band.q_len);
  hi = band.left < 0 ? band.q_len : clamp_of(key + 1 + band.left + shift, 0, band.q_len);
}

// One slab of columns of dK or dV of a key.
template <bool IS_VALUE>
__device__ void key_slab(const BackwardParams& p, const Dropout& dropout, const Sequence& s,
                         i32 key, i32 kv_head, i32 slab, Shared& shared) {
  const ForwardParams& call = p.call;
  const bool is_key = key < s.kv_len;
  i32 lo = 0;
  i32 hi = 0;
  if (is_key) rows_of(Band(call, s.q_len, s.kv_len), key, lo, hi);
  const Bits* k = key_row(call.k, s, key, kv_head);
  const Bits* v = key_row(call.v, s, key, kv_head);
  const i32 dim = IS_VALUE ? call.value_dim : call.head_dim;
  const Rows& to_rows = IS_VALUE ? p.dv : p.dk;
  const Rows& from = IS_VALUE ? p.d_o : call.q;
  float d[COLUMNS] = {};
  // None where there are no query heads.
  const i32 group = call.q_heads == 0 ? 0 : i32(call.group.value);
  for (i32 head = kv_head * group; head < (kv_head + 1) * group; ++head) {
    for (i32 first = lo; first < hi; first += CHUNK) {
      const i32 count = min_of(CHUNK, hi - first);
      multiply(shared, count, [&](i32 n, i32 lane, float& qk, float& dov) {
        qk = product(query_row(call.q, s, first + n, head), k, call.head_dim, lane, LANES);
        dov = product(query_row(p.d_o, s, first + n, head), v, call.value_dim, lane, LANES);
      });
      const i32 n = threadIdx.x;
      float share = 0.0f;
      if (n < count) {
        const Score score = score_of(call, s, head, first + n, key, shared.weight[n]);
        if (score.value != NEG_INF) {
          const i64 at = number_at(p, s, first + n, head);
          const float kept = kept_of(call, dropout, s, head, first + n, key);
          share = weight_of(p, score.value, at);
          share *= IS_VALUE ? kept
                            : (kept * shared.d_s[n] - p.delta[at]) * score.gain * call.scale;
        }
      }
      __syncthreads();
      shared.weight[n] = share;
      __syncthreads();
      for (i32 n = 0; n < count; ++n) {
        const float share = shared.weight[n];
        if (share == 0.0f) continue;
        const Bits* row = query_row(from, s, first + n, head);
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) {
          const i32 column = slab + i32(threadIdx.x) + i * THREADS;
          if (column < dim) d[i] = __fmaf_rn(share, Element::widen(row[column]), d[i]);
        }
      }
      __syncthreads();
    }
  }
  Bits* to = key_row(to_rows, s, key, kv_head);
#pragma unroll
  for (int i = 0; i < COLUMNS; ++i) {
    const i32 column = slab + i32(threadIdx.x) + i * THREADS;
    if (column < dim) to[column] = Element::narrow(d[i]);
  }
}

__device__ void keys(const BackwardParams& p, const Dropout& dropout, i64 unit, Shared& shared) {
  const ForwardParams& call = p.call;
  const i32 kv_heads = p.kv_heads;
  const i64 written = unit / kv_heads;
  const i32 kv_head = i32(unit - written * kv_heads);
  i32 key;
  const Sequence s = sequence_of(p, call.kv_starts, p.written_keys, written, key);
  for (i32 slab = 0; slab < call.head_dim; slab += SLAB) {
    key_slab<false>(p, dropout, s, key, kv_head, slab, shared);
  }
  for (i32 slab = 0; slab < call.value_dim; slab += SLAB) {
    key_slab<true>(p, dropout, s, key, kv_head, slab, shared);
  }
}

// The pairs that one cell of the bias was added to, a lane each.
__device__ void bias(const BackwardParams& p, const Dropout& dropout, i64 cell) {
  const ForwardParams& call = p.call;
  const i32* extents = p.bias_extents;
  i64 rest = cell;
  const i32 key_at = i32(rest % extents[3]);
  rest /= extents[3];
  const i32 row_at = i32(rest % extents[2]);
  rest /= extents[2];
  const i32 head_at = i32(rest % extents[1]);
  const i32 sequence_at_cell = i32(rest / extents[1]);
  const bool has_sequences = extents[0] > 1;
  const bool has_heads = extents[1] > 1;
  float sum = 0.0f;
  for (i32 n = has_sequences ? sequence_at_cell : 0; n < call.batch; ++n) {
    const Sequence s = sequence_at(call, n);
    const Band band(call, s.q_len, s.kv_len);
    // A single extent is broadcast: of a call of one row or key that comes to the same.
    const i32 row_lo = extents[2] > 1 ? row_at : 0;
    const i32 row_hi = extents[2] > 1 ? min_of(row_at + 1, s.q_len) : s.q_len;
    for (i32 head = has_heads ? head_at : 0; head < call.q_heads; ++head) {
      const i32 kv_head = i32(call.group.divide(head));
      for (i32 row = row_lo; row < row_hi; ++row) {
        const i32 lo = max_of(band.lo(row), extents[3] > 1 ? key_at : 0);
        const i32 hi = min_of(band.hi(row), extents[3] > 1 ? key_at + 1 : s.kv_len);
        const Bits* q = query_row(call.q, s, row, head);
        const Bits* d_o = query_row(p.d_o, s, row, head);
        const i64 at = number_at(p, s, row, head);
        for (i32 key = lo + i32(threadIdx.x) % WARP; key < hi; key += WARP) {
          const float qk = product(q, key_row(call.k, s, key, kv_head), call.head_dim, 0, 1);
          const Score score = score_of(call, s, head, row, key, qk);
          if (score.value == NEG_INF) continue;
          const float dov = product(d_o, key_row(call.v, s, key, kv_head), call.value_dim, 0, 1);
          const float kept = kept_of(call, dropout, s, head, row, key);
          sum = __fmaf_rn(weight_of(p, score.value, at), kept * dov - p.delta[at], sum);
        }
      }
      if (has_heads) break;
    }
    if (has_sequences) break;
  }
  sum = tile::warp::sum(sum);
  if (threadIdx.x % WARP != 0) return;
  float* to = static_cast<float*>(const_cast<void*>(p.dbias.data));
  to[sequence_at_cell * p.dbias.sequence + head_at * p.dbias.head + row_at * p.dbias.row +
     key_at * p.dbias.key] = sum;
}

__device__ void sinks(const BackwardParams& p, i32 head, Shared& shared) {
  const ForwardParams& call = p.call;
  const float sink = per_head(call.sinks, 0, head, NEG_INF);
  float sum = 0.0f;
  for (i32 n = 0; n < call.batch; ++n) {
    const Sequence s = sequence_at(call, n);
    for (i32 row = threadIdx.x; row < s.q_len; row += THREADS) {
      const i64 at = number_at(p, s, row, head);
      sum = __fmaf_rn(weight_of(p, sink, at), p.delta[at], sum);
    }
  }
  sum = tile::block::sum<THREADS>(sum, shared.scratch);
  float* to = static_cast<float*>(const_cast<float*>(p.dsinks.data)) + head * p.dsinks.head;
  if (threadIdx.x == 0) *to = 0.0f - sum;
}

}  // namespace backward_naive

extern "C" __global__ void __launch_bounds__(backward_naive::THREADS)
    attn_backward_naive(const __grid_constant__ BackwardParams p) {
  using namespace backward_naive;
  __shared__ Shared shared;
  const ForwardParams& call = p.call;
  const i64 rows_before = call.padded_rows >= 0 ? i64(call.batch) * call.padded_rows
                                                : call.q_starts[call.batch];
  const i64 keys_before = p.written_keys >= 0 ? i64(call.batch) * p.written_keys
                                              : call.kv_starts[call.batch];
  const Dropout dropout = call.seed == nullptr ? Dropout{} : Dropout::of(call);
  switch (p.phase) {
    case ROWS:
      for (i64 unit = blockIdx.x; unit < rows_before * call.q_heads; unit += gridDim.x) {
        rows(p, dropout, unit, shared);
      }
      break;
    case KEYS: {
      const i64 units = keys_before * p.kv_heads;
      for (i64 unit = blockIdx.x; unit < units; unit += gridDim.x) keys(p, dropout, unit, shared);
      break;
    }
    case BIAS: {
      const i64 cells =
          i64(p.bias_extents[0]) * p.bias_extents[1] * p.bias_extents[2] * p.bias_extents[3];
      constexpr int WARPS = THREADS / WARP;
      for (i64 cell = i64(blockIdx.x) * WARPS + threadIdx.x / WARP; cell < cells;
           cell += i64(gridDim.x) * WARPS) {
        bias(p, dropout, cell);
      }
      break;
    }
    case SINKS:
      for (i32 head = i32(blockIdx.x); head < call.q_heads; head += i32(gridDim.x)) {
        sinks(p, head, shared);
      }
      break;
    default:
      break;
  }
}

}  // namespace attn
