//! Cascades on the device: the batches of the host, by every way that selection plans there.
//!
//! The invariant: intermediate states and partial results are full of NaN before each call, and both kinds of tables are run,
//! those of their own and views of the whole call's.

use std::collections::BTreeSet;

use attn_core::CascadePlan;
use attn_kernels::cuda::{self, CascadeTables, CascadeWorkspace, DeviceBuffer, DeviceView};
use attn_reference::{CaseData, judge_forward};
use rayon::prelude::*;

use super::super::cascade::{Batch, HostTables, Way, batches, has_views};
use super::super::corpus::forward_share;
use super::super::record::Tallies;
use super::Judge;
use crate::device::{DeviceInputs, DeviceOutputs};

/// What a workspace holds before a run: NaN.
const POISON: u8 = 0xFF;

/// A way that a batch is run by.
struct Attempt {
    label: String,
    plan: Option<CascadePlan>,
}

pub(super) fn judge(judge: &mut Judge<'_>, tallies: &mut Tallies) {
    let wanted: Vec<Batch> = batches(judge.is_small)
        .into_iter()
        .filter(|batch| judge.wants("cascade", &batch.case.name))
        .collect();
    let planned: Vec<Result<Vec<Attempt>, String>> =
        wanted.iter().map(|batch| attempts(judge, batch)).collect();
    if let Err(error) = prepare(judge, &planned) {
        return tallies.enter("cascade", "instances", Err(error));
    }
    let built: Vec<Result<CaseData, String>> = wanted
        .par_iter()
        .map(|batch| {
            let data = batch.case.build()?;
            data.expected()?;
            Ok(data)
        })
        .map(|built: Result<_, attn_core::Error>| built.map_err(|error| error.to_string()))
        .collect();
    let mut workspace = CascadeWorkspace::new();
    for ((batch, attempts), data) in wanted.iter().zip(planned).zip(built) {
        let (attempts, data) = match attempts.and_then(|attempts| Ok((attempts, data?))) {
            Ok(both) => both,
            Err(error) => {
                tallies.enter(
                    "cascade",
                    &batch.case.name,
                    Err(format!("{}: {error}", batch.case.name)),
                );
                continue;
            }
        };
        for Attempt { label, plan } in attempts {
            let Some(plan) = plan else {
                tallies.skip("cascade");
                continue;
            };
            for over_views in [false, true] {
                if judge.is_late() {
                    tallies.unfinished += 1;
                    continue;
                }
                match on_device(judge, &data, &plan, over_views, &mut workspace) {
                    Ok(None) => {}
                    Ok(Some(share)) => tallies.enter("cascade", &label, Ok(share)),
                    Err(failure) => {
                        tallies.enter("cascade", &label, Err(format!("{label}: {failure}")));
                    }
                }
            }
        }
    }
}

fn attempts(judge: &Judge<'_>, batch: &Batch) -> Result<Vec<Attempt>, String> {
    let problem = batch.case.problem().map_err(|error| error.to_string())?;
    let selection = &judge.selection;
    let attempt = |way: &Way| {
        let plan = way.plan(&problem, &batch.prefixes, &selection.caps, selection.catalogue);
        let label = format!("{} by {}", batch.case.name, way.label);
        plan.map(|plan| Attempt { label, plan }).map_err(|error| error.to_string())
    };
    Way::ALL.iter().map(attempt).collect()
}

/// Compiles what all plans need, side by side.
fn prepare(judge: &Judge<'_>, planned: &[Result<Vec<Attempt>, String>]) -> Result<(), String> {
    let mut specs = BTreeSet::new();
    for plan in planned.iter().flatten().flatten().filter_map(|attempt| attempt.plan.as_ref()) {
        for plan in [plan.prefix(), plan.suffix()] {
            specs.extend(cuda::instances(plan).map_err(|error| error.to_string())?);
        }
    }
    let specs: Vec<_> = specs.into_iter().collect();
    let engine = &judge.gpu.engine;
    engine.store().prepare(&specs, engine.arch()).map(drop).map_err(|error| error.to_string())
}

/// How close one run came to its limit; `None` where there are no views.
fn on_device(
    judge: &Judge<'_>,
    data: &CaseData,
    plan: &CascadePlan,
    over_views: bool,
    workspace: &mut CascadeWorkspace,
) -> Result<Option<f64>, String> {
    let cascade = plan.cascade();
    let on_host = data.inputs().map_err(|error| error.to_string())?;
    if over_views && !has_views(cascade, &on_host) {
        return Ok(None);
    }
    let (engine, stream) = (&judge.gpu.engine, &judge.gpu.stream);
    let verdict = judge_forward(data, |_, inputs, mut outputs| {
        let there = DeviceInputs::upload(stream, inputs)?;
        let host = HostTables::new(cascade, inputs)?;
        let buffers = [
            DeviceBuffer::from_host(stream, &host.prefix)?,
            DeviceBuffer::from_host(stream, &host.suffix)?,
        ];
        let [prefix, suffix] = HostTables::shapes(cascade);
        let tables = CascadeTables {
            prefix: DeviceView::contiguous("prefix table", &buffers[0], &prefix)?,
            suffix: DeviceView::contiguous("suffix table", &buffers[1], &suffix)?,
        };
        let tables = (!over_views).then_some(&tables);
        let mut results = DeviceOutputs::upload(stream, &outputs)?;
        engine.prepare_cascade(plan, workspace, stream)?;
        workspace.fill(stream, POISON)?;
        let outputs_there = &mut results.outputs()?;
        engine.cascade(plan, &there.inputs()?, tables, outputs_there, workspace, stream)?;
        results.download(stream, &mut outputs)
    });
    verdict.map(|verdict| Some(forward_share(&verdict))).map_err(|failure| failure.to_string())
}

#[cfg(test)]
mod tests {
    use super::super::forward::tests::hopper;
    use super::*;

    #[test]
    fn every_way_plans_most_batches_on_a_hopper() {
        let selection = hopper();
        let mut specs = BTreeSet::new();
        let mut planned = [0; Way::ALL.len()];
        let all = batches(false);
        for Batch { case, prefixes } in &all {
            let problem = case.problem().unwrap();
            for (way, planned) in Way::ALL.iter().zip(&mut planned) {
                let plan = way.plan(&problem, prefixes, &selection.caps, selection.catalogue);
                let Some(plan) = plan.unwrap() else { continue };
                *planned += 1;
                for plan in [plan.prefix(), plan.suffix()] {
                    specs.extend(cuda::instances(plan).unwrap());
                }
            }
        }
        assert!(
            planned.iter().all(|&planned| planned > all.len() - 3),
            "{planned:?} of {}",
            all.len()
        );
        // Each takes most of a second of a processor to compile.
        assert!(specs.len() < 150, "{} instances", specs.len());
    }
}
