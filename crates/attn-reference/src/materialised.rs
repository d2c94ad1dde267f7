//! The same-dtype baseline of the error rule: what a straightforward computation in this precision loses.
//!
//! The invariant: inputs in their dtype; scores, softmax and sums in f32; the weights P rounded to the
//! dtype before they meet V (in a backward, P and dS); the output rounded once. An fp8 cache is
//! dequantised first, `stored * scale` rounded to the dtype of the queries, and then treated alike:
//! an engine may keep the product in f32 and be better, none needs to be worse. With fp8 queries nothing is
//! rounded on the way in (`stored * scale` is f32), P is rounded to E4M3 as `exp(s - max)` over the keys of
//! the row, and the output to bf16. A normalised P would have no bits left in E4M3 once a row has some
//! hundred keys, so no evaluation rounds one there: it would grant an error that no engine makes.
//!
//! Dropout makes rounded weights 0; what it multiplies the others by is left to the output, so that a P in fp8 stays in
//! its range. A backward rounds the product.
//!
//! An error of one evaluation can be small by luck, above all on a case of a few elements, and twice
//! nothing is nothing. So the baseline is the worst of several evaluations that all fit the definition
//! and differ where engines differ ([`Evaluation`]); a fixed absolute allowance instead would
//! hide real faults on small values.

mod backward;

use attn_core::{DType, DropoutMask, Error, Inputs, Mask, Problem, View};

pub use self::backward::backward;
use crate::compare::largest_error;
use crate::naive::{Reference, ReferenceGradients, all_rows, by_sequence, check_rows, place_rows};
use crate::rows::{key_rows, query_rows, value_rows};

/// One way to evaluate the definition in f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Evaluation {
    /// Sums from the first term to the last; P is rounded before it is normalised.
    Sequential,
    /// Sums from the last term to the first; P is normalised before it is rounded, unless that is to fp8.
    Reversed,
    /// Eight partial sums, exponentials in base 2, and a backward that recomputes P from the f32 LSE and takes the
    /// output as it is stored, as vector and tensor-core kernels do.
    Lanes,
    /// Sums of products in blocks, each added exactly and the sum cut, not rounded, to f32, as matrix units
    /// accumulate 16-bit products; those of fp8 products align every term and keep 14 bits of each, and
    /// of the sum. A library's matrix product on such a device has this error too.
    ///
    /// Source: for fp8, DeepSeek-V3 Technical Report, arXiv:2412.19437, section 3.5.2, on Hopper. That
    /// the sum is cut as well shows in scores of 97182.5 and 97135 (row 13 of head 1 of the corpus' `fp8/huge_range`),
    /// whose weights an H200 gives the ratio of scores 64 apart.
    Blocks,
}

impl Evaluation {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Sequential, Self::Reversed, Self::Lanes, Self::Blocks];

    /// Those that a computation in `dtype` may follow: matrix units take no f32.
    #[must_use]
    pub const fn of(dtype: DType) -> &'static [Self] {
        match dtype {
            DType::F32 => &[Self::Sequential, Self::Reversed, Self::Lanes],
            _ => &Self::ALL,
        }
    }

    /// Whether a backward starts from the output and the log-sum-exp that a forward has stored.
    const fn recomputes(self) -> bool {
        matches!(self, Self::Lanes | Self::Blocks)
    }

    /// Visits `0..len` in this order, with the partial sum that each term belongs to.
    fn terms(self, len: usize) -> impl Iterator<Item = (usize, usize)> {
        (0..len).map(move |n| match self {
            Self::Sequential | Self::Blocks => (n, 0),
            Self::Reversed => (len - 1 - n, 0),
            Self::Lanes => (n, n % LANES),
        })
    }

    fn sum(self, terms: &[f32]) -> f32 {
        let mut sums = [0.0; LANES];
        for (n, lane) in self.terms(terms.len()) {
            sums[lane] += terms[n];
        }
        sums.iter().sum()
    }

    fn dot(self, unit: Unit, a: &[f32], b: &[f32]) -> f32 {
        if self == Self::Blocks {
            return a.chunks(unit.block).zip(b.chunks(unit.block)).fold(0.0, |sum, (a, b)| {
                let terms = a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b));
                unit.add(sum, terms)
            });
        }
        let mut sums = [0.0; LANES];
        for (n, lane) in self.terms(a.len()) {
            sums[lane] += a[n] * b[n];
        }
        sums.iter().sum()
    }

    /// `sum of factor * row` over the rows `[len, dim]` whose factor is not 0.
    fn combine(self, unit: Unit, factors: &[f32], rows: &[f32], dim: usize) -> Vec<f32> {
        if self == Self::Blocks {
            return combine_blocks(unit, factors, rows, dim);
        }
        let mut sums = vec![0.0; LANES * dim];
        for (n, lane) in self.terms(factors.len()) {
            if factors[n] != 0.0 {
                let row = &rows[n * dim..][..dim];
                add_scaled(&mut sums[lane * dim..][..dim], factors[n], row);
            }
        }
        let (first, rest) = sums.split_at_mut(dim);
        for lane in rest.chunks(dim) {
            add_scaled(first, 1.0, lane);
        }
        sums.truncate(dim);
        sums
    }
}

