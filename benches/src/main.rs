//! `attn-bench`: every verb that touches a kernel or a device.
//!
//! The invariant: this file only dispatches. Exit codes are 0 for work done, 1 for work that failed, and 2
//! for a command line that makes no sense.

mod cascade_bench;
mod case;
mod demo;
mod device;
mod download;
mod kernels;
mod machine;
mod memory;
mod model;
mod peers;
#[cfg(test)]
mod support;
mod sweep;
mod train;
mod validate;
mod worker;

use std::error::Error;
use std::process::ExitCode;

use clap::Parser;

/// Exact attention: the main job, the black-box cases and the records.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    /// Answer black-box cases: one folder each, one result each.
    Case(case::Args),
    /// Time cascades over shared prefixes beside plain decode over the same tables, on a device.
    CascadeBench(cascade_bench::Args),
    /// Generate text with a real language model, every attention call by this workspace.
    Demo(demo::Args),
    /// List, compile, measure, disassemble or bundle the CUDA kernels; needs no GPU.
    Kernels(kernels::Args),
    /// Time a decode step over a latent cache on the first CUDA device.
    LatentBench(worker::latent::Args),
    /// Measure the peak memory of one long prefill.
    Memory(memory::Args),
    /// Time the CPU engine beside PyTorch, candle-nn, a matrix product and a memory read.
    Peers(peers::Args),
    /// Time a decode step that attends to new keys and stores them in one launch, beside two, on the first CUDA device.
    StepBench(worker::step::Args),
    /// Time a suite of shapes on the CPU engine, each checked first, into a record that can be taken up.
    Sweep(sweep::Args),
    /// Train a small causal transformer block, its attention by recomputation and by a score matrix.
    TrainStep(train::Args),
    /// Judge engines, instruction sets and strategies by the error rule, and record it.
    Validate(validate::Args),
    /// Answer a benchmark's questions, one JSON line each, beside its other contestants.
    Worker(worker::Args),
}

type Failure = (u8, Box<dyn Error>);

fn main() -> ExitCode {
    let outcome: Result<(), Failure> = match Cli::parse().verb {
        Verb::Case(args) => case::run(&args).map_err(|error| match error {
            case::Error::Misuse { .. } => (2, error.into()),
            case::Error::Write { .. } => (1, error.into()),
        }),
        Verb::CascadeBench(args) => cascade_bench::run(&args).map_err(failed),
        Verb::Demo(args) => demo::run(&args).map_err(failed),
        Verb::Kernels(args) => kernels::run(&args).map_err(failed),
        Verb::LatentBench(args) => worker::latent::run(&args).map_err(failed),
        Verb::StepBench(args) => worker::step::run(&args).map_err(failed),
        Verb::Memory(args) => memory::run(&args).map_err(failed),
        Verb::Peers(args) => peers::run(&args).map_err(failed),
        Verb::Sweep(args) => sweep::run(&args).map_err(failed),
        Verb::TrainStep(args) => train::run(&args).map_err(failed),
        Verb::Validate(args) => validate::run(&args).map_err(failed),
        Verb::Worker(args) => worker::run(&args).map_err(failed),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err((code, error)) => {
            complain(&*error);
            ExitCode::from(code)
        }
    }
}

fn failed(error: impl Error + 'static) -> Failure {
    (1, error.into())
}

/// Prints an error and its causes.
#[expect(clippy::print_stderr, reason = "the one place where the program speaks of failure")]
fn complain(error: &dyn Error) {
    eprintln!("attn-bench: {error}");
    let mut cause = error.source();
    while let Some(error) = cause {
        eprintln!("  because {error}");
        cause = error.source();
    }
}
