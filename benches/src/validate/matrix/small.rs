//! The reduced matrix: every kernel, mask kind, cache and head dim once, for runs under a sanitizer.
//!
//! The invariant: about a hundred small launches. A sanitizer makes each ten to fifty times slower and watches
//! accesses, not values, so one launch of a code path says what a hundred would.

use super::{
    BF16, CACHES, Case, F8E4M3, F16, Group, Hnd, KINDS, Nhd, Placement, Runs, Scales, TYPES,
    clusters, latent, named, parts, rotate,
};

/// The groups of the reduced matrix.
pub(in crate::validate) fn small() -> Vec<Group> {
    let group = |name, runs, cases: Vec<Case>| Group { name, runs, cases: named(name, cases) };
    vec![
        group("small_prefill", Runs { prefill: true, ..Runs::NONE }, prefill()),
        group("small_decode", Runs { splits: &[Some(3)], ..Runs::NONE }, decode()),
        group("small_clusters", clusters::RUNS, clusters::few()),
        group("small_latent", Runs { splits: &[None, Some(2)], ..Runs::NONE }, latent::few()),
        group("small_parts", Runs { parts: &[3], ..Runs::NONE }, parts::few()),
        group("small_naive", Runs { naive: true, ..Runs::NONE }, naive()),
    ]
}

fn prefill() -> Vec<Case> {
    let base = |name: &str, at: usize| {
        Case::new(name, rotate(&TYPES, at), (4, 2), 64, &[33, 5], &[70, 40])
    };
    let mut cases: Vec<Case> =
        KINDS.into_iter().enumerate().map(|(n, (name, kind))| kind(base(name, n))).collect();
    for (n, (cache, name)) in CACHES.into_iter().enumerate() {
        let case = base(&format!("paged_{name}"), n).causal();
        let case = match cache {
            Some(cache) => case.fp8(cache, Scales::PerHead),
            None => case,
        };
        cases.push(case.paged(rotate(&[Nhd, Hnd], n), 16));
    }
    for (dim, value_dim) in [(32, 32), (72, 72), (96, 96), (128, 128), (192, 128), (256, 256)] {
        let name = format!("dim_{dim}-{value_dim}");
        let case = Case::new(name, BF16, (2, 1), dim, &[33], &[70]).causal();
        cases.push(case.value_dim(value_dim));
    }
    // Heads of a group share tiles above; without a group each has its own.
    for dim in [64, 128, 256] {
        let alone = |name: &str, dtype| {
            let name = format!("{name}_{dim}");
            Case::new(name, dtype, (2, 2), dim, &[33, 5], &[70, 40]).causal()
        };
        cases.push(alone("alone", BF16));
        let fp8 = alone("fp8", F8E4M3).scales(Scales::PerHead, Scales::PerHead);
        cases.push(if dim == 128 { fp8.paged(Nhd, 16) } else { fp8 });
    }
    cases.extend([
        Case::new("alone_paged", BF16, (2, 2), 64, &[33, 5], &[70, 40]).paged(Hnd, 16),
        base("padded", 0).padded(),
        base("aligned_gaps", 1).q_at(Placement::AlignedGaps).kv_at(Placement::AlignedGaps),
    ]);
    cases
}

fn decode() -> Vec<Case> {
    let base = |name: &str, at: usize| {
        let case = Case::new(name, rotate(&TYPES, at), (4, 2), 64, &[1, 2], &[70, 130]);
        if at.is_multiple_of(2) { case.paged(Nhd, 16) } else { case }
    };
    let mut cases: Vec<Case> =
        KINDS.into_iter().enumerate().map(|(n, (name, kind))| kind(base(name, n))).collect();
    for (n, (cache, name)) in CACHES.into_iter().enumerate() {
        let case = base(&format!("cache_{name}"), n);
        cases.push(match cache {
            Some(cache) => case.fp8(cache, Scales::PerHead),
            None => case,
        });
    }
    cases.extend([
        Case::new("dim_128", BF16, (8, 1), 128, &[1, 16], &[257, 64]).paged(Hnd, 5).causal(),
        Case::new("dim_256", F16, (2, 1), 256, &[3], &[140]).causal(),
        Case::new("dim_192-128", BF16, (4, 4), 192, &[1], &[140]).value_dim(128),
    ]);
    cases
}

fn naive() -> Vec<Case> {
    let everything = |case: Case| KINDS[..9].iter().fold(case, |case, (_, kind)| kind(case));
    vec![
        everything(Case::new("everything", BF16, (4, 2), 64, &[9, 3], &[33, 70])),
        everything(
            Case::new("everything_paged", F16, (4, 2), 40, &[9, 3], &[33, 70]).paged(Hnd, 5),
        ),
        Case::new("fp8", BF16, (2, 1), 72, &[3], &[40]).fp8(F8E4M3, Scales::PerHead).paged(Nhd, 8),
        Case::new("fp8_queries", F8E4M3, (4, 2), 64, &[9, 0, 3], &[33, 5, 70])
            .scales(Scales::PerHead, Scales::Scalar)
            .causal(),
        Case::new("f32_padded", attn_core::DType::F32, (2, 1), 9, &[5, 0, 2], &[11, 3, 0]).padded(),
    ]
}