/// How a matrix unit adds products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Unit {
    /// Products that it sums at once: the inner extent of an instruction.
    block: usize,
    /// Bits that are kept of each term, counted from the highest of the largest, and of the sum; `None` keeps all.
    bits: Option<i32>,
}

impl Unit {
    const fn of(dtype: DType) -> Self {
        match dtype {
            DType::F8E4M3 | DType::F8E5M2 => Self { block: 32, bits: Some(14) },
            DType::F32 | DType::F16 | DType::BF16 => Self { block: 16, bits: None },
        }
    }

    /// A sum with the products of a block added to it.
    fn add(self, sum: f32, terms: impl Iterator<Item = f64> + Clone) -> f32 {
        let terms = std::iter::once(f64::from(sum)).chain(terms);
        let Some(bits) = self.bits else {
            return cut(terms.sum());
        };
        let largest = terms.clone().fold(0.0, |largest: f64, x| largest.max(x.abs()));
        // NaN and infinities are what they are; below the normal numbers nothing is lost.
        if !terms.clone().all(f64::is_finite) || largest < f64::from(f32::MIN_POSITIVE) {
            return cut(terms.sum());
        }
        let aligned = last_place(largest, bits);
        let sum: f64 = terms.map(|x| (x / aligned).trunc() * aligned).sum();
        if sum == 0.0 {
            return 0.0;
        }
        let kept = last_place(sum.abs(), bits);
        cut((sum / kept).trunc() * kept)
    }
}

/// The place of the last of so many bits of `x`, counted from its highest: all values lie far inside the range of f64.
fn last_place(x: f64, bits: i32) -> f64 {
    let exponent = f64::from_bits(x.to_bits() & !((1 << 52) - 1));
    exponent * f64::from(2f32).powi(1 - bits)
}

/// [`Evaluation::combine`] of [`Evaluation::Blocks`].
fn combine_blocks(unit: Unit, factors: &[f32], rows: &[f32], dim: usize) -> Vec<f32> {
    let mut sums = vec![0.0f32; dim];
    for (factors, rows) in factors.chunks(unit.block).zip(rows.chunks(unit.block * dim)) {
        for (d, sum) in sums.iter_mut().enumerate() {
            let terms = factors.iter().zip(rows.chunks(dim)).filter(|(f, _)| **f != 0.0);
            *sum = unit.add(*sum, terms.map(|(&f, row)| f64::from(f) * f64::from(row[d])));
        }
    }
    sums
}

/// The nearest f32 that is not further from zero.
#[expect(clippy::cast_possible_truncation, reason = "the rounding to f32 is meant, and undone")]
fn cut(x: f64) -> f32 {
    let rounded = x as f32;
    if f64::from(rounded).abs() > x.abs() && rounded.is_finite() {
        f32::from_bits(rounded.to_bits() - 1)
    } else {
        rounded
    }
}

/// How wrong the baseline is on a call, per output: the largest absolute error over all evaluations.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ForwardError {
    /// Of the output.
    pub o: f64,
    /// Of the LSE, where it is finite.
    pub lse: f64,
}

