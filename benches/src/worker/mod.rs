//! `attn-bench worker`: this engine as a contestant among others, asked case by case over a pipe.
//!
//! The invariant: standard output carries the protocol and nothing else, one JSON object a line, and every case gets
//! an answer: times, or an error. A case is timed only after its output agreed with the naive kernel's.

mod backward;
pub(crate) mod check;
pub(crate) mod clock;
pub(crate) mod latent;
pub(crate) mod normals;
mod request;
pub(crate) mod setup;
pub(crate) mod step;
mod workload;

use std::io::{self, BufRead, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use attn_core::{Pass, Phase};
use attn_kernels::cuda::Workspace;
use serde_json::{Value, json};

use crate::device::Gpu;
use clock::{Clock, Pace};
use normals::Normals;
use request::{Case, Heads, Request};
use setup::{Planner, Pool, Question, Setup};

/// Options of `attn-bench worker`.
///
/// The protocol: JSON lines `{"section", "cases", "keep", "deadline"}` come in on standard input; lines
/// `{"peer", "id", "ms", ...}` or `{"peer", "id", "error"}`, one or more a case, and `{"done"}` after each section, go out.
/// The first line that goes out is `{"ready"}`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Measuring aids, from the environment: PEERS_REST (idle seconds before timing), \
PEERS_TARGET_MS (timed milliseconds), ATTN_KERNEL (switch the other kernels off), ATTN_TILE (rows,keys in place of \
the plan's tile), ATTN_SPLITS (parts of the keys), ATTN_DECODE_MORE (decode over more pages and caches)."
)]
pub(crate) struct Args {
    /// Only contestants of ours whose name contains this; they are `attn`, `attn_p16` and `attn_p64`, for gradients
    /// `attn_determ` and for some of them `attn_sm80`, and where `ATTN_DECODE_MORE` is set also `attn_p1` to `attn_p256`, `attn_fp8_p16`, `attn_invariant_p16` and `attn_rows8_p16`.
    #[arg(long, default_value = "")]
    only: String,
}

