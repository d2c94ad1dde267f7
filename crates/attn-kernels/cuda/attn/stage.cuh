// The ring of key and value tiles of one team.
//
// Keys of a tile are `first .. first + BLOCK_N`; those at or past `hi` are zero in the tile, K and
// V alike: a value that no row may see must not meet even a weight of zero, for it may be NaN.
// Columns past the call's dimensions are zero too. fp8 rows land as they are, each thread later
// widening the chunks that it copied itself, so that one barrier publishes both.
// Who executes: all threads of the team.
// Shared memory of a team, 16-bit caches: STAGES x (K tile, V tile). fp8: one K and one V tile,
// then STAGES x (chunks of K, chunks of V).
// What it does not do: commit, wait, or bar (attn/forward.cuh).

#pragma once

#include "attn/key_rows.cuh"
#include "base/config.cuh"
#include "ptx/convert.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/shared.cuh"
#include "tile/panel.cuh"

namespace attn {

// How the threads of a team share a tile of DIM columns: LANES threads a row, a chunk of 16 bytes
// of each panel each.
template <int DIM>
struct Share {
  using Tile = tile::Panels<config::BLOCK_N, DIM>;
  static constexpr int ELEMENT = size_of(config::KV_DTYPE);
  static constexpr int CHUNK = 16 / ELEMENT;  // elements
  static constexpr int LANES = Tile::WIDTH / CHUNK;
  static constexpr int PASS = config::TEAM_THREADS / LANES;  // rows at a time
  static constexpr int PASSES = (config::BLOCK_N + PASS - 1) / PASS;
  // Bytes of the tile as it is stored in the cache, and threads that have a chunk of it in a pass.
  static constexpr u32 RAW_BYTES = config::BLOCK_N * DIM * ELEMENT;
  static constexpr int SHARERS = min_of(config::TEAM_THREADS, config::BLOCK_N* LANES);
  static_assert(!config::IS_FP8 || PASSES * Tile::COUNT * SHARERS * 16 == RAW_BYTES);
};

using KTile = tile::Panels<config::BLOCK_N, config::HEAD_DIM>;
using VTile = tile::Panels<config::BLOCK_N, config::VALUE_DIM>;

static_assert(max_of(config::HEAD_DIM, config::VALUE_DIM) * size_of(config::KV_DTYPE) <=
              int(sizeof(NanRow)));

constexpr u32 TILE_BYTES = KTile::BYTES + VTile::BYTES;
constexpr u32 RAW_BYTES = Share<config::HEAD_DIM>::RAW_BYTES + Share<config::VALUE_DIM>::RAW_BYTES;
constexpr u32 TEAM_BYTES =
    config::IS_FP8 ? TILE_BYTES + config::STAGES * RAW_BYTES : config::STAGES * TILE_BYTES;

// Where the tile of a stage is read from.
__device__ inline u32 tile_of(u32 team, int stage) {
  return config::IS_FP8 ? team : team + stage * TILE_BYTES;
}

// Copies the thread's chunks of one row. `to`: where the thread's chunk of the tile's first row
// goes; `from`: the thread's chunk of the row; `limit`: elements of the row that exist from there
// on, none where the row does not.
template <int DIM>
__device__ void copy_row(u32 to, const u8* from, int pass, i32 limit) {
  using S = Share<DIM>;
#pragma unroll
  for (int panel = 0; panel < S::Tile::COUNT; ++panel) {
    const i32 left = limit - panel * S::Tile::WIDTH;
    u32 target;
    u32 bytes;
    if constexpr (config::IS_FP8) {
      target = to + (pass * S::Tile::COUNT + panel) * S::SHARERS * 16;
      bytes = clamp_of(left, 0, 16);
    } else {
      // Passes are a power of two of rows, so that the swizzle of a sum of rows is that of each.
      target = (to ^ (S::Tile::swizzle(pass * S::PASS) * 16)) +
               pass * S::PASS * S::Tile::ROW_BYTES + panel * S::Tile::PANEL_BYTES;
      // Dimensions are multiples of a chunk.
      bytes = left > 0 ? 16 : 0;
    }
    ptx::cp_async_cg_16(target, from + panel * (S::Tile::WIDTH * S::ELEMENT), bytes);
  }
}

// Whether each lane finds one row of a tile, and tells those that copy it: a warp that streams keys
// alone is short of instructions, and of ways to memory and back. The entries of the block table
// are read a tile ahead, so that no copy but the first waits for one.
constexpr bool HAS_ROW_A_LANE = config::TEAM_WARPS == 1 && config::ROW_TILES == 1 &&
                                config::BLOCK_N <= WARP &&
                                Share<config::HEAD_DIM>::LANES == Share<config::VALUE_DIM>::LANES;

// The entry for the row of a tile that the lane finds.
struct Entry {
  i32 page;