/// How wrong the baseline is on a backward, per gradient: the largest error over all evaluations.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BackwardError {
    /// Of the gradient of q.
    pub dq: f64,
    /// Of the gradient of k.
    pub dk: f64,
    /// Of the gradient of v.
    pub dv: f64,
    /// Of the gradient of the sinks; 0 without sinks.
    pub dsinks: f64,
    /// Of the gradient of the bias; 0 without a bias.
    pub dbias: f64,
}

/// Computes a call in its own dtype, rows as the problem arranges them; elements are exact f32 values.
///
/// # Errors
/// As [`Inputs::check`].
pub fn forward(
    problem: &Problem,
    inputs: &Inputs<'_>,
    evaluation: Evaluation,
) -> Result<Reference, Error> {
    let rows = all_rows(problem);
    let result = forward_rows(problem, inputs, &rows, evaluation)?;
    Ok(place_rows(problem, &rows, result))
}

/// Computes some rows of a call in its own dtype; see [`crate::naive::forward_rows`].
///
/// # Errors
/// As [`Inputs::check`]; [`Error::Invalid`] for a pair outside the batch.
pub fn forward_rows(
    problem: &Problem,
    inputs: &Inputs<'_>,
    rows: &[(usize, usize)],
    evaluation: Evaluation,
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
            let this = Head::new(problem, inputs, sequence, head, evaluation)?;
            for &place in &places {
                let row = rows[place].1;
                let row = this.row(row, &this.scores(row));
                let at = place * heads + head;
                result.lse[at] = f64::from(row.lse);
                for (to, &from) in result.o[at * value_dim..][..value_dim].iter_mut().zip(&row.o) {
                    *to = f64::from(from);
                }
            }
        }
    }
    Ok(result)
}

/// The baseline's error against `reference`, which is [`crate::naive::forward_f64`] of the same call.
///
/// # Errors
/// As [`Inputs::check`].
pub fn forward_error(
    problem: &Problem,
    inputs: &Inputs<'_>,
    reference: &Reference,
) -> Result<ForwardError, Error> {
    worst_forward(problem, reference, |evaluation| forward(problem, inputs, evaluation))
}

/// The baseline's error on some rows, against [`crate::naive::forward_rows`] of the same call.
///
/// # Errors
/// As [`forward_rows`].
pub fn forward_rows_error(
    problem: &Problem,
    inputs: &Inputs<'_>,
    rows: &[(usize, usize)],
    reference: &Reference,
) -> Result<ForwardError, Error> {
    worst_forward(problem, reference, |evaluation| forward_rows(problem, inputs, rows, evaluation))
}

/// The baseline's error against `reference`, which is [`crate::naive::backward_f64`] of the same call.
///
/// # Errors
/// As [`crate::naive::backward_f64`].
pub fn backward_error(
    problem: &Problem,
    inputs: &Inputs<'_>,
    d_o: &attn_core::TensorView<'_>,
    reference: &ReferenceGradients,
) -> Result<BackwardError, Error> {
    let mut worst = BackwardError { dq: 0.0, dk: 0.0, dv: 0.0, dsinks: 0.0, dbias: 0.0 };
    for &evaluation in Evaluation::of(problem.q_dtype()) {
        let got = backward(problem, inputs, d_o, evaluation)?;
        let optional = |got: &Option<Vec<f64>>, want: &Option<Vec<f64>>| match (got, want) {
            (Some(got), Some(want)) => largest_error(got, want),
            _ => 0.0,
        };
        worst.dq = worst.dq.max(largest_error(&got.dq, &reference.dq));
        worst.dk = worst.dk.max(largest_error(&got.dk, &reference.dk));
        worst.dv = worst.dv.max(largest_error(&got.dv, &reference.dv));
        worst.dsinks = worst.dsinks.max(optional(&got.dsinks, &reference.dsinks));
        worst.dbias = worst.dbias.max(optional(&got.dbias, &reference.dbias));
    }
    Ok(worst)
}

fn worst_forward(
    problem: &Problem,
    reference: &Reference,
    compute: impl Fn(Evaluation) -> Result<Reference, Error>,
) -> Result<ForwardError, Error> {
    let mut worst = ForwardError { o: 0.0, lse: 0.0 };
    for &evaluation in Evaluation::of(problem.q_dtype()) {
        let got = compute(evaluation)?;
        worst.o = worst.o.max(largest_error(&got.o, &reference.o));
        worst.lse = worst.lse.max(largest_error(&got.lse, &reference.lse));
    }
    Ok(worst)
}

