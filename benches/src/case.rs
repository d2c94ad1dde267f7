//! `attn-bench case`: the black-box contract. A folder describes a call; its answer is written beside it.
//!
//! The invariant: a folder that was read gets a `result.json`, whatever it asks, and folders share one
//! engine with its plans and workspace, so that state leaking from one call into the next would show.
//! Misuse is found before anything runs: a folder without a readable `case.json` is a mistake of
//! whoever wrote the command line, not a case.

mod attention;
mod backend;
mod description;
mod failure;
mod input;
mod merge;
mod operand;
mod output;
mod paged;
mod problem;
mod report;
mod select;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use serde_json::Value;

use self::backend::Backend;
use self::description::Fields;
use self::failure::{Failure, Kind};
use self::report::{Answer, Report};

/// Who computes tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackendName {
    /// The f64 reference.
    Reference,
    /// The CPU engine.
    Cpu,
    /// A CUDA device.
    Cuda,
}

impl BackendName {
    const fn name(self) -> &'static str {
        match self {
            Self::Reference => "reference",
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }
}

/// Flags of the verb.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Who computes tensors.
    #[arg(long)]
    backend: BackendName,
    /// Folders with a case.json each; results are written into them.
    #[arg(required = true, value_name = "DIR")]
    dirs: Vec<PathBuf>,
}

/// Why the verb itself failed, as opposed to a case.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The command line names something that is not a case.
    #[error("{path}: expected the case.json of a schema 1 case, got {got}")]
    Misuse {
        /// The file.
        path: String,
        /// What is there.
        got: String,
    },
    /// A result could not be written.
    #[error("{path}: the result could not be written")]
    Write {
        /// The file.
        path: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
}

/// A `case.json` without the fields that all operations share.
struct Case<'a> {
    dir: &'a Path,
    op: String,
    fields: Fields,
}

/// Runs every folder in order.
///
/// # Errors
/// [`Error::Misuse`] before anything runs; [`Error::Write`] when a result cannot be written.
pub(crate) fn run(args: &Args) -> Result<(), Error> {
    let cases: Vec<Case<'_>> =
        args.dirs.iter().map(|dir| Case::read(dir)).collect::<Result<_, _>>()?;
    let mut backend = backend::open(args.backend);
    for case in cases {
        let dir = case.dir;
        let report = Report::new(args.backend.name(), case.answer(backend.as_mut()));
        report.write(dir)?;
    }
    Ok(())
}

impl<'a> Case<'a> {
    fn read(dir: &'a Path) -> Result<Self, Error> {
        let path = dir.join("case.json");
        let misuse = |got: String| Error::Misuse { path: path.display().to_string(), got };
        let text = std::fs::read(&path).map_err(|error| misuse(error.to_string()))?;
        let value: Value =
            serde_json::from_slice(&text).map_err(|error| misuse(error.to_string()))?;
        let Value::Object(mut fields) = value else {
            return Err(misuse("JSON that is not an object".to_owned()));
        };
        match fields.remove("schema") {
            Some(schema) if schema == 1 => {}
            Some(schema) => return Err(misuse(format!("schema {schema}"))),
            None => return Err(misuse("no schema".to_owned())),
        }
        fields.remove("id");
        let op = match fields.remove("op") {
            Some(Value::String(op)) => op,
            Some(other) => return Err(misuse(format!("op {other}"))),
            None => return Err(misuse("no op".to_owned())),
        };
        Ok(Self { dir, op, fields: Fields::new(fields) })
    }

    /// The answer, also to a case that an engine panics on: the next one must still be answered.
    fn answer(self, backend: &mut dyn Backend) -> Result<Answer, Failure> {
        report::clear(self.dir);
        let outcome = catch_unwind(AssertUnwindSafe(|| self.dispatch(backend)));
        outcome.unwrap_or_else(|panic| {
            let text = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied())
                .unwrap_or("no message");
            Err(Failure::new(Kind::Internal, format!("panicked: {text}")))
        })
    }

    fn dispatch(self, backend: &mut dyn Backend) -> Result<Answer, Failure> {
        let Self { dir, op, fields } = self;
        match op.as_str() {
            "forward" => attention::forward(dir, fields, backend),
            "backward" => attention::backward(dir, fields, backend),
            "merge" => merge::run(dir, fields, backend),
            "select" => select::run(fields),
            "paged_ops" => paged::run(fields),
            _ => Err(Failure::invalid(format!(
                "op: expected forward, backward, merge, select or paged_ops, got {op}"
            ))),
        }
    }
}

#[cfg(test)]
mod tests;
