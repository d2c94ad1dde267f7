//! Stored rows to f32: the one place where the CPU engine reads queries, keys and values for tiles.
//!
//! Invariant: exactly the requested tokens are read, whatever the storage, so that what no row may
//! see never enters a tile. Rows are converted as they are copied into a block, which makes the
//! 16-bit and fp8 types as fast as f32: the block is read many times, the storage once.

use std::ops::Range;

use attn_core::{F8E4M3, F8E5M2, PageOrder, Problem, Rows, TensorView, View};
use half::{bf16, f16};

use super::simd::{Simd, Widen};

/// One sequence's rows of a query, key or value tensor, its element type known at run time.
#[derive(Debug, Clone)]
pub(crate) enum StoredRows<'a> {
    /// binary32.
    F32(Rows<'a, f32>),
    /// binary16.
    F16(Rows<'a, f16>),
    /// bfloat16.
    BF16(Rows<'a, bf16>),
    /// fp8 E4M3.
    F8E4M3(Rows<'a, F8E4M3>),
    /// fp8 E5M2.
    F8E5M2(Rows<'a, F8E5M2>),
}

macro_rules! dispatch_rows {
    ($stored:expr, $rows:ident => $body:expr) => {
        match $stored {
            StoredRows::F32($rows) => $body,
            StoredRows::F16($rows) => $body,
            StoredRows::BF16($rows) => $body,
            StoredRows::F8E4M3($rows) => $body,
            StoredRows::F8E5M2($rows) => $body,
        }
    };
}

macro_rules! stored_rows {
    ($tensor:expr, $view:ident => $rows:expr) => {
        match $tensor {
            TensorView::F32($view) => StoredRows::F32($rows),
            TensorView::F16($view) => StoredRows::F16($rows),
            TensorView::BF16($view) => StoredRows::BF16($rows),
            TensorView::F8E4M3($view) => StoredRows::F8E4M3($rows),
            TensorView::F8E5M2($view) => StoredRows::F8E5M2($rows),
        }
    };
}

impl<'a> StoredRows<'a> {
    /// A sequence's rows of a query-side tensor; `None` when it does not fit the problem.
    pub(crate) fn queries(
        problem: &Problem,
        tensor: &TensorView<'a>,
        sequence: usize,
    ) -> Option<Self> {
        Some(stored_rows!(tensor, view => Rows::Dense(problem.q_rows(view, sequence)?)))
    }

    /// A sequence's rows of a key or value tensor, dense or paged; `None` when it does not fit the
    /// problem.
    pub(crate) fn cached(
        problem: &Problem,
        tensor: &TensorView<'a>,
        block_table: Option<&View<'a, i32>>,
        sequence: usize,
    ) -> Option<Self> {
        Some(stored_rows!(tensor, view => problem.cached_rows(view, block_table, sequence)?))
    }

    /// Writes `factor *` the rows of `tokens` to `dst`, `dst_stride` apart; `None` when a token is
    /// outside the sequence.
    ///
    /// Shapes: `dst` `[tokens, dim]`, where `dim` is that of the tensor.
    ///
    /// # Panics
    /// When `dst` is too short: an error of the engine, not of its input.
    pub(crate) fn widen(
        &self,
        simd: Simd,
        head: usize,
        tokens: Range<usize>,
        factor: f32,
        dst: &mut [f32],
        dst_stride: usize,
    ) -> Option<()> {
        dispatch_rows!(self, rows => widen(simd, rows, head, tokens, factor, dst, dst_stride))
    }
}

/// Elements of a row.
fn dim<T: Copy>(rows: &Rows<'_, T>) -> usize {
    let shape = match rows {
        Rows::Dense(view) => view.shape(),
        Rows::Paged(pages) => pages.cache().shape(),
    };
    shape.last().copied().unwrap_or(0)
}

fn widen<E: Widen>(
    simd: Simd,
    rows: &Rows<'_, E>,
    head: usize,
    tokens: Range<usize>,
    factor: f32,
    dst: &mut [f32],
    dst_stride: usize,
) -> Option<()> {
    let dim = dim(rows);
    let first = tokens.start;
    if !rows.is_row_contiguous() {
        for (token, dst) in tokens.zip(dst.chunks_mut(dst_stride)) {
            for (d, x) in dst[..dim].iter_mut().enumerate() {
                *x = rows.get(token, head, d)?.to_f32() * factor;
            }
        }
        return Some(());
    }
    runs(rows, head, tokens, |token, run| {
        let dst = &mut dst[(token - first) * dst_stride..];
        if let Ok(stride) = usize::try_from(run.stride) {
            let src = run.data.get(run.start..)?;
            simd.widen_rows(src, stride, (run.count, dim), factor, dst, dst_stride);
            return Some(());
        }
        for (i, dst) in (0..run.count).zip(dst.chunks_mut(dst_stride)) {
            simd.widen(run.row(i, dim)?, factor, &mut dst[..dim]);
        }
        Some(())
    })
}

/// Consecutive tokens whose rows are a constant distance apart in storage.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Run<'a, E> {
    /// The whole storage.
    pub(crate) data: &'a [E],
    /// Index of the first row's first element.
    pub(crate) start: usize,
    /// Distance from a row to the next, in elements; may be 0 or negative.
    pub(crate) stride: i64,
    /// Rows.
    pub(crate) count: usize,
}

impl<'a, E> Run<'a, E> {
    /// The elements of row `i`.
    pub(crate) fn row(&self, i: usize, dim: usize) -> Option<&'a [E]> {
        let offset = i64::try_from(i).ok()?.checked_mul(self.stride)?;
        let start = usize::try_from(i64::try_from(self.start).ok()?.checked_add(offset)?).ok()?;
        self.data.get(start..start.checked_add(dim)?)
    }
}

/// Calls `f(first token, run)` for the runs that make up `tokens`, in order: one for dense rows, one
/// a page for paged ones. `None` as soon as `f` answers so or a token is outside the sequence.
///
/// Invariants: for rows that are contiguous along the dimension.
pub(crate) fn runs<'a, E: Widen>(
    rows: &Rows<'a, E>,
    head: usize,
    tokens: Range<usize>,
    mut f: impl FnMut(usize, Run<'a, E>) -> Option<()>,
) -> Option<()> {
    if tokens.is_empty() {
        return Some(());
    }
    if tokens.end > rows.tokens() {
        return None;
    }
    match rows {
        Rows::Dense(view) => {
            let start = view.row_start(&[tokens.start, head])?;
            let stride = *view.layout().strides().first()?;
            f(tokens.start, Run { data: view.data(), start, stride, count: tokens.len() })
        }
        Rows::Paged(pages) => {
            let (cache, size) = (pages.cache(), pages.page_size());
            let slot_axis = match pages.order() {
                PageOrder::Nhd => 1,
                PageOrder::Hnd => 2,
            };
            let stride = *cache.layout().strides().get(slot_axis)?;
            let mut token = tokens.start;
            while token < tokens.end {
                let (page, slot) = (pages.page(token / size)?, token % size);
                let count = (size - slot).min(tokens.end - token);
                let start = match pages.order() {
                    PageOrder::Nhd => cache.row_start(&[page, slot, head])?,
                    PageOrder::Hnd => cache.row_start(&[page, head, slot])?,
                };
                f(token, Run { data: cache.data(), start, stride, count })?;
                token += count;
            }
            Some(())
        }
    }
}
