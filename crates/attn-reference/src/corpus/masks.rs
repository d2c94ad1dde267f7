//! Boolean and block masks, broadcast along every axis and met by every other bound.
//!
//! The invariant: each broadcast of the four axes occurs, hidden first tiles and hidden rows included.

use attn_core::DType::{BF16, F16, F32};

use crate::case::{Case, Hiding};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for axes in ["qk", "1k", "q1", "hqk", "1qk", "bhqk", "b1qk", "b11k", "1hq1", "bh11"] {
        let name = format!("boolean_{axes}");
        let case = Case::new(name, F32, (4, 2), 32, &[18, 5], &[70, 33]);
        cases.push(case.mask(axes, Hiding::Some));
    }
    cases.extend([
        Case::new("boolean_even_rows", F16, (2, 1), 64, &[20], &[65]).mask("qk", Hiding::EvenRows),
        Case::new("boolean_all", F32, (2, 1), 32, &[5], &[70]).mask("qk", Hiding::All),
        Case::new("boolean_first_tile", BF16, (2, 1), 64, &[17], &[150])
            .mask("1k", Hiding::FirstTile),
        Case::new("boolean_causal", F32, (2, 2), 32, &[33], &[65])
            .causal()
            .mask("bhqk", Hiding::Some),
        Case::new("boolean_window_gap", F32, (2, 1), 32, &[40], &[40])
            .window(Some(9), Some(3))
            .mask("hqk", Hiding::Some)
            .pair_gap(3),
        Case::new("blocks_16x16", F32, (2, 1), 32, &[65], &[129]).blocks(
            (16, 16),
            "qk",
            Hiding::Some,
        ),
        Case::new("blocks_64x32_per_head", BF16, (4, 2), 64, &[70, 130], &[100, 64]).blocks(
            (64, 32),
            "bhqk",
            Hiding::Some,
        ),
        Case::new("blocks_odd", F32, (2, 1), 16, &[23], &[41]).blocks((5, 3), "hqk", Hiding::Some),
        Case::new("blocks_one_by_one", F32, (1, 1), 8, &[9], &[12]).blocks(
            (1, 1),
            "qk",
            Hiding::Some,
        ),
        Case::new("blocks_causal", F32, (2, 1), 32, &[64], &[128]).causal().blocks(
            (16, 32),
            "b1qk",
            Hiding::Some,
        ),
        Case::new("blocks_first_tile", F16, (2, 1), 64, &[33], &[130]).blocks(
            (16, 64),
            "1k",
            Hiding::FirstTile,
        ),
        Case::new("blocks_even_rows", F32, (2, 2), 32, &[64], &[64]).blocks(
            (16, 16),
            "hqk",
            Hiding::EvenRows,
        ),
        Case::new("blocks_and_boolean", F32, (2, 1), 32, &[40], &[80])
            .blocks((8, 16), "qk", Hiding::Some)
            .mask("qk", Hiding::Some),
        Case::new("blocks_decode", BF16, (4, 2), 64, &[1], &[200]).blocks(
            (64, 64),
            "qk",
            Hiding::Some,
        ),
    ]);
    cases
}
