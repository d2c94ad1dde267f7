//! Three numbers of each query row that turn scores into weights and their gradients, and the gradient
//! of the sinks, which is made of nothing else.
//!
//! The invariant: with the final statistics, a row's weights `exp2(s - shift) * factor` and that of its
//! sink sum to 1, and `delta` is the sum of the weights times their gradients. They are sums over the
//! recomputed scores, made by the pass over query rows, and not what the forward stored: an f32 LSE
//! of size `x` is off by up to `x * 2^-24`, which is a relative error of every weight of the row, and an output
//! in 16 bits is off by far more. Score gradients must cancel to the last bit where keys have a large
//! component in common; the stored LSE and output are only where the sums start from.

use std::ops::Range;

use attn_core::{Error, Problem, ViewMut};
use parking_lot::Mutex;

use super::{Call, Team, area, unchecked};
use crate::cpu::workspace::carve;

/// Largest LSE that shifts may be made from: it is within an eighth of what it stands for in base 2.
pub(super) const LARGEST_LSE: f32 = 1_048_576.0;
/// From this size on, a shift is lowered by [`HEADROOM`].
const LARGE_SHIFT: f64 = 64.0;
/// Binary digits that weights are then too large: vectors flush what lies below `2^-126` to 0, which beside
/// one outlying score may be all the rest of a row. Smaller shifts would lose digits by it.
const HEADROOM: f64 = 24.0;

/// The statistics of all query rows of a call, each array in the order sequence, KV head, flattened
/// row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Statistics<'s> {
    shift: &'s [f32],
    factor: &'s [f32],
    delta: &'s [f32],
}

/// Where the statistics of consecutive flattened rows go.
#[derive(Debug)]
pub(super) struct StatisticsMut<'s> {
    pub(super) shift: &'s mut [f32],
    pub(super) factor: &'s mut [f32],
    pub(super) delta: &'s mut [f32],
}

/// The statistics of consecutive flattened rows.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowStatistics<'s> {
    /// What is subtracted from base-2 exponents; +inf for a row without keys.
    pub(super) shift: &'s [f32],
    /// What the weights are still to be multiplied by.
    pub(super) factor: &'s [f32],
    /// What is subtracted from the gradients of the weights.
    pub(super) delta: &'s [f32],
}

/// Scratch of the statistics of all rows, in f32.
pub(super) fn scratch_len(problem: &Problem) -> usize {
    area([(problem.lengths().total_q(), problem.q_heads()); 3])
}

impl<'s> StatisticsMut<'s> {
    /// For all rows of a call.
    pub(super) fn carve(rest: &mut &'s mut [f32], problem: &Problem) -> Self {
        let len = problem.lengths().total_q() * problem.q_heads();
        Self { shift: carve(rest, len), factor: carve(rest, len), delta: carve(rest, len) }
    }

    /// Cuts off the first `count` rows.
    pub(super) fn take(&mut self, count: usize) -> Self {
        let take = |from: &mut &'s mut [f32]| {
            let (piece, rest) = std::mem::take(from).split_at_mut(count);
            *from = rest;
            piece
        };
        Self {
            shift: take(&mut self.shift),
            factor: take(&mut self.factor),
            delta: take(&mut self.delta),
        }
    }

    pub(super) fn reborrow(&mut self) -> StatisticsMut<'_> {
        StatisticsMut { shift: self.shift, factor: self.factor, delta: self.delta }
    }

    /// Some of the rows.
    pub(super) fn part(&mut self, rows: Range<usize>) -> StatisticsMut<'_> {
        StatisticsMut {
            shift: &mut self.shift[rows.clone()],
            factor: &mut self.factor[rows.clone()],
            delta: &mut self.delta[rows],
        }
    }

    pub(super) fn finish(self) -> Statistics<'s> {
        Statistics { shift: self.shift, factor: self.factor, delta: self.delta }
    }
}

