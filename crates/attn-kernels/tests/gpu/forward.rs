//! Forward kernels against the reference, over its corpus.

use attn_core::{Inputs, Outputs, Problem, Split};
use attn_kernels::Error;
use attn_kernels::cuda::{CudaEngine, Workspace};
use attn_reference::{corpus, judge_forward};

use crate::upload::{Uploaded, UploadedOutputs};
use crate::{engine, plan};

/// Runs one call; `false` when the kernel does not take it.
fn run(
    engine: &CudaEngine,
    kernel: &str,
    split: Split,
    problem: &Problem,
    inputs: &Inputs<'_>,
    outputs: &mut Outputs<'_>,
) -> Result<bool, Error> {
    let stream = engine.new_stream()?;
    let plan = plan(engine, kernel, problem, split);
    let uploaded = Uploaded::new(&stream, inputs)?;
    let mut results = UploadedOutputs::new(&stream, outputs)?;
    let mut workspace = Workspace::new();
    let ran = engine.forward(
        &plan,
        &uploaded.inputs()?,
        &mut results.outputs()?,
        &mut workspace,
        &stream,
    );
    match ran {
        Err(Error::Plan { .. } | Error::Call(attn_core::Error::Layout { .. })) => return Ok(false),
        other => other?,
    }
    results.download(&stream, outputs)?;
    Ok(true)
}

/// Runs the whole corpus; the number of cases that the kernel took.
fn judge(engine: &CudaEngine, kernel: &str, split: Split) -> usize {
    let (mut taken, mut failures) = (0, Vec::new());
    for case in corpus() {
        let case = case.build().expect("a valid case");
        let mut is_taken = false;
        let verdict = judge_forward(&case, |problem, inputs, mut outputs| -> Result<(), Error> {
            is_taken = run(engine, kernel, split, problem, inputs, &mut outputs)?;
            Ok(())
        });
        if !is_taken && !matches!(&verdict, Err(attn_reference::Failure::Engine { .. })) {
            continue;
        }
        taken += 1;
        if let Err(failure) = verdict {
            failures.push(format!("{kernel}, {split}: {failure}"));
        }
    }
    assert!(failures.is_empty(), "{} of {taken}:\n{}", failures.len(), failures.join("\n"));
    taken
}

#[test]
fn naive_matches_the_reference_on_the_whole_corpus() {
    let Some(engine) = engine("naive_matches_the_reference_on_the_whole_corpus") else {
        return;
    };
    // Only an innermost stride other than 1 is refused.
    let taken = judge(&engine, "cuda_naive", Split::Whole);
    assert!(taken * 10 >= corpus().len() * 9, "{taken} of {}", corpus().len());
}

#[test]
fn prefill_matches_the_reference() {
    let Some(engine) = engine("prefill_matches_the_reference") else {
        return;
    };
    assert!(judge(&engine, "cuda_prefill", Split::Whole) > 0);
}

#[test]
fn decode_matches_the_reference_under_every_split() {
    let Some(engine) = engine("decode_matches_the_reference_under_every_split") else {
        return;
    };
    for split in [Split::Whole, Split::Chunks(5), Split::Parts(3), Split::Parts(16)] {
        assert!(judge(&engine, "cuda_decode", split) > 0);
    }
}
