//! Forward cases on the device: which plans a case is run by, and the verdict on each.
//!
//! The invariant: a skip is a refusal that selection stated, or that the engine gave to rows which do not start on
//! 16 bytes; whether they do is looked up here, so that an engine which refuses a call it should take fails.

use attn_core::{
    DeviceCaps, Family, Features, Inputs, KernelDesc, KvView, Outputs, Phase, Plan, Problem,
    Strided,
};
use attn_kernels::Error;
use attn_reference::{CaseData, Failure, judge_forward};

use super::super::corpus::forward_share;
use super::super::matrix::Runs;
use super::super::record::Tallies;
use super::Judge;
use crate::device::DeviceInputs;

/// A way to run a case: a plan, or the family that selection refused.
#[derive(Debug)]
pub(super) struct Attempt {
    pub(super) family: &'static str,
    /// What is special about the way.
    pub(super) label: String,
    pub(super) plan: Option<Plan>,
}

/// The name of the kernel that takes everything.
pub(super) const NAIVE: &str = "cuda_naive";

/// The family of a kernel in the record.
pub(super) fn family_of(kernel: &str) -> &'static str {
    match kernel {
        NAIVE => "naive",
        "cuda_decode" => "decode",
        "cuda_decode_sm90a" => "decode_sm90a",
        "cuda_latent_sm90a" => "latent_sm90a",
        "cuda_prefill_sm90a" => "prefill_sm90a",
        _ => "prefill",
    }
}

/// What the device can do, and the kernels for it.
#[derive(Debug)]
pub(super) struct Selection {
    pub(super) caps: DeviceCaps,
    pub(super) catalogue: &'static [KernelDesc],
}

impl Selection {
    /// Every way to run a problem.
    pub(super) fn attempts(&self, problem: &Problem, runs: Runs) -> Vec<Attempt> {
        let mut attempts = Vec::new();
        if runs.chosen {
            let plan = self.plan(problem, None, None, &[]);
            let family = plan.as_ref().map_or("naive", |plan| family_of(plan.kernel));
            attempts.push(Attempt { family, label: "chosen".to_owned(), plan });
        }
        if runs.naive {
            let plan = self.naive(problem);
            attempts.push(Attempt { family: "naive", label: "naive".to_owned(), plan });
        }
        if runs.prefill {
            for kernel in self.prefills() {
                let (family, plan) = (family_of(kernel.name), self.only(problem, kernel, None));
                attempts.push(Attempt { family, label: family.to_owned(), plan });
            }
        }
        for kernel in self.prefills().filter(|kernel| kernel.divides_keys) {
            for &parts in runs.parts {
                let (family, plan) =
                    (family_of(kernel.name), self.only(problem, kernel, Some(parts)));
                attempts.push(Attempt { family, label: format!("{family} in {parts}"), plan });
            }
        }
        let required = Features::required_by(problem);
        for kernel in self.decodes() {
            // A kernel of one kind of storage is no way to run another.
            if kernel.requires.minus(required) != Features::NONE {
                continue;
            }
            let family = family_of(kernel.name);
            for &splits in self.splits(problem, kernel, runs.splits) {
                let plan = self.only(problem, kernel, splits);
                let label = splits.map_or(family.to_owned(), |n| format!("{family} in {n}"));
                attempts.push(Attempt { family, label, plan });
            }
        }
        if runs.tiles {
            attempts.extend(self.tiles(problem, runs.parts));
        }
        attempts
    }

