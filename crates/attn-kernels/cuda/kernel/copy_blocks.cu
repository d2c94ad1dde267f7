// Copies pages inside a cache, keys and values: the second half of copy-on-write.
//
// Tensors: caches of any element type, rows of k_bytes and v_bytes at (page, slot, head) by strides
// in bytes; pairs i32 [count, 2], from and to.
// Who executes: one warp for each (pair, slot, head), 4 a block, any grid; a warp takes every n-th.
// No shared memory.
// The invariant: bytes move as they are; bytes between rows keep their value; a pair with an id
// outside the cache touches nothing. Rows whose addresses permit it move in 16-byte words.
// What it does not do: order pairs. A page that one pair writes stands in no other pair.

#include "attn/locate.cuh"
#include "base/params.cuh"

namespace attn {

namespace copy_blocks {

constexpr int THREADS = 128;

// All lanes of a warp.
__device__ void copy_bytes(const u8* from, u8* to, i32 bytes) {
  const i32 lane = threadIdx.x % WARP;
  const bool is_wide = (reinterpret_cast<u64>(from) | reinterpret_cast<u64>(to)) % 16 == 0;
  const i32 words = is_wide ? bytes / 16 : 0;
  for (i32 i = lane; i < words; i += WARP) {
    reinterpret_cast<Vec16*>(to)[i] = reinterpret_cast<const Vec16*>(from)[i];
  }
  for (i32 i = words * 16 + lane; i < bytes; i += WARP) to[i] = from[i];
}

__device__ void copy_row(const Rows& rows, i64 from, i64 to, i64 slot, i64 head, i32 bytes) {
  u8* data = static_cast<u8*>(rows.data);
  copy_bytes(data + row_offset(rows, from, slot, head), data + row_offset(rows, to, slot, head),
             bytes);
}

// One slot and head of one pair; all lanes of a warp.
__device__ void copy(const CopyBlocksParams& p, i64 unit) {
  const i64 slots = unit / p.kv_heads;
  const i64 head = unit - slots * p.kv_heads;
  const i64 pair = slots / p.page_size;
  const i64 slot = slots - pair * p.page_size;
  const i64 from = p.pairs[2 * pair];
  const i64 to = p.pairs[2 * pair + 1];
  const auto is_page = [&](i64 id) { return id >= 0 && id < p.pages; };
  if (!is_page(from) || !is_page(to) || from == to) return;
  copy_row(p.k, from, to, slot, head, p.k_bytes);
  copy_row(p.v, from, to, slot, head, p.v_bytes);
}

}  // namespace copy_blocks

extern "C" __global__ void __launch_bounds__(copy_blocks::THREADS)
    attn_copy_blocks(const __grid_constant__ CopyBlocksParams p) {
  constexpr int WARPS = copy_blocks::THREADS / WARP;
  const i64 units = p.count * p.page_size * p.kv_heads;
  const i64 first = static_cast<i64>(blockIdx.x) * WARPS + threadIdx.x / WARP;
  const i64 step = static_cast<i64>(gridDim.x) * WARPS;
  for (i64 unit = first; unit < units; unit += step) copy_blocks::copy(p, unit);
}

}  // namespace attn
