//! The Hopper kernel over a latent cache: its tile, and its instance for a problem.
//!
//! The invariant: shared memory is counted as `cuda/attn/latent_block_sm90a.cuh` lays it out, and the dimensions are those
//! of its registers: an output row of 512 columns is what two warpgroups hold, and keys of 576 are what leaves room for two
//! tiles of them.

use attn_core::{Bytes, Problem, Tile};

use super::{Config, code, is_general};
use crate::spec::{Entry, KernelSpec};

/// Elements of a cached row, which is a key.
pub(crate) const HEAD_DIM: usize = 576;

/// Elements of a cached row that are the value.
pub(crate) const VALUE_DIM: usize = 512;

/// The rows of one warpgroup product, and as many keys.
const TILE: Tile = Tile { q: 64, kv: 64 };

/// Tiles of latent rows in flight.
const STAGES: usize = 2;

/// Warps of a consumer, and consumers, which have half of the value's columns each.
const CONSUMER_WARPS: u32 = 4;
const CONSUMERS: u32 = 2;

/// Tiles of the kernel.
pub(crate) const fn tiles(_: &Problem) -> &'static [Tile] {
    &[TILE]
}

/// Shared memory of a block: what the launch asks for, and what the kernel declares itself.
pub(crate) const fn smem(_: &Problem, tile: Tile) -> Bytes {
    Bytes((dynamic_smem(tile) + STATIC_BYTES) as u64)
}

/// The unit of work, barriers and a factor for each row.
const STATIC_BYTES: usize = 640;

/// Queries, the ring of latent rows and the weights of a tile, the way to the next multiple of 1024 included.
const fn dynamic_smem(tile: Tile) -> usize {
    1024 + (tile.q + STAGES * tile.kv) * HEAD_DIM * 2 + tile.q * tile.kv * 2
}

/// The instance of a problem and a tile.
pub(crate) fn config(problem: &Problem, tile: Tile) -> Config {
    let int = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
    let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    let spec = KernelSpec::new(
        Entry::LatentSm90a,
        [
            ("dtype", code(problem.q_dtype())),
            ("kv_dtype", code(problem.kv_dtype())),
            ("head_dim", int(HEAD_DIM)),
            ("value_dim", int(VALUE_DIM)),
            ("paged", 1),
            ("general", i64::from(is_general(problem))),
            // It refuses dropout.
            ("dropout", 0),
            ("row_tiles", 1),
            ("team_warps", i64::from(CONSUMER_WARPS)),
            ("teams", i64::from(CONSUMERS)),
            ("block_n", int(tile.kv)),
            ("stages", int(STAGES)),
            ("min_blocks", 1),
        ],
    );
    Config {
        spec,
        // One more warpgroup copies.
        threads: 32 * CONSUMER_WARPS * (CONSUMERS + 1),
        dynamic_smem: narrow(dynamic_smem(tile)),
        pack: narrow(problem.group().max(1)),
        tile,
    }
}

#[cfg(test)]
mod tests {
    use attn_core::{CacheLayout, DType, KvStorage, PageOrder, ProblemSpec, ValueStorage};

    use super::*;

    fn problem(dtype: DType) -> Problem {
        let mut spec = ProblemSpec::new(dtype, 128, 1, HEAD_DIM, &[1], &[300]);
        spec.value_dim = VALUE_DIM;
        let value = ValueStorage::PrefixOfKey(VALUE_DIM);
        let layout = CacheLayout::contiguous(dtype, PageOrder::Nhd, 64, 1, HEAD_DIM, value);
        spec.kv = KvStorage::Paged(layout.expect("valid"));
        Problem::new(spec).expect("valid")
    }

    #[test]
    fn block_fits_a_hopper() {
        assert!(smem(&problem(DType::BF16), TILE) <= Bytes(227 << 10));
    }

    #[test]
    fn all_heads_share_a_tile() {
        let config = config(&problem(DType::F16), TILE);
        assert_eq!((config.pack, config.threads, config.tile), (128, 384, TILE));
        assert_eq!(config.spec.get("general"), Some(0));
    }
}
