//! `attn-bench train-step`: a small causal transformer block, trained.
//!
//! The invariant: before anything is trained or timed, the gradients of the engine are held against those of the f64
//! reference, by the error rule for the attention's and beside a materialised layer's for every weight; what follows is the loss of each step,
//! which must fall, and the time and the bytes of the whole layer, with the attention recomputed and with its matrix in memory.
//!
//! The attention runs on the CPU engine or on a CUDA device, the rest of the layer on the host. [`attention::Attention`] is where
//! an engine comes in: the layer, the check and the report take any.

mod adam;
mod attention;
mod baseline;
mod cost;
mod cuda;
mod engine;
mod fused;
mod gradients;
mod layer;
mod materialised;
mod network;
mod reference;

use std::io::{self, Write};

use attn_reference::random::Random;

use adam::Adam;
use attention::Shape;
use engine::{Backend, Engine};
use layer::Layer;
use network::{Batch, Parameters, step};

/// Options of `attn-bench train-step`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Where the attention runs.
    #[arg(long, value_enum, default_value_t = Backend::Cpu)]
    backend: Backend,
    /// Training steps.
    #[arg(long, default_value_t = 60)]
    steps: u32,
    /// Query heads; the layer is heads * dim wide.
    #[arg(long, default_value_t = 4)]
    heads: usize,
    /// Key/value heads.
    #[arg(long, default_value_t = 2)]
    kv_heads: usize,
    /// Elements of a head's row.
    #[arg(long, default_value_t = 32)]
    dim: usize,
    /// Tokens of each sequence that is trained on.
    #[arg(long, value_delimiter = ',', default_values_t = [64, 37, 50])]
    lengths: Vec<usize>,
    /// Probability that a weight of the attention is dropped.
    #[arg(long, default_value_t = 0.1)]
    dropout: f32,
    /// Tokens of the single sequence that the layer is timed with; none leaves the timing out.
    #[arg(long, value_delimiter = ',', default_values_t = [256, 1024, 2048])]
    time: Vec<usize>,
    /// Seed of weights, tokens and dropout.
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Why there is no trained layer, or a bad one.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TrainError {
    /// The call.
    #[error(transparent)]
    Call(#[from] attn_core::Error),
    /// The engine.
    #[error(transparent)]
    Engine(#[from] attn_kernels::Error),
    /// The selector.
    #[error(transparent)]
    Select(#[from] attn_select::Error),
    /// The report.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// An option.
    #[error("{field}: expected {expected}, got {got}")]
    Option {
        /// Its name.
        field: &'static str,
        /// What would do.
        expected: &'static str,
        /// What was given.
        got: String,
    },
    /// A gradient that is not the reference's.
    #[error("gradient of {tensor}: expected an error of at most {limit:.3e}, got {got:.3e}")]
    Gradient {
        /// The tensor.
        tensor: &'static str,
        /// The most that is accepted.
        limit: f64,
        /// The largest error.
        got: f64,
    },
    /// It did not learn.
    #[error("loss: expected one below {first:.4}, that of the first steps, got {last:.4}")]
    Loss {
        /// Mean of the first steps.
        first: f64,
        /// Mean of the last.
        last: f64,
    },
}

/// Tokens of the vocabulary.
const VOCABULARY: usize = 17;
/// Steps whose mean loss counts as that of the first and of the last.
const ENDS: usize = 5;
/// The feed-forward net's width, in widths of the layer.
const EXPANSION: usize = 4;

/// Checks, trains and times.
pub(crate) fn run(args: &Args) -> Result<(), TrainError> {
    let out = &mut io::stdout().lock();
    let shape = shape(args, &args.lengths)?;
    let engine = Engine::open(args.backend)?;
    writeln!(out, "attention on {}, in {}", engine.describe(), shape.dtype)?;
    let mut random = Random::new(args.seed);
    let layer = Layer::new(shape.clone(), EXPANSION * shape.width());
    let batch = Batch::sums(&args.lengths, VOCABULARY, &mut random);
    let mut parameters = Parameters::random(&layer, VOCABULARY, &mut random);
    let mut attention = engine.attention(&shape)?;
    for plan in attention.plans() {
        writeln!(out, "{plan}")?;
    }
    gradients::check(out, &layer, &parameters, &mut *attention, &[args.seed, 0], &batch)?;

    let mut adam = Adam::new(&parameters, 3e-3);
    let mut losses = Vec::new();
    for n in 0..args.steps {
        // One layer: the step alone tells its calls apart.
        let stream = [args.seed, u64::from(n)];
        let (loss, mut gradients) = step(&layer, &parameters, &mut *attention, &stream, &batch)?;
        adam.step(&mut parameters, &mut gradients);
        losses.push(loss);
        if n % 10 == 0 || n + 1 == args.steps {
            writeln!(out, "step {n:4}  loss {loss:.4}")?;
        }
    }
    check_loss(&losses)?;
    cost::report(out, args, &engine)
}

/// The attention of the layer over sequences of these lengths.
fn shape(args: &Args, lengths: &[usize]) -> Result<Shape, TrainError> {
    let refuse = |field, expected, got: String| Err(TrainError::Option { field, expected, got });
    if lengths.is_empty() || lengths.contains(&0) {
        return refuse("lengths", "sequences of at least one token", format!("{lengths:?}"));
    }
    if args.heads == 0 || args.kv_heads == 0 || !args.heads.is_multiple_of(args.kv_heads) {
        let got = format!("{} and {}", args.heads, args.kv_heads);
        return refuse("heads", "a multiple of kv-heads, both at least one", got);
    }
    let Args { heads, kv_heads, dim, dropout, .. } = *args;
    let dtype = args.backend.dtype();
    let shape = Shape { lengths: lengths.to_vec(), heads, kv_heads, dim, dropout, dtype };
    // Sizes and rate are refused in the problem's own words.
    shape.problem(attn_core::Pass::Backward)?;
    Ok(shape)
}

fn check_loss(losses: &[f64]) -> Result<(), TrainError> {
    if losses.len() < 2 * ENDS {
        return Ok(());
    }
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    let (first, last) = (mean(&losses[..ENDS]), mean(&losses[losses.len() - ENDS..]));
    if last < first { Ok(()) } else { Err(TrainError::Loss { first, last }) }
}

#[cfg(test)]
mod tests;
