//! What a layer asks of its attention: a forward whose gradients can be had later.
//!
//! The invariant: an implementation keeps between the two what it alone needs (an LSE, or a matrix of weights) and says how
//! many bytes that is; queries, keys, values and the output are the layer's. Another engine, a device's among them, is
//! another implementation, and neither layer nor report knows which one runs.

use attn_core::{
    Dropout, Error, Inputs, Pass, Problem, ProblemSpec, TensorView, TensorViewMut, View, ViewMut,
};

use super::TrainError;

/// The causal self-attention of a layer, in f32, over packed sequences.
///
/// Shapes: q, o `[tokens, heads, dim]`, k, v `[tokens, kv_heads, dim]`.
#[derive(Debug, Clone)]
pub(super) struct Shape {
    /// Tokens of each sequence.
    pub(super) lengths: Vec<usize>,
    /// Query heads.
    pub(super) heads: usize,
    /// Key/value heads.
    pub(super) kv_heads: usize,
    /// Elements of a head's row.
    pub(super) dim: usize,
    /// Probability that a weight is dropped.
    pub(super) dropout: f32,
}

impl Shape {
    /// Tokens of all sequences.
    pub(super) fn tokens(&self) -> usize {
        self.lengths.iter().sum()
    }

    /// Elements of a token's queries.
    pub(super) const fn width(&self) -> usize {
        self.heads * self.dim
    }

    /// Elements of a token's keys, and of its values.
    pub(super) const fn kv_width(&self) -> usize {
        self.kv_heads * self.dim
    }

    /// ALiBi slopes of the heads, which tell the layer where a token is.
    ///
    /// Source: Press et al., "Train short, test long", arXiv:2108.12409: `2^(-8 i / heads)`.
    #[expect(clippy::cast_possible_truncation, reason = "the rounding to f32 is meant")]
    pub(super) fn slopes(&self) -> Vec<f32> {
        let heads = self.heads as f64;
        (1..=self.heads).map(|i| (-8.0 * i as f64 / heads).exp2() as f32).collect()
    }

    /// The call as a problem.
    pub(super) fn problem(&self, pass: Pass) -> Result<Problem, Error> {
        let element = attn_core::DType::F32;
        let (l, dim) = (&self.lengths, self.dim);
        let mut spec = ProblemSpec::new(element, self.heads, self.kv_heads, dim, l, l);
        (spec.pass, spec.causal, spec.alibi) = (pass, true, true);
        spec.dropout = Some(Dropout { p: self.dropout });
        Problem::new(spec)
    }
}

/// The data of one call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Data<'a> {
    pub(super) q: &'a [f32],
    pub(super) k: &'a [f32],
    pub(super) v: &'a [f32],
    /// ALiBi slopes of the heads.
    pub(super) slopes: &'a [f32],
    /// Seed and offset of the dropout.
    pub(super) stream: &'a [u64; 2],
}

impl<'a> Data<'a> {
    /// The same as an engine takes it.
    pub(super) fn inputs(&self, problem: &Problem) -> Result<Inputs<'a>, Error> {
        let (heads, kv_heads) = (problem.q_heads(), problem.kv_heads());
        let mut inputs = Inputs::dense(
            rows("q", self.q, heads, problem)?,
            rows("k", self.k, kv_heads, problem)?,
            rows("v", self.v, kv_heads, problem)?,
        );
        inputs.alibi = Some(View::contiguous("alibi", self.slopes, &[heads])?);
        if problem.dropout().is_some() {
            inputs.dropout = Some(View::contiguous("dropout", self.stream, &[2])?);
        }
        Ok(inputs)
    }
}

/// Where the gradients of a call go.
#[derive(Debug)]
pub(super) struct DataGradients<'a> {
    pub(super) dq: &'a mut [f32],
    pub(super) dk: &'a mut [f32],
    pub(super) dv: &'a mut [f32],
}

/// Bytes that an attention held at once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Memory {
    /// Kept from the forward to the backward.
    pub(super) kept: u64,
    /// Scratch of the larger of the two.
    pub(super) scratch: u64,
}

/// A way to compute a layer's attention and its gradients.
pub(super) trait Attention {
    /// What the report calls it.
    fn name(&self) -> &'static str;

    /// Computes the output, and keeps what the gradients need.
    fn forward(&mut self, data: &Data<'_>, o: &mut [f32]) -> Result<(), TrainError>;

    /// Computes the gradients of the last forward, whose data and output are given again.
    fn backward(
        &mut self,
        data: &Data<'_>,
        o: &[f32],
        d_o: &[f32],
        gradients: DataGradients<'_>,
    ) -> Result<(), TrainError>;

    /// What it holds for a call, once both passes have run.
    fn memory(&self) -> Memory;
}

/// Rows of a packed tensor of some heads.
pub(super) fn rows<'a>(
    field: &'static str,
    values: &'a [f32],
    heads: usize,
    problem: &Problem,
) -> Result<TensorView<'a>, Error> {
    let shape = [problem.lengths().total_q(), heads, problem.head_dim()];
    Ok(TensorView::F32(View::contiguous(field, values, &shape)?))
}

/// The same of a tensor that is written.
pub(super) fn rows_mut<'a>(
    field: &'static str,
    values: &'a mut [f32],
    heads: usize,
    problem: &Problem,
) -> Result<TensorViewMut<'a>, Error> {
    let shape = [problem.lengths().total_q(), heads, problem.head_dim()];
    Ok(TensorViewMut::F32(ViewMut::contiguous(field, values, &shape)?))
}
