//! The Hopper backward kernel: its tiles, and its instance for a problem.
//!
//! The invariant: shared memory is counted as `cuda/attn/backward_block_sm90a.cuh` lays it out, and an instance fits the
//! registers that `cuda/base/config_backward_sm90a.cuh` gives its warpgroups without a spill.

use attn_core::{Bytes, HostCaps, Problem, Split, Tile};

use super::config::{Config, Main, is_ordered};
use super::space;
use super::tiles::Tiles;
use crate::cuda::config::code;
use crate::spec::{Entry, KernelSpec};

/// Most elements of a row of queries, keys or values.
pub(crate) const MOST_DIM: usize = 256;

/// Up to so many columns, sums of 64 keys of either gradient are registers of a warpgroup; wider ones are shared by two.
const MOST_OWN_DIM: usize = 128;

/// Tiles of rows of up to 128 columns; of up to 64, which leave registers for more query rows; of wider ones.
const TILES: &[Tile] = &[Tile { q: 64, kv: 128 }];
const NARROW_TILES: &[Tile] = &[Tile { q: 128, kv: 128 }];
const WIDE_TILES: &[Tile] = &[Tile { q: 64, kv: 64 }];

/// A block has three warpgroups.
const THREADS: u32 = 384;

/// What `KeyTile` takes in `cuda/kernel/backward_sm90a.cu`.
const STATIC_BYTES: usize = 80;

/// Dimensions are padded to whole panels, which the copy engine fills with zeros; keys are no narrower than values.
fn dims(problem: &Problem) -> (usize, usize) {
    if problem.head_dim().max(problem.value_dim()) > MOST_OWN_DIM {
        return (MOST_DIM, MOST_DIM);
    }
    let padded = |dim: usize| dim.max(1).next_multiple_of(64);
    let value_dim = padded(problem.value_dim());
    (padded(problem.head_dim()).max(value_dim), value_dim)
}

/// The tile of a problem.
pub(crate) fn tiles(problem: &Problem) -> &'static [Tile] {
    match dims(problem).0 {
        ..=64 => NARROW_TILES,
        65..=MOST_OWN_DIM => TILES,
        _ => WIDE_TILES,
    }
}

/// Bytes of keys, values, query rows, gradients of output and of scores, sums of dQ or, of wide rows, weights, keys that
/// are 1, two numbers of a row, and barriers; the way to the next multiple of 1024 included.
fn dynamic_smem(problem: &Problem, tile: Tile) -> usize {
    let (dim, value_dim) = dims(problem);
    let is_wide = dim > MOST_OWN_DIM;
    // Tiles of queries and of the output's gradient in flight.
    let (query_stages, gradient_stages) = if is_wide { (2, 1) } else { (3, 2) };
    let stages = query_stages * dim + gradient_stages * value_dim;
    let pairs = if is_wide { 4 } else { 2 } * tile.kv;
    let halves = tile.kv * (dim + value_dim) + tile.q * (stages + pairs);
    // Sums of dQ, and of 64 rows a warpgroup.
    let sums = 2 * (64 * 64 + 64);
    let numbers = sums + tile.q * (query_stages + gradient_stages);
    let ones = if is_wide { 128 } else { 2048 };
    let barriers = 2 + 2 * (query_stages + gradient_stages);
    1024 + 2 * halves + ones + 4 * numbers + 8 * barriers
}

/// Shared memory of a block.
pub(crate) fn smem(problem: &Problem, tile: Tile) -> Bytes {
    Bytes::of(dynamic_smem(problem, tile) + STATIC_BYTES, 1)
}

/// Workspace as the portable kernel's, its sums as wide as this one's tiles.
pub(crate) fn workspace(problem: &Problem, _: &HostCaps, _: Tile, _: Split) -> Bytes {
    space::stated(problem, Main::Tiled, dims(problem).0)
}

