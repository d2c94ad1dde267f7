//! The pages of every layer, as the engine of the demo owns them.
//!
//! The invariant: all layers share one layout and one block table, so the allocator's books hold for
//! each of them; a copy that the allocator asks for is done in every layer before anything is written.

use attn_core::{CacheLayout, DType, Error, KvView, PageOrder, TensorView, ValueStorage, View};
use attn_paged::BlockCopy;

/// Keys and values of every layer, f32, `[page, slot, kv_head, dim]`.
#[derive(Debug)]
pub(crate) struct PagedCache {
    layout: CacheLayout,
    pages: usize,
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
}

impl PagedCache {
    /// Zeroed pages.
    pub(crate) fn new(
        layers: usize,
        pages: usize,
        page_size: usize,
        kv_heads: usize,
        dim: usize,
    ) -> Result<Self, Error> {
        let value = ValueStorage::Separate(dim);
        let layout =
            CacheLayout::contiguous(DType::F32, PageOrder::Nhd, page_size, kv_heads, dim, value)?;
        let elements = pages * page_size * kv_heads * dim;
        let make = || (0..layers).map(|_| vec![0.0; elements]).collect();
        Ok(Self { layout, pages, keys: make(), values: make() })
    }

    /// The layout of every layer.
    pub(crate) const fn layout(&self) -> &CacheLayout {
        &self.layout
    }

    /// Copies whole pages, in every layer.
    pub(crate) fn copy_page(&mut self, copy: BlockCopy) {
        let page = self.page_elements();
        let (from, to) = (copy.from as usize * page, copy.to as usize * page);
        for storage in self.keys.iter_mut().chain(&mut self.values) {
            storage.copy_within(from..from + page, to);
        }
    }

    /// Writes the new rows of one layer to their slots (`page * page_size + slot`).
    ///
    /// Shapes: `k` and `v` `[slots, kv_heads, dim]`.
    pub(crate) fn write(&mut self, layer: usize, slots: &[i64], k: &[f32], v: &[f32]) {
        let row = self.layout.kv_heads() * self.layout.key_dim();
        for (n, &slot) in slots.iter().enumerate() {
            let Ok(slot) = usize::try_from(slot) else { continue };
            // In `nhd` order a token's heads are one contiguous row.
            let (from, to) = (n * row..(n + 1) * row, slot * row..(slot + 1) * row);
            self.keys[layer][to.clone()].copy_from_slice(&k[from.clone()]);
            self.values[layer][to].copy_from_slice(&v[from]);
        }
    }

    /// One layer, seen through a block table.
    pub(crate) fn view<'a>(
        &'a self,
        layer: usize,
        block_table: View<'a, i32>,
    ) -> Result<KvView<'a>, Error> {
        let l = &self.layout;
        let shape = [self.pages, l.page_size(), l.kv_heads(), l.key_dim()];
        Ok(KvView::Paged {
            k_cache: TensorView::F32(View::contiguous("k_cache", &self.keys[layer], &shape)?),
            v_cache: TensorView::F32(View::contiguous("v_cache", &self.values[layer], &shape)?),
            block_table,
            stamp: l.id(),
        })
    }

    const fn page_elements(&self) -> usize {
        self.layout.page_size() * self.layout.kv_heads() * self.layout.key_dim()
    }
}
