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
    #[serde(flatten)]
    pub(super) work: Work,
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

/// What an earlier run leaves to one that takes over from it.
#[derive(Debug, Default)]
pub(super) struct Earlier {
    /// The groups that passed whole.
    pub(super) groups: BTreeMap<String, Tallies>,
    pub(super) work: Work,
}

/// What a run had to do, those before it that it took over from included.
#[derive(Debug, Default, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Work {
    /// Kernel instances that the runs needed, and the seconds it took to have them.
    pub(super) instances: usize,
    pub(super) compile_seconds: f64,
    /// Seconds of judging.
    pub(super) seconds: f64,
}

impl Work {
    pub(super) fn add(self, other: Self) -> Self {
        Self {
            instances: self.instances + other.instances,
            compile_seconds: self.compile_seconds + other.compile_seconds,
            seconds: self.seconds + other.seconds,
        }
    }
}

/// What is left of an earlier record, if it judged the same sources on the same device: nothing otherwise.
///
/// # Errors
/// A file that cannot be read or is no record.
pub(super) fn earlier(path: &Path, device: &Device) -> io::Result<Earlier> {
    #[derive(Deserialize)]
    struct Read {
        gpu: String,
        sources: String,
        small: bool,
        #[serde(flatten)]
        work: Work,
        groups: BTreeMap<String, Tallies>,
    }
    let read: Read = serde_json::from_slice(&fs::read(path)?)?;
    let same =
        read.gpu == device.gpu && read.sources == device.sources && read.small == device.small;
    if !same {
        return Ok(Earlier::default());
    }
    let groups = read.groups.into_iter().filter(|(_, group)| group.is_complete()).collect();
    Ok(Earlier { groups, work: read.work })
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
            // No short decimal: a reader that rounds gives another number back.
            work: Work { instances: 3, compile_seconds: 0.1 + 0.2, seconds: 1.1e-8 / 3.0 },
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
            let groups = earlier(&path, &device(sources)).unwrap().groups;
            groups.into_iter().map(|(name, group)| (name, group.sum(|t| t.passed))).collect()
        };
        let (same, other): (Vec<_>, Vec<_>) = (names("x"), names("y"));
        let work = |sources| earlier(&path, &device(sources)).unwrap().work;
        let (same_work, other_work) = (work("x"), work("y"));
        fs::remove_file(&path).unwrap();
        assert_eq!((same_work, other_work), (device("x").work, Work::default()));
        assert_eq!(same, [("good".to_owned(), 1)]);
        assert_eq!(other, []);
    }

    #[test]
    fn work_of_runs_adds_up() {
        let run = Work { instances: 3, compile_seconds: 0.5, seconds: 2.0 };
        let both = Work { instances: 4, compile_seconds: 1.0, seconds: 2.25 };
        let rest = Work { instances: 1, compile_seconds: 0.5, seconds: 0.25 };
        assert_eq!((run.add(rest), run.add(Work::default())), (both, run));
    }

    /// Shares of an error that are carried from record to record must not drift.
    #[test]
    fn floats_are_read_as_they_were_written() {
        let mut bits = 0x3FB9_9999_9999_999Au64;
        for _ in 0..20_000 {
            bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1) >> 2 | 1 << 61;
            let float = f64::from_bits(bits);
            let text = serde_json::to_string(&float).unwrap();
            let read: f64 = serde_json::from_str(&text).unwrap();
            assert_eq!(read.to_bits(), bits, "{text}");
        }
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
