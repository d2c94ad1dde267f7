// Forward attention divided by keys, on Hopper: as kernel/decode.cu, with twice the teams to a
// block and parts that join through the shared memory of a cluster.
//
// Source: T. Dao et al., "Flash-Decoding for long-context inference", 2023.
// Tensors: base/params.cuh. Who executes: attn/forward.cuh. Shared-memory map: attn/forward.cuh,
// and behind it attn/exchange.cuh.
// What it does not do: f32 (kernel/naive.cu); say how many parts are a cluster (the host does).

#include "attn/forward.cuh"

extern "C" __global__ void __launch_bounds__(attn::config::THREADS, attn::config::MIN_BLOCKS)
    attn_decode_sm90a(const __grid_constant__ attn::ForwardParams p) {
  attn::forward<attn::Division::clusters>(p);
}
