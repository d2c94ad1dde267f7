//! One call that runs an engine on a case and says whether it is right.
//!
//! The invariant: an engine passes only if every output element is within the error rule of the f64
//! reference, and no storage between outputs has changed. Judging is here and not in each engine's tests so
//! that there is one rule, and no engine's tests can quietly have another.

use std::fmt;

use attn_core::{
    DType, Error, ErrorRule, ForwardResults, Gradients, Inputs, Outputs, Problem, TensorView, View,
};

use crate::case_data::CaseData;
use crate::compare::{self, Comparison};
use crate::elements::read_view;
use crate::error::Failure;
use crate::storage::OutputTensor;
use crate::{materialised, naive};

/// How close a forward came.
#[derive(Debug, Clone, PartialEq)]
pub struct ForwardVerdict {
    /// The output.
    pub o: Comparison,
    /// The LSE.
    pub lse: Comparison,
}

impl fmt::Display for ForwardVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "o: {}; lse: {}", self.o, self.lse)
    }
}

/// How close a backward came.
#[derive(Debug, Clone, PartialEq)]
pub struct BackwardVerdict {
    /// The gradient of q.
    pub dq: Comparison,
    /// The gradient of k.
    pub dk: Comparison,
    /// The gradient of v.
    pub dv: Comparison,
    /// The gradient of the sinks, if wanted.
    pub dsinks: Option<Comparison>,
    /// The gradient of the bias, if wanted.
    pub dbias: Option<Comparison>,
}

impl fmt::Display for BackwardVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "dq: {}; dk: {}; dv: {}", self.dq, self.dk, self.dv)?;
        for (name, comparison) in [("dsinks", &self.dsinks), ("dbias", &self.dbias)] {
            if let Some(comparison) = comparison {
                write!(f, "; {name}: {comparison}")?;
            }
        }
        Ok(())
    }
}

/// Runs a forward engine on a case and judges O and LSE.
///
/// # Errors
/// [`Failure::Engine`] with the engine's own error, if it gave one; [`Failure::Wrong`] with the first bad
/// element; [`Failure::StrayWrite`] for a write between outputs.
///
/// ```
/// use attn_reference::{corpus, judge_forward, naive};
///
/// for case in corpus().into_iter().take(3) {
///     judge_forward(&case.build()?, naive::forward)?;
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn judge_forward<E>(
    case: &CaseData,
    engine: impl FnOnce(&Problem, &Inputs<'_>, Outputs<'_>) -> Result<(), E>,
) -> Result<ForwardVerdict, Failure<E>> {
    let unfit = |source| Failure::Case { case: case.name().to_owned(), source };
    let expected = case.expected().map_err(unfit)?;
    let mut buffers = case.output_buffers().map_err(unfit)?;
    let inputs = case.inputs().map_err(unfit)?;
    engine(case.problem(), &inputs, buffers.outputs().map_err(unfit)?)
        .map_err(|source| Failure::Engine { case: case.name().to_owned(), source })?;
    let (reference, baseline) = (&expected.reference, expected.baseline);
    let rule = ErrorRule::new(case.problem().out_dtype());
    let one = |tensor, got: &OutputTensor, want, rule, baseline| {
        judge_tensor(case.name(), tensor, got, want, rule, baseline)
    };
    Ok(ForwardVerdict {
        o: one("o", &buffers.o, &reference.o, rule, baseline.o)?,
        lse: one("lse", &buffers.lse, &reference.lse, LSE_RULE, baseline.lse)?,
    })
}