  template <typename Source>
  __device__ void read(const ForwardParams& p, const Source& keys, i32 first, i32 hi) {
    if constexpr (HAS_ROW_A_LANE && config::IS_PAGED) {
      if (first >= hi) return;
      const i32 row = i32(threadIdx.x) % config::BLOCK_N;
      page = keys.page_of(p, min_of(first + row, hi - 1));
    }
  }
};

// Starts the copies of a tile of keys, a row a lane. IS_WHOLE: all rows and columns of it exist.
template <bool IS_WHOLE, typename Source>
__device__ void copy_rows(const ForwardParams& p, const Source& keys, const Entry& entry, u32 k,
                          u32 v, i32 first, i32 hi) {
  using namespace config;
  using S = Share<HEAD_DIM>;
  static_assert(BLOCK_N % S::PASS == 0);
  const int lane = threadIdx.x % WARP;
  const int chunk = lane % S::LANES;
  const int top = lane / S::LANES;
  const i32 column = chunk * S::CHUNK;
  const u32 k_to = k + (IS_FP8 ? lane * 16 : KTile::offset(top, chunk));
  const u32 v_to = v + (IS_FP8 ? lane * 16 : VTile::offset(top, chunk));
  const i32 found = first + lane % BLOCK_N;
  // Of a key past the end the address is formed and never read; where forming it reads the block
  // table, the last key stands in.
  const auto own = IS_PAGED ? keys.row(p, IS_WHOLE ? found : min_of(found, hi - 1), entry.page)
                            : keys.first(p, found);
#pragma unroll
  for (int pass = 0; pass < S::PASSES; ++pass) {
    const int row = top + pass * S::PASS;
    const auto told = [&](const u8* address) {
      const u64 shared = __shfl_sync(~0u, reinterpret_cast<u64>(address), row);
      return reinterpret_cast<const u8*>(shared) + chunk * 16;
    };
    const u8* k_from = told(own.k);
    const u8* v_from = told(own.v);
    const bool is_there = IS_WHOLE || first + row < hi;
    const i32 k_limit = IS_WHOLE ? HEAD_DIM : is_there ? p.head_dim - column : 0;
    const i32 v_limit = IS_WHOLE ? VALUE_DIM : is_there ? p.value_dim - column : 0;
    copy_row<HEAD_DIM>(k_to, k_from, pass, k_limit);
    copy_row<VALUE_DIM>(v_to, v_from, pass, v_limit);
  }
}

// Starts the copies of a tile of keys by threads that find the rows that they copy: its K rows, its
// V rows, or both where the threads share them alike.
template <int DIM, bool HAS_K, bool HAS_V, typename Source>
__device__ void copy_tile(const ForwardParams& p, const Source& keys, u32 k, u32 v, i32 first,
                          i32 hi) {
  using S = Share<DIM>;
  const int thread = threadIdx.x % config::TEAM_THREADS;
  const int lane = thread % S::LANES;
  const int top = thread / S::LANES;
  const i32 column = lane * S::CHUNK;
  const u32 k_to = k + (config::IS_FP8 ? thread * 16 : KTile::offset(top, lane));
  const u32 v_to = v + (config::IS_FP8 ? thread * 16 : VTile::offset(top, lane));
  auto source = keys.first(p, first + top);
  // Looked-up addresses are long-lived where the loop is unrolled; without a look-up they are one
  // sum.
#pragma unroll(config::IS_PAGED ? 1 : S::PASSES)
  for (int pass = 0; pass < S::PASSES; ++pass) {
    if (config::BLOCK_N % S::PASS != 0 && top + pass * S::PASS >= config::BLOCK_N) break;
    const i32 key = first + top + pass * S::PASS;
    // As in copy_rows.
    if (config::IS_PAGED || pass > 0) {
      source = keys.next(p, source, min_of(key, hi - 1), S::PASS);
    }
    const i32 k_limit = key < hi ? p.head_dim - column : 0;
    const i32 v_limit = key < hi ? p.value_dim - column : 0;
    if constexpr (HAS_K) copy_row<config::HEAD_DIM>(k_to, source.k + lane * 16, pass, k_limit);
    if constexpr (HAS_V) copy_row<config::VALUE_DIM>(v_to, source.v + lane * 16, pass, v_limit);
  }
}

// Starts the copies of a tile of keys into a stage.
template <typename Source>
__device__ void load_stage(const ForwardParams& p, const Source& keys, const Entry& entry, u32 team,
                           int stage, i32 first, i32 hi) {
  using namespace config;
  const u32 k = IS_FP8 ? team + TILE_BYTES + stage * RAW_BYTES : team + stage * TILE_BYTES;
  const u32 v = k + (IS_FP8 ? Share<HEAD_DIM>::RAW_BYTES : KTile::BYTES);
  if constexpr (HAS_ROW_A_LANE) {
    if (first + BLOCK_N <= hi && p.head_dim == HEAD_DIM && p.value_dim == VALUE_DIM) {
      copy_rows<true>(p, keys, entry, k, v, first, hi);
    } else {
      copy_rows<false>(p, keys, entry, k, v, first, hi);
    }
  } else if constexpr (Share<HEAD_DIM>::LANES == Share<VALUE_DIM>::LANES) {
    copy_tile<HEAD_DIM, true, true>(p, keys, k, v, first, hi);
  } else {
    copy_tile<HEAD_DIM, true, false>(p, keys, k, v, first, hi);
    copy_tile<VALUE_DIM, false, true>(p, keys, k, v, first, hi);
  }
}

// Four fp8 elements in the query's type.
__device__ inline ptx::Half4 widen_fp8(u32 bytes) {
  using namespace config;
  if constexpr (Q_DTYPE == DType::f16) {
    return KV_DTYPE == DType::e4m3 ? ptx::f16x2_from_e4m3(bytes) : ptx::f16x2_from_e5m2(bytes);
  } else {
    return KV_DTYPE == DType::e4m3 ? ptx::bf16x2_from_e4m3(bytes) : ptx::bf16x2_from_e5m2(bytes);
  }
}

// Widens the thread's own chunks of a tile from fp8 to the query's type.
template <int DIM>
__device__ void widen_tile(u32 from, u32 to) {
  using S = Share<DIM>;
  const int thread = threadIdx.x % config::TEAM_THREADS;
  const int lane = thread % S::LANES;
#pragma unroll
  for (int pass = 0; pass < S::PASSES; ++pass) {
    const int row = thread / S::LANES + pass * S::PASS;
    if (config::BLOCK_N % S::PASS != 0 && row >= config::BLOCK_N) break;
#pragma unroll
    for (int panel = 0; panel < S::Tile::COUNT; ++panel) {
      const u32 source = from + ((pass * S::Tile::COUNT + panel) * S::SHARERS + thread) * 16;
      const Vec16 raw = ptx::ld_shared_v4_b32(source);
      Vec16 wide[2];
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        const ptx::Half4 four = widen_fp8(raw.word[word]);
        wide[word / 2].word[word % 2 * 2] = four.lo;
        wide[word / 2].word[word % 2 * 2 + 1] = four.hi;
      }
      const int chunk = panel * S::Tile::CHUNKS + lane * 2;
      ptx::st_shared_v4_b32(to + S::Tile::offset(row, chunk), wide[0]);
      ptx::st_shared_v4_b32(to + S::Tile::offset(row, chunk + 1), wide[1]);
    }
  }
}

__device__ inline void widen_stage(u32 team, int stage) {
  using namespace config;
  const u32 from = team + TILE_BYTES + stage * RAW_BYTES;
  widen_tile<HEAD_DIM>(from, team);
  widen_tile<VALUE_DIM>(from + Share<HEAD_DIM>::RAW_BYTES, team + KTile::BYTES);
}

}  // namespace attn
