//! Every primitive at every level of this processor against plain f64 loops, at the sizes around the
//! register tiles.
//!
//! Invariant: a level that the processor has is tested, whichever would be chosen at run time.

use attn_core::{Element, F8E4M3, F8E5M2};
use half::{bf16, f16};

use super::*;

fn levels() -> impl Iterator<Item = Simd> {
    Level::ALL.into_iter().filter_map(Simd::with_level)
}

/// Deterministic numbers in [-1, 1).
fn numbers(seed: u64, n: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let bits = u16::try_from(state >> 48).unwrap();
            f32::from(bits) / 32768.0 - 1.0
        })
        .collect()
}

fn assert_close(got: f32, expected: f64, bound: f64, what: &str) {
    let error = (f64::from(got) - expected).abs();
    assert!(error <= bound, "{what}: got {got}, expected {expected}, error {error} > {bound}");
}

#[test]
fn detection_picks_an_available_level() {
    assert!(Level::detect().is_available());
    assert!(Simd::with_level(Level::detect()).is_some());
    assert!(Level::Portable.is_available());
}

#[test]
fn product_matches_f64_at_every_tile_edge() {
    let sizes = [
        (1, 16, 1),
        (2, 16, 3),
        (3, 32, 5),
        (5, 48, 7),
        (6, 48, 64),
        (7, 64, 9),
        (8, 48, 1),
        (9, 80, 17),
        (13, 96, 31),
        (16, 112, 2),
        (17, 48, 33),
        (31, 16, 128),
        (4, 160, 0),
        (0, 16, 4),
        (5, 0, 4),
    ];
    for simd in levels() {
        for (rows, cols, inner) in sizes {
            for order in [Order::RowMajor, Order::ColumnMajor] {
                for gap in [0, 3] {
                    check_product(simd, (rows, cols, inner), order, gap);
                }
            }
        }
    }
}

fn check_product(simd: Simd, (rows, cols, inner): (usize, usize, usize), order: Order, gap: usize) {
    let (a_rows, a_cols) = match order {
        Order::RowMajor => (rows, inner),
        Order::ColumnMajor => (inner, rows),
    };
    let (a_stride, b_stride, c_stride) = (a_cols + gap, cols + gap, cols + gap);
    let a = numbers(1, a_rows * a_stride);
    let b = numbers(2, inner * b_stride);
    let old = numbers(3, rows * c_stride);
    let factors = numbers(4, cols);
    for start in [Start::Zero, Start::Keep, Start::Scaled(&factors)] {
        let mut c = old.clone();
        if matches!(start, Start::Zero) {
            c.fill(f32::NAN);
        }
        let before = c.clone();
        let p = Product { rows, cols, inner, a: &a, a_stride, order, b: &b, b_stride };
        simd.product(&p, start, &mut c, c_stride);
        for row in 0..rows {
            for col in 0..c_stride {
                let at = row * c_stride + col;
                if col >= cols {
                    assert_eq!(c[at].to_bits(), before[at].to_bits(), "the gap is left alone");
                    continue;
                }
                let mut expected = match start {
                    Start::Zero => 0.0,
                    Start::Keep => f64::from(old[at]),
                    Start::Scaled(f) => f64::from(old[at]) * f64::from(f[col]),
                };
                for i in 0..inner {
                    let x = match order {
                        Order::RowMajor => a[row * a_stride + i],
                        Order::ColumnMajor => a[i * a_stride + row],
                    };
                    expected += f64::from(x) * f64::from(b[i * b_stride + col]);
                }
                let what = format!("{simd:?} {rows}x{cols}x{inner} {order:?} at {row},{col}");
                assert_close(c[at], expected, 2e-7 * (2.0 + inner as f64), &what);
            }
        }
    }
}

