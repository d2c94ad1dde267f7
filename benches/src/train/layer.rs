//! One transformer layer, forward and backward by hand: a norm, causal attention, a norm, a feed-forward net.
//!
//! The invariant: everything but the attention is the same code whatever computes the attention, so that two layers differ by
//! their attention alone, in their gradients as in their time.
//!
//! `a = x + Wo attention(Wq n1, Wk n1, Wv n1)` with `n1 = norm(x)`; `y = a + Wd silu(Wu n2)` with `n2 = norm(a)`; a norm is
//! `g x / rms(x)`.

use attn_reference::random::Random;

use super::TrainError;
use super::attention::{Attention, Data, DataGradients, Shape};
use crate::model::matmul::{Factor, multiply};

/// Added to the mean square of a norm.
const EPSILON: f32 = 1e-5;

/// The weights of a layer, or their gradients. Matrices are `[inputs, outputs]`.
#[derive(Debug, Clone)]
pub(super) struct Weights {
    pub(super) norm1: Vec<f32>,
    pub(super) q: Vec<f32>,
    pub(super) k: Vec<f32>,
    pub(super) v: Vec<f32>,
    pub(super) out: Vec<f32>,
    pub(super) norm2: Vec<f32>,
    pub(super) up: Vec<f32>,
    pub(super) down: Vec<f32>,
}

impl Weights {
    /// Normal weights whose products keep the scale of what they multiply.
    pub(super) fn random(shape: &Shape, hidden: usize, random: &mut Random) -> Self {
        let (width, kv_width) = (shape.width(), shape.kv_width());
        let mut matrix = |inputs: usize, outputs: usize| -> Vec<f32> {
            let scale = (inputs as f32).sqrt().recip();
            (0..inputs * outputs).map(|_| random.normal() * scale).collect()
        };
        Self {
            norm1: vec![1.0; width],
            q: matrix(width, width),
            k: matrix(width, kv_width),
            v: matrix(width, kv_width),
            out: matrix(width, width),
            norm2: vec![1.0; width],
            up: matrix(width, hidden),
            down: matrix(hidden, width),
        }
    }

    /// As many zeros.
    pub(super) fn zeros(&self) -> Self {
        let mut zeros = self.clone();
        zeros.all_mut().into_iter().for_each(|(_, values)| values.fill(0.0));
        zeros
    }

    /// Every tensor by name.
    pub(super) fn all_mut(&mut self) -> [(&'static str, &mut Vec<f32>); 8] {
        [
            ("norm1", &mut self.norm1),
            ("q", &mut self.q),
            ("k", &mut self.k),
            ("v", &mut self.v),
            ("out", &mut self.out),
            ("norm2", &mut self.norm2),
            ("up", &mut self.up),
            ("down", &mut self.down),
        ]
    }
}

/// What a layer's forward leaves for its backward, the attention's own state aside.
#[derive(Debug, Default)]
pub(super) struct Kept {
    n1: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    o: Vec<f32>,
    a: Vec<f32>,
    n2: Vec<f32>,
    u: Vec<f32>,
}

impl Kept {
    /// Bytes of all of it, and of the layer's input.
    pub(super) fn bytes(&self, x: &[f32]) -> u64 {
        let Self { n1, q, k, v, o, a, n2, u } = self;
        [n1, q, k, v, o, a, n2, u].iter().map(|x| size_of_val(x.as_slice()) as u64).sum::<u64>()
            + size_of_val(x) as u64
    }
}

/// A layer's shape and constants.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) shape: Shape,
    /// Width of the feed-forward net.
    pub(super) hidden: usize,
    slopes: Vec<f32>,
}

impl Layer {
    pub(super) fn new(shape: Shape, hidden: usize) -> Self {
        Self { slopes: shape.slopes(), shape, hidden }
    }

    /// Computes y of `x` `[tokens, width]`.
    pub(super) fn forward(
        &self,
        weights: &Weights,
        attention: &mut dyn Attention,
        stream: &[u64; 2],
        x: &[f32],
        kept: &mut Kept,
    ) -> Result<Vec<f32>, TrainError> {
        let (tokens, width) = (self.shape.tokens(), self.shape.width());
        kept.n1 = norm(x, &weights.norm1);
        kept.q = project(&kept.n1, &weights.q, tokens);
        kept.k = project(&kept.n1, &weights.k, tokens);
        kept.v = project(&kept.n1, &weights.v, tokens);
        kept.o.resize(tokens * width, 0.0);
        let Kept { q, k, v, o, .. } = &mut *kept;
        attention.forward(&Data { q, k, v, slopes: &self.slopes, stream }, o)?;
        kept.a = project(&kept.o, &weights.out, tokens);
        add(&mut kept.a, x);
        kept.n2 = norm(&kept.a, &weights.norm2);
        kept.u = project(&kept.n2, &weights.up, tokens);
        let active: Vec<f32> = kept.u.iter().map(|&u| u * sigmoid(u)).collect();
        let mut y = project(&active, &weights.down, tokens);
        add(&mut y, &kept.a);
        Ok(y)
    }

