//! The rows of one sequence as `[token, head]`, wherever they are stored.
//!
//! The invariant: a row is found by logical token alone. Packed, padded and paged storage differ
//! only in this file, so that no engine repeats the walk through a block table.

use crate::layout::PageOrder;
use crate::view::View;

/// One sequence's rows of a key, value, query or gradient tensor.
#[derive(Debug, Clone)]
pub enum Rows<'a, T> {
    /// A view `[tokens, heads, dim]`.
    Dense(View<'a, T>),
    /// Pages found through one row of a block table.
    Paged(PagedRows<'a, T>),
}

/// One sequence's rows in a paged cache.
#[derive(Debug, Clone)]
pub struct PagedRows<'a, T> {
    pub(crate) cache: View<'a, T>,
    pub(crate) table: View<'a, i32>,
    pub(crate) order: PageOrder,
    pub(crate) page_size: usize,
    pub(crate) tokens: usize,
}

impl<'a, T: Copy> PagedRows<'a, T> {
    /// The page that holds a logical block of the sequence; `None` past the table or for an entry
    /// that is not a page.
    #[must_use]
    pub fn page(&self, block: usize) -> Option<usize> {
        usize::try_from(self.table.get(&[block])?).ok()
    }

    /// Tokens of a page.
    #[must_use]
    pub const fn page_size(&self) -> usize {
        self.page_size
    }

    /// The cache, four axes in page order.
    #[must_use]
    pub const fn cache(&self) -> &View<'a, T> {
        &self.cache
    }

    /// The order of axes inside a page.
    #[must_use]
    pub const fn order(&self) -> PageOrder {
        self.order
    }

    fn leading(&self, token: usize, head: usize) -> Option<[usize; 3]> {
        if token >= self.tokens {
            return None;
        }
        let (page, slot) = (self.page(token / self.page_size)?, token % self.page_size);
        Some(match self.order {
            PageOrder::Nhd => [page, slot, head],
            PageOrder::Hnd => [page, head, slot],
        })
    }
}

impl<'a, T: Copy> Rows<'a, T> {
    /// Logical tokens.
    #[must_use]
    pub fn tokens(&self) -> usize {
        match self {
            Self::Dense(view) => view.shape()[0],
            Self::Paged(pages) => pages.tokens,
        }
    }

    /// The elements of a row when they are adjacent in storage; `None` outside the sequence and for
    /// rows that are not contiguous.
    #[must_use]
    pub fn row(&self, token: usize, head: usize) -> Option<&'a [T]> {
        match self {
            Self::Dense(view) => view.row(&[token, head]),
            Self::Paged(pages) => pages.cache.row(&pages.leading(token, head)?),
        }
    }

    /// One element; `None` outside the sequence.
    #[must_use]
    pub fn get(&self, token: usize, head: usize, d: usize) -> Option<T> {
        match self {
            Self::Dense(view) => view.get(&[token, head, d]),
            Self::Paged(pages) => {
                let [a, b, c] = pages.leading(token, head)?;
                pages.cache.get(&[a, b, c, d])
            }
        }
    }

    /// Whether every row is adjacent in storage.
    #[must_use]
    pub fn is_row_contiguous(&self) -> bool {
        match self {
            Self::Dense(view) => view.layout().is_row_contiguous(),
            Self::Paged(pages) => pages.cache.layout().is_row_contiguous(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paged_rows_follow_the_table_in_both_orders() {
        // Pages of 2 slots, 2 heads, 1 element; the value is page * 100 + slot * 10 + head.
        let value = |page: usize, slot: usize, head: usize| page * 100 + slot * 10 + head;
        let (mut nhd, mut hnd) = (Vec::new(), Vec::new());
        for page in 0..3 {
            for a in 0..2 {
                for b in 0..2 {
                    nhd.push(value(page, a, b));
                    hnd.push(value(page, b, a));
                }
            }
        }
        let table = [2i32, 0, -1];
        for (data, order) in [(&nhd, PageOrder::Nhd), (&hnd, PageOrder::Hnd)] {
            let rows = Rows::Paged(PagedRows {
                cache: View::contiguous("k", data, &[3, 2, 2, 1]).expect("fits"),
                table: View::contiguous("block_table", &table, &[3]).expect("fits"),
                order,
                page_size: 2,
                tokens: 3,
            });
            assert_eq!(rows.get(0, 1, 0), Some(201));
            assert_eq!(rows.get(1, 0, 0), Some(210));
            assert_eq!(rows.row(2, 1), Some(&[1usize][..]));
            // Token 3 has a slot, but the length is authoritative.
            assert_eq!(rows.get(3, 0, 0), None);
        }
    }
}
