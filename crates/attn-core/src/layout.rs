//! Where a cached token lives: the page layout, its address map, and the identity stamped on a cache.
//!
//! A [`CacheLayout`] is complete: with a page number, a slot and a head it yields an element offset,
//! and two layouts with equal [`LayoutId`]s address every element alike. The identity is the
//! description itself and not a hash of it, so that a mismatch can print both sides.

use std::fmt;

use crate::dtype::DType;
use crate::error::Error;

/// The order of the axes inside one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PageOrder {
    /// `[page, slot, kv_head, dim]`: one token's heads are adjacent.
    Nhd,
    /// `[page, kv_head, slot, dim]`: one head's tokens are adjacent.
    Hnd,
}

impl fmt::Display for PageOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nhd => "nhd",
            Self::Hnd => "hnd",
        })
    }
}

/// Where values are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ValueStorage {
    /// In storage of their own, with this head dimension.
    Separate(usize),
    /// In the first elements of each key row (one latent row serves as both, as in MLA).
    PrefixOfKey(usize),
}

impl ValueStorage {
    /// The head dimension of values.
    #[must_use]
    pub const fn dim(self) -> usize {
        match self {
            Self::Separate(dim) | Self::PrefixOfKey(dim) => dim,
        }
    }
}

/// Strides of one cache tensor, in elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageStrides {
    /// From a page to the next.
    pub page: i64,
    /// From a slot to the next within a page.
    pub slot: i64,
    /// From a KV head to the next within a slot.
    pub head: i64,
}

impl PageStrides {
    /// The element offset of `(page, slot, head)`, computed in 64 bits and saturating, so that an absurd
    /// page lies past every buffer instead of wrapping into one.
    #[must_use]
    pub const fn offset(&self, page: usize, slot: usize, head: usize) -> i64 {
        const fn step(index: usize, stride: i64) -> i64 {
            // Past i64 on no machine: a `usize` has 64 bits at most, and its upper half saturates.
            let wide = index as u64;
            let index = if wide > i64::MAX.cast_unsigned() { i64::MAX } else { wide.cast_signed() };
            index.saturating_mul(stride)
        }
        step(page, self.page)
            .saturating_add(step(slot, self.slot))
            .saturating_add(step(head, self.head))
    }
}

/// The complete description of a paged key/value cache.
///
/// Shapes: keys `[pages, slots, kv_heads, key_dim]` in [`PageOrder::Nhd`], slots and heads swapped in
/// [`PageOrder::Hnd`]; values alike with their own dimension.
/// Units: strides in elements; `page_size` in tokens.
/// Invariants: sizes are positive, strides are non-negative, the innermost stride is 1. Strides may
/// broadcast (be 0) for a cache that is only read; [`CacheLayout::check_writable`] is for writers.
///
/// ```
/// use attn_core::{CacheLayout, DType, PageOrder, ValueStorage};
///
/// let layout = CacheLayout::contiguous(
///     DType::BF16, PageOrder::Nhd, 16, 8, 128, ValueStorage::Separate(128))?;
/// // Logical token 37 is slot 5 of its sequence's third page.
/// assert_eq!(layout.locate(37), (2, 5));
/// assert_eq!(layout.key_offset(7, 5, 3), ((7 * 16 + 5) * 8 + 3) * 128);
/// # Ok::<(), attn_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CacheLayout {
    dtype: DType,
    order: PageOrder,
    page_size: usize,
    kv_heads: usize,
    key_dim: usize,
    value: ValueStorage,
    key_strides: PageStrides,
    value_strides: PageStrides,
}

impl CacheLayout {
    /// A layout whose pages are contiguous and adjacent.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a zero size or a value prefix longer than the key;
    /// [`Error::Overflow`] when a page's elements do not fit an `i64`.
    pub fn contiguous(
        dtype: DType,
        order: PageOrder,
        page_size: usize,
        kv_heads: usize,
        key_dim: usize,
        value: ValueStorage,
    ) -> Result<Self, Error> {
        let strides = |dim| contiguous_strides(order, page_size, kv_heads, dim);
        let key_strides = strides(key_dim)?;
        let value_strides = match value {
            ValueStorage::Separate(dim) => strides(dim)?,
            ValueStorage::PrefixOfKey(_) => key_strides,
        };
        Self::strided(dtype, order, page_size, kv_heads, key_dim, value, key_strides, value_strides)
    }

