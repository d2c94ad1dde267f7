// Eight consecutive elements of a row, between memory and f32 registers.
//
// Who executes: any thread, alone. The invariant: elements at or past `end` are neither read nor
// written, and wide accesses are used only where the address permits them, so a row may start
// anywhere.
// What it does not do: shared memory.

#pragma once

#include "base/types.cuh"
#include "ptx/convert.cuh"

namespace attn::tile {

constexpr int PIECE = 8;

// A thread's widest access that eight elements of BYTES in total fill.
template <int BYTES>
struct Words;

template <>
struct Words<8> {
  using Word = u64;
};

template <>
struct Words<16> {
  using Word = Vec16;
};

template <>
struct Words<32> {
  using Word = Vec16;
};

// The pieces of a row of TYPE.
template <DType TYPE>
struct Pieces {
  using Stored = ptx::Stored<TYPE>;
  using Bits = typename Stored::Bits;
  using Word = typename Words<PIECE * size_of(TYPE)>::Word;

  static constexpr int WORDS = PIECE * size_of(TYPE) / sizeof(Word);

  // A piece as it is stored.
  union Raw {
    Word word[WORDS];
    Bits element[PIECE];
  };

  __device__ static bool is_wide(const Bits* row, i32 at, i32 end) {
    return at + PIECE <= end && reinterpret_cast<u64>(row + at) % sizeof(Word) == 0;
  }

  // Elements at .. at + 8; 0 for those past `end`.
  __device__ static void load(const Bits* row, i32 at, i32 end, float (&x)[PIECE]) {
    Raw raw;
    if (is_wide(row, at, end)) {
#pragma unroll
      for (int i = 0; i < WORDS; ++i) raw.word[i] = reinterpret_cast<const Word*>(row + at)[i];
    } else {
#pragma unroll
      for (int i = 0; i < PIECE; ++i) raw.element[i] = at + i < end ? row[at + i] : Bits(0);
    }
#pragma unroll
    for (int i = 0; i < PIECE; ++i) x[i] = Stored::widen(raw.element[i]);
  }

  __device__ static void store(Bits* row, i32 at, i32 end, const float (&x)[PIECE]) {
    Raw raw;
#pragma unroll
    for (int i = 0; i < PIECE; ++i) raw.element[i] = Stored::narrow(x[i]);
    if (is_wide(row, at, end)) {
#pragma unroll
      for (int i = 0; i < WORDS; ++i) reinterpret_cast<Word*>(row + at)[i] = raw.word[i];
    } else {
#pragma unroll
      for (int i = 0; i < PIECE; ++i) {
        if (at + i < end) row[at + i] = raw.element[i];
      }
    }
  }
};

}  // namespace attn::tile
