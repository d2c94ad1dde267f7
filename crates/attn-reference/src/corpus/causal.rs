//! Causal and window bounds, square and not.
//!
//! The invariant: each bound meets `q_len < kv_len`, `q_len = kv_len` and `q_len > kv_len`, because
//! bottom-right alignment makes three different pictures of them.

use attn_core::DType::{BF16, F16, F32};

use crate::case::Case;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (q_len, kv_len) in [(1, 65), (17, 17), (64, 64), (65, 129), (129, 129), (63, 128)] {
        let name = format!("{q_len}x{kv_len}");
        cases.push(Case::new(name, F32, (2, 1), 32, &[q_len], &[kv_len]).causal());
    }
    cases.extend([
        Case::new("more_rows_than_keys", F32, (2, 2), 16, &[40], &[9]).causal(),
        Case::new("ragged_f16", F16, (4, 2), 64, &[64, 1, 33, 7], &[64, 70, 130, 3]).causal(),
        Case::new("ragged_bf16_padded", BF16, (2, 1), 80, &[9, 65, 2], &[65, 65, 1])
            .causal()
            .padded(),
        Case::new("window_left", F32, (2, 1), 32, &[70], &[70]).causal().window(Some(5), None),
        Case::new("window_left_zero", F32, (1, 1), 8, &[20], &[20]).causal().window(Some(0), None),
        Case::new("window_left_tile", BF16, (2, 1), 64, &[40], &[200])
            .causal()
            .window(Some(64), None),
        Case::new("window_decode", F16, (4, 1), 64, &[1, 1], &[300, 20])
            .causal()
            .window(Some(31), None),
        Case::new("window_both", F32, (2, 2), 32, &[65], &[65]).window(Some(3), Some(7)),
        Case::new("window_both_rectangular", F32, (1, 1), 32, &[33], &[130])
            .window(Some(16), Some(2)),
        Case::new("window_both_more_rows", F32, (2, 1), 16, &[50], &[20]).window(Some(4), Some(4)),
        Case::new("window_right_only", F32, (1, 1), 32, &[30], &[40]).window(None, Some(6)),
        Case::new("window_right_causal", F32, (1, 1), 32, &[30], &[40])
            .causal()
            .window(None, Some(6)),
        Case::new("window_huge", F32, (1, 1), 16, &[20], &[30])
            .window(Some(usize::MAX), Some(usize::MAX)),
        Case::new("window_i32_max", F32, (1, 1), 16, &[20], &[30])
            .causal()
            .window(Some(2_147_483_647), None),
    ]);
    cases
}
