//! The verbs of `cargo xtask`, as data: a verb is listed here only once it works.
//!
//! Verbs that belong to `attn-bench` take their arguments unread. Repeating its options here would
//! give two command lines that drift apart, and would tempt this crate to depend on a product crate.

use std::ffi::OsString;

use clap::{Args, Parser, Subcommand};

use crate::ci::Step;

/// The command line of `cargo xtask`.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about = "Tasks of this workspace")]
pub(crate) struct Xtask {
    /// What to do.
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

/// One verb.
#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Generate text with a real language model on this workspace's attention (see `demo --help`).
    #[command(disable_help_flag = true)]
    Demo(Passed),
    /// Run black-box cases: folders that hold a `case.json` (see `case --help`).
    #[command(disable_help_flag = true)]
    Case(Passed),
    /// Check every engine against the f64 reference (see `validate --help`).
    #[command(disable_help_flag = true)]
    Validate(Passed),
    /// List, compile, measure, disassemble or bundle the CUDA kernels (see `kernels --help`).
    #[command(disable_help_flag = true)]
    Kernels(Passed),
    /// Answer a benchmark's questions beside its other contestants (see `worker --help`).
    #[command(disable_help_flag = true)]
    Worker(Passed),
    /// Time cascades over shared prefixes beside plain decode, on a device (see `cascade-bench --help`).
    #[command(disable_help_flag = true)]
    CascadeBench(Passed),
    /// Time one decode step over a latent cache, on a device (see `latent-bench --help`).
    #[command(disable_help_flag = true)]
    LatentBench(Passed),
    /// Time decode steps that store their new keys, in one launch and in two, on a device (see `step-bench --help`).
    #[command(disable_help_flag = true)]
    StepBench(Passed),
    /// Train a small transformer block on this workspace's attention (see `train-step --help`).
    #[command(disable_help_flag = true)]
    TrainStep(Passed),
    /// Run the criterion benches; arguments after the options go to criterion.
    Bench(Bench),
    /// Run what a change must pass: fmt, clippy, nvrtc, tidy, tests, docs. Stops at the first failure.
    Ci(Ci),
    /// Check the house rules: dependency arrows, module headers, names, unsafe code, licences.
    Tidy,
    /// Run the fuzz targets with cargo-fuzz, which must be installed, on a nightly toolchain.
    Fuzz(Fuzz),
}

/// Arguments that `attn-bench` reads, `--help` included.
#[derive(Debug, Args)]
pub(crate) struct Passed {
    /// Arguments of `attn-bench VERB`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) args: Vec<OsString>,
}

/// Options of `bench`.
#[derive(Debug, Args)]
pub(crate) struct Bench {
    /// The bench target to build and run; all of them by default.
    #[arg(long, default_value = "*")]
    pub(crate) target: String,
    /// Arguments of criterion: a filter on names, `--quick`, `--save-baseline NAME`, ...
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub(crate) args: Vec<OsString>,
}

/// Options of `ci`.
#[derive(Debug, Args)]
pub(crate) struct Ci {
    /// Steps to leave out; the closing table lists them as skipped.
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub(crate) skip: Vec<Step>,
}

/// Options of `fuzz`.
#[derive(Debug, Args)]
pub(crate) struct Fuzz {
    /// Seconds to spend on each target.
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) seconds: u32,
    /// The targets to run; all of them by default.
    pub(crate) targets: Vec<String>,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(line: &str) -> Result<Verb, clap::Error> {
        Xtask::try_parse_from(line.split_whitespace()).map(|x| x.verb)
    }

    #[test]
    fn flags_form_a_consistent_command() {
        Xtask::command().debug_assert();
    }

    #[test]
    fn demo_passes_hyphens_and_help_through() {
        let Verb::Demo(passed) = parse("xtask demo --tokens 4 --help -x").unwrap() else {
            panic!("not demo")
        };
        assert_eq!(passed.args, ["--tokens", "4", "--help", "-x"]);
    }

    #[test]
    fn case_passes_folders_through_in_order() {
        let Verb::Case(passed) = parse("xtask case --backend cpu b a").unwrap() else {
            panic!("not case")
        };
        assert_eq!(passed.args, ["--backend", "cpu", "b", "a"]);
    }

    #[test]
    fn kernels_passes_its_own_verbs_through() {
        let Verb::Kernels(passed) = parse("xtask kernels bundle --arch sm_80 -o x").unwrap() else {
            panic!("not kernels")
        };
        assert_eq!(passed.args, ["bundle", "--arch", "sm_80", "-o", "x"]);
    }

    #[test]
    fn bench_separates_its_target_from_criterion_arguments() {
        let Verb::Bench(bench) = parse("xtask bench --target pool append --quick").unwrap() else {
            panic!("not bench")
        };
        assert_eq!(bench.target, "pool");
        assert_eq!(bench.args, ["append", "--quick"]);
    }

    #[test]
    fn ci_reads_a_list_of_steps_to_skip() {
        let Verb::Ci(ci) = parse("xtask ci --skip fmt,doc --skip test").unwrap() else {
            panic!("not ci")
        };
        assert_eq!(ci.skip, [Step::Fmt, Step::Doc, Step::Test]);
    }

    #[test]
    fn ci_refuses_an_unknown_step() {
        assert!(parse("xtask ci --skip lint").is_err());
    }

    #[test]
    fn fuzz_refuses_zero_seconds() {
        assert!(parse("xtask fuzz --seconds 0").is_err());
    }
}