    /// A layout with explicit strides, for caches that interleave keys and values or pad their rows.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a zero size, a negative stride, or value strides that differ from the
    /// key's under [`ValueStorage::PrefixOfKey`]; [`Error::Overflow`] for a page past an `i64`.
    #[expect(clippy::too_many_arguments, reason = "the eight parts of a layout, once, here")]
    pub fn strided(
        dtype: DType,
        order: PageOrder,
        page_size: usize,
        kv_heads: usize,
        key_dim: usize,
        value: ValueStorage,
        key_strides: PageStrides,
        value_strides: PageStrides,
    ) -> Result<Self, Error> {
        for (field, size) in [
            ("page_size", page_size),
            ("kv_heads", kv_heads),
            ("head_dim", key_dim),
            ("value_dim", value.dim()),
        ] {
            if size == 0 {
                return Err(Error::invalid(field, "at least 1", size));
            }
        }
        if let ValueStorage::PrefixOfKey(dim) = value {
            if dim > key_dim {
                return Err(Error::invalid("value_dim", format!("at most {key_dim}"), dim));
            }
            if key_strides != value_strides {
                return Err(Error::invalid(
                    "value_strides",
                    format!("{key_strides:?}, the key's"),
                    format!("{value_strides:?}"),
                ));
            }
        }
        check_strides("key_strides", key_strides, page_size, kv_heads, key_dim)?;
        check_strides("value_strides", value_strides, page_size, kv_heads, value.dim())?;
        Ok(Self { dtype, order, page_size, kv_heads, key_dim, value, key_strides, value_strides })
    }

    /// The stored element type.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// The order of axes inside a page.
    #[must_use]
    pub const fn order(&self) -> PageOrder {
        self.order
    }

    /// Tokens a page holds.
    #[must_use]
    pub const fn page_size(&self) -> usize {
        self.page_size
    }

    /// KV heads.
    #[must_use]
    pub const fn kv_heads(&self) -> usize {
        self.kv_heads
    }

    /// Head dimension of keys.
    #[must_use]
    pub const fn key_dim(&self) -> usize {
        self.key_dim
    }

    /// Where values are and how wide.
    #[must_use]
    pub const fn value(&self) -> ValueStorage {
        self.value
    }

    /// Strides of the key cache, in elements.
    #[must_use]
    pub const fn key_strides(&self) -> PageStrides {
        self.key_strides
    }

    /// Strides of the value cache, in elements.
    #[must_use]
    pub const fn value_strides(&self) -> PageStrides {
        self.value_strides
    }

    /// The page of a sequence (an index into its block table) and the slot that hold a logical token.
    #[must_use]
    pub const fn locate(&self, token: usize) -> (usize, usize) {
        (token / self.page_size, token % self.page_size)
    }

    /// Pages that `tokens` tokens occupy.
    #[must_use]
    pub const fn pages_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.page_size)
    }

    /// The element offset of a key row from the start of the key cache.
    #[must_use]
    pub const fn key_offset(&self, page: usize, slot: usize, head: usize) -> i64 {
        self.key_strides.offset(page, slot, head)
    }

    /// The element offset of a value row from the start of the value cache.
    #[must_use]
    pub const fn value_offset(&self, page: usize, slot: usize, head: usize) -> i64 {
        self.value_strides.offset(page, slot, head)
    }

    /// Bytes of key and value payload in one page, padding between rows not counted.
    #[must_use]
    pub const fn page_bytes(&self) -> usize {
        let value = match self.value {
            ValueStorage::Separate(dim) => dim,
            ValueStorage::PrefixOfKey(_) => 0,
        };
        self.page_size
            .saturating_mul(self.kv_heads)
            .saturating_mul(self.key_dim.saturating_add(value))
            .saturating_mul(self.dtype.size())
    }

    /// Whether every row starts a multiple of `bytes` behind the start of its cache.
    ///
    /// Kernels that copy rows in wide pieces need it, and a cache's strides, unlike a dense tensor's, are known before
    /// the data is.
    #[must_use]
    pub fn has_rows_on(&self, bytes: usize) -> bool {
        let size = self.dtype.size() as i128;
        [self.key_strides, self.value_strides].into_iter().all(|strides| {
            let PageStrides { page, slot, head } = strides;
            // A stride that is never taken may be any number; pages are not counted here.
            let slot = if self.page_size > 1 { slot } else { 0 };
            let head = if self.kv_heads > 1 { head } else { 0 };
            [page, slot, head]
                .into_iter()
                .all(|s| (i128::from(s) * size) % bytes.max(1) as i128 == 0)
        })
    }

    /// Checks that no two elements share an address, which whoever writes tokens must know.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the strides.
    pub fn check_writable(&self) -> Result<(), Error> {
        let (page_size, heads) = (self.page_size, self.kv_heads);
        check_disjoint("key_strides", self.key_strides, page_size, heads, self.key_dim)?;
        check_disjoint("value_strides", self.value_strides, page_size, heads, self.value.dim())
    }

    /// The identity to stamp on a cache made with this layout.
    #[must_use]
    pub fn id(&self) -> LayoutId {
        LayoutId { version: LayoutId::VERSION, layout: self.clone() }
    }

    /// Checks the identity stamped on a cache against this layout.
    ///
    /// # Errors
    /// [`Error::CacheLayout`], which prints both.
    pub fn check(&self, stamped: &LayoutId) -> Result<(), Error> {
        let own = self.id();
        if own == *stamped {
            Ok(())
        } else {
            Err(Error::CacheLayout { expected: Box::new(own), got: Box::new(stamped.clone()) })
        }
    }
}

