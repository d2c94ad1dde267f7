//! Gradients on the device: the corpus, the same in 16 bits, and what lies at the edges of tiles, by every kernel and tile,
//! summed as they come and in order.
//!
//! The invariant: each call is judged by the rule of the host's engines; what is summed in order is run twice, and its bits
//! are the same. A skip is a refusal that selection stated, or that the engine gave to rows which do not start on 16
//! bytes.

use std::cell::Cell;
use std::collections::BTreeSet;

use attn_core::DType::{BF16, F16};
use attn_core::{Family, Gradients, Inputs, KvView, Options, Plan, Problem};
use attn_kernels::{Error, cuda};
use attn_reference::case::Hiding;
use attn_reference::{Case, CaseData, Failure, Pattern, judge_backward};
use rayon::prelude::*;

use super::super::corpus::backward_share;
use super::super::record::Tallies;
use super::Judge;
use super::forward::{Selection, starts_on_16_bytes};
use crate::device::DeviceInputs;

/// The families, and the kernels of the last two.
pub(in super::super) const FAMILIES: [&str; 3] = ["backward", "backward_sm90a", "backward_naive"];
const HOPPER: &str = "cuda_backward_sm90a";
const NAIVE: &str = "cuda_backward_naive";

/// A way to run a case.
struct Attempt {
    family: &'static str,
    label: String,
    plan: Option<Plan>,
}

pub(super) fn judge(judge: &mut Judge<'_>, tallies: &mut Tallies) {
    let cases: Vec<_> = cases(judge.is_small)
        .into_iter()
        .filter(|case| case.name.contains(judge.only))
        .map(|case| (attempts(judge, &case), case))
        .filter(|(attempts, _)| attempts.as_ref().map_or(true, |attempts| !attempts.is_empty()))
        .collect();
    if let Err(error) = prepare(judge, cases.iter().filter_map(|(all, _)| all.as_ref().ok())) {
        return tallies.enter("backward", "instances", Err(error));
    }
    let built: Vec<Result<CaseData, String>> = cases
        .par_iter()
        .map(|(_, case)| {
            let data = case.build()?;
            data.expected_gradients()?;
            Ok(data)
        })
        .map(|built: Result<_, attn_core::Error>| built.map_err(|error| error.to_string()))
        .collect();
    for ((attempts, case), data) in cases.into_iter().zip(built) {
        let (attempts, data) = match attempts.and_then(|attempts| Ok((attempts, data?))) {
            Ok(both) => both,
            Err(error) => {
                let failure = format!("{}: {error}", case.name);
                tallies.enter("backward", &case.name, Err(failure));
                continue;
            }
        };
        for Attempt { family, label, plan } in attempts {
            let Some(plan) = plan else {
                tallies.skip(family);
                continue;
            };
            if judge.is_late() {
                tallies.unfinished += 1;
                continue;
            }
            let label = format!("{} by {label}", case.name);
            match on_device(judge, &data, &plan) {
                Ok(None) => tallies.skip(family),
                Ok(Some(share)) => tallies.enter(family, &label, Ok(share)),
                Err(failure) => tallies.enter(family, &label, Err(format!("{label}: {failure}"))),
            }
        }
    }
}

/// Compiles what all plans need, side by side.
fn prepare<'p>(
    judge: &Judge<'_>,
    planned: impl Iterator<Item = &'p Vec<Attempt>>,
) -> Result<(), String> {
    let mut specs = BTreeSet::new();
    for plan in planned.flatten().filter_map(|attempt| attempt.plan.as_ref()) {
        specs.extend(cuda::instances(plan).map_err(|error| error.to_string())?);
    }
    let specs: Vec<_> = specs.into_iter().collect();
    super::say(&format!("{} instances of gradients", specs.len())).map_err(|e| e.to_string())?;
    let engine = &judge.gpu.engine;
    engine.store().prepare(&specs, engine.arch()).map(drop).map_err(|error| error.to_string())
}

