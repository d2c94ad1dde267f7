//! Strides: what a cache, a fused projection or a transpose hands to attention.
//!
//! The invariant: every placement occurs on queries, keys and outputs apart and together, with NaN in all
//! gaps. An innermost stride other than 1 may be refused by an engine, never read wrongly.

use attn_core::DType::{BF16, F16, F32};

use crate::case::Case;
use crate::storage::Placement::{
    Gaps, HeadsFirst, InnermostTwo, InterleavedKv, Reversed, SharedHeads,
};

pub(super) fn cases() -> Vec<Case> {
    let case = |name: &str| Case::new(name, F32, (4, 2), 32, &[17, 5], &[33, 20]).causal();
    let mut cases = Vec::new();
    for (placement, name) in [
        (Gaps, "gaps"),
        (HeadsFirst, "heads_first"),
        (Reversed, "reversed"),
        (SharedHeads, "shared"),
    ] {
        cases.push(case(&format!("q_{name}")).q_at(placement));
        cases.push(case(&format!("kv_{name}")).kv_at(placement));
    }
    for (placement, name) in [(Gaps, "gaps"), (HeadsFirst, "heads_first"), (Reversed, "reversed")] {
        cases.push(case(&format!("outputs_{name}")).outputs_at(placement));
    }
    cases.extend([
        case("kv_interleaved").kv_at(InterleavedKv),
        Case::new("kv_interleaved_value_dim", BF16, (4, 2), 64, &[9, 1], &[33, 70])
            .value_dim(40)
            .kv_at(InterleavedKv),
        Case::new("all_gaps_padded", BF16, (4, 2), 72, &[9, 20], &[33, 20])
            .padded()
            .q_at(Gaps)
            .kv_at(Gaps)
            .outputs_at(Gaps),
        Case::new("all_heads_first_padded", F16, (4, 2), 64, &[9, 20], &[33, 20])
            .padded()
            .q_at(HeadsFirst)
            .kv_at(HeadsFirst)
            .outputs_at(HeadsFirst),
        Case::new("all_reversed_padded", F32, (2, 1), 40, &[9, 20], &[33, 20])
            .padded()
            .q_at(Reversed)
            .kv_at(Reversed)
            .outputs_at(Reversed),
        case("q_innermost_two").q_at(InnermostTwo),
        case("kv_innermost_two").kv_at(InnermostTwo),
        case("outputs_innermost_two").outputs_at(InnermostTwo),
    ]);
    cases
}
