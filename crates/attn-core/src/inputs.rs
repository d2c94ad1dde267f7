//! The data of a call, checked against its [`Problem`] before anything runs.
//!
//! The invariant: after [`Inputs::check`] every shape, page id, scale and dtype that an engine will
//! rely on has been seen to fit, so engines address without doubting and nothing is launched on
//! inconsistent data. The check is O(batch + block table), never O(elements).

use std::ops::Range;

use crate::call::{
    CallLayout, GradientsLayout, KvLayout, Operand, OutputLayout, ResultsLayout, block_shape,
    pair_shape,
};
use crate::error::Error;
use crate::layout::{CacheLayout, LayoutId};
use crate::mask::{BlockMask, Mask};
use crate::problem::{KvStorage, Problem};
use crate::rows::{PagedRows, Rows};
use crate::shape::Arrangement;
use crate::view::{TensorView, TensorViewMut, View, ViewMut};

/// Keys and values.
#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "one value per call, read by reference")]
pub enum KvView<'a> {
    /// k `[rows, kv_heads, head_dim]` and v `[rows, kv_heads, value_dim]`, packed or padded.
    Dense {
        /// Keys.
        k: TensorView<'a>,
        /// Values.
        v: TensorView<'a>,
    },
    /// Caches of four axes in page order, found through a block table `[batch, width]`.
    ///
    /// Under [`crate::ValueStorage::PrefixOfKey`] the value view lies on the key cache.
    Paged {
        /// Key cache.
        k_cache: TensorView<'a>,
        /// Value cache.
        v_cache: TensorView<'a>,
        /// Page ids; entries past a sequence's last needed page are not read.
        block_table: View<'a, i32>,
        /// The identity stamped on the cache when it was made.
        stamp: LayoutId,
    },
}

/// Everything a call reads.
///
/// Shapes: `mask` and `bias` have rank 2 to 4, aligned from the right to `[batch, q_heads, longest q, longest kv]`,
/// each extent equal or 1; `block_mask` likewise over blocks of the longest lengths; `alibi` and `sinks`
/// `[q_heads]`; scales of rank 0, `[1]` or `[batch, kv_heads]`; `dropout` `[2]`.
#[derive(Debug, Clone)]
pub struct Inputs<'a> {
    /// Queries.
    pub q: TensorView<'a>,
    /// Keys and values.
    pub kv: KvView<'a>,
    /// Boolean mask: non-zero keeps.
    pub mask: Option<View<'a, u8>>,
    /// Block mask: non-zero keeps.
    pub block_mask: Option<View<'a, u8>>,
    /// Additive bias.
    pub bias: Option<View<'a, f32>>,
    /// ALiBi slopes.
    pub alibi: Option<View<'a, f32>>,
    /// Attention sinks.
    pub sinks: Option<View<'a, f32>>,
    /// fp8 queries only: query = stored * scale. Query heads that share a KV head share its scale.
    pub q_scale: Option<View<'a, f32>>,
    /// fp8 keys only: key = stored * scale.
    pub k_scale: Option<View<'a, f32>>,
    /// fp8 values only: value = stored * scale.
    pub v_scale: Option<View<'a, f32>>,
    /// Dropout only: seed and offset. See [`crate::dropout`].
    pub dropout: Option<View<'a, u64>>,
}

/// What a forward writes; padding rows too (0, and -inf for the LSE).
#[derive(Debug)]
pub struct Outputs<'a> {
    /// Output, shaped as q with `value_dim`.
    pub o: TensorViewMut<'a>,
    /// Natural-log LSE `[rows, q_heads]`, if wanted.
    pub lse: Option<ViewMut<'a, f32>>,
}

/// What a backward reads besides [`Inputs`].
#[derive(Debug, Clone)]
pub struct ForwardResults<'a> {
    /// The forward's output.
    pub o: TensorView<'a>,
    /// The forward's LSE.
    pub lse: View<'a, f32>,
    /// Gradient of the output.
    pub d_o: TensorView<'a>,
}

/// What a backward writes.
#[derive(Debug)]
pub struct Gradients<'a> {
    /// Gradient of q.
    pub dq: TensorViewMut<'a>,
    /// Gradient of k, summed over the query heads of a group.
    pub dk: TensorViewMut<'a>,
    /// Gradient of v, summed over the query heads of a group.
    pub dv: TensorViewMut<'a>,
    /// Gradient of the sinks `[q_heads]`.
    pub dsinks: Option<ViewMut<'a, f32>>,
    /// Gradient of the bias, in its shape, summed over its broadcast extents.
    pub dbias: Option<ViewMut<'a, f32>>,
}