/// The identity of a [`CacheLayout`]: a version and every field that decides an address.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LayoutId {
    version: u32,
    layout: CacheLayout,
}

impl LayoutId {
    /// The version of the address map in this build.
    pub const VERSION: u32 = 1;

    /// The version of the address map that made the cache.
    #[must_use]
    pub const fn version(&self) -> u32 {
        self.version
    }

    /// The layout that this identity names.
    #[must_use]
    pub const fn layout(&self) -> &CacheLayout {
        &self.layout
    }
}

impl fmt::Display for LayoutId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let l = &self.layout;
        let (k, v) = (l.key_strides, l.value_strides);
        let value = match l.value {
            ValueStorage::Separate(dim) => format!("v{dim}"),
            ValueStorage::PrefixOfKey(dim) => format!("v{dim}=prefix"),
        };
        write!(
            f,
            "v{}:{}:{}:page{}:h{}:k{}:{value}:ks{},{},{}:vs{},{},{}",
            self.version,
            l.dtype,
            l.order,
            l.page_size,
            l.kv_heads,
            l.key_dim,
            k.page,
            k.slot,
            k.head,
            v.page,
            v.slot,
            v.head
        )
    }
}

fn contiguous_strides(
    order: PageOrder,
    page_size: usize,
    kv_heads: usize,
    dim: usize,
) -> Result<PageStrides, Error> {
    let overflow = || Error::Overflow {
        what: "elements of a page",
        detail: format!("{page_size} slots * {kv_heads} heads * {dim} elements"),
    };
    let product = |a: usize, b: usize| a.checked_mul(b).ok_or_else(overflow);
    let narrow = |x: usize| i64::try_from(x).map_err(|_| overflow());
    let page = narrow(product(product(page_size, kv_heads)?, dim)?)?;
    let dim = narrow(dim)?;
    Ok(match order {
        PageOrder::Nhd => PageStrides { page, slot: page / narrow(page_size.max(1))?, head: dim },
        PageOrder::Hnd => PageStrides { page, slot: dim, head: page / narrow(kv_heads.max(1))? },
    })
}

fn check_strides(
    field: &'static str,
    strides: PageStrides,
    page_size: usize,
    kv_heads: usize,
    dim: usize,
) -> Result<(), Error> {
    let PageStrides { page, slot, head } = strides;
    if page < 0 || slot < 0 || head < 0 {
        return Err(Error::invalid(field, "non-negative strides", format!("{strides:?}")));
    }
    let span = (i128::from(slot) * (page_size as i128 - 1))
        .saturating_add(i128::from(head) * (kv_heads as i128 - 1))
        .saturating_add(dim as i128);
    if span > i128::from(i64::MAX) {
        return Err(Error::Overflow { what: "elements of a page", detail: format!("{strides:?}") });
    }
    Ok(())
}

