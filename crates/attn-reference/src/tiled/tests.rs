//! The tiled walk against the materialised definition, at every small tile size.
//!
//! The invariant: in f64 the two agree to rounding; a tolerance that hid a lost key would have to be larger
//! by nine orders of magnitude.

use attn_core::DType;

use super::*;
use crate::adversarial::Pattern;
use crate::case::{Case, Hiding};
use crate::naive;

/// Panics unless every tiling gives the naive result.
fn agrees(case: &Case, tilings: impl IntoIterator<Item = Tiling>) {
    let data = case.build().unwrap();
    let inputs = data.inputs().unwrap();
    let want = naive::forward_f64(data.problem(), &inputs).unwrap();
    for tiling in tilings {
        let got = forward_f64(data.problem(), &inputs, tiling).unwrap();
        for (got, want) in [(&got.o, &want.o), (&got.lse, &want.lse)] {
            // Scores of 1e5 leave 1e5 * 2^-53 of a weight's relative precision.
            let c = crate::compare::compare(got, want, 1e-9);
            assert!(c.is_within(), "{} {tiling:?}: {c}", case.name);
        }
    }
}

fn all_small() -> impl Iterator<Item = Tiling> {
    (1..=9).flat_map(|rows| {
        (1..=9).map(move |keys| Tiling { rows, keys, splits: 1 + (rows + keys) % 3 })
    })
}

fn case(name: &str, q_len: usize, kv_len: usize) -> Case {
    Case::new(name, DType::F32, (2, 1), 4, &[q_len], &[kv_len])
}

#[test]
fn tiled_matches_naive_when_the_largest_score_comes_last() {
    for pattern in Pattern::ALL {
        agrees(&case(pattern.name(), 10, 19).pattern(pattern), all_small());
    }
    agrees(&case("causal", 19, 19).causal().pattern(Pattern::LargestLast), all_small());
}

#[test]
fn tiled_matches_naive_for_every_alignment_of_causal() {
    for (q_len, kv_len) in [(1, 19), (10, 19), (19, 19), (19, 10), (19, 1), (5, 0), (0, 5)] {
        agrees(&case("causal", q_len, kv_len).causal(), all_small());
    }
}

#[test]
fn tiled_matches_naive_for_windows() {
    for (left, right) in [
        (Some(0), Some(0)),
        (Some(2), Some(5)),
        (Some(7), None),
        (None, Some(3)),
        (Some(1), Some(usize::MAX)),
    ] {
        for (q_len, kv_len) in [(10, 19), (13, 13), (19, 10)] {
            agrees(&case("window", q_len, kv_len).window(left, right), all_small());
        }
    }
}

#[test]
fn tiled_matches_naive_for_masks() {
    agrees(&case("blocks", 13, 19).blocks((3, 4), "hqk", Hiding::Some), all_small());
    agrees(
        &case("causal blocks", 13, 19).causal().blocks((3, 4), "hqk", Hiding::Some),
        all_small(),
    );
    agrees(&case("first block", 13, 19).blocks((3, 9), "qk", Hiding::FirstTile), all_small());
    agrees(&case("boolean", 13, 19).mask("qk", Hiding::EvenRows), all_small());
    agrees(
        &case("boolean window", 13, 19).window(Some(4), Some(2)).mask("hqk", Hiding::Some),
        all_small(),
    );
    agrees(&case("all", 3, 19).mask("qk", Hiding::All).sinks(), all_small());
}

#[test]
fn tiled_matches_naive_for_score_transforms() {
    let all = case("transforms", 11, 14)
        .causal()
        .softcap(1.5)
        .alibi()
        .bias("hqk", Hiding::Some)
        .sinks()
        .value_dim(3);
    agrees(&all, all_small());
}

#[test]
fn tiled_matches_naive_for_any_split() {
    let split = |splits| Tiling { rows: 4, keys: 3, splits };
    agrees(&case("splits", 5, 17).sinks().pattern(Pattern::LargestLast), (0..40).map(split));
    agrees(&case("hidden splits", 5, 17).causal().window(Some(2), None), (1..20).map(split));
}
