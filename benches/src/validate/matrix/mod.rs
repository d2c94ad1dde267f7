//! The generated cases of a device's judgement: every option at every edge, in tables.
//!
//! The invariant: a table names what it varies and crosses it with what it may interact with; everything else
//! is rotated, so that each value meets many others without a full product. Data is as adversarial as the
//! corpus': whatever a call may not read is NaN, and so are outputs before the call. The corpus stays as it
//! is, small and meant for every engine; here are the edges of this device's tiles, pages and splits.

mod clusters;
mod fp8;
mod latent;
mod parts;
mod small;

use attn_core::DType::{BF16, F8E4M3, F8E5M2, F16};
use attn_core::PageOrder::{Hnd, Nhd};
use attn_core::{DType, PageOrder};
use attn_reference::case::{Hiding, Scales};
use attn_reference::{Case, Pattern, Placement};

pub(super) use self::small::small;

/// How every case of a group is run, beside what selection chooses for it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Runs {
    /// As selection has it.
    pub(super) chosen: bool,
    /// The naive kernel, the others switched off.
    pub(super) naive: bool,
    /// Prefill forced.
    pub(super) prefill: bool,
    /// Prefill forced with keys in so many parts, by kernels that divide them.
    pub(super) parts: &'static [usize],
    /// Decode forced, where rows are few enough, with these split counts.
    pub(super) splits: &'static [Option<usize>],
    /// Every tile of every kernel, beside those that selection takes.
    pub(super) tiles: bool,
}

impl Runs {
    const NONE: Self =
        Self { chosen: false, naive: false, prefill: false, parts: &[], splits: &[], tiles: false };
    const USUAL: Self =
        Self { chosen: true, naive: true, prefill: true, splits: FEW, ..Self::NONE };
    const SPLITS: Self = Self { prefill: false, splits: ALL, ..Self::USUAL };
    /// As selection has it, by the naive kernel, and by every tile of those that take it: most kernels take no fp8
    /// queries, and their refusals would be most of what is recorded.
    const FP8: Self = Self { chosen: true, naive: true, tiles: true, ..Self::NONE };
    const TILES: Self = Self { tiles: true, parts: &[3], ..Self::NONE };
    /// Those of the corpus.
    pub(super) const CORPUS: Self = Self { splits: MANY, parts: &[3], ..Self::USUAL };
}

const FEW: &[Option<usize>] = &[None, Some(1), Some(3), Some(8)];

const MANY: &[Option<usize>] =
    &[None, Some(1), Some(2), Some(3), Some(5), Some(7), Some(8), Some(12), Some(16)];

const ALL: &[Option<usize>] = &[
    None,
    Some(1),
    Some(2),
    Some(3),
    Some(4),
    Some(5),
    Some(6),
    Some(7),
    Some(8),
    Some(9),
    Some(10),
    Some(11),
    Some(12),
    Some(13),
    Some(14),
    Some(15),
    Some(16),
];

/// Cases that are run alike, and recorded together.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) name: &'static str,
    pub(super) runs: Runs,
    pub(super) cases: Vec<Case>,
}

/// Every group.
pub(super) fn full() -> Vec<Group> {
    let group = |name, runs, cases: Vec<Case>| Group { name, runs, cases: named(name, cases) };
    vec![
        group("lengths", Runs::USUAL, lengths()),
        group("dims", Runs::USUAL, dims()),
        group("heads", Runs::USUAL, heads()),
        group("pages", Runs::USUAL, pages()),
        group("masks", Runs::USUAL, masks()),
        group("windows", Runs::USUAL, windows()),
        group("blocks", Runs::USUAL, blocks()),
        group("layouts", Runs::USUAL, layouts()),
        group("rows", Runs::SPLITS, rows()),
        group("splits", Runs::SPLITS, splits()),
        group("extreme", Runs::USUAL, extreme()),
        group("batches", Runs::USUAL, batches()),
        group("tiles", Runs::TILES, tiles()),
        group("fp8", Runs::FP8, fp8::fp8()),
        group("clusters", clusters::RUNS, clusters::clusters()),
        group("parts", parts::RUNS, parts::parts()),
        group("latent", latent::RUNS, latent::latent()),
    ]
}