/// The instance of a problem and its tile.
pub(crate) fn config(problem: &Problem, tile: Tile) -> Config {
    let int = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
    let (head_dim, value_dim) = dims(problem);
    let defines = [
        ("dtype", code(problem.q_dtype())),
        ("head_dim", int(head_dim)),
        ("value_dim", int(value_dim)),
        ("capped", i64::from(problem.softcap().is_some())),
        ("deterministic", i64::from(is_ordered(problem))),
    ];
    Config {
        main: Main::Tiled,
        has_maps: true,
        spec: KernelSpec::new(Entry::BackwardSm90a, defines),
        threads: THREADS,
        dynamic_smem: u32::try_from(dynamic_smem(problem, tile)).unwrap_or(u32::MAX),
        tile,
        dq_dim: head_dim,
    }
}

/// What of a Hopper's second-level cache, 50 MiB, is for rows.
const SECTION_BYTES: usize = 40 << 20;

/// KV heads whose blocks run side by side, of all sequences where they are equal: as many as leave the rows of a query
/// head of each, with their gradients and sums, in the second-level cache, which all blocks of a head read. A number that
/// divides theirs is preferred: a last section of few heads would end with long blocks and idle multiprocessors.
pub(super) fn section(problem: &Problem, config: &Config, tiles: &Tiles) -> usize {
    let row = 2 * (problem.head_dim() + problem.value_dim()) + 4 * config.dq_dim;
    let head = problem.lengths().longest_q().saturating_mul(row).max(1);
    let most = (SECTION_BYTES / head).clamp(1, 1 << 10);
    let sequences = if tiles.uniform.is_some() { problem.lengths().batch() } else { 1 };
    let heads = problem.kv_heads().saturating_mul(sequences).max(1);
    if heads <= most {
        return most;
    }
    (most / 2 + 1..=most).rev().find(|width| heads % width == 0).unwrap_or(most)
}

#[cfg(test)]
mod tests {
    use attn_core::{DType, ProblemSpec};

    use super::*;

    fn problem(dims: (usize, usize)) -> Problem {
        let mut spec = ProblemSpec::new(DType::BF16, 8, 2, dims.0, &[300], &[300]);
        spec.value_dim = dims.1;
        Problem::new(spec).expect("valid")
    }

    #[test]
    fn every_dim_fits_a_block_of_a_hopper() {
        for dim in (8..=MOST_DIM).step_by(8) {
            for value_dim in [8, 64, 72, 128, 136, 256] {
                let problem = problem((dim, value_dim));
                let bytes = smem(&problem, tiles(&problem)[0]);
                assert!(bytes <= Bytes(227 << 10), "{dim} {value_dim}: {bytes:?}");
            }
        }
    }

    #[test]
    fn sections_hold_as_many_heads_as_the_cache_has_room_for() {
        let of = |rows: usize, heads: usize, lens: usize| {
            let (q, kv) = (vec![rows; lens], vec![rows; lens]);
            let spec = ProblemSpec::new(DType::BF16, heads, heads, 128, &q, &kv);
            let problem = Problem::new(spec).expect("valid");
            let config = config(&problem, TILES[0]);
            section(&problem, &config, &Tiles::new(&problem, &config).expect("countable"))
        };
        assert_eq!([of(0, 8, 1), of(2048, 23, 1), of(1 << 17, 8, 1)], [1 << 10, 20, 1]);
        // Of 5, 4 divides the heads of all sequences; of 5, nothing above half of it divides 23.
        assert_eq!([of(8192, 8, 1), of(8192, 16, 2), of(8192, 23, 1)], [4, 4, 5]);
    }

    #[test]
    fn tiles_have_as_many_sums_of_dq_whatever_the_dimension() {
        for (own, padded) in [((64, 64), (64, 64)), ((40, 72), (128, 128)), ((128, 64), (128, 64))]
        {
            let problem = problem(own);
            assert_eq!(dims(&problem), padded);
            let tile = tiles(&problem)[0];
            assert_eq!(tile.q * config(&problem, tile).dq_dim, 8192);
        }
        assert_eq!(dims(&problem((192, 128))), (256, 256));
    }
}
