// Forward attention on Hopper: warpgroup products, tiles copied by the tensor memory accelerator,
// one warpgroup that produces and two or three that consume. Of e4m3, two warps of the producer
// transpose values, and the output is bf16.
//
// Source: J. Shah et al., "FlashAttention-3", arXiv:2407.08608, algorithms 1 and 2.
// Tensors: base/params.cuh; q, k and v through tensor maps of four axes (element, head, row,
// sequence, or element, head, slot, page), boxes of 128 bytes and a tile's or a page's rows, of
// queries of all heads that share a tile, under a swizzle of 128 bytes.
// Who executes: a grid of as many blocks as run at once, each taking units of work until none is
// left.
// Shared-memory map: attn/ring_sm90a.cuh.
// What it does not do: caches of another type than queries, pages of no multiple of 8 rows
// (kernel/prefill.cu).

#include "attn/consume_sm90a.cuh"
#include "attn/transpose_sm90a.cuh"
#include "base/config_sm90a.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/setmaxnreg.cuh"

namespace attn {

__device__ inline void prefill_sm90a(const ForwardParams& p, const Maps& maps) {
  using namespace config;
  extern __shared__ u8 memory[];
  __shared__ Handed handed[HANDED_SLOTS];

  const u32 start = static_cast<u32>(__cvta_generic_to_shared(memory));
  const u32 tiles = (start + tile::SWIZZLE_BYTES - 1) & ~(tile::SWIZZLE_BYTES - 1);
  const Block block(tiles, memory + (tiles - start), handed, p.most_visits);
  if (threadIdx.x == 0) block.init();
  ptx::griddepcontrol_wait<__CUDA_ARCH__>();
  ptx::griddepcontrol_launch_dependents<__CUDA_ARCH__>();
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    ptx::setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (threadIdx.x < COPY_LANES) copy_tiles(p, maps, block);
    if (threadIdx.x / WARP == 1) hand_out(p, block);
    if constexpr (IS_FP8) {
      if (threadIdx.x / WARP >= 2) transpose_values(p, block);
    }
    return;
  }
  ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();
  Consumer consumer(p, block, u32(one_of_warp(i32(threadIdx.x) / WARPGROUP - 1)));
  // The first consumer's first turn.
  if (consumer.consumer == CONSUMERS - 1) consumer.give_turn();
  consumer.run();
  // The turn that nobody takes any more.
  if (consumer.consumer == 0) consumer.take_turn();
}

}  // namespace attn

extern "C" __global__ void __launch_bounds__(attn::config::THREADS, 1)
    attn_prefill_sm90a(const __grid_constant__ attn::ForwardParams p,
                       const __grid_constant__ attn::ptx::TensorMap q,
                       const __grid_constant__ attn::ptx::TensorMap k,
                       const __grid_constant__ attn::ptx::TensorMap v) {
  attn::prefill_sm90a(p, {&q, &k, &v});
}
