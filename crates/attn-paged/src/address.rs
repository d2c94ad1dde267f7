//! Where a token of a sequence lies in the key and value storage.
//!
//! Invariant: an offset that is returned lies inside storage of the stated number of pages laid out as
//! the stamped [`LayoutId`] says. Pure functions over a table and core's [`CacheLayout`]: the
//! allocator does not know how pages are laid out, so one pool can serve caches of several
//! layers that differ in their heads.

use attn_core::{CacheLayout, LayoutId};

use crate::error::Error;

/// The address map of a cache: a layout, its identity, and a number of pages.
///
/// Units: offsets and extents in elements of the layout's data type.
///
/// ```
/// use attn_core::{CacheLayout, DType, PageOrder, ValueStorage};
/// use attn_paged::{AddressMap, Allocator, Config, Namespace};
///
/// let layout = CacheLayout::contiguous(
///     DType::BF16, PageOrder::Nhd, 4, 2, 8, ValueStorage::Separate(8)).expect("valid");
/// let map = AddressMap::new(layout, 16)?;
/// let mut pool = Allocator::new(Config::new(16, 4))?;
/// let seq = pool.alloc(&[5; 6], Namespace::DEFAULT)?.seq;
/// // Token 5 is slot 1 of the sequence's second page, which is page 1.
/// assert_eq!(map.key_offset(pool.blocks(seq)?, 5, 1)?, ((1 * 4 + 1) * 2 + 1) * 8);
/// # Ok::<(), attn_paged::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AddressMap {
    id: LayoutId,
    pages: usize,
    key_extent: i64,
    value_extent: i64,
}

/// A page of the cache and a slot in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageSlot {
    /// The page.
    pub page: usize,
    /// The slot.
    pub slot: usize,
}

impl AddressMap {
    /// The map of a cache of `pages` pages.
    ///
    /// # Errors
    /// [`Error::Overflow`] where an offset into it would pass `i64`.
    pub fn new(layout: CacheLayout, pages: usize) -> Result<Self, Error> {
        let extent = |what, strides: attn_core::PageStrides, dim: usize| {
            let last =
                |count: usize, stride: i64| count.saturating_sub(1) as i128 * i128::from(stride);
            let end = match pages {
                0 => 0,
                // The product of a usize and an i64 fits; the sums saturate.
                _ => last(pages, strides.page)
                    .saturating_add(last(layout.page_size(), strides.slot))
                    .saturating_add(last(layout.kv_heads(), strides.head))
                    .saturating_add(dim as i128),
            };
            i64::try_from(end).map_err(|_| Error::Overflow {
                what,
                expected: i64::MAX.unsigned_abs(),
                got: u64::try_from(end).unwrap_or(u64::MAX),
            })
        };
        let key_extent = extent("key extent", layout.key_strides(), layout.key_dim())?;
        let value_extent = extent("value extent", layout.value_strides(), layout.value().dim())?;
        Ok(Self { id: layout.id(), pages, key_extent, value_extent })
    }

    /// The layout.
    #[must_use]
    pub const fn layout(&self) -> &CacheLayout {
        self.id.layout()
    }

    /// The identity to stamp on the cache.
    #[must_use]
    pub const fn layout_id(&self) -> &LayoutId {
        &self.id
    }

    /// Pages of the cache.
    #[must_use]
    pub const fn pages(&self) -> usize {
        self.pages
    }

    /// Elements that key storage needs.
    #[must_use]
    pub const fn key_extent(&self) -> i64 {
        self.key_extent
    }

    /// Elements that value storage needs, counted from the start of value storage; under
    /// `ValueStorage::PrefixOfKey` that is the key storage.
    #[must_use]
    pub const fn value_extent(&self) -> i64 {
        self.value_extent
    }

    /// Checks the identity stamped on a cache against this map.
    ///
    /// # Errors
    /// [`Error::Layout`], which prints both.
    pub fn check(&self, stamped: &LayoutId) -> Result<(), Error> {
        Ok(self.layout().check(stamped)?)
    }

    /// The page and slot of a token of a sequence with this table.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a token past the table or a page past the cache.
    pub fn locate(&self, table: &[u32], token: usize) -> Result<PageSlot, Error> {
        let (entry, slot) = self.layout().locate(token);
        let &page = table.get(entry).ok_or(Error::OutOfRange {
            what: "page of the token in the table",
            expected: table.len(),
            got: entry,
        })?;
        let page = page as usize;
        if page >= self.pages {
            return Err(Error::OutOfRange { what: "page", expected: self.pages, got: page });
        }
        Ok(PageSlot { page, slot })
    }

