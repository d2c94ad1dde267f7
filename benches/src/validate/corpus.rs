//! The corpus on the host's engines: the reference itself, and the CPU engine at every instruction set.
//!
//! The invariant: a skip is a refusal that selection stated, never one of the engine's.

use attn_core::{KernelDesc, Phase, Plan, Problem};
use attn_kernels::cpu::{CpuEngine, Workspace};
use attn_reference::{
    BackwardVerdict, CaseData, Comparison, ForwardVerdict, judge_backward, judge_forward,
};

use super::record::Tallies;

/// One way to run a case.
#[derive(Debug, Clone, Copy)]
struct Strategy {
    family: &'static str,
    phase: Option<Phase>,
    splits: Option<usize>,
}

const FORWARD: [Strategy; 8] = [
    Strategy { family: "prefill", phase: Some(Phase::Prefill), splits: None },
    Strategy { family: "decode", phase: Some(Phase::Decode), splits: None },
    Strategy { family: "decode", phase: Some(Phase::Decode), splits: Some(1) },
    Strategy { family: "decode", phase: Some(Phase::Decode), splits: Some(2) },
    Strategy { family: "decode", phase: Some(Phase::Decode), splits: Some(3) },
    Strategy { family: "decode", phase: Some(Phase::Decode), splits: Some(7) },
    Strategy { family: "decode", phase: Some(Phase::Decode), splits: Some(16) },
    Strategy { family: "chosen", phase: None, splits: None },
];

/// Judges the reference by its own rule.
pub(super) fn judge_reference(cases: &[CaseData], wanted: Option<&str>, tallies: &mut Tallies) {
    for case in cases {
        if wanted != Some("backward") {
            let verdict = judge_forward(case, attn_reference::naive::forward);
            tallies.enter("prefill", case.name(), outcome(verdict, forward_share));
        }
        if case.backward_problem().is_some() && wanted.is_none_or(|w| w == "backward") {
            let verdict = judge_backward(case, |problem, inputs, results, gradients| {
                attn_reference::naive::backward(problem, inputs, results, gradients)
            });
            tallies.enter("backward", case.name(), outcome(verdict, backward_share));
        }
    }
}

/// Judges the CPU engine, strategy by strategy.
pub(super) fn judge_cpu(
    cases: &[CaseData],
    engine: &CpuEngine,
    wanted: Option<&str>,
    tallies: &mut Tallies,
) {
    let workspace = &mut Workspace::new();
    for case in cases {
        for strategy in FORWARD {
            if wanted.is_some_and(|w| w != strategy.family) {
                continue;
            }
            let Some(plan) = plan_of(case.problem(), engine, strategy) else {
                tallies.skip(strategy.family);
                continue;
            };
            let verdict = judge_forward(case, |_, inputs, mut outputs| {
                engine.forward(&plan, inputs, &mut outputs, workspace)
            });
            let label = format!("{} at {}", case.name(), engine.level().name());
            tallies.enter(strategy.family, &label, outcome(verdict, forward_share));
        }
        let Some(problem) = case.backward_problem() else { continue };
        if wanted.is_some_and(|w| w != "backward") {
            continue;
        }
        let Ok(plan) = attn_select::choose(problem, &engine.caps(), catalog()) else {
            tallies.skip("backward");
            continue;
        };
        let verdict = judge_backward(case, |_, inputs, results, mut gradients| {
            engine.backward(&plan, inputs, results, &mut gradients, workspace)
        });
        let label = format!("{} at {}", case.name(), engine.level().name());
        tallies.enter("backward", &label, outcome(verdict, backward_share));
    }
}

fn catalog() -> &'static [KernelDesc] {
    attn_kernels::catalog()
}

/// The plan of a strategy, or `None` where selection refuses it.
fn plan_of(problem: &Problem, engine: &CpuEngine, strategy: Strategy) -> Option<Plan> {
    let mut spec = problem.spec().clone();
    spec.options.phase = strategy.phase;
    spec.options.num_splits = strategy.splits;
    let problem = Problem::new(spec).ok()?;
    attn_select::choose(&problem, &engine.caps(), catalog()).ok()
}

fn outcome<V, E: std::fmt::Display>(
    verdict: Result<V, E>,
    share: impl Fn(&V) -> f64,
) -> Result<f64, String> {
    verdict.map(|v| share(&v)).map_err(|e| e.to_string())
}

/// The worst error as a share of its limit.
pub(super) fn share(comparison: &Comparison) -> f64 {
    if comparison.limit > 0.0 { comparison.worst_abs / comparison.limit } else { 0.0 }
}

/// The larger share of the two outputs.
pub(super) fn forward_share(v: &ForwardVerdict) -> f64 {
    share(&v.o).max(share(&v.lse))
}

pub(super) fn backward_share(v: &BackwardVerdict) -> f64 {
    let all = [Some(&v.dq), Some(&v.dk), Some(&v.dv), v.dsinks.as_ref(), v.dbias.as_ref()];
    all.into_iter().flatten().map(share).fold(0.0, f64::max)
}
