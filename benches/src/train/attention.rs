//! What a layer asks of its attention: a forward whose gradients can be had later.
//!
//! The invariant: an implementation keeps between the two what it alone needs (an LSE, or a matrix of weights) and says how
//! many bytes that is; queries, keys, values and the output are the layer's, in f32. What computes in another type rounds what
//! it is given. Another engine is another implementation, which the layer does not know from any other.

use attn_core::{
    DType, Dropout, Error, Inputs, Pass, Plan, Problem, ProblemSpec, TensorView, TensorViewMut,
    View, ViewMut,
};
use half::bf16;

use super::TrainError;

/// The causal self-attention of a layer over packed sequences.
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
    /// What queries, keys, values and output are rounded to: f32, which is nothing, or bf16.
    pub(super) dtype: DType,
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
        let (l, dim) = (&self.lengths, self.dim);
        let mut spec = ProblemSpec::new(self.dtype, self.heads, self.kv_heads, dim, l, l);
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
    /// The same in the type of a problem.
    pub(super) fn rounded(&self, problem: &Problem) -> Rounded<'a> {
        let of = |values| Values::new(values, problem);
        Rounded { q: of(self.q), k: of(self.k), v: of(self.v), data: *self }
    }
}

/// The data of one call in the type of its problem.
#[derive(Debug)]
pub(super) struct Rounded<'a> {
    q: Values<'a>,
    k: Values<'a>,
    v: Values<'a>,
    data: Data<'a>,
}

impl Rounded<'_> {
    /// The same as an engine takes it.
    pub(super) fn inputs(&self, problem: &Problem) -> Result<Inputs<'_>, Error> {
        let (heads, kv_heads) = (problem.q_heads(), problem.kv_heads());
        let mut inputs = Inputs::dense(
            self.q.rows("q", heads, problem)?,
            self.k.rows("k", kv_heads, problem)?,
            self.v.rows("v", kv_heads, problem)?,
        );
        inputs.alibi = Some(View::contiguous("alibi", self.data.slopes, &[heads])?);
        if problem.dropout().is_some() {
            inputs.dropout = Some(View::contiguous("dropout", self.data.stream, &[2])?);
        }
        Ok(inputs)
    }
}

/// Rows of a tensor in the type of a problem: the layer's own in f32, a copy in bf16.
#[derive(Debug)]
pub(super) enum Values<'a> {
    F32(&'a [f32]),
    BF16(Vec<bf16>),
}

impl<'a> Values<'a> {
    /// A problem of any third type gets f32, which its own check of the call refuses.
    pub(super) fn new(values: &'a [f32], problem: &Problem) -> Self {
        match problem.q_dtype() {
            DType::BF16 => Self::BF16(narrow(values)),
            _ => Self::F32(values),
        }
    }

    /// The rows of a packed tensor of some heads.
    pub(super) fn rows(
        &self,
        field: &'static str,
        heads: usize,
        problem: &Problem,
    ) -> Result<TensorView<'_>, Error> {
        let shape = rows_shape(heads, problem);
        Ok(match self {
            Self::F32(values) => TensorView::F32(View::contiguous(field, values, &shape)?),
            Self::BF16(values) => TensorView::BF16(View::contiguous(field, values, &shape)?),
        })
    }
}

/// Values rounded to bf16.
pub(super) fn narrow(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|&x| bf16::from_f32(x)).collect()
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

    /// Where it runs, as the report says it.
    fn engine(&self) -> &'static str {
        "cpu"
    }

    /// The plans of its passes, if it has any.
    fn plans(&self) -> Vec<&Plan> {
        Vec::new()
    }

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

/// Rows of a packed tensor of some heads, in f32.
pub(super) fn rows<'a>(
    field: &'static str,
    values: &'a [f32],
    heads: usize,
    problem: &Problem,
) -> Result<TensorView<'a>, Error> {
    let shape = rows_shape(heads, problem);
    Ok(TensorView::F32(View::contiguous(field, values, &shape)?))
}

/// The same of a tensor that is written.
pub(super) fn rows_mut<'a>(
    field: &'static str,
    values: &'a mut [f32],
    heads: usize,
    problem: &Problem,
) -> Result<TensorViewMut<'a>, Error> {
    let shape = rows_shape(heads, problem);
    Ok(TensorViewMut::F32(ViewMut::contiguous(field, values, &shape)?))
}

/// The shape of a packed tensor of some heads; there are as many keys as query rows.
pub(super) fn rows_shape(heads: usize, problem: &Problem) -> [usize; 3] {
    [problem.lengths().total_q(), heads, problem.head_dim()]
}
