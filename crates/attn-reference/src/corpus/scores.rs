//! What happens to a score between the product and the mask: scale, soft-cap, bias, ALiBi; and sinks.
//!
//! The invariant: each transform occurs alone and with its neighbours, so that their order matters to some
//! case: soft-cap with bias tells whether the bias is capped, a sink with a soft-cap whether the sink is.

use attn_core::DType::{BF16, F16, F32};

use crate::case::{Case, Hiding};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for axes in ["qk", "1k", "q1", "hqk", "h11", "bhqk", "b1qk", "b11k", "1hqk"] {
        let case = Case::new(format!("bias_{axes}"), F32, (4, 2), 32, &[11, 18], &[70, 20]);
        cases.push(case.bias(axes, Hiding::None));
    }
    cases.extend([
        Case::new("scale", F32, (2, 1), 32, &[9], &[40]).scale(0.7),
        Case::new("scale_zero", F32, (2, 1), 32, &[9], &[40]).scale(0.0),
        Case::new("scale_negative", F32, (2, 1), 32, &[9], &[40]).scale(-0.3),
        Case::new("bias_hides", F32, (2, 1), 32, &[20], &[65]).bias("hqk", Hiding::Some),
        Case::new("bias_hides_rows", BF16, (2, 1), 64, &[20], &[65]).bias("qk", Hiding::EvenRows),
        Case::new("bias_hides_first_tile", F32, (2, 1), 32, &[9], &[140])
            .bias("qk", Hiding::FirstTile),
        Case::new("bias_hides_all", F32, (1, 1), 8, &[4], &[9]).bias("qk", Hiding::All),
        Case::new("bias_gap_padded", F16, (2, 2), 40, &[7, 20], &[33, 6])
            .bias("bhqk", Hiding::None)
            .pair_gap(5)
            .padded(),
        Case::new("bias_causal", BF16, (4, 2), 64, &[33], &[65])
            .causal()
            .bias("1hqk", Hiding::None),
        Case::new("alibi", F32, (4, 2), 32, &[17], &[65]).alibi(),
        Case::new("alibi_causal", BF16, (8, 2), 64, &[33, 1], &[33, 90]).causal().alibi(),
        Case::new("alibi_more_rows", F32, (3, 1), 16, &[30], &[11]).alibi(),
        Case::new("softcap", F32, (2, 1), 32, &[17], &[65]).softcap(2.0),
        Case::new("softcap_tight", F32, (2, 1), 32, &[17], &[65]).softcap(0.05),
        Case::new("softcap_gemma", BF16, (4, 2), 128, &[9, 1], &[64, 100])
            .causal()
            .window(Some(40), None)
            .softcap(50.0),
        Case::new("softcap_bias", F32, (2, 2), 32, &[18], &[30])
            .softcap(1.5)
            .bias("qk", Hiding::Some),
        Case::new("sinks", F32, (4, 2), 32, &[17], &[65]).sinks(),
        Case::new("sinks_gpt_oss", BF16, (8, 1), 64, &[16, 1], &[16, 130])
            .causal()
            .window(Some(32), None)
            .sinks(),
        Case::new("sinks_without_keys", F32, (2, 1), 32, &[6], &[20])
            .mask("qk", Hiding::EvenRows)
            .sinks(),
        Case::new("sinks_softcap", F16, (2, 1), 64, &[10], &[40]).softcap(3.0).sinks_of(4.0),
        Case::new("sinks_dominant", F32, (2, 1), 32, &[10], &[40]).sinks_of(50.0),
        Case::new("sinks_negligible", F32, (2, 1), 32, &[10], &[40]).sinks_of(-200.0),
        Case::new("sinks_hidden", F32, (2, 1), 32, &[10], &[40]).sinks_of(f32::NEG_INFINITY),
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
            .sinks(),
        Case::new("everything_bf16_padded", BF16, (6, 2), 64, &[20, 0, 9], &[33, 5, 70])
            .softcap(8.0)
            .bias("1hqk", Hiding::Some)
            .alibi()
            .mask("qk", Hiding::Some)
            .sinks()
            .padded(),
    ]);
    cases
}
