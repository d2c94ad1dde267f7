//! Gradients against the reference, their bits, and graphs of them.

use std::io::Write as _;
use std::sync::Arc;

use attn_core::{DType, ForwardResults, Gradients, Inputs, Pass, Problem, ProblemSpec, Split};
use attn_kernels::Error;
use attn_kernels::cuda::{CudaEngine, CudaStream, Workspace};
use attn_reference::case::Hiding;
use attn_reference::{Case, CaseData, corpus, judge_backward};

use crate::upload::{Uploaded, UploadedGradients, UploadedResults};
use crate::{engine, is_hopper, plan};

/// What a workspace holds before a run: NaN.
const POISON: u8 = 0xFF;

/// The same problem, its gradients summed in order or as they come.
fn ordered(problem: &Problem, is_ordered: bool) -> Problem {
    let mut spec = problem.spec().clone();
    spec.options.deterministic = is_ordered;
    Problem::new(spec).expect("valid")
}

/// Runs one call; `false` when the kernel does not take it.
fn run(
    (engine, stream): (&CudaEngine, &Arc<CudaStream>),
    (kernel, problem): (&str, &Problem),
    inputs: &Inputs<'_>,
    results: &ForwardResults<'_>,
    gradients: &mut Gradients<'_>,
) -> Result<bool, Error> {
    let plan = plan(engine, kernel, problem, Split::Whole);
    let (inputs, results) =
        (Uploaded::new(stream, inputs)?, UploadedResults::new(stream, results)?);
    let mut there = UploadedGradients::new(stream, gradients)?;
    let mut workspace = Workspace::new();
    match engine.prepare(&plan, &mut workspace, stream) {
        Err(Error::Plan { .. }) => return Ok(false),
        other => other?,
    }
    workspace.fill(stream, POISON)?;
    let ran = engine.backward(
        &plan,
        &inputs.inputs()?,
        &results.results()?,
        &mut there.gradients()?,
        &mut workspace,
        stream,
    );
    match ran {
        Err(Error::Call(attn_core::Error::Layout { .. })) => return Ok(false),
        other => other?,
    }
    there.download(stream, gradients)?;
    Ok(true)
}

/// Runs the whole corpus; the number of cases that the kernel took.
fn judge(engine: &CudaEngine, kernel: &str, is_ordered: bool) -> usize {
    let stream = engine.new_stream().expect("a stream");
    let (mut taken, mut failures) = (0, Vec::new());
    for case in corpus() {
        let case = case.build().expect("a valid case");
        if case.backward_problem().is_none() {
            continue;
        }
        let mut is_taken = false;
        let verdict = judge_backward(&case, |problem, inputs, results, mut gradients| {
            let problem = &ordered(problem, is_ordered);
            let call = (kernel, problem);
            is_taken = run((engine, &stream), call, inputs, results, &mut gradients)?;
            Ok::<(), Error>(())
        });
        if !is_taken && !matches!(&verdict, Err(attn_reference::Failure::Engine { .. })) {
            continue;
        }
        taken += 1;
        if let Err(failure) = verdict {
            failures.push(format!("{kernel}, in order {is_ordered}: {failure}"));
        }
    }
    assert!(failures.is_empty(), "{} of {taken}:\n{}", failures.len(), failures.join("\n"));
    taken
}

#[test]
fn naive_gradients_match_the_reference_on_the_corpus() {
    let Some(engine) = engine("naive_gradients_match_the_reference_on_the_corpus") else {
        return;
    };
    assert!(judge(&engine, "cuda_backward_naive", false) > 200);
}

#[test]
fn tiled_gradients_match_the_reference_in_any_order() {
    let Some(engine) = engine("tiled_gradients_match_the_reference_in_any_order") else {
        return;
    };
    for is_ordered in [false, true] {
        assert!(judge(&engine, "cuda_backward", is_ordered) > 30);
    }
}

#[test]
fn hopper_gradients_match_the_reference_in_any_order() {
    let name = "hopper_gradients_match_the_reference_in_any_order";
    let Some(engine) = engine(name) else {
        return;
    };
    if !is_hopper(&engine) {
        let _ = writeln!(std::io::stderr(), "{name}: skipped: the device is no Hopper");
        return;
    }
    for is_ordered in [false, true] {
        assert!(judge(&engine, "cuda_backward_sm90a", is_ordered) > 0);
    }
}

/// Unequal sequences under a window with sinks.
fn windowed(dim: usize) -> Case {
    Case::new("gradients", DType::BF16, (4, 2), dim, &[300, 0, 70], &[400, 5, 700])
        .window(Some(200), Some(0))
        .sinks()
}

/// The same with a bias that all rows share.
fn mixed() -> CaseData {
    windowed(64).bias("h1k", Hiding::Some).build().expect("a valid case")
}

