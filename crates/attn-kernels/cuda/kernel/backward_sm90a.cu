// Gradients of attention on Hopper: warpgroup products, tiles copied by the tensor memory
// accelerator, two warpgroups with 64 keys each and one that has tiles copied and sums added.
//
// Source: T. Dao, "FlashAttention-2", arXiv:2307.08691, algorithm 2; J. Shah et al.,
// "FlashAttention-3", arXiv:2407.08608.
// Tensors: base/backward_params.cuh; q, k, v and the gradient of o through tensor maps of four axes
// (element, head, row, sequence), boxes of 128 bytes and a tile's rows under a swizzle of 128
// bytes. dq_sum is in SUMS_IN_FOURS.
// Who executes: a block for each tile of keys and KV head, which sums dK and dV over the query
// heads of the group.
// Shared-memory map: attn/backward_block_sm90a.cuh.
// What it does not do: bias, slopes, boolean and block masks, gradients of a bias
// (kernel/backward.cu).

#include "attn/backward_consume_sm90a.cuh"
#include "attn/backward_produce_sm90a.cuh"
#include "attn/backward_wide_sm90a.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/setmaxnreg.cuh"

namespace attn {

// The consumer of rows of HEAD_DIM and VALUE_DIM columns.
template <int HEAD_DIM, int VALUE_DIM>
struct Consumer : KeyGradient<HEAD_DIM, VALUE_DIM> {
  using KeyGradient<HEAD_DIM, VALUE_DIM>::KeyGradient;
};
template <>
struct Consumer<256, 256> : WideGradient<256> {
  using WideGradient<256>::WideGradient;
};

__device__ inline void backward_sm90a(const BackwardParams& p, const Maps& maps) {
  using namespace config;
  extern __shared__ u8 memory[];
  __shared__ KeyTile keys;

  const u32 start = static_cast<u32>(__cvta_generic_to_shared(memory));
  const Block block((start + tile::SWIZZLE_BYTES - 1) & ~(tile::SWIZZLE_BYTES - 1));
  if (threadIdx.x == 0) block.init();
  block.fill_ones();
  ptx::griddepcontrol_wait<__CUDA_ARCH__>();
  ptx::griddepcontrol_launch_dependents<__CUDA_ARCH__>();
  // All lanes write the same.
  if (threadIdx.x < WARP) keys = key_tile(p);
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    ptx::setmaxnreg_dec<PRODUCER_REGISTERS>();
    const u32 warp = threadIdx.x / WARP;
    if (threadIdx.x == 0) copy_tiles(p, maps, block, keys);
    if (warp >= 1 && warp <= CONSUMERS) move_sums(p, block, keys, warp - 1);
    return;
  }
  ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();
  Consumer<HEAD_DIM, VALUE_DIM>(p, block, keys, u32(one_of_warp(i32(threadIdx.x) / WARPGROUP - 1)))
      .run();
}

}  // namespace attn

extern "C" __global__ void __launch_bounds__(attn::config::THREADS, 1)
    attn_backward_sm90a(const __grid_constant__ attn::BackwardParams p,
                        const __grid_constant__ attn::ptx::TensorMap q,
                        const __grid_constant__ attn::ptx::TensorMap k,
                        const __grid_constant__ attn::ptx::TensorMap v,
                        const __grid_constant__ attn::ptx::TensorMap d_o) {
  attn::backward_sm90a(p, {&q, &k, &v, &d_o});
}
