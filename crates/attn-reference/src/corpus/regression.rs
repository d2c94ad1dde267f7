//! Faults that attention code has had, each as the smallest case that shows it.
//!
//! The invariant: a case is added in the commit before the fix, with the fault in its name or comment, and
//! stays. The first ones are faults that are public knowledge of the field; they cost others enough.

use attn_core::DType::{BF16, F16, F32};
use attn_core::PageOrder::Nhd;

use crate::adversarial::Pattern;
use crate::case::{Case, Hiding};

pub(super) fn cases() -> Vec<Case> {
    vec![
        // Top-left aligned causal: row 0 of a chunk saw one key instead of the whole cache.
        Case::new("causal_top_left", F32, (1, 1), 8, &[2], &[6]).causal(),
        // A window of n counted as n keys, not as n besides the row's own.
        Case::new("window_exclusive", F32, (1, 1), 8, &[6], &[6]).causal().window(Some(1), None),
        // A left window skipped the tile that holds its first key.
        Case::new("window_first_tile_lost", F32, (1, 1), 16, &[1], &[129])
            .causal()
            .window(Some(64), None),
        // -inf minus -inf: a hidden first tile, then visible keys.
        Case::new("hidden_first_tile_nan", F16, (1, 1), 32, &[3], &[140])
            .mask("qk", Hiding::FirstTile),
        // A running maximum that starts at the most negative finite number of a narrower type.
        Case::new("maximum_starts_finite", F16, (1, 1), 64, &[2], &[9]).pattern(Pattern::FarBelow),
        // LSE of a row without keys given as +inf, or as 0.
        Case::new("lse_of_nothing", F32, (1, 1), 8, &[4], &[2]).causal(),
        // The sink left out of the LSE, so that splits merged wrongly.
        Case::new("sink_outside_lse", F32, (2, 1), 16, &[1], &[70]).sinks_of(3.0),
        // Bias added before the soft-cap.
        Case::new("bias_inside_softcap", F32, (1, 1), 8, &[3], &[5])
            .softcap(0.5)
            .bias("qk", Hiding::None),
        // Zero weight times NaN in the unused slots of the last page.
        Case::new("nan_in_last_page", BF16, (2, 1), 64, &[1], &[17]).paged(Nhd, 16),
        // The mask's row stride taken from the sequence's own length instead of the longest.
        Case::new("mask_stride_of_the_batch", F32, (1, 1), 8, &[3, 5], &[4, 9])
            .mask("b1qk", Hiding::Some),
        // Head mapping by remainder.
        Case::new("head_by_remainder", F32, (6, 2), 8, &[2], &[5]),
        // ALiBi by key index instead of by distance differs once the row has hidden neighbours on both sides.
        Case::new("alibi_two_sided", F32, (2, 1), 8, &[4], &[9]).alibi(),
        // The tail of a head dim that is no multiple of the vector width read into the next head.
        Case::new("head_dim_tail", F32, (3, 3), 9, &[4], &[7]).value_dim(11),
        // P rounded to f16 overflowed or vanished when the maximum was not taken off first.
        Case::new("weights_overflow_f16", F16, (1, 1), 32, &[2], &[40]).pattern(Pattern::HugeRange),
    ]
}