/// Partial sums of [`Evaluation::Lanes`].
const LANES: usize = 8;

/// One query head of one sequence, in its dtype as f32.
struct Head<'a> {
    evaluation: Evaluation,
    unit: Unit,
    /// What weights are rounded to.
    dtype: DType,
    /// What outputs are rounded to.
    out_dtype: DType,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    head_dim: usize,
    value_dim: usize,
    q_len: usize,
    kv_len: usize,
    scale: f32,
    softcap: Option<f32>,
    mask: Mask<'a>,
    bias: Option<View<'a, f32>>,
    slope: Option<f32>,
    sink: f32,
    /// Sequence and query head, where weights are dropped by.
    place: (usize, usize),
    dropout: Option<DropoutMask>,
}

/// Scores of one row: before and after everything that follows the scale; -inf for hidden keys.
struct Scores {
    raw: Vec<f32>,
    value: Vec<f32>,
}

/// One finished row.
struct Row {
    /// Normalised weights, not rounded.
    weights: Vec<f32>,
    sink_weight: f32,
    /// Rounded to the dtype.
    o: Vec<f32>,
    lse: f32,
}

impl<'a> Head<'a> {
    fn new(
        problem: &Problem,
        inputs: &Inputs<'a>,
        sequence: usize,
        head: usize,
        evaluation: Evaluation,
    ) -> Result<Self, Error> {
        let dtype = problem.q_dtype();
        let kv_head = head / problem.group();
        // The type that dequantised values are rounded to; those of the queries' own type are not, for
        // fp8 queries meet fp8 keys as they are stored.
        let rounding = if dtype.is_fp8() { DType::F32 } else { dtype };
        let dequantised = |stored: Vec<f32>, is_fp8: bool, scale: f32| -> Vec<f32> {
            if !is_fp8 {
                return stored;
            }
            stored.into_iter().map(|x| rounding.round(x * scale)).collect()
        };
        let (q_fp8, kv_fp8) = (dtype.is_fp8(), problem.kv_dtype().is_fp8());
        let q = query_rows(problem, "q", &inputs.q, sequence, head)?;
        let k = key_rows(problem, inputs, sequence, kv_head)?;
        let v = value_rows(problem, inputs, sequence, kv_head)?;
        let of_head =
            |tensor: &Option<View<'_, f32>>| tensor.as_ref().and_then(|view| view.get(&[head]));
        Ok(Self {
            evaluation,
            unit: Unit::of(dtype),
            dtype,
            out_dtype: problem.out_dtype(),
            q: dequantised(q, q_fp8, inputs.q_scale_of(sequence, kv_head)),
            k: dequantised(k, kv_fp8, inputs.k_scale_of(sequence, kv_head)),
            v: dequantised(v, kv_fp8, inputs.v_scale_of(sequence, kv_head)),
            head_dim: problem.head_dim(),
            value_dim: problem.value_dim(),
            q_len: problem.lengths().q(sequence),
            kv_len: problem.lengths().kv(sequence),
            scale: problem.scale(),
            softcap: problem.softcap(),
            mask: inputs.mask_of(problem, sequence, head)?,
            bias: inputs.bias_of(problem, sequence, head)?,
            slope: of_head(&inputs.alibi),
            sink: of_head(&inputs.sinks).unwrap_or(f32::NEG_INFINITY),
            place: (sequence, head),
            dropout: inputs.dropout_of(problem),
        })
    }

    fn q(&self, row: usize) -> &[f32] {
        &self.q[row * self.head_dim..][..self.head_dim]
    }

    fn k(&self, key: usize) -> &[f32] {
        &self.k[key * self.head_dim..][..self.head_dim]
    }

