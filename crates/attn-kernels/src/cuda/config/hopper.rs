//! The Hopper prefill kernel: its tiles, and its instance for a problem.
//!
//! The invariant: shared memory is counted as `cuda/attn/ring_sm90a.cuh` lays it out, and an instance fits the registers
//! that `cuda/base/config_sm90a.cuh` gives its warpgroups without a spill.

use attn_core::{Bytes, Problem, Split, Tile};

use super::super::lengths::parts;
use super::{Config, PLAIN_SCALES, code, prefill_pack};
use crate::spec::{Entry, KernelSpec};

/// Tiles, the first for most calls. A consumer has 64 rows; how many keys there are depends on what fits beside two stages
/// of them, and beside a row's output in registers.
pub(crate) fn tiles(problem: &Problem) -> &'static [Tile] {
    let (dim, value_dim) = dims(problem);
    let options = Options::of(problem);
    let is_plain = options == Options::default() && problem.cache_layout().is_none();
    // A producer of fp8 has registers for lists and pages.
    let is_plain_fp8 = problem.q_dtype().is_fp8() && options.general == PLAIN;
    match (dim, value_dim) {
        // Three consumers hide more of the softmax, which bounds narrow heads: on an H200, bf16, 465 to 590 TFLOP/s at 8k
        // tokens, and as fast at 512. Options, and pages beside a producer of few registers, take registers that three do
        // not have.
        (..=64, ..=64) if is_plain || is_plain_fp8 => {
            if is_short(problem) {
                &[ROWS_128, ROWS_192]
            } else {
                &[ROWS_192, ROWS_128]
            }
        }
        (..=64, ..=64) => &[ROWS_128],
        // With 96 keys three consumers fit the registers, but for options: 833 to 873 TFLOP/s at 8k tokens, open.
        (..=128, ..=128) if is_plain_fp8 => {
            if is_short(problem) {
                &[ROWS_128, ROWS_192_FP8]
            } else {
                &[ROWS_192_FP8, ROWS_128]
            }
        }
        (..=128, ..=128) => &[ROWS_128],
        // Beside 128 keys there is no room for the visits of long sequences.
        (..=192, ..=128) if !problem.q_dtype().is_fp8() && !options.is_blocked => &[ROWS_128],
        (..=192, ..=192) => &[ROWS_128_SHORT],
        // Of fp8, 64 keys are 10 % slower at 8k tokens, and 128 leave no registers; nor do 96 beside options.
        _ if problem.q_dtype().is_fp8() && options.general != GENERAL => &[ROWS_128_SHORT],
        _ => &[Tile { q: 128, kv: 64 }],
    }
}

/// Whether one or two tiles of 128 flat rows hold all, and no more than those of 192 would.
fn is_short(problem: &Problem) -> bool {
    let rows = problem.lengths().longest_q();
    // Flat rows of whole tiles, and the heads that they are of.
    let filled = |tile: Tile| {
        let pack = pack(problem, tile);
        (rows.saturating_mul(pack).div_ceil(tile.q).saturating_mul(tile.q), pack)
    };
    let ((narrow, narrow_pack), (wide, wide_pack)) = (filled(ROWS_128), filled(ROWS_192));
    !problem.options().batch_invariant
        && narrow <= 2 * ROWS_128.q
        && narrow.saturating_mul(wide_pack) <= wide.saturating_mul(narrow_pack)
}

const ROWS_128: Tile = Tile { q: 128, kv: 128 };
const ROWS_192: Tile = Tile { q: 192, kv: 128 };
const ROWS_192_FP8: Tile = Tile { q: 192, kv: 96 };
const ROWS_128_SHORT: Tile = Tile { q: 128, kv: 96 };

/// What an instance does to scores, as `cuda/base/config_sm90a.cuh` counts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Options {
    /// Nothing but the band, any option, or a soft-cap alone.
    general: i64,
    is_blocked: bool,
}

const PLAIN: i64 = 0;
const GENERAL: i64 = 1;
const CAPPED: i64 = 2;

impl Options {
    fn of(problem: &Problem) -> Self {
        let has_others = problem.has_alibi() || problem.has_bias() || problem.has_mask();
        let is_plain_scale = PLAIN_SCALES.contains(&problem.scale());
        let general = match problem.softcap() {
            None if !has_others && is_plain_scale => PLAIN,
            Some(_) if !has_others && is_plain_scale => CAPPED,
            _ => GENERAL,
        };
        Self { general, is_blocked: problem.block_mask().is_some() }
    }
}

