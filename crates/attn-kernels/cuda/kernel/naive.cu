// Attention forward by the definition, one block a row: level zero of the kernels, and their oracle
// on a device.
//
// Source: Milakov, Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867,
// algorithm 3.
// Tensors: as ForwardParams: q, o, lse in rows packed or padded, k, v dense, padded or in pages,
// any strides with innermost 1, any dimensions; o is bf16 where q is fp8; unit_starts [batch + 1]
// are the written rows before each sequence.
// Who executes: 128 threads for each (written row, head), any grid; a block takes every
// gridDim.x-th.
// Shared memory, bytes: 0 query as f32 [2048], 8192 offsets of value rows i64 [128], 9216 products,
// then weights f32 [128], 9728 scratch of reductions f32 [4].
// The invariant: f32 throughout, one rounding of o; keys outside the row's band are not addressed,
// a key without weight has its value not read, and what a page outside the cache holds counts as
// NaN.
// What it does not do: share work between rows, so its time is rows * keys * dimensions.

#include "attn/band.cuh"
#include "attn/dropout.cuh"
#include "attn/locate.cuh"
#include "attn/score.cuh"
#include "base/kv_dtype.cuh"
#include "base/params.cuh"
#include "base/q_dtype.cuh"
#include "ptx/convert.cuh"
#include "tile/reduce.cuh"

