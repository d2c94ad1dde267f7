// Forward attention divided by keys: one block a part of the keys and the rows of a KV head's whole
// group, its teams taking turns at tiles of keys.
//
// Source: T. Dao et al., "Flash-Decoding for long-context inference", 2023.
// Tensors: base/params.cuh. Who executes: attn/forward.cuh. Shared-memory map: attn/forward.cuh.
// What it does not do: f32 (kernel/naive.cu).

#include "attn/forward.cuh"

extern "C" __global__ void __launch_bounds__(attn::config::THREADS, attn::config::MIN_BLOCKS)
    attn_decode(const __grid_constant__ attn::ForwardParams p) {
  attn::forward<attn::Division::parts>(p);
}
