//! Head dims, types and lengths around the edges of every tile size in use.
//!
//! The invariant: each head dim appears in each of f32, f16 and bf16, and each length next to a power of
//! two appears on both sides. A full product would add time and no new edge.

use attn_core::DType::{BF16, F16, F32};

use crate::case::Case;

pub(super) fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (n, dim) in [1, 8, 32, 40, 64, 72, 80, 96, 128, 192, 256].into_iter().enumerate() {
        // Lengths are rotated, so that each edge meets several head dims.
        let edges = [17, 15, 65, 33, 16, 63, 31, 64, 1, 129, 127];
        let (q_len, kv_len) = (edges[n], edges[(n + 4) % edges.len()]);
        let name = |dtype| format!("head_dim_{dim}_{dtype}_{q_len}x{kv_len}");
        for dtype in [F32, F16, BF16] {
            cases.push(Case::new(name(dtype), dtype, (2, 1), dim, &[q_len], &[kv_len]));
        }
    }
    for (q_len, kv_len) in
        [(1, 1), (1, 16), (15, 17), (16, 16), (63, 65), (64, 64), (65, 63), (127, 129), (128, 128)]
    {
        let name = format!("length_{q_len}x{kv_len}");
        cases.push(Case::new(name, F32, (1, 1), 32, &[q_len], &[kv_len]));
    }
    cases.extend([
        Case::new("value_dim_wider", F32, (2, 2), 40, &[20], &[33]).value_dim(72),
        Case::new("value_dim_narrower", BF16, (4, 2), 192, &[17], &[40]).value_dim(128),
        Case::new("value_dim_one", F16, (2, 1), 64, &[9], &[70]).value_dim(1),
        Case::new("ragged_packed", BF16, (2, 2), 64, &[3, 17, 1, 64], &[65, 17, 129, 64]),
        Case::new("ragged_padded", F32, (2, 1), 32, &[5, 1, 33], &[7, 70, 33]).padded(),
        Case::new("ragged_padded_f16", F16, (3, 3), 40, &[16, 0, 2], &[1, 20, 66]).padded(),
        Case::new("decode_long", F32, (4, 1), 64, &[1], &[1025]),
        Case::new("decode_batch", BF16, (8, 2), 128, &[1, 1, 1], &[257, 31, 64]),
        Case::new("long_rows", F32, (1, 1), 64, &[130], &[513]),
    ]);
    cases
}
