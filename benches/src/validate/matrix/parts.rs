//! Tiles of query rows whose keys are in parts: few rows of many heads, short chunks, and parts that some rows see nothing
//! of.
//!
//! The invariant: every option meets parts that begin inside a tile, a page and a window, since three of any length do; and
//! rows whose parts are too many for one warp to join.

use super::{
    BF16, Case, F8E4M3, F16, Hiding, Hnd, KINDS, Nhd, Pattern, Placement, Runs, Scales, TYPES,
    rotate,
};

/// Two parts, three that end anywhere, and more than one warp joins.
pub(super) const RUNS: Runs = Runs { chosen: true, parts: &[2, 3, 20], ..Runs::NONE };

pub(super) fn parts() -> Vec<Case> {
    let mut cases = Vec::new();
    // Packed rows of a step, and a chunk of a prompt.
    for (n, (name, kind)) in KINDS.into_iter().enumerate() {
        for (q, k) in [([8, 5], [900, 333]), ([40, 33], [515, 190])] {
            let dim = rotate(&[128, 64], n);
            let heads = if q[0] == 8 { (16, 2) } else { (4, 2) };
            let name = format!("{name}_q{}", q[0]);
            let case = kind(Case::new(name, rotate(&TYPES, n), heads, dim, &q, &k));
            cases.push(match n % 3 {
                0 => case,
                1 => case.paged(Nhd, 16),
                _ => case.paged(Hnd, 64),
            });
        }
    }
    cases.extend(dims());
    cases.extend(lengths());
    cases.extend(windows());
    cases.extend(extreme());
    cases.extend(fp8());
    cases
}

/// Values of another dim, and dims that tiles are padded to.
fn dims() -> impl Iterator<Item = Case> {
    let dims = [(64, 64), (96, 96), (72, 40), (128, 64), (192, 128), (192, 192), (256, 256)];
    dims.into_iter().enumerate().map(|(n, (dim, value_dim))| {
        let name = format!("dim_{dim}-{value_dim}");
        let case = Case::new(name, rotate(&TYPES, n), (8, 1), dim, &[16, 3], &[400, 260]);
        let case = case.value_dim(value_dim).causal();
        if n % 2 == 0 { case.paged(rotate(&[Nhd, Hnd], n / 2), 16) } else { case }
    })
}

/// Batches of long and short sequences, without keys and without rows, on either side of tile edges.
fn lengths() -> Vec<Case> {
    let new = |name: &str, heads, q: &[usize], k: &[usize]| {
        Case::new(name, BF16, heads, 128, q, k).causal()
    };
    let mixed = [[8, 0, 1, 16, 3], [2000, 77, 0, 129, 128]];
    vec![
        new("equal_lengths", (16, 1), &[8; 3], &[640; 3]),
        new("equal_lengths_paged", (16, 1), &[8; 3], &[640; 3]).paged(Nhd, 16),
        new("equal_lengths_padded", (16, 1), &[7; 2], &[300; 2]).padded(),
        new("mixed", (16, 1), &mixed[0], &mixed[1]),
        new("mixed_paged", (16, 1), &mixed[0], &mixed[1]).paged(Hnd, 32),
        new("mixed_padded", (16, 1), &mixed[0], &mixed[1]).padded().sinks(),
        new("many_tiles", (4, 1), &[300, 20], &[1000, 700]).paged(Nhd, 16),
        new("heads_apart", (12, 2), &[150, 9], &[500, 700]),
        new("one_row", (128, 1), &[1], &[1500]).paged(Nhd, 8),
        new("more_rows_than_keys", (8, 1), &[40, 30], &[20, 29]),
        new("one_key", (16, 1), &[8, 8], &[1, 2]),
        new("gaps", (16, 1), &[8, 3], &[600, 400])
            .q_at(Placement::AlignedGaps)
            .outputs_at(Placement::AlignedGaps)
            .kv_at(Placement::AlignedGaps),
        new("page_256", (16, 1), &[8, 3], &[1500, 257]).paged(Nhd, 256),
        new("page_24", (16, 1), &[8, 3], &[1500, 257]).paged(Nhd, 24),
    ]
}

/// Windows that end before some parts, or begin inside a page.
fn windows() -> impl Iterator<Item = Case> {
    let bounds = [(Some(70), Some(0)), (Some(300), None), (Some(513), Some(40)), (None, Some(5))];
    bounds.into_iter().enumerate().map(|(n, (left, right))| {
        let name = format!("window_{n}");
        let case = Case::new(name, rotate(&TYPES, n), (8, 2), 128, &[100, 16], &[1100, 700]);
        let case = case.window(left, right);
        if n % 2 == 0 { case.paged(Nhd, 16) } else { case }
    })
}

/// Parts without weight: far below the others, or hidden; and a sink where all are.
fn extreme() -> Vec<Case> {
    let new = |name: &str| Case::new(name, F16, (16, 1), 64, &[8], &[1300]);
    let patterns = Pattern::ALL.into_iter().map(|pattern| new(pattern.name()).pattern(pattern));
    let hidden = [
        new("first_tile_hidden").mask("qk", Hiding::FirstTile),
        new("all_hidden").mask("qk", Hiding::All).sinks(),
        new("rows_hidden").mask("hqk", Hiding::EvenRows).sinks(),
        new("blocks_hidden").blocks((16, 128), "hqk", Hiding::FirstTile).sinks(),
    ];
    patterns.chain(hidden).collect()
}

/// Queries and keys of fp8, whose values are transposed.
fn fp8() -> impl Iterator<Item = Case> {
    [64, 128, 256].into_iter().enumerate().map(|(n, dim)| {
        let case = Case::new(format!("fp8_{dim}"), F8E4M3, (16, 1), dim, &[8, 3], &[700, 200]);
        let case = case.scales(Scales::PerHead, Scales::PerHead).causal();
        if n == 1 { case.paged(Nhd, 16).sinks() } else { case }
    })
}

/// Those for a run under a sanitizer.
pub(super) fn few() -> Vec<Case> {
    vec![
        Case::new("step", BF16, (16, 1), 128, &[8, 3], &[300, 140]).paged(Nhd, 16).causal().sinks(),
        Case::new("chunk", F16, (4, 2), 64, &[40, 5], &[200, 150]).padded(),
        Case::new("fp8", F8E4M3, (16, 1), 128, &[8], &[300]).scales(Scales::PerHead, Scales::One),
        Case::new("blocks", BF16, (4, 2), 128, &[33], &[260])
            .blocks((16, 32), "hqk", Hiding::Some)
            .paged(Hnd, 16),
    ]
}
