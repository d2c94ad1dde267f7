// Gradients of keys and values, and sums of those of queries: one block a tile of keys of one KV
// head, which walks the tiles of query rows that see some of them, head by head of its group.
//
// Source: T. Dao, "FlashAttention-2", arXiv:2307.08691, algorithm 2.
// Tensors: base/backward_params.cuh. Who executes: attn/backward.cuh. Shared-memory map:
// attn/backward.cuh.
// The invariant: dK and dV are summed by one block, in an order that depends on the sequence alone;
// dQ is added to by many, under DETERMINISTIC in turns.
// What it does not do: f32, other dimensions than multiples of 8 up to 256
// (kernel/backward_naive.cu).

#include "attn/backward.cuh"

extern "C" __global__ void __launch_bounds__(attn::config::THREADS, 1)
    attn_backward(const __grid_constant__ attn::BackwardParams p) {
  attn::backward_tiles(p);
}
