//! `cargo xtask VERB`: the tasks of this workspace, dispatched here and written one file a verb.
//!
//! This crate depends on no product crate. It must build in seconds on a fresh clone, and it must
//! still run when a product crate does not compile; whatever touches a kernel or a device lives in
//! the binary `attn-bench`, which this one builds and spawns. A shell script would do for that part
//! and not for `tidy`, which walks the resolved dependency graph.

#![expect(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a command-line tool: what it prints is what it is for"
)]

mod attn_bench;
mod bench;
mod ci;
mod error;
mod flags;
mod fuzz;
mod process;
mod tidy;

use std::process::ExitCode;

use clap::Parser;

use crate::error::Error;
use crate::flags::{Verb, Xtask};

fn main() -> ExitCode {
    match run(Xtask::parse().verb) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(verb: Verb) -> Result<ExitCode, Error> {
    match verb {
        Verb::Demo(passed) => attn_bench::run("demo", &passed.args),
        Verb::Case(passed) => attn_bench::run("case", &passed.args),
        Verb::Validate(passed) => attn_bench::run("validate", &passed.args),
        Verb::Kernels(passed) => attn_bench::run("kernels", &passed.args),
        Verb::Worker(passed) => attn_bench::run("worker", &passed.args),
        Verb::CascadeBench(passed) => attn_bench::run("cascade-bench", &passed.args),
        Verb::LatentBench(passed) => attn_bench::run("latent-bench", &passed.args),
        Verb::StepBench(passed) => attn_bench::run("step-bench", &passed.args),
        Verb::TrainStep(passed) => attn_bench::run("train-step", &passed.args),
        Verb::Bench(bench) => bench::run(&bench),
        Verb::Ci(ci) => ci::run(&ci),
        Verb::Tidy => tidy::run(),
        Verb::Fuzz(fuzz) => fuzz::run(&fuzz),
    }
}
