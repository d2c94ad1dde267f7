//! The mask against brute force over every pair, at every boundary of small sequences.

use proptest::prelude::*;

use super::*;

/// The definition, pair by pair, in wide integers.
fn brute(band: Band, row: usize, key: usize, q_len: usize, kv_len: usize) -> bool {
    let p = row as i128 + kv_len as i128 - q_len as i128;
    let j = key as i128;
    band.left.is_none_or(|l| j >= p - l as i128) && band.right.is_none_or(|r| j <= p + r as i128)
}

fn class_of(mut pairs: impl Iterator<Item = bool>) -> TileClass {
    let (mut any, mut all, mut none) = (false, true, true);
    for sees in &mut pairs {
        any |= sees;
        all &= sees;
        none = false;
    }
    if none || !any {
        TileClass::Skip
    } else if all {
        TileClass::Full
    } else {
        TileClass::Partial
    }
}

fn side() -> impl Strategy<Value = Option<usize>> {
    prop_oneof![
        2 => Just(None),
        8 => (0usize..14).prop_map(Some),
        1 => Just(Some(usize::MAX)),
        1 => Just(Some(2_147_483_647)),
    ]
}

#[test]
fn band_tiles_match_brute_force_at_every_boundary() {
    for q_len in 0..7 {
        for kv_len in 0..7 {
            for band in [
                Band::OPEN,
                Band::CAUSAL,
                Band { left: Some(2), right: None },
                Band { left: Some(1), right: Some(1) },
                Band { left: None, right: Some(3) },
                Band { left: Some(0), right: Some(0) },
            ] {
                for r0 in 0..=q_len {
                    for r1 in r0..=q_len {
                        for k0 in 0..=kv_len {
                            for k1 in k0..=kv_len {
                                let want = class_of((r0..r1).flat_map(|i| {
                                    (k0..k1).map(move |j| brute(band, i, j, q_len, kv_len))
                                }));
                                let got = band.tile(r0..r1, k0..k1, q_len, kv_len);
                                assert_eq!(
                                    got, want,
                                    "{band:?} q{q_len} kv{kv_len} {r0}..{r1} x {k0}..{k1}"
                                );
                            }
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn band_pairs_of_huge_lengths_need_no_walk() {
    assert_eq!(Band::CAUSAL.pairs(1 << 32, 1 << 32), (1u64 << 63) + (1 << 31));
    assert_eq!(Band::OPEN.pairs(1 << 40, 1 << 40), u64::MAX);
    assert_eq!(Band { left: Some(usize::MAX), right: Some(usize::MAX) }.pairs(3, 5), 15);
}

proptest! {
    #[test]
    fn band_pairs_match_the_rows(
        q_len in 0usize..20, kv_len in 0usize..20, left in side(), right in side(), causal: bool,
    ) {
        let band = Band::new(causal, left, right);
        let want: usize = (0..q_len).map(|i| band.row(i, q_len, kv_len).len()).sum();
        prop_assert_eq!(band.pairs(q_len, kv_len), want as u64);
    }

    #[test]
    fn band_rows_are_exact_and_their_union_is_tight(
        q_len in 1usize..20, kv_len in 0usize..20, left in side(), right in side(), causal: bool,
        a in 0usize..20, b in 0usize..20,
    ) {
        let band = Band::new(causal, left, right);
        let (lo, hi) = (a.min(b).min(q_len - 1), a.max(b).min(q_len - 1) + 1);
        let mut union: Option<(usize, usize)> = None;
        for row in lo..hi {
            let range = band.row(row, q_len, kv_len);
            for key in 0..kv_len {
                prop_assert_eq!(range.contains(&key), brute(band, row, key, q_len, kv_len));
            }
            if !range.is_empty() {
                let (s, e) = union.unwrap_or((range.start, range.end));
                union = Some((s.min(range.start), e.max(range.end)));
            }
        }
        let got = band.rows(lo..hi, q_len, kv_len);
        match union {
            Some((s, e)) => prop_assert_eq!(got, s..e),
            None => prop_assert!(got.is_empty()),
        }
    }

    #[test]
    fn intersections_match_brute_force(
        q_len in 1usize..24, kv_len in 1usize..24, left in side(), right in side(), causal: bool,
        block_q in 1usize..9, block_kv in 1usize..9,
        bits in proptest::collection::vec(0u8..3, 24 * 24),
        keep_bits in proptest::collection::vec(0u8..4, 24 * 24),
        use_blocks: bool, use_keep: bool, keep_rows: bool,
        t in (0usize..24, 0usize..24, 0usize..24, 0usize..24),
    ) {
        let band = Band::new(causal, left, right);
        let (bq, bk) = (q_len.div_ceil(block_q), kv_len.div_ceil(block_kv));
        let mut mask = Mask::new(band, q_len, kv_len);
        if use_blocks {
            let view = View::contiguous("block_mask", &bits[..bq * bk], &[bq, bk]).expect("fits");
            mask = mask.with_blocks(BlockMask::new(block_q, block_kv, view).expect("rank 2"));
        }
        let rows = if keep_rows { q_len } else { 1 };
        if use_keep {
            let data = &keep_bits[..rows * kv_len];
            let view = View::contiguous("mask", data, &[rows, kv_len]).expect("fits");
            mask = mask.with_keep(view).expect("shapes fit");
        }
        let sees = |i: usize, j: usize| {
            brute(band, i, j, q_len, kv_len)
                && (!use_blocks || bits[(i / block_q) * bk + j / block_kv] != 0)
                && (!use_keep || keep_bits[(if keep_rows { i } else { 0 }) * kv_len + j] != 0)
        };
        let (r0, r1) = (t.0.min(t.1).min(q_len), t.0.max(t.1).min(q_len));
        let (k0, k1) = (t.2.min(t.3).min(kv_len), t.2.max(t.3).min(kv_len));
        for i in r0..r1 {
            for j in k0..k1 {
                prop_assert_eq!(mask.sees(i, j), sees(i, j));
            }
        }
        let want = class_of((r0..r1).flat_map(|i| (k0..k1).map(move |j| (i, j))).map(|(i, j)| sees(i, j)));
        let got = mask.tile(r0..r1, k0..k1);
        if use_keep {
            // A boolean map is not read to classify: its tiles are skipped or partial.
            prop_assert_ne!(got, TileClass::Full);
            prop_assert!(got == TileClass::Partial || want == TileClass::Skip);
        } else {
            prop_assert_eq!(got, want);
        }
    }
}

#[test]
fn keep_rejects_shapes_that_do_not_cover() {
    let data = [1u8; 12];
    let view = |shape: &[usize]| View::contiguous("mask", &data, shape).expect("12 elements");
    let mask = || Mask::new(Band::OPEN, 3, 4);
    assert!(mask().with_keep(view(&[3, 4])).is_ok());
    assert!(mask().with_keep(view(&[4, 3])).is_err());
    assert!(mask().with_keep(view(&[12])).is_err());
    assert!(mask().with_keep(view(&[1, 12])).is_ok());
}

#[test]
fn block_mask_rejects_zero_blocks() {
    let data = [1u8; 4];
    let view = View::contiguous("block_mask", &data, &[2, 2]).expect("fits");
    assert!(BlockMask::new(0, 1, view.clone()).is_err());
    assert!(BlockMask::new(1, 0, view.clone()).is_err());
    let map = BlockMask::new(2, 2, view).expect("valid");
    assert!(map.keeps(3, 3) && !map.keeps(4, 0));
}
