//! The decoder: embedding, layers of attention and gated feed-forward, output head.
//!
//! Invariant: a forward pass reads the weights and writes the scratch, and that is all it does. It
//! keeps no sequence state: which tokens belong together, and what came before them, is known to
//! the [`Attention`] alone. Tokens of several sequences therefore go through in one packed batch,
//! and every weight is read once for all of them.
//!
//! Queries, keys and values come from one stacked projection, and so do gate and up: four
//! projections a layer instead of seven, because starting one on every thread costs about as much
//! as a small one takes.
//!
//! Source: Touvron et al., "`LLaMA`: Open and Efficient Foundation Language Models", section 2.2,
//! arXiv:2302.13971; Shazeer, "GLU Variants Improve Transformer", equation 6, arXiv:2002.05202.

use std::mem;

use rayon::prelude::*;

use super::Attention;
use super::config::Config;
use super::error::{ForwardError, ModelError};
use super::gguf::Tensors;
use super::matmul::{Matrix, ProjectionAccount};
use super::norm::rms_norm;
use super::rope::{Rope, Turns, half_split_rows};

/// The weights of a model.
#[derive(Debug)]
pub(crate) struct Llama {
    config: Config,
    rope: Rope,
    /// `[vocab, width]`.
    embedding: Matrix,
    blocks: Vec<Block>,
    output_norm: Vec<f32>,
    /// `None` when the output head is tied to the embedding.
    output: Option<Matrix>,
}

/// The weights of a layer.
#[derive(Debug)]
struct Block {
    attn_norm: Vec<f32>,
    /// Queries, keys and values stacked; query and key rows in half-split order.
    qkv: Matrix,
    attn_output: Matrix,
    ffn_norm: Vec<f32>,
    /// Gate and up stacked.
    gate_up: Matrix,
    down: Matrix,
}

/// The activations of a forward pass, kept from one to the next so that steady decoding allocates
/// nothing.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    turns: Turns,
    /// The residual stream, `[tokens, width]`.
    x: Vec<f32>,
    /// Normalised, `[tokens, width]`.
    normed: Vec<f32>,
    /// `[tokens, width + 2 * kv_width]`.
    qkv: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    /// The attention's output, `[tokens, width]`.
    o: Vec<f32>,
    /// `[tokens, 2 * hidden]`.
    gate_up: Vec<f32>,
    /// `[tokens, hidden]`.
    activated: Vec<f32>,
    /// What a sublayer adds to the residual stream, `[tokens, width]`.
    delta: Vec<f32>,
    /// `[rows_wanted, vocab]`.
    logits: Vec<f32>,
    account: ProjectionAccount,
}

impl Llama {
    /// Reads the weights of a model of this configuration.
    ///
    /// # Errors
    /// [`ModelError::MissingTensor`], [`ModelError::Shape`], [`ModelError::Tensor`].
    pub(crate) fn from_tensors(config: Config, tensors: &mut Tensors) -> Result<Self, ModelError> {
        let Config { width, vocab, .. } = config;
        let matrix = |name, tensors: &mut Tensors| {
            Ok(Matrix::new(vocab, width, tensors.take(name, &[vocab, width])?))
        };
        let embedding = matrix("token_embd.weight", tensors)?;
        let output = match "output.weight" {
            name if tensors.contains(name) => Some(matrix(name, tensors)?),
            _ => None,
        };
        let block = |layer| Block::from_tensors(&config, layer, tensors);
        let blocks = (0..config.layers).map(block).collect::<Result<_, _>>()?;
        let output_norm = tensors.take("output_norm.weight", &[width])?;
        let rope = Rope::new(config.head_dim, config.rope_theta);
        Ok(Self { config, rope, embedding, blocks, output_norm, output })
    }

