//! From a problem and a tile to a kernel instance: macros, threads, shared memory.
//!
//! The invariant: everything here is a function of the problem and the tile, so that the catalogue states before
//! a launch what the launch will take, and a plan made by hand gets the same instance as a chosen one.
//! The arithmetic repeats what the device headers assert, because shared memory is sized by the host.

use attn_core::{Bytes, DType, Plan, Problem, Tile};

use crate::error::Error;
use crate::instances::Instance;
use crate::spec::{Entry, KernelSpec};

pub(crate) mod hopper;
pub(crate) mod latent;

/// The instance that runs a plan, and what the launch must know of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Config {
    /// What to load.
    pub(crate) spec: KernelSpec,
    /// Threads of a block.
    pub(crate) threads: u32,
    /// Bytes of dynamic shared memory of a block.
    pub(crate) dynamic_smem: u32,
    /// Query heads whose rows share a tile.
    pub(crate) pack: u32,
    /// Flat rows and keys of a tile.
    pub(crate) tile: Tile,
}

/// Tiles of the prefill kernel, from the one that reads K and V for most rows to the smallest.
const PREFILL_TILES: &[Tile] = &[
    Tile { q: 128, kv: 64 },
    Tile { q: 128, kv: 32 },
    Tile { q: 64, kv: 64 },
    Tile { q: 64, kv: 32 },
    Tile { q: 64, kv: 16 },
];

/// Tiles of the decode kernel. The two small ones have a team for each of several tiles of keys; a team of one
/// warp takes 32 keys of narrow rows at a time and 16 of wide ones, so that two blocks fit a multiprocessor. What
/// follows the smallest is for devices whose shared memory holds no ring of several teams.
const NARROW_DECODE_TILES: &[Tile] = &[
    Tile { q: 128, kv: 64 },
    Tile { q: 64, kv: 64 },
    Tile { q: 32, kv: 32 },
    Tile { q: 16, kv: 32 },
    Tile { q: 64, kv: 32 },
];
const DECODE_TILES: &[Tile] = &[
    Tile { q: 128, kv: 64 },
    Tile { q: 128, kv: 32 },
    Tile { q: 64, kv: 64 },
    Tile { q: 32, kv: 16 },
    Tile { q: 16, kv: 16 },
    Tile { q: 64, kv: 32 },
    Tile { q: 64, kv: 16 },
];

/// The tile of the Hopper decode kernel: the keys that its eight teams take at a time, as many each as those of the
/// portable kernel.
const NARROW_DECODE_SM90A_TILES: &[Tile] = &[Tile { q: 16, kv: 256 }];
const DECODE_SM90A_TILES: &[Tile] = &[Tile { q: 16, kv: 128 }];

/// A head dimension up to this is narrow.
const NARROW_DIM: usize = 64;

/// Tiles of the prefill kernel.
pub(crate) const fn prefill_tiles(_: &Problem) -> &'static [Tile] {
    PREFILL_TILES
}

/// Tiles of the decode kernel.
pub(crate) fn decode_tiles(problem: &Problem) -> &'static [Tile] {
    if is_narrow(problem) { NARROW_DECODE_TILES } else { DECODE_TILES }
}

/// Tiles of the Hopper decode kernel.
pub(crate) fn decode_sm90a_tiles(problem: &Problem) -> &'static [Tile] {
    if is_narrow(problem) { NARROW_DECODE_SM90A_TILES } else { DECODE_SM90A_TILES }
}

fn is_narrow(problem: &Problem) -> bool {
    problem.head_dim().max(problem.value_dim()) <= NARROW_DIM
}

/// The naive kernel has no tile: a block a row.
pub(crate) const fn naive_tiles(_: &Problem) -> &'static [Tile] {
    &[Tile { q: 1, kv: 128 }]
}

/// Threads of a block of the naive kernel.
pub(crate) const NAIVE_THREADS: u32 = 128;

/// Threads of a block of the merges, the scatter and the copy.
pub(crate) const HELPER_THREADS: u32 = 128;

