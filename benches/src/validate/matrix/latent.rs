//! Latent caches, of whose rows each is the key of all heads and its first elements the value: 576 and 512, as
//! latent attention has them in its absorbed form.
//!
//! The invariant: lengths lie on either side of the tile's 64 keys, with an empty sequence and one of many tiles, and what
//! a sequence does not own of its last page is NaN, as everywhere.

use super::{
    BF16, Case, F8E4M3, F16, Hiding, Hnd, KINDS, Nhd, Pattern, Runs, Scales, TYPES, rotate,
};

/// Whole, and in parts of a tile, of several, and of less than one.
pub(super) const RUNS: Runs =
    Runs { chosen: true, naive: true, splits: &[None, Some(1), Some(3), Some(16)], ..Runs::NONE };

const LENGTHS: [usize; 6] = [1000, 0, 1, 63, 64, 65];

/// A case of a number of query heads on one latent head.
fn case(
    name: impl Into<String>,
    at: usize,
    heads: (usize, usize),
    q: &[usize],
    k: &[usize],
) -> Case {
    Case::new(name, rotate(&TYPES, at), heads, 576, q, k).value_dim(512)
}

pub(super) fn latent() -> Vec<Case> {
    let mut cases = Vec::new();
    for (n, heads) in [16, 32, 64, 128].into_iter().enumerate() {
        for (m, page) in [1, 16, 64].into_iter().enumerate() {
            // Every number of rows with every number of heads or size of page, not with all of both.
            for rows in [1, 2 + (n + m) % 3] {
                let at = cases.len();
                let name = format!("h{heads}_page{page}_q{rows}");
                let case = case(name, at / 2, (heads, 1), &[rows; 6], &LENGTHS).causal();
                cases.push(case.paged(rotate(&[Nhd, Hnd], at), page).latent());
            }
        }
    }
    for (n, page) in [2, 5, 48, 256].into_iter().enumerate() {
        let case = case(format!("page{page}"), n, (16, 1), &[1, 2, 1], &[130, 257, 64]);
        cases.push(case.causal().paged(Nhd, page).latent());
    }
    for (n, (name, kind)) in KINDS.into_iter().enumerate() {
        let case = case(format!("option_{name}"), n, (20, 1), &[1, 3, 5], &[300, 66, 129]);
        cases.push(kind(case).paged(rotate(&[Nhd, Hnd], n), 16).latent());
    }
    for (n, pattern) in Pattern::ALL.into_iter().enumerate() {
        let case = case(format!("scores_{}", pattern.name()), n, (16, 1), &[1, 3], &[700, 130])
            .pattern(pattern);
        cases.push(case.causal().paged(Nhd, 16).latent());
    }
    let equal = |name: &str, at: usize, heads, q: usize, k: usize| {
        case(name, at, heads, &[q; 3], &[k; 3]).causal()
    };
    let mixed = |name: &str, at: usize| case(name, at, (16, 1), &[1, 4, 0, 2], &[200, 77, 9, 0]);
    cases.extend([
        // Lengths that are parameters of the launch.
        equal("equal", 0, (128, 1), 1, 320).paged(Nhd, 64).latent(),
        equal("equal_rows", 1, (16, 1), 3, 200).paged(Nhd, 16).latent(),
        equal("equal_few", 0, (16, 1), 1, 7).paged(Nhd, 16).latent(),
        // Heads that are no whole tile, and several latent heads.
        equal("h1", 1, (1, 1), 2, 150).paged(Nhd, 16).latent(),
        equal("h71", 0, (71, 1), 2, 150).paged(Hnd, 16).latent(),
        equal("two_latent_heads", 1, (32, 2), 2, 150).paged(Nhd, 16).latent(),
        equal("two_latent_heads_hnd", 0, (8, 2), 1, 150).paged(Hnd, 16).latent(),
        // A prompt after a prefix: rows of many tiles.
        case("prompt", 1, (16, 1), &[45, 70], &[45, 200]).causal().paged(Nhd, 64).latent(),
        case("prompt_open", 0, (16, 1), &[45, 5], &[130, 200]).paged(Nhd, 16).latent(),
        case("rows_before_keys", 0, (16, 1), &[9], &[4]).causal().paged(Nhd, 16).latent(),
        case("window", 0, (16, 1), &[1, 4], &[900, 300])
            .window(Some(150), Some(0))
            .paged(Nhd, 16)
            .latent(),
        mixed("padded", 0).causal().padded().paged(Nhd, 16).latent(),
        mixed("padded_sinks", 1).sinks().padded().paged(Hnd, 64).latent(),
        mixed("shared_pages", 0).causal().paged(Nhd, 16).latent().shared_pages(4),
        mixed("all_hidden", 1).mask("qk", Hiding::All).paged(Nhd, 16).latent(),
        mixed("negative_scale", 0).scale(-0.05).paged(Nhd, 16).latent(),
        // What the kernel leaves to others.
        mixed("fp8_cache", 0).fp8(F8E4M3, Scales::PerHead).paged(Nhd, 16).latent(),
        Case::new("dim_320-256", BF16, (16, 1), 320, &[1, 3], &[200, 70])
            .value_dim(256)
            .paged(Nhd, 16)
            .latent(),
        Case::new("separate_values", F16, (16, 1), 576, &[1, 3], &[200, 70])
            .value_dim(512)
            .paged(Nhd, 16),
    ]);
    cases
}

/// Those for a run under a sanitizer.
pub(super) fn few() -> Vec<Case> {
    vec![
        case("decode", 0, (16, 1), &[1, 2], &[130, 65]).causal().paged(Nhd, 16).latent(),
        case("page_1", 1, (71, 1), &[1, 1], &[65, 65]).paged(Nhd, 1).latent(),
        case("options", 0, (16, 1), &[2], &[70])
            .softcap(3.0)
            .mask("qk", Hiding::Some)
            .paged(Hnd, 5)
            .latent(),
    ]
}
