//! Adversarial values: every pattern in every type, and where it hurts most.
//!
//! The invariant: a pattern meets more than one tile of any engine, and the split of a decode as well.

use attn_core::DType::{BF16, F8E4M3, F16, F32};

use crate::adversarial::Pattern;
use crate::case::{Case, Hiding, Scales};

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for pattern in Pattern::ALL.into_iter().filter(|p| *p != Pattern::Normal) {
        for dtype in [F32, F16, BF16] {
            let name = format!("{}_{dtype}", pattern.name());
            cases.push(Case::new(name, dtype, (2, 1), 64, &[20], &[150]).pattern(pattern));
        }
        let name = |what: &str| format!("{}_{what}", pattern.name());
        cases.push(
            Case::new(name("causal"), F32, (2, 1), 40, &[70], &[70]).causal().pattern(pattern),
        );
        cases.push(Case::new(name("decode"), BF16, (4, 1), 64, &[1], &[300]).pattern(pattern));
    }
    cases.extend([
        Case::new("far_below_masked", F32, (2, 1), 64, &[20], &[150])
            .pattern(Pattern::FarBelow)
            .mask("qk", Hiding::FirstTile),
        Case::new("far_below_sinks", F32, (2, 1), 64, &[20], &[50])
            .pattern(Pattern::FarBelow)
            .sinks(),
        Case::new("far_above_softcap", F32, (2, 1), 64, &[20], &[50])
            .pattern(Pattern::FarAbove)
            .softcap(30.0),
        Case::new("outlier_window", F32, (2, 1), 64, &[80], &[80])
            .pattern(Pattern::Outlier)
            .window(Some(10), Some(0)),
        Case::new("equal_fp8", BF16, (2, 1), 64, &[3], &[150])
            .pattern(Pattern::Equal)
            .fp8(F8E4M3, Scales::Scalar),
    ]);
    cases
}
