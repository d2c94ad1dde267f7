//! What was judged, as it is kept: counts by family and group, how close the worst output came, what failed.
//!
//! The invariant: every judged call is counted once as passed, failed or skipped, and a call that was never
//! made is counted as unfinished; nothing is left out silently. Groups are kept apart so that a later run
//! can take over those that passed, which a single sum would not allow.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::machine::Machine;

/// Most failures that a record holds; their number is in the counts.
const KEPT_FAILURES: usize = 50;

/// The figures of one family.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub(super) struct Tally {
    pub(super) passed: usize,
    pub(super) failed: usize,
    pub(super) skipped: usize,
    /// Worst error as a share of its limit.
    pub(super) worst_share: f64,
    /// Where that was.
    pub(super) worst_case: String,
}

impl Tally {
    fn add(&mut self, other: &Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
        if other.worst_share >= self.worst_share && !other.worst_case.is_empty() {
            self.worst_share = other.worst_share;
            self.worst_case.clone_from(&other.worst_case);
        }
    }
}

/// Tallies by family, and what failed.
#[derive(Debug, Default, Clone, Serialize, Deserialize)]
pub(super) struct Tallies {
    pub(super) families: BTreeMap<String, Tally>,
    /// Calls that were not made, because the time was up.
    #[serde(default)]
    pub(super) unfinished: usize,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) failures: Vec<String>,
}

impl Tallies {
    pub(super) fn skip(&mut self, family: &str) {
        self.families.entry(family.to_owned()).or_default().skipped += 1;
    }

    /// Enters the outcome of one judged call: how close each output came, or what failed.
    pub(super) fn enter(&mut self, family: &str, case: &str, outcome: Result<f64, String>) {
        let tally = self.families.entry(family.to_owned()).or_default();
        match outcome {
            Ok(share) => {
                tally.passed += 1;
                if share >= tally.worst_share {
                    tally.worst_share = share;
                    case.clone_into(&mut tally.worst_case);
                }
            }
            Err(failure) => {
                tally.failed += 1;
                if self.failures.len() < KEPT_FAILURES {
                    self.failures.push(format!("{family}: {failure}"));
                }
            }
        }
    }

    pub(super) fn add(&mut self, other: &Self) {
        for (family, tally) in &other.families {
            self.families.entry(family.clone()).or_default().add(tally);
        }
        self.unfinished += other.unfinished;
        let room = KEPT_FAILURES.saturating_sub(self.failures.len());
        self.failures.extend(other.failures.iter().take(room).cloned());
    }

    pub(super) fn sum(&self, of: fn(&Tally) -> usize) -> usize {
        self.families.values().map(of).sum()
    }

    /// Whether every call was made and none failed.
    pub(super) fn is_complete(&self) -> bool {
        self.unfinished == 0 && self.sum(|t| t.failed) == 0
    }
}

/// The device and programs of a CUDA record.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Device {
    /// Day of the run, UTC.
    pub(super) date: String,
    pub(super) gpu: String,
    pub(super) compute: String,
    pub(super) driver: String,
    /// The compiler of the kernels; absent where all came compiled.
    pub(super) nvrtc: Option<String>,
    /// The hash of the kernels' sources.
    pub(super) sources: String,
    /// Whether this is the reduced matrix.
    pub(super) small: bool,
    /// Kernel instances that the matrix needs, and the seconds it took to have them.
    pub(super) instances: usize,
    pub(super) compile_seconds: f64,
    /// Seconds of judging.
    pub(super) seconds: f64,
}

/// What was judged.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Subject {
    Host { machine: Machine, levels: Vec<&'static str> },
    Cuda(Device),
}

/// A record.
#[derive(Debug, Serialize)]
pub(super) struct Record {
    backend: &'static str,
    #[serde(flatten)]
    subject: Subject,
    pub(super) passed: usize,
    pub(super) failed: usize,
    skipped: usize,
    pub(super) unfinished: usize,
    families: BTreeMap<String, Tally>,
    failures: Vec<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    groups: BTreeMap<String, Tallies>,
}

impl Record {
    pub(super) fn new(
        backend: &'static str,
        subject: Subject,
        all: &Tallies,
        groups: BTreeMap<String, Tallies>,
    ) -> Self {
        Self {
            backend,
            subject,
            passed: all.sum(|t| t.passed),
            failed: all.sum(|t| t.failed),
            skipped: all.sum(|t| t.skipped),
            unfinished: all.unfinished,
            families: all.families.clone(),
            failures: all.failures.clone(),
            groups,
        }
    }

