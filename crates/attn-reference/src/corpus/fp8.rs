//! Queries, keys and values in fp8: every option where scales, coarse weights and a bf16 output could spoil it.
//!
//! The invariant: each of the three scales occurs alone and with the others, absent, as one number and for each head;
//! one left out, or applied to the wrong head, is far past the rule.

use attn_core::DType::F8E4M3;
use attn_core::PageOrder::{Hnd, Nhd};

use crate::adversarial::Pattern;
use crate::case::{Case, Hiding, Scales};
use crate::storage::Placement::{Gaps, HeadsFirst};

pub(super) fn cases() -> Vec<Case> {
    let kinds = [
        (Scales::None, "none"),
        (Scales::Scalar, "scalar"),
        (Scales::One, "one"),
        (Scales::PerHead, "per_head"),
    ];
    let mut cases = Vec::new();
    for (n, (queries, q_name)) in kinds.into_iter().enumerate() {
        // Each kind for queries meets its own and the next for keys.
        for (keys, k_name) in [kinds[n], kinds[(n + 1) % kinds.len()]] {
            let name = format!("q_{q_name}_k_{k_name}");
            let case = Case::new(name, F8E4M3, (4, 2), 64, &[20, 1], &[70, 33]);
            cases.push(case.scales(queries, keys));
        }
    }
    let per_head = |name: &str, heads, dim, q: &[usize], kv: &[usize]| {
        Case::new(name, F8E4M3, heads, dim, q, kv).scales(Scales::PerHead, Scales::PerHead)
    };
    for pattern in Pattern::ALL.into_iter().filter(|p| *p != Pattern::Normal) {
        let case = per_head(pattern.name(), (2, 1), 64, &[20], &[150]);
        cases.push(case.pattern(pattern));
    }
    cases.extend([
        per_head("causal", (4, 1), 128, &[65, 3], &[65, 130]).causal(),
        per_head("many_keys", (2, 1), 64, &[2], &[700]),
        per_head("padded_empty", (4, 2), 40, &[5, 0, 20], &[33, 7, 0]).causal().padded(),
        per_head("value_dim", (2, 2), 72, &[9], &[40]).value_dim(40),
        per_head("window_sinks", (4, 2), 64, &[17], &[80]).causal().window(Some(20), None).sinks(),
        // A sink above all keys: their weights are small, and may not be rounded as such.
        per_head("sink_above", (2, 1), 64, &[9], &[40]).sinks_of(12.0),
        per_head("everything", (4, 2), 32, &[20, 9], &[33, 70])
            .causal()
            .softcap(4.0)
            .bias("bhqk", Hiding::Some)
            .alibi()
            .mask("b1qk", Hiding::Some)
            .blocks((8, 16), "hqk", Hiding::Some)
            .sinks(),
        per_head("paged", (4, 2), 64, &[1, 3], &[50, 129]).causal().paged(Nhd, 16),
        per_head("paged_hnd", (8, 2), 64, &[1, 1], &[50, 129]).paged(Hnd, 8),
        per_head("latent", (8, 1), 96, &[1, 2], &[65, 130]).value_dim(64).paged(Nhd, 64).latent(),
        per_head("gaps", (4, 2), 40, &[9, 4], &[20, 33]).q_at(Gaps).kv_at(Gaps).outputs_at(Gaps),
        per_head("heads_first", (4, 2), 64, &[9, 4], &[20, 33])
            .q_at(HeadsFirst)
            .kv_at(HeadsFirst)
            .outputs_at(HeadsFirst),
    ]);
    cases
}
