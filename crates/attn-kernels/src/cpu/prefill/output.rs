//! Finished rows to the output tensors.
//!
//! Invariant: each row of the query side is written exactly once, by the task that owns it, through
//! the bounds-checked view; padding rows are written before the tasks start. One lock around the
//! views is held for the copy of one tile alone: splitting strided views among threads without it
//! would need unsafe code to save a thousandth of the time.

use std::ops::Range;

use attn_core::{Element, Error, Outputs, Problem, TensorViewMut, ViewMut};

use super::unchecked;
use crate::cpu::simd::Simd;

/// The output tensors of a call.
pub(in crate::cpu) struct OutputRows<'p, 'o> {
    simd: Simd,
    problem: &'p Problem,
    o: TensorViewMut<'o>,
    lse: Option<ViewMut<'o, f32>>,
}

impl<'p, 'o> OutputRows<'p, 'o> {
    pub(in crate::cpu) fn new(
        simd: Simd,
        problem: &'p Problem,
        outputs: &'o mut Outputs<'_>,
    ) -> Self {
        let lse = outputs.lse.as_mut().map(ViewMut::reborrow);
        Self { simd, problem, o: outputs.o.reborrow(), lse }
    }

    /// Writes 0 to the padding rows of the output, -inf to those of the LSE.
    pub(in crate::cpu) fn fill_padding(&mut self) -> Result<(), Error> {
        let lengths = self.problem.lengths();
        for sequence in 0..lengths.batch() {
            let padding = lengths.q(sequence)..lengths.longest_q();
            if padding.is_empty() {
                continue;
            }
            match &mut self.o {
                TensorViewMut::F32(o) => fill(o, sequence, padding.clone(), 0.0),
                TensorViewMut::F16(o) => fill(o, sequence, padding.clone(), Element::from_f32(0.0)),
                TensorViewMut::BF16(o) => {
                    fill(o, sequence, padding.clone(), Element::from_f32(0.0))
                }
            }
            .ok_or_else(unchecked)?;
            if let Some(lse) = &mut self.lse {
                fill(lse, sequence, padding, f32::NEG_INFINITY).ok_or_else(unchecked)?;
            }
        }
        Ok(())
    }

    /// Writes the flattened `rows` of one sequence and KV head.
    ///
    /// Shapes: `o` `[rows, value_dim]`, `lse` `[rows]`.
    pub(in crate::cpu) fn write(
        &mut self,
        sequence: usize,
        kv_head: usize,
        rows: Range<usize>,
        o: &[f32],
        lse: &[f32],
    ) -> Option<()> {
        let (problem, simd) = (self.problem, self.simd);
        let place = Place { problem, sequence, first_head: kv_head * problem.group(), rows };
        match &mut self.o {
            TensorViewMut::F32(view) => place.copy(view, o, |src, dst| dst.copy_from_slice(src))?,
            TensorViewMut::F16(view) => {
                place.copy(view, o, |src, dst| simd.narrow_f16(src, dst))?;
            }
            TensorViewMut::BF16(view) => {
                place.copy(view, o, |src, dst| simd.narrow_bf16(src, dst))?;
            }
        }
        if let Some(view) = &mut self.lse {
            let mut view = problem.q_rows_mut(view, sequence)?;
            for (at, &lse) in place.indices().zip(lse) {
                view.set(&at, lse).then_some(())?;
            }
        }
        Some(())
    }
}

/// Where flattened rows lie in a tensor.
struct Place<'p> {
    problem: &'p Problem,
    sequence: usize,
    first_head: usize,
    rows: Range<usize>,
}

impl Place<'_> {
    /// (position, head) of each row.
    fn indices(&self) -> impl Iterator<Item = [usize; 2]> + use<> {
        let (group, first_head) = (self.problem.group(), self.first_head);
        self.rows.clone().map(move |row| [row / group, first_head + row % group])
    }

    fn copy<E: Element>(
        &self,
        view: &mut ViewMut<'_, E>,
        o: &[f32],
        convert: impl Fn(&[f32], &mut [E]),
    ) -> Option<()> {
        let mut view = self.problem.q_rows_mut(view, self.sequence)?;
        let contiguous = view.layout().is_row_contiguous();
        for (at, src) in self.indices().zip(o.chunks_exact(self.problem.value_dim())) {
            if contiguous {
                convert(src, view.row_mut(&at)?);
            } else {
                for (d, &x) in src.iter().enumerate() {
                    view.set(&[at[0], at[1], d], E::from_f32(x)).then_some(())?;
                }
            }
        }
        Some(())
    }
}

/// Fills rows of one sequence of a padded tensor.
fn fill<T: Copy>(
    view: &mut ViewMut<'_, T>,
    sequence: usize,
    rows: Range<usize>,
    value: T,
) -> Option<()> {
    view.at_mut(sequence)?.into_narrow(0, rows)?.fill(value);
    Some(())
}