impl<'a> Inputs<'a> {
    /// A dense call without masks, biases, sinks or scales; the rest is set by field.
    #[must_use]
    pub const fn dense(q: TensorView<'a>, k: TensorView<'a>, v: TensorView<'a>) -> Self {
        Self::new(q, KvView::Dense { k, v })
    }

    /// A call over dense or paged keys without masks, biases, sinks or scales; the rest is set by field.
    #[must_use]
    pub const fn new(q: TensorView<'a>, kv: KvView<'a>) -> Self {
        Self {
            q,
            kv,
            mask: None,
            block_mask: None,
            bias: None,
            alibi: None,
            sinks: None,
            q_scale: None,
            k_scale: None,
            v_scale: None,
            dropout: None,
        }
    }

    /// What the tensors are, without what they hold.
    #[must_use]
    pub fn layout(&self) -> CallLayout<'_> {
        let kv = match &self.kv {
            KvView::Dense { k, v } => {
                KvLayout::Dense { k: Operand::of_view(k), v: Operand::of_view(v) }
            }
            KvView::Paged { k_cache, v_cache, block_table, stamp } => KvLayout::Paged {
                k_cache: Operand::of_view(k_cache),
                v_cache: Operand::of_view(v_cache),
                block_table: block_table.layout(),
                stamp,
            },
        };
        CallLayout {
            q: Operand::of_view(&self.q),
            kv,
            mask: self.mask.as_ref().map(View::layout),
            block_mask: self.block_mask.as_ref().map(View::layout),
            bias: self.bias.as_ref().map(View::layout),
            alibi: self.alibi.as_ref().map(View::layout),
            sinks: self.sinks.as_ref().map(View::layout),
            q_scale: self.q_scale.as_ref().map(View::layout),
            k_scale: self.k_scale.as_ref().map(View::layout),
            v_scale: self.v_scale.as_ref().map(View::layout),
            dropout: self.dropout.as_ref().map(View::layout),
        }
    }

    /// Checks every shape, dtype, page id and scale against the problem.
    ///
    /// # Errors
    /// As [`CallLayout::check`], and [`Error::Invalid`] for a page id out of range or a scale that is not
    /// positive and finite.
    pub fn check(&self, problem: &Problem) -> Result<(), Error> {
        self.layout().check(problem)?;
        if let (KvView::Paged { k_cache, block_table, .. }, KvStorage::Paged(layout)) =
            (&self.kv, problem.kv())
        {
            let pages = k_cache.shape().first().copied().unwrap_or(0);
            check_pages(block_table, problem, layout, pages)?;
        }
        for (field, scale) in
            [("q_scale", &self.q_scale), ("k_scale", &self.k_scale), ("v_scale", &self.v_scale)]
        {
            if let Some(scale) = scale {
                check_scale(field, scale, problem)?;
            }
        }
        Ok(())
    }

    /// The mask of one sequence and query head. Call after [`Inputs::check`].
    ///
    /// # Errors
    /// As [`Inputs::check`], for data that was not checked.
    pub fn mask_of(
        &self,
        problem: &Problem,
        sequence: usize,
        head: usize,
    ) -> Result<Mask<'a>, Error> {
        let l = problem.lengths();
        let mut mask = Mask::new(problem.band(), l.q(sequence), l.kv(sequence));
        if let (Some(sizes), Some(view)) = (problem.block_mask(), &self.block_mask) {
            let plane = plane("block_mask", view, &block_shape(problem), sequence, head)?;
            mask = mask.with_blocks(BlockMask::new(sizes.q, sizes.kv, plane)?);
        }
        if let Some(view) = &self.mask {
            mask = mask.with_keep(plane("mask", view, &pair_shape(problem), sequence, head)?)?;
        }
        Ok(mask)
    }

    /// The bias of one sequence and query head, `[longest q, longest kv]` with stride 0 along broadcast axes.
    ///
    /// # Errors
    /// As [`Inputs::check`], for data that was not checked.
    pub fn bias_of(
        &self,
        problem: &Problem,
        sequence: usize,
        head: usize,
    ) -> Result<Option<View<'a, f32>>, Error> {
        match &self.bias {
            None => Ok(None),
            Some(bias) => plane("bias", bias, &pair_shape(problem), sequence, head).map(Some),
        }
    }

    /// The factor that makes stored queries of one sequence and the heads of one KV head real; 1 without a scale.
    #[must_use]
    pub fn q_scale_of(&self, sequence: usize, kv_head: usize) -> f32 {
        scale_of(self.q_scale.as_ref(), sequence, kv_head)
    }

    /// The factor that makes stored keys of one sequence and KV head real; 1 without a scale.
    #[must_use]
    pub fn k_scale_of(&self, sequence: usize, kv_head: usize) -> f32 {
        scale_of(self.k_scale.as_ref(), sequence, kv_head)
    }

    /// The factor that makes stored values of one sequence and KV head real; 1 without a scale.
    #[must_use]
    pub fn v_scale_of(&self, sequence: usize, kv_head: usize) -> f32 {
        scale_of(self.v_scale.as_ref(), sequence, kv_head)
    }
}

