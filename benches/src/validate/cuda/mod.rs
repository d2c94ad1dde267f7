//! The CUDA engine on a device: corpus, matrix, long rows, modes of execution, and the kernels around attention.
//!
//! The invariant: references are computed by the host's threads while the device works, so that the whole matrix
//! ends in minutes; nothing else runs at the same time, and each call's outputs and workspace are full of NaN before
//! it. What the time did not allow is in the record as unfinished.

pub(super) mod backward;
mod cache;
mod cascade;
mod dropout;
mod forward;
mod long;
mod merge;
mod model;
mod modes;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use attn_core::{Outputs, Plan, Problem};
use attn_kernels::Error;
use attn_kernels::cuda::{self, Workspace};
use attn_kernels::spec::KernelSpec;
use attn_reference::{Case, CaseData};
use rayon::prelude::*;

use super::matrix::{self, Group, Runs};
use super::record::{Device, Earlier, Record, Subject, Tallies, Work, earlier};
use super::{Args, ValidateError, serving};
use crate::device::{DeviceInputs, Gpu};
use crate::machine;
use forward::{Attempt, Selection};

/// Everything that judging needs.
#[derive(Debug)]
struct Judge<'a> {
    gpu: Gpu,
    workspace: Workspace,
    selection: Selection,
    /// The family asked for.
    wanted: Option<&'a str>,
    /// Part of the names asked for.
    only: &'a str,
    is_small: bool,
    deadline: Option<Instant>,
}

impl Judge<'_> {
    fn forward(
        &mut self,
        plan: &Plan,
        inputs: &DeviceInputs,
        outputs: &mut Outputs<'_>,
    ) -> Result<(), Error> {
        self.gpu.forward(plan, inputs, outputs, &mut self.workspace)
    }

    fn is_late(&self) -> bool {
        self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }

    /// Whether a family was asked for.
    fn wants_family(&self, family: &str) -> bool {
        self.wanted.is_none_or(|wanted| wanted == family)
    }

    /// Whether a check of a family, by a name, was asked for.
    fn wants(&self, family: &str, name: &str) -> bool {
        self.wants_family(family) && name.contains(self.only)
    }

    /// Every way to run a problem that is of a family asked for.
    fn attempts(&self, problem: &Problem, runs: Runs) -> Vec<Attempt> {
        let mut attempts = self.selection.attempts(problem, runs);
        attempts.retain(|attempt| self.wants_family(attempt.family));
        attempts
    }

    /// How many calls a case is.
    fn calls(&self, case: &Case, runs: Runs) -> usize {
        case.problem().map_or(1, |problem| self.attempts(&problem, runs).len())
    }

    /// Whether a group of checks may hold one of the family that was asked for: two have kernels of attention, the
    /// others are of the family of their own name.
    fn meets(&self, group: &str) -> bool {
        self.wanted.is_none_or(|wanted| match group {
            "backward" => backward::FAMILIES.contains(&wanted),
            "long" | "modes" => {
                !SPECIALS.iter().any(|(name, _)| *name == wanted)
                    && !backward::FAMILIES.contains(&wanted)
            }
            own => own == wanted,
        })
    }

    /// Makes one check, if it was asked for and there is time.
    fn check(
        &mut self,
        tallies: &mut Tallies,
        family: &str,
        name: &str,
        check: impl FnOnce(&mut Self) -> Result<f64, String>,
    ) {
        if !self.wants(family, name) {
            return;
        }
        if self.is_late() {
            tallies.unfinished += 1;
            return;
        }
        let outcome = check(self).map_err(|failure| format!("{name}: {failure}"));
        tallies.enter(family, name, outcome);
    }
}

