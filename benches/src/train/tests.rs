//! The layer's own derivatives, and that a few steps of the verb learn.

use super::materialised::Materialised;
use super::reference::Reference;
use super::*;

fn small(dropout: f32) -> (Layer, Batch, Parameters) {
    let mut random = Random::new(3);
    let shape = Shape { lengths: vec![5, 7], heads: 4, kv_heads: 2, dim: 8, dropout };
    let layer = Layer::new(shape, 48);
    let batch = Batch::sums(&layer.shape.lengths, 11, &mut random);
    let parameters = Parameters::random(&layer, 11, &mut random);
    (layer, batch, parameters)
}

#[test]
#[expect(clippy::cast_possible_truncation, reason = "the rounding of a distance to f32 is meant")]
fn gradients_of_every_weight_match_differences_of_the_loss() {
    for dropout in [0.0, 0.3] {
        let (layer, batch, mut parameters) = small(dropout);
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
        let (layer, batch, parameters) = small(dropout);
        let out = &mut Vec::new();
        let fused = &mut Fused::new(&engine, &layer.shape).unwrap();
        gradients::check(out, &layer, &parameters, fused, &[1, 2], &batch).unwrap();
        let matrix = &mut Materialised::new(&layer.shape).unwrap();
        gradients::check(out, &layer, &parameters, matrix, &[1, 2], &batch).unwrap();
        assert!(String::from_utf8_lossy(out).contains("weights: fused"));
    }
}

#[test]
fn loss_must_fall() {
    assert!(check_loss(&[3.0, 2.9, 2.8, 2.8, 2.7, 1.0, 1.0, 0.9, 0.8, 0.7]).is_ok());
    let error = check_loss(&[1.0; 10]).unwrap_err().to_string();
    assert!(error.starts_with("loss: expected one below 1.0000"), "{error}");
    assert!(check_loss(&[f64::NAN; 10]).is_err());
}
