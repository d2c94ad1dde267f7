//! The optimiser: Adam, with its two moments of every weight.
//!
//! Source: Kingma and Ba, "Adam", arXiv:1412.6980, algorithm 1.
//! The invariant: the order of the tensors is the same in every step.

use super::network::Parameters;

const DECAY: [f32; 2] = [0.9, 0.99];
const EPSILON: f32 = 1e-8;

/// The moments of a model's weights.
#[derive(Debug)]
pub(super) struct Adam {
    rate: f32,
    steps: i32,
    first: Parameters,
    second: Parameters,
}

impl Adam {
    pub(super) fn new(parameters: &Parameters, rate: f32) -> Self {
        Self { rate, steps: 0, first: parameters.zeros(), second: parameters.zeros() }
    }

    /// Moves the weights against their gradients.
    pub(super) fn step(&mut self, parameters: &mut Parameters, gradients: &mut Parameters) {
        self.steps += 1;
        let bias = DECAY.map(|decay| 1.0 - decay.powi(self.steps));
        let moments = self.first.all_mut().into_iter().zip(self.second.all_mut());
        let weights = parameters.all_mut().into_iter().zip(gradients.all_mut());
        for (((_, first), (_, second)), ((_, weights), (_, gradients))) in moments.zip(weights) {
            for (((m, v), w), g) in first.iter_mut().zip(second).zip(weights).zip(gradients) {
                *m += (*g - *m) * (1.0 - DECAY[0]);
                *v += (*g * *g - *v) * (1.0 - DECAY[1]);
                *w -= self.rate * (*m / bias[0]) / ((*v / bias[1]).sqrt() + EPSILON);
            }
        }
    }
}