/// Head and value dimensions that tiles are made for; others are rounded up and filled with zeros.
const DIMS: [usize; 6] = [32, 64, 96, 128, 192, 256];

/// The largest dimension of a tile.
pub(crate) const MOST_DIM: usize = 256;

/// How a block is made of warps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Shape {
    /// Tiles of 16 rows of one warp.
    row_tiles: u32,
    /// Warps of a team, along the rows.
    team_warps: u32,
    /// Teams, which take turns at tiles of keys.
    teams: u32,
    /// Tiles of keys of a team's ring.
    stages: u32,
}

/// An instance before it is one: the numbers that decide macros and shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Design {
    entry: Entry,
    q_dtype: DType,
    kv_dtype: DType,
    head_dim: usize,
    value_dim: usize,
    is_paged: bool,
    is_general: bool,
    has_dropout: bool,
    tile: Tile,
    shape: Shape,
}

impl Design {
    fn new(entry: Entry, problem: &Problem, tile: Tile) -> Self {
        let (head_dim, value_dim) = (padded(problem.head_dim()), padded(problem.value_dim()));
        let is_general = is_general(problem);
        Self {
            entry,
            q_dtype: problem.q_dtype(),
            kv_dtype: problem.kv_dtype(),
            head_dim,
            value_dim,
            is_paged: problem.cache_layout().is_some(),
            is_general,
            has_dropout: problem.dropout().is_some(),
            tile,
            shape: match entry {
                Entry::DecodeSm90a => Shape { row_tiles: 1, team_warps: 1, teams: 8, stages: 3 },
                _ => {
                    shape(tile, head_dim.max(value_dim), is_general || problem.dropout().is_some())
                }
            },
        }
    }

    /// Keys that a team takes at a time.
    const fn team_keys(&self) -> usize {
        match self.entry {
            Entry::DecodeSm90a => self.tile.kv / self.shape.teams as usize,
            _ => self.tile.kv,
        }
    }

    const fn threads(&self) -> u32 {
        32 * self.shape.team_warps * self.shape.teams
    }

    /// Bytes of shared memory that the launch asks for: queries and the rings of the teams, which the
    /// output reuses (`cuda/attn/forward.cuh`), and what a cluster exchanges.
    fn dynamic_smem(&self) -> usize {
        let Shape { team_warps: _, teams, stages, row_tiles: _ } = self.shape;
        let (teams, stages) = (teams as usize, stages as usize);
        let dims = self.head_dim + self.value_dim;
        let tile = self.team_keys() * dims * 2;
        let raw = self.team_keys() * dims * self.kv_dtype.size();
        let ring = if self.kv_dtype.is_fp8() { tile + stages * raw } else { stages * tile };
        let streaming = self.tile.q * self.head_dim * 2 + teams * ring;
        let output = if teams == 1 {
            self.tile.q * self.value_dim * 2
        } else {
            teams * self.tile.q * (self.value_dim + 4 + 2) * 4
        };
        let exchange = match self.entry {
            Entry::DecodeSm90a => exchange_bytes(self.tile.q, self.value_dim),
            _ => 0,
        };
        streaming.max(output) + exchange
    }

    /// Shared memory that the kernel declares itself: what a block's threads know alike, and the visits of a
    /// block mask.
    const fn static_smem(&self) -> usize {
        if self.is_general { 4096 + 256 } else { 256 }
    }

    fn spec(&self) -> KernelSpec {
        let Shape { row_tiles, team_warps, teams, stages } = self.shape;
        let int = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        KernelSpec::new(
            self.entry,
            [
                ("dtype", code(self.q_dtype)),
                ("kv_dtype", code(self.kv_dtype)),
                ("head_dim", int(self.head_dim)),
                ("value_dim", int(self.value_dim)),
                ("paged", i64::from(self.is_paged)),
                ("general", i64::from(self.is_general)),
                ("dropout", i64::from(self.has_dropout)),
                ("row_tiles", i64::from(row_tiles)),
                ("team_warps", i64::from(team_warps)),
                ("teams", i64::from(teams)),
                ("block_n", int(self.team_keys())),
                ("stages", i64::from(stages)),
                // Two blocks of four warps fill the registers; eight warps do alone.
                ("min_blocks", if self.threads() <= 128 { 2 } else { 1 }),
            ],
        )
    }
}