    /// The sizes of the model.
    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// Runs new tokens of one or several sequences through the model.
    ///
    /// Shapes: `tokens` and `positions` are packed, one entry a token, a sequence's tokens in
    /// ascending order of position; the result is `[rows_wanted, vocab]`, in the order of
    /// `rows_wanted`, which are places in `tokens`. No tokens give no logits, and then `attention`
    /// is not called.
    ///
    /// # Errors
    /// [`ForwardError::Positions`], [`ForwardError::Token`], [`ForwardError::Position`] and
    /// [`ForwardError::Row`] before anything ran; [`ForwardError::Attention`] at the first layer
    /// that fails, when earlier layers have been attended: taking that back is for the implementor,
    /// who owns the cache.
    pub(crate) fn forward<'s, A: Attention>(
        &self,
        tokens: &[u32],
        positions: &[u32],
        rows_wanted: &[usize],
        attention: &mut A,
        scratch: &'s mut Scratch,
    ) -> Result<&'s [f32], ForwardError<A::Error>> {
        self.check(tokens, positions, rows_wanted)?;
        let Config { width, norm_eps: eps, .. } = self.config;
        scratch.resize(&self.config, tokens.len(), rows_wanted.len());
        if tokens.is_empty() {
            return Ok(&scratch.logits);
        }
        self.rope.turns(positions, &mut scratch.turns);
        for (x, &token) in scratch.x.chunks_exact_mut(width).zip(tokens) {
            x.copy_from_slice(self.embedding.row(token as usize));
        }

        let account = &mut scratch.account;
        for (layer, block) in self.blocks.iter().enumerate() {
            rms_norm(&scratch.x, &block.attn_norm, eps, &mut scratch.normed);
            account.project(&block.qkv, &scratch.normed, &mut scratch.qkv);
            let (q, k, v) = (&mut scratch.q, &mut scratch.k, &mut scratch.v);
            split_and_turn(&scratch.turns, &self.config, &scratch.qkv, q, k, v);
            attention
                .attend(layer, q, k, v, &mut scratch.o)
                .map_err(|source| ForwardError::Attention { layer, source })?;
            account.project(&block.attn_output, &scratch.o, &mut scratch.delta);
            add(&mut scratch.x, &scratch.delta);

            rms_norm(&scratch.x, &block.ffn_norm, eps, &mut scratch.normed);
            account.project(&block.gate_up, &scratch.normed, &mut scratch.gate_up);
            swiglu(&scratch.gate_up, self.config.hidden, &mut scratch.activated);
            account.project(&block.down, &scratch.activated, &mut scratch.delta);
            add(&mut scratch.x, &scratch.delta);
        }

        // Only the wanted rows meet the output head, which is a fifth of all weights. They are
        // gathered into `delta` and normalised into `normed`; both are free now, but a row may be
        // wanted more often than there are tokens.
        let wanted = rows_wanted.len() * width;
        scratch.delta.clear();
        for row in rows_wanted {
            scratch.delta.extend_from_slice(&scratch.x[row * width..][..width]);
        }
        scratch.normed.resize(wanted, 0.0);
        rms_norm(&scratch.delta, &self.output_norm, eps, &mut scratch.normed);
        let head = self.output.as_ref().unwrap_or(&self.embedding);
        account.project(head, &scratch.normed, &mut scratch.logits);
        Ok(&scratch.logits)
    }

    fn check<E>(
        &self,
        tokens: &[u32],
        positions: &[u32],
        rows_wanted: &[usize],
    ) -> Result<(), ForwardError<E>> {
        let Config { vocab, context, .. } = self.config;
        let below = |value: u32, limit| usize::try_from(value).is_ok_and(|value| value < limit);
        if tokens.len() != positions.len() {
            let (tokens, positions) = (tokens.len(), positions.len());
            return Err(ForwardError::Positions { tokens, positions });
        }
        for (row, (&token, &position)) in tokens.iter().zip(positions).enumerate() {
            if !below(token, vocab) {
                return Err(ForwardError::Token { row, vocab, got: token });
            }
            if !below(position, context) {
                return Err(ForwardError::Position { row, context, got: position });
            }
        }
        match rows_wanted.iter().find(|&&row| row >= tokens.len()) {
            Some(&got) => Err(ForwardError::Row { tokens: tokens.len(), got }),
            None => Ok(()),
        }
    }
}

impl Block {
    fn from_tensors(
        config: &Config,
        layer: usize,
        tensors: &mut Tensors,
    ) -> Result<Self, ModelError> {
        let &Config { width, head_dim, hidden, .. } = config;
        let kv_width = config.kv_width();
        let mut take = |part: &str, shape: &[usize]| {
            tensors.take(&format!("blk.{layer}.{part}.weight"), shape)
        };
        let q = half_split_rows(&take("attn_q", &[width, width])?, head_dim, width);
        let k = half_split_rows(&take("attn_k", &[kv_width, width])?, head_dim, width);
        let v = take("attn_v", &[kv_width, width])?;
        let (gate, up) = (take("ffn_gate", &[hidden, width])?, take("ffn_up", &[hidden, width])?);
        Ok(Self {
            attn_norm: take("attn_norm", &[width])?,
            qkv: Matrix::new(width + 2 * kv_width, width, [q, k, v].concat()),
            attn_output: Matrix::new(width, width, take("attn_output", &[width, width])?),
            ffn_norm: take("ffn_norm", &[width])?,
            gate_up: Matrix::new(2 * hidden, width, [gate, up].concat()),
            down: Matrix::new(width, hidden, take("ffn_down", &[width, hidden])?),
        })
    }
}