    pub(super) fn print(&self) -> io::Result<()> {
        let out = &mut io::stdout().lock();
        for failure in self.failures.iter().take(20) {
            writeln!(out, "{failure}")?;
        }
        for (family, t) in &self.families {
            writeln!(
                out,
                "{family:<10} {} passed, {} failed, {} skipped; worst error {:.0} % of its limit, {}",
                t.passed,
                t.failed,
                t.skipped,
                t.worst_share * 100.0,
                t.worst_case
            )?;
        }
        write!(out, "{} passed, {} failed, ", self.passed, self.failed)?;
        writeln!(out, "{} skipped, {} unfinished", self.skipped, self.unfinished)
    }

    /// Writes the record, at once: a run that is killed leaves the last whole one.
    pub(super) fn write(&self, path: &Path) -> io::Result<()> {
        let mut text = serde_json::to_vec_pretty(self)?;
        text.push(b'\n');
        let draft = path.with_extension("part");
        fs::write(&draft, text)?;
        fs::rename(&draft, path)
    }
}

/// The groups of an earlier record that passed whole, if it judged the same sources on the same device.
///
/// # Errors
/// A file that cannot be read or is no record.
pub(super) fn passed_groups(path: &Path, device: &Device) -> io::Result<BTreeMap<String, Tallies>> {
    #[derive(Deserialize)]
    struct Earlier {
        gpu: String,
        sources: String,
        small: bool,
        groups: BTreeMap<String, Tallies>,
    }
    let earlier: Earlier = serde_json::from_slice(&fs::read(path)?)?;
    let same = earlier.gpu == device.gpu
        && earlier.sources == device.sources
        && earlier.small == device.small;
    if !same {
        return Ok(BTreeMap::new());
    }
    Ok(earlier.groups.into_iter().filter(|(_, group)| group.is_complete()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(sources: &str) -> Device {
        Device {
            date: "2026-01-01".to_owned(),
            gpu: "a gpu".to_owned(),
            compute: "9.0".to_owned(),
            driver: "1".to_owned(),
            nvrtc: None,
            sources: sources.to_owned(),
            small: false,
            instances: 0,
            compile_seconds: 0.0,
            seconds: 0.0,
        }
    }

    #[test]
    fn record_gives_back_only_groups_that_passed_on_the_same_sources() {
        let (mut good, mut bad, mut cut) =
            (Tallies::default(), Tallies::default(), Tallies::default());
        good.enter("prefill", "a", Ok(0.5));
        good.skip("decode");
        bad.enter("prefill", "b", Err("wrong".to_owned()));
        cut.enter("prefill", "c", Ok(0.1));
        cut.unfinished = 1;
        let mut all = Tallies::default();
        for group in [&good, &bad, &cut] {
            all.add(group);
        }
        assert_eq!((all.sum(|t| t.passed), all.sum(|t| t.failed), all.unfinished), (2, 1, 1));
        let groups = [("good", good), ("bad", bad), ("cut", cut)];
        let groups = groups.map(|(name, group)| (name.to_owned(), group)).into();
        let record = Record::new("cuda", Subject::Cuda(device("x")), &all, groups);
        let path = std::env::temp_dir().join(format!("attn-record-{}.json", std::process::id()));
        record.write(&path).unwrap();
        let names = |sources| {
            let groups = passed_groups(&path, &device(sources)).unwrap();
            groups.into_iter().map(|(name, group)| (name, group.sum(|t| t.passed))).collect()
        };
        let (same, other): (Vec<_>, Vec<_>) = (names("x"), names("y"));
        fs::remove_file(&path).unwrap();
        assert_eq!(same, [("good".to_owned(), 1)]);
        assert_eq!(other, []);
    }

    #[test]
    fn tally_keeps_the_worst_share_and_its_case() {
        let (mut a, mut b) = (Tallies::default(), Tallies::default());
        a.enter("naive", "near", Ok(0.9));
        b.enter("naive", "far", Ok(0.2));
        b.add(&a);
        let tally = &b.families["naive"];
        assert_eq!((tally.worst_share, tally.worst_case.as_str(), tally.passed), (0.9, "near", 2));
    }
}
