//! Time and bytes of the whole layer, forward and backward, by what computes its attention.
//!
//! The invariant: contestants take turns, call by call, on the same data, and are timed after their outputs and gradients of the
//! input agreed. Recomputing pays only where it costs less than writing and reading the weights, and the rest of the layer
//! is the same for both: so it is the layer that is timed. Each line says where its attention ran: the materialised one is the
//! host's always, so that beside an attention on a device its time is that of another machine, and its bytes are of another memory.

use std::io::Write;
use std::time::{Duration, Instant};

use attn_core::DType;
use attn_reference::random::Random;

use super::attention::Attention;
use super::engine::Engine;
use super::layer::{Kept, Layer, Weights};
use super::materialised::Materialised;
use super::{Args, EXPANSION, TrainError, shape};

/// Timed rounds, of which the median counts.
const ROUNDS: usize = 5;

/// What one run of the layer gave.
struct Run {
    y: Vec<f32>,
    dx: Vec<f32>,
    forward: Duration,
    backward: Duration,
    /// Kept from the forward to the backward by the layer alone.
    kept: u64,
}

/// Times every length that was asked for.
pub(super) fn report(out: &mut impl Write, args: &Args, engine: &Engine) -> Result<(), TrainError> {
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    for &len in &args.time {
        let shape = shape(args, &[len])?;
        let mut random = Random::new(args.seed);
        let layer = Layer::new(shape.clone(), EXPANSION * shape.width());
        let weights = Weights::random(&shape, layer.hidden, &mut random);
        let mut normal = || (0..len * shape.width()).map(|_| random.normal()).collect::<Vec<_>>();
        let (x, dy) = (normal(), normal());
        let mut fused = engine.attention(&shape)?;
        let mut materialised = Materialised::new(&shape)?;
        let mut contestants: [&mut dyn Attention; 2] = [&mut *fused, &mut materialised];
        let stream = [args.seed, 1];
        let mut times = [const { Vec::new() }; 2];
        let mut kept = 0;
        for round in 0..=ROUNDS {
            let mut results = Vec::new();
            for (attention, times) in contestants.iter_mut().zip(&mut times) {
                let run = once(&layer, &weights, &mut **attention, &stream, &x, &dy)?;
                kept = run.kept;
                // The first round makes buffers and caches.
                if round > 0 {
                    times.push((run.forward, run.backward));
                }
                results.push((run.y, run.dx));
            }
            if round == 0 {
                let agree = |tensor, a, b| agree(tensor, a, b, shape.dtype);
                agree("y", &results[0].0, &results[1].0)?;
                agree("x", &results[0].1, &results[1].1)?;
            }
        }
        for (attention, mut times) in contestants.iter().zip(times) {
            times.sort_by_key(|(forward, backward)| *forward + *backward);
            let (forward, backward) = times[times.len() / 2];
            let memory = attention.memory();
            writeln!(
                out,
                "{len:6} tokens  {:19}  layer {:9.3} ms (forward {:.3}, backward {:.3})  kept {:.2} MiB, of it {:.2} the attention's, scratch {:.2} MiB",
                format!("{} on {}", attention.name(), attention.engine()),
                milliseconds(forward + backward),
                milliseconds(forward),
                milliseconds(backward),
                mib(kept + memory.kept),
                mib(memory.kept),
                mib(memory.scratch),
            )?;
        }
    }
    Ok(())
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn once(
    layer: &Layer,
    weights: &Weights,
    attention: &mut dyn Attention,
    stream: &[u64; 2],
    x: &[f32],
    dy: &[f32],
) -> Result<Run, TrainError> {
    let mut kept = Kept::default();
    let start = Instant::now();
    let y = layer.forward(weights, attention, stream, x, &mut kept)?;
    let forward = start.elapsed();
    let mut gradients = weights.zeros();
    let start = Instant::now();
    let dx = layer.backward(weights, attention, stream, (x, dy), &kept, &mut gradients)?;
    let backward = start.elapsed();
    Ok(Run { y, dx, forward, backward, kept: kept.bytes(x) })
}

/// Fails where two layers differ by more than a thousandth of the largest element: another mask or another formula, not
/// another order of sums. Where one of them rounds to 16 bits, by more than four roundings, those of inputs,
/// weights, outputs and gradients.
fn agree(tensor: &'static str, a: &[f32], b: &[f32], dtype: DType) -> Result<(), TrainError> {
    let largest = b.iter().fold(0f32, |max, x| max.max(x.abs()));
    let mut got = 0.0;
    for (a, b) in a.iter().zip(b) {
        let error = f64::from((a - b).abs());
        if error > got || error.is_nan() {
            got = error;
        }
    }
    let share = (4.0 * dtype.unit_roundoff()).max(1e-3);
    let limit = share * f64::from(largest);
    if got <= limit { Ok(()) } else { Err(TrainError::Gradient { tensor, limit, got }) }
}