/// Query heads whose rows share a tile: the group, where its rows fill tiles better and whole positions make a tile, which
/// the copy engine fetches as one box.
pub(crate) fn pack(problem: &Problem, tile: Tile) -> usize {
    let pack = prefill_pack(problem, tile.q);
    if tile.q.is_multiple_of(pack) { pack } else { 1 }
}

/// Tiles of keys that a unit may visit under a block mask, in whole multiples of 8.
pub(crate) fn visits(problem: &Problem, tile: Tile) -> usize {
    match problem.block_mask() {
        None => 0,
        Some(_) => problem.lengths().longest_kv().div_ceil(tile.kv).max(1).next_multiple_of(8),
    }
}

/// Rows of keys that are copied at once: a tile, or the largest power of two that divides both a page and a tile.
pub(crate) fn box_rows(problem: &Problem, tile: Tile) -> usize {
    let Some(layout) = problem.cache_layout() else { return tile.kv };
    let powers = layout.page_size().trailing_zeros().min(tile.kv.trailing_zeros());
    1 << powers
}

/// Dimensions are padded to whole multiples of 64, which the copy engine fills with zeros.
fn dims(problem: &Problem) -> (usize, usize) {
    (problem.head_dim().next_multiple_of(64), problem.value_dim().next_multiple_of(64))
}

/// Tiles in flight: of keys and of values, and of queries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stages {
    keys: usize,
    queries: usize,
}

/// As many as help, if they fit: four of narrow heads beside two consumers; more of others gained nothing.
fn stages(problem: &Problem, tile: Tile) -> Stages {
    let keys = match dims(problem) {
        (..=64, ..=64) if tile.q == 128 && !problem.q_dtype().is_fp8() => 4,
        _ => 2,
    };
    let two = Stages { keys, queries: 2 };
    if bytes(problem, tile, two) + HANDED_BYTES <= MOST_BYTES {
        two
    } else {
        Stages { keys, queries: 1 }
    }
}

/// Shared memory that a block of a Hopper may have.
const MOST_BYTES: usize = 227 << 10;

/// Shared memory of a block: what the launch asks for, and the units that the producer hands to the consumers.
pub(crate) fn smem(problem: &Problem, tile: Tile) -> Bytes {
    Bytes::of(bytes(problem, tile, stages(problem, tile)) + HANDED_BYTES, 1)
}

/// Units in shared memory: 112 bytes each, of which 8 are for instances with parts.
const HANDED_BYTES: usize = HANDED * 112;

/// Units that may be handed out and not yet given back.
const HANDED: usize = 4;

/// Bytes of tiles, panels of output, barriers and visits, the way to the next multiple of 1024 included.
fn bytes(problem: &Problem, tile: Tile, Stages { keys, queries }: Stages) -> usize {
    let (dim, value_dim) = dims(problem);
    // Rows are whole panels of 128 bytes.
    let row = |elements: usize| (elements * problem.q_dtype().size()).next_multiple_of(128);
    let stored = tile.kv * (row(dim) + row(value_dim));
    // Values of fp8 are kept once more, transposed.
    let (transposed, barriers) =
        if problem.q_dtype().is_fp8() { (value_dim * row(tile.kv), 6) } else { (0, 4) };
    let tiles = queries * tile.q * row(dim) + keys * (stored + transposed);
    let panels = tile.q * 128;
    let barriers = 8 * (2 * queries + barriers * keys + 2 * HANDED + 1);
    1024 + tiles + panels + barriers + HANDED * visits(problem, tile) * 2
}

/// Whether a split makes more than one part of some sequence's keys.
pub(crate) fn has_parts(problem: &Problem, split: Split) -> bool {
    split != Split::Whole
        && (0..problem.lengths().batch()).any(|sequence| parts(problem, split, sequence) > 1)
}

/// The instance of a problem and a tile. `has_parts`: keys of some sequence are in several parts.
pub(crate) fn config(problem: &Problem, tile: Tile, has_parts: bool) -> Config {
    let int = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
    let (dim, value_dim) = dims(problem);
    let (consumers, stages) = (tile.q / 64, stages(problem, tile));
    let (options, pack) = (Options::of(problem), pack(problem, tile));
    let spec = KernelSpec::new(
        Entry::PrefillSm90a,
        [
            ("dtype", code(problem.q_dtype())),
            ("head_dim", int(dim)),
            ("value_dim", int(value_dim)),
            ("general", options.general),
            ("blocked", i64::from(options.is_blocked)),
            ("packed", i64::from(pack > 1)),
            ("parts", i64::from(has_parts)),
            ("paged", i64::from(problem.cache_layout().is_some())),
            ("box_rows", int(box_rows(problem, tile))),
            ("consumers", int(consumers)),
            ("block_n", int(tile.kv)),
            ("stages", int(stages.keys)),
            ("query_stages", int(stages.queries)),
        ],
    );
    let narrow = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
    Config {
        spec,
        threads: narrow(128 * (consumers + 1)),
        dynamic_smem: narrow(bytes(problem, tile, stages)),
        pack: narrow(pack),
        tile,
    }
}