/// Cases under the name of their group, which is part of the seed of nothing: data is seeded before.
fn named(group: &str, mut cases: Vec<Case>) -> Vec<Case> {
    for case in &mut cases {
        case.name = format!("{group}/{}", case.name);
    }
    cases
}

/// Each value of a table in turn.
fn rotate<T: Copy>(table: &[T], n: usize) -> T {
    table[n % table.len()]
}

const TYPES: [DType; 2] = [BF16, F16];

/// On and on either side of every tile edge.
const EDGES: [usize; 15] = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 257];

/// Every pair of edges as (rows, keys), three sequences a case, causal and not, dense and paged.
fn lengths() -> Vec<Case> {
    let mut cases = Vec::new();
    for (n, &keys) in EDGES.iter().enumerate() {
        for first in 0..5 {
            let q = [EDGES[first], EDGES[first + 5], EDGES[first + 10]];
            for causal in [false, true] {
                let at = cases.len() / 2;
                let (heads, dim) = rotate(&[((2, 1), 64), ((2, 2), 128), ((3, 1), 96)], at / 2);
                let case = |storage: &str| {
                    let lens = format!("q{}-{}-{}_k{keys}", q[0], q[1], q[2]);
                    let name = format!("{lens}_causal_{causal}_{storage}");
                    let mut case = Case::new(name, rotate(&TYPES, n), heads, dim, &q, &[keys; 3]);
                    case.spec.causal = causal;
                    case
                };
                let paged = case("paged").paged(rotate(&[Nhd, Hnd], at), 16);
                let dense = if at % 5 == 0 { case("padded").padded() } else { case("packed") };
                cases.extend([dense, paged]);
            }
        }
    }
    cases
}

/// Compiled head dims, those rounded up to them, and values of another dim.
const DIMS: [(usize, usize); 21] = [
    (8, 8),
    (16, 16),
    (24, 24),
    (32, 32),
    (40, 40),
    (48, 48),
    (64, 64),
    (72, 72),
    (80, 80),
    (96, 96),
    (104, 104),
    (128, 128),
    (136, 136),
    (160, 160),
    (192, 192),
    (224, 224),
    (256, 256),
    (192, 128),
    (128, 192),
    (64, 256),
    (96, 40),
];

/// A cache's type, and its name.
const CACHES: [(Option<DType>, &str); 3] =
    [(None, "same"), (Some(F8E4M3), "e4m3"), (Some(F8E5M2), "e5m2")];

/// Every head dim in every type, as a prompt and as a decode step, dense and paged.
fn dims() -> Vec<Case> {
    let mut cases = Vec::new();
    for (dim, value_dim) in DIMS {
        for dtype in TYPES {
            for (cache, cache_name) in CACHES {
                for (q, k) in [([37, 70], [150, 70]), ([1, 4], [133, 90])] {
                    let at = cases.len();
                    let name = format!("{dim}-{value_dim}_{dtype}_{cache_name}_q{}", q[0]);
                    let mut case = Case::new(name, dtype, (4, 2), dim, &q, &k);
                    case.spec.causal = at % 3 != 0;
                    case.spec.value_dim = value_dim;
                    if let Some(cache) = cache {
                        let scales = rotate(&[Scales::PerHead, Scales::Scalar, Scales::One], at);
                        case = case.fp8(cache, scales);
                    }
                    let paged = (at + at / 2) % 2 == 1;
                    let order = rotate(&[Nhd, Hnd], at / 2);
                    cases.push(if paged { case.paged(order, 16) } else { case });
                }
            }
        }
    }
    cases
}