impl Outputs<'_> {
    /// What the tensors are, without what they hold.
    #[must_use]
    pub fn layout(&self) -> OutputLayout<'_> {
        OutputLayout {
            o: Operand::of_view_mut(&self.o),
            lse: self.lse.as_ref().map(ViewMut::layout),
        }
    }

    /// Checks shapes and dtypes against the problem.
    ///
    /// # Errors
    /// [`Error::Layout`] for a tensor of the wrong shape or type.
    pub fn check(&self, problem: &Problem) -> Result<(), Error> {
        self.layout().check(problem)
    }
}

impl ForwardResults<'_> {
    /// What the tensors are, without what they hold.
    #[must_use]
    pub fn layout(&self) -> ResultsLayout<'_> {
        ResultsLayout {
            o: Operand::of_view(&self.o),
            lse: self.lse.layout(),
            d_o: Operand::of_view(&self.d_o),
        }
    }

    /// Checks shapes and dtypes against the problem.
    ///
    /// # Errors
    /// As [`ResultsLayout::check`].
    pub fn check(&self, problem: &Problem) -> Result<(), Error> {
        self.layout().check(problem)
    }
}

impl Gradients<'_> {
    /// What the tensors are, without what they hold.
    #[must_use]
    pub fn layout(&self) -> GradientsLayout<'_> {
        GradientsLayout {
            dq: Operand::of_view_mut(&self.dq),
            dk: Operand::of_view_mut(&self.dk),
            dv: Operand::of_view_mut(&self.dv),
            dsinks: self.dsinks.as_ref().map(ViewMut::layout),
            dbias: self.dbias.as_ref().map(ViewMut::layout),
        }
    }

    /// Checks shapes and dtypes against the problem and, for the bias' gradient, against the bias.
    ///
    /// # Errors
    /// As [`GradientsLayout::check`].
    pub fn check(&self, problem: &Problem, inputs: &Inputs<'_>) -> Result<(), Error> {
        self.layout().check(problem, inputs.bias.as_ref().map(View::layout))
    }
}

impl Problem {
    /// One sequence's rows `[q_len, heads, dim]` of a query-side view; `None` when shapes do not fit.
    #[must_use]
    pub fn q_rows<'a, T: Copy>(&self, view: &View<'a, T>, sequence: usize) -> Option<View<'a, T>> {
        let rows = self.lengths().q_rows(sequence);
        sequence_rows(view, self.q_arrangement(), sequence, rows)
    }

    /// One sequence's rows `[q_len, heads, ...]` of a mutable query-side view.
    pub fn q_rows_mut<'v, T: Copy>(
        &self,
        view: &'v mut ViewMut<'_, T>,
        sequence: usize,
    ) -> Option<ViewMut<'v, T>> {
        let rows = self.lengths().q_rows(sequence);
        sequence_rows_mut(view, self.q_arrangement(), sequence, rows)
    }

    /// One sequence's rows `[kv_len, heads, dim]` of a dense key-side view.
    #[must_use]
    pub fn kv_rows<'a, T: Copy>(&self, view: &View<'a, T>, sequence: usize) -> Option<View<'a, T>> {
        let KvStorage::Dense(arrangement) = self.kv() else {
            return None;
        };
        sequence_rows(view, *arrangement, sequence, self.lengths().kv_rows(sequence))
    }

    /// One sequence's rows `[kv_len, heads, dim]` of a mutable dense key-side view.
    pub fn kv_rows_mut<'v, T: Copy>(
        &self,
        view: &'v mut ViewMut<'_, T>,
        sequence: usize,
    ) -> Option<ViewMut<'v, T>> {
        let KvStorage::Dense(arrangement) = self.kv() else {
            return None;
        };
        sequence_rows_mut(view, *arrangement, sequence, self.lengths().kv_rows(sequence))
    }

    /// One sequence's rows of a key or value tensor, dense or paged.
    ///
    /// `block_table` is the call's table when keys are paged; `None` when it is missing or shapes do not fit.
    #[must_use]
    pub fn cached_rows<'a, T: Copy>(
        &self,
        view: &View<'a, T>,
        block_table: Option<&View<'a, i32>>,
        sequence: usize,
    ) -> Option<Rows<'a, T>> {
        match self.kv() {
            KvStorage::Dense(_) => self.kv_rows(view, sequence).map(Rows::Dense),
            KvStorage::Paged(layout) => Some(Rows::Paged(PagedRows {
                cache: view.clone(),
                table: block_table?.at(sequence)?,
                order: layout.order(),
                page_size: layout.page_size(),
                tokens: self.lengths().kv(sequence),
            })),
        }
    }
}

