// Which weights of a call are dropped: a random word for each pair of a row and a key.
//
// Source: J. Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, section 3.3
// (Philox4x32-10). The mapping is that of attn_core::dropout: the call's key is words 0 and 1 of
// philox((offset, 0, 0), seed), 64-bit numbers low word first; word j % 4 of philox((j / 4, i, head,
// sequence), the call's key) belongs to row i and key j of their sequence, and the weight is dropped
// where it is less than the threshold.
// Tensors: seed and offset of ForwardParams, one u64 each, read when the kernel runs, so that a
// captured graph drops by what was written there before its replay.
// Who executes: any thread, alone.

#pragma once

#include "base/params.cuh"
#include "base/types.cuh"

namespace attn {

struct Words {
  u32 word[4];

  // Word `n` of 0 .. 3: indexing at run time would put the words into local memory.
  __device__ u32 at(u32 n) const {
    const u32 low = n % 2 == 0 ? word[0] : word[1];
    const u32 high = n % 2 == 0 ? word[2] : word[3];
    return n / 2 == 0 ? low : high;
  }
};

__device__ inline Words philox(Words counter, u32 k0, u32 k1) {
  constexpr u32 M0 = 0xD2511F53u;
  constexpr u32 M1 = 0xCD9E8D57u;
  u32(&c)[4] = counter.word;
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u32 high0 = __umulhi(M0, c[0]);
    const u32 high1 = __umulhi(M1, c[2]);
    const u32 low0 = M0 * c[0];
    const u32 low1 = M1 * c[2];
    c[0] = high1 ^ c[1] ^ k0;
    c[1] = low1;
    c[2] = high0 ^ c[3] ^ k1;
    c[3] = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return counter;
}

// The dropout of a call.
struct Dropout {
  u32 key0;
  u32 key1;
  u32 threshold;

  // Reads seed and offset.
  __device__ static Dropout of(const ForwardParams& p) {
    const u64 seed = *p.seed;
    const u64 offset = *p.offset;
    const Words own =
        philox({u32(offset), u32(offset >> 32), 0, 0}, u32(seed), u32(seed >> 32));
    return {own.word[0], own.word[1], p.drop_below};
  }

  // The words of keys 4 * block .. 4 * block + 3.
  __device__ Words words(i32 sequence, i32 head, i32 row, i32 block) const {
    return philox({u32(block), u32(row), u32(head), u32(sequence)}, key0, key1);
  }

  __device__ bool keeps(u32 word) const { return word >= threshold; }

  __device__ bool keeps(i32 sequence, i32 head, i32 row, i32 key) const {
    return keeps(words(sequence, head, row, key / 4).at(u32(key) % 4));
  }
};

}  // namespace attn