/// Blocks of a cluster, at most: the most that a Hopper can have.
pub(crate) const MOST_CLUSTER: u32 = 16;

/// Shared memory for the pieces that the blocks of a cluster send each other (`cuda/attn/exchange.cuh`).
const fn exchange_bytes(rows: usize, value_dim: usize) -> usize {
    let blocks = MOST_CLUSTER as usize;
    let quads = rows * (value_dim / 4);
    // Pieces are rounded up to whole quads.
    16 + blocks * rows * 4 + (quads + blocks) * 16
}

/// Scales of the plain instance: positive, and such that a product with an fp8 cache's scale neither vanishes nor
/// overflows.
const PLAIN_SCALES: std::ops::RangeInclusive<f32> = 1e-20..=1e20;

/// Whether scores are capped, added to or masked.
pub(crate) fn has_score_options(problem: &Problem) -> bool {
    problem.softcap().is_some()
        || problem.has_alibi()
        || problem.has_bias()
        || problem.has_mask()
        || problem.block_mask().is_some()
}

/// Whether the scores need more than a positive scale and the band.
pub(crate) fn is_general(problem: &Problem) -> bool {
    has_score_options(problem)
        // The plain instance takes the maximum of unscaled scores, and multiplies their factors in f32.
        || !PLAIN_SCALES.contains(&problem.scale())
}

/// The number of a type in `cuda/base/types.cuh`.
pub(crate) const fn code(dtype: DType) -> i64 {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::BF16 => 2,
        DType::F8E4M3 => 3,
        DType::F8E5M2 => 4,
    }
}

pub(crate) fn padded(dim: usize) -> usize {
    DIMS.into_iter().find(|&padded| padded >= dim).unwrap_or(MOST_DIM)
}

/// Warps and stages for a tile. 32 rows a warp read a key's fragments from shared memory half as often as 16
/// would, but their output rows take 32 * dim / 32 registers of a lane: 128 columns are the most, and options
/// leave too few registers even then.
const fn shape(tile: Tile, dim: usize, has_options: bool) -> Shape {
    let is_wide = dim <= 128 && !has_options;
    match tile.q {
        128.. if is_wide => Shape { row_tiles: 2, team_warps: 4, teams: 1, stages: 2 },
        128.. => Shape { row_tiles: 1, team_warps: 8, teams: 1, stages: 2 },
        64..=127 => Shape { row_tiles: 1, team_warps: 4, teams: 1, stages: 2 },
        32..=63 if is_wide => Shape { row_tiles: 2, team_warps: 1, teams: 4, stages: 3 },
        32..=63 => Shape { row_tiles: 1, team_warps: 2, teams: 2, stages: 2 },
        _ => {
            Shape { row_tiles: 1, team_warps: 1, teams: 4, stages: if dim <= 128 { 3 } else { 2 } }
        }
    }
}

/// Query heads whose rows share a tile of the prefill kernel: the whole group where its rows fill tiles better.
///
/// Source: the rule of FlashAttention-3's `should_pack_gqa`: pack where rows alone waste a tenth more of their tiles.
pub(crate) fn prefill_pack(problem: &Problem, tile: usize) -> usize {
    let (rows, group) = (problem.lengths().longest_q(), problem.group());
    // The longest sequence is no business of the others' bits.
    if group <= 1 || rows == 0 || problem.options().batch_invariant {
        return 1;
    }
    let packed = rows.saturating_mul(group);
    let filled = |rows: usize| rows as f64 / rows.next_multiple_of(tile.max(1)) as f64;
    if filled(rows) < 0.9 * filled(packed) { group } else { 1 }
}