    /// Computes the gradient of x from that of y, and adds those of the weights to `gradients`.
    pub(super) fn backward(
        &self,
        weights: &Weights,
        attention: &mut dyn Attention,
        stream: &[u64; 2],
        (x, dy): (&[f32], &[f32]),
        kept: &Kept,
        gradients: &mut Weights,
    ) -> Result<Vec<f32>, TrainError> {
        let (tokens, width, kv_width) =
            (self.shape.tokens(), self.shape.width(), self.shape.kv_width());
        let active: Vec<f32> = kept.u.iter().map(|&u| u * sigmoid(u)).collect();
        let mut du = back(&active, dy, &weights.down, tokens, &mut gradients.down);
        for (du, &u) in du.iter_mut().zip(&kept.u) {
            let s = sigmoid(u);
            *du *= s * (1.0 + u * (1.0 - s));
        }
        let dn2 = back(&kept.n2, &du, &weights.up, tokens, &mut gradients.up);
        let mut da = norm_back(&kept.a, &weights.norm2, &dn2, &mut gradients.norm2);
        add(&mut da, dy);
        let d_o = back(&kept.o, &da, &weights.out, tokens, &mut gradients.out);
        let mut dq = vec![0.0; tokens * width];
        let (mut dk, mut dv) = (vec![0.0; tokens * kv_width], vec![0.0; tokens * kv_width]);
        let Kept { q, k, v, o, .. } = kept;
        let to = DataGradients { dq: &mut dq, dk: &mut dk, dv: &mut dv };
        attention.backward(&Data { q, k, v, slopes: &self.slopes, stream }, o, &d_o, to)?;
        let mut dn1 = back(&kept.n1, &dq, &weights.q, tokens, &mut gradients.q);
        add(&mut dn1, &back(&kept.n1, &dk, &weights.k, tokens, &mut gradients.k));
        add(&mut dn1, &back(&kept.n1, &dv, &weights.v, tokens, &mut gradients.v));
        let mut dx = norm_back(x, &weights.norm1, &dn1, &mut gradients.norm1);
        add(&mut dx, &da);
        Ok(dx)
    }
}

/// `x W` for rows of x.
pub(super) fn project(x: &[f32], w: &[f32], rows: usize) -> Vec<f32> {
    let inputs = x.len() / rows.max(1);
    let outputs = w.len() / inputs.max(1);
    let mut y = vec![0.0; rows * outputs];
    multiply(
        Factor::rows(x, rows, inputs),
        Factor::rows(w, inputs, outputs),
        &mut y,
        outputs,
        false,
    );
    y
}

/// The gradient of x of `y = x W`; that of W is added to `dw`.
pub(super) fn back(x: &[f32], dy: &[f32], w: &[f32], rows: usize, dw: &mut [f32]) -> Vec<f32> {
    let inputs = x.len() / rows.max(1);
    let outputs = w.len() / inputs.max(1);
    let (x, dy) = (Factor::rows(x, rows, inputs), Factor::rows(dy, rows, outputs));
    multiply(x.transposed(), dy, dw, outputs, true);
    let mut dx = vec![0.0; rows * inputs];
    multiply(dy, Factor::rows(w, inputs, outputs).transposed(), &mut dx, inputs, false);
    dx
}

fn add(to: &mut [f32], from: &[f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += from;
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// `1 / rms` of a row.
fn inverse_rms(x: &[f32]) -> f32 {
    let mean = x.iter().map(|x| x * x).sum::<f32>() / x.len() as f32;
    (mean + EPSILON).sqrt().recip()
}

fn norm(x: &[f32], gain: &[f32]) -> Vec<f32> {
    let mut y = Vec::with_capacity(x.len());
    for x in x.chunks_exact(gain.len()) {
        let inverse = inverse_rms(x);
        y.extend(x.iter().zip(gain).map(|(x, g)| x * inverse * g));
    }
    y
}

fn norm_back(x: &[f32], gain: &[f32], dy: &[f32], dgain: &mut [f32]) -> Vec<f32> {
    let width = gain.len();
    let mut dx = Vec::with_capacity(x.len());
    for (x, dy) in x.chunks_exact(width).zip(dy.chunks_exact(width)) {
        let inverse = inverse_rms(x);
        let mut along = 0.0;
        for (((x, dy), g), dg) in x.iter().zip(dy).zip(gain).zip(&mut *dgain) {
            along += x * dy * g;
            *dg += x * inverse * dy;
        }
        let pull = along * inverse * inverse * inverse / width as f32;
        dx.extend(x.iter().zip(dy).zip(gain).map(|((x, dy), g)| dy * g * inverse - x * pull));
    }
    dx
}