    /// The split counts to try; where decode takes no such problem at all, one is enough to record that.
    fn splits<'r>(
        &self,
        problem: &Problem,
        kernel: &KernelDesc,
        splits: &'r [Option<usize>],
    ) -> &'r [Option<usize>] {
        match self.only(problem, kernel, None) {
            Some(_) => splits,
            None => splits.get(..1).unwrap_or_default(),
        }
    }

    /// A plan for every tile that a block has room for, in one part and in several, which of kernels of row tiles are
    /// `parts`.
    fn tiles(&self, problem: &Problem, parts: &[usize]) -> Vec<Attempt> {
        let mut attempts = Vec::new();
        let room =
            self.caps.cuda.as_ref().map_or(attn_core::Bytes::ZERO, |cuda| cuda.smem_per_block);
        for kernel in self.catalogue.iter().filter(|kernel| kernel.name != NAIVE) {
            let family = family_of(kernel.name);
            let splits = match kernel.family {
                Family::Decode => vec![Some(1), Some(3)],
                _ if kernel.divides_keys => {
                    [None].into_iter().chain(parts.iter().copied().map(Some)).collect()
                }
                _ => vec![None],
            };
            for splits in splits {
                let Some(plan) = self.only(problem, kernel, splits) else {
                    continue;
                };
                for &tile in (kernel.tiles)(problem) {
                    let needs = (kernel.shared_memory)(problem, tile);
                    if needs > room {
                        continue;
                    }
                    let label = format!("{family} tile {}x{}", tile.q, tile.kv);
                    let label = splits.map_or(label.clone(), |n| format!("{label} in {n}"));
                    let plan = Plan { tile, shared_memory: needs, ..plan.clone() };
                    attempts.push(Attempt { family, label, plan: Some(plan) });
                }
            }
        }
        attempts
    }

    /// The plan under some options, or `None` where selection refuses.
    pub(super) fn plan(
        &self,
        problem: &Problem,
        phase: Option<Phase>,
        splits: Option<usize>,
        disabled: &[&str],
    ) -> Option<Plan> {
        let mut spec = problem.spec().clone();
        spec.options.phase = phase;
        spec.options.num_splits = splits;
        spec.options.disabled_kernels = disabled.iter().map(|&name| name.to_owned()).collect();
        let problem = Problem::new(spec).ok()?;
        attn_select::choose(&problem, &self.caps, self.catalogue).ok()
    }

    /// The kernels of a family that the device has.
    pub(super) fn kernels(&self, family: Family) -> impl Iterator<Item = &'static KernelDesc> {
        let compute = self.caps.cuda.as_ref().map(|device| device.compute);
        let has = move |kernel: &&KernelDesc| kernel.family == family && kernel.runs_on(compute);
        self.catalogue.iter().filter(has)
    }

    /// The kernels that divide keys.
    fn decodes(&self) -> impl Iterator<Item = &'static KernelDesc> {
        self.catalogue.iter().filter(|kernel| kernel.family == Family::Decode)
    }

    /// The kernels of prompts.
    fn prefills(&self) -> impl Iterator<Item = &'static KernelDesc> {
        self.catalogue.iter().filter(|kernel| kernel.family == Family::Prefill)
    }

    /// The plan of one kernel, or `None` where it refuses.
    pub(super) fn only(
        &self,
        problem: &Problem,
        kernel: &KernelDesc,
        splits: Option<usize>,
    ) -> Option<Plan> {
        let phase = match kernel.family {
            Family::Prefill => Some(Phase::Prefill),
            Family::Decode => Some(Phase::Decode),
            _ => None,
        };
        let names = self.catalogue.iter().map(|kernel| kernel.name);
        let others: Vec<&str> = names.filter(|&name| name != kernel.name).collect();
        self.plan(problem, phase, splits, &others)
    }

    /// The plan of the naive kernel.
    pub(super) fn naive(&self, problem: &Problem) -> Option<Plan> {
        let naive = self.catalogue.iter().find(|kernel| kernel.name == NAIVE)?;
        self.only(problem, naive, None)
    }
}

/// Runs a case in every wanted way and judges each.
pub(super) fn judge(judge: &mut Judge<'_>, case: &CaseData, runs: Runs, tallies: &mut Tallies) {
    let attempts = judge.attempts(case.problem(), runs);
    let on_device = match upload(judge, case) {
        Ok(inputs) => inputs,
        Err(error) => {
            for attempt in attempts {
                tallies.enter(
                    attempt.family,
                    case.name(),
                    Err(format!("{}: {error}", case.name())),
                );
            }
            return;
        }
    };
    for Attempt { family, label, plan } in attempts {
        let Some(plan) = plan else {
            tallies.skip(family);
            continue;
        };
        let mut is_regular = true;
        let verdict = judge_forward(case, |_, inputs, mut outputs| {
            is_regular = takes(plan.kernel, inputs, &outputs);
            judge.forward(&plan, &on_device, &mut outputs)
        });
        let label = format!("{} by {label}", case.name());
        match verdict {
            Err(Failure::Engine {
                source: Error::Call(attn_core::Error::Layout { .. }), ..
            }) if !is_regular => {
                tallies.skip(family);
            }
            Ok(verdict) => tallies.enter(family, &label, Ok(forward_share(&verdict))),
            Err(failure) => tallies.enter(family, &label, Err(format!("{label}: {failure}"))),
        }
    }
}

fn upload(judge: &Judge<'_>, case: &CaseData) -> Result<DeviceInputs, Error> {
    DeviceInputs::upload(&judge.gpu.stream, &case.inputs()?)
}

