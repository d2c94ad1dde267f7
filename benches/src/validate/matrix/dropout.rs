//! Dropout of weights: rates, dims, storages and options of the kernels that take it.
//!
//! The invariant: tiles of keys start on and off multiples of four, for the generator makes four keys at a time and a
//! kernel may draw otherwise where a tile does not start with the first of them.

use attn_core::DType::{F8E4M3, F8E5M2};
use attn_core::PageOrder::{Hnd, Nhd};
use attn_reference::Case;
use attn_reference::case::Scales;

use super::{KINDS, TYPES, rotate};

const RATES: [f32; 4] = [0.1, 0.5, 0.9, 0.01];

pub(super) fn dropout() -> Vec<Case> {
    let mut cases = Vec::new();
    for (dim, value_dim) in
        [(64, 64), (128, 128), (256, 256), (32, 32), (96, 96), (192, 128), (40, 72)]
    {
        for (q, k) in [([70, 33], [90, 150]), ([1, 5], [190, 77])] {
            let at = cases.len();
            let name = format!("{dim}-{value_dim}_q{}", q[0]);
            let mut case = Case::new(name, rotate(&TYPES, at / 2), (4, 2), dim, &q, &k);
            case.spec.value_dim = value_dim;
            case.spec.causal = at % 3 != 1;
            let case = case.dropout(rotate(&RATES, at));
            cases.push(match at % 4 {
                0 => case,
                1 => case.paged(rotate(&[Nhd, Hnd], at / 4), 16),
                2 => case.padded(),
                _ => {
                    let cache = rotate(&[F8E4M3, F8E5M2], at / 4);
                    case.fp8(cache, Scales::PerHead).paged(rotate(&[Hnd, Nhd], at / 4), 8)
                }
            });
        }
    }
    for (name, kind) in KINDS {
        for (q, k) in [([70, 33], [90, 150]), ([1, 5], [190, 77])] {
            let at = cases.len();
            let case =
                Case::new(format!("{name}_q{}", q[0]), rotate(&TYPES, at / 2), (4, 2), 64, &q, &k);
            let case = kind(case).dropout(rotate(&RATES, at));
            cases.push(if at % 2 == 0 { case } else { case.paged(Nhd, 16) });
        }
    }
    for left in [16, 33, 34, 35] {
        let case = Case::new(format!("left_{left}"), TYPES[0], (2, 2), 128, &[130], &[261]);
        cases.push(case.window(Some(left), Some(0)).dropout(0.3));
    }
    for (q_heads, kv_heads) in [(1, 1), (6, 2), (16, 1)] {
        for rows in [1, 7, 45] {
            let at = cases.len();
            let name = format!("h{q_heads}-{kv_heads}_q{rows}");
            let (heads, lens) = ((q_heads, kv_heads), [rows + 60, 131, 0]);
            let case = Case::new(
                name,
                rotate(&TYPES, at),
                heads,
                rotate(&[64, 128], at),
                &[rows, 1, 2],
                &lens,
            );
            cases.push(case.causal().dropout(rotate(&RATES, at)));
        }
    }
    cases
}
