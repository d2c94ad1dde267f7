//! Equal sequences, whose parts a Hopper joins in clusters: of all parts, of some, and of none.
//!
//! The invariant: equal lengths are what clusters want, and what the other tables, which pair short sequences with long
//! ones, hardly have.

use super::{BF16, CACHES, Case, F8E4M3, F16, Hnd, KINDS, Nhd, Runs, Scales, TYPES, rotate};

/// Two, eight and sixteen parts are a cluster; 64 of 16 rows are four, whose results are joined once more.
pub(super) const RUNS: Runs =
    Runs { splits: &[None, Some(2), Some(4), Some(8), Some(13), Some(16), Some(64)], ..Runs::NONE };

pub(super) fn clusters() -> Vec<Case> {
    let mut cases = Vec::new();
    for (n, (name, kind)) in KINDS.into_iter().enumerate() {
        let (dim, heads) = rotate(&[(128, (4, 2)), (64, (8, 1))], n);
        let case = Case::new(name, rotate(&TYPES, n), heads, dim, &[1, 1], &[300, 300]);
        cases.push(kind(if n % 3 == 0 { case } else { case.paged(rotate(&[Nhd, Hnd], n), 16) }));
    }
    for (n, (cache, name)) in CACHES.into_iter().enumerate() {
        let name = format!("cache_{name}");
        let case = Case::new(name, rotate(&TYPES, n), (4, 1), 128, &[2], &[517]);
        let case = match cache {
            Some(cache) => case.fp8(cache, Scales::PerHead),
            None => case,
        };
        cases.push(case.paged(Nhd, 16).causal());
    }
    cases.extend([
        Case::new("many_rows", BF16, (16, 1), 128, &[1], &[2048]).paged(Nhd, 16),
        Case::new("many_rows_sinks", F16, (16, 1), 128, &[1], &[2048]).paged(Hnd, 64).sinks(),
        Case::new("several_rows", BF16, (2, 1), 128, &[8; 3], &[400; 3]).paged(Nhd, 16).causal(),
        Case::new("padded", BF16, (4, 2), 128, &[3; 2], &[300; 2]).padded().causal(),
        Case::new("dim_72", BF16, (4, 2), 72, &[1; 2], &[300; 2]),
        Case::new("dim_128-40", F16, (4, 2), 128, &[1; 2], &[300; 2]).value_dim(40),
        Case::new("few_keys", BF16, (4, 2), 128, &[1; 2], &[9; 2]),
        Case::new("window", BF16, (4, 2), 128, &[2; 2], &[900; 2]).window(Some(70), Some(0)),
        Case::new("fp8_sinks", BF16, (4, 2), 64, &[1], &[700])
            .fp8(F8E4M3, Scales::PerHead)
            .paged(Nhd, 16)
            .sinks(),
    ]);
    cases
}

/// Those for a run under a sanitizer.
pub(super) fn few() -> Vec<Case> {
    vec![
        Case::new("dense", F16, (4, 2), 64, &[1, 1], &[300, 300]).sinks(),
        Case::new("paged", BF16, (4, 2), 128, &[2], &[300]).paged(Nhd, 16).causal(),
        Case::new("fp8", BF16, (4, 2), 128, &[1], &[300])
            .fp8(F8E4M3, Scales::PerHead)
            .paged(Hnd, 5),
        Case::new("many_rows", BF16, (16, 1), 72, &[1], &[1024]).paged(Nhd, 16),
    ]
}
