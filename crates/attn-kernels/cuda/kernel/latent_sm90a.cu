// Forward attention over a latent cache on Hopper, divided by keys: a cached row of HEAD_DIM
// elements is the key of all query heads, and its first VALUE_DIM elements are the value. Rows are
// read from memory once for both.
//
// Source: DeepSeek-AI, "DeepSeek-V2", arXiv:2405.04434, section 2.1.2 (the absorbed form); parts of
// the keys as in T. Dao et al., "Flash-Decoding for long-context inference", 2023.
// Tensors: base/params.cuh; v is not read. Who executes: a block of two consumers and the producers
// behind them (attn/latent_block_sm90a.cuh), one a unit of 64 flat rows and a part of the keys.
// Shared-memory map: attn/latent_block_sm90a.cuh.
// What it does not do: dense keys, fp8 caches, block masks that leave tiles out (they hide, key by
// key).

#include "attn/latent_consume_sm90a.cuh"
#include "attn/latent_produce_sm90a.cuh"
#include "attn/latent_write_sm90a.cuh"
#include "attn/merge.cuh"
#include "attn/rows.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/setmaxnreg.cuh"

namespace attn::latent {

__device__ inline void forward(const ForwardParams& p) {
  using namespace config;
  extern __shared__ u8 memory[];
  __shared__ u64 barriers[Block::BARRIERS];
  __shared__ float factors[BLOCK_M];
  __shared__ i64 partial_first;  // partial_starts of the sequence
  // What all threads know alike lives here: accumulators leave few registers.
  __shared__ Unit unit;
  __shared__ LatentRows rows;

  const i32 thread = i32(threadIdx.x);
  const Block block(tile::shared_address(memory), tile::shared_address(barriers));
  if (thread == WARP) block.init();
  if (thread < WARP) {
    // As in attn/forward.cuh.
    const Unit own = unit_of<BLOCK_M>(p, blockIdx.x);
    if (thread == 0) {
      unit = own;
      rows = LatentRows(p, own.sequence, own.kv_head);
    }
  }
  ptx::griddepcontrol_wait<__CUDA_ARCH__>();
  ptx::griddepcontrol_launch_dependents<__CUDA_ARCH__>();
  __syncthreads();
  if (thread >= THREADS) {
    ptx::setmaxnreg_dec<PRODUCER_REGISTERS>();
    produce(p, unit, rows, block);
    return;
  }
  ptx::setmaxnreg_inc<CONSUMER_REGISTERS>();
  load_queries(p, unit, block.queries);
  ptx::cp_async_commit_group();
  const bool has_parts = unit.parts > 1;
  if (thread == 0 && has_parts) partial_first = p.partial_starts[unit.sequence.index];
  ptx::cp_async_wait_group<0>();
  ptx::fence_proxy_async_shared();
  ptx::bar_sync(CONSUMERS_MEET, THREADS);

  // The plain instance's scale is positive, which the host sees to.
  Softmax softmax(Exponent{IS_GENERAL ? Units{1.0f, LOG2E} : Units{p.scale, p.scale * LOG2E}});
  Output output = {};
  const Handover handover(block, factors);
  const PartialRows partial = {has_parts, has_parts ? partial_first : 0, unit.part, unit.rows};
  // Through a shuffle the compiler knows that all lanes have one value, and keeps what follows from
  // it, descriptors first of all, in uniform registers.
  const u32 consumer = __shfl_sync(~0u, u32(thread) / WARPGROUP, 0);
  if (consumer == 0) {
    weigh(p, unit, block, handover, softmax, output);
  } else {
    follow(unit, block, handover, output);
  }
  // The last factors have been read.
  ptx::bar_sync(CONSUMERS_MEET, THREADS);
  if (consumer == 0) finish_rows(p, unit, partial, softmax, factors);
  ptx::bar_sync(CONSUMERS_MEET, THREADS);
  write_output(p, unit, partial, consumer, factors, block.queries, output);
  // The producers have left the block, whose barriers count those that are there.
  if (has_parts) end_part(p, unit, partial_first);
}

}  // namespace attn::latent

extern "C" __global__ void __launch_bounds__(attn::latent::BLOCK_THREADS, 1)
    attn_latent_sm90a(const __grid_constant__ attn::ForwardParams p) {
  attn::latent::forward(p);
}
