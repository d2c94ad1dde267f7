//! The reference: attention written down in f64 as it is defined, too simple to be wrong.
//!
//! The invariant: every score of a row is there before anything is summed, each step is one line of
//! the definition in [`Problem`], and nothing is shared with an engine but the mask's predicate and
//! the walk to a row. There is no tile, no running maximum and no early exit, because what everything
//! else is measured against may not contain the ideas that are being measured. Rows are taken one by
//! one, so that a forward needs memory for one row of scores only.
//!
//! Hidden keys take no part: they are skipped, not multiplied by zero, so that NaN in storage that a
//! row may not read cannot reach it.

mod backward;
mod cancellation;

use attn_core::{DropoutMask, Error, Inputs, Mask, Outputs, Problem, View};

pub use self::backward::{backward, backward_f64};
pub(crate) use self::backward::{bias_place, check_d_o};
pub(crate) use self::cancellation::cancelled;
use crate::elements;
use crate::rows::{key_rows, q_place, q_places, query_rows, value_rows};

/// The name under which a plan would show the reference, and `disabled_kernels` can forbid it.
pub const NAME: &str = "reference_naive";

/// A forward's result in f64, row-major.
///
/// Shapes: `o` `[rows..., q_heads, value_dim]` and `lse` `[rows..., q_heads]`, rows as the problem arranges
/// queries (padded rows are 0 and -inf), or one per asked row from [`forward_rows`].
/// Units: `lse` is a natural log.
#[derive(Debug, Clone, PartialEq)]
pub struct Reference {
    /// Output.
    pub o: Vec<f64>,
    /// Log-sum-exp of the whole denominator, sink included.
    pub lse: Vec<f64>,
}

/// A backward's result in f64, row-major in the problem's arrangements; padded rows are 0.
///
/// Shapes: `dq` as q, `dk` as k, `dv` as v, `dsinks` `[q_heads]`, `dbias` as the bias.
#[derive(Debug, Clone, PartialEq)]
pub struct ReferenceGradients {
    /// Gradient of q.
    pub dq: Vec<f64>,
    /// Gradient of k, summed over the query heads of a group.
    pub dk: Vec<f64>,
    /// Gradient of v, summed over the query heads of a group.
    pub dv: Vec<f64>,
    /// Gradient of the sinks, where there are sinks.
    pub dsinks: Option<Vec<f64>>,
    /// Gradient of the bias, summed over its broadcast extents, where there is a bias.
    pub dbias: Option<Vec<f64>>,
}

/// Computes a call in f64 and writes it, each element rounded once.
///
/// Every option of a [`Problem`] is honoured: nothing is split, equal calls give equal bits, and no
/// sequence meets another, so the requirements on how to compute hold by themselves.
///
/// # Errors
/// As [`Inputs::check`] and [`Outputs::check`]; [`Error::Unsupported`] when the problem disables [`NAME`].
/// Nothing is written then.
///
/// ```
/// use attn_core::{DType, Inputs, Outputs, Problem, ProblemSpec, TensorView, TensorViewMut, View, ViewMut};
///
/// let problem = Problem::new(ProblemSpec::new(DType::F32, 1, 1, 1, &[1], &[2]))?;
/// let (q, k, v) = ([1f32], [0f32, 0.0], [2f32, 4.0]);
/// let inputs = Inputs::dense(
///     TensorView::F32(View::contiguous("q", &q, &[1, 1, 1])?),
///     TensorView::F32(View::contiguous("k", &k, &[2, 1, 1])?),
///     TensorView::F32(View::contiguous("v", &v, &[2, 1, 1])?),
/// );
/// let (mut o, mut lse) = ([0f32], [0f32]);
/// let outputs = Outputs {
///     o: TensorViewMut::F32(ViewMut::contiguous("o", &mut o, &[1, 1, 1])?),
///     lse: Some(ViewMut::contiguous("lse", &mut lse, &[1, 1])?),
/// };
/// attn_reference::naive::forward(&problem, &inputs, outputs)?;
/// assert_eq!((o[0], lse[0]), (3.0, 2f32.ln()));
/// # Ok::<(), attn_core::Error>(())
/// ```
pub fn forward(
    problem: &Problem,
    inputs: &Inputs<'_>,
    mut outputs: Outputs<'_>,
) -> Result<(), Error> {
    check_enabled(problem)?;
    outputs.check(problem)?;
    let result = forward_f64(problem, inputs)?;
    elements::write(&mut outputs.o, &result.o);
    if let Some(lse) = &mut outputs.lse {
        elements::write_view(lse, &result.lse);
    }
    Ok(())
}

/// Computes a call in f64, rows as the problem arranges them.
///
/// # Errors
/// As [`Inputs::check`].
pub fn forward_f64(problem: &Problem, inputs: &Inputs<'_>) -> Result<Reference, Error> {
    let rows = all_rows(problem);
    let packed = forward_rows(problem, inputs, &rows)?;
    Ok(place_rows(problem, &rows, packed))
}