/// A group of checks that are no cases of the matrix.
type Special = fn(&mut Judge<'_>, &mut Tallies);

const SPECIALS: [(&str, Special); 9] = [
    ("backward", backward::judge),
    ("long", long::judge),
    ("merge", merge::judge),
    ("append", cache::judge_append),
    ("copy", cache::judge_copy),
    ("modes", modes::judge),
    ("serving", serve),
    ("cascade", cascade::judge),
    ("dropout", dropout::judge),
];

/// Serving steps over pages on the device.
fn serve(judge: &mut Judge<'_>, tallies: &mut Tallies) {
    for setting in serving::SETTINGS {
        let name = setting.title();
        if judge.is_small || !judge.wants("serving", &name) {
            continue;
        }
        match serving::DevicePages::new(setting, &judge.gpu) {
            Ok(mut pages) => serving::judge(setting, &mut pages, tallies, || judge.is_late()),
            Err(error) => tallies.enter("serving", &name, Err(error.to_string())),
        }
    }
}

/// Judges everything and writes the record.
pub(super) fn run(args: &Args) -> Result<(), ValidateError> {
    let started = Instant::now();
    let gpu = Gpu::open()?;
    let selection = Selection { caps: gpu.engine.caps(), catalogue: Gpu::catalogue() };
    let mut device = describe(&gpu, args.small)?;
    let mut judge = Judge {
        gpu,
        workspace: Workspace::new(),
        selection,
        wanted: args.family.as_deref(),
        only: &args.only,
        is_small: args.small,
        deadline: args.budget_s.map(|seconds| started + Duration::from_secs(seconds)),
    };
    let Earlier { groups: mut done, work: before } = match &args.resume {
        Some(path) => earlier(path, &device)?,
        None => Earlier::default(),
    };
    let groups = groups(args, &judge, &done);
    let compiling = Instant::now();
    let specs = instances(&judge, &groups)?;
    let mut work = Work { instances: specs.len(), ..Work::default() };
    say(&format!("{} kernel instances", specs.len()))?;
    judge.gpu.engine.store().prepare(&specs, judge.gpu.engine.arch())?;
    work.compile_seconds = compiling.elapsed().as_secs_f64();
    device.nvrtc = compiler(&judge);
    say(&format!("ready in {:.1} s", work.compile_seconds))?;

    let judging = Instant::now();
    let write = |done: &BTreeMap<String, Tallies>, device: &mut Device| -> io::Result<Record> {
        let seconds = judging.elapsed().as_secs_f64();
        device.work = before.add(Work { seconds, ..work });
        let mut all = Tallies::default();
        for group in done.values() {
            all.add(group);
        }
        let record = Record::new("cuda", Subject::Cuda(device.clone()), &all, done.clone());
        args.out.as_ref().map_or(Ok(()), |path| record.write(path))?;
        Ok(record)
    };
    let specials: Vec<_> = SPECIALS
        .into_iter()
        .filter(|(name, _)| !done.contains_key(*name) && judge.meets(name))
        .collect();
    // Until it is their turn, all calls are unfinished: a run that is killed leaves a record that says so.
    for group in &groups {
        done.insert(group.name.to_owned(), unfinished(&judge, group));
    }
    for (name, _) in &specials {
        done.insert((*name).to_owned(), Tallies { unfinished: 1, ..Tallies::default() });
    }
    for_each_built(&groups, |group, cases| {
        let tallies = judge_group(&mut judge, group, cases);
        finish(&mut done, group.name, tallies)?;
        write(&done, &mut device).map(drop)
    })?;
    for (name, special) in specials {
        let mut tallies = Tallies::default();
        special(&mut judge, &mut tallies);
        finish(&mut done, name, tallies)?;
        write(&done, &mut device)?;
    }
    let record = write(&done, &mut device)?;
    record.print()?;
    if record.passed + record.failed + record.unfinished == 0 {
        return Err(ValidateError::NoCase(args.only.clone()));
    }
    match (record.failed, record.unfinished) {
        (0, 0) => Ok(()),
        // Under a sanitizer the time decides how far the reduced matrix gets; the record says it.
        (0, _) if args.small => Ok(()),
        (0, unfinished) => Err(ValidateError::Unfinished(unfinished)),
        (failed, _) => Err(ValidateError::Failed(failed)),
    }
}

/// Groups of cases that were asked for and not passed before.
fn groups(args: &Args, judge: &Judge<'_>, done: &BTreeMap<String, Tallies>) -> Vec<Group> {
    let mut groups = if args.small {
        matrix::small()
    } else {
        let cases = attn_reference::corpus();
        let mut groups = vec![Group { name: "corpus", runs: Runs::CORPUS, cases }];
        groups.extend(matrix::full());
        groups
    };
    groups.retain_mut(|Group { name, runs, cases }| {
        cases.retain(|case| case.name.contains(judge.only) && judge.calls(case, *runs) > 0);
        !cases.is_empty() && !done.contains_key(*name)
    });
    groups
}

/// Every instance that some plan of some case needs.
fn instances(judge: &Judge<'_>, groups: &[Group]) -> Result<Vec<KernelSpec>, ValidateError> {
    let mut specs = BTreeSet::new();
    for group in groups {
        for case in &group.cases {
            let attempts = judge.attempts(&case.problem()?, group.runs);
            for plan in attempts.into_iter().filter_map(|attempt| attempt.plan) {
                specs.extend(cuda::instances(&plan)?);
            }
        }
    }
    Ok(specs.into_iter().collect())
}

/// Hands each group's cases over with their references computed, the next group's being computed meanwhile.
fn for_each_built(
    groups: &[Group],
    mut judge: impl FnMut(&Group, Vec<Result<CaseData, attn_core::Error>>) -> io::Result<()>,
) -> io::Result<()> {
    std::thread::scope(|scope| {
        let (send, receive) = sync_channel(1);
        scope.spawn(move || {
            for group in groups {
                let build = |case: &Case| {
                    let data = case.build()?;
                    data.expected()?;
                    Ok(data)
                };
                let cases: Vec<_> = group.cases.par_iter().map(build).collect();
                if send.send(cases).is_err() {
                    return;
                }
            }
        });
        groups.iter().zip(receive).try_for_each(|(group, cases)| judge(group, cases))
    })
}

fn judge_group(
    judge: &mut Judge<'_>,
    group: &Group,
    cases: Vec<Result<CaseData, attn_core::Error>>,
) -> Tallies {
    let mut tallies = Tallies::default();
    for (case, built) in group.cases.iter().zip(cases) {
        match built {
            _ if judge.is_late() => tallies.unfinished += judge.calls(case, group.runs),
            Ok(data) => forward::judge(judge, &data, group.runs, &mut tallies),
            Err(error) => {
                tallies.enter("naive", &case.name, Err(format!("{}: {error}", case.name)));
            }
        }
    }
    tallies
}

fn unfinished(judge: &Judge<'_>, group: &Group) -> Tallies {
    let unfinished = group.cases.iter().map(|case| judge.calls(case, group.runs)).sum();
    Tallies { unfinished, ..Tallies::default() }
}

fn finish(done: &mut BTreeMap<String, Tallies>, name: &str, tallies: Tallies) -> io::Result<()> {
    let (passed, failed) = (tallies.sum(|t| t.passed), tallies.sum(|t| t.failed));
    let skipped = tallies.sum(|t| t.skipped);
    if passed + failed + skipped + tallies.unfinished == 0 {
        // Nothing of it was asked for.
        done.remove(name);
        return Ok(());
    }
    for failure in tallies.failures.iter().take(3) {
        say(failure)?;
    }
    say(&format!(
        "{name:<10} {passed} passed, {failed} failed, {skipped} skipped, {} unfinished",
        tallies.unfinished
    ))?;
    done.insert(name.to_owned(), tallies);
    Ok(())
}

fn say(line: &str) -> io::Result<()> {
    writeln!(io::stdout().lock(), "{line}")
}

fn describe(gpu: &Gpu, small: bool) -> Result<Device, Error> {
    let caps = gpu.engine.caps();
    let (gpu_name, compute) =
        caps.cuda.map_or(("none".to_owned(), (0, 0)), |c| (c.name, c.compute));
    let (major, minor) = gpu.engine.driver_version()?;
    Ok(Device {
        date: machine::today(),
        gpu: gpu_name,
        compute: format!("{}.{}", compute.0, compute.1),
        driver: machine::driver().unwrap_or_else(|| format!("for CUDA {major}.{minor}")),
        nvrtc: None,
        sources: attn_kernels::source::fingerprint().to_owned(),
        small,
        work: Work::default(),
    })
}

fn compiler(judge: &Judge<'_>) -> Option<String> {
    let compiler = judge.gpu.engine.store().compiler().ok()?;
    let (major, minor) = compiler.version();
    Some(format!("{major}.{minor}"))
}