/// Every ratio of query heads to KV heads, with few and many rows.
fn heads() -> Vec<Case> {
    let mut cases = Vec::new();
    let ratios = [
        (1, 1),
        (3, 3),
        (2, 1),
        (4, 2),
        (6, 2),
        (8, 2),
        (5, 1),
        (10, 2),
        (14, 2),
        (16, 2),
        (16, 1),
        (32, 1),
        (71, 1),
        (128, 1),
    ];
    for (q_heads, kv_heads) in ratios {
        for rows in [1, 2, 7, 16, 45] {
            let at = cases.len();
            let name = format!("{q_heads}-{kv_heads}_q{rows}");
            let dim = rotate(&[64, 128, 32], at);
            let heads = (q_heads, kv_heads);
            let case =
                Case::new(name, rotate(&TYPES, at), heads, dim, &[rows, 1], &[rows + 60, 131]);
            let case = if at % 2 == 0 { case.causal() } else { case };
            cases.push(match at % 3 {
                0 => case.paged(Nhd, 16),
                1 => case.paged(Hnd, 64),
                _ => case,
            });
        }
    }
    cases
}

/// Every page size in both orders and every cache type, lengths on either side of page edges.
fn pages() -> Vec<Case> {
    let mut cases = Vec::new();
    for size in [1, 2, 5, 16, 48, 64, 256] {
        let lens = [size.max(2) - 1, size, size + 1, 2 * size, 3 * size + size / 2, 1];
        for order in [Nhd, Hnd] {
            for (cache, cache_name) in CACHES {
                for rows in [1, 3, 16, 40] {
                    let at = cases.len();
                    let name = format!("{order}_{size}_{cache_name}_q{rows}");
                    let (dtype, dim) = (rotate(&TYPES, at), rotate(&[64, 128], at / 2));
                    let mut case = Case::new(name, dtype, (4, 2), dim, &[rows; 6], &lens);
                    case.spec.causal = at % 2 == 0;
                    if let Some(cache) = cache {
                        case = case.fp8(cache, rotate(&[Scales::PerHead, Scales::Scalar], at));
                    }
                    cases.push(case.paged(order, size));
                }
            }
        }
    }
    for (n, order) in [Nhd, Hnd].into_iter().enumerate() {
        let paged = |case: Case| case.paged(order, 16);
        let lens = [200, 130, 77, 16, 0];
        let new = |what: &str, q: &[usize]| {
            Case::new(format!("{what}_{order}"), TYPES[n], (4, 2), 64, q, &lens).causal()
        };
        cases.extend([
            paged(new("shared_decode", &[1; 5])).shared_pages(4),
            paged(new("shared_prefill", &[60, 40, 20, 16, 3])).shared_pages(3),
            paged(new("padded_queries", &[60, 4, 1, 0, 3]).padded()),
            paged(new("latent", &[1; 5]).value_dim(32)).latent(),
            paged(new("latent_prefill", &[33; 5]).value_dim(32)).latent(),
        ]);
    }
    cases
}

/// An option of a call.
type Kind = (&'static str, fn(Case) -> Case);

/// Every kind of mask, bias and score transform.
const KINDS: [Kind; 10] = [
    ("causal", |case| case.causal()),
    ("left", |case| with(case, |case| case.spec.window_left = Some(20))),
    ("right", |case| with(case, |case| case.spec.window_right = Some(9))),
    ("mask", |case| case.mask("bhqk", Hiding::Some)),
    ("bias", |case| case.bias("bhqk", Hiding::Some)),
    ("alibi", |case| case.alibi()),
    ("softcap", |case| case.softcap(3.0)),
    ("sinks", |case| case.sinks()),
    ("blocks", |case| case.blocks((16, 32), "hqk", Hiding::Some)),
    ("key_mask", |case| case.mask("b11k", Hiding::FirstTile)),
];

fn with(mut case: Case, change: fn(&mut Case)) -> Case {
    change(&mut case);
    case
}

/// Each kind alone and with each other, on a prompt and on a decode step, dense, padded and paged.
fn masks() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |name: &str, option: &dyn Fn(Case) -> Case| {
        for (q, k) in [([70, 33], [90, 150]), ([1, 5], [190, 77])] {
            let at = cases.len();
            let case = |what: &str| {
                let name = format!("{name}_{what}_q{}", q[0]);
                option(Case::new(name, rotate(&TYPES, at / 2), (4, 2), 64, &q, &k))
            };
            cases.push(case("dense"));
            cases.push(match at % 3 {
                0 => case("padded").padded(),
                1 => case("paged").paged(Nhd, 16),
                _ => case("paged").paged(Hnd, 64),
            });
        }
    };
    for (n, (name, kind)) in KINDS.into_iter().enumerate() {
        add(name, &kind);
        for (other_name, other) in &KINDS[n + 1..] {
            // Both are the boolean mask.
            if (name, *other_name) != ("mask", "key_mask") {
                add(&format!("{name}+{other_name}"), &|case| other(kind(case)));
            }
        }
    }
    add("all", &|case| KINDS[..9].iter().fold(case, |case, (_, kind)| kind(case)));
    for axes in ["qk", "1k", "q1", "hqk", "1qk", "b1qk", "b11k", "1hq1", "bh11"] {
        add(&format!("mask_{axes}"), &|case| case.mask(axes, Hiding::Some).pair_gap(3));
        add(&format!("bias_{axes}"), &|case| case.bias(axes, Hiding::Some).pair_gap(3));
    }
    add("mask_hides_all", &|case| case.mask("qk", Hiding::All));
    add("mask_hides_rows", &|case| case.mask("hqk", Hiding::EvenRows));
    add("bias_hides_rows", &|case| case.bias("hqk", Hiding::EvenRows).sinks());
    cases
}

