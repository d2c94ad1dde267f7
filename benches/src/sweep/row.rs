//! What a sweep says of a point.
//!
//! The invariant: a row is measured, refused or failed, and says which; the same fields are a line of JSON and a row of the
//! table, where what a row has not got is empty.

use serde::{Deserialize, Serialize};

use super::point::{Phase, Point};

/// What the machine gave in the same run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Ceilings {
    /// TFLOP/s of a large f32 matrix product.
    pub(crate) matmul_tflops: f64,
    /// GB/s of reading memory once.
    pub(crate) read_gbps: f64,
}

/// Times of calls, microseconds, by nearest rank.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Times {
    pub(crate) p50_us: f64,
    pub(crate) p95_us: f64,
    pub(crate) p99_us: f64,
    /// Calls timed; with fewer than 20 or 100 the upper ones are the largest.
    pub(crate) calls: usize,
}

impl Times {
    /// Of at least one time.
    pub(crate) fn of(mut us: Vec<f64>) -> Self {
        us.sort_by(f64::total_cmp);
        let rank = |per_cent: usize| {
            let rank = (us.len() * per_cent).div_ceil(100).max(1);
            us.get(rank - 1).copied().unwrap_or(f64::NAN)
        };
        Self { p50_us: rank(50), p95_us: rank(95), p99_us: rank(99), calls: us.len() }
    }
}

/// A point that ran.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Measured {
    pub(crate) kernel: String,
    /// Why this kernel, in the selector's words.
    pub(crate) reason: String,
    /// Query rows and keys of a tile.
    pub(crate) tile: String,
    pub(crate) split: String,
    #[serde(flatten)]
    pub(crate) times: Times,
    pub(crate) tflops: f64,
    /// Of the matrix product's.
    pub(crate) matmul_share: f64,
    /// Of q, k, v and o, each once.
    pub(crate) gbps: f64,
    /// Of a memory read's.
    pub(crate) read_share: f64,
    /// Workspace.
    pub(crate) temp_bytes: u64,
    /// Choosing the kernel, once.
    pub(crate) select_us: f64,
    /// Largest error of the sampled rows.
    pub(crate) max_error: f64,
}

/// How a point ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "lowercase")]
pub(crate) enum Outcome {
    Measured(Measured),
    /// No kernel is offered for it.
    Refused {
        why: String,
    },
    /// Its call failed, or its output is wrong.
    Failed {
        why: String,
    },
}

/// A line of the record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Row {
    pub(crate) id: String,
    #[serde(flatten)]
    pub(crate) point: Point,
    pub(crate) ceilings: Ceilings,
    #[serde(flatten)]
    pub(crate) outcome: Outcome,
}

/// The table's columns, in the order of [`Row::cells`].
pub(crate) const COLUMNS: &[&str] = &[
    "id",
    "phase",
    "outcome",
    "kernel",
    "tile",
    "split",
    "p50_us",
    "p95_us",
    "p99_us",
    "calls",
    "tflops",
    "matmul_share",
    "gbps",
    "read_share",
    "temp_bytes",
    "select_us",
    "max_error",
    "why",
];

impl Row {
    /// The row's cells.
    pub(crate) fn cells(&self) -> Vec<String> {
        let phase = match self.point.phase {
            Phase::Prefill => "prefill",
            Phase::Decode => "decode",
        };
        let start = [self.id.clone(), phase.to_owned()];
        let rest = match &self.outcome {
            Outcome::Measured(m) => vec![
                "measured".to_owned(),
                m.kernel.clone(),
                m.tile.clone(),
                m.split.clone(),
                m.times.p50_us.to_string(),
                m.times.p95_us.to_string(),
                m.times.p99_us.to_string(),
                m.times.calls.to_string(),
                m.tflops.to_string(),
                m.matmul_share.to_string(),
                m.gbps.to_string(),
                m.read_share.to_string(),
                m.temp_bytes.to_string(),
                m.select_us.to_string(),
                m.max_error.to_string(),
                m.reason.clone(),
            ],
            Outcome::Refused { why } => short("refused", why),
            Outcome::Failed { why } => short("failed", why),
        };
        start.into_iter().chain(rest).collect()
    }
}

/// The cells of a row without figures, from its outcome on.
fn short(outcome: &str, why: &str) -> Vec<String> {
    let empty = COLUMNS.len() - 4;
    let mut cells = vec![outcome.to_owned()];
    cells.resize(1 + empty, String::new());
    cells.push(why.to_owned());
    cells
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_ranks_of_the_sorted_times() {
        let times = Times::of((1..=200).rev().map(f64::from).collect());
        assert_eq!(
            (times.p50_us, times.p95_us, times.p99_us, times.calls),
            (100.0, 190.0, 198.0, 200)
        );
        let few = Times::of(vec![3.0, 1.0, 2.0]);
        assert_eq!((few.p50_us, few.p95_us, few.p99_us), (2.0, 3.0, 3.0));
    }

    #[test]
    fn rows_without_figures_have_as_many_cells() {
        assert_eq!(short("refused", "why").len() + 2, COLUMNS.len());
    }
}
