//! Paged and fp8 caches: shuffled tables, NaN in every slot outside a sequence, both page orders.
//!
//! The invariant: lengths end on, before and after a page's edge, and every page size meets both orders.

use attn_core::DType::{BF16, F8E4M3, F8E5M2, F16, F32};
use attn_core::PageOrder::{Hnd, Nhd};

use crate::adversarial::Pattern;
use crate::case::{Case, Hiding, Scales};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for size in [1, 8, 16, 64] {
        for order in [Nhd, Hnd] {
            let decode = Case::new(
                format!("decode_{order}_{size}"),
                BF16,
                (4, 2),
                64,
                &[1, 1, 1],
                &[size, 2 * size + 1, 130],
            );
            let prefill =
                Case::new(format!("prefill_{order}_{size}"), F32, (2, 1), 32, &[17, 3], &[33, 70]);
            cases.extend([decode.paged(order, size), prefill.causal().paged(order, size)]);
        }
    }
    for (dtype, name) in [(F8E4M3, "e4m3"), (F8E5M2, "e5m2")] {
        for (scales, scale_name) in [
            (Scales::None, "unscaled"),
            (Scales::Scalar, "scalar"),
            (Scales::One, "one"),
            (Scales::PerHead, "per_head"),
        ] {
            let case = |what: &str| format!("{what}_{name}_{scale_name}");
            cases.push(
                Case::new(case("decode"), BF16, (4, 2), 64, &[1, 1], &[50, 129])
                    .fp8(dtype, scales)
                    .paged(Nhd, 16),
            );
            cases.push(
                Case::new(case("dense"), F16, (2, 2), 32, &[9, 4], &[20, 33]).fp8(dtype, scales),
            );
        }
    }
    cases.extend([
        Case::new("fp8_f32_queries", F32, (4, 2), 40, &[5, 1], &[33, 64])
            .fp8(F8E4M3, Scales::PerHead)
            .causal()
            .paged(Hnd, 8),
        Case::new("padded_queries", F16, (2, 1), 64, &[1, 5, 2], &[17, 40, 64])
            .padded()
            .paged(Nhd, 16),
        Case::new("shared_prefix", BF16, (4, 2), 64, &[1, 1, 1], &[70, 65, 33])
            .paged(Nhd, 16)
            .shared_pages(2),
        Case::new("window", BF16, (4, 1), 64, &[1, 2], &[200, 90])
            .causal()
            .window(Some(20), None)
            .paged(Hnd, 16),
        Case::new("value_dim", F32, (2, 1), 72, &[3], &[50]).value_dim(40).paged(Nhd, 8),
        Case::new("latent", BF16, (8, 1), 96, &[1, 2], &[65, 130])
            .value_dim(64)
            .causal()
            .paged(Nhd, 64)
            .latent(),
        Case::new("latent_576", BF16, (16, 1), 576, &[1, 3], &[70, 33])
            .value_dim(512)
            .causal()
            .paged(Nhd, 16)
            .latent(),
        Case::new("everything", F32, (4, 2), 32, &[9, 1], &[40, 66])
            .causal()
            .softcap(5.0)
            .alibi()
            .sinks()
            .bias("bhqk", Hiding::None)
            .mask("qk", Hiding::Some)
            .paged(Hnd, 16),
        Case::new("blocks_of_pages", BF16, (4, 2), 64, &[1, 1], &[160, 33])
            .blocks((64, 16), "hqk", Hiding::Some)
            .paged(Nhd, 16),
        Case::new("far_below", BF16, (4, 2), 64, &[1, 1], &[160, 33])
            .pattern(Pattern::FarBelow)
            .paged(Nhd, 16),
        Case::new("largest_last", F32, (4, 2), 64, &[1, 1], &[513, 33])
            .pattern(Pattern::LargestLast)
            .paged(Nhd, 16),
        Case::new("empty_sequences", F32, (2, 1), 32, &[1, 1, 0], &[0, 20, 5]).paged(Nhd, 16),
        Case::new("mixed_batch", BF16, (4, 2), 64, &[33, 1, 7, 1], &[33, 200, 40, 1])
            .causal()
            .paged(Nhd, 16),
    ]);
    cases
}