/// Computes some rows of a call in f64: `rows` are pairs of sequence and row, results one per pair.
///
/// This is how long calls are checked: the cost is that of the asked rows alone.
///
/// # Errors
/// As [`Inputs::check`]; [`Error::Invalid`] for a pair outside the batch.
pub fn forward_rows(
    problem: &Problem,
    inputs: &Inputs<'_>,
    rows: &[(usize, usize)],
) -> Result<Reference, Error> {
    inputs.check(problem)?;
    check_rows(problem, rows)?;
    let (heads, value_dim) = (problem.q_heads(), problem.value_dim());
    let mut result = Reference {
        o: vec![0.0; rows.len() * heads * value_dim],
        lse: vec![f64::NEG_INFINITY; rows.len() * heads],
    };
    for (sequence, places) in by_sequence(rows) {
        for head in 0..heads {
            let this = Head::new(problem, inputs, sequence, head)?;
            for &place in &places {
                let row = rows[place].1;
                let softmax = this.softmax(&this.scores(row));
                let at = place * heads + head;
                result.lse[at] = softmax.lse;
                let o = &mut result.o[at * value_dim..][..value_dim];
                this.weighted_values(&this.kept(row, &softmax.weights), o);
            }
        }
    }
    Ok(result)
}

/// Every (sequence, row) pair of a problem, in order.
pub(crate) fn all_rows(problem: &Problem) -> Vec<(usize, usize)> {
    let l = problem.lengths();
    (0..l.batch()).flat_map(|b| (0..l.q(b)).map(move |row| (b, row))).collect()
}

/// Moves results of one row each to where the problem arranges the rows.
pub(crate) fn place_rows(problem: &Problem, rows: &[(usize, usize)], from: Reference) -> Reference {
    let heads = problem.q_heads();
    let width = heads * problem.value_dim();
    let places = q_places(problem);
    let mut to =
        Reference { o: vec![0.0; places * width], lse: vec![f64::NEG_INFINITY; places * heads] };
    for (n, &(sequence, row)) in rows.iter().enumerate() {
        let place = q_place(problem, sequence, row);
        to.o[place * width..][..width].copy_from_slice(&from.o[n * width..][..width]);
        to.lse[place * heads..][..heads].copy_from_slice(&from.lse[n * heads..][..heads]);
    }
    to
}

/// Groups positions in `rows` by their sequence, so that each head's keys are gathered once.
pub(crate) fn by_sequence(rows: &[(usize, usize)]) -> Vec<(usize, Vec<usize>)> {
    let mut order: Vec<usize> = (0..rows.len()).collect();
    order.sort_by_key(|&n| rows[n].0);
    let same = |a: &usize, b: &usize| rows[*a].0 == rows[*b].0;
    order.chunk_by(same).map(|chunk| (rows[chunk[0]].0, chunk.to_vec())).collect()
}

pub(crate) fn check_rows(problem: &Problem, rows: &[(usize, usize)]) -> Result<(), Error> {
    let l = problem.lengths();
    for &(sequence, row) in rows {
        if sequence >= l.batch() {
            let expected = format!("a sequence below {}", l.batch());
            return Err(Error::invalid("rows", expected, sequence));
        }
        if row >= l.q(sequence) {
            let expected = format!("a row below {} of sequence {sequence}", l.q(sequence));
            return Err(Error::invalid("rows", expected, row));
        }
    }
    Ok(())
}

fn check_enabled(problem: &Problem) -> Result<(), Error> {
    if problem.options().disabled_kernels.iter().any(|name| name == NAME) {
        return Err(Error::unsupported(
            NAME,
            "the problem disables it, and the reference has no other",
        ));
    }
    Ok(())
}

/// One query head of one sequence, everything in f64.
struct Head<'a> {
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    head_dim: usize,
    value_dim: usize,
    q_len: usize,
    kv_len: usize,
    scale: f64,
    softcap: Option<f64>,
    mask: Mask<'a>,
    bias: Option<View<'a, f32>>,
    slope: Option<f64>,
    sink: Option<f64>,
    /// Sequence and query head, where weights are dropped by.
    place: (usize, usize),
    dropout: Option<DropoutMask>,
}

/// The score of one key.
#[derive(Clone, Copy)]
struct Score {
    /// `scale * q.k`.
    raw: f64,
    /// After soft-cap, bias and ALiBi; -inf for a hidden key.
    value: f64,
}

/// The softmax of a row.
struct Softmax {
    /// Of each key; 0 for hidden ones.
    weights: Vec<f64>,
    /// Of the sink; 0 without one.
    sink_weight: f64,
    lse: f64,
}

