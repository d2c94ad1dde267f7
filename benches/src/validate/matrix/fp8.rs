//! Queries, keys and values in fp8: the options and edges of the rest of the matrix, fewer of each.
//!
//! The invariant: every kind of scale meets every other, and whatever may interact with a coarse weight or with a
//! scale (options, lengths around tile edges, dims, empty sequences, extreme scores) meets both.

use super::{Case, F8E4M3, Hiding, Hnd, KINDS, Nhd, PLACES, Pattern, Placement, Scales, rotate};

const SCALES: [(Scales, &str); 4] = [
    (Scales::PerHead, "per_head"),
    (Scales::Scalar, "scalar"),
    (Scales::One, "one"),
    (Scales::None, "none"),
];

/// On and on either side of every tile edge.
const EDGES: [usize; 10] = [1, 63, 64, 65, 127, 128, 129, 255, 257, 500];

/// Head and value dims. The last rows do not start on 16 bytes.
const DIMS: [(usize, usize); 8] =
    [(64, 64), (128, 128), (256, 256), (96, 96), (128, 64), (192, 128), (64, 128), (40, 24)];

/// Every case, at most about 400.
pub(super) fn fp8() -> Vec<Case> {
    let parts = [
        ("lengths", lengths()),
        ("dims", dims()),
        ("masks", masks()),
        ("heads", heads()),
        ("scales", scales()),
        ("extreme", extreme()),
        ("windows", windows()),
        ("blocks", blocks()),
        ("batches", batches()),
        ("layouts", layouts()),
        ("pages", pages()),
    ];
    let mut cases = Vec::new();
    for (part, own) in parts {
        cases.extend(own.into_iter().map(|mut case| {
            case.name = format!("{part}_{}", case.name);
            case
        }));
    }
    cases
}

/// A case with some scales: the `at`-th for queries, and a later one for keys and values.
fn new(
    name: impl Into<String>,
    at: usize,
    heads: (usize, usize),
    dim: usize,
    q: &[usize],
    k: &[usize],
) -> Case {
    let (queries, keys) = (rotate(&SCALES, at).0, rotate(&SCALES, at + at / SCALES.len()).0);
    Case::new(name, F8E4M3, heads, dim, q, k).scales(queries, keys)
}

/// Each length of keys with each of rows, causal and not, packed and padded.
fn lengths() -> Vec<Case> {
    let mut cases = Vec::new();
    for keys in EDGES {
        for first in 0..4 {
            let q = [EDGES[first], EDGES[(first + 4) % 10], EDGES[(first + 7) % 10]];
            for causal in [false, true] {
                let at = cases.len();
                let (heads, dim) = rotate(&[((2, 1), 64), ((2, 2), 128), ((3, 1), 64)], at / 2);
                let name = format!("q{}-{}-{}_k{keys}_causal_{causal}", q[0], q[1], q[2]);
                let mut case = new(name, at / 2, heads, dim, &q, &[keys; 3]);
                case.spec.causal = causal;
                cases.push(if at % 5 == 0 { case.padded() } else { case });
            }
        }
    }
    cases
}

fn dims() -> Vec<Case> {
    let mut cases = Vec::new();
    for (dim, value_dim) in DIMS {
        for (scales, name) in SCALES.into_iter().take(3) {
            for causal in [false, true] {
                let name = format!("{dim}-{value_dim}_{name}_causal_{causal}");
                let case = Case::new(name, F8E4M3, (4, 2), dim, &[70, 129], &[150, 129]);
                let mut case = case.scales(scales, scales).value_dim(value_dim);
                case.spec.causal = causal;
                cases.push(case);
            }
        }
    }
    cases
}