#[cfg(test)]
mod tests {
    use attn_core::{
        BlockSizes, CacheLayout, DType, KvStorage, PageOrder, Plan, ProblemSpec, ValueStorage,
    };

    use super::*;

    const BLOCKS: BlockSizes = BlockSizes { q: 128, kv: 128 };

    fn spec(dtype: DType, dim: usize) -> ProblemSpec {
        ProblemSpec::new(dtype, 8, 2, dim, &[300], &[300])
    }

    #[test]
    fn tiles_fit_a_block_of_a_hopper() {
        for dtype in [DType::BF16, DType::F8E4M3] {
            for (dim, value_dim) in (8..=256).step_by(8).map(|dim| (dim, dim)).chain([(192, 128)]) {
                for (softcap, block_mask) in
                    [(None, None), (Some(30.0), None), (None, Some(BLOCKS))]
                {
                    let mut spec =
                        ProblemSpec { value_dim, softcap, block_mask, ..spec(dtype, dim) };
                    spec.kv_lens = vec![1 << 16];
                    let problem = Problem::new(spec).expect("valid");
                    for tile in tiles(&problem) {
                        let bytes = smem(&problem, *tile);
                        assert!(
                            bytes <= Bytes(227 << 10),
                            "{dtype} {dim}: {tile:?} takes {bytes:?}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn boxes_divide_pages_and_tiles() {
        for (page, tile, rows) in [(16, 128, 16), (256, 128, 128), (64, 96, 32), (24, 128, 8)] {
            let value = ValueStorage::Separate(128);
            let layout = CacheLayout::contiguous(DType::BF16, PageOrder::Nhd, page, 2, 128, value);
            let kv = KvStorage::Paged(layout.expect("valid"));
            let problem =
                Problem::new(ProblemSpec { kv, ..spec(DType::BF16, 128) }).expect("valid");
            assert_eq!(box_rows(&problem, Tile { q: 128, kv: tile }), rows);
        }
    }

    #[test]
    fn heads_share_tiles_that_their_rows_leave_empty() {
        let with = |heads: (usize, usize), rows: usize, batch_invariant: bool| {
            let mut spec = ProblemSpec::new(DType::BF16, heads.0, heads.1, 128, &[rows], &[900]);
            spec.options.batch_invariant = batch_invariant;
            let problem = Problem::new(spec).expect("valid");
            pack(&problem, ROWS_128)
        };
        assert_eq!((with((8, 2), 20, false), with((8, 2), 20, true)), (4, 1));
        assert_eq!((with((8, 2), 4096, false), with((8, 8), 20, false)), (1, 1));
        // No whole positions make a tile.
        assert_eq!(with((6, 2), 20, false), 1);
    }

    #[test]
    fn short_rows_take_the_tile_that_they_fill_better() {
        let first = |heads: (usize, usize), rows: usize| {
            let spec = ProblemSpec::new(DType::BF16, heads.0, heads.1, 64, &[rows], &[900]);
            tiles(&Problem::new(spec).expect("valid"))[0].q
        };
        assert_eq!((first((8, 8), 20), first((8, 8), 256), first((8, 8), 192)), (128, 128, 192));
        assert_eq!((first((8, 8), 512), first((8, 2), 64)), (192, 128));
        // Groups of three divide 192 alone: 60 flat rows of three heads against 20 of one.
        assert_eq!(first((6, 2), 20), 192);
    }

    #[test]
    fn instance_has_parts_where_a_sequence_has_several() {
        let problem = Problem::new(spec(DType::BF16, 128)).expect("valid");
        let plan = |split| Plan {
            problem: problem.clone(),
            kernel: "cuda_prefill_sm90a",
            engine: attn_core::Engine::Cuda,
            family: attn_core::Family::Prefill,
            tile: ROWS_128,
            split,
            workspace: Bytes::ZERO,
            shared_memory: Bytes::ZERO,
            reason: "a test",
            rejects: Vec::new(),
        };
        for (split, parts) in [
            (Split::Whole, 0),
            (Split::Parts(3), 1),
            (Split::Parts(1), 0),
            (Split::Chunks(299), 1),
            (Split::Chunks(300), 0),
            (Split::Between { parts: 4, keys: 200 }, 1),
        ] {
            let config = super::super::forward(&plan(split)).expect("one of its tiles");
            assert_eq!(config.spec.get("parts"), Some(parts), "{split}");
        }
    }
}
