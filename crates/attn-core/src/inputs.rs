//! The data of a call, checked against its [`Problem`] before anything runs.
//!
//! The invariant: after [`Inputs::check`] every shape, page id, scale and dtype that an engine will
//! rely on has been seen to fit, so engines address without doubting and nothing is launched on
//! inconsistent data. The check is O(batch + block table), never O(elements).

use std::ops::Range;

use crate::dtype::DType;
use crate::error::Error;
use crate::layout::{CacheLayout, LayoutId, PageOrder, PageStrides};
use crate::mask::{BlockMask, Mask};
use crate::problem::{KvStorage, Pass, Problem};
use crate::rows::{PagedRows, Rows};
use crate::shape::Arrangement;
use crate::view::{Strided, TensorView, TensorViewMut, View, ViewMut};

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
/// `[q_heads]`; scales of rank 0, `[1]` or `[batch, kv_heads]`.
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
    /// fp8 keys only: key = stored * scale.
    pub k_scale: Option<View<'a, f32>>,
    /// fp8 values only: value = stored * scale.
    pub v_scale: Option<View<'a, f32>>,
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
            k_scale: None,
            v_scale: None,
        }
    }

    /// Checks every shape, dtype, page id and scale against the problem.
    ///
    /// # Errors
    /// [`Error::Layout`] for a tensor of the wrong shape or type; [`Error::CacheLayout`] for a cache made
    /// with another layout; [`Error::Invalid`] for a missing or unexpected tensor, a page id out of range, a
    /// table too short, or a scale that is not positive and finite.
    pub fn check(&self, problem: &Problem) -> Result<(), Error> {
        let l = problem.lengths();
        let q_shape = l.q_shape(problem.q_arrangement(), &[problem.q_heads(), problem.head_dim()]);
        check_tensor("q", self.q.dtype(), self.q.layout(), problem.q_dtype(), &q_shape)?;
        self.check_kv(problem)?;
        self.check_masks(problem)?;
        for (field, given, wanted) in [
            ("alibi", &self.alibi, problem.has_alibi()),
            ("sinks", &self.sinks, problem.has_sinks()),
        ] {
            check_presence(field, given.is_some(), wanted)?;
            if let Some(view) = given
                && view.shape() != [problem.q_heads()]
            {
                let expected = format!("shape [{}]", problem.q_heads());
                return Err(Error::layout(field, expected, format!("{:?}", view.shape())));
            }
        }
        for (field, scale) in [("k_scale", &self.k_scale), ("v_scale", &self.v_scale)] {
            if let Some(scale) = scale {
                check_scale(field, scale, problem)?;
            }
        }
        Ok(())
    }

    fn check_kv(&self, problem: &Problem) -> Result<(), Error> {
        let l = problem.lengths();
        let (heads, dim, vdim) = (problem.kv_heads(), problem.head_dim(), problem.value_dim());
        let dtype = problem.kv_dtype();
        match (&self.kv, problem.kv()) {
            (KvView::Dense { k, v }, KvStorage::Dense(arrangement)) => {
                let shape = l.kv_shape(*arrangement, &[heads, dim]);
                check_tensor("k", k.dtype(), k.layout(), dtype, &shape)?;
                let shape = l.kv_shape(*arrangement, &[heads, vdim]);
                check_tensor("v", v.dtype(), v.layout(), dtype, &shape)
            }
            (KvView::Paged { k_cache, v_cache, block_table, stamp }, KvStorage::Paged(layout)) => {
                layout.check(stamp)?;
                let pages = k_cache.shape().first().copied().unwrap_or(0);
                check_cache("k_cache", k_cache, layout, layout.key_strides(), dim, pages)?;
                check_cache("v_cache", v_cache, layout, layout.value_strides(), vdim, pages)?;
                check_table(block_table, problem, layout, pages)
            }
            (KvView::Dense { .. }, KvStorage::Paged(_)) => {
                Err(Error::invalid("kv", "a paged cache", "dense keys and values"))
            }
            (KvView::Paged { .. }, KvStorage::Dense(_)) => {
                Err(Error::invalid("kv", "dense keys and values", "a paged cache"))
            }
        }
    }

    fn check_masks(&self, problem: &Problem) -> Result<(), Error> {
        let pairs = pair_shape(problem);
        check_presence("mask", self.mask.is_some(), problem.has_mask())?;
        check_presence("bias", self.bias.is_some(), problem.has_bias())?;
        check_presence("block_mask", self.block_mask.is_some(), problem.block_mask().is_some())?;
        if let Some(mask) = &self.mask {
            check_broadcast("mask", mask.layout(), &pairs)?;
        }
        if let Some(bias) = &self.bias {
            check_broadcast("bias", bias.layout(), &pairs)?;
        }
        if let Some(blocks) = &self.block_mask {
            check_broadcast("block_mask", blocks.layout(), &block_shape(problem))?;
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
    /// Checks shapes and dtypes against the problem.
    ///
    /// # Errors
    /// [`Error::Layout`] for a tensor of the wrong shape or type.
    pub fn check(&self, problem: &Problem) -> Result<(), Error> {
        let l = problem.lengths();
        let (heads, at) = (problem.q_heads(), problem.q_arrangement());
        let shape = l.q_shape(at, &[heads, problem.value_dim()]);
        check_tensor("o", self.o.dtype(), self.o.layout(), problem.q_dtype(), &shape)?;
        match &self.lse {
            None => Ok(()),
            Some(lse) => check_shape("lse", lse.layout(), &l.q_shape(at, &[heads])),
        }
    }
}

impl ForwardResults<'_> {
    /// Checks shapes and dtypes against the problem.
    ///
    /// # Errors
    /// [`Error::Layout`] for a tensor of the wrong shape or type.
    pub fn check(&self, problem: &Problem) -> Result<(), Error> {
        let l = problem.lengths();
        let (heads, at) = (problem.q_heads(), problem.q_arrangement());
        let shape = l.q_shape(at, &[heads, problem.value_dim()]);
        for (field, tensor) in [("o", &self.o), ("do", &self.d_o)] {
            check_tensor(field, tensor.dtype(), tensor.layout(), problem.q_dtype(), &shape)?;
        }
        check_shape("lse", self.lse.layout(), &l.q_shape(at, &[heads]))
    }
}