fn check_disjoint(
    field: &'static str,
    strides: PageStrides,
    page_size: usize,
    kv_heads: usize,
    dim: usize,
) -> Result<(), Error> {
    let PageStrides { page, slot, head } = strides;
    // Sorted by stride, each axis must step over all that the smaller ones span. The page axis
    // takes part as if it had two pages: the number of pages is not part of a layout.
    let mut axes = [(page, 2), (slot, page_size), (head, kv_heads)];
    axes.sort_by_key(|&(stride, _)| stride);
    let mut span = dim as i128;
    for (stride, extent) in axes {
        if extent > 1 && i128::from(stride) < span {
            let expected = format!("strides under which {dim}-element rows do not overlap");
            return Err(Error::invalid(field, expected, format!("{strides:?}")));
        }
        span += i128::from(stride) * (extent as i128 - 1);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(order: PageOrder) -> CacheLayout {
        CacheLayout::contiguous(DType::F16, order, 4, 3, 8, ValueStorage::Separate(6))
            .expect("valid")
    }

    #[test]
    fn offsets_enumerate_a_page_without_overlap() {
        for order in [PageOrder::Nhd, PageOrder::Hnd] {
            let l = layout(order);
            let mut seen = [false; 2 * 4 * 3 * 8];
            for page in 0..2 {
                for slot in 0..4 {
                    for head in 0..3 {
                        let at = usize::try_from(l.key_offset(page, slot, head)).expect("positive");
                        for cell in &mut seen[at..at + 8] {
                            assert!(!*cell);
                            *cell = true;
                        }
                    }
                }
            }
            assert!(seen.iter().all(|&x| x));
        }
    }

    #[test]
    fn identity_tells_orders_and_strides_apart() {
        let (nhd, hnd) = (layout(PageOrder::Nhd), layout(PageOrder::Hnd));
        assert!(nhd.check(&nhd.id()).is_ok());
        let err = nhd.check(&hnd.id()).expect_err("orders differ").to_string();
        assert!(err.contains(":nhd:") && err.contains(":hnd:"), "{err}");
        let mut strides = nhd.key_strides();
        strides.page += 8;
        let padded = CacheLayout::strided(
            DType::F16,
            PageOrder::Nhd,
            4,
            3,
            8,
            ValueStorage::Separate(6),
            strides,
            nhd.value_strides(),
        )
        .expect("padding between pages is fine");
        assert_ne!(padded.id(), nhd.id());
    }

    #[test]
    fn writers_reject_overlap_and_negative_strides() {
        let ok = layout(PageOrder::Nhd);
        let with = |page, slot, head| {
            let s = PageStrides { page, slot, head };
            CacheLayout::strided(
                DType::F16,
                PageOrder::Nhd,
                4,
                3,
                8,
                ValueStorage::Separate(6),
                s,
                ok.value_strides(),
            )
            .and_then(|l| l.check_writable())
        };
        assert!(with(96, 24, 8).is_ok());
        assert!(with(95, 24, 8).is_err());
        assert!(with(96, 24, 7).is_err());
        assert!(with(96, -24, 8).is_err());
        assert!(with(0, 24, 8).is_err());
    }

    #[test]
    fn contiguous_rejects_zero_and_overflow() {
        let make = |size, heads, dim, value| {
            CacheLayout::contiguous(DType::F32, PageOrder::Hnd, size, heads, dim, value)
        };
        assert!(make(0, 1, 8, ValueStorage::Separate(8)).is_err());
        assert!(make(16, 0, 8, ValueStorage::Separate(8)).is_err());
        assert!(make(16, 1, 0, ValueStorage::Separate(8)).is_err());
        assert!(make(16, 1, 8, ValueStorage::Separate(0)).is_err());
        assert!(make(16, 1, 8, ValueStorage::PrefixOfKey(9)).is_err());
        assert!(make(usize::MAX, 2, 8, ValueStorage::Separate(8)).is_err());
        assert!(make(16, 1, 576, ValueStorage::PrefixOfKey(512)).is_ok());
    }

    #[test]
    fn rows_on_16_bytes_depend_on_type_and_taken_strides() {
        let of = |dtype, size, heads, dim| {
            CacheLayout::contiguous(
                dtype,
                PageOrder::Nhd,
                size,
                heads,
                dim,
                ValueStorage::Separate(dim),
            )
            .expect("valid")
            .has_rows_on(16)
        };
        assert!(of(DType::BF16, 16, 8, 72) && of(DType::F8E4M3, 16, 8, 64));
        assert!(!of(DType::F8E4M3, 16, 8, 72) && !of(DType::BF16, 16, 8, 12));
        // One head, one slot: a page of 16 bytes is all that is stepped over.
        assert!(of(DType::F8E4M3, 1, 1, 16) && !of(DType::F8E4M3, 2, 1, 24));
    }

    #[test]
    fn offsets_pass_two_to_the_31() {
        let l = layout(PageOrder::Nhd);
        assert_eq!(l.key_offset(1 << 30, 0, 0), (1i64 << 30) * 96);
        assert_eq!(l.key_offset(usize::MAX, 3, 2), i64::MAX);
    }
}