#[test]
fn exp2_stays_within_two_ulp_and_keeps_the_specials() {
    let shift = [0.0; 16];
    for simd in levels() {
        let mut x: Vec<f32> = (0..40_000u16).map(|i| -125.9 + f32::from(i) * 0.006_3).collect();
        x.extend((0..20_000u16).map(|i| -f32::from(i) * 0.000_1));
        let mut got = x.clone();
        simd.exp2_columns(&mut got, 16, 1.0, &shift);
        for (&x, &got) in x.iter().zip(&got) {
            // Relative to the power of two below, so that the bound counts ulp.
            let expected = f64::from(x).exp2();
            let ulp = f64::from(f32::EPSILON) * f64::from(x).floor().exp2();
            assert_close(got, expected, 2.0 * ulp, &format!("{simd:?} 2^{x}"));
        }
        let special = [0.0, -0.0, f32::NEG_INFINITY, -1e30, f32::MIN, -200.0, f32::NAN, -127.0];
        let mut got = [special, special].concat();
        simd.exp2_columns(&mut got, 16, 1.0, &shift);
        assert_eq!(got[..6], [1.0, 1.0, 0.0, 0.0, 0.0, 0.0], "{simd:?}");
        assert!(got[6].is_nan() && got[7] < 1e-38, "{simd:?}");
    }
}

/// The state after all tiles and the weights, by f64.
fn softmax_reference(scores: &[f32], c: f64) -> (f64, f64) {
    let max = scores.iter().map(|&x| f64::from(x) * c).fold(f64::NEG_INFINITY, f64::max);
    let sum = match max {
        f64::NEG_INFINITY => 0.0,
        _ => scores.iter().map(|&x| (f64::from(x) * c - max).exp2()).sum(),
    };
    (max, sum)
}

/// Scores that break a careless softmax: hidden first tile, largest last, outlier, equal, far below.
fn adversarial(column: usize, keys: usize) -> Vec<f32> {
    let mut scores = numbers(column as u64 + 11, keys);
    match column % 8 {
        0 => scores.fill(f32::NEG_INFINITY),
        1 => scores[..keys / 2].fill(f32::NEG_INFINITY),
        2 => scores[keys - 1] = 80.0,
        3 => scores.iter_mut().for_each(|x| *x -= 3e4),
        4 => scores.fill(0.25),
        5 => scores[0] = 1e30,
        6 => scores[keys / 2..].fill(f32::NEG_INFINITY),
        _ => {}
    }
    scores
}

