// Forward attention divided by query rows: one block a tile of rows and a head, all warps along the
// rows.
//
// Source: T. Dao, "FlashAttention-2", arXiv:2307.08691, section 3.
// Tensors: base/params.cuh. Who executes: attn/forward.cuh. Shared-memory map: attn/forward.cuh.
// What it does not do: f32 and head dimensions past 256 (kernel/naive.cu).

#include "attn/forward.cuh"

extern "C" __global__ void __launch_bounds__(attn::config::THREADS, attn::config::MIN_BLOCKS)
    attn_prefill(const __grid_constant__ attn::ForwardParams p) {
  attn::forward<attn::Division::none>(p);
}
