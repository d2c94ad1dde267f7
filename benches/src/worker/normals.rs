//! Random normal elements by the gigabyte.
//!
//! The invariant: every buffer holds standard normal values rounded to bf16, which is what the power draw and
//! thereby the clock of the device depend on; zeros or a small repeated pattern would be faster than any real
//! data. One block of 32 Mi elements is drawn, and buffers are filled from it at different offsets, because drawing
//! tens of gigabytes on the host would take longer than measuring.

use attn_core::{Element, F8E4M3};
use attn_reference::random::Random;
use half::bf16;
use rayon::prelude::*;

/// Elements drawn.
const LEN: usize = 1 << 25;

/// Elements drawn by one generator.
const CHUNK: usize = 1 << 16;

/// A block of normal elements, and where the next buffer starts in it.
#[derive(Debug)]
pub(crate) struct Normals {
    block: Vec<bf16>,
    next: usize,
}

impl Normals {
    pub(crate) fn new() -> Self {
        let mut block = vec![bf16::ZERO; LEN];
        block.par_chunks_mut(CHUNK).enumerate().for_each(|(n, chunk)| {
            let mut random = Random::new(0x5EED ^ ((n as u64) << 32));
            chunk.fill_with(|| bf16::from_f32(random.normal()));
        });
        Self { block, next: 0 }
    }

    /// The pieces that fill a buffer of `len` elements, in order.
    ///
    /// The start moves by an odd number, so that equal shapes get different data and no period of the block falls
    /// on a row.
    pub(crate) fn pieces(&mut self, len: usize) -> impl Iterator<Item = &[bf16]> {
        let start = self.next;
        self.next = (self.next + 7_368_787) % LEN;
        let first = len.min(LEN - start);
        let whole = (len - first) / LEN;
        let rest = (len - first) % LEN;
        std::iter::once(&self.block[start..start + first])
            .chain(std::iter::repeat_n(&self.block[..], whole))
            .chain(std::iter::once(&self.block[..rest]))
            .filter(|piece| !piece.is_empty())
    }
}

/// A piece rounded to fp8, whose range no standard normal value leaves.
pub(crate) fn in_e4m3(piece: &[bf16]) -> Vec<F8E4M3> {
    piece.par_iter().map(|x| F8E4M3::from_f32(x.to_f32())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fp8_pieces_are_the_same_values_rounded() {
        let mut normals = Normals::new();
        let piece = normals.pieces(100_000).next().unwrap().to_vec();
        for (x, y) in piece.iter().zip(in_e4m3(&piece)) {
            assert!((y.to_f32() - x.to_f32()).abs() <= x.to_f32().abs() / 16.0 + 2f32.powi(-10));
        }
    }

    #[test]
    fn pieces_fill_any_length_with_normals() {
        let mut normals = Normals::new();
        for len in [0, 1, 1000, LEN - 1, LEN, 2 * LEN + 17] {
            assert_eq!(normals.pieces(len).map(<[bf16]>::len).sum::<usize>(), len);
        }
        let some: Vec<f64> =
            normals.pieces(200_000).flatten().map(|x| f64::from(x.to_f32())).collect();
        let mean = some.iter().sum::<f64>() / 2e5;
        let variance = some.iter().map(|x| x * x).sum::<f64>() / 2e5;
        assert!(mean.abs() < 0.01 && (variance - 1.0).abs() < 0.02, "{mean} {variance}");
    }
}