impl Statistics<'_> {
    pub(super) fn rows(
        &self,
        problem: &Problem,
        sequence: usize,
        kv_head: usize,
        rows: Range<usize>,
    ) -> RowStatistics<'_> {
        let lengths = problem.lengths();
        let first = lengths.q_rows(sequence).start * problem.q_heads()
            + kv_head * lengths.q(sequence) * problem.group();
        let rows = first + rows.start..first + rows.end;
        RowStatistics {
            shift: &self.shift[rows.clone()],
            factor: &self.factor[rows.clone()],
            delta: &self.delta[rows],
        }
    }
}

/// The shift of a row with this LSE.
#[expect(clippy::cast_possible_truncation, reason = "the rounding to f32 is meant")]
pub(super) fn shift(lse: f32) -> f32 {
    if lse == f32::NEG_INFINITY {
        return f32::INFINITY;
    }
    let shift = f64::from(lse) * std::f64::consts::LOG2_E;
    (if shift.abs() < LARGE_SHIFT { shift } else { shift - HEADROOM }) as f32
}

/// What a row's sums over the keys say.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowSums {
    pub(super) shift: f32,
    /// Sum of the weights, without the factor.
    pub(super) weights: f32,
    /// The delta that `gradients` was computed with.
    pub(super) first_delta: f32,
    /// Sum of the score gradients, without the factor.
    pub(super) gradients: f32,
    pub(super) sink: Option<f32>,
}

impl RowSums {
    /// The factor, the delta, and how far the delta is above the first one.
    #[expect(clippy::cast_possible_truncation, reason = "the rounding to f32 is meant")]
    pub(super) fn finish(self) -> (f32, f32, f32) {
        let sink = self.sink.map_or(0.0, |sink| sink_weight(sink, self.shift));
        let total = f64::from(self.weights) + sink;
        if total == 0.0 || total == f64::INFINITY {
            // No key at all, or none beside the sink.
            return (0.0, 0.0, 0.0);
        }
        let first = f64::from(self.first_delta);
        let above = (f64::from(self.gradients) - first * sink) / total;
        // The rounded delta is the one that the other passes will have. Where the gradients cancel
        // exactly, as those of a single key do, it is the first one.
        let delta = (first + above) as f32;
        (total.recip() as f32, delta, delta - self.first_delta)
    }
}

/// The weight of a sink, without the factor; 0 in a row without keys, whose delta is 0 anyway.
fn sink_weight(sink: f32, shift: f32) -> f64 {
    (f64::from(sink) * std::f64::consts::LOG2_E - f64::from(shift)).exp2()
}

/// The gradient of the sinks: minus the sum over all rows of a head of the sink's weight times delta.
pub(super) fn sinks(
    team: &mut Team<'_, '_>,
    call: &Call<'_, '_>,
    statistics: &Statistics<'_>,
    dsinks: &mut ViewMut<'_, f32>,
) -> Result<(), Error> {
    let Some(sinks) = &call.inputs.sinks else {
        return Err(Error::invalid("sinks", "a tensor, as the problem states", "none"));
    };
    let dsinks = Mutex::new(dsinks);
    team.run((0..call.problem.q_heads()).collect(), |head, _| {
        let sink = sinks.get(&[head]).ok_or_else(unchecked)?;
        let sum = sink_gradient(call.problem, statistics, head, sink);
        dsinks.lock().set(&[head], sum).then_some(()).ok_or_else(unchecked)
    })
}

#[expect(clippy::cast_possible_truncation, reason = "the rounding to f32 is meant")]
fn sink_gradient(problem: &Problem, statistics: &Statistics<'_>, head: usize, sink: f32) -> f32 {
    let group = problem.group();
    let mut sum = 0f64;
    for sequence in 0..problem.lengths().batch() {
        let rows = 0..problem.lengths().q(sequence) * group;
        let of_rows = statistics.rows(problem, sequence, head / group, rows);
        for row in (head % group..of_rows.shift.len()).step_by(group) {
            let (factor, delta) = (f64::from(of_rows.factor[row]), f64::from(of_rows.delta[row]));
            if factor > 0.0 {
                sum -= sink_weight(sink, of_rows.shift[row]) * factor * delta;
            }
        }
    }
    sum as f32
}