/// Windows of every width around tile edges, on both sides.
fn windows() -> Vec<Case> {
    let bounds =
        [None, Some(0), Some(1), Some(15), Some(16), Some(63), Some(64), Some(65), Some(300)];
    let mut cases = Vec::new();
    for left in bounds {
        for right in bounds {
            for (q, k) in [([130, 70], [130, 260]), ([1, 4], [300, 66])] {
                let at = cases.len();
                let show =
                    |bound: Option<usize>| bound.map_or("open".to_owned(), |b| b.to_string());
                let name = format!("{}_{}_q{}", show(left), show(right), q[0]);
                let case = Case::new(name, rotate(&TYPES, at / 2), (2, 1), 64, &q, &k);
                let case = case.window(left, right);
                let case = if at % 3 == 0 { case.causal() } else { case };
                cases.push(if at % 4 > 1 { case.paged(Nhd, 16) } else { case });
            }
        }
    }
    cases
}

/// Block masks of sizes that divide tiles, are divided by them, or neither.
fn blocks() -> Vec<Case> {
    let sizes = [(1, 1), (5, 3), (16, 16), (64, 64), (64, 32), (32, 128), (128, 128), (256, 64)];
    let hidings = [Hiding::Some, Hiding::FirstTile, Hiding::EvenRows, Hiding::All, Hiding::None];
    let mut cases = Vec::new();
    for (n, size) in sizes.into_iter().enumerate() {
        for (m, hiding) in hidings.into_iter().enumerate() {
            for (q, k) in [([140, 64], [270, 65]), ([1, 9], [300, 70])] {
                let at = cases.len();
                let name = format!("{}x{}_{hiding:?}_q{}", size.0, size.1, q[0]);
                let case = Case::new(name, rotate(&TYPES, at / 2), (4, 2), 64, &q, &k);
                let case = case.blocks(size, rotate(&["qk", "hqk", "bhqk"], n + m), hiding);
                let case = if n % 2 == 0 { case.causal() } else { case };
                cases.push(if at % 4 > 1 { case.paged(Hnd, 16) } else { case });
            }
        }
    }
    cases
}

/// Placements other than the plain one.
const PLACES: [(Placement, &str); 6] = [
    (Placement::AlignedGaps, "aligned_gaps"),
    (Placement::Gaps, "gaps"),
    (Placement::HeadsFirst, "heads_first"),
    (Placement::Reversed, "reversed"),
    (Placement::SharedHeads, "shared_heads"),
    (Placement::InterleavedKv, "interleaved"),
];

