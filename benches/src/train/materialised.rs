//! Attention by a matrix of scores: what one writes with matrix products and no attention library.
//!
//! The invariant: the weights of every head and pair are written by the forward and read by the backward, as automatic
//! differentiation would have it; products are the same library's as the layer's projections, and rows are shared among
//! the same threads. It computes in f32 on the host, whatever type and place the others have. Dropout is not stored: its mask is a function of the place.

use attn_core::{Band, DType, DropoutMask, Pass, Problem};
use rayon::prelude::*;

use super::TrainError;
use super::attention::{Attention, Data, DataGradients, Memory, Shape};
use crate::model::matmul::{Factor, multiply};

/// A layer's attention with its weights in memory.
#[derive(Debug)]
pub(super) struct Materialised {
    shape: Shape,
    problem: Problem,
    /// Weights `[head][tokens, tokens]` of each sequence, one after the other.
    weights: Vec<f32>,
    /// Weights after dropout of one head of one sequence.
    dropped: Vec<f32>,
    /// Gradients of the weights, then of the scores, of one head of one sequence.
    gradients: Vec<f32>,
}

/// One head of one sequence.
#[derive(Debug, Clone, Copy)]
struct Head {
    sequence: usize,
    head: usize,
    kv_head: usize,
    /// First token of the sequence.
    first: usize,
    tokens: usize,
    /// First weight.
    at: usize,
}

impl Materialised {
    pub(super) fn new(shape: &Shape) -> Result<Self, TrainError> {
        let pairs = shape.lengths.iter().map(|len| len * len * shape.heads).sum();
        let shape = Shape { dtype: DType::F32, ..shape.clone() };
        let longest = shape.lengths.iter().max().map_or(0, |len| len * len);
        Ok(Self {
            problem: shape.problem(Pass::Forward)?,
            shape,
            weights: vec![0.0; pairs],
            dropped: vec![0.0; longest],
            gradients: vec![0.0; longest],
        })
    }

    fn heads(&self) -> Vec<Head> {
        let (mut all, mut first, mut at) = (Vec::new(), 0, 0);
        for (sequence, &tokens) in self.shape.lengths.iter().enumerate() {
            for head in 0..self.shape.heads {
                let kv_head = head / (self.shape.heads / self.shape.kv_heads);
                all.push(Head { sequence, head, kv_head, first, tokens, at });
                at += tokens * tokens;
            }
            first += tokens;
        }
        all
    }

    fn mask(&self, data: &Data<'_>) -> Result<Option<DropoutMask>, TrainError> {
        let data = data.rounded(&self.problem);
        Ok(data.inputs(&self.problem)?.dropout_of(&self.problem))
    }
}

impl Head {
    /// The head's rows `[tokens, dim]` of a tensor whose tokens are `width` apart.
    fn rows<'a>(&self, values: &'a [f32], head: usize, width: usize, dim: usize) -> Factor<'a> {
        let values = &values[self.first * width + head * dim..];
        Factor { values, rows: self.tokens, cols: dim, row_step: width, col_step: 1 }
    }

    fn rows_mut<'a>(
        &self,
        values: &'a mut [f32],
        head: usize,
        width: usize,
        dim: usize,
    ) -> &'a mut [f32] {
        &mut values[self.first * width + head * dim..]
    }

    /// Multiplies weights by what dropout makes of them.
    fn drop(&self, weights: &mut [f32], mask: &DropoutMask) {
        weights.par_chunks_exact_mut(self.tokens).enumerate().for_each(|(row, weights)| {
            for (block, weights) in weights[..=row].chunks_mut(4).enumerate() {
                let words = mask.words(self.sequence, self.head, row, block);
                for (weight, word) in weights.iter_mut().zip(words) {
                    *weight *= if word < mask.threshold() { 0.0 } else { mask.factor() };
                }
            }
        });
    }
}

