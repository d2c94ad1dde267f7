//! What the demo's attention calls cost, phase by phase.
//!
//! The invariant: a row of the printed table is a sum of calls that really ran, each entered once
//! with its plan; rates are derived from the sums and nothing is typed in.

use std::fmt::Write as _;
use std::time::Duration;

use attn_core::{Bytes, Plan};
use attn_paged::Stats;

/// The calls of one kernel in one phase.
#[derive(Debug, Clone)]
struct Row {
    phase: &'static str,
    kernel: &'static str,
    reason: &'static str,
    calls: u64,
    time: Duration,
    bytes: u64,
    flops: u64,
    workspace: Bytes,
    worst: Option<f64>,
    blocks: Option<BlockCounts>,
}

/// Cache blocks at the end of a phase.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockCounts {
    used: usize,
    wasted: f64,
    shared: usize,
}

impl From<Stats> for BlockCounts {
    fn from(stats: Stats) -> Self {
        Self {
            used: stats.held,
            wasted: stats.wasted_slots as f64 / stats.block_size as f64,
            shared: stats.shared,
        }
    }
}

/// One finished call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Call<'p> {
    pub(crate) phase: &'static str,
    /// Kernel that ran.
    pub(crate) kernel: &'static str,
    /// Why it did.
    pub(crate) reason: &'static str,
    pub(crate) plan: &'p Plan,
    pub(crate) time: Duration,
    /// Bytes of keys, values, queries and outputs, each once.
    pub(crate) bytes: u64,
    /// Scratch that the engine held.
    pub(crate) workspace: Bytes,
    /// Worst absolute error against the f64 reference, where this call was sampled.
    pub(crate) worst: Option<f64>,
}

/// All rows.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    rows: Vec<Row>,
}

impl Ledger {
    /// Enters one call.
    pub(crate) fn enter(&mut self, call: Call<'_>) {
        let Call { phase, kernel, reason, plan, time, bytes, workspace, worst } = call;
        let row = self.row(phase, kernel, reason);
        row.calls += 1;
        row.time += time;
        row.bytes += bytes;
        row.flops += plan.problem.flops();
        row.workspace = row.workspace.max(workspace);
        row.worst = match (row.worst, worst) {
            (Some(a), Some(b)) => Some(a.max(b)),
            (a, b) => a.or(b),
        };
    }

    /// Notes the cache's blocks at the end of a phase.
    pub(crate) fn note_blocks(&mut self, phase: &'static str, stats: Stats) {
        for row in self.rows.iter_mut().filter(|row| row.phase == phase) {
            row.blocks = Some(stats.into());
        }
    }

    /// Total time in attention.
    pub(crate) fn time(&self) -> Duration {
        self.rows.iter().map(|row| row.time).sum()
    }

    /// The worst error of any sampled call.
    #[cfg(test)]
    pub(crate) fn worst(&self) -> Option<f64> {
        self.rows.iter().filter_map(|row| row.worst).max_by(f64::total_cmp)
    }

    /// The kernels that ran, in order of first use.
    #[cfg(test)]
    pub(crate) fn kernels(&self) -> Vec<(&'static str, &'static str)> {
        self.rows.iter().map(|row| (row.phase, row.kernel)).collect()
    }

    /// The table, one line a row.
    pub(crate) fn table(&self) -> String {
        let head = [
            "phase",
            "kernel",
            "calls",
            "time",
            "GB/s",
            "GFLOP/s",
            "scratch",
            "blocks used",
            "wasted",
            "shared",
            "worst error",
            "why",
        ];
        let mut lines = vec![head.map(str::to_owned).to_vec()];
        lines.extend(self.rows.iter().map(Row::cells));
        let widths: Vec<usize> = (0..head.len())
            .map(|column| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0))
            .collect();
        let mut text = String::new();
        for line in &lines {
            for (column, (cell, &width)) in line.iter().zip(&widths).enumerate() {
                let last = column + 1 == widths.len();
                // Writing to a string cannot fail.
                let _ = match (column, last) {
                    (_, true) => writeln!(text, "{cell}"),
                    (0 | 1, false) => write!(text, "{cell:<width$}  "),
                    _ => write!(text, "{cell:>width$}  "),
                };
            }
        }
        text
    }

    fn row(&mut self, phase: &'static str, kernel: &'static str, reason: &'static str) -> &mut Row {
        let found = self.rows.iter().position(|r| r.phase == phase && r.kernel == kernel);
        let at = found.unwrap_or_else(|| {
            self.rows.push(Row {
                phase,
                kernel,
                reason,
                calls: 0,
                time: Duration::ZERO,
                bytes: 0,
                flops: 0,
                workspace: Bytes::ZERO,
                worst: None,
                blocks: None,
            });
            self.rows.len() - 1
        });
        &mut self.rows[at]
    }
}

impl Row {
    fn cells(&self) -> Vec<String> {
        let seconds = self.time.as_secs_f64();
        let rate = |count: u64| format!("{:.1}", count as f64 / seconds.max(1e-12) / 1e9);
        let blocks = |f: fn(&BlockCounts) -> String| self.blocks.as_ref().map_or_else(dash, f);
        vec![
            self.phase.to_owned(),
            self.kernel.to_owned(),
            self.calls.to_string(),
            format!("{:.1} ms", seconds * 1e3),
            rate(self.bytes),
            rate(self.flops),
            self.workspace.to_string(),
            blocks(|b| b.used.to_string()),
            blocks(|b| format!("{:.1}", b.wasted)),
            blocks(|b| b.shared.to_string()),
            self.worst.map_or_else(dash, |e| format!("{e:.1e}")),
            self.reason.to_owned(),
        ]
    }
}

fn dash() -> String {
    "-".to_owned()
}