impl Gradients<'_> {
    /// Checks shapes and dtypes against the problem and, for the bias' gradient, against the bias.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a forward problem or a gradient that was not asked for;
    /// [`Error::Layout`] for a tensor of the wrong shape or type.
    pub fn check(&self, problem: &Problem, inputs: &Inputs<'_>) -> Result<(), Error> {
        if problem.pass() != Pass::Backward {
            return Err(Error::invalid("pass", "backward", "forward"));
        }
        let KvStorage::Dense(kv_at) = problem.kv() else {
            return Err(Error::invalid("kv", "dense keys and values", "a paged cache"));
        };
        let l = problem.lengths();
        let (heads, kv_heads) = (problem.q_heads(), problem.kv_heads());
        let dtype = problem.q_dtype();
        let shape = l.q_shape(problem.q_arrangement(), &[heads, problem.head_dim()]);
        check_tensor("dq", self.dq.dtype(), self.dq.layout(), dtype, &shape)?;
        let shape = l.kv_shape(*kv_at, &[kv_heads, problem.head_dim()]);
        check_tensor("dk", self.dk.dtype(), self.dk.layout(), dtype, &shape)?;
        let shape = l.kv_shape(*kv_at, &[kv_heads, problem.value_dim()]);
        check_tensor("dv", self.dv.dtype(), self.dv.layout(), dtype, &shape)?;
        check_presence("dsinks", self.dsinks.is_some(), problem.wants_dsinks())?;
        check_presence("dbias", self.dbias.is_some(), problem.wants_dbias())?;
        if let Some(dsinks) = &self.dsinks {
            check_shape("dsinks", dsinks.layout(), &[heads])?;
        }
        if let (Some(dbias), Some(bias)) = (&self.dbias, &inputs.bias) {
            check_shape("dbias", dbias.layout(), bias.shape())?;
        }
        Ok(())
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

fn pair_shape(problem: &Problem) -> [usize; 4] {
    let l = problem.lengths();
    [l.batch(), problem.q_heads(), l.longest_q(), l.longest_kv()]
}

fn block_shape(problem: &Problem) -> [usize; 4] {
    let [batch, heads, q, kv] = pair_shape(problem);
    match problem.block_mask() {
        None => [batch, heads, 0, 0],
        Some(sizes) => [batch, heads, q.div_ceil(sizes.q), kv.div_ceil(sizes.kv)],
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

fn check_presence(field: &'static str, given: bool, wanted: bool) -> Result<(), Error> {
    match (given, wanted) {
        (true, false) => Err(Error::invalid(field, "none, as the problem states", "a tensor")),
        (false, true) => Err(Error::invalid(field, "a tensor, as the problem states", "none")),
        _ => Ok(()),
    }
}

fn check_shape(field: &'static str, layout: &Strided, shape: &[usize]) -> Result<(), Error> {
    if layout.shape() == shape {
        return Ok(());
    }
    Err(Error::layout(field, format!("shape {shape:?}"), format!("{:?}", layout.shape())))
}

fn check_tensor(
    field: &'static str,
    got: DType,
    layout: &Strided,
    dtype: DType,
    shape: &[usize],
) -> Result<(), Error> {
    if got != dtype {
        return Err(Error::layout(field, dtype.name(), got));
    }
    check_shape(field, layout, shape)
}

fn check_broadcast(field: &'static str, layout: &Strided, shape: &[usize; 4]) -> Result<(), Error> {
    let rank = layout.shape().len();
    let fits = (2..=4).contains(&rank)
        && layout
            .shape()
            .iter()
            .zip(&shape[4 - rank..])
            .all(|(&have, &want)| have == want || have == 1);
    if fits {
        return Ok(());
    }
    let expected = format!("rank 2 to 4, extents of {shape:?} (from the right) or 1");
    Err(Error::layout(field, expected, format!("{:?}", layout.shape())))
}

fn check_cache(
    field: &'static str,
    cache: &TensorView<'_>,
    layout: &CacheLayout,
    strides: PageStrides,
    dim: usize,
    pages: usize,
) -> Result<(), Error> {
    let PageStrides { page, slot, head } = strides;
    let (size, heads) = (layout.page_size(), layout.kv_heads());
    let (shape, strides) = match layout.order() {
        PageOrder::Nhd => ([pages, size, heads, dim], [page, slot, head, 1]),
        PageOrder::Hnd => ([pages, heads, size, dim], [page, head, slot, 1]),
    };
    check_tensor(field, cache.dtype(), cache.layout(), layout.dtype(), &shape)?;
    // A stride along an axis of extent 1 is never taken.
    let same = cache
        .layout()
        .strides()
        .iter()
        .zip(&strides)
        .zip(&shape)
        .all(|((have, want), &extent)| have == want || extent <= 1);
    if same {
        return Ok(());
    }
    let got = format!("{:?}", cache.layout().strides());
    Err(Error::layout(field, format!("strides {strides:?} of the cache layout"), got))
}

fn check_table(
    table: &View<'_, i32>,
    problem: &Problem,
    layout: &CacheLayout,
    pages: usize,
) -> Result<(), Error> {
    let batch = problem.lengths().batch();
    let shape = table.shape();
    if shape.len() != 2 || shape[0] != batch {
        let expected = format!("shape [{batch}, width]");
        return Err(Error::layout("block_table", expected, format!("{shape:?}")));
    }
    for sequence in 0..batch {
        let tokens = problem.lengths().kv(sequence);
        let needed = layout.pages_for(tokens);
        if needed > shape[1] {
            let expected = format!("{needed} entries for {tokens} tokens of sequence {sequence}");
            return Err(Error::invalid("block_table", expected, format!("width {}", shape[1])));
        }
        for block in 0..needed {
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
    if !problem.kv_dtype().is_fp8() {
        let expected = format!("none with {} keys and values", problem.kv_dtype());
        return Err(Error::invalid(field, expected, "a tensor"));
    }
    let (batch, heads) = (problem.lengths().batch(), problem.kv_heads());
    let per_head = scale.shape() == [batch, heads];
    if !(scale.shape().is_empty() || scale.shape() == [1] || per_head) {
        let expected = format!("shape [], [1] or [{batch}, {heads}]");
        return Err(Error::layout(field, expected, format!("{:?}", scale.shape())));
    }
    let (sequences, kv_heads) = if per_head { (batch, heads) } else { (1, 1) };
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