impl Attention for Materialised {
    fn name(&self) -> &'static str {
        "materialised"
    }

    fn forward(&mut self, data: &Data<'_>, o: &mut [f32]) -> Result<(), TrainError> {
        let mask = self.mask(data)?;
        let (width, kv_width, dim) = (self.shape.width(), self.shape.kv_width(), self.shape.dim);
        let (scale, band) = (self.problem.scale(), self.problem.band());
        for head in self.heads() {
            let tokens = head.tokens;
            let weights = &mut self.weights[head.at..head.at + tokens * tokens];
            let q = head.rows(data.q, head.head, width, dim);
            let k = head.rows(data.k, head.kv_head, kv_width, dim);
            multiply(q, k.transposed(), weights, tokens, false);
            let slope = data.slopes[head.head];
            weights.par_chunks_exact_mut(tokens).enumerate().for_each(|(row, scores)| {
                softmax(scores, row, scale, slope, band);
            });
            let met = match &mask {
                None => &*weights,
                Some(mask) => {
                    let dropped = &mut self.dropped[..tokens * tokens];
                    dropped.copy_from_slice(weights);
                    head.drop(dropped, mask);
                    &*dropped
                }
            };
            let v = head.rows(data.v, head.kv_head, kv_width, dim);
            let o = head.rows_mut(o, head.head, width, dim);
            multiply(Factor::rows(met, tokens, tokens), v, o, width, false);
        }
        Ok(())
    }

    fn backward(
        &mut self,
        data: &Data<'_>,
        o: &[f32],
        d_o: &[f32],
        gradients: DataGradients<'_>,
    ) -> Result<(), TrainError> {
        let mask = self.mask(data)?;
        let (width, kv_width, dim) = (self.shape.width(), self.shape.kv_width(), self.shape.dim);
        let scale = self.problem.scale();
        let DataGradients { dq, dk, dv } = gradients;
        // Heads of a group add to the same keys.
        dk.fill(0.0);
        dv.fill(0.0);
        for head in self.heads() {
            let tokens = head.tokens;
            let weights = &self.weights[head.at..head.at + tokens * tokens];
            let met = match &mask {
                None => weights,
                Some(mask) => {
                    let dropped = &mut self.dropped[..tokens * tokens];
                    dropped.copy_from_slice(weights);
                    head.drop(dropped, mask);
                    &*dropped
                }
            };
            let d_rows = head.rows(d_o, head.head, width, dim);
            let to = head.rows_mut(dv, head.kv_head, kv_width, dim);
            multiply(Factor::rows(met, tokens, tokens).transposed(), d_rows, to, kv_width, true);
            let ds = &mut self.gradients[..tokens * tokens];
            let v = head.rows(data.v, head.kv_head, kv_width, dim);
            multiply(d_rows, v.transposed(), ds, tokens, false);
            if let Some(mask) = &mask {
                head.drop(ds, mask);
            }
            let o_rows = head.rows(o, head.head, width, dim);
            ds.par_chunks_exact_mut(tokens)
                .zip(weights.par_chunks_exact(tokens))
                .enumerate()
                .for_each(|(row, (ds, weights))| {
                    let of = |f: Factor<'_>| f.values[row * width..][..dim].to_vec();
                    let delta: f32 = of(o_rows).iter().zip(of(d_rows)).map(|(a, b)| a * b).sum();
                    for (ds, weight) in ds.iter_mut().zip(weights) {
                        *ds = weight * (*ds - delta) * scale;
                    }
                });
            let ds = Factor::rows(ds, tokens, tokens);
            let (q, k) = (
                head.rows(data.q, head.head, width, dim),
                head.rows(data.k, head.kv_head, kv_width, dim),
            );
            multiply(ds, k, head.rows_mut(dq, head.head, width, dim), width, false);
            let to = head.rows_mut(dk, head.kv_head, kv_width, dim);
            multiply(ds.transposed(), q, to, kv_width, true);
        }
        Ok(())
    }

    fn memory(&self) -> Memory {
        let bytes = |values: &[f32]| size_of_val(values) as u64;
        let scratch = bytes(&self.dropped) + bytes(&self.gradients);
        Memory { kept: bytes(&self.weights), scratch }
    }
}

/// Turns a row of products into weights; keys after the row are 0.
fn softmax(scores: &mut [f32], row: usize, scale: f32, slope: f32, band: Band) {
    let seen = band.row(row, scores.len(), scores.len());
    let (seen, hidden) = scores.split_at_mut(seen.end);
    hidden.fill(0.0);
    let mut max = f32::NEG_INFINITY;
    for (key, score) in seen.iter_mut().enumerate() {
        *score = *score * scale - slope * (row - key) as f32;
        max = max.max(*score);
    }
    let mut sum = 0.0;
    for score in seen.iter_mut() {
        *score = (*score - max).exp();
        sum += *score;
    }
    let inverse = 1.0 / sum;
    for score in seen {
        *score *= inverse;
    }
}