    fn scores(&self, row: usize) -> Scores {
        let mut scores =
            Scores { raw: vec![0.0; self.kv_len], value: vec![f32::NEG_INFINITY; self.kv_len] };
        for key in self.mask.band().row(row, self.q_len, self.kv_len) {
            if !self.mask.sees(row, key) {
                continue;
            }
            let raw = self.scale * self.evaluation.dot(self.unit, self.q(row), self.k(key));
            let mut value = self.softcap.map_or(raw, |cap| cap * (raw / cap).tanh());
            if let Some(bias) = &self.bias {
                value += bias.get(&[row, key]).unwrap_or(f32::NAN);
            }
            if let Some(slope) = self.slope {
                // Distances are exact in f32 up to 2^24 tokens.
                value -= slope * (row + self.kv_len).abs_diff(self.q_len + key) as f32;
            }
            (scores.raw[key], scores.value[key]) = (raw, value);
        }
        scores
    }

    /// Whether dropout leaves a weight.
    fn keeps(&self, row: usize, key: usize) -> bool {
        let (sequence, head) = self.place;
        self.dropout.as_ref().is_none_or(|mask| mask.keeps(sequence, head, row, key))
    }

    /// What dropout multiplies the weights that it leaves by.
    fn keep_factor(&self) -> f32 {
        self.dropout.as_ref().map_or(1.0, DropoutMask::factor)
    }

    fn row(&self, row: usize, scores: &Scores) -> Row {
        let max = scores.value.iter().fold(self.sink, |max, &s| max.max(s));
        if max == f32::NEG_INFINITY && scores.value.iter().all(|&s| s == max) {
            let (weights, o) = (vec![0.0; self.kv_len], vec![0.0; self.value_dim]);
            return Row { weights, sink_weight: 0.0, o, lse: max };
        }
        let exp = |s: f32| match self.evaluation {
            Evaluation::Sequential | Evaluation::Reversed => (s - max).exp(),
            Evaluation::Lanes | Evaluation::Blocks => {
                (s * std::f32::consts::LOG2_E - max * std::f32::consts::LOG2_E).exp2()
            }
        };
        let mut weights: Vec<f32> = scores.value.iter().map(|&s| exp(s)).collect();
        let sink_weight = exp(self.sink);
        let sum = self.evaluation.sum(&weights) + sink_weight;
        let rounded = |weights: &[f32], unit: f32| -> Vec<f32> {
            weights.iter().map(|&w| self.dtype.round(w / unit)).collect()
        };
        // A sink far above the keys would leave their weights no bits in fp8: there the largest key's is 1.
        let largest = weights.iter().fold(0.0, |largest: f32, &w| largest.max(w));
        let unit = if self.dtype.is_fp8() && largest > 0.0 { largest } else { 1.0 };
        let unnormalised = rounded(&weights, unit);
        for weight in &mut weights {
            *weight /= sum;
        }
        let (mut factors, divisor) = match self.evaluation {
            Evaluation::Reversed if !self.dtype.is_fp8() => (rounded(&weights, 1.0), 1.0),
            _ => (unnormalised, sum / unit),
        };
        for (key, factor) in factors.iter_mut().enumerate() {
            if !self.keeps(row, key) {
                *factor = 0.0;
            }
        }
        let mut o = self.evaluation.combine(self.unit, &factors, &self.v, self.value_dim);
        for x in &mut o {
            *x = self.out_dtype.round(*x * self.keep_factor() / divisor);
        }
        let lse = match self.evaluation {
            Evaluation::Sequential | Evaluation::Reversed => max + sum.ln(),
            Evaluation::Lanes | Evaluation::Blocks => {
                (max * std::f32::consts::LOG2_E + sum.log2()) * std::f32::consts::LN_2
            }
        };
        Row { weights, sink_weight: sink_weight / sum, o, lse }
    }

    /// The weights that a backward works with.
    fn backward_weights(&self, scores: &Scores, row: &mut Row) {
        if !self.evaluation.recomputes() || row.lse == f32::NEG_INFINITY {
            return;
        }
        let base = row.lse * std::f32::consts::LOG2_E;
        let recompute = |s: f32| (s * std::f32::consts::LOG2_E - base).exp2();
        for (weight, &score) in row.weights.iter_mut().zip(&scores.value) {
            *weight = recompute(score);
        }
        row.sink_weight = recompute(self.sink);
    }
}

/// `to += factor * from`.
fn add_scaled(to: &mut [f32], factor: f32, from: &[f32]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to += factor * from;
    }
}

#[cfg(test)]
mod tests;