namespace attn {

namespace naive {

using Q = ptx::Stored<config::Q_DTYPE>;
static_assert(config::Q_DTYPE != DType::e4m3 || config::KV_DTYPE == DType::e4m3,
              "fp8 queries meet keys and values of their own type");

using Out = ptx::Stored<config::OUT_DTYPE>;
using KV = ptx::Stored<config::KV_DTYPE>;

constexpr int THREADS = 128;
// Of an SM. Without a figure ptxas for sm_80 spills rather than go past 64 registers.
constexpr int MIN_BLOCKS = 4;
constexpr int CHUNK = THREADS;  // keys at a time: a thread turns one product into a weight
constexpr int KEY_LANES = 8;    // threads that share a product
constexpr int KEYS_AT_ONCE = THREADS / KEY_LANES;
constexpr int VALUES = 4;  // value columns of a thread
constexpr int SLAB = THREADS * VALUES;
// Of the query in shared memory; later ones are read where they are.
constexpr int QUERY_COLUMNS = 2048;
constexpr i64 NOT_STORED = -1;

struct Shared {
  float query[QUERY_COLUMNS];
  i64 value[CHUNK];
  float weight[CHUNK];
  float scratch[THREADS / WARP];
};
static_assert(sizeof(Shared) == 9744);

// One row of one head, and where its data is.
struct Row {
  Sequence sequence;
  i32 row;
  i32 head;
  i32 kv_head;
  const Q::Bits* q;
  const KV::Bits* k;
  const KV::Bits* v;
};

// The softmax so far: maximum of the scores, this thread's part of the sum, its columns of the
// output.
struct State {
  float max;
  float sum;
  float o[VALUES];
};

__device__ Row row_of(const ForwardParams& p, i64 unit) {
  const i64 written = unit / p.q_heads;
  const i32 s = find_sequence(p.unit_starts, p.batch, written);
  Row r;
  r.sequence = sequence_at(p, s);
  r.row = static_cast<i32>(written - p.unit_starts[s]);
  r.head = static_cast<i32>(unit - written * p.q_heads);
  r.kv_head = static_cast<i32>(p.group.divide(r.head));
  r.q = static_cast<const Q::Bits*>(p.q.data) + query_offset(p.q, r.sequence, r.row, r.head);
  r.k = static_cast<const KV::Bits*>(p.k.data);
  r.v = static_cast<const KV::Bits*>(p.v.data);
  return r;
}

__device__ void write_lse(const ForwardParams& p, const Row& r, float lse) {
  if (p.lse.data == nullptr || threadIdx.x != 0) return;
  static_cast<float*>(p.lse.data)[query_offset(p.lse, r.sequence, r.row, r.head)] = lse;
}

__device__ void write_o(const ForwardParams& p, const Row& r, i32 column, float o) {
  const i64 offset = query_offset(p.o, r.sequence, r.row, r.head);
  static_cast<Out::Bits*>(p.o.data)[offset + column] = Out::narrow(o);
}

// q.k for the keys of a chunk, into shared.weight. Eight threads share a key.
__device__ void multiply_keys(const ForwardParams& p, const Row& r, Shared& shared, i32 first,
                              i32 count) {
  const i32 lane = threadIdx.x % KEY_LANES;
  // All threads of a warp take every turn: they meet in the sum.
  for (i32 start = 0; start < count; start += KEYS_AT_ONCE) {
    const i32 key = start + static_cast<i32>(threadIdx.x) / KEY_LANES;
    float product = 0.0f;
    if (key < count) {
      const Place place = key_place(p, r.sequence, first + key);
      if (is_stored(place)) {
        const KV::Bits* k = r.k + row_offset(p.k, place, r.kv_head);
        const i32 shared_columns = min_of(p.head_dim, QUERY_COLUMNS);
#pragma unroll 4
        for (i32 d = lane; d < shared_columns; d += KEY_LANES) {
          product += shared.query[d] * KV::widen(k[d]);
        }
        for (i32 d = QUERY_COLUMNS + lane; d < p.head_dim; d += KEY_LANES) {
          product += Q::widen(r.q[d]) * KV::widen(k[d]);
        }
      } else {
        product = __int_as_float(0x7FFFFFFF);
      }
    }
    product = tile::warp::sum<KEY_LANES>(product);
    if (lane == 0 && key < count) shared.weight[key] = product;
  }
}

// Turns the products of a chunk into weights under the maximum so far, which may rise.
__device__ void weigh_keys(const ForwardParams& p, const Row& r, const ScoreRow& scores,
                           const Dropout& dropout, Shared& shared, i32 first, i32 count,
                           State& state) {
  const i32 key = threadIdx.x;
  const bool is_key = key < count;
  const float s = is_key ? score(p, scores, first + key, shared.weight[key]) : NEG_INF;
  const float max = fmaxf(state.max, tile::block::max<THREADS>(s, shared.scratch));
  if (max != state.max) {
    const float factor = expf(state.max - max);
    state.sum *= factor;
    // Values that lost all weight are gone, NaN or not.
#pragma unroll
    for (int i = 0; i < VALUES; ++i) state.o[i] = factor == 0.0f ? 0.0f : state.o[i] * factor;
    state.max = max;
  }
  // A NaN score is not -inf, and makes a NaN of the sum.
  const float weight = s == NEG_INF ? 0.0f : expf(s - max);
  state.sum += weight;
  if (is_key) {
    const Place place = key_place(p, r.sequence, first + key);
    shared.value[key] = is_stored(place) ? row_offset(p.v, place, r.kv_head) : NOT_STORED;
    // The sum has every weight, dropped or not.
    const bool is_kept = p.seed == nullptr ||
                         dropout.keeps(r.sequence.index, r.head, r.row, first + key);
    shared.weight[key] = is_kept ? weight : 0.0f;
  }
}

// Adds the weighted values of a chunk to the thread's columns of a slab.
__device__ void add_values(const ForwardParams& p, const Row& r, const Shared& shared, i32 slab,
                           i32 count, State& state) {
  const i32 column = slab + static_cast<i32>(threadIdx.x);
#pragma unroll 4
  for (i32 key = 0; key < count; ++key) {
    const float weight = shared.weight[key];
    const i64 row = shared.value[key];
    // A key without a page has a NaN for its weight, unless it is hidden.
    if (weight == 0.0f || row == NOT_STORED) continue;
#pragma unroll
    for (int i = 0; i < VALUES; ++i) {
      const i32 d = column + i * THREADS;
      if (d < p.value_dim) state.o[i] += weight * KV::widen(r.v[row + d]);
    }
  }
}

// Joins the threads' sums and the sink, and writes a slab of the output and, with the first, the
// LSE.
__device__ void finish(const ForwardParams& p, const Row& r, Shared& shared, i32 slab,
                       State& state) {
  float sum = tile::block::sum<THREADS>(state.sum, shared.scratch);
  const float sink = per_head(p.sinks, r.sequence.index, r.head, NEG_INF);
  float max = state.max;
  float factor = 1.0f;
  if (sink != NEG_INF) {
    max = fmaxf(max, sink);
    factor = state.max == max ? 1.0f : expf(state.max - max);
    sum = sum * factor + expf(sink - max);
  }
  // The key of the largest score weighs 1: no weight means no key.
  const bool is_empty = sum == 0.0f;
  const float v_scale = per_head(p.v_scale, r.sequence.index, r.kv_head, 1.0f);
#pragma unroll
  for (int i = 0; i < VALUES; ++i) {
    const i32 d = slab + static_cast<i32>(threadIdx.x) + i * THREADS;
    if (d < p.value_dim) {
      write_o(p, r, d, is_empty ? 0.0f : state.o[i] * factor * v_scale * p.keep_factor / sum);
    }
  }
  if (slab == 0) write_lse(p, r, is_empty ? NEG_INF : max + logf(sum));
}

__device__ void attend(const ForwardParams& p, const Row& r, Shared& shared) {
  const Sequence& s = r.sequence;
  const Band band(p, s.q_len, s.kv_len);
  const i32 lo = band.lo(r.row);
  const i32 hi = band.hi(r.row);
  // Scales of queries and keys are factors of the product.
  const float qk_scale =
      per_head(p.q_scale, s.index, r.kv_head, 1.0f) * per_head(p.k_scale, s.index, r.kv_head, 1.0f);
  const ScoreRow scores = {s.index, r.head, r.row, band.position(r.row), p.scale * qk_scale};

  for (i32 d = threadIdx.x; d < min_of(p.head_dim, QUERY_COLUMNS); d += THREADS) {
    shared.query[d] = Q::widen(r.q[d]);
  }
  __syncthreads();
  const Dropout dropout = p.seed == nullptr ? Dropout{} : Dropout::of(p);
  // Scores are recomputed for each slab of value columns: dimensions past one slab are rare.
  for (i32 slab = 0; slab < p.value_dim; slab += SLAB) {
    State state = {NEG_INF, 0.0f, {}};
    for (i32 first = lo; first < hi; first += CHUNK) {
      const i32 count = min_of(CHUNK, hi - first);
      multiply_keys(p, r, shared, first, count);
      __syncthreads();
      weigh_keys(p, r, scores, dropout, shared, first, count, state);
      __syncthreads();
      add_values(p, r, shared, slab, count, state);
      __syncthreads();
    }
    finish(p, r, shared, slab, state);
  }
}

__device__ void write_padding(const ForwardParams& p, const Row& r) {
  for (i32 d = threadIdx.x; d < p.value_dim; d += THREADS) write_o(p, r, d, 0.0f);
  write_lse(p, r, NEG_INF);
}

}  // namespace naive

extern "C" __global__ void __launch_bounds__(naive::THREADS, naive::MIN_BLOCKS)
    attn_naive(const __grid_constant__ ForwardParams p) {
  __shared__ naive::Shared shared;
  const i64 units = p.unit_starts[p.batch] * p.q_heads;
  for (i64 unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const naive::Row row = naive::row_of(p, unit);
    if (row.row < row.sequence.q_len) {
      naive::attend(p, row, shared);
    } else {
      naive::write_padding(p, row);
    }
  }
}

}  // namespace attn