/// Runs a backward engine on a case and judges every gradient. The engine gets the reference's output and
/// LSE, rounded to their types.
///
/// The gradients of sinks and bias are f32, but O and its gradient enter them rounded to the dtype, so it is
/// one rounding of that dtype that they are granted.
///
/// # Errors
/// As [`judge_forward`]; [`Failure::Case`] when the case has no backward
/// ([`CaseData::backward_problem`] is `None`).
pub fn judge_backward<E>(
    case: &CaseData,
    engine: impl FnOnce(&Problem, &Inputs<'_>, &ForwardResults<'_>, Gradients<'_>) -> Result<(), E>,
) -> Result<BackwardVerdict, Failure<E>> {
    let unfit = |source| Failure::Case { case: case.name().to_owned(), source };
    let expected = case.expected_gradients().map_err(unfit)?;
    let results = case.forward_results().map_err(unfit)?;
    let mut buffers = case.gradient_buffers().map_err(unfit)?;
    let inputs = case.inputs().map_err(unfit)?;
    let problem = case.backward_problem().unwrap_or(case.problem());
    engine(problem, &inputs, &results, buffers.gradients().map_err(unfit)?)
        .map_err(|source| Failure::Engine { case: case.name().to_owned(), source })?;
    let (reference, baseline) = (&expected.reference, expected.baseline);
    let rule = ErrorRule::new(problem.out_dtype());
    let one = |tensor, got: &OutputTensor, want: &[f64], baseline| {
        judge_tensor(case.name(), tensor, got, want, rule, baseline)
    };
    let optional = |tensor, got: &Option<OutputTensor>, want: &Option<Vec<f64>>, baseline| {
        let both = got.as_ref().zip(want.as_ref());
        both.map(|(got, want)| one(tensor, got, want, baseline)).transpose()
    };
    Ok(BackwardVerdict {
        dq: one("dq", &buffers.dq, &reference.dq, baseline.dq)?,
        dk: one("dk", &buffers.dk, &reference.dk, baseline.dk)?,
        dv: one("dv", &buffers.dv, &reference.dv, baseline.dv)?,
        dsinks: optional("dsinks", &buffers.dsinks, &reference.dsinks, baseline.dsinks)?,
        dbias: optional("dbias", &buffers.dbias, &reference.dbias, baseline.dbias)?,
    })
}

/// Judges some rows of a result that was computed elsewhere: for calls too long to compute whole.
///
/// As [`ExpectedRows::new`] and [`ExpectedRows::judge`], for a single result.
///
/// # Errors
/// As these two.
pub fn judge_rows(
    problem: &Problem,
    inputs: &Inputs<'_>,
    rows: &[(usize, usize)],
    o: &TensorView<'_>,
    lse: &View<'_, f32>,
) -> Result<ForwardVerdict, Error> {
    ExpectedRows::new(problem, inputs, rows)?.judge(o, lse)
}

/// What some rows of a call must be, for judging several results by it.
#[derive(Debug, Clone)]
pub struct ExpectedRows {
    problem: Problem,
    rows: Vec<(usize, usize)>,
    reference: naive::Reference,
    baseline: materialised::ForwardError,
}

impl ExpectedRows {
    /// Computes reference and baseline of `rows`, which are pairs of sequence and row.
    ///
    /// # Errors
    /// As [`naive::forward_rows`].
    pub fn new(
        problem: &Problem,
        inputs: &Inputs<'_>,
        rows: &[(usize, usize)],
    ) -> Result<Self, Error> {
        let reference = naive::forward_rows(problem, inputs, rows)?;
        let baseline = materialised::forward_rows_error(problem, inputs, rows, &reference)?;
        Ok(Self { problem: problem.clone(), rows: rows.to_vec(), reference, baseline })
    }

    /// Judges these rows of a result; `o` and `lse` are the whole outputs, arranged as the problem says.
    ///
    /// A verdict may be over its limit: callers look at [`Comparison::is_within`]. Positions in it are
    /// `[n-th asked row, head, ...]`.
    ///
    /// # Errors
    /// [`Error::Layout`] for outputs of another shape.
    pub fn judge(&self, o: &TensorView<'_>, lse: &View<'_, f32>) -> Result<ForwardVerdict, Error> {
        let Self { problem, rows, reference, baseline } = self;
        let (heads, value_dim) = (problem.q_heads(), problem.value_dim());
        let (mut got_o, mut got_lse) = (Vec::new(), Vec::new());
        for &(sequence, row) in rows {
            let o_row = attn_core::dispatch_view!(o, view => {
                let row = problem.q_rows(view, sequence).and_then(|rows| rows.at(row));
                row.map(|row| read_view(&row))
            });
            let lse_row = problem.q_rows(lse, sequence).and_then(|rows| rows.at(row));
            let (Some(o_row), Some(lse_row)) = (o_row, lse_row) else {
                let got = format!("{:?} and {:?}", o.shape(), lse.shape());
                return Err(Error::layout("o and lse", "the problem's rows", got));
            };
            got_o.extend(o_row);
            got_lse.extend(read_view(&lse_row));
        }
        let rule = ErrorRule::new(problem.out_dtype());
        let shape = [rows.len(), heads, value_dim];
        let lse_shape = [rows.len(), heads];
        Ok(ForwardVerdict {
            o: compare::judge(rule, &got_o, &reference.o, baseline.o).with_shape(&shape),
            lse: compare::judge(LSE_RULE, &got_lse, &reference.lse, baseline.lse)
                .with_shape(&lse_shape),
        })
    }
}

/// The LSE is f32 whatever the dtype, and made from f32 scores.
const LSE_RULE: ErrorRule = ErrorRule::new(DType::F32);

fn judge_tensor<E>(
    case: &str,
    tensor: &'static str,
    got: &OutputTensor,
    want: &[f64],
    rule: ErrorRule,
    baseline: f64,
) -> Result<Comparison, Failure<E>> {
    if let Some((index, got)) = got.first_stray_write() {
        return Err(Failure::StrayWrite { case: case.to_owned(), tensor, index, got });
    }
    let comparison = compare::judge(rule, &got.values(), want, baseline).with_shape(got.shape());
    if comparison.is_within() {
        return Ok(comparison);
    }
    Err(Failure::Wrong { case: case.to_owned(), tensor, comparison: Box::new(comparison) })
}
