//! The demo as a test: recorded tensors always, the real model where it is.

use attn_core::{
    DType, Inputs, Outputs, Phase, Problem, ProblemSpec, TensorView, TensorViewMut, View, ViewMut,
};
use attn_kernels::cpu::Level;
use attn_reference::judge_rows;

use super::bundled::{Layer, Recording, replay};
use super::*;

/// Scores of the recorded layers reach 41, where half a unit in the last place of f32 is 1.9e-6: a few
/// such roundings in a score of 64 products move a weight by 1e-5, and outputs reach 2. The error rule, derived
/// from the data, is applied beside it.
const LIMIT: f64 = 2e-5;

fn engine() -> Backend {
    backend(BackendName::Cpu).expect("threads start")
}

#[test]
fn recorded_layers_match_on_every_backend() {
    let recording = Recording::load().expect("bundled");
    for backend in [engine(), Backend::Reference] {
        let is_reference = matches!(backend, Backend::Reference);
        let room = recording.tokens.len() + serving::PAGE_SIZE;
        let mut serving = Serving::new(recording.shape, room, backend).expect("fits");
        let worst = replay(&recording, &mut serving).expect("runs");
        assert!(worst < LIMIT, "worst error {worst}");
        assert!(serving.ledger().worst().is_some_and(|worst| worst < LIMIT));
        // 21 rows of three grouped heads fill tiles; one row does not.
        let kernels = serving.ledger().kernels();
        let naive = attn_reference::naive::NAME;
        match is_reference {
            true => assert_eq!(kernels, [("prefill", naive), ("decode", naive)]),
            false => assert_eq!(kernels, [("prefill", "cpu_prefill"), ("decode", "cpu_decode")]),
        }
    }
}

/// Runs the last `rows` rows of a recorded layer against all of its keys and compares O and LSE.
fn check_layer(
    layer: &Layer,
    shape: Shape,
    rows: usize,
    run: impl FnOnce(&Problem, &Inputs<'_>, &mut Outputs<'_>),
) {
    let Shape { q_heads, kv_heads, head_dim, .. } = shape;
    let tokens = layer.k.len() / (kv_heads * head_dim);
    let mut spec = ProblemSpec::new(DType::F32, q_heads, kv_heads, head_dim, &[rows], &[tokens]);
    spec.causal = true;
    spec.options.phase = Some(if rows > 16 { Phase::Prefill } else { Phase::Decode });
    let problem = Problem::new(spec).expect("valid");
    let view =
        |data, shape: &[usize]| TensorView::F32(View::contiguous("x", data, shape).expect("fits"));
    let first = (tokens - rows) * q_heads;
    let q_shape = [rows, q_heads, head_dim];
    let kv_shape = [tokens, kv_heads, head_dim];
    let inputs = Inputs::dense(
        view(&layer.q[first * head_dim..], &q_shape),
        view(&layer.k, &kv_shape),
        view(&layer.v, &kv_shape),
    );
    let mut o = vec![f32::NAN; rows * q_heads * head_dim];
    let mut lse = vec![f32::NAN; rows * q_heads];
    let mut outputs = Outputs {
        o: TensorViewMut::F32(ViewMut::contiguous("o", &mut o, &q_shape).expect("fits")),
        lse: Some(ViewMut::contiguous("lse", &mut lse, &q_shape[..2]).expect("fits")),
    };
    run(&problem, &inputs, &mut outputs);
    for (got, want) in [(&o, &layer.o[first * head_dim..]), (&lse, &layer.lse[first..])] {
        for (got, want) in got.iter().zip(want) {
            assert!(f64::from((got - want).abs()) < LIMIT, "expected {want}, got {got}");
        }
    }
    let rows: Vec<(usize, usize)> = (0..rows).map(|row| (0, row)).collect();
    let lse = View::contiguous("lse", &lse, &q_shape[..2]).expect("fits");
    let verdict = judge_rows(&problem, &inputs, &rows, &view(&o, &q_shape), &lse).expect("fits");
    assert!(verdict.o.is_within() && verdict.lse.is_within(), "{verdict}");
}

#[test]
fn recorded_layers_match_o_and_lse_on_every_engine() {
    let recording = Recording::load().expect("bundled");
    let tokens = recording.tokens.len();
    for layer in &recording.layers {
        for rows in [tokens, 16, 1] {
            check_layer(layer, recording.shape, rows, |problem, inputs, outputs| {
                let outputs = Outputs {
                    o: outputs.o.reborrow(),
                    lse: outputs.lse.as_mut().map(ViewMut::reborrow),
                };
                attn_reference::naive::forward(problem, inputs, outputs).expect("runs");
            });
            for level in Level::ALL.into_iter().filter(|level| level.is_available()) {
                let engine = CpuEngine::with(2, level).expect("available");
                check_layer(layer, recording.shape, rows, |problem, inputs, outputs| {
                    let caps = engine.caps();
                    let plan = attn_select::choose(problem, &caps, attn_kernels::catalog())
                        .expect("a CPU kernel");
                    engine.forward(&plan, inputs, outputs, &mut Workspace::new()).expect("runs");
                });
            }
        }
    }
}

fn model() -> Option<(Llama, Tokenizer)> {
    let explicit = std::env::var_os("ATTN_MODEL").map(PathBuf::from);
    let path = match explicit {
        Some(path) => path,
        None => match ModelStore::from_environment(SMOLLM2).cached() {
            Ok(path) => path,
            Err(attempt) => {
                println!("skipped: no model at {}: {}", attempt.what, attempt.failure);
                return None;
            }
        },
    };
    Some(model::load(&path).expect("a readable model"))
}

fn args(batch: u16) -> Args {
    Args { prompt: PROMPT.to_owned(), tokens: 40, backend: BackendName::Cpu, model: None, batch }
}

#[test]
fn greedy_tokens_of_the_recorded_prompt_are_reproduced() {
    let Some((llama, tokenizer)) = model() else { return };
    let recording = Recording::load().expect("bundled");
    let prompt = vec![tokenizer.encode(PROMPT).expect("ASCII")];
    assert_eq!(prompt[0], recording.tokens[..recording.prompt_len]);
    let mut serving = serve(&llama, &prompt, &args(1)).expect("fits");
    let result = generate(&llama, &tokenizer, &mut serving, &prompt, 40, |_, _| {}).expect("runs");
    assert_eq!(result.tokens[0], recording.greedy());
}

#[test]
fn batch_shares_its_prefix_and_changes_no_text() {
    let Some((llama, tokenizer)) = model() else { return };
    let args = args(3);
    let prompts: Vec<Vec<u32>> =
        prompts(&args).iter().map(|p| tokenizer.encode(p).expect("ASCII")).collect();
    let mut serving = serve(&llama, &prompts, &args).expect("fits");
    let together =
        generate(&llama, &tokenizer, &mut serving, &prompts, 12, |_, _| {}).expect("runs");
    let stats = serving.stats();
    assert!(stats.hit_tokens >= 2 * 16, "the first page is found twice: {stats:?}");
    for (n, prompt) in prompts.iter().enumerate() {
        let alone = vec![prompt.clone()];
        let mut serving = serve(&llama, &alone, &args).expect("fits");
        let result =
            generate(&llama, &tokenizer, &mut serving, &alone, 12, |_, _| {}).expect("runs");
        assert_eq!(result.tokens[0], together.tokens[n], "sequence {n}");
    }
}
