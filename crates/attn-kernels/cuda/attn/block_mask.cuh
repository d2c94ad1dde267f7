// What a block mask keeps of a tile of keys.
//
// Tensors: ForwardParams::block_mask. Who executes: any thread, alone.
// What it does not do: single keys of a tile that is visited (attn/hide.cuh,
// attn/options_sm90a.cuh).

#pragma once

#include "attn/unit.cuh"

namespace attn {

// Whether rows top..=bottom of the unit's heads see any, and all, keys of first..end, by the
// block mask.
__device__ inline void look_at_blocks(const ForwardParams& p, const Unit& unit, i32 first, i32 end,
                                      bool& any, bool& all) {
  const Pairs& map = p.block_mask;
  // One head speaks for all where the map does not tell them apart.
  const i32 heads = map.head == 0 ? 1 : i32(p.pack.value);
  const i32 row_end = i32(p.block_q.divide(u32(unit.bottom)));
  const i32 key_end = i32(p.block_kv.divide(u32(end - 1)));
  any = false;
  all = true;
  for (i32 head = unit.head; head < unit.head + heads; ++head) {
    for (i32 row = i32(p.block_q.divide(u32(unit.top))); row <= row_end; ++row) {
      for (i32 key = i32(p.block_kv.divide(u32(first))); key <= key_end; ++key) {
        const bool keeps = pair_at<u8>(map, unit.sequence.index, head, row, key) != 0;
        any |= keeps;
        all &= keeps;
      }
      if (any && !all) return;
    }
  }
}

}  // namespace attn