fn sequence_rows<'a, T: Copy>(
    view: &View<'a, T>,
    arrangement: Arrangement,
    sequence: usize,
    rows: Range<usize>,
) -> Option<View<'a, T>> {
    match arrangement {
        Arrangement::Packed => view.narrow(0, rows),
        Arrangement::Padded => view.at(sequence)?.narrow(0, 0..rows.len()),
    }
}

fn sequence_rows_mut<'v, T: Copy>(
    view: &'v mut ViewMut<'_, T>,
    arrangement: Arrangement,
    sequence: usize,
    rows: Range<usize>,
) -> Option<ViewMut<'v, T>> {
    match arrangement {
        Arrangement::Packed => view.narrow_mut(0, rows),
        Arrangement::Padded => view.at_mut(sequence)?.into_narrow(0, 0..rows.len()),
    }
}

/// The `[rows, keys]` plane of one sequence and head, broadcast axes repeated by stride 0.
fn plane<'a, T: Copy>(
    field: &'static str,
    view: &View<'a, T>,
    shape: &[usize; 4],
    sequence: usize,
    head: usize,
) -> Result<View<'a, T>, Error> {
    view.broadcast_to(shape).and_then(|v| v.at(sequence)).and_then(|v| v.at(head)).ok_or_else(
        || {
            Error::layout(
                field,
                format!("extents of {shape:?} or 1"),
                format!("{:?}", view.shape()),
            )
        },
    )
}

fn scale_of(scale: Option<&View<'_, f32>>, sequence: usize, kv_head: usize) -> f32 {
    let Some(view) = scale else {
        return 1.0;
    };
    let at: &[usize] = match view.shape().len() {
        0 => &[],
        1 => &[0],
        _ => &[sequence, kv_head],
    };
    view.get(at).unwrap_or(1.0)
}

fn check_pages(
    table: &View<'_, i32>,
    problem: &Problem,
    layout: &CacheLayout,
    pages: usize,
) -> Result<(), Error> {
    for sequence in 0..problem.lengths().batch() {
        for block in 0..layout.pages_for(problem.lengths().kv(sequence)) {
            let id = table.get(&[sequence, block]).unwrap_or(-1);
            if usize::try_from(id).is_ok_and(|id| id < pages) {
                continue;
            }
            let expected = format!("page ids below {pages}");
            let got = format!("{id} at [{sequence}, {block}]");
            return Err(Error::invalid("block_table", expected, got));
        }
    }
    Ok(())
}

fn check_scale(field: &'static str, scale: &View<'_, f32>, problem: &Problem) -> Result<(), Error> {
    let (sequences, kv_heads) = match scale.shape() {
        [] | [1] => (1, 1),
        _ => (problem.lengths().batch(), problem.kv_heads()),
    };
    for sequence in 0..sequences {
        for head in 0..kv_heads {
            let value = scale_of(Some(scale), sequence, head);
            if !(value.is_finite() && value > 0.0) {
                let got = format!("{value} for sequence {sequence}, head {head}");
                return Err(Error::invalid(field, "positive finite scales", got));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
