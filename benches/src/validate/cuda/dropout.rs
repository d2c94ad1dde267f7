//! Which weights the device's kernels dropped: each that takes dropout, by every split and tile of the matrix' kind.
//!
//! The invariant: the calls and the judgement are the host's, so that a kernel which passes drops what the CPU engine drops.

use super::super::dropout::{FAMILY, calls};
use super::super::matrix::Runs;
use super::super::record::Tallies;
use super::Judge;
use super::forward::Attempt;
use crate::device::DeviceInputs;

/// Judges every kernel on every call.
pub(super) fn judge(judge: &mut Judge<'_>, tallies: &mut Tallies) {
    let calls = match calls() {
        Ok(calls) => calls,
        Err(error) => return tallies.enter(FAMILY, FAMILY, Err(error.to_string())),
    };
    // Under a sanitizer two calls, which see both ways to draw.
    let is_special = |name: &str| name.ends_with("window_33") || name.ends_with("decode");
    let is_small = judge.is_small;
    for call in calls.iter().filter(|call| !is_small || is_special(&call.name)) {
        let runs = if is_small { Runs::SETS_SMALL } else { Runs::SETS };
        for Attempt { label, plan, .. } in judge.selection.attempts(&call.problem, runs) {
            let label = format!("{} by {label}", call.name);
            let Some(plan) = plan else {
                if judge.wants(FAMILY, &label) {
                    tallies.skip(FAMILY);
                }
                continue;
            };
            judge.check(tallies, FAMILY, &label, |judge| {
                let failed = |error: &dyn std::fmt::Display| error.to_string();
                let mut o = call.buffer();
                let inputs = call.inputs().map_err(|error| failed(&error))?;
                let inputs = DeviceInputs::upload(&judge.gpu.stream, &inputs)
                    .map_err(|error| failed(&error))?;
                let mut outputs = call.outputs(&mut o).map_err(|error| failed(&error))?;
                judge.forward(&plan, &inputs, &mut outputs).map_err(|error| failed(&error))?;
                call.judge(&o)
            });
        }
    }
}