#[test]
fn softmax_columns_matches_f64_over_tiles() {
    let c = 1.3;
    for simd in levels() {
        for width in [16, 32, 48, 80] {
            for rows in [1, 2, 3, 4, 5, 8, 31] {
                let tiles = 3;
                let keys = rows * tiles;
                let columns: Vec<Vec<f32>> = (0..width).map(|i| adversarial(i, keys)).collect();
                let (mut max, mut sum) = (vec![f32::NEG_INFINITY; width], vec![0.0; width]);
                let mut rescale = vec![f32::NAN; width];
                let mut total = vec![0.0f64; width];
                for t in 0..tiles {
                    let mut tile = vec![0.0; rows * width];
                    for r in 0..rows {
                        for w in 0..width {
                            tile[r * width + w] = columns[w][t * rows + r];
                        }
                    }
                    let state = ColumnState { max: &mut max, sum: &mut sum, rescale: &mut rescale };
                    simd.softmax_columns(&mut tile, width, c, state);
                    for w in 0..width {
                        let weights = (0..rows).map(|r| f64::from(tile[r * width + w]));
                        total[w] = total[w] * f64::from(rescale[w]) + weights.sum::<f64>();
                    }
                }
                for w in 0..width {
                    let (m, s) = softmax_reference(&columns[w], f64::from(c));
                    let what = format!("{simd:?} width {width} rows {rows} column {w}");
                    if m == f64::NEG_INFINITY {
                        assert_eq!((max[w], sum[w]), (f32::NEG_INFINITY, 0.0), "{what}");
                    } else {
                        assert_close(max[w], m, 1e-6 * m.abs(), &what);
                        // The shift is rounded to f32, which moves sum and weights alike.
                        let s = s * (m - f64::from(max[w])).exp2();
                        assert_close(sum[w], s, 4e-3 * s, &what);
                        assert_close(sum[w], total[w], 1e-5 * s, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn softmax_keeps_nan_visible() {
    for simd in levels() {
        let mut tile = vec![0.5; 4 * 16];
        tile[16 + 3] = f32::NAN;
        let (mut max, mut sum) = (vec![f32::NEG_INFINITY; 16], vec![0.0; 16]);
        let mut rescale = vec![0.0; 16];
        let state = ColumnState { max: &mut max, sum: &mut sum, rescale: &mut rescale };
        simd.softmax_columns(&mut tile, 16, 1.0, state);
        assert!(sum[3].is_nan(), "{simd:?}");
        assert_close(sum[2], 4.0, 1e-6, "a column without NaN");
    }
}

#[test]
fn exp2_columns_with_infinite_shift_gives_zero() {
    for simd in levels() {
        let mut tile = numbers(6, 3 * 32);
        let expected = tile.clone();
        let mut shift = numbers(7, 32);
        shift[5] = f32::INFINITY;
        tile[5] = f32::NEG_INFINITY;
        simd.exp2_columns(&mut tile, 32, 2.0, &shift);
        for (i, &x) in tile.iter().enumerate() {
            let w = i % 32;
            if w == 5 {
                assert_eq!(x, 0.0);
            } else {
                let y = (f64::from(expected[i]) * 2.0 - f64::from(shift[w])).exp2();
                assert_close(x, y, 2e-6, "weight");
            }
        }
    }
}

#[test]
fn soft_cap_is_accurate_for_small_and_large_scores() {
    for simd in levels() {
        let mut x: Vec<f32> = (-300i16..300).map(|i| f32::from(i) * 0.37).collect();
        x.extend([0.0, 1e-20, -1e-6, 1e30, f32::INFINITY, f32::NEG_INFINITY, 31.2, 31.3]);
        let mut got = x.clone();
        simd.soft_cap(&mut got, 0.5, 25.0);
        for (&x, &got) in x.iter().zip(&got) {
            let expected = 25.0 * (f64::from(x) * 0.5 / 25.0).tanh();
            assert_close(got, expected, 6e-7 * expected.abs(), &format!("{simd:?} cap of {x}"));
        }
        let mut nan = [f32::NAN];
        simd.soft_cap(&mut nan, 0.5, 25.0);
        assert!(nan[0].is_nan());
    }
}

#[test]
fn row_operations_match_their_definitions_at_every_length() {
    for simd in levels() {
        for n in 0..40 {
            let (x, y) = (numbers(8, n), numbers(9, n));
            let (mut scaled, mut added, mut both) = (x.clone(), x.clone(), x.clone());
            simd.scale(&mut scaled, 0.3);
            simd.add(&mut added, &y);
            simd.add_scaled(&mut both, 0.3, &y);
            for i in 0..n {
                let (a, b) = (f64::from(x[i]), f64::from(y[i]));
                let s = f64::from(0.3f32);
                assert_close(scaled[i], a * s, 1e-7, "scale");
                assert_close(added[i], a + b, 2e-7, "add");
                assert_close(both[i], a + s * b, 2e-7, "add_scaled");
            }
        }
    }
}

#[test]
fn tile_operations_match_their_definitions() {
    for simd in levels() {
        for width in [16, 48, 64] {
            let rows = 7;
            let x = numbers(10, rows * width);
            let p = numbers(11, rows * width);
            let a = numbers(12, width);
            let origin: Vec<f32> = (0..width).map(|i| (i % 9) as f32 - 1.0).collect();
            let end: Vec<f32> = (0..width).map(|i| (i % 11) as f32 - 1.0).collect();
            let (mut biased, mut masked, mut gradient) = (x.clone(), x.clone(), x.clone());
            let mut marked = x.clone();
            simd.hide_marked(&mut marked, &p);
            simd.subtract_distance(&mut biased, &a, &origin);
            simd.mask_outside(&mut masked, &origin, &end);
            simd.softmax_gradient(&mut gradient, &p, &a);
            for row in 0..rows {
                for col in 0..width {
                    let i = row * width + col;
                    let r = row as f32;
                    let distance = f64::from(a[col]) * f64::from((r - origin[col]).abs());
                    assert_close(biased[i], f64::from(x[i]) - distance, 1e-6, "distance");
                    let visible = r >= origin[col] && r < end[col];
                    let expected = if visible { x[i] } else { f32::NEG_INFINITY };
                    assert_eq!(masked[i], expected, "mask_outside");
                    let expected = if p[i] < 0.0 { f32::NEG_INFINITY } else { x[i] };
                    assert_eq!(marked[i], expected, "hide_marked");
                    let expected = f64::from(p[i]) * (f64::from(x[i]) - f64::from(a[col]));
                    assert_close(gradient[i], expected, 3e-7, "softmax_gradient");
                }
            }
        }
    }
}

fn check_widen<E: Widen>(all: &[E]) {
    for simd in levels() {
        let mut got = vec![0.0; all.len()];
        simd.widen(all, 1.0, &mut got);
        for (e, &got) in all.iter().zip(&got) {
            let expected = e.to_f32();
            if expected.is_nan() {
                assert!(got.is_nan(), "{simd:?} {e:?}");
            } else {
                assert_eq!(got.to_bits(), expected.to_bits(), "{simd:?} {e:?}");
            }
        }
        let (count, dim) = (3, all.len() / 9);
        let mut rows = vec![7.5; count * (dim + 2)];
        simd.widen_rows(all, dim + 1, (count, dim), 1.0, &mut rows, dim + 2);
        for (i, row) in rows.chunks(dim + 2).enumerate() {
            assert_eq!(row[dim..], [7.5; 2]);
            for (got, e) in row[..dim].iter().zip(&all[i * (dim + 1)..]) {
                assert!(*got == e.to_f32() || e.to_f32().is_nan(), "{simd:?} {e:?} in rows");
            }
        }
        for n in 0..40.min(all.len()) {
            let mut got = vec![0.0; n];
            simd.widen(&all[..n], 0.5, &mut got);
            for (e, &got) in all.iter().zip(&got) {
                let expected = e.to_f32() * 0.5;
                assert!(got == expected || expected.is_nan(), "{simd:?} {e:?} with a scale");
            }
        }
    }
}

#[test]
fn widening_is_exact_for_every_pattern() {
    check_widen::<f16>(&(0..=u16::MAX).map(f16::from_bits).collect::<Vec<_>>());
    check_widen::<bf16>(&(0..=u16::MAX).map(bf16::from_bits).collect::<Vec<_>>());
    check_widen::<F8E4M3>(&(0..=u8::MAX).map(F8E4M3).collect::<Vec<_>>());
    check_widen::<F8E5M2>(&(0..=u8::MAX).map(F8E5M2).collect::<Vec<_>>());
    check_widen::<f32>(&numbers(13, 99));
}

#[test]
fn narrowing_rounds_like_the_element_types() {
    for simd in levels() {
        let mut x = numbers(14, 1000);
        x.extend([0.0, -0.0, 1e-8, 6e4, 7e4, f32::INFINITY, f32::NEG_INFINITY, 1.000_976_6]);
        let mut half = vec![f16::ZERO; x.len()];
        let mut brain = vec![bf16::ZERO; x.len()];
        simd.narrow_f16(&x, &mut half);
        simd.narrow_bf16(&x, &mut brain);
        for (i, &x) in x.iter().enumerate() {
            assert_eq!(half[i], <f16 as Element>::from_f32(x));
            assert_eq!(brain[i], <bf16 as Element>::from_f32(x));
        }
    }
}

#[test]
fn transpose_moves_every_element_and_no_other() {
    for simd in levels() {
        for (rows, cols) in [(0, 3), (1, 1), (5, 40), (8, 8), (16, 24), (33, 17), (48, 128)] {
            let (src_stride, dst_stride) = (cols + 1, rows + 2);
            let src = numbers(19, rows * src_stride);
            let mut dst = vec![7.5; cols * dst_stride];
            simd.transpose(&src, src_stride, (rows, cols), &mut dst, dst_stride);
            for c in 0..cols {
                for r in 0..rows {
                    assert_eq!(dst[c * dst_stride + r], src[r * src_stride + c], "{simd:?}");
                }
                assert_eq!(dst[c * dst_stride + rows..(c + 1) * dst_stride], [7.5; 2]);
            }
        }
    }
}