/// Every way to run a case that is of a family asked for; none for a case without gradients.
fn attempts(judge: &Judge<'_>, case: &Case) -> Result<Vec<Attempt>, String> {
    let text = |error: attn_core::Error| error.to_string();
    let Some(problem) = backward_of(case).map_err(text)? else {
        return Ok(Vec::new());
    };
    let mut attempts = ways(&judge.selection, &problem).map_err(text)?;
    attempts.retain(|attempt| judge.wants_family(attempt.family));
    Ok(attempts)
}

/// The problem that a case's data is judged by, without its data.
fn backward_of(case: &Case) -> Result<Option<Problem>, attn_core::Error> {
    let is_dense = case.recipe.pages.is_none();
    if !is_dense || case.spec.kv_dtype.is_fp8() || case.spec.q_dtype.is_fp8() {
        return Ok(None);
    }
    let mut spec = case.spec.clone();
    spec.pass = attn_core::Pass::Backward;
    (spec.want_dsinks, spec.want_dbias) = (spec.sinks, spec.bias);
    Problem::new(spec).map(Some)
}

fn ways(selection: &Selection, problem: &Problem) -> Result<Vec<Attempt>, attn_core::Error> {
    let mut all = Vec::new();
    let room = selection.caps.cuda.as_ref().map(|cuda| cuda.smem_per_block).unwrap_or_default();
    for kernel in selection.kernels(Family::Backward) {
        let family = match kernel.name {
            HOPPER => FAMILIES[1],
            NAIVE => FAMILIES[2],
            _ => FAMILIES[0],
        };
        for is_ordered in [false, true] {
            // The naive kernel has one order.
            if is_ordered && kernel.name == NAIVE {
                continue;
            }
            let mut spec = problem.spec().clone();
            spec.options = Options { deterministic: is_ordered, ..Options::default() };
            let problem = Problem::new(spec)?;
            let order = if is_ordered { " in order" } else { "" };
            let Some(plan) = selection.only(&problem, kernel, None) else {
                let label = format!("{}{order}", kernel.name);
                all.push(Attempt { family, label, plan: None });
                continue;
            };
            for &tile in (kernel.tiles)(&problem) {
                let shared_memory = (kernel.shared_memory)(&problem, tile);
                if shared_memory > room {
                    continue;
                }
                let label = format!("{} tile {}x{}{order}", kernel.name, tile.q, tile.kv);
                let plan = Plan { tile, shared_memory, ..plan.clone() };
                all.push(Attempt { family, label, plan: Some(plan) });
            }
        }
    }
    Ok(all)
}

/// How close one run came to its limit; `None` for views that the kernel may refuse.
fn on_device(judge: &mut Judge<'_>, data: &CaseData, plan: &Plan) -> Result<Option<f64>, String> {
    let text = |error: Error| error.to_string();
    let host = data.inputs().map_err(|error| error.to_string())?;
    let inputs = DeviceInputs::upload(&judge.gpu.stream, &host).map_err(text)?;
    let is_regular = Cell::new(true);
    let run = |judge: &mut Judge<'_>, bits: &mut Vec<u8>| {
        judge_backward(data, |_, host, results, mut gradients| {
            is_regular.set(takes(plan.kernel, host, &results.d_o, &gradients));
            let workspace = &mut judge.workspace;
            judge.gpu.backward(plan, &inputs, results, &mut gradients, workspace)?;
            *bits = bits_of(&gradients);
            Ok(())
        })
    };
    let (mut first, mut second) = (Vec::new(), Vec::new());
    match run(judge, &mut first) {
        Err(Failure::Engine { source: Error::Call(attn_core::Error::Layout { .. }), .. })
            if !is_regular.get() =>
        {
            Ok(None)
        }
        Err(failure) => Err(failure.to_string()),
        Ok(verdict) => {
            if plan.problem.options().deterministic || plan.kernel == NAIVE {
                run(judge, &mut second).map_err(|failure| format!("again: {failure}"))?;
                if let Some(at) = (0..first.len()).find(|&at| first[at] != second[at]) {
                    return Err(format!("run twice: byte {at} of all gradients differs"));
                }
            }
            Ok(Some(backward_share(&verdict)))
        }
    }
}

