//! From a problem and a tile to the instances of a backward: macros, threads, shared memory.
//!
//! The invariant: as of [`crate::cuda::config`], everything is a function of the problem and the tile, and the arithmetic
//! repeats what the device headers assert.

use attn_core::{Bytes, DType, Plan, Problem, Tile};

use super::hopper;
use crate::cuda::config::{code, has_score_options, padded};
use crate::error::Error;
use crate::instances::Instance;
use crate::spec::{Entry, KernelSpec};

/// Tiles of rows of up to 64 columns: query rows and keys.
const NARROW_TILES: &[Tile] = &[Tile { q: 64, kv: 128 }];

/// Tiles of rows of up to 128 columns. The second is for devices with 99 KiB of shared memory a block.
const TILES: &[Tile] = &[Tile { q: 64, kv: 128 }, Tile { q: 32, kv: 128 }];

/// Tiles of wider rows: for 227, 163 and 99 KiB.
const WIDE_TILES: &[Tile] =
    &[Tile { q: 64, kv: 64 }, Tile { q: 32, kv: 64 }, Tile { q: 32, kv: 32 }];

/// Threads of a block of `backward_prepare` and `backward_finish`.
pub(crate) const ROWS_THREADS: u32 = 256;

/// Threads of a block of the naive kernel.
pub(crate) const NAIVE_THREADS: u32 = 128;

/// Which main kernel a plan is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Main {
    /// Tiles of keys past which query rows stream, between `backward_prepare` and `backward_finish`.
    Tiled,
    /// The passes of `backward_naive`, alone.
    Naive,
}

/// The main kernel's instance, and what the launches must know of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Config {
    pub(crate) main: Main,
    /// Whether the kernel finds q, k, v and the gradient of o by tensor maps, and leaves the sums of dQ in fours.
    pub(crate) has_maps: bool,
    pub(crate) spec: KernelSpec,
    pub(crate) threads: u32,
    pub(crate) dynamic_smem: u32,
    /// Query rows and keys of a tile.
    pub(crate) tile: Tile,
    /// Elements of a row of the sums of dQ.
    pub(crate) dq_dim: usize,
}

/// How a block is made of warps.
#[derive(Debug, Clone, Copy)]
struct Shape {
    /// Warps along the keys, 16 each.
    key_warps: usize,
    /// Warps that have the same keys.
    sharers: usize,
    /// Tiles of query rows in shared memory.
    stages: usize,
}

/// Tiles of the portable kernel.
pub(crate) fn tiles(problem: &Problem) -> &'static [Tile] {
    match problem.head_dim().max(problem.value_dim()) {
        ..=64 => NARROW_TILES,
        65..=128 => TILES,
        _ => WIDE_TILES,
    }
}

/// The naive kernel has no tile: a block a row, or a key.
pub(crate) const fn naive_tiles(_: &Problem) -> &'static [Tile] {
    &[Tile { q: 1, kv: 128 }]
}

/// Accumulators of wide rows do not fit one warp: two have the same keys, each half of the columns.
fn shape(problem: &Problem, tile: Tile) -> Shape {
    let is_wide = problem.head_dim().max(problem.value_dim()) > 128;
    let stages = match (is_wide, tile) {
        (false, Tile { q: 32, .. }) | (true, Tile { kv: 32, .. }) => 1,
        _ => 2,
    };
    Shape { key_warps: tile.kv / 16, sharers: if is_wide { 2 } else { 1 }, stages }
}

/// Dynamic shared memory of a block of the portable kernel (`cuda/attn/backward.cuh`): keys and values, stages of query
/// rows, of their output's gradient and of two numbers each, then dS and, where warps share keys, P.
fn dynamic_smem(problem: &Problem, tile: Tile) -> usize {
    let Shape { sharers, stages, .. } = shape(problem, tile);
    let dims = padded(problem.head_dim()) + padded(problem.value_dim());
    let stage = tile.q * dims * 2 + tile.q * 8;
    let pairs = tile.q * tile.kv * 2 * if sharers > 1 { 2 } else { 1 };
    tile.kv * dims * 2 + stages * stage + pairs
}

/// Shared memory of a block of the portable kernel; 128 bytes of it are static.
pub(crate) fn smem(problem: &Problem, tile: Tile) -> Bytes {
    Bytes::of(dynamic_smem(problem, tile) + 128, 1)
}

/// Shared memory of a block of the naive kernel, all of it static: `Shared` in `cuda/kernel/backward_naive.cu`.
pub(crate) fn naive_smem(_: &Problem, _: Tile) -> Bytes {
    Bytes(1040)
}

/// Whether the scores need more than a scale and the band: the general instance, whose log-sum-exp is natural.
pub(crate) fn is_general(problem: &Problem) -> bool {
    has_score_options(problem) || problem.dropout().is_some()
}