/// Every placement of every tensor, rows on 16 bytes and not.
fn layouts() -> Vec<Case> {
    let mut cases = Vec::new();
    let places = || [(Placement::Contiguous, "contiguous")].into_iter().chain(PLACES);
    for (place, place_name) in places() {
        for (what, at) in [("q", 1), ("kv", 2), ("outputs", 4), ("all", 7)] {
            for (q, k) in [([37, 70], [70, 133]), ([1, 6], [133, 70])] {
                let n = cases.len();
                let name = format!("{what}_{place_name}_q{}", q[0]);
                let dim = rotate(&[64, 128, 72], n / 2);
                let mut case = Case::new(name, rotate(&TYPES, n / 2), (4, 2), dim, &q, &k).causal();
                if at & 1 != 0 && place != Placement::InterleavedKv {
                    case = case.q_at(place);
                }
                if at & 2 != 0 {
                    case = case.kv_at(place);
                }
                if at & 4 != 0 {
                    case = case.outputs_at(place);
                }
                cases.push(if n % 3 == 0 { case.padded() } else { case });
            }
        }
    }
    for cache in [F8E4M3, F8E5M2] {
        for (place, name) in places() {
            let name = format!("{cache}_{name}");
            let case = Case::new(name, BF16, (4, 2), 64, &[3, 40], &[133, 70]);
            cases.push(case.fp8(cache, Scales::PerHead).kv_at(place));
        }
    }
    cases
}

/// 1 to 16 rows a sequence, at every split count.
fn rows() -> Vec<Case> {
    let mut cases = Vec::new();
    for rows in 1..=16 {
        for heads in [(4, 1), (8, 8), (6, 2)] {
            let at = cases.len();
            let name = format!("q{rows}_{}-{}", heads.0, heads.1);
            let lens = [1, 17, 64, 129, 257];
            let q = [rows, 1, rows, rows / 2, rows];
            let (dtype, dim) = (rotate(&TYPES, at), rotate(&[64, 128], at / 2));
            let case = Case::new(name, dtype, heads, dim, &q, &lens);
            let case = if at % 2 == 0 { case.causal() } else { case };
            cases.push(if at % 3 == 0 { case } else { case.paged(rotate(&[Nhd, Hnd], at), 16) });
        }
    }
    cases
}

/// Every split count on lengths around and far past what it can divide.
fn splits() -> Vec<Case> {
    let options: [Kind; 6] = [
        ("plain", |case| case),
        ("causal", |case| case.causal()),
        ("window", |case| case.causal().window(Some(300), None)),
        ("sinks", |case| case.causal().sinks()),
        ("mask", |case| case.mask("1k", Hiding::FirstTile)),
        ("alibi", |case| case.causal().alibi().softcap(20.0)),
    ];
    let mut cases = Vec::new();
    for lens in [[1, 2, 16], [15, 64, 100], [255, 256, 257], [1025, 513, 0], [4099, 1, 2048]] {
        for (name, option) in options {
            for (cache, cache_name) in [(None, "same"), (Some(F8E4M3), "e4m3")] {
                let at = cases.len();
                let name = format!("{}-{}-{}_{name}_{cache_name}", lens[0], lens[1], lens[2]);
                let dtype = rotate(&TYPES, at);
                let mut case = Case::new(name, dtype, (4, 1), 64, &[1, 1, 3], &lens);
                case = option(case);
                if let Some(cache) = cache {
                    case = case.fp8(cache, Scales::PerHead);
                }
                cases.push(if at % 3 == 0 { case } else { case.paged(Nhd, 16) });
            }
        }
    }
    cases
}

/// Every adversarial pattern on rows of many tiles.
fn extreme() -> Vec<Case> {
    let mut cases = Vec::new();
    for pattern in Pattern::ALL {
        for dtype in TYPES {
            let new = |what: &str, heads, dim, q: &[usize], k: &[usize]| {
                let name = format!("{}_{what}_{dtype}", pattern.name());
                Case::new(name, dtype, heads, dim, q, k).pattern(pattern)
            };
            let fp8 = new("decode_fp8", (4, 1), 128, &[1, 2], &[600, 65]);
            cases.extend([
                new("prefill", (2, 1), 64, &[150], &[700]),
                new("causal", (2, 1), 128, &[260], &[260]).causal(),
                new("decode", (4, 1), 64, &[1, 3], &[1025, 130]),
                new("paged", (4, 2), 128, &[1, 40], &[800, 130]).causal().paged(Nhd, 16),
                fp8.fp8(F8E4M3, Scales::PerHead).paged(Hnd, 16),
                new("masked", (2, 1), 64, &[33], &[300]).mask("qk", Hiding::FirstTile),
                new("sinks", (2, 1), 64, &[33], &[300]).sinks().causal(),
                new("softcap", (2, 1), 64, &[33], &[300]).softcap(30.0),
                new("window", (2, 1), 64, &[150], &[300]).causal().window(Some(70), None),
            ]);
        }
    }
    cases
}