/// Shared memory of a block of the prefill kernel.
pub(crate) fn prefill_smem(problem: &Problem, tile: Tile) -> Bytes {
    smem(Entry::Prefill, problem, tile)
}

/// Shared memory of a block of the decode kernel.
pub(crate) fn decode_smem(problem: &Problem, tile: Tile) -> Bytes {
    smem(Entry::Decode, problem, tile)
}

/// Shared memory of a block of the Hopper decode kernel.
pub(crate) fn decode_sm90a_smem(problem: &Problem, tile: Tile) -> Bytes {
    smem(Entry::DecodeSm90a, problem, tile)
}

/// Shared memory of a block of the naive kernel, all of it static: `Shared` in `cuda/kernel/naive.cu`.
pub(crate) fn naive_smem(_: &Problem, _: Tile) -> Bytes {
    Bytes(9744)
}

fn smem(entry: Entry, problem: &Problem, tile: Tile) -> Bytes {
    let design = Design::new(entry, problem, tile);
    Bytes::of(design.dynamic_smem() + design.static_smem(), 1)
}

/// The instance of a forward plan.
///
/// # Errors
/// [`Error::Plan`] for a plan of a kernel or with a tile that is not in the catalogue.
pub(crate) fn forward(plan: &Plan) -> Result<Config, Error> {
    let problem = &plan.problem;
    match plan.kernel {
        "cuda_naive" => Ok(Config {
            spec: naive_spec(problem.q_dtype(), problem.kv_dtype()),
            threads: NAIVE_THREADS,
            dynamic_smem: 0,
            pack: 1,
            tile: plan.tile,
        }),
        "cuda_prefill" if prefill_tiles(problem).contains(&plan.tile) => {
            Ok(tiled(Entry::Prefill, problem, plan.tile, prefill_pack(problem, plan.tile.q)))
        }
        "cuda_prefill_sm90a" if hopper::tiles(problem).contains(&plan.tile) => {
            let has_parts = hopper::has_parts(problem, plan.split);
            Ok(hopper::config(problem, plan.tile, has_parts))
        }
        "cuda_decode" if decode_tiles(problem).contains(&plan.tile) => {
            Ok(tiled(Entry::Decode, problem, plan.tile, problem.group().max(1)))
        }
        "cuda_decode_sm90a" if decode_sm90a_tiles(problem).contains(&plan.tile) => {
            Ok(tiled(Entry::DecodeSm90a, problem, plan.tile, problem.group().max(1)))
        }
        "cuda_latent_sm90a" if latent::tiles(problem).contains(&plan.tile) => {
            Ok(latent::config(problem, plan.tile))
        }
        kernel => Err(Error::Plan {
            expected: "a forward kernel of the CUDA engine with one of its tiles and splits",
            got: format!("{kernel} with tile {}x{}, {}", plan.tile.q, plan.tile.kv, plan.split),
        }),
    }
}

fn tiled(entry: Entry, problem: &Problem, tile: Tile, pack: usize) -> Config {
    let design = Design::new(entry, problem, tile);
    Config {
        spec: design.spec(),
        threads: design.threads(),
        dynamic_smem: u32::try_from(design.dynamic_smem()).unwrap_or(u32::MAX),
        pack: u32::try_from(pack).unwrap_or(u32::MAX),
        tile,
    }
}

/// The naive kernel for an element type of queries and of keys.
pub(crate) fn naive_spec(q_dtype: DType, kv_dtype: DType) -> KernelSpec {
    KernelSpec::new(Entry::Naive, [("dtype", code(q_dtype)), ("kv_dtype", code(kv_dtype))])
}

/// The join of the parts that a launch before left, for an output type.
pub(crate) fn merge_parts_spec(dtype: DType) -> KernelSpec {
    KernelSpec::new(Entry::MergeParts, [("dtype", code(dtype))])
}

/// Parts of a row that one warp of the join has under way at once (`cuda/kernel/merge_parts.cu`).
const JOINED_AT_ONCE: usize = 16;