/// The main instance of a backward plan.
///
/// # Errors
/// [`Error::Plan`] for a plan of a kernel or with a tile that is not in the catalogue.
pub(crate) fn main(plan: &Plan) -> Result<Config, Error> {
    let problem = &plan.problem;
    match plan.kernel {
        "cuda_backward_sm90a" if hopper::tiles(problem).contains(&plan.tile) => {
            Ok(hopper::config(problem, plan.tile))
        }
        "cuda_backward" if tiles(problem).contains(&plan.tile) => Ok(tiled(problem, plan.tile)),
        "cuda_backward_naive" => Ok(Config {
            main: Main::Naive,
            has_maps: false,
            spec: naive_spec(problem.q_dtype()),
            threads: NAIVE_THREADS,
            dynamic_smem: 0,
            tile: plan.tile,
            dq_dim: 0,
        }),
        kernel => Err(Error::Plan {
            expected: "a backward kernel of the CUDA engine with one of its tiles",
            got: format!("{kernel} with tile {}x{}", plan.tile.q, plan.tile.kv),
        }),
    }
}

/// The portable kernel's instance of a problem and its tile.
pub(crate) fn tiled(problem: &Problem, tile: Tile) -> Config {
    let Shape { key_warps, sharers, stages } = shape(problem, tile);
    let (head_dim, value_dim) = (padded(problem.head_dim()), padded(problem.value_dim()));
    let int = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
    let defines = [
        ("dtype", code(problem.q_dtype())),
        ("head_dim", int(head_dim)),
        ("value_dim", int(value_dim)),
        ("general", i64::from(is_general(problem))),
        ("block_m", int(tile.q)),
        ("key_warps", int(key_warps)),
        ("sharers", int(sharers)),
        ("stages", int(stages)),
    ];
    Config {
        main: Main::Tiled,
        has_maps: false,
        spec: KernelSpec::new(Entry::Backward, defines),
        threads: u32::try_from(32 * key_warps * sharers).unwrap_or(u32::MAX),
        dynamic_smem: u32::try_from(dynamic_smem(problem, tile)).unwrap_or(u32::MAX),
        tile,
        dq_dim: head_dim,
    }
}

/// The first launch, for an element type.
pub(crate) fn prepare_spec(dtype: DType) -> KernelSpec {
    KernelSpec::new(Entry::BackwardPrepare, [("dtype", code(dtype))])
}

/// The last launch, for an element type.
pub(crate) fn finish_spec(dtype: DType) -> KernelSpec {
    KernelSpec::new(Entry::BackwardFinish, [("dtype", code(dtype))])
}

/// The passes by the definition, for an element type.
pub(crate) fn naive_spec(dtype: DType) -> KernelSpec {
    KernelSpec::new(Entry::BackwardNaive, [("dtype", code(dtype))])
}

/// Whether dQ is summed in an order that depends on the problem alone.
pub(crate) fn is_ordered(problem: &Problem) -> bool {
    problem.options().deterministic || problem.options().batch_invariant
}

/// Every instance that runs of a plan launch.
///
/// # Errors
/// As [`main`].
pub(crate) fn instances(plan: &Plan) -> Result<Vec<KernelSpec>, Error> {
    let config = main(plan)?;
    let problem = &plan.problem;
    let dtype = problem.q_dtype();
    let mut specs = vec![config.spec];
    if config.main == Main::Tiled {
        specs.extend([prepare_spec(dtype), finish_spec(dtype)]);
        if has_bias_pass(problem) {
            specs.push(naive_spec(dtype));
        }
    }
    Ok(specs)
}

/// Whether the gradient of the bias is a pass of the naive kernel after a tiled one: in order, or of no rows at all.
pub(crate) fn has_bias_pass(problem: &Problem) -> bool {
    let is_empty = problem.lengths().longest_q() == 0 || problem.q_heads() == 0;
    problem.wants_dbias() && (is_ordered(problem) || is_empty)
}

impl From<Config> for Instance {
    /// As the shipped list names it.
    fn from(config: Config) -> Self {
        let Config { spec, threads, dynamic_smem, .. } = config;
        Self { spec, threads, dynamic_smem }
    }
}

#[cfg(test)]
mod tests {
    use attn_core::ProblemSpec;

    use super::*;

    fn problem(dims: (usize, usize)) -> Problem {
        let mut spec = ProblemSpec::new(DType::BF16, 8, 2, dims.0, &[300], &[300]);
        spec.value_dim = dims.1;
        Problem::new(spec).expect("valid")
    }

    #[test]
    fn every_dim_fits_a_block_of_99_kib_and_the_largest_tile_227() {
        for dims in [(32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (64, 256)] {
            let problem = problem(dims);
            let tiles = tiles(&problem);
            assert!(smem(&problem, tiles[0]) <= Bytes(227 << 10), "{dims:?}");
            let smallest = tiles.last().expect("one at least");
            assert!(smem(&problem, *smallest) <= Bytes(99 << 10), "{dims:?}");
        }
    }

    #[test]
    fn wide_rows_have_two_warps_to_the_same_keys() {
        let wide = tiled(&problem((256, 256)), WIDE_TILES[0]);
        assert_eq!((wide.threads, wide.spec.get("sharers"), wide.dq_dim), (256, Some(2), 256));
        let narrow = tiled(&problem((80, 64)), TILES[0]);
        assert_eq!((narrow.threads, narrow.spec.get("sharers"), narrow.dq_dim), (256, Some(1), 96));
    }
}
