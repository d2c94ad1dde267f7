//! What a part of a sequence's keys leaves behind, and how parts become rows.
//!
//! Invariant: parts are joined in the order of their keys, one row at a time, so the bits of a row do
//! not depend on which worker finished first. A part without a visible key for some row is
//! `(0, -inf, 0)` there and joins as nothing; a NaN in any part reaches its row.

use attn_core::Problem;

use crate::cpu::prefill::Total;
use crate::cpu::simd::Simd;
use crate::cpu::workspace::lines;

/// Where the state of each query row lies in the scratch of a part.
///
/// Rows are ordered by KV head, then position, then head within the group.
#[derive(Debug, Clone, Copy)]
pub(super) struct PartLayout {
    rows: usize,
    value_dim: usize,
}

/// The state of the rows of one part.
#[derive(Debug)]
pub(super) struct PartState<'s> {
    /// Unnormalised outputs `[rows, value_dim]`.
    pub(super) o: &'s mut [f32],
    /// Base-2 running maxima.
    pub(super) max: &'s mut [f32],
    /// Sums relative to the maxima.
    pub(super) sum: &'s mut [f32],
}

impl PartLayout {
    pub(super) fn new(problem: &Problem, sequence: usize) -> Self {
        let rows = problem.lengths().q(sequence) * problem.q_heads();
        Self { rows, value_dim: problem.value_dim() }
    }

    /// Elements of a part, in whole cache lines.
    pub(super) fn len(self) -> usize {
        lines(self.rows * self.value_dim) + 2 * lines(self.rows)
    }

    /// The parts of a state.
    pub(super) fn state(self, part: &mut [f32]) -> PartState<'_> {
        let elements = self.rows * self.value_dim;
        let (o, rest) = part.split_at_mut(lines(elements));
        let (max, sum) = rest.split_at_mut(lines(self.rows));
        PartState { o: &mut o[..elements], max: &mut max[..self.rows], sum: &mut sum[..self.rows] }
    }

    /// Joins all parts into the first.
    pub(super) fn merge(self, simd: Simd, parts: &mut [f32]) -> PartState<'_> {
        let (first, others) = parts.split_at_mut(self.len());
        let joined = self.state(first);
        for row in 0..self.rows {
            let others = || others.chunks_exact(self.len()).map(|part| self.row(part, row));
            let top = others().fold(joined.max[row], |top, part| top.max(part.max));
            let shift = if top == f32::NEG_INFINITY { 0.0 } else { top };
            let o = &mut joined.o[row * self.value_dim..(row + 1) * self.value_dim];
            let weight = (joined.max[row] - shift).exp2();
            joined.sum[row] *= weight;
            if weight != 1.0 {
                simd.scale(o, weight);
            }
            for part in others() {
                let weight = (part.max - shift).exp2();
                joined.sum[row] += weight * part.sum;
                simd.add_scaled(o, weight, part.o);
            }
            joined.max[row] = top;
        }
        joined
    }

    /// Divides each row by its denominator and puts its natural-log LSE in place of its sum.
    ///
    /// `of_row` gives the factor of the row's values and its sink.
    pub(super) fn finish(
        self,
        simd: Simd,
        state: PartState<'_>,
        of_row: impl Fn(usize) -> (f32, Option<f32>),
    ) {
        for (row, o) in state.o.chunks_exact_mut(self.value_dim).enumerate() {
            let (value_factor, sink) = of_row(row);
            let total = Total::new(state.max[row], state.sum[row], sink);
            match total.factor {
                Some(factor) => simd.scale(o, factor * value_factor),
                None => o.fill(0.0),
            }
            state.sum[row] = total.lse;
        }
    }

    /// The outputs and LSEs that [`Self::finish`] left.
    pub(super) fn finished(self, parts: &[f32]) -> (&[f32], &[f32]) {
        let sums = lines(self.rows * self.value_dim) + lines(self.rows);
        (&parts[..self.rows * self.value_dim], &parts[sums..sums + self.rows])
    }

    fn row(self, part: &[f32], row: usize) -> RowOfPart<'_> {
        let maxima = lines(self.rows * self.value_dim);
        RowOfPart {
            o: &part[row * self.value_dim..(row + 1) * self.value_dim],
            max: part[maxima + row],
            sum: part[maxima + lines(self.rows) + row],
        }
    }
}

/// One row's state in one part.
struct RowOfPart<'s> {
    o: &'s [f32],
    max: f32,
    sum: f32,
}
