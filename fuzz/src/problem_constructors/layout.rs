//! [`CacheLayout`] on any sizes and strides: what it accepts addresses within 64 bits, and what it
//! calls writable never gives two rows one address.

use std::collections::HashSet;

use arbitrary::Arbitrary;
use attn_core::{CacheLayout, Error, PageOrder, PageStrides, ValueStorage};

use super::size::{Size, dtype};

/// The fields of a layout.
#[derive(Debug, Arbitrary)]
pub struct Input {
    dtype: u8,
    hnd: bool,
    page_size: Size,
    kv_heads: Size,
    key_dim: Size,
    value_dim: Size,
    prefix: bool,
    strides: Option<[[(Size, bool); 3]; 2]>,
    token: Size,
}

impl Input {
    /// The layout, or why there is none.
    pub(super) fn build(&self) -> Result<CacheLayout, Error> {
        let dtype = dtype(self.dtype);
        let order = if self.hnd { PageOrder::Hnd } else { PageOrder::Nhd };
        let (page_size, kv_heads) = (self.page_size.get(), self.kv_heads.get());
        let key_dim = self.key_dim.get();
        let dim = self.value_dim.get();
        let value =
            if self.prefix { ValueStorage::PrefixOfKey(dim) } else { ValueStorage::Separate(dim) };
        let Some([key, own]) = &self.strides else {
            return CacheLayout::contiguous(dtype, order, page_size, kv_heads, key_dim, value);
        };
        let strides = |[page, slot, head]: [(Size, bool); 3]| PageStrides {
            page: page.0.stride(page.1),
            slot: slot.0.stride(slot.1),
            head: head.0.stride(head.1),
        };
        let key_strides = strides(*key);
        let value_strides = if self.prefix { key_strides } else { strides(*own) };
        CacheLayout::strided(
            dtype,
            order,
            page_size,
            kv_heads,
            key_dim,
            value,
            key_strides,
            value_strides,
        )
    }
}

pub(super) fn check(input: &Input) {
    let layout = match input.build() {
        Ok(layout) => layout,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    assert!(layout.check(&layout.id()).is_ok());
    let token = input.token.get();
    let (page, slot) = layout.locate(token);
    assert!(slot < layout.page_size() && page * layout.page_size() + slot == token);
    assert!(layout.pages_for(token) >= page);
    let (last_slot, last_head) = (layout.page_size() - 1, layout.kv_heads() - 1);
    assert!(layout.key_offset(0, last_slot, last_head) >= 0);
    assert!(layout.value_offset(0, last_slot, last_head) >= 0);
    assert!(layout.page_bytes() >= layout.dtype().size());

    let few_rows = layout.page_size().max(layout.kv_heads()) <= 8;
    // Storage of two pages must be addressable; a stride as such may be as long as it likes.
    let short = |strides: PageStrides| strides.page.max(strides.slot).max(strides.head) < 1 << 56;
    let two_pages = short(layout.key_strides()) && short(layout.value_strides());
    if layout.check_writable().is_ok() && few_rows && two_pages {
        check_rows_apart(&layout);
    }
}

/// No two rows of two pages share an element.
fn check_rows_apart(layout: &CacheLayout) {
    // Ends of rows suffice: rows of one length overlap where one holds the first element of another.
    for (dim, of_key) in [(layout.key_dim(), true), (layout.value().dim(), false)] {
        let mut starts = HashSet::new();
        for page in 0..2 {
            for slot in 0..layout.page_size() {
                for head in 0..layout.kv_heads() {
                    let at = if of_key {
                        layout.key_offset(page, slot, head)
                    } else {
                        layout.value_offset(page, slot, head)
                    };
                    assert!(starts.insert(at), "two rows at {at}: {layout:?}");
                }
            }
        }
        let mut sorted: Vec<_> = starts.into_iter().map(i128::from).collect();
        sorted.sort_unstable();
        for pair in sorted.windows(2) {
            assert!(pair[1] - pair[0] >= dim as i128, "rows overlap at {pair:?}: {layout:?}");
        }
    }
}
