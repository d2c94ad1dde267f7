//! `attn-bench sweep`: a suite of shapes on the CPU engine, each checked and then timed, into a record that can be taken up.
//!
//! The invariant: every point of the suite has a row, be it a time, a refusal or a failure; a share is of a ceiling that was
//! measured beside it.

mod host;
mod point;
mod record;
mod row;
mod suite;
#[cfg(test)]
mod tests;

use std::io::{self, Write};
use std::path::PathBuf;

use attn_kernels::cpu::CpuEngine;
use indicatif::{ProgressBar, ProgressStyle};

use crate::machine::Machine;
use crate::peers::ceiling::{Gemm, Read};
use host::Host;
use point::{Phase, Point};
use record::{Record, RecordError};
use row::{Ceilings, Outcome, Row};
use suite::{Suite, SuiteError};

/// Options of `attn-bench sweep`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A suite: cpu, smoke, or the path of a TOML file like those in benches/definitions.
    #[arg(long, default_value = "cpu")]
    suite: String,
    /// Only points whose name contains this.
    #[arg(long, default_value = "")]
    only: String,
    /// Timed seconds of a point.
    #[arg(long, default_value_t = 0.3, value_parser = positive)]
    seconds: f64,
    /// The record, JSON lines; one that is there is taken up, and its points are not run again.
    #[arg(long)]
    out: Option<PathBuf>,
    /// A table of all rows of the record, CSV.
    #[arg(long)]
    csv: Option<PathBuf>,
}

/// Why a sweep, or a point of it, ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SweepError {
    /// The suite.
    #[error(transparent)]
    Suite(#[from] SuiteError),
    /// The record.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// A problem or its data.
    #[error(transparent)]
    Call(#[from] attn_core::Error),
    /// The engine.
    #[error(transparent)]
    Engine(#[from] attn_kernels::Error),
    /// The selector.
    #[error(transparent)]
    Select(#[from] attn_select::Error),
    /// The matrix product that is a ceiling.
    #[error("ceiling: {0}")]
    Ceiling(#[from] candle_core::Error),
    /// Writing to the terminal.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// No point has such a name.
    #[error("only: expected part of a point's name, got {0:?}")]
    NoPoint(String),
    /// An output is wrong, so it is not timed.
    #[error("{id}: expected {want} within {limit:.1e}, got {got}; a wrong kernel is not timed")]
    Wrong {
        /// The point.
        id: String,
        /// Engine.
        got: f64,
        /// Reference.
        want: f64,
        /// The most that is accepted.
        limit: f64,
    },
    /// Points whose calls failed.
    #[error("{failed} of {points} points failed; the record says why")]
    Failed {
        /// So many.
        failed: usize,
        /// Of so many.
        points: usize,
    },
}

/// Runs what the record does not have yet.
pub(crate) fn run(args: &Args) -> Result<(), SweepError> {
    let suite = Suite::read(&args.suite)?;
    let points: Vec<&Point> =
        suite.points.iter().filter(|point| point.id().contains(&args.only)).collect();
    if points.is_empty() {
        return Err(SweepError::NoPoint(args.only.clone()));
    }
    let engine = CpuEngine::new()?;
    let mut record = Record::open(args.out.as_deref(), &Machine::detect(&engine), &suite)?;
    let todo: Vec<_> = points.iter().filter(|point| !record.has(&point.id())).collect();
    let progress = progress(todo.len());
    let (gemm, read) = (Gemm::new()?, Read::new());
    let host = Host { engine: &engine, seconds: args.seconds };
    for point in todo {
        progress.set_message(point.id());
        let ceilings = Ceilings {
            matmul_tflops: gemm.measure()? / 1e3,
            read_gbps: read.measure(&engine, false),
        };
        let outcome = match point.refusal() {
            Some(why) => Outcome::Refused { why: why.to_owned() },
            None => outcome(host.measure(point, ceilings)),
        };
        record.add(Row { id: point.id(), point: **point, ceilings, outcome })?;
        progress.inc(1);
    }
    progress.finish_and_clear();
    if let Some(path) = &args.csv {
        record.write_table(path)?;
    }
    let rows: Vec<&Row> = record.rows().iter().filter(|row| row.id.contains(&args.only)).collect();
    print(&rows)?;
    let failed = rows.iter().filter(|row| matches!(row.outcome, Outcome::Failed { .. })).count();
    if failed > 0 {
        return Err(SweepError::Failed { failed, points: rows.len() });
    }
    Ok(())
}

fn outcome(measured: Result<row::Measured, SweepError>) -> Outcome {
    match measured {
        Ok(measured) => Outcome::Measured(measured),
        Err(error @ SweepError::Select(_)) => Outcome::Refused { why: error.to_string() },
        Err(error) => Outcome::Failed { why: error.to_string() },
    }
}

fn progress(points: usize) -> ProgressBar {
    let bar = ProgressBar::new(points as u64);
    match ProgressStyle::with_template("{pos}/{len} {wide_bar} {eta} left  {msg}") {
        Ok(style) => bar.with_style(style),
        // The template is a constant; without it the bar is the crate's own.
        Err(_) => bar,
    }
}

/// A table a phase.
fn print(rows: &[&Row]) -> io::Result<()> {
    let out = &mut io::stdout().lock();
    for (phase, name) in [(Phase::Prefill, "prefill"), (Phase::Decode, "decode")] {
        let rows: Vec<_> = rows.iter().filter(|row| row.point.phase == phase).collect();
        if rows.is_empty() {
            continue;
        }
        writeln!(
            out,
            "{name}\n  {:>10} {:>10} {:>10} {:>9} {:>5} {:>8} {:>5}  kernel, point",
            "p50 us", "p95", "p99", "GFLOP/s", "share", "GB/s", "share"
        )?;
        for row in rows {
            match &row.outcome {
                Outcome::Measured(m) => writeln!(
                    out,
                    "  {:>10.1} {:>10.1} {:>10.1} {:>9.1} {:>5.2} {:>8.2} {:>5.2}  {} {}",
                    m.times.p50_us,
                    m.times.p95_us,
                    m.times.p99_us,
                    m.tflops * 1e3,
                    m.matmul_share,
                    m.gbps,
                    m.read_share,
                    m.kernel,
                    row.id
                )?,
                Outcome::Refused { why } => writeln!(out, "  refused: {}: {why}", row.id)?,
                Outcome::Failed { why } => writeln!(out, "  failed: {}: {why}", row.id)?,
            }
        }
    }
    Ok(())
}

fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse().map_err(|_| format!("expected seconds above 0, got {text:?}"))?;
    if f64::is_finite(number) && number > 0.0 {
        Ok(number)
    } else {
        Err(format!("expected seconds above 0, got {number}"))
    }
}