/// Each kind of option alone, in every storage, and with each other.
fn masks() -> Vec<Case> {
    let mut cases = Vec::new();
    for (n, (name, kind)) in KINDS.into_iter().enumerate() {
        for (q, k) in [([70, 33], [90, 150]), ([1, 140], [190, 140])] {
            let at = cases.len();
            let case = |what: &str| {
                let name = format!("{name}_{what}_q{}", q[0]);
                kind(new(name, at, (4, 2), rotate(&[64, 128], n), &q, &k))
            };
            cases.push(case("packed"));
            cases.push(if at % 4 == 0 {
                case("padded").padded()
            } else {
                case("paged").paged(Nhd, 16)
            });
        }
        for (other_name, other) in &KINDS[n + 1..] {
            // Both are the boolean mask.
            if (name, *other_name) != ("mask", "key_mask") {
                let name = format!("{name}+{other_name}");
                cases.push(other(kind(new(name, cases.len(), (2, 1), 64, &[70], &[150]))));
            }
        }
    }
    let all = new("all", 0, (4, 2), 64, &[70, 5], &[150, 33]);
    cases.push(KINDS[..9].iter().fold(all, |case, (_, kind)| kind(case)));
    let hidden = |name: &str, hiding| new(name, 1, (2, 1), 64, &[70], &[150]).mask("hqk", hiding);
    cases.push(hidden("mask_hides_all", Hiding::All));
    cases.push(hidden("mask_hides_rows", Hiding::EvenRows).sinks());
    // A sink far above the keys, whose weights may not be rounded as the small numbers that they become.
    cases.push(new("sink_above", 2, (4, 2), 128, &[70], &[150]).causal().sinks_of(12.0));
    cases
}

/// Query heads that share a KV head, and its scales.
fn heads() -> Vec<Case> {
    let mut cases = Vec::new();
    for heads in [(1, 1), (2, 1), (4, 2), (8, 2), (3, 3), (8, 8), (16, 1)] {
        for rows in [1, 65, 129] {
            let name = format!("{}-{}_q{rows}", heads.0, heads.1);
            let dim = rotate(&[64, 128], cases.len());
            let case = Case::new(name, F8E4M3, heads, dim, &[rows, 1], &[rows + 60, 131]);
            cases.push(case.scales(Scales::PerHead, Scales::PerHead).causal());
        }
    }
    cases
}

/// Each kind of scale of queries with each of keys and values.
fn scales() -> Vec<Case> {
    let mut cases = Vec::new();
    for (queries, q_name) in SCALES {
        for (keys, k_name) in SCALES {
            for dim in [64, 128] {
                let name = format!("q_{q_name}_k_{k_name}_{dim}");
                let case = Case::new(name, F8E4M3, (4, 2), dim, &[70, 130], &[200, 130]);
                cases.push(case.scales(queries, keys).causal());
            }
        }
    }
    cases
}

/// Every adversarial pattern on rows of many tiles.
fn extreme() -> Vec<Case> {
    let mut cases = Vec::new();
    for pattern in Pattern::ALL {
        let at = cases.len() / 4;
        let case = |what: &str, dim, q: usize, k: usize| {
            let name = format!("{}_{what}", pattern.name());
            new(name, at, (2, 1), dim, &[q], &[k]).pattern(pattern)
        };
        cases.extend([
            case("prefill", 64, 130, 500),
            case("causal", 128, 257, 257).causal(),
            case("masked", 64, 33, 300).mask("qk", Hiding::FirstTile),
            case("sinks", 256, 33, 300).sinks().softcap(30.0).causal(),
        ]);
    }
    cases
}

fn windows() -> Vec<Case> {
    let mut cases = Vec::new();
    for left in [None, Some(0), Some(63), Some(64), Some(65), Some(200)] {
        for right in [None, Some(0), Some(1), Some(64)] {
            let at = cases.len();
            let show = |bound: Option<usize>| bound.map_or("open".to_owned(), |b| b.to_string());
            let name = format!("{}_{}", show(left), show(right));
            let case = new(name, at, (2, 1), rotate(&[64, 128], at), &[130, 70], &[130, 260]);
            cases.push(case.window(left, right));
        }
    }
    cases
}

