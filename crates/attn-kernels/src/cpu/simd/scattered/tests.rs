//! Scattered rows against plain loops in f64, at every level and for every shape of tail.

use attn_core::{Element, F8E4M3};
use half::{bf16, f16};

use super::*;
use crate::cpu::simd::Level;

const HEADS: usize = 3;

/// Values that every element type holds exactly, NaN in the last eighth.
fn storage<E: Element>(len: usize) -> Vec<E> {
    let value = |i: usize| f32::from(u8::try_from(i * 7 % 13).expect("small")) / 4.0 - 1.5;
    let gap = len / 8;
    (0..len).map(|i| E::from_f32(if i < len - gap { value(i) } else { f32::NAN })).collect()
}

fn levels() -> impl Iterator<Item = Simd> {
    Level::ALL.into_iter().filter_map(Simd::with_level)
}

/// A tile whose tokens lie backwards in storage, with a hole after each.
struct Rows<E> {
    data: Vec<E>,
    starts: RowStarts,
    dim: usize,
}

impl<E: Widen> Rows<E> {
    fn new(tokens: usize, dim: usize) -> Self {
        let token = HEADS * dim + 5;
        let mut starts = RowStarts::NONE;
        for i in (0..tokens).rev() {
            starts.push(i * token).expect("a tile's worth");
        }
        let len = tokens * token;
        Self { data: storage(len + len / 7 + 8), starts, dim }
    }

    fn pass(&self, heads: Range<usize>, head_major: bool) -> Pass<'_, E> {
        #[expect(clippy::cast_possible_wrap, reason = "small")]
        let tile = Scattered {
            data: &self.data,
            starts: &self.starts,
            head_step: self.dim as isize,
            dim: self.dim,
            head_major,
        };
        Pass { tile, all_heads: HEADS, heads, ahead: Some(tile) }
    }

    fn get(&self, token: usize, head: usize, d: usize) -> f64 {
        let at = self.starts.as_slice()[token] + head * self.dim + d;
        f64::from(self.data[at].to_f32())
    }
}

fn check_scores<E: Widen>(simd: Simd, rows: usize, keys: usize, dim: usize) {
    let stored = Rows::<E>::new(keys, dim);
    let queries: Vec<f32> = storage(HEADS * rows * dim * 2);
    let packed_len = packed_len(rows, dim);
    let mut packed = vec![0.0; HEADS * packed_len];
    for (head, packed) in packed.chunks_mut(packed_len).enumerate() {
        for row in 0..rows {
            let at = (head * rows + row) * dim;
            simd.pack_query(row, &queries[at..at + dim], packed);
        }
    }
    let width = keys.next_multiple_of(LANE_GROUP);
    for (heads, head_major) in [(0..HEADS, false), (0..HEADS, true), (1..2, false)] {
        let mut out = vec![7.0f32; HEADS * rows * width];
        let mut block = vec![f32::NAN; widened_len(dim)];
        let pass = stored.pass(heads.clone(), head_major);
        simd.score_rows(&packed, rows, &pass, &mut block, &mut out, width);
        for (i, &got) in out.iter().enumerate() {
            let (head, row, key) = (i / width / rows, i / width % rows, i % width);
            if !heads.contains(&head) {
                assert_eq!(got, 7.0, "another head's score was written");
                continue;
            }
            if key >= keys {
                assert_eq!(got, f32::NEG_INFINITY);
                continue;
            }
            let at = (head * rows + row) * dim;
            let want: f64 =
                (0..dim).map(|d| f64::from(queries[at + d]) * stored.get(key, head, d)).sum();
            let context = format!("{:?} {rows} rows {keys} keys {dim}", simd.level());
            assert!((f64::from(got) - want).abs() < 1e-4, "{context}: {got} for {want}");
        }
    }
}