/// All gradients as bytes, with what lies between them.
fn bits_of(gradients: &Gradients<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for tensor in [&gradients.dq, &gradients.dk, &gradients.dv] {
        attn_core::dispatch_view_mut!(tensor, view => {
            bytes.extend_from_slice(bytemuck::cast_slice(view.as_view().data()));
        });
    }
    for view in [&gradients.dsinks, &gradients.dbias].into_iter().flatten() {
        bytes.extend_from_slice(bytemuck::cast_slice(view.as_view().data()));
    }
    bytes
}

/// Whether a kernel has to take these tensors: rows are contiguous and, but for the naive kernel, start on 16 bytes; what
/// the Hopper kernel finds by tensor maps has no negative strides.
fn takes(
    kernel: &str,
    inputs: &Inputs<'_>,
    d_o: &attn_core::TensorView<'_>,
    gradients: &Gradients<'_>,
) -> bool {
    let KvView::Dense { k, v } = &inputs.kv else { return false };
    let read = [&inputs.q, k, v, d_o].map(|tensor| (tensor.dtype().size(), tensor.layout()));
    let written = [&gradients.dk, &gradients.dv, &gradients.dq];
    let written = written.map(|tensor| (tensor.dtype().size(), tensor.layout()));
    read.into_iter().chain(written).enumerate().all(|(n, (size, layout))| {
        let is_dq = n == 6;
        let has_map = n < 4 && kernel == HOPPER;
        let mut steps = layout.strides().iter().zip(layout.shape());
        let is_forward = steps.all(|(&stride, &extent)| stride >= 0 || extent == 1);
        (is_forward || !has_map)
            && layout.is_row_contiguous()
            && (is_dq || kernel == NAIVE || starts_on_16_bytes(size, layout))
    })
}

/// The corpus, its f32 cases in 16 bits, and edges of tiles.
fn cases(is_small: bool) -> Vec<Case> {
    let mut cases = edges(is_small);
    if is_small {
        return cases;
    }
    for (n, case) in attn_reference::corpus().into_iter().enumerate() {
        let mut narrow = case.clone();
        // Not scores of 1e5, made for f32: the ends of 16-bit products' sums, which no two orders have in common, are parts in a
        // hundred of their weights.
        let is_far = matches!(case.recipe.pattern, Pattern::FarAbove | Pattern::FarBelow);
        if !case.spec.q_dtype.is_fp8()
            && !case.spec.kv_dtype.is_fp8()
            && case.spec.q_dtype.size() > 2
            && !is_far
        {
            let dtype = if n % 2 == 0 { BF16 } else { F16 };
            (narrow.spec.q_dtype, narrow.spec.kv_dtype) = (dtype, dtype);
            narrow.name = format!("{}_in_{dtype}", case.name);
            cases.push(narrow);
        }
        cases.push(case);
    }
    cases
}

