//! A language model of one layer, and the step that trains it.
//!
//! The invariant: the gradients are those of the mean cross-entropy of the next token, by the chain rule through every weight;
//! a step with the same weights, tokens and dropout stream gives the same loss.

use attn_reference::random::Random;

use super::TrainError;
use super::attention::Attention;
use super::layer::{Kept, Layer, Weights, back, project};

/// The weights of the model, or their gradients.
#[derive(Debug, Clone)]
pub(super) struct Parameters {
    /// `[vocabulary, width]`.
    pub(super) embedding: Vec<f32>,
    pub(super) layer: Weights,
    /// `[width, vocabulary]`.
    pub(super) head: Vec<f32>,
}

impl Parameters {
    pub(super) fn random(layer: &Layer, vocabulary: usize, random: &mut Random) -> Self {
        let width = layer.shape.width();
        let scale = (width as f32).sqrt().recip();
        let embedding = (0..vocabulary * width).map(|_| random.normal()).collect();
        let head = (0..width * vocabulary).map(|_| random.normal() * scale).collect();
        let layer = Weights::random(&layer.shape, layer.hidden, random);
        Self { embedding, layer, head }
    }

    pub(super) fn zeros(&self) -> Self {
        let zeros = |values: &[f32]| vec![0.0; values.len()];
        let layer = self.layer.zeros();
        Self { embedding: zeros(&self.embedding), layer, head: zeros(&self.head) }
    }

    /// Every tensor by name.
    pub(super) fn all_mut(&mut self) -> Vec<(&'static str, &mut Vec<f32>)> {
        let mut all = vec![("embedding", &mut self.embedding), ("head", &mut self.head)];
        all.extend(self.layer.all_mut());
        all
    }
}

/// Tokens of all sequences, one after the other, and the token that follows each.
#[derive(Debug, Clone)]
pub(super) struct Batch {
    pub(super) tokens: Vec<usize>,
    pub(super) next: Vec<usize>,
}

impl Batch {
    /// Sequences in which a token is the sum of the two before it: what a layer without attention cannot learn.
    pub(super) fn sums(lengths: &[usize], vocabulary: usize, random: &mut Random) -> Self {
        let (mut tokens, mut next) = (Vec::new(), Vec::new());
        for &len in lengths {
            let (mut a, mut b) = (random.below(vocabulary), random.below(vocabulary));
            for _ in 0..len {
                tokens.push(a);
                next.push(b);
                (a, b) = (b, (a + b) % vocabulary);
            }
        }
        Self { tokens, next }
    }
}

/// Loss and gradients of a batch.
pub(super) fn step(
    layer: &Layer,
    parameters: &Parameters,
    attention: &mut dyn Attention,
    stream: &[u64; 2],
    batch: &Batch,
) -> Result<(f64, Parameters), TrainError> {
    let (rows, width) = (layer.shape.tokens(), layer.shape.width());
    let mut x = Vec::with_capacity(rows * width);
    for &token in &batch.tokens {
        x.extend_from_slice(&parameters.embedding[token * width..][..width]);
    }
    let mut kept = Kept::default();
    let y = layer.forward(&parameters.layer, attention, stream, &x, &mut kept)?;
    let mut logits = project(&y, &parameters.head, rows);
    let loss = cross_entropy(&mut logits, &batch.next);
    let mut gradients = parameters.zeros();
    let dy = back(&y, &logits, &parameters.head, rows, &mut gradients.head);
    let of_layer = &mut gradients.layer;
    let dx = layer.backward(&parameters.layer, attention, stream, (&x, &dy), &kept, of_layer)?;
    for (&token, dx) in batch.tokens.iter().zip(dx.chunks_exact(width)) {
        let to = &mut gradients.embedding[token * width..][..width];
        for (to, from) in to.iter_mut().zip(dx) {
            *to += from;
        }
    }
    Ok((loss, gradients))
}

/// The mean loss; the logits become their gradients.
fn cross_entropy(logits: &mut [f32], next: &[usize]) -> f64 {
    let vocabulary = logits.len() / next.len().max(1);
    let share = 1.0 / next.len().max(1) as f32;
    let mut loss = 0.0;
    for (row, &next) in logits.chunks_exact_mut(vocabulary.max(1)).zip(next) {
        let max = row.iter().fold(f32::NEG_INFINITY, |max, &x| max.max(x));
        let sum: f32 = row.iter().map(|x| (x - max).exp()).sum();
        loss += f64::from(max + sum.ln() - row[next]);
        for x in row.iter_mut() {
            *x = (*x - max).exp() / sum * share;
        }
        row[next] -= share;
    }
    loss / next.len().max(1) as f64
}
