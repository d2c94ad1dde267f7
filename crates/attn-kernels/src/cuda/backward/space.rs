//! Where the pieces of a backward's workspace are.
//!
//! The invariant: every piece starts on 16 bytes, for kernels move whole vectors; sizes are counted here alone, so that
//! a plan promises what the engine takes.

use attn_core::{Bytes, HostCaps, Problem, Split, Tile};

use super::config::{Config, Main};
use super::params::{ROW_TILE, TURN_ROWS};
use super::tiles::table_bytes;
use crate::cuda::config::padded;
use crate::cuda::lengths::written_rows;

/// Offsets of the pieces, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Space {
    pub(super) lse2: usize,
    pub(super) delta: usize,
    pub(super) dq_sum: usize,
    pub(super) row_sums: usize,
    pub(super) factor: usize,
    pub(super) turns: usize,
    pub(super) counter: usize,
    /// Of all.
    pub(super) bytes: usize,
}

impl Space {
    /// For so many tiles of padded rows; saturates.
    pub(super) fn new(heads: usize, row_tiles: usize, main: Main, dq_dim: usize) -> Self {
        let rows = heads.saturating_mul(row_tiles).saturating_mul(ROW_TILE);
        let mut bytes = 0usize;
        let mut piece = |words: usize| {
            let at = bytes;
            bytes = bytes.saturating_add(words.saturating_mul(size_of::<f32>()));
            at
        };
        let tiled = |words: usize| if main == Main::Tiled { words } else { 0 };
        Self {
            lse2: piece(rows),
            delta: piece(rows),
            dq_sum: piece(tiled(rows.saturating_mul(dq_dim))),
            row_sums: piece(tiled(rows)),
            factor: piece(rows - tiled(rows)),
            turns: piece(tiled(rows / TURN_ROWS)),
            counter: piece(tiled(4)),
            bytes,
        }
    }

    pub(super) fn of(problem: &Problem, config: &Config, row_tiles: usize) -> Self {
        Self::new(problem.q_heads(), row_tiles, config.main, config.dq_dim)
    }
}

/// What a plan promises, with rows of so many sums of dQ.
pub(super) fn stated(problem: &Problem, main: Main, dq_dim: usize) -> Bytes {
    let row_tiles = (0..problem.lengths().batch())
        .map(|sequence| written_rows(problem, sequence).div_ceil(ROW_TILE))
        .fold(0, usize::saturating_add);
    let space = Space::new(problem.q_heads(), row_tiles, main, dq_dim);
    Bytes::of(space.bytes.saturating_add(table_bytes(problem, main)), 1)
}

/// Workspace of the tiled kernels: f32 sums of dQ, three numbers and a turn of each padded row and head, and the tables of
/// unequal lengths. Nothing grows with the keys.
pub(crate) fn workspace(problem: &Problem, _: &HostCaps, _: Tile, _: Split) -> Bytes {
    stated(problem, Main::Tiled, padded(problem.head_dim()))
}

/// Workspace of the naive kernel: three numbers of each padded row and head, and the lengths.
pub(crate) fn naive_workspace(problem: &Problem, _: &HostCaps, _: Tile, _: Split) -> Bytes {
    stated(problem, Main::Naive, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_lie_on_vectors_and_do_not_depend_on_keys() {
        let tiled = Space::new(3, 5, Main::Tiled, 96);
        let rows = 3 * 5 * 128;
        assert_eq!((tiled.delta, tiled.dq_sum), (rows * 4, rows * 8));
        assert_eq!((tiled.row_sums, tiled.turns), (rows * 392, rows * 396));
        assert_eq!(tiled.bytes, tiled.turns + rows / 4 + 16);
        assert!(
            [tiled.delta, tiled.dq_sum, tiled.turns, tiled.counter].iter().all(|at| at % 16 == 0)
        );
        let naive = Space::new(3, 5, Main::Naive, 0);
        assert_eq!((naive.factor, naive.bytes), (rows * 8, rows * 12));
    }
}