/// Block masks of sizes that divide tiles, are divided by them, or neither.
fn blocks() -> Vec<Case> {
    let mut cases = Vec::new();
    for size in [(16, 16), (64, 64), (128, 128), (64, 128), (5, 3)] {
        for hiding in [Hiding::Some, Hiding::FirstTile, Hiding::EvenRows, Hiding::All] {
            let at = cases.len();
            let name = format!("{}x{}_{hiding:?}", size.0, size.1);
            let case = new(name, at, (4, 2), rotate(&[64, 128], at), &[140, 64], &[270, 65]);
            let case = case.blocks(size, rotate(&["qk", "hqk", "bhqk"], at), hiding);
            cases.push(if at % 2 == 0 { case.causal() } else { case });
        }
    }
    cases
}

/// Empty sequences among others, in every arrangement.
fn batches() -> Vec<Case> {
    let lens =
        (0..31).map(|n| (rotate(&[1, 0, 17, 2, 70], n), rotate(&[33, 5, 0, 129, 64, 200], n)));
    let (q, k): (Vec<usize>, Vec<usize>) = lens.unzip();
    let mixed = |name: &str, at| new(name, at, (4, 2), 64, &q, &k).causal();
    vec![
        mixed("packed", 0),
        mixed("padded", 1).padded(),
        mixed("paged", 0).paged(Nhd, 16),
        mixed("padded_sinks", 2).padded().sinks(),
        Case::new("no_sequences", F8E4M3, (4, 2), 64, &[], &[]),
        Case::new("no_query_heads", F8E4M3, (0, 2), 64, &[3], &[9]),
        new("no_keys", 0, (4, 2), 64, &[3, 140], &[0, 0]).sinks(),
        new("no_rows", 0, (4, 2), 64, &[0, 0], &[7, 9]),
    ]
}

/// Every placement of every tensor.
fn layouts() -> Vec<Case> {
    let mut cases = Vec::new();
    for (place, name) in PLACES {
        for all in [false, true] {
            let at = cases.len();
            let name = format!("{name}_{}", if all { "all" } else { "kv" });
            let case = new(name, at, (4, 2), 64, &[37, 70], &[70, 133]).causal().kv_at(place);
            let case =
                if all && place != Placement::InterleavedKv { case.q_at(place) } else { case };
            cases.push(if all { case.outputs_at(place).padded() } else { case });
        }
    }
    cases
}

/// Pages of sizes that a tile holds whole, that hold a tile, and neither.
fn pages() -> Vec<Case> {
    let mut cases = Vec::new();
    for size in [5, 16, 64, 256] {
        for order in [Nhd, Hnd] {
            let at = cases.len();
            let name = format!("{order}_{size}");
            let case = new(name, at, (4, 2), rotate(&[64, 128], at / 2), &[40, 129], &[200, 300]);
            cases.push(case.causal().paged(order, size));
        }
    }
    let latent = new("latent", 0, (8, 1), 128, &[33, 1], &[200, 65]).value_dim(64);
    cases.push(latent.paged(Nhd, 64).latent());
    cases
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn fp8_cases_are_few_and_meet_each_pair_of_scales() {
        let cases = fp8();
        assert!((300..=400).contains(&cases.len()), "{}", cases.len());
        assert!(cases.iter().all(|case| case.spec.q_dtype.is_fp8()));
        let kinds = |case: &Case| (case.recipe.q_scales as u8, case.recipe.scales as u8);
        assert_eq!(cases.iter().map(kinds).collect::<BTreeSet<_>>().len(), 16);
        for len in EDGES {
            for lens in [|c: &Case| c.spec.q_lens.clone(), |c: &Case| c.spec.kv_lens.clone()] {
                assert!(cases.iter().any(|case| lens(case).contains(&len)), "{len}");
            }
        }
    }
}