impl<'a> Head<'a> {
    fn new(
        problem: &Problem,
        inputs: &Inputs<'a>,
        sequence: usize,
        head: usize,
    ) -> Result<Self, Error> {
        let kv_head = head / problem.group();
        let exact = |stored: Vec<f32>, scale: f32| -> Vec<f64> {
            stored.into_iter().map(|x| f64::from(x) * f64::from(scale)).collect()
        };
        let k = key_rows(problem, inputs, sequence, kv_head)?;
        let v = value_rows(problem, inputs, sequence, kv_head)?;
        let of_head = |tensor: &Option<View<'_, f32>>| {
            tensor.as_ref().and_then(|view| view.get(&[head])).map(f64::from)
        };
        Ok(Self {
            q: exact(
                query_rows(problem, "q", &inputs.q, sequence, head)?,
                inputs.q_scale_of(sequence, kv_head),
            ),
            k: exact(k, inputs.k_scale_of(sequence, kv_head)),
            v: exact(v, inputs.v_scale_of(sequence, kv_head)),
            head_dim: problem.head_dim(),
            value_dim: problem.value_dim(),
            q_len: problem.lengths().q(sequence),
            kv_len: problem.lengths().kv(sequence),
            scale: f64::from(problem.scale()),
            softcap: problem.softcap().map(f64::from),
            mask: inputs.mask_of(problem, sequence, head)?,
            bias: inputs.bias_of(problem, sequence, head)?,
            slope: of_head(&inputs.alibi),
            sink: of_head(&inputs.sinks),
            place: (sequence, head),
            dropout: inputs.dropout_of(problem),
        })
    }

    fn q(&self, row: usize) -> &[f64] {
        &self.q[row * self.head_dim..][..self.head_dim]
    }

    fn k(&self, key: usize) -> &[f64] {
        &self.k[key * self.head_dim..][..self.head_dim]
    }

    fn v(&self, key: usize) -> &[f64] {
        &self.v[key * self.value_dim..][..self.value_dim]
    }

    /// The row of scores: scale, soft-cap, bias and ALiBi, then mask.
    fn scores(&self, row: usize) -> Vec<Score> {
        let hidden = Score { raw: 0.0, value: f64::NEG_INFINITY };
        let mut scores = vec![hidden; self.kv_len];
        // The band is walked, not tested, only because a window over a long sequence is short.
        for key in self.mask.band().row(row, self.q_len, self.kv_len) {
            if self.mask.sees(row, key) {
                scores[key] = self.score(row, key);
            }
        }
        scores
    }

    fn score(&self, row: usize, key: usize) -> Score {
        let raw = self.scale * dot(self.q(row), self.k(key));
        let mut value = match self.softcap {
            None => raw,
            Some(cap) => cap * (raw / cap).tanh(),
        };
        if let Some(bias) = &self.bias {
            value += bias.get(&[row, key]).map_or(f64::NAN, f64::from);
        }
        if let Some(slope) = self.slope {
            let position = (row + self.kv_len) as f64 - self.q_len as f64;
            value -= slope * (position - key as f64).abs();
        }
        Score { raw, value }
    }

    fn softmax(&self, scores: &[Score]) -> Softmax {
        let sink = self.sink.unwrap_or(f64::NEG_INFINITY);
        if sink == f64::NEG_INFINITY && scores.iter().all(|s| s.value == f64::NEG_INFINITY) {
            let weights = vec![0.0; scores.len()];
            return Softmax { weights, sink_weight: 0.0, lse: f64::NEG_INFINITY };
        }
        let max = scores.iter().fold(sink, |max, s| max.max(s.value));
        let mut weights: Vec<f64> = scores.iter().map(|s| (s.value - max).exp()).collect();
        let mut sink_weight = (sink - max).exp();
        let sum = weights.iter().sum::<f64>() + sink_weight;
        for weight in &mut weights {
            *weight /= sum;
        }
        sink_weight /= sum;
        Softmax { weights, sink_weight, lse: max + sum.ln() }
    }

    /// The factor of a weight: 1, or with dropout 0 or `1 / (1 - p)`.
    fn keep(&self, row: usize, key: usize) -> f64 {
        let (sequence, head) = self.place;
        match &self.dropout {
            None => 1.0,
            Some(mask) if mask.keeps(sequence, head, row, key) => f64::from(mask.factor()),
            Some(_) => 0.0,
        }
    }

    /// A row's weights as they meet the values.
    fn kept(&self, row: usize, weights: &[f64]) -> Vec<f64> {
        weights.iter().enumerate().map(|(key, weight)| weight * self.keep(row, key)).collect()
    }

    /// `o = sum of weight * v`; keys without weight are not read.
    fn weighted_values(&self, weights: &[f64], o: &mut [f64]) {
        for (key, &weight) in weights.iter().enumerate() {
            if weight != 0.0 {
                add_scaled(o, weight, self.v(key));
            }
        }
    }
}

/// `sum of a * b`, in eight partial sums: an f64 sum in one chain waits for each addition.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 8];
    for (a, b) in a.chunks(8).zip(b.chunks(8)) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    sums.iter().sum()
}

/// `to += factor * from`.
fn add_scaled(to: &mut [f64], factor: f64, from: &[f64]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += factor * from;
    }
}

#[cfg(test)]
mod tests;
