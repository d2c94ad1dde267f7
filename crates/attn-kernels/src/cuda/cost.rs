//! What a plan of a CUDA kernel takes beside its tensors.
//!
//! The invariant: a plan states what its run needs, counted here in closed form, without the tables that the
//! engine uploads. A workspace holds somewhat more: it keeps several plans, and grows by steps.

use attn_core::{Bytes, HostCaps, Problem, Split, Tile};

use super::lengths::{Table, parts, written_rows};
use super::order::Order;

/// Workspace of a kernel that does not divide keys: the prefix sums.
pub(crate) fn tables(problem: &Problem, _: &HostCaps, _: Tile, _: Split) -> Bytes {
    Bytes::of(Table::COUNT.saturating_mul(problem.lengths().batch() + 1), size_of::<i64>())
}

/// Workspace of the Hopper prefill kernel: the prefix sums, and the order of the tiles of unequal sequences.
pub(crate) fn ordered(problem: &Problem, host: &HostCaps, tile: Tile, split: Split) -> Bytes {
    tables(problem, host, tile, split) + Order::bytes(problem, tile.q)
}

/// Workspace of the decode kernel: the prefix sums, and an f32 output row and LSE for each part of each row of
/// sequences with more than one part.
pub(crate) fn decode(problem: &Problem, host: &HostCaps, tile: Tile, split: Split) -> Bytes {
    let lengths = problem.lengths();
    let rows: usize = (0..lengths.batch())
        .map(|sequence| match parts(problem, split, sequence) {
            0 | 1 => 0,
            parts => parts.saturating_mul(written_rows(problem, sequence)),
        })
        .fold(0, usize::saturating_add);
    let row = problem.q_heads().saturating_mul(problem.value_dim() + 1);
    tables(problem, host, tile, split) + Bytes::of(rows.saturating_mul(row), size_of::<f32>())
}
