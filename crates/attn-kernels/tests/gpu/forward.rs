//! Forward kernels against the reference, over its corpus.

use std::io::Write as _;

use attn_core::{DType, Inputs, Outputs, Problem, ProblemSpec, Split, TensorView, View, ViewMut};
use attn_kernels::Error;
use attn_kernels::cuda::{CudaEngine, Workspace};
use attn_reference::{corpus, judge_forward};
use half::bf16;

use crate::upload::{Uploaded, UploadedOutputs};
use crate::{engine, is_hopper, plan};

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
fn hopper_prefill_matches_the_reference_under_every_split() {
    let Some(engine) = engine("hopper_prefill_matches_the_reference_under_every_split") else {
        return;
    };
    if !is_hopper(&engine) {
        let name = "hopper_prefill_matches_the_reference_under_every_split";
        let _ = writeln!(std::io::stderr(), "{name}: skipped: the device is no Hopper");
        return;
    }
    // 20 parts are more than one warp joins at once.
    let between = Split::Between { parts: 4, keys: 3 };
    for split in [Split::Whole, Split::Chunks(5), Split::Parts(3), Split::Parts(20), between] {
        assert!(judge(&engine, "cuda_prefill_sm90a", split) > 0, "{split}");
    }
}

#[test]
fn decode_matches_the_reference_under_every_split() {
    let Some(engine) = engine("decode_matches_the_reference_under_every_split") else {
        return;
    };
    for split in [Split::Whole, Split::Chunks(5), Split::Parts(3), Split::Parts(16)] {
        assert!(judge(&engine, "cuda_decode", split) > 0);
        if is_hopper(&engine) {
            assert!(judge(&engine, "cuda_decode_sm90a", split) > 0);
        }
    }
}

#[test]
fn latent_rows_match_the_reference_under_every_split() {
    let Some(engine) = engine("latent_rows_match_the_reference_under_every_split") else {
        return;
    };
    if !is_hopper(&engine) {
        let name = "latent_rows_match_the_reference_under_every_split";
        let _ = writeln!(std::io::stderr(), "{name}: skipped: the device is no Hopper");
        return;
    }
    for split in [Split::Whole, Split::Chunks(5), Split::Parts(2), Split::Parts(16)] {
        assert!(judge(&engine, "cuda_latent_sm90a", split) > 0);
    }
}

/// Row 0 meets one score with every key, row 1 a score that rises from tile to tile: whatever the tiles of row 1 do to
/// the accumulators that both share, row 0 is `ln(keys)` above its score.
#[test]
fn prefill_keeps_a_row_that_stands_still_beside_one_that_rises() {
    let Some(engine) = engine("prefill_keeps_a_row_that_stands_still_beside_one_that_rises") else {
        return;
    };
    const KEYS: usize = 16 << 10;
    const DIM: usize = 128;
    let mut q = vec![bf16::ZERO; 2 * DIM];
    (q[0], q[DIM + 1]) = (bf16::ONE, bf16::ONE);
    let mut k = vec![bf16::ZERO; KEYS * DIM];
    for (key, row) in k.chunks_mut(DIM).enumerate() {
        // A score whose product with log2(e) / sqrt(128) is not exact.
        row[0] = bf16::from_f32(8000.0);
        row[1] = bf16::from_f32(u16::try_from(key / 64).map_or(0.0, f32::from));
    }
    let v = vec![bf16::ONE; KEYS * DIM];
    let problem = Problem::new(ProblemSpec::new(DType::BF16, 1, 1, DIM, &[2], &[KEYS]));
    let problem = problem.expect("valid");
    let view = |data: &'static [bf16], rows: usize| {
        TensorView::from(View::contiguous("x", data, &[rows, 1, DIM]).expect("fits"))
    };
    let inputs = Inputs::dense(view(q.leak(), 2), view(k.leak(), KEYS), view(v.leak(), KEYS));
    let (mut o, mut lse) = (vec![bf16::ZERO; 2 * DIM], vec![0f32; 2]);
    let mut outputs = Outputs {
        o: ViewMut::contiguous("o", &mut o, &[2, 1, DIM]).expect("fits").into(),
        lse: Some(ViewMut::contiguous("lse", &mut lse, &[2, 1]).expect("fits")),
    };
    let ran = run(&engine, "cuda_prefill", Split::Whole, &problem, &inputs, &mut outputs);
    assert!(ran.expect("runs"));
    drop(outputs);
    let score = f64::from(bf16::from_f32(8000.0).to_f32() * problem.scale());
    let want = score + (KEYS as f64).ln();
    // Two units in the last place of the LSE; the fault lost twenty-five.
    assert!((f64::from(lse[0]) - want).abs() < 2.5e-4, "{} and not {want}", lse[0]);
    assert!(o.iter().all(|&x| x == bf16::ONE), "weights do not sum to 1");
}
