//! Nothing to do, or nothing to see: empty batches and sequences, rows without keys.
//!
//! The invariant: each has a documented result, O = 0 and LSE = -inf (the sink's value with a sink), and
//! none is an error.

use attn_core::DType::{BF16, F16, F32};

use crate::case::{Case, Hiding};

pub(super) fn cases() -> Vec<Case> {
    vec![
        Case::new("no_sequences", F32, (2, 1), 32, &[], &[]),
        Case::new("no_sequences_padded", BF16, (2, 1), 32, &[], &[]).padded(),
        Case::new("no_heads", F32, (0, 1), 32, &[3], &[5]),
        Case::new("no_rows", F32, (2, 1), 32, &[0], &[7]),
        Case::new("no_keys", F32, (2, 1), 32, &[5], &[0]),
        Case::new("no_keys_sinks", BF16, (2, 1), 64, &[5], &[0]).sinks(),
        Case::new("no_keys_causal", F16, (2, 1), 64, &[5, 2], &[0, 2]).causal(),
        Case::new("nothing", F32, (2, 1), 32, &[0, 0], &[0, 0]),
        Case::new("between_others", BF16, (4, 2), 64, &[3, 0, 0, 20, 1], &[3, 0, 9, 0, 65])
            .causal(),
        Case::new("between_others_padded", F32, (2, 2), 32, &[3, 0, 2], &[0, 4, 70]).padded(),
        Case::new("rows_above_the_keys", F32, (2, 1), 32, &[70], &[3]).causal(),
        Case::new("rows_above_the_keys_sinks", F32, (2, 1), 32, &[70], &[3]).causal().sinks(),
        Case::new("rows_left_of_the_window", F32, (2, 1), 16, &[30], &[8]).window(Some(2), Some(2)),
        Case::new("all_hidden_bias", BF16, (2, 1), 64, &[4], &[70]).bias("11", Hiding::All),
        Case::new("all_hidden_blocks", F32, (2, 1), 32, &[20], &[40])
            .blocks((16, 16), "qk", Hiding::All)
            .sinks(),
    ]
}