/// Why the worker ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WorkerError {
    /// No device.
    #[error(transparent)]
    Engine(#[from] attn_kernels::Error),
    /// The pipe.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A measuring aid that makes no sense.
    #[error("{0}")]
    Aid(String),
    /// A message that is not the protocol's.
    #[error("message: expected {{\"section\", \"cases\"}}")]
    Message(#[from] serde_json::Error),
}

/// Answers until standard input ends.
pub(crate) fn run(args: &Args) -> Result<(), WorkerError> {
    let mut worker = match Worker::new(args) {
        Ok(worker) => worker,
        Err(error) => {
            say(&json!({ "fatal": error.to_string() }))?;
            return Err(error);
        }
    };
    say(&worker.ready()?)?;
    for line in io::stdin().lock().lines() {
        let line = line?;
        if line.trim().is_empty() {
            continue;
        }
        let request: Request = serde_json::from_str(&line)?;
        for case in &request.cases {
            worker.answer(&request, case)?;
        }
        if !request.keep {
            worker.pool = None;
        }
        say(&json!({ "done": request.section }))?;
    }
    Ok(())
}

pub(crate) fn say(line: &Value) -> io::Result<()> {
    let out = &mut io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

#[derive(Debug)]
struct Worker<'a> {
    gpu: Gpu,
    planner: Planner,
    normals: Normals,
    pool: Option<Pool>,
    pace: Pace,
    only: &'a str,
    /// Whether decode cases are answered over other pages and caches too.
    has_more: bool,
}

/// A contestant of ours and what it is asked.
type Contestant = (&'static str, Question);

impl<'a> Worker<'a> {
    fn new(args: &'a Args) -> Result<Self, WorkerError> {
        let gpu = Gpu::open()?;
        let planner = Planner::from_env(&gpu).map_err(WorkerError::Aid)?;
        let (normals, pace) = (Normals::new(), Pace::from_env());
        let has_more = std::env::var_os("ATTN_DECODE_MORE").is_some_and(|value| !value.is_empty());
        Ok(Self { gpu, planner, normals, pool: None, pace, only: &args.only, has_more })
    }

    fn ready(&self) -> Result<Value, attn_kernels::Error> {
        let (major, minor) = self.gpu.engine.driver_version()?;
        Ok(json!({
            "ready": "attn",
            "version": env!("CARGO_PKG_VERSION"),
            "gpu": self.gpu.engine.caps().cuda.map(|cuda| cuda.name),
            "driver": crate::machine::driver(),
            "cuda": format!("{major}.{minor}"),
            "sources": attn_kernels::source::fingerprint(),
        }))
    }

    /// Answers one case with a line for each contestant.
    fn answer(&mut self, request: &Request, case: &Case) -> io::Result<()> {
        let error = |peer: &str, text: &str| json!({ "peer": peer, "id": case.id, "error": text });
        if request.deadline.is_some_and(|deadline| now() > deadline) {
            return say(&error("attn", "section deadline"));
        }
        let contestants = match contestants(&request.section, case, self.has_more) {
            Ok(contestants) => contestants,
            Err(text) => return say(&error("attn", &text)),
        };
        for (peer, question) in contestants {
            if !peer.contains(self.only) {
                continue;
            }
            let line = match self.measure(&request.section, case, &question) {
                Ok(mut line) => {
                    line["peer"] = peer.into();
                    line["id"] = case.id.as_str().into();
                    line
                }
                Err(text) => error(peer, &text),
            };
            say(&line)?;
        }
        Ok(())
    }

    /// Checks a contestant and times it.
    fn measure(
        &mut self,
        section: &str,
        case: &Case,
        question: &Question,
    ) -> Result<Value, String> {
        let text = |error: attn_kernels::Error| error.to_string();
        if question.pooled.is_some() && self.pool.is_none() {
            self.pool = Some(Pool::new(&self.gpu, &mut self.normals).map_err(text)?);
        }
        let (gpu, planner, pool) = (&self.gpu, &self.planner, self.pool.as_ref());
        if question.spec.pass == Pass::Backward {
            let at = (section, case);
            return backward::measure(gpu, planner, &mut self.normals, self.pace, at, question);
        }
        let mut setup = Setup::new(gpu, planner, &mut self.normals, pool, question)?;
        let mut workspace = Workspace::new();
        {
            let (plan, inputs, mut outputs) = setup.tensors(pool)?;
            let forward = &gpu.engine;
            forward
                .forward(plan, &inputs[0], &mut outputs, &mut workspace, &gpu.stream)
                .map_err(text)?;
        }
        let rel_err = check::check(gpu, planner, pool, &setup)?;
        let rotations = setup.rotations;
        let (plan, inputs, mut outputs) = setup.tensors(pool)?;
        let mut line = json!({
            "rel_err": rel_err,
            "kernel": plan.kernel,
            "tile": format!("{}x{}", plan.tile.q, plan.tile.kv),
            "split": plan.split.to_string(),
            "rotations": rotations,
        });
        if section != "check" {
            let clock = Clock { engine: &gpu.engine, stream: &gpu.stream, pace: self.pace };
            let mut call = |n: usize| {
                gpu.engine.forward(plan, &inputs[n], &mut outputs, &mut workspace, &gpu.stream)
            };
            let times = if section == "latency" {
                clock.latency(&mut call).map(|latency| (latency.ms, json!(latency)))
            } else {
                let eager = section == "decode";
                clock.bench(&mut call, rotations, eager).map(|times| (times.ms, json!(times)))
            };
            let (ms, times) = times.map_err(text)?;
            merge(&mut line, times);
            if let Some(flops) = case.flops {
                line["tflops"] = (flops / ms / 1e9).into();
            }
            if let Some(bytes) = case.bytes {
                line["gbps"] = (bytes / ms / 1e6).into();
            }
        }
        line["temp_bytes"] = workspace.bytes().into();
        Ok(line)
    }
}

/// Adds the fields of one object to another.
pub(crate) fn merge(line: &mut Value, more: Value) {
    if let (Value::Object(line), Value::Object(more)) = (line, more) {
        line.extend(more);
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// Who answers a case, and what each is asked.
fn contestants(section: &str, case: &Case, has_more: bool) -> Result<Vec<Contestant>, String> {
    if case.backward {
        let forward = masked(case.kind.as_deref(), case.heads()?, case.batch()?, case.tokens()?)?;
        return Ok(forward.into_iter().flat_map(|(_, question)| gradients(&question)).collect());
    }
    match section {
        "bwd" => {
            let (heads, tokens) = (case.heads()?, case.tokens()?);
            let lens = vec![tokens; case.batch()?];
            let forward = Question::dense(heads, &lens, &lens, case.is_causal()?);
            let mut all = gradients(&forward);
            if is_answered_portably(heads, tokens) {
                let question = backward::question(forward, false).by("cuda_backward");
                all.push(("attn_sm80", question));
            }
            Ok(all)
        }
        "check" => checked(case.kind.as_deref()),
        "ceil" => Err("not measured here".to_owned()),
        "prefill" => {
            let lens = vec![case.tokens()?; case.batch()?];
            let question = Question::dense(case.heads()?, &lens, &lens, case.is_causal()?);
            Ok(vec![("attn", question)])
        }
        "fp8" => {
            let lens = vec![case.tokens()?; case.batch()?];
            let question = Question::dense(case.heads()?, &lens, &lens, case.is_causal()?);
            Ok(vec![("attn", question.fp8())])
        }
        "decode" => {
            let contexts = if case.kind.as_deref() == Some("uneven") {
                workload::uneven_contexts()
            } else {
                vec![case.context()?; case.batch()?]
            };
            let bytes = case.bytes.ok_or("bytes: expected a value in the case, got none")?;
            let question = decode(case.heads()?, &contexts).pooled(bytes);
            let mut all = pages(&question)?;
            if has_more {
                all.extend(more_decodes(&question)?);
            }
            Ok(all)
        }
        "mask" => masked(case.kind.as_deref(), case.heads()?, case.batch()?, case.tokens()?),
        "chunk" => {
            let (new, all) = case.chunk()?;
            let dense = Question::dense(case.heads()?, &[new], &[all], true);
            Ok(vec![("attn", dense.clone()), ("attn_p64", paged(dense, 64)?)])
        }
        "latency" => match case.kind.as_deref() {
            Some("prefill") => {
                let lens = vec![case.tokens()?; case.batch()?];
                let question = Question::dense(case.heads()?, &lens, &lens, case.is_causal()?);
                Ok(vec![("attn", question)])
            }
            _ => {
                let dense = decode(case.heads()?, &[case.context()?]);
                Ok(vec![("attn", dense.clone()), ("attn_p64", paged(dense, 64)?)])
            }
        },
        other => Err(format!("section: expected one of the protocol's, got {other}")),
    }
}

/// The gradients of a call, summed as they come and in order.
fn gradients(forward: &Question) -> Vec<Contestant> {
    let question = |is_deterministic| backward::question(forward.clone(), is_deterministic);
    vec![("attn", question(false)), ("attn_determ", question(true))]
}

/// Whether a case of the section `bwd` is answered by the kernel for `sm_80` too, beside PyTorch's `FLASH_ATTENTION`, which is
/// for `sm_80` as well. A row of each of two head dims says how they compare; more would take time from the other contestants.
fn is_answered_portably(heads: Heads, tokens: usize) -> bool {
    let rows = [Heads { q: 16, kv: 16, dim: 128 }, Heads { q: 32, kv: 32, dim: 64 }];
    tokens == 8192 && rows.contains(&heads)
}

/// One query row a sequence.
fn decode(heads: Heads, contexts: &[usize]) -> Question {
    Question::dense(heads, &vec![1; contexts.len()], contexts, false)
}

fn paged(question: Question, page_size: usize) -> Result<Question, String> {
    question.paged(page_size).map_err(|error| error.to_string())
}

/// The same call over both page sizes.
fn pages(question: &Question) -> Result<Vec<Contestant>, String> {
    Ok(vec![("attn_p16", paged(question.clone(), 16)?), ("attn_p64", paged(question.clone(), 64)?)])
}

/// The same step over other pages, from an fp8 cache, with bits that no batch mate changes, and with eight rows a sequence.
fn more_decodes(question: &Question) -> Result<Vec<Contestant>, String> {
    let mut all = Vec::new();
    for (name, size) in [
        ("attn_p1", 1),
        ("attn_p2", 2),
        ("attn_p8", 8),
        ("attn_p32", 32),
        ("attn_p128", 128),
        ("attn_p256", 256),
    ] {
        all.push((name, paged(question.clone(), size)?));
    }
    let invariant = with(question.clone(), |q| {
        let options = &mut q.spec.options;
        (options.batch_invariant, options.phase) = (true, Some(Phase::Decode));
    });
    let rows = with(question.clone(), |q| {
        (q.spec.q_lens, q.spec.causal) = (vec![8; q.spec.kv_lens.len()], true);
    });
    all.push(("attn_fp8_p16", paged(question.clone().fp8_cache(), 16)?));
    all.push(("attn_invariant_p16", paged(invariant, 16)?));
    all.push(("attn_rows8_p16", paged(rows, 16)?));
    Ok(all)
}

fn masked(
    kind: Option<&str>,
    heads: Heads,
    batch: usize,
    tokens: usize,
) -> Result<Vec<Contestant>, String> {
    let lens = vec![tokens; batch];
    let causal = Question::dense(heads, &lens, &lens, true);
    let question = match kind {
        Some("window") => with(causal, |q| q.spec.window_left = Some(workload::WINDOW_LEFT)),
        Some("doc") => Question::dense(heads, &workload::DOC_LENS, &workload::DOC_LENS, true),
        Some("softcap") => with(causal, |q| q.spec.softcap = Some(workload::SOFTCAP)),
        Some("blocksparse") => Question::dense(heads, &lens, &lens, false).block_sparse(),
        other => return Err(format!("kind: expected one of the protocol's, got {other:?}")),
    };
    Ok(vec![("attn", question)])
}

fn with(mut question: Question, change: impl FnOnce(&mut Question)) -> Question {
    change(&mut question);
    question
}

/// The protocol's checks, whose shapes are not in the case.
fn checked(kind: Option<&str>) -> Result<Vec<Contestant>, String> {
    let heads = Heads { q: 8, kv: 2, dim: 128 };
    let prefill = || Question::dense(heads, &[512; 2], &[512; 2], true);
    let question = match kind {
        Some("prefill") => prefill(),
        Some("window") => with(prefill(), |q| q.spec.window_left = Some(199)),
        Some("varlen") => Question::dense(heads, &[300, 212], &[300, 212], true),
        Some("fp8") => {
            let heads = Heads { kv: 8, ..heads };
            Question::dense(heads, &[512; 2], &[512; 2], true).fp8()
        }
        Some("bwd") => return Ok(gradients(&prefill())),
        Some("decode") => return pages(&decode(heads, &[1000; 3])),
        Some("blocksparse") => {
            let heads = Heads { q: 16, kv: 16, dim: 128 };
            return masked(Some("blocksparse"), heads, 1, workload::BLOCKS * workload::BLOCK);
        }
        _ => return Err("no such kernel yet".to_owned()),
    };
    Ok(vec![("attn", question)])
}

#[cfg(test)]
mod tests {
    use attn_core::{DType, Problem};

    use super::*;
    use crate::device::tests::hopper;

    fn ask(section: &str, fields: Value) -> Result<Vec<Contestant>, String> {
        let mut case = json!({ "id": "x" });
        merge(&mut case, fields);
        contestants(section, &serde_json::from_value(case).unwrap(), false)
    }

    fn names(section: &str, fields: Value) -> Vec<&'static str> {
        let contestants = ask(section, fields).unwrap();
        for (_, question) in &contestants {
            Problem::new(question.spec.clone()).unwrap();
        }
        contestants.into_iter().map(|(name, _)| name).collect()
    }

    #[test]
    fn every_section_has_its_contestants() {
        let heads = json!({ "B": 2, "S": 256, "Hq": 8, "Hkv": 2, "D": 64, "causal": true,
            "ctx": 128, "bytes": 131072.0, "Sq": 64, "Sk": 256 });
        let with = |kind: &str| {
            let mut fields = heads.clone();
            fields["kind"] = kind.into();
            fields
        };
        assert_eq!(names("prefill", heads.clone()), ["attn"]);
        let gradients = ["attn", "attn_determ"];
        assert_eq!(names("bwd", heads.clone()), gradients);
        assert_eq!(names("check", json!({ "kind": "bwd" })), gradients);
        for kind in ["window", "doc"] {
            let mut fields = with(kind);
            fields["bwd"] = true.into();
            assert_eq!(names("mask", fields), gradients);
        }
        assert_eq!(names("decode", heads.clone()), ["attn_p16", "attn_p64"]);
        assert_eq!(names("decode", with("uneven")), ["attn_p16", "attn_p64"]);
        assert_eq!(names("chunk", heads.clone()), ["attn", "attn_p64"]);
        for kind in ["window", "doc", "softcap", "blocksparse"] {
            assert_eq!(names("mask", with(kind)), ["attn"], "{kind}");
        }
        assert_eq!(names("fp8", heads.clone()), ["attn"]);
        assert_eq!(names("latency", with("prefill")), ["attn"]);
        assert_eq!(names("latency", with("decode")), ["attn", "attn_p64"]);
        for kind in ["prefill", "window", "varlen", "fp8", "blocksparse"] {
            assert_eq!(names("check", with(kind)), ["attn"], "{kind}");
        }
    }

    #[test]
    fn portable_gradients_are_of_one_length_and_one_kernel() {
        let row = |tokens: usize, heads: usize, dim: usize| json!({ "B": 2, "S": tokens, "Hq": heads, "Hkv": heads, "D": dim, "causal": true });
        for (heads, dim) in [(16, 128), (32, 64)] {
            assert_eq!(names("bwd", row(8192, heads, dim)), ["attn", "attn_determ", "attn_sm80"]);
            let kernels =
                ask("bwd", row(8192, heads, dim)).unwrap().into_iter().map(|(_, asked)| {
                    let problem = Problem::new(asked.spec).unwrap();
                    attn_select::choose(&problem, &hopper(), Gpu::catalogue()).unwrap().kernel
                });
            let hoppers = "cuda_backward_sm90a";
            assert_eq!(kernels.collect::<Vec<_>>(), [hoppers, hoppers, "cuda_backward"]);
        }
        for other in [row(2048, 16, 128), row(16384, 32, 64), row(8192, 8, 256)] {
            assert_eq!(names("bwd", other), ["attn", "attn_determ"]);
        }
    }

    #[test]
    fn more_decodes_are_over_the_same_keys() {
        let case =
            json!({ "id": "x", "B": 2, "Hq": 8, "Hkv": 2, "D": 64, "ctx": 128, "bytes": 131072.0 });
        let case = serde_json::from_value(case).unwrap();
        let all = contestants("decode", &case, true).unwrap();
        assert_eq!(all.len(), 11);
        for (name, question) in all {
            let problem = Problem::new(question.spec).unwrap();
            assert_eq!(problem.lengths().kv(1), 128, "{name}");
            let rows = if name == "attn_rows8_p16" { 8 } else { 1 };
            assert_eq!(problem.lengths().q(1), rows, "{name}");
            assert_eq!(problem.kv_dtype().is_fp8(), name == "attn_fp8_p16", "{name}");
            assert_eq!(problem.options().batch_invariant, name == "attn_invariant_p16", "{name}");
        }
    }

    #[test]
    fn what_is_not_there_is_an_error_of_the_case() {
        let strange = json!({ "kind": "strange" });
        assert_eq!(ask("check", strange).unwrap_err(), "no such kernel yet");
        assert_eq!(ask("ceil", json!({ "kind": "copy" })).unwrap_err(), "not measured here");
        assert!(ask("prefill", json!({})).unwrap_err().starts_with("S: expected"));
        assert!(ask("nonsense", json!({})).unwrap_err().contains("nonsense"));
    }

    #[test]
    fn fp8_questions_are_of_e4m3_throughout() {
        let shape = json!({ "B": 2, "S": 256, "Hq": 8, "Hkv": 8, "D": 64, "causal": true });
        for (section, fields) in [("fp8", shape), ("check", json!({ "kind": "fp8" }))] {
            let spec = ask(section, fields).unwrap().remove(0).1.spec;
            let problem = Problem::new(spec).unwrap();
            assert_eq!((problem.q_dtype(), problem.kv_dtype()), (DType::F8E4M3, DType::F8E4M3));
            assert_eq!((problem.out_dtype(), problem.group()), (DType::BF16, 1));
        }
    }

    #[test]
    fn window_and_softcap_are_the_protocols() {
        let shape = json!({ "B": 1, "S": 256, "Hq": 2, "Hkv": 2, "D": 64 });
        let spec = |kind: &str| {
            let mut fields = shape.clone();
            fields["kind"] = kind.into();
            ask("mask", fields).unwrap().remove(0).1.spec
        };
        assert_eq!((spec("window").window_left, spec("window").causal), (Some(4095), true));
        assert_eq!((spec("softcap").softcap, spec("softcap").causal), (Some(50.0), true));
        assert_eq!(spec("doc").q_lens.len(), 24);
    }
}
