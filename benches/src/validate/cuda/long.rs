//! Long rows: up to 128 Ki keys, one or a few heads, large ranges of scores.
//!
//! The invariant: a reference over every row would take hours, so the naive kernel is judged against it on sampled rows,
//! and is then the oracle of all rows of the others. Sampled rows of the others are judged by the reference as
//! well, so that a fault common to all kernels cannot hide behind the oracle.

use attn_core::DType::{BF16, F8E4M3, F16};
use attn_core::PageOrder::{Hnd, Nhd};
use attn_core::{Outputs, Plan, Problem, TensorView, TensorViewMut};
use attn_reference::case::Scales;
use attn_reference::elements::{read, read_view};
use attn_reference::{Case, CaseData, ExpectedRows, ForwardVerdict, Pattern, compare};
use rayon::prelude::*;

use super::super::corpus::forward_share;
use super::super::record::Tallies;
use super::forward::{Attempt, family_of};
use super::{Judge, Runs};
use crate::device::DeviceInputs;

/// The most keys of a row.
const LONGEST: usize = 128 << 10;

fn cases() -> Vec<Case> {
    vec![
        Case::new("long/decode", BF16, (1, 1), 128, &[1], &[LONGEST]),
        Case::new("long/decode_grouped", F16, (8, 1), 128, &[1], &[100_003]).paged(Nhd, 16),
        Case::new("long/decode_fp8", BF16, (4, 1), 128, &[2], &[LONGEST - 1])
            .fp8(F8E4M3, Scales::PerHead)
            .paged(Hnd, 64),
        Case::new("long/decode_rising", BF16, (2, 1), 64, &[1], &[LONGEST])
            .pattern(Pattern::LargestLast),
        Case::new("long/decode_huge_range", F16, (2, 1), 64, &[1], &[65_537])
            .pattern(Pattern::HugeRange),
        Case::new("long/decode_far_below", BF16, (2, 1), 64, &[1], &[LONGEST])
            .pattern(Pattern::FarBelow)
            .paged(Nhd, 256),
        Case::new("long/chunk", BF16, (1, 1), 128, &[512], &[LONGEST]).causal(),
        Case::new("long/chunk_paged", F16, (2, 1), 64, &[300], &[65_000]).causal().paged(Nhd, 16),
        Case::new("long/prompt", BF16, (1, 1), 64, &[16_384], &[16_384]).causal(),
        Case::new("long/prompt_rising", F16, (1, 1), 128, &[4096], &[8192])
            .pattern(Pattern::LargestLast),
        Case::new("long/prompt_huge_range", BF16, (1, 1), 128, &[4096], &[4096])
            .causal()
            .pattern(Pattern::HugeRange),
        Case::new("long/window", BF16, (1, 1), 128, &[16_384], &[16_384])
            .causal()
            .window(Some(4095), None),
    ]
}

const RUNS: Runs = Runs {
    chosen: true,
    naive: false,
    prefill: true,
    parts: &[7],
    splits: &[None, Some(1), Some(7), Some(16)],
    tiles: false,
};

pub(super) fn judge(judge: &mut Judge<'_>, tallies: &mut Tallies) {
    if judge.is_small {
        return;
    }
    let mut cases = cases();
    cases.retain(|case| case.name.contains(judge.only));
    if judge.is_late() {
        tallies.unfinished += cases.len();
        return;
    }
    // The references of all cases at once: the longest takes a core longer than all runs take the device.
    let built: Vec<_> = cases.par_iter().map(build).collect();
    for (case, built) in cases.iter().zip(built) {
        match built {
            Ok((data, expected)) => judge_case(judge, &data, &expected, tallies),
            Err(error) => tallies.enter("naive", &case.name, Err(error.to_string())),
        }
    }
}

/// The data of a case and what its sampled rows must be.
fn build(case: &Case) -> Result<(CaseData, ExpectedRows), attn_core::Error> {
    let data = case.build()?;
    let rows = sampled(data.problem());
    let expected = ExpectedRows::new(data.problem(), &data.inputs()?, &rows)?;
    Ok((data, expected))
}

/// The outputs of a run, and the verdict on some of its rows.
struct Ran {
    o: Vec<f64>,
    lse: Vec<f64>,
    verdict: ForwardVerdict,
}

