//! Addresses of the rows of one sequence's keys or values.
//!
//! Invariant: an address is made from the block table at hand for a token inside the sequence, and
//! only those; the vector code checks it against the storage once more. Addresses of a tile's tokens
//! are made once and serve every head, and they are made a tile ahead, which is what tells the
//! prefetches where the next page is.

use std::ops::Range;

use attn_core::{PageOrder, Rows, View};

use crate::cpu::simd::{RowStarts, Scattered, Widen};

/// One sequence's rows of a key or value tensor.
#[derive(Debug)]
pub(super) struct Store<'a, E> {
    rows: Rows<'a, E>,
    data: &'a [E],
    /// Index of token 0, head 0 where rows are dense, of page 0, slot 0, head 0 where paged.
    first: i64,
    /// From a token to the next; within a page where paged.
    token: i64,
    /// From a page to the next; 0 where dense.
    page: i64,
    /// From a head to the next.
    head: i64,
    dim: usize,
}

impl<'a, E: Widen> Store<'a, E> {
    /// The rows of one sequence; `None` for a tensor that is not of the rank that its kind has.
    pub(super) fn new(rows: Rows<'a, E>) -> Option<Self> {
        let (view, token, page, head): (&View<'a, E>, usize, Option<usize>, usize) = match &rows {
            Rows::Dense(view) => (view, 0, None, 1),
            Rows::Paged(pages) => match pages.order() {
                PageOrder::Nhd => (pages.cache(), 1, Some(0), 2),
                PageOrder::Hnd => (pages.cache(), 2, Some(0), 1),
            },
        };
        let (shape, strides) = (view.shape(), view.layout().strides());
        Some(Self {
            data: view.data(),
            first: i64::try_from(view.layout().offset()).ok()?,
            token: *strides.get(token)?,
            page: page.map_or(Some(0), |axis| strides.get(axis).copied())?,
            head: *strides.get(head)?,
            dim: *shape.last()?,
            rows,
        })
    }

    /// Whether the elements of a row are adjacent.
    pub(super) fn is_row_contiguous(&self) -> bool {
        self.rows.is_row_contiguous()
    }

    /// Where the rows of head 0 of some tokens start, at most as many as a tile holds; `None` for a
    /// token without a page.
    pub(super) fn locate(&self, tokens: Range<usize>) -> Option<RowStarts> {
        let mut starts = RowStarts::NONE;
        match &self.rows {
            Rows::Dense(_) => {
                for token in tokens {
                    starts.push(index(self.first, self.token, token)?)?;
                }
            }
            Rows::Paged(pages) => {
                let size = pages.page_size();
                let mut token = tokens.start;
                while token < tokens.end {
                    let (block, slot) = (token / size, token % size);
                    let page = i64::try_from(pages.page(block)?).ok()?;
                    let first = self.first.checked_add(page.checked_mul(self.page)?)?;
                    let count = (size - slot).min(tokens.end - token);
                    for slot in slot..slot + count {
                        starts.push(index(first, self.token, slot)?)?;
                    }
                    token += count;
                }
            }
        }
        Some(starts)
    }

    /// The rows of all heads of some tokens, to be read where they are.
    pub(super) fn tile<'s>(&self, starts: &'s RowStarts) -> Option<Scattered<'s, E>>
    where
        'a: 's,
    {
        Some(Scattered {
            data: self.data,
            starts,
            head_step: isize::try_from(self.head).ok()?,
            dim: self.dim,
            head_major: self.head.unsigned_abs() > self.token.unsigned_abs(),
        })
    }

    /// Copies the rows of one head out as f32, one after another; `None` outside the sequence.
    pub(super) fn gather(
        &self,
        head: usize,
        tokens: Range<usize>,
        block: &mut [f32],
    ) -> Option<()> {
        for (token, row) in tokens.zip(block.chunks_exact_mut(self.dim)) {
            for (d, x) in row.iter_mut().enumerate() {
                *x = self.rows.get(token, head, d)?.to_f32();
            }
        }
        Some(())
    }
}

fn index(first: i64, stride: i64, i: usize) -> Option<usize> {
    let at = first.checked_add(stride.checked_mul(i64::try_from(i).ok()?)?)?;
    usize::try_from(at).ok()
}