/// Whether a kernel has to take these tensors: rows are contiguous, but for the naive kernel start on 16 bytes, and for
/// one that reads through tensor maps follow one another forwards.
fn takes(kernel: &str, inputs: &Inputs<'_>, outputs: &Outputs<'_>) -> bool {
    let (k, v) = match &inputs.kv {
        KvView::Dense { k, v } => (k, v),
        KvView::Paged { k_cache, v_cache, .. } => (k_cache, v_cache),
    };
    let tensors = [&inputs.q, k, v].map(|tensor| (tensor.dtype().size(), tensor.layout()));
    let o = (outputs.o.dtype().size(), outputs.o.layout());
    let runs_forwards = |layout: &Strided| {
        layout
            .strides()
            .iter()
            .zip(layout.shape())
            .all(|(&stride, &extent)| stride >= 0 || extent == 1)
    };
    let has_maps = kernel == "cuda_prefill_sm90a";
    tensors.iter().all(|(_, layout)| !has_maps || runs_forwards(layout))
        && tensors.into_iter().chain([o]).all(|(size, layout)| {
            layout.is_row_contiguous() && (kernel == NAIVE || starts_on_16_bytes(size, layout))
        })
}

pub(super) fn starts_on_16_bytes(size: usize, layout: &Strided) -> bool {
    let rank = layout.shape().len();
    let steps = layout.strides().iter().zip(layout.shape()).take(rank.saturating_sub(1));
    let taken = steps.filter(|&(_, &extent)| extent > 1);
    let on = |elements: u64| (elements % 16 * size as u64).is_multiple_of(16);
    layout.is_empty()
        || on(layout.offset() as u64) && taken.map(|(&stride, _)| stride.unsigned_abs()).all(on)
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeSet;

    use attn_core::Pass;

    use super::super::super::matrix;
    use super::*;
    use crate::device::Gpu;

    pub(crate) fn hopper() -> Selection {
        let caps = crate::device::tests::hopper();
        Selection { caps, catalogue: Gpu::catalogue() }
    }

    #[test]
    fn matrix_reaches_every_kernel_tile_and_type() {
        let selection = hopper();
        let (mut calls, mut refused) = (0, 0);
        let (mut seen, mut instances) = (BTreeSet::new(), BTreeSet::new());
        for group in matrix::full() {
            for case in &group.cases {
                let problem = case.problem().unwrap();
                for attempt in selection.attempts(&problem, group.runs) {
                    calls += 1;
                    let Some(plan) = attempt.plan else {
                        refused += 1;
                        continue;
                    };
                    let types = (problem.q_dtype(), problem.kv_dtype());
                    seen.insert((plan.kernel, (plan.tile.q, plan.tile.kv), types));
                    instances.extend(attn_kernels::cuda::instances(&plan).unwrap());
                }
            }
        }
        assert!(refused * 8 < calls, "{refused} of {calls} calls are refused by selection");
        let tiles: BTreeSet<_> = seen.iter().map(|(kernel, tile, _)| (kernel, tile)).collect();
        let problem = &matrix::full()[1].cases[0].problem().unwrap();
        let forward = |kernel: &&KernelDesc| kernel.pass() == Pass::Forward;
        for kernel in selection.catalogue.iter().filter(forward) {
            assert!(seen.iter().any(|(name, ..)| *name == kernel.name), "{}", kernel.name);
            for tile in (kernel.tiles)(problem) {
                assert!(tiles.contains(&(&kernel.name, &(tile.q, tile.kv))), "{}", kernel.name);
            }
        }
        // Each takes most of a second of a processor to compile.
        assert!(instances.len() < 800, "{} instances", instances.len());
    }

    #[test]
    fn rows_on_16_bytes_are_told_by_offset_and_strides() {
        let on = |size, shape: &[usize], strides: &[i64], offset| {
            starts_on_16_bytes(size, &Strided::new("x", shape, strides, offset).unwrap())
        };
        assert!(on(2, &[4, 2, 64], &[128, 64, 1], 0));
        assert!(on(2, &[4, 2, 64], &[-128, 64, 1], 384));
        assert!(!on(2, &[4, 2, 64], &[128, 64, 1], 4));
        assert!(!on(2, &[4, 2, 60], &[120, 60, 1], 0));
        assert!(on(2, &[4, 1, 60], &[64, 60, 1], 0), "a stride along one head is never taken");
        assert!(!on(1, &[4, 2, 72], &[144, 72, 1], 0) && on(1, &[4, 2, 80], &[160, 80, 1], 16));
        assert!(on(2, &[0, 2, 60], &[1, 1, 1], 3));
    }
}