/// Lengths and dimensions around the tiles, each option across more than one of them.
fn edges(is_small: bool) -> Vec<Case> {
    let new = |name: &str, heads, dim, q: &[usize], kv: &[usize]| {
        Case::new(format!("backward/{name}"), BF16, heads, dim, q, kv)
    };
    let mut cases = vec![
        new("plain", (2, 2), 64, &[130], &[140]),
        new("causal_group", (4, 2), 128, &[150], &[300]).causal(),
        new("unequal", (2, 1), 64, &[100, 0, 33, 1], &[129, 40, 0, 64]).causal(),
        new("all_options", (2, 1), 64, &[70, 20], &[140, 33])
            .window(Some(50), Some(3))
            .softcap(5.0)
            .alibi()
            .bias("bhqk", Hiding::Some)
            .mask("qk", Hiding::Some)
            .sinks(),
    ];
    if is_small {
        return cases;
    }
    for (n, dim) in [8, 32, 40, 64, 72, 96, 128, 160, 192, 256].into_iter().enumerate() {
        let lens: &[usize] = if n % 2 == 0 { &[67, 130] } else { &[64, 128] };
        cases.push(new(&format!("dim_{dim}"), (2, 1), dim, lens, &[200, 128]).causal());
        cases.push(new(&format!("dim_{dim}_full"), (2, 1), dim, lens, &[65, 129]));
    }
    for (dim, value_dim) in [(192, 128), (64, 128), (128, 32), (256, 64), (72, 200)] {
        let name = format!("dims_{dim}_{value_dim}");
        cases.push(new(&name, (2, 2), dim, &[100], &[150]).value_dim(value_dim).causal());
    }
    for (q, kv) in
        [(1, 1), (1, 300), (300, 1), (63, 127), (64, 128), (65, 129), (128, 256), (257, 385)]
    {
        for dim in [64, 128] {
            cases.push(new(&format!("lens_{q}_{kv}_{dim}"), (2, 1), dim, &[q], &[kv]).causal());
        }
        let mut full = new(&format!("lens_{q}_{kv}_f16"), (3, 3), 64, &[q], &[kv]);
        (full.spec.q_dtype, full.spec.kv_dtype) = (F16, F16);
        cases.push(full);
    }
    for (left, right) in [
        (Some(0), Some(0)),
        (Some(17), Some(0)),
        (Some(64), Some(64)),
        (Some(200), None),
        (None, Some(70)),
        (Some(130), Some(0)),
    ] {
        let name = format!("window_{left:?}_{right:?}");
        let case = new(&name, (2, 1), 64, &[300], &[400]).window(left, right);
        cases.push(case.clone());
        cases.push(
            Case { name: format!("{name}_short"), ..new("x", (2, 1), 128, &[90, 200], &[70, 10]) }
                .window(left, right),
        );
    }
    let base = |name: &str| new(name, (4, 2), 64, &[150], &[270]);
    cases.extend([
        base("softcap").softcap(2.0).causal(),
        base("alibi").alibi().causal(),
        base("bias").bias("bhqk", Hiding::Some),
        base("bias_row").bias("qk", Hiding::None).causal(),
        base("bias_head").bias("h1k", Hiding::None),
        base("bias_one").bias("11", Hiding::None),
        base("mask").mask("b1qk", Hiding::Some),
        base("mask_rows").mask("qk", Hiding::EvenRows),
        base("mask_all").mask("qk", Hiding::All),
        base("mask_first").mask("qk", Hiding::FirstTile).causal(),
        base("blocks").blocks((64, 128), "bhqk", Hiding::Some),
        base("blocks_odd").blocks((48, 40), "hqk", Hiding::Some).causal(),
        base("blocks_rows").blocks((64, 64), "qk", Hiding::EvenRows),
        base("sinks").sinks().causal(),
        base("sinks_large").sinks_of(9.0),
        base("scale").scale(0.5).causal(),
        base("scale_negative").scale(-0.1),
        base("scale_zero").scale(0.0),
        new("padded", (4, 2), 64, &[150, 3, 70], &[200, 130, 1]).padded().causal(),
        new("padded_128", (2, 1), 128, &[100, 64], &[60, 200]).padded(),
        new("group_8", (8, 1), 128, &[140], &[200]).causal(),
        new("many", (2, 1), 64, &[3; 40], &[70; 40]).causal(),
        new("long", (1, 1), 64, &[1100], &[1300]).causal(),
        new("long_full", (1, 1), 128, &[600], &[700]),
        new("wide_softcap", (2, 1), 256, &[100], &[150]).softcap(3.0).causal(),
        new("wide_long", (1, 1), 256, &[300], &[400]).causal(),
    ]);
    for pattern in Pattern::ALL.into_iter().filter(|pattern| *pattern != Pattern::Normal) {
        cases.push(base(pattern.name()).pattern(pattern).causal());
    }
    cases
}

