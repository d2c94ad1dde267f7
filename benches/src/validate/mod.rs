//! `attn-bench validate`: engines on cases, judged by the error rule, and the record of it.
//!
//! The invariant: what is judged is data (the corpus, the matrix), who is judged is a backend, and the rule is
//! attn-reference's. A record says what was judged where, by which sources, and how close the worst
//! output of each family came to its limit.

mod cascade;
mod corpus;
mod cuda;
mod dropout;
mod matrix;
mod record;
mod serving;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

use attn_kernels::cpu::{CpuEngine, Level};
use attn_reference::{Case, CaseData};

use crate::machine::Machine;
use record::{Record, Subject, Tallies};

/// Options of `attn-bench validate`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Which engine is judged.
    #[arg(long, value_enum, default_value_t = Backend::Cpu)]
    backend: Backend,
    /// Only kernels of this family: prefill, decode or backward, or serving, cascade or dropout; on CUDA prefill, `prefill_sm90a`,
    /// decode, `decode_sm90a`, `latent_sm90a`, naive, backward, `backward_naive`, merge, append, copy, modes, serving,
    /// cascade or dropout.
    #[arg(long)]
    family: Option<String>,
    /// Only cases whose name contains this.
    #[arg(long, default_value = "")]
    only: String,
    /// CUDA: a reduced matrix, for runs under a sanitizer.
    #[arg(long)]
    small: bool,
    /// CUDA: start no case after so many seconds; the rest is recorded as unfinished.
    #[arg(long, value_name = "SECONDS")]
    budget_s: Option<u64>,
    /// CUDA: an earlier record of the same sources and device, whose passed groups are taken over.
    #[arg(long, value_name = "FILE")]
    resume: Option<PathBuf>,
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
    /// The CUDA engine on the first device.
    Cuda,
}

impl Backend {
    const fn name(self) -> &'static str {
        match self {
            Self::Reference => "reference",
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }

    const fn families(self) -> &'static [&'static str] {
        match self {
            Self::Reference => &["prefill", "backward"],
            Self::Cpu => &["prefill", "decode", "backward", "serving", "cascade", "dropout"],
            Self::Cuda => &[
                "naive",
                "prefill",
                "prefill_sm90a",
                "decode",
                "decode_sm90a",
                "latent_sm90a",
                "merge",
                "append",
                "copy",
                "backward",
                "backward_sm90a",
                "backward_naive",
                "modes",
                "serving",
                "cascade",
                "dropout",
            ],
        }
    }
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
    #[error("family: expected one of {expected:?}, got {got}")]
    Family {
        /// Those of the backend.
        expected: &'static [&'static str],
        /// What was asked for.
        got: String,
    },
    /// An option of the CUDA backend.
    #[error("{0}: expected --backend cuda with it, got another backend")]
    CudaOnly(&'static str),
    /// No case has such a name.
    #[error("only: expected part of a case's name, got {0:?}")]
    NoCase(String),
    /// Some outputs are wrong.
    #[error("{0} of the judged calls failed")]
    Failed(usize),
    /// The time was up.
    #[error("{0} calls were not made within the budget")]
    Unfinished(usize),
}

/// Judges everything and writes the record.
pub(crate) fn run(args: &Args) -> Result<(), ValidateError> {
    let families = args.backend.families();
    if let Some(family) = &args.family
        && !families.contains(&family.as_str())
    {
        let got = family.clone();
        return Err(ValidateError::Family { expected: families, got });
    }
    if args.backend == Backend::Cuda {
        return cuda::run(args);
    }
    for (given, option) in [
        (args.small, "small"),
        (args.budget_s.is_some(), "budget-s"),
        (args.resume.is_some(), "resume"),
    ] {
        if given {
            return Err(ValidateError::CudaOnly(option));
        }
    }
    run_on_host(args)
}

fn run_on_host(args: &Args) -> Result<(), ValidateError> {
    let wanted = args.family.as_deref();
    let engine = CpuEngine::new()?;
    let mut tallies = Tallies::default();
    let mut levels = Vec::new();
    let cases: Vec<CaseData> = attn_reference::corpus()
        .iter()
        .filter(|case| case.name.contains(&args.only))
        .map(Case::build)
        .collect::<Result<_, _>>()?;
    let settings: Vec<_> = serving::SETTINGS
        .into_iter()
        .filter(|_| args.backend == Backend::Cpu && wanted.is_none_or(|family| family == "serving"))
        .filter(|setting| setting.title().contains(&args.only))
        .collect();
    let cascades = args.backend == Backend::Cpu
        && wanted.is_none_or(|family| family == "cascade")
        && cascade::batches(false).iter().any(|batch| batch.case.name.contains(&args.only));
    let sets = args.backend == Backend::Cpu
        && wanted.is_none_or(|family| family == dropout::FAMILY)
        && dropout::calls()?.iter().any(|call| call.name.contains(&args.only));
    if cases.is_empty() && settings.is_empty() && !cascades && !sets {
        return Err(ValidateError::NoCase(args.only.clone()));
    }
    if args.backend == Backend::Reference {
        corpus::judge_reference(&cases, wanted, &mut tallies);
    } else {
        for level in Level::ALL.into_iter().filter(|level| level.is_available()) {
            levels.push(level.name());
            for threads in [1, 2] {
                let engine = CpuEngine::with(threads, level)?;
                corpus::judge_cpu(&cases, &engine, wanted, &mut tallies);
                if sets {
                    dropout::judge_cpu(&engine, &args.only, &mut tallies)?;
                }
            }
        }
        for setting in settings {
            let mut pages = serving::HostPages::new(setting, &engine)?;
            serving::judge(setting, &mut pages, &mut tallies, || false);
        }
        if cascades {
            cascade::judge_cpu(&engine, &args.only, &mut tallies);
        }
    }
    let subject = Subject::Host { machine: Machine::detect(&engine), levels };
    let record = Record::new(args.backend.name(), subject, &tallies, BTreeMap::new());
    record.print()?;
    if let Some(path) = &args.out {
        record.write(path)?;
    }
    if record.failed > 0 { Err(ValidateError::Failed(record.failed)) } else { Ok(()) }
}
