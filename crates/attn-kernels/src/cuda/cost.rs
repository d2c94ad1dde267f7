//! What a plan of a CUDA kernel takes beside its tensors.
//!
//! The invariant: a plan states what its run needs, counted here in closed form, without the tables that the
//! engine uploads. A workspace holds somewhat more: it keeps several plans, and grows by steps.

use attn_core::{Arrangement, Bytes, HostCaps, Problem, Split, Tile};

use super::lengths::Table;

/// Workspace of a kernel that does not divide keys: the prefix sums.
pub(crate) fn tables(problem: &Problem, _: &HostCaps, _: Tile, _: Split) -> Bytes {
    Bytes::of(Table::COUNT.saturating_mul(problem.lengths().batch() + 1), size_of::<i64>())
}

/// Workspace of the decode kernel: the prefix sums, and an f32 output row and LSE for each part of each row of
/// sequences with more than one part.
pub(crate) fn decode(problem: &Problem, host: &HostCaps, tile: Tile, split: Split) -> Bytes {
    let lengths = problem.lengths();
    let band = problem.band();
    let rows: usize = (0..lengths.batch())
        .map(|sequence| {
            let (q_len, kv_len) = (lengths.q(sequence), lengths.kv(sequence));
            let parts = split.parts(band.rows(0..q_len, q_len, kv_len).len());
            let written = match problem.q_arrangement() {
                Arrangement::Packed => q_len,
                Arrangement::Padded => lengths.longest_q(),
            };
            if parts > 1 { parts.saturating_mul(written) } else { 0 }
        })
        .fold(0, usize::saturating_add);
    let row = problem.q_heads().saturating_mul(problem.value_dim() + 1);
    tables(problem, host, tile, split) + Bytes::of(rows.saturating_mul(row), size_of::<f32>())
}