impl Scratch {
    /// What the projections did since the last call of this method.
    pub(crate) fn take_account(&mut self) -> ProjectionAccount {
        mem::take(&mut self.account)
    }

    fn resize(&mut self, config: &Config, tokens: usize, rows_wanted: usize) {
        let &Config { width, hidden, vocab, .. } = config;
        let kv_width = config.kv_width();
        for (buffer, len) in [
            (&mut self.x, tokens * width),
            (&mut self.normed, tokens * width),
            (&mut self.qkv, tokens * (width + 2 * kv_width)),
            (&mut self.q, tokens * width),
            (&mut self.k, tokens * kv_width),
            (&mut self.v, tokens * kv_width),
            (&mut self.o, tokens * width),
            (&mut self.gate_up, tokens * 2 * hidden),
            (&mut self.activated, tokens * hidden),
            (&mut self.delta, tokens * width),
            (&mut self.logits, rows_wanted * vocab),
        ] {
            buffer.resize(len, 0.0);
        }
    }
}

/// The index of the largest value, the lowest where several are equal; `None` of nothing. NaN is
/// never the largest.
pub(crate) fn argmax(values: &[f32]) -> Option<usize> {
    let larger = |best: Option<(usize, f32)>, (i, &value): (usize, &f32)| match best {
        Some((_, most)) if value <= most || value.is_nan() => best,
        None if value.is_nan() => None,
        _ => Some((i, value)),
    };
    values.iter().enumerate().fold(None, larger).map(|(i, _)| i)
}

/// Distributes the rows of the stacked projection, turning queries and keys on the way.
fn split_and_turn(
    turns: &Turns,
    config: &Config,
    qkv: &[f32],
    q: &mut [f32],
    k: &mut [f32],
    v: &mut [f32],
) {
    let (width, kv_width) = (config.width, config.kv_width());
    let rows = qkv.chunks_exact(width + 2 * kv_width);
    let q = q.chunks_exact_mut(width);
    let k = k.chunks_exact_mut(kv_width);
    let v = v.chunks_exact_mut(kv_width);
    for (row, (((qkv, q), k), v)) in rows.zip(q).zip(k).zip(v).enumerate() {
        turns.apply(row, &qkv[..width], q);
        turns.apply(row, &qkv[width..width + kv_width], k);
        v.copy_from_slice(&qkv[width + kv_width..]);
    }
}

/// `gate * sigmoid(gate) * up` for each row of `[gate, up]`.
fn swiglu(gate_up: &[f32], hidden: usize, out: &mut [f32]) {
    // PERF: the exponentials of a 1,000-token prompt are 46 million, a third of a second on one
    // thread.
    let rows = gate_up.par_chunks_exact(2 * hidden).zip(out.par_chunks_exact_mut(hidden));
    rows.for_each(|(row, out)| {
        let (gate, up) = row.split_at(hidden);
        for ((out, &gate), &up) in out.iter_mut().zip(gate).zip(up) {
            *out = gate / (1.0 + (-gate).exp()) * up;
        }
    });
}

fn add(x: &mut [f32], delta: &[f32]) {
    for (x, delta) in x.iter_mut().zip(delta) {
        *x += delta;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn swiglu_matches_formula() {
        let mut out = [f32::NAN; 4];
        swiglu(&[0.0, 2.0, 5.0, 3.0, -100.0, 1.0, 1.0, -1.0], 2, &mut out);
        let silu = |x: f32| x / (1.0 + (-x).exp());
        assert_eq!(out[0], 0.0);
        assert!((out[1] - 3.0 * silu(2.0)).abs() < 1e-6);
        assert!(out[2].abs() < 1e-30, "a very negative gate closes without NaN: {}", out[2]);
        assert!((out[3] + silu(1.0)).abs() < 1e-6);
    }

    #[test]
    fn argmax_takes_the_first_and_passes_over_nan() {
        assert_eq!(argmax(&[]), None);
        assert_eq!(argmax(&[f32::NAN]), None);
        assert_eq!(argmax(&[f32::NAN, -3.0, -1.0, f32::NAN, -1.0]), Some(2));
        assert_eq!(argmax(&[f32::NEG_INFINITY]), Some(0));
    }
}
