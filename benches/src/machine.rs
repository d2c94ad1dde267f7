//! What a record says of the machine it was made on.
//!
//! The invariant: facts are read, not configured; what cannot be read is absent.

use std::time::{SystemTime, UNIX_EPOCH};

use attn_kernels::cpu::CpuEngine;
use serde::Serialize;

/// The machine of a record.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Machine {
    /// Day of the run, `YYYY-MM-DD`, UTC.
    pub(crate) date: String,
    /// The processor's name for itself.
    pub(crate) cpu: Option<String>,
    /// Worker threads.
    pub(crate) threads: usize,
    /// Instruction set in use.
    pub(crate) level: &'static str,
    /// Second-level cache of a core, bytes.
    pub(crate) l2: u64,
}

impl Machine {
    /// Reads the facts.
    pub(crate) fn detect(engine: &CpuEngine) -> Self {
        let host = engine.caps().host;
        Self {
            date: today(),
            cpu: cpu_name(),
            threads: host.threads,
            level: engine.level().name(),
            l2: host.l2.0,
        }
    }
}

/// Today, `YYYY-MM-DD`, UTC.
pub(crate) fn today() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    date(seconds / 86_400)
}

/// The version of the NVIDIA driver that is loaded.
pub(crate) fn driver() -> Option<String> {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    driver_in(&text).map(str::to_owned)
}

/// The first word of digits and dots of the driver's own line.
fn driver_in(text: &str) -> Option<&str> {
    let is_version = |word: &&str| {
        word.contains('.') && word.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.')
    };
    text.lines().next()?.split_whitespace().find(is_version)
}

fn cpu_name() -> Option<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let field = |name: &str| {
        let line = info.lines().find(|line| line.starts_with(name))?;
        line.split_once(':').map(|(_, value)| value.trim().to_owned())
    };
    let name = field("model name")?;
    match (field("cpu family"), field("model\t")) {
        (Some(family), Some(model)) => Some(format!("{name} (family {family}, model {model})")),
        _ => Some(name),
    }
}

/// The civil date of a day since 1970-01-01.
///
/// Source: Hinnant, "chrono-Compatible Low-Level Date Algorithms", `civil_from_days`.
fn date(days: u64) -> String {
    let z = days + 719_468;
    let (era, day_of_era) = (z / 146_097, z % 146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_version_is_found_in_its_line() {
        let line = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (dvs)\n\
                    GCC version:  gcc version 12.3.0\n";
        assert_eq!(driver_in(line), Some("580.159.04"));
        assert_eq!(driver_in("no version"), None);
    }

    #[test]
    fn date_knows_leap_days() {
        assert_eq!(date(0), "1970-01-01");
        assert_eq!(date(11_016), "2000-02-29");
        assert_eq!(date(20_786), "2026-11-29");
    }
}