fn judge_case(
    judge: &mut Judge<'_>,
    case: &CaseData,
    expected: &ExpectedRows,
    tallies: &mut Tallies,
) {
    let name = case.name();
    let problem = case.problem();
    let mut oracle = None;
    judge.check(tallies, "naive", name, |judge| {
        let plan = judge.selection.naive(problem).ok_or("refused by selection")?;
        let ran = run(judge, case, &plan, expected)?;
        let share = judged(&ran)?;
        oracle = Some(ran);
        Ok(share)
    });
    for Attempt { label, plan, .. } in judge.selection.attempts(problem, RUNS) {
        // Decode is refused to prompts; that is counted in the matrix.
        let Some(plan) = plan else { continue };
        let family = family_of(plan.kernel);
        judge.check(tallies, family, &format!("{name} by {label}"), |judge| {
            let ran = run(judge, case, &plan, expected)?;
            let share = judged(&ran)?;
            match &oracle {
                Some(oracle) => same_as(oracle, &ran, problem).map(|()| share),
                // Another family was asked for: the sampled rows are what there is.
                None => Ok(share),
            }
        });
    }
}

/// The first, the last, and some rows between.
fn sampled(problem: &Problem) -> Vec<(usize, usize)> {
    let rows = problem.lengths().q(0);
    let places = [0, 1, rows / 7, rows / 3, rows / 2, rows - rows / 5, rows.saturating_sub(2)];
    let mut places: Vec<usize> =
        places.into_iter().chain([rows - 1]).filter(|&r| r < rows).collect();
    places.sort_unstable();
    places.dedup();
    places.into_iter().map(|row| (0, row)).collect()
}

fn run(
    judge: &mut Judge<'_>,
    case: &CaseData,
    plan: &Plan,
    expected: &ExpectedRows,
) -> Result<Ran, String> {
    let text = |error: attn_core::Error| error.to_string();
    let inputs = case.inputs().map_err(text)?;
    let on_device =
        DeviceInputs::upload(&judge.gpu.stream, &inputs).map_err(|error| error.to_string())?;
    let mut buffers = case.output_buffers().map_err(text)?;
    let mut outputs = buffers.outputs().map_err(text)?;
    judge.forward(plan, &on_device, &mut outputs).map_err(|error| error.to_string())?;
    let Outputs { o, lse: Some(lse) } = &outputs else {
        return Err("the case wants no LSE".to_owned());
    };
    let (o, lse) = (shared(o), lse.as_view());
    let verdict = expected.judge(&o, &lse).map_err(text)?;
    Ok(Ran { o: read(&o), lse: read_view(&lse), verdict })
}

/// The view of an output, to be read.
pub(super) fn shared<'v>(tensor: &'v TensorViewMut<'_>) -> TensorView<'v> {
    match tensor {
        TensorViewMut::F32(view) => TensorView::F32(view.as_view()),
        TensorViewMut::F16(view) => TensorView::F16(view.as_view()),
        TensorViewMut::BF16(view) => TensorView::BF16(view.as_view()),
    }
}

fn judged(ran: &Ran) -> Result<f64, String> {
    let verdict = &ran.verdict;
    if verdict.o.is_within() && verdict.lse.is_within() {
        return Ok(forward_share(verdict));
    }
    Err(verdict.to_string())
}

/// Checks that all rows are those of the oracle, within twice what the sampled rows were allowed: both may err
/// by that much, to either side.
fn same_as(oracle: &Ran, ran: &Ran, problem: &Problem) -> Result<(), String> {
    let shape = [problem.lengths().total_q(), problem.q_heads(), problem.value_dim()];
    for (tensor, got, want, limit, shape) in [
        ("o", &ran.o, &oracle.o, 2.0 * ran.verdict.o.limit, &shape[..]),
        ("lse", &ran.lse, &oracle.lse, 2.0 * ran.verdict.lse.limit, &shape[..2]),
    ] {
        let comparison = compare::compare(got, want, limit).with_shape(shape);
        if !comparison.is_within() {
            return Err(format!("{tensor} differs from the naive kernel's: {comparison}"));
        }
    }
    Ok(())
}
