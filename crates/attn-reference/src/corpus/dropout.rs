//! Dropout of weights: every engine that takes it drops the same ones.
//!
//! The invariant: rates, lengths off the four keys that one call of the generator serves, heads that share keys, and
//! each storage occur, so that a coordinate that is counted elsewhere (in the batch, the tile or the page)
//! drops other weights than the reference.

use attn_core::DType::{BF16, F8E4M3, F16, F32};
use attn_core::PageOrder::{Hnd, Nhd};

use crate::case::{Case, Hiding, Scales};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (n, p) in [0.0, 1e-3, 0.1, 0.5, 0.9, 0.999].into_iter().enumerate() {
        let dtype = [F32, BF16, F16][n % 3];
        let case = Case::new(format!("p{p}_{dtype}"), dtype, (4, 2), 64, &[37, 70], &[150, 70]);
        cases.push(case.dropout(p));
    }
    cases.extend([
        Case::new("causal", F32, (4, 2), 32, &[33, 0, 18], &[70, 9, 18]).causal().dropout(0.2),
        Case::new("causal_bf16", BF16, (4, 4), 128, &[130], &[257]).causal().dropout(0.1),
        // The first key of a tile is no multiple of four.
        Case::new("window", BF16, (2, 1), 64, &[70, 30], &[203, 61])
            .window(Some(33), Some(2))
            .dropout(0.3),
        Case::new("decode", BF16, (8, 2), 64, &[1, 3, 1], &[301, 77, 2]).causal().dropout(0.25),
        Case::new("decode_f32", F32, (3, 1), 40, &[2, 1], &[99, 65]).dropout(0.5),
        Case::new("paged", F16, (4, 2), 64, &[20, 1], &[90, 131])
            .causal()
            .paged(Nhd, 16)
            .dropout(0.2),
        Case::new("paged_fp8", BF16, (4, 1), 64, &[1, 2], &[90, 131])
            .causal()
            .fp8(F8E4M3, Scales::PerHead)
            .paged(Hnd, 8)
            .dropout(0.2),
        Case::new("padded", F32, (4, 2), 32, &[17, 4, 0], &[33, 50, 6]).padded().dropout(0.4),
        Case::new("value_dim", BF16, (2, 2), 64, &[40], &[80]).value_dim(96).dropout(0.1),
        Case::new("all_hidden", F32, (2, 1), 32, &[9], &[40]).mask("qk", Hiding::All).dropout(0.5),
        Case::new("one_key", F32, (2, 1), 16, &[6, 1], &[1, 1]).dropout(0.5),
        Case::new("sinks", BF16, (4, 2), 64, &[33, 1], &[65, 90]).causal().sinks().dropout(0.15),
        Case::new("everything", F32, (4, 2), 32, &[20, 9], &[33, 70])
            .value_dim(40)
            .causal()
            .window(Some(30), None)
            .scale(0.2)
            .softcap(4.0)
            .bias("bhqk", Hiding::Some)
            .alibi()
            .mask("b1qk", Hiding::Some)
            .blocks((8, 16), "hqk", Hiding::Some)
            .sinks()
            .dropout(0.3),
        Case::new("everything_bf16", BF16, (6, 2), 64, &[50, 0, 9], &[90, 5, 70])
            .softcap(8.0)
            .bias("1hqk", Hiding::Some)
            .alibi()
            .mask("qk", Hiding::Some)
            .sinks()
            .padded()
            .dropout(0.3),
    ]);
    cases
}