fn check_values<E: Widen>(simd: Simd, rows: usize, keys: usize, dim: usize) {
    let stored = Rows::<E>::new(keys, dim);
    let width = keys.next_multiple_of(LANE_GROUP);
    let weights: Vec<f32> = storage(HEADS * rows * width * 2)[..HEADS * rows * width].to_vec();
    let before: Vec<f32> = storage(HEADS * rows * dim * 2)[..HEADS * rows * dim].to_vec();
    for (heads, head_major) in [(0..HEADS, false), (0..HEADS, true), (1..2, false)] {
        let mut out = before.clone();
        simd.weigh_rows(&weights, width, &stored.pass(heads.clone(), head_major), rows, &mut out);
        for (i, &got) in out.iter().enumerate() {
            let (head, row, d) = (i / dim / rows, i / dim % rows, i % dim);
            let weight = |key: usize| f64::from(weights[(head * rows + row) * width + key]);
            let sum: f64 = (0..keys).map(|key| weight(key) * stored.get(key, head, d)).sum();
            let want = f64::from(before[i]) + if heads.contains(&head) { sum } else { 0.0 };
            let context = format!("{:?} {rows} rows {keys} keys {dim}", simd.level());
            assert!((f64::from(got) - want).abs() < 1e-3, "{context}: {got} for {want}");
        }
    }
}

#[test]
fn passes_match_plain_loops_for_every_shape() {
    for simd in levels() {
        for rows in [1, 2, 3, 4, 5, 9] {
            for keys in [1, 2, 4, 7, 16, 33, 64] {
                for dim in [1, 3, 8, 13, 16, 24, 40, 64, 72, 100] {
                    check_scores::<f32>(simd, rows, keys, dim);
                    check_values::<f32>(simd, rows, keys, dim);
                }
            }
        }
    }
}

#[test]
fn passes_read_every_stored_type() {
    for simd in levels() {
        for dim in [5, 16, 40] {
            check_scores::<f16>(simd, 4, 9, dim);
            check_values::<f16>(simd, 4, 9, dim);
            check_scores::<bf16>(simd, 4, 9, dim);
            check_values::<bf16>(simd, 4, 9, dim);
            check_scores::<F8E4M3>(simd, 4, 9, dim);
            check_values::<F8E4M3>(simd, 4, 9, dim);
        }
    }
}

#[test]
fn softmax_of_rows_carries_its_state_from_tile_to_tile() {
    let (width, dim, c) = (32, 5, 0.7f32);
    for simd in levels() {
        let mut tiles: [Vec<f32>; 2] =
            [vec![f32::NEG_INFINITY; width], vec![f32::NEG_INFINITY; width]];
        // The largest score comes in the second tile; the rest of both is hidden.
        tiles[0][3] = 2.0;
        tiles[0][30] = -1.0;
        tiles[1][0] = 60.0;
        tiles[1][1] = 58.0;
        let (mut max, mut sum) = ([f32::NEG_INFINITY], [0.0f32]);
        let mut o = [1.0f32; 5];
        for tile in &mut tiles {
            let state = RowState { max: &mut max, sum: &mut sum, o: &mut o[..dim] };
            simd.softmax_rows(tile, width, c, state);
        }
        let lse = f64::from(max[0]) + f64::from(sum[0]).log2();
        let want =
            [2.0f64, -1.0, 60.0, 58.0].map(|s| (s * f64::from(c)).exp2()).iter().sum::<f64>();
        assert!((lse - want.log2()).abs() < 1e-5, "{lse}");
        assert!((f64::from(tiles[1][1]) - (-2.0 * f64::from(c)).exp2()).abs() < 1e-6);
        assert_eq!(tiles[1][5], 0.0);
        // Nothing came before the first tile; the second one outweighs it by 2^-40.
        assert!(o.iter().all(|&x| x.abs() < 1e-12));
    }
}

#[test]
fn softmax_of_a_hidden_row_stays_empty() {
    for simd in levels() {
        let mut tile = [f32::NEG_INFINITY; 16];
        let (mut max, mut sum, mut o) = ([f32::NEG_INFINITY], [0.0f32], [0.0f32; 2]);
        let state = RowState { max: &mut max, sum: &mut sum, o: &mut o };
        simd.softmax_rows(&mut tile, 16, 1.0, state);
        assert_eq!((max[0], sum[0], tile), (f32::NEG_INFINITY, 0.0, [0.0; 16]));
    }
}