    /// The offset of a token's key row of one head from the start of key storage.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] for a token past the table, a page past the cache, or a head past
    /// the layout's.
    pub fn key_offset(&self, table: &[u32], token: usize, head: usize) -> Result<i64, Error> {
        let PageSlot { page, slot } = self.locate_head(table, token, head)?;
        Ok(self.layout().key_offset(page, slot, head))
    }

    /// The offset of a token's value row of one head from the start of value storage.
    ///
    /// # Errors
    /// As for [`Self::key_offset`].
    pub fn value_offset(&self, table: &[u32], token: usize, head: usize) -> Result<i64, Error> {
        let PageSlot { page, slot } = self.locate_head(table, token, head)?;
        Ok(self.layout().value_offset(page, slot, head))
    }

    fn locate_head(&self, table: &[u32], token: usize, head: usize) -> Result<PageSlot, Error> {
        let expected = self.layout().kv_heads();
        if head >= expected {
            return Err(Error::OutOfRange { what: "kv_head", expected, got: head });
        }
        self.locate(table, token)
    }
}

#[cfg(test)]
mod tests {
    use attn_core::{DType, PageOrder, ValueStorage};

    use super::*;
    use crate::ErrorKind;

    fn map(order: PageOrder, value: ValueStorage) -> AddressMap {
        let layout = CacheLayout::contiguous(DType::F16, order, 4, 3, 8, value).unwrap();
        AddressMap::new(layout, 5).unwrap()
    }

    #[test]
    fn offsets_of_a_shuffled_table_cover_its_pages_once() {
        for order in [PageOrder::Nhd, PageOrder::Hnd] {
            let map = map(order, ValueStorage::Separate(6));
            let table = [3, 0, 4];
            let mut starts: Vec<i64> = (0..12)
                .flat_map(|token| (0..3).map(move |head| (token, head)))
                .map(|(token, head)| map.key_offset(&table, token, head).unwrap())
                .collect();
            starts.sort_unstable();
            let expected: Vec<i64> = [0i64, 3, 4]
                .iter()
                .flat_map(|page| (0..12).map(move |row| (page * 12 + row) * 8))
                .collect();
            assert_eq!(starts, expected);
            assert_eq!((map.key_extent(), map.value_extent()), (5 * 96, 5 * 72));
            assert_eq!(map.value_offset(&table, 11, 2).unwrap() + 6, map.value_extent());
        }
    }

    #[test]
    fn prefix_values_share_addresses_with_keys() {
        let map = map(PageOrder::Nhd, ValueStorage::PrefixOfKey(6));
        let table = [2, 1];
        assert_eq!(map.key_offset(&table, 6, 1), map.value_offset(&table, 6, 1));
        assert_eq!(map.value_extent(), map.key_extent() - 2);
    }

    #[test]
    fn map_refuses_what_lies_outside() {
        let map = map(PageOrder::Hnd, ValueStorage::Separate(6));
        let refused = |table: &[u32], token, head| match map.key_offset(table, token, head) {
            Err(Error::OutOfRange { what, expected, got }) => (what, expected, got),
            other => panic!("{other:?}"),
        };
        assert_eq!(refused(&[0], 4, 0), ("page of the token in the table", 1, 1));
        assert_eq!(refused(&[5], 0, 0), ("page", 5, 5));
        assert_eq!(refused(&[0], 0, 3), ("kv_head", 3, 3));
        assert!(map.value_offset(&[u32::MAX], 0, 0).is_err());
    }

    #[test]
    fn map_refuses_pages_past_64_bits() {
        let layout =
            CacheLayout::contiguous(DType::F16, PageOrder::Nhd, 4, 3, 8, ValueStorage::Separate(6))
                .unwrap();
        let err = AddressMap::new(layout.clone(), usize::MAX).unwrap_err();
        assert_eq!(err.kind(), ErrorKind::InvalidArgument);
        assert_eq!(AddressMap::new(layout, 0).unwrap().key_extent(), 0);
    }

    #[test]
    fn map_checks_the_stamped_identity() {
        let [nhd, hnd] =
            [PageOrder::Nhd, PageOrder::Hnd].map(|order| map(order, ValueStorage::Separate(6)));
        assert_eq!(nhd.check(nhd.layout_id()), Ok(()));
        let err = nhd.check(hnd.layout_id()).unwrap_err();
        assert_eq!(err.kind(), ErrorKind::LayoutMismatch);
        let text = err.to_string();
        assert!(text.contains(":nhd:") && text.contains(":hnd:"), "{text}");
    }
}
