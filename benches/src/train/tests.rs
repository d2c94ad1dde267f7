//! The layer's own derivatives, the judgement in both types, and that a few steps of the verb learn.

use attn_core::DType;
use attn_kernels::cpu::CpuEngine;

use super::attention::{Attention, Data, DataGradients, Memory};
use super::baseline::Baseline;
use super::engine::plans;
use super::fused::Fused;
use super::materialised::Materialised;
use super::reference::Reference;
use super::*;
use crate::device::Gpu;
use crate::device::tests::hopper;

fn small(dropout: f32, dtype: DType) -> (Layer, Batch, Parameters) {
    let mut random = Random::new(3);
    let shape = Shape { lengths: vec![5, 7], heads: 4, kv_heads: 2, dim: 8, dropout, dtype };
    let layer = Layer::new(shape, 48);
    let batch = Batch::sums(&layer.shape.lengths, 11, &mut random);
    let parameters = Parameters::random(&layer, 11, &mut random);
    (layer, batch, parameters)
}

#[test]
#[expect(clippy::cast_possible_truncation, reason = "the rounding of a distance to f32 is meant")]
fn gradients_of_every_weight_match_differences_of_the_loss() {
    for dropout in [0.0, 0.3] {
        let (layer, batch, mut parameters) = small(dropout, DType::F32);
        let mut attention = Reference::new(&layer.shape).unwrap();
        let stream = [5, 6];
        let (_, mut gradients) =
            step(&layer, &parameters, &mut attention, &stream, &batch).unwrap();
        for (n, (name, gradient)) in gradients.all_mut().into_iter().enumerate() {
            // Along its own gradient a tensor's slope is the square of its length.
            let square: f64 = gradient.iter().map(|&g| f64::from(g).powi(2)).sum();
            let length = square.sqrt();
            assert!(length > 1e-4, "{name}");
            let mut loss_at = |distance: f64| {
                let moved = parameters.all_mut().into_iter().nth(n).unwrap().1;
                let before = moved.clone();
                for (x, g) in moved.iter_mut().zip(&*gradient) {
                    *x += *g * (distance / length) as f32;
                }
                let (loss, _) = step(&layer, &parameters, &mut attention, &stream, &batch).unwrap();
                *parameters.all_mut().into_iter().nth(n).unwrap().1 = before;
                loss
            };
            let step = 1e-2;
            let slope = (loss_at(step) - loss_at(-step)) / (2.0 * step);
            assert!((slope / length - 1.0).abs() < 2e-2, "{name}: {slope} for {length}");
        }
    }
}

#[test]
fn engine_and_matrix_meet_the_rule_with_and_without_dropout() {
    let engine = CpuEngine::with(2, attn_kernels::cpu::Level::detect()).unwrap();
    for dropout in [0.0, 0.4] {
        let (layer, batch, parameters) = small(dropout, DType::F32);
        let out = &mut Vec::new();
        let fused = &mut Fused::new(&engine, &layer.shape).unwrap();
        gradients::check(out, &layer, &parameters, fused, &[1, 2], &batch).unwrap();
        let matrix = &mut Materialised::new(&layer.shape).unwrap();
        gradients::check(out, &layer, &parameters, matrix, &[1, 2], &batch).unwrap();
        assert!(String::from_utf8_lossy(out).contains("weights: fused on cpu"));
    }
}

/// An attention whose scores are too large by a share, as those of a wrong scale are.
#[derive(Debug)]
struct Scaled<A>(A, f32);

impl<A: Attention> Attention for Scaled<A> {
    fn name(&self) -> &'static str {
        "scaled"
    }

    fn forward(&mut self, data: &Data<'_>, o: &mut [f32]) -> Result<(), TrainError> {
        let q: Vec<f32> = data.q.iter().map(|x| x * self.1).collect();
        self.0.forward(&Data { q: &q, ..*data }, o)
    }

    fn backward(
        &mut self,
        data: &Data<'_>,
        o: &[f32],
        d_o: &[f32],
        gradients: DataGradients<'_>,
    ) -> Result<(), TrainError> {
        let q: Vec<f32> = data.q.iter().map(|x| x * self.1).collect();
        self.0.backward(&Data { q: &q, ..*data }, o, d_o, gradients)
    }

    fn memory(&self) -> Memory {
        self.0.memory()
    }
}

#[test]
fn judgement_in_16_bits_takes_its_roundings_and_no_more() {
    for dropout in [0.0, 0.4] {
        let (layer, batch, parameters) = small(dropout, DType::BF16);
        let check = |attention: &mut dyn Attention| {
            let out = &mut Vec::new();
            gradients::check(out, &layer, &parameters, attention, &[1, 2], &batch)
        };
        for mut one in Baseline::all(&layer.shape).unwrap() {
            check(&mut one).unwrap();
        }
        check(&mut Reference::new(&layer.shape).unwrap()).unwrap();
        let scaled = &mut Scaled(Reference::new(&layer.shape).unwrap(), 1.05);
        let error = check(scaled).unwrap_err().to_string();
        assert!(error.starts_with("gradient of"), "{error}");
    }
}

#[test]
fn device_takes_both_passes_in_tiles_with_and_without_dropout() {
    for dropout in [0.0, 0.1] {
        let (layer, ..) = small(dropout, DType::BF16);
        let [forward, backward] = plans(&layer.shape, &hopper(), Gpu::catalogue()).unwrap();
        let wanted = if dropout > 0.0 { "cuda_prefill" } else { "cuda_prefill_sm90a" };
        assert_eq!((forward.kernel, backward.kernel), (wanted, "cuda_backward"));
    }
}

#[test]
fn backend_is_the_host_unless_asked_otherwise() {
    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }
    let args = |words: &[&str]| {
        <Line as clap::Parser>::try_parse_from(words).map(|line| line.args.backend.dtype())
    };
    assert_eq!(args(&["x"]).unwrap(), DType::F32);
    assert_eq!(args(&["x", "--backend", "cuda"]).unwrap(), DType::BF16);
    assert!(args(&["x", "--backend", "gpu"]).is_err());
}

#[test]
fn loss_must_fall() {
    assert!(check_loss(&[3.0, 2.9, 2.8, 2.8, 2.7, 1.0, 1.0, 0.9, 0.8, 0.7]).is_ok());
    let error = check_loss(&[1.0; 10]).unwrap_err().to_string();
    assert!(error.starts_with("loss: expected one below 1.0000"), "{error}");
    assert!(check_loss(&[f64::NAN; 10]).is_err());
}