#[test]
fn gradients_in_order_have_the_same_bits_each_time() {
    let Some(engine) = engine("gradients_in_order_have_the_same_bits_each_time") else {
        return;
    };
    repeat(&engine, "cuda_backward", &mixed(), 200);
    if is_hopper(&engine) {
        for dim in [64, 128, 256] {
            let case = windowed(dim).build().expect("a valid case");
            repeat(&engine, "cuda_backward_sm90a", &case, 200);
        }
    }
}

/// Several blocks of keys add to each row of dQ, and the query heads of a group to each row of dK and dV: what would differ
/// if their order were left to chance.
#[test]
fn thousand_gradients_in_order_have_the_same_bits() {
    let name = "thousand_gradients_in_order_have_the_same_bits";
    let Some(engine) = engine(name) else {
        return;
    };
    let is_hopper = is_hopper(&engine);
    if !is_hopper {
        let _ = writeln!(std::io::stderr(), "{name}: cuda_backward alone: the device is no Hopper");
    }
    for dim in [64, 128, 256] {
        let case = Case::new("gradients", DType::BF16, (8, 2), dim, &[389, 130], &[389, 130]);
        let case = case.causal().build().expect("a valid case");
        repeat(&engine, "cuda_backward", &case, 1000);
        if is_hopper {
            repeat(&engine, "cuda_backward_sm90a", &case, 1000);
        }
    }
}

/// Runs a call in order again and again, and compares all bits with the first run's.
fn repeat(engine: &CudaEngine, kernel: &str, case: &CaseData, runs: usize) {
    let stream = engine.new_stream().expect("a stream");
    let problem = ordered(case.backward_problem().expect("dense"), true);
    let plan = plan(engine, kernel, &problem, Split::Whole);
    let mut seen: Option<Vec<u8>> = None;
    let verdict = judge_backward(case, |_, inputs, results, mut gradients| {
        let inputs = Uploaded::new(&stream, inputs)?;
        let results = UploadedResults::new(&stream, results)?;
        let mut there = UploadedGradients::new(&stream, &gradients)?;
        let mut workspace = Workspace::new();
        for run in 0..runs {
            engine.backward(
                &plan,
                &inputs.inputs()?,
                &results.results()?,
                &mut there.gradients()?,
                &mut workspace,
                &stream,
            )?;
            let bits = there.bits(&stream)?;
            let first = seen.get_or_insert_with(|| bits.clone());
            assert!(*first == bits, "{kernel}, dim {}: run {run} differs", problem.head_dim());
        }
        there.download(&stream, &mut gradients)
    });
    verdict.expect("right");
}

#[test]
fn gradients_are_captured_and_replayed() {
    let Some(engine) = engine("gradients_are_captured_and_replayed") else {
        return;
    };
    let stream = engine.new_stream().expect("a stream");
    let case = mixed();
    let problem = case.backward_problem().expect("dense").clone();
    for is_ordered in [false, true] {
        let plan = plan(&engine, "cuda_backward", &ordered(&problem, is_ordered), Split::Whole);
        let verdict = judge_backward(&case, |_, inputs, results, mut gradients| {
            let inputs = Uploaded::new(&stream, inputs)?;
            let results = UploadedResults::new(&stream, results)?;
            let mut there = UploadedGradients::new(&stream, &gradients)?;
            let mut workspace = Workspace::new();
            engine.prepare(&plan, &mut workspace, &stream)?;
            let graph = {
                let (inputs, results) = (inputs.inputs()?, results.results()?);
                let there = &mut there.gradients()?;
                engine.capture(&stream, || {
                    engine.backward(&plan, &inputs, &results, there, &mut workspace, &stream)
                })?
            };
            // The graph holds what its launches use.
            drop((inputs, results, workspace));
            graph.launch(&stream)?;
            graph.launch(&stream)?;
            there.download(&stream, &mut gradients)
        });
        verdict.expect("right");
    }
}

#[test]
fn passes_refuse_the_plans_of_each_other() {
    let Some(engine) = engine("passes_refuse_the_plans_of_each_other") else {
        return;
    };
    let mut spec = ProblemSpec::new(DType::BF16, 2, 2, 64, &[3], &[3]);
    let forward = Problem::new(spec.clone()).expect("valid");
    spec.pass = Pass::Backward;
    let backward = Problem::new(spec).expect("valid");
    let stream = engine.new_stream().expect("a stream");
    for (kernel, problem) in [("cuda_backward", &forward), ("cuda_prefill", &backward)] {
        let plan = plan(&engine, kernel, problem, Split::Whole);
        let mut workspace = Workspace::new();
        let error = engine.prepare(&plan, &mut workspace, &stream).expect_err("another pass");
        assert!(matches!(error, Error::Plan { .. }), "{error}");
        assert_eq!(workspace.bytes(), 0);
    }
}