/// Batches of many sequences: empty ones, mixed phases, every arrangement.
fn batches() -> Vec<Case> {
    let mixed: Vec<(usize, usize)> = (0..41)
        .map(|n| (rotate(&[1, 0, 17, 2, 70], n), rotate(&[33, 5, 0, 129, 64, 1, 200], n)))
        .collect();
    let few: Vec<(usize, usize)> =
        (0..67).map(|n| (rotate(&[1, 1, 0, 4], n), rotate(&[40, 0, 129, 16, 311], n))).collect();
    let orders: [Option<(PageOrder, usize)>; 3] = [None, Some((Nhd, 16)), Some((Hnd, 5))];
    let mut cases = Vec::new();
    for (lens_name, lens) in [("mixed", &mixed), ("few", &few)] {
        let (q, k): (Vec<usize>, Vec<usize>) = lens.iter().copied().unzip();
        for pages in orders {
            for padded in [false, true] {
                let at = cases.len();
                let paged =
                    pages.map_or("dense".to_owned(), |(order, size)| format!("{order}{size}"));
                let name = format!("{lens_name}_{paged}_padded_{padded}");
                let case = Case::new(name, rotate(&TYPES, at), (4, 2), 64, &q, &k).causal();
                let case = if padded { case.padded() } else { case };
                cases.push(match pages {
                    Some((order, size)) => case.paged(order, size),
                    None => case,
                });
            }
        }
    }
    cases.push(Case::new("no_sequences", BF16, (4, 2), 64, &[], &[]));
    cases.push(Case::new("no_query_heads", F16, (0, 2), 64, &[3], &[9]));
    cases.push(Case::new("no_keys", BF16, (4, 2), 64, &[3, 40], &[0, 0]).sinks());
    cases.push(Case::new("no_rows", BF16, (4, 2), 64, &[0, 0], &[7, 9]).paged(Nhd, 16));
    cases
}

/// What every tile meets, whether selection would take it or not.
fn tiles() -> Vec<Case> {
    let mut cases = Vec::new();
    for (dim, value_dim) in [(32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)] {
        for (q, k) in [([130, 70], [130, 257]), ([1, 4], [300, 66]), ([385, 191], [385, 513])] {
            let new = |what: &str, at: usize| {
                let name = format!("{dim}-{value_dim}_{what}_q{}", q[0]);
                Case::new(name, rotate(&TYPES, at), (4, 1), dim, &q, &k).value_dim(value_dim)
            };
            cases.extend([
                new("causal", 0).causal(),
                new("general", 1).causal().softcap(10.0).mask("qk", Hiding::FirstTile),
                new("paged", 0).causal().paged(Nhd, 16),
                new("fp8", 1).fp8(F8E4M3, Scales::PerHead).paged(Hnd, 16),
            ]);
        }
    }
    cases
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn matrix_has_unique_valid_cases() {
        for groups in [full(), small()] {
            let mut names = BTreeSet::new();
            for group in groups {
                assert!(!group.cases.is_empty(), "{}", group.name);
                for case in group.cases {
                    assert!(case.problem().is_ok(), "{}: {:?}", case.name, case.problem());
                    assert!(names.insert(case.name.clone()), "{} twice", case.name);
                }
            }
        }
    }

    #[test]
    fn lengths_cover_every_pair_of_edges() {
        let mut pairs = BTreeSet::new();
        for case in lengths() {
            let q = case.spec.q_lens.iter().copied();
            pairs.extend(q.zip(case.spec.kv_lens.iter().copied()).map(|p| (p, case.spec.causal)));
        }
        assert_eq!(pairs.len(), 2 * EDGES.len() * EDGES.len());
    }
}
