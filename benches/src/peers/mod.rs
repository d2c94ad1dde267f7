//! Our CPU engine beside its peers, in one run: PyTorch, candle-nn, a matrix product, a memory read.
//!
//! The invariant: contestants take turns, round by round, on an otherwise idle process, and a ratio is
//! the median of per-round ratios. Absolute figures of a shared machine move by tens of percent between
//! runs; ratios inside one run are what a record is for.

#[cfg(feature = "peers")]
mod candle;
mod case;
pub(crate) mod ceiling;
mod ours;
mod torch;

use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;

use attn_kernels::cpu::CpuEngine;
use serde_json::{Value, json};

use crate::machine::Machine;
use case::{Case, Kind};
use ceiling::{Gemm, Read};
use ours::Ours;
use torch::Torch;

/// Options of `attn-bench peers`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// A Python that has PyTorch; without it PyTorch is named as missing.
    #[arg(long)]
    python: Option<PathBuf>,
    /// How often every contestant takes its turn.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Only cases whose name contains this.
    #[arg(long, default_value = "")]
    only: String,
    /// Where to write the record, as JSON lines.
    #[arg(long)]
    out: Option<PathBuf>,
}

/// Why the comparison ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PeersError {
    /// A problem or its data.
    #[error(transparent)]
    Call(#[from] attn_core::Error),
    /// The engine.
    #[error(transparent)]
    Engine(#[from] attn_kernels::Error),
    /// The selector.
    #[error(transparent)]
    Select(#[from] attn_select::Error),
    /// candle.
    #[error("candle: {0}")]
    Candle(#[from] candle_core::Error),
    /// Files and the Python child.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// No case has such a name.
    #[error("only: expected part of a case's name, got {0:?}")]
    NoCase(String),
    /// The output of a case is wrong, so it is not timed.
    #[error("{case}: expected {want}, got {got}; a wrong kernel is not timed")]
    Wrong {
        /// The case.
        case: String,
        /// Engine.
        got: f64,
        /// Reference.
        want: f64,
    },
}

/// One contestant's times of one case, a median for each round.
#[derive(Debug)]
struct Series {
    name: String,
    kernel: Option<&'static str>,
    rates: Vec<f64>,
}

/// Runs every case and writes the record.
pub(crate) fn run(args: &Args) -> Result<(), PeersError> {
    let out = &mut io::stdout().lock();
    let engine = CpuEngine::new()?;
    let machine = Machine::detect(&engine);
    let threads = machine.threads;
    let mut torch =
        args.python.as_deref().map(|python| Torch::start(python, threads)).transpose()?;
    let mut record = args.out.as_ref().map(File::create).transpose()?;
    let header = json!({ "machine": machine, "rounds": args.rounds,
        "torch": torch.as_ref().map(Torch::name), "candle": cfg!(feature = "peers") });
    write_line(&mut record, &header)?;
    writeln!(out, "{header}")?;
    if torch.is_none() {
        writeln!(out, "PyTorch: missing (no --python)")?;
    }
    if cfg!(not(feature = "peers")) {
        writeln!(out, "candle-nn: missing (built without the feature `peers`)")?;
    }
    let cases: Vec<Case> =
        Case::all().into_iter().filter(|case| case.id().contains(&args.only)).collect();
    if cases.is_empty() {
        return Err(PeersError::NoCase(args.only.clone()));
    }
    let (gemm, read) = (Gemm::new()?, Read::new());
    for case in cases {
        let all = compare(&case, &engine, torch.as_mut(), (&gemm, &read), args.rounds)?;
        writeln!(out, "{} [{}]", case.id(), case.unit())?;
        for series in &all {
            let rate = median(&series.rates);
            let ratio = median_ratio(&all[0].rates, &series.rates);
            writeln!(out, "  {:<28} {rate:>8.2}   ours is {ratio:.2} of it", series.name)?;
            write_line(
                &mut record,
                &json!({ "case": case, "id": case.id(), "contestant": series.name,
                    "kernel": series.kernel, "unit": case.unit(), "median": rate, "rounds": series.rates,
                    "ours_over_this": ratio }),
            )?;
        }
        out.flush()?;
    }
    Ok(())
}

fn compare(
    case: &Case,
    engine: &CpuEngine,
    mut torch: Option<&mut Torch>,
    (gemm, read): (&Gemm, &Read),
    rounds: usize,
) -> Result<Vec<Series>, PeersError> {
    let mut ours = Ours::new(case, engine)?;
    let series = |name: &str| Series { name: name.to_owned(), kernel: None, rates: Vec::new() };
    let mut mine = series("attn");
    mine.kernel = Some(ours.kernel());
    let mut ceiling = series(match case.kind {
        Kind::Prefill => "gemm crate, f32 2048^3",
        Kind::Decode => "memory read",
    });
    let mut fetched = series("memory read with prefetches");
    let mut peer = torch.as_ref().map(|torch| series(torch.name()));
    #[cfg(feature = "peers")]
    let (candle, mut candle_series) = (candle::Candle::new(case)?, series("candle-nn flash_attn"));
    // About a third of a second for each turn of ours, and the same number of calls for PyTorch.
    let once = ours.time(engine)?;
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped")]
    let calls = (300.0 / once).clamp(1.0, 50.0) as usize;
    for _ in 0..rounds {
        let times: Result<Vec<f64>, _> = (0..calls).map(|_| ours.time(engine)).collect();
        mine.rates.push(case.rate(median(&times?)));
        if let (Some(torch), Some(peer)) = (torch.as_deref_mut(), &mut peer) {
            torch.time(case, 1)?;
            peer.rates.push(case.rate(median(&torch.time(case, calls)?)));
        }
        ceiling.rates.push(match case.kind {
            Kind::Prefill => gemm.measure()?,
            Kind::Decode => {
                fetched.rates.push(read.measure(engine, true));
                read.measure(engine, false)
            }
        });
        // candle has no f32 decode over several sequences with grouped heads worth waiting for.
        #[cfg(feature = "peers")]
        if case.kind == Kind::Prefill && case.dtype == "f32" {
            candle_series.rates.push(case.rate(candle.time(case)?));
        }
    }
    let mut all = vec![mine, ceiling];
    if !fetched.rates.is_empty() {
        all.push(fetched);
    }
    all.extend(peer);
    #[cfg(feature = "peers")]
    if !candle_series.rates.is_empty() {
        all.push(candle_series);
    }
    Ok(all)
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

fn median_ratio(ours: &[f64], other: &[f64]) -> f64 {
    let ratios: Vec<f64> = ours.iter().zip(other).map(|(a, b)| a / b).collect();
    median(&ratios)
}

fn write_line(record: &mut Option<File>, line: &Value) -> io::Result<()> {
    match record {
        Some(file) => writeln!(file, "{line}"),
        None => Ok(()),
    }
}