/// Threads of a block of the join, for so many parts at most: one warp, or four. They join alike to the bit.
pub(crate) const fn merge_parts_threads(parts: usize) -> u32 {
    if parts <= JOINED_AT_ONCE { 32 } else { 128 }
}

/// The merge of two states, for an output type.
pub(crate) fn merge_states_spec(dtype: DType) -> KernelSpec {
    KernelSpec::new(Entry::MergeStates, [("dtype", code(dtype))])
}

/// The scatter of new rows into pages, for the rows' and the cache's type.
pub(crate) fn append_kv_spec(dtype: DType, cache: DType) -> KernelSpec {
    KernelSpec::new(Entry::AppendKv, [("dtype", code(dtype)), ("kv_dtype", code(cache))])
}

/// The copy of pages, for any type.
pub(crate) fn copy_blocks_spec() -> KernelSpec {
    KernelSpec::new(Entry::CopyBlocks, [])
}

/// A forward instance as the shipped list names it.
pub(crate) fn instance(entry: Entry, problem: &Problem, tile: Tile, has_parts: bool) -> Instance {
    let config = match entry {
        Entry::PrefillSm90a => hopper::config(problem, tile, has_parts),
        Entry::LatentSm90a => latent::config(problem, tile),
        _ => tiled(entry, problem, tile, 1),
    };
    let Config { spec, threads, dynamic_smem, .. } = config;
    Instance { spec, threads, dynamic_smem }
}

#[cfg(test)]
mod tests {
    use attn_core::ProblemSpec;

    use super::*;

    fn problem(dim: usize) -> Problem {
        let spec = ProblemSpec::new(DType::BF16, 8, 2, dim, &[300], &[300]);
        Problem::new(spec).expect("valid")
    }

    #[test]
    fn prefill_of_head_dim_128_fits_twice_on_a_hopper_multiprocessor() {
        let bytes = prefill_smem(&problem(128), PREFILL_TILES[0]);
        assert_eq!(bytes, Bytes(96 * 1024 + 256));
    }

    #[test]
    fn hopper_decode_fits_a_block_with_what_a_cluster_exchanges() {
        assert_eq!(exchange_bytes(16, 128), 9488);
        for dim in DIMS.into_iter().filter(|dim| *dim <= 128) {
            let mut spec = problem(dim).spec().clone();
            for softcap in [None, Some(30.0)] {
                spec.softcap = softcap;
                let problem = Problem::new(spec.clone()).expect("valid");
                for tile in decode_sm90a_tiles(&problem) {
                    let bytes = decode_sm90a_smem(&problem, *tile);
                    assert!(bytes <= Bytes(227 << 10), "{dim}: {bytes:?}");
                }
            }
        }
    }

    #[test]
    fn every_dim_fits_a_block_of_99_kib() {
        for dim in DIMS {
            let mut spec = problem(dim).spec().clone();
            for softcap in [None, Some(30.0)] {
                spec.softcap = softcap;
                let problem = Problem::new(spec.clone()).expect("valid");
                for tiles in [prefill_tiles(&problem), decode_tiles(&problem)] {
                    let fits = |&tile: &Tile| prefill_smem(&problem, tile) <= Bytes(99 << 10);
                    assert!(tiles.iter().any(fits), "{dim}");
                }
            }
        }
    }

    #[test]
    fn pack_joins_heads_where_rows_leave_tiles_empty() {
        let with = |rows: usize| {
            let spec = ProblemSpec::new(DType::BF16, 8, 2, 64, &[rows], &[4096]);
            prefill_pack(&Problem::new(spec).expect("valid"), 128)
        };
        assert_eq!((with(20), with(128), with(4000)), (4, 1, 1));
    }

    #[test]
    fn plain_instances_have_positive_scales_alone() {
        let mut spec = problem(64).spec().clone();
        for (scale, general) in
            [(Some(0.5), false), (Some(0.0), true), (Some(-1.0), true), (Some(1e-30), true)]
        {
            spec.scale = scale;
            assert_eq!(is_general(&Problem::new(spec.clone()).expect("valid")), general);
        }
    }
}
