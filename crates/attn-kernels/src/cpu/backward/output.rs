//! Finished gradients to the tensors of the caller.
//!
//! The invariant: each row is rounded and written exactly once, by the task that owns it, through the
//! bounds-checked view; padding rows are written before the tasks start, and what lies between rows
//! keeps its bits. One lock is held for the copy of a block: splitting strided views among threads
//! without it would need unsafe code to save a thousandth of the time.

use std::ops::Range;

use attn_core::{Element, Problem, TensorViewMut, ViewMut, dispatch_view_mut};
use half::{bf16, f16};

use super::Sizes;
use crate::cpu::simd::Simd;

/// The gradients of queries, keys and values.
pub(super) struct GradientRows<'p, 'o> {
    simd: Simd,
    problem: &'p Problem,
    dq: TensorViewMut<'o>,
    dk: TensorViewMut<'o>,
    dv: TensorViewMut<'o>,
}

impl<'p, 'o> GradientRows<'p, 'o> {
    pub(super) fn new(
        simd: Simd,
        problem: &'p Problem,
        dq: &'o mut TensorViewMut<'_>,
        dk: &'o mut TensorViewMut<'_>,
        dv: &'o mut TensorViewMut<'_>,
    ) -> Self {
        Self { simd, problem, dq: dq.reborrow(), dk: dk.reborrow(), dv: dv.reborrow() }
    }

    /// Writes 0 to the padding rows of dq; `None` when it does not fit the problem.
    pub(super) fn clear_query_padding(&mut self) -> Option<()> {
        let lengths = self.problem.lengths();
        for sequence in 0..lengths.batch() {
            clear(&mut self.dq, sequence, lengths.q(sequence)..lengths.longest_q())?;
        }
        Some(())
    }

    /// Writes 0 to the padding rows of dk and dv; `None` when they do not fit the problem.
    pub(super) fn clear_key_padding(&mut self) -> Option<()> {
        let lengths = self.problem.lengths();
        for sequence in 0..lengths.batch() {
            let padding = lengths.kv(sequence)..lengths.longest_kv();
            clear(&mut self.dk, sequence, padding.clone())?;
            clear(&mut self.dv, sequence, padding)?;
        }
        Some(())
    }

    /// Writes dQ of the flattened `rows` of one sequence and KV head, one line of `key_stride` a row.
    pub(super) fn write_queries(
        &mut self,
        sequence: usize,
        kv_head: usize,
        rows: Range<usize>,
        dq: &[f32],
        sizes: &Sizes,
    ) -> Option<()> {
        let (problem, simd) = (self.problem, self.simd);
        let group = problem.group();
        let at = rows.map(|row| [row / group, kv_head * group + row % group]);
        let src = Source { rows: dq, stride: sizes.key_stride, dim: sizes.head_dim };
        dispatch_view_mut!(&mut self.dq, view => {
            src.write(simd, &mut problem.q_rows_mut(view, sequence)?, at)
        })
    }

    /// Writes dK and dV of `keys` of one sequence and KV head, lines of `key_stride` and
    /// `value_stride`.
    pub(super) fn write_keys(
        &mut self,
        sequence: usize,
        kv_head: usize,
        keys: Range<usize>,
        (dk, dv): (&[f32], &[f32]),
        sizes: &Sizes,
    ) -> Option<()> {
        let (problem, simd) = (self.problem, self.simd);
        let at = keys.map(|key| [key, kv_head]);
        let src = Source { rows: dk, stride: sizes.key_stride, dim: sizes.head_dim };
        dispatch_view_mut!(&mut self.dk, view => {
            src.write(simd, &mut problem.kv_rows_mut(view, sequence)?, at.clone())
        })?;
        let src = Source { rows: dv, stride: sizes.value_stride, dim: sizes.value_dim };
        dispatch_view_mut!(&mut self.dv, view => {
            src.write(simd, &mut problem.kv_rows_mut(view, sequence)?, at)
        })
    }
}

/// Rows to be written.
struct Source<'s> {
    rows: &'s [f32],
    stride: usize,
    dim: usize,
}

impl Source<'_> {
    /// Writes a row to each (token, head) of `at`.
    fn write<E: Narrow>(
        &self,
        simd: Simd,
        view: &mut ViewMut<'_, E>,
        at: impl Iterator<Item = [usize; 2]>,
    ) -> Option<()> {
        let contiguous = view.layout().is_row_contiguous();
        for ([token, head], src) in at.zip(self.rows.chunks(self.stride)) {
            let src = &src[..self.dim];
            if contiguous {
                E::narrow(simd, src, view.row_mut(&[token, head])?);
            } else {
                for (d, &x) in src.iter().enumerate() {
                    view.set(&[token, head, d], E::from_f32(x)).then_some(())?;
                }
            }
        }
        Some(())
    }
}

/// An element type of outputs.
trait Narrow: Element {
    /// Rounds each f32 once, to nearest even.
    fn narrow(simd: Simd, src: &[f32], dst: &mut [Self]);
}

impl Narrow for f32 {
    fn narrow(_: Simd, src: &[f32], dst: &mut [Self]) {
        dst.copy_from_slice(src);
    }
}

impl Narrow for f16 {
    fn narrow(simd: Simd, src: &[f32], dst: &mut [Self]) {
        simd.narrow_f16(src, dst);
    }
}

impl Narrow for bf16 {
    fn narrow(simd: Simd, src: &[f32], dst: &mut [Self]) {
        simd.narrow_bf16(src, dst);
    }
}

/// Writes 0 to rows of one sequence of a padded tensor.
fn clear(tensor: &mut TensorViewMut<'_>, sequence: usize, rows: Range<usize>) -> Option<()> {
    if rows.is_empty() {
        return Some(());
    }
    dispatch_view_mut!(tensor, view => {
        view.at_mut(sequence)?.into_narrow(0, rows)?.fill(Element::from_f32(0.0));
    });
    Some(())
}