#[cfg(test)]
mod tests {
    use attn_core::DType::F32;
    use attn_core::{Bytes, Pass, ProblemSpec, Tile};

    use super::super::forward::tests::hopper;
    use super::*;

    #[test]
    fn cases_reach_every_kernel_and_tile_and_have_names_of_their_own() {
        let selection = hopper();
        let (mut names, mut instances) = (BTreeSet::new(), BTreeSet::new());
        let (mut planned, mut tiles) = (0, BTreeSet::new());
        for case in cases(false) {
            assert!(names.insert(case.name.clone()), "{}", case.name);
            let Some(problem) = backward_of(&case).unwrap() else { continue };
            for plan in ways(&selection, &problem).unwrap().into_iter().filter_map(|way| way.plan) {
                planned += 1;
                tiles.insert((plan.kernel, plan.tile.q, plan.tile.kv));
                instances.extend(cuda::instances(&plan).unwrap());
            }
        }
        assert!(planned > 400, "{planned}");
        // Of the portable kernel 64x128, 32x128, 64x64, 32x64 and 32x32; of the Hopper one 64x128, 128x128 and 64x64; of the
        // naive one its own.
        assert_eq!(tiles.len(), 9, "{tiles:?}");
        // Each takes seconds of a processor to compile.
        assert!(instances.len() < 150, "{} instances", instances.len());
    }

    #[test]
    fn selection_takes_the_tiled_kernel_and_says_in_which_order() {
        let selection = hopper();
        let plan = |edit: &dyn Fn(&mut ProblemSpec)| {
            let mut spec = ProblemSpec::new(BF16, 8, 2, 128, &[300], &[300]);
            spec.pass = Pass::Backward;
            edit(&mut spec);
            let problem = Problem::new(spec).unwrap();
            attn_select::choose(&problem, &selection.caps, selection.catalogue).unwrap()
        };
        let free = plan(&|_| ());
        assert_eq!((free.kernel, free.tile), (HOPPER, Tile { q: 64, kv: 128 }));
        assert!(free.reason.contains("whatever order"), "{}", free.reason);
        // Two sums of a row and one of dQ, three numbers and a turn; nothing by the keys.
        assert_eq!(free.workspace, Bytes(8 * 384 * (128 * 4 + 12) + 8 * 24 * 4 + 16));
        for edit in [
            &(|s: &mut ProblemSpec| s.options.deterministic = true) as &dyn Fn(&mut ProblemSpec),
            &|s| s.options.batch_invariant = true,
        ] {
            let ordered = plan(edit);
            assert_eq!(ordered.kernel, HOPPER);
            assert!(ordered.reason.contains("fixed order"), "{}", ordered.reason);
        }
        let wide = plan(&|s| (s.head_dim, s.value_dim) = (256, 256));
        assert_eq!((wide.kernel, wide.tile), (HOPPER, Tile { q: 64, kv: 64 }));
        for edit in [
            &(|s: &mut ProblemSpec| s.alibi = true) as &dyn Fn(&mut ProblemSpec),
            &|s| s.mask = true,
            &|s| s.bias = true,
        ] {
            assert_eq!(plan(edit).kernel, "cuda_backward");
        }
        for edit in [
            &(|s: &mut ProblemSpec| (s.q_dtype, s.kv_dtype) = (F32, F32))
                as &dyn Fn(&mut ProblemSpec),
            &|s| s.head_dim = 100,
            &|s| s.value_dim = 264,
        ] {
            assert_eq!(plan(edit).kernel, NAIVE);
        }
    }

    #[test]
    fn problem_without_data_is_that_of_the_data() {
        for case in edges(false).into_iter().step_by(9) {
            let data = case.build().unwrap();
            assert_eq!(backward_of(&case).unwrap().as_ref(), data.backward_problem());
        }
    }
}
