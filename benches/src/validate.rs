//! The corpus on every engine, instruction set and strategy, judged by the error rule.
//!
//! The invariant: every (case, strategy) pair is counted once as passed, failed or skipped, and a skip
//! is a refusal that selection stated; nothing is left out silently. The record says how close the
//! worst output of each family came to its limit.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;

use attn_core::{KernelDesc, Phase, Problem};
use attn_kernels::cpu::{CpuEngine, Level, Workspace};
use attn_reference::{
    BackwardVerdict, Case, CaseData, Comparison, ForwardVerdict, corpus, judge_backward,
    judge_forward,
};
use serde::Serialize;

use crate::machine::Machine;

/// Options of `attn-bench validate`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Which engine is judged.
    #[arg(long, value_enum, default_value_t = Backend::Cpu)]
    backend: Backend,
    /// Only kernels of this family: prefill, decode or backward.
    #[arg(long)]
    family: Option<String>,
    /// Only cases whose name contains this.
    #[arg(long, default_value = "")]
    only: String,
    /// Where to write the record, as JSON.
    #[arg(long)]
    out: Option<PathBuf>,
}

/// Engines by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Backend {
    /// The f64 reference, which must pass its own judgement.
    Reference,
    /// The CPU engine at every instruction set of this processor.
    Cpu,
}

/// Why there is no record, or a bad one.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ValidateError {
    /// The corpus.
    #[error(transparent)]
    Call(#[from] attn_core::Error),
    /// The engine.
    #[error(transparent)]
    Engine(#[from] attn_kernels::Error),
    /// The record.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The family.
    #[error("family: expected prefill, decode or backward, got {0}")]
    Family(String),
    /// No case has such a name.
    #[error("only: expected part of a case's name, got {0:?}")]
    NoCase(String),
    /// Some outputs are wrong.
    #[error("{0} of the judged calls failed")]
    Failed(usize),
}

/// The figures of one family.
#[derive(Debug, Default, Serialize)]
struct Tally {
    passed: usize,
    failed: usize,
    skipped: usize,
    /// Worst error as a share of its limit.
    worst_share: f64,
    /// Where that was.
    worst_case: String,
}

#[derive(Debug, Serialize)]
struct Record {
    machine: Machine,
    backend: &'static str,
    levels: Vec<&'static str>,
    passed: usize,
    failed: usize,
    skipped: usize,
    families: BTreeMap<String, Tally>,
    failures: Vec<String>,
}

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

/// Judges everything and writes the record.
pub(crate) fn run(args: &Args) -> Result<(), ValidateError> {
    let wanted = args.family.as_deref();
    if let Some(family) = wanted
        && !["prefill", "decode", "backward"].contains(&family)
    {
        return Err(ValidateError::Family(family.to_owned()));
    }
    let engine = CpuEngine::new()?;
    let mut tallies = Tallies::default();
    let mut levels = Vec::new();
    let cases: Vec<CaseData> = corpus()
        .iter()
        .filter(|case| case.name.contains(&args.only))
        .map(Case::build)
        .collect::<Result<_, _>>()?;
    if cases.is_empty() {
        return Err(ValidateError::NoCase(args.only.clone()));
    }
    match args.backend {
        Backend::Reference => judge_reference(&cases, wanted, &mut tallies),
        Backend::Cpu => {
            for level in Level::ALL.into_iter().filter(|level| level.is_available()) {
                levels.push(level.name());
                for threads in [1, 2] {
                    let engine = CpuEngine::with(threads, level)?;
                    judge_cpu(&cases, &engine, wanted, &mut tallies);
                }
            }
        }
    }
    let sum = |f: fn(&Tally) -> usize| tallies.families.values().map(f).sum();
    let record = Record {
        machine: Machine::detect(&engine),
        backend: match args.backend {
            Backend::Reference => "reference",
            Backend::Cpu => "cpu",
        },
        levels,
        passed: sum(|t| t.passed),
        failed: sum(|t| t.failed),
        skipped: sum(|t| t.skipped),
        families: tallies.families,
        failures: tallies.failures,
    };
    print(&record)?;
    if let Some(path) = &args.out {
        let mut file = File::create(path)?;
        serde_json::to_writer_pretty(&mut file, &record).map_err(io::Error::from)?;
        writeln!(file)?;
    }
    if record.failed > 0 { Err(ValidateError::Failed(record.failed)) } else { Ok(()) }
}

fn print(record: &Record) -> io::Result<()> {
    let out = &mut io::stdout().lock();
    for failure in record.failures.iter().take(20) {
        writeln!(out, "{failure}")?;
    }
    for (family, t) in &record.families {
        writeln!(
            out,
            "{family:<10} {} passed, {} failed, {} skipped; worst error {:.0} % of its limit, {}",
            t.passed,
            t.failed,
            t.skipped,
            t.worst_share * 100.0,
            t.worst_case
        )?;
    }
    writeln!(out, "{} passed, {} failed, {} skipped", record.passed, record.failed, record.skipped)
}

#[derive(Debug, Default)]
struct Tallies {
    families: BTreeMap<String, Tally>,
    failures: Vec<String>,
}

impl Tallies {
    fn skip(&mut self, family: &str) {
        self.families.entry(family.to_owned()).or_default().skipped += 1;
    }

    /// Enters the outcome of one judged call: how close each output came, or what failed.
    fn enter(&mut self, family: &str, case: &str, outcome: Result<f64, String>) {
        let tally = self.families.entry(family.to_owned()).or_default();
        match outcome {
            Ok(share) => {
                tally.passed += 1;
                if share >= tally.worst_share {
                    tally.worst_share = share;
                    case.clone_into(&mut tally.worst_case);
                }
            }
            Err(failure) => {
                tally.failed += 1;
                self.failures.push(format!("{family}: {failure}"));
            }
        }
    }
}

fn judge_reference(cases: &[CaseData], wanted: Option<&str>, tallies: &mut Tallies) {
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

fn judge_cpu(cases: &[CaseData], engine: &CpuEngine, wanted: Option<&str>, tallies: &mut Tallies) {
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
fn plan_of(problem: &Problem, engine: &CpuEngine, strategy: Strategy) -> Option<attn_core::Plan> {
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

fn share(comparison: &Comparison) -> f64 {
    if comparison.limit > 0.0 { comparison.worst_abs / comparison.limit } else { 0.0 }
}

fn forward_share(v: &ForwardVerdict) -> f64 {
    share(&v.o).max(share(&v.lse))
}

fn backward_share(v: &BackwardVerdict) -> f64 {
    let all = [Some(&v.dq), Some(&v.dk), Some(&v.dv), v.dsinks.as_ref(), v.dbias.as_ref()];
    all.into_iter().flatten().map(share).fold(0.0, f64::max)
}
