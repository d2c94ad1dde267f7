// The order in which the blocks of a persistent kernel take their units.
//
// Source: longest first, R. L. Graham, "Bounds on Multiprocessing Timing Anomalies", 1969: units
// that are taken as blocks get free end at nearly one time when the last ones are the shortest.
// Against it stands the cache: all tiles of a head read its keys, and few heads' keys fit. So heads
// are taken a section at a time, and only inside one the longest first.
// Who executes: all lanes of a warp. The host decides the sections (src/cuda/order.rs).
// The invariant: every number below ForwardParams::work names another task.

#pragma once

#include "attn/unit.cuh"

namespace attn {

__device__ inline Task scheduled_task(const ForwardParams& p, u32 index) {
  const u32 section = u32(p.section);
  if (p.order != nullptr) {
    const u32 entry = index / section;
    const OrderedTask& task = p.order[entry];
    return {sequence_at(p, task.sequence), task.head_block + index - entry * section, task.inside};
  }
  // Blocks of heads are counted through the batch, `section` of them to a section, which divides
  // their number.
  const u32 head_blocks = u32(p.q_heads) / p.pack.value;
  const u32 units = p.uniform_units.value;
  const u32 first = index / (section * units) * section;
  const u32 own = index - first * units;
  const u32 inside = own / section;
  const u32 block = first + own - inside * section;
  const u32 sequence = block / head_blocks;
  return {equal_sequence(p, sequence), block - sequence * head_blocks, inside};
}

}  // namespace attn
