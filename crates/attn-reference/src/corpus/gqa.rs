//! Query heads that share KV heads, at every ratio in use and at odd ones.
//!
//! The invariant: with more than one KV head in each case, a kernel that maps heads by remainder instead of
//! by quotient fails.

use attn_core::DType::{BF16, F16, F32};

use crate::case::Case;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for group in [1, 2, 3, 4, 7, 8, 16] {
        let heads = (2 * group, 2);
        cases.push(Case::new(format!("prefill_{group}"), F32, heads, 32, &[19], &[37]).causal());
        cases.push(Case::new(format!("decode_{group}"), BF16, heads, 64, &[1, 1], &[80, 33]));
    }
    cases.extend([
        Case::new("smollm2", F32, (9, 3), 64, &[12], &[12]).causal(),
        Case::new("one_kv_head", F16, (7, 1), 72, &[5], &[66]).causal(),
        Case::new("speculative_rows", BF16, (8, 2), 128, &[4, 4], &[100, 7]).causal(),
    ]);
    cases
}
