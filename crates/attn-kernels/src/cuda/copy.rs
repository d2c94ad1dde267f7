//! Pages copied inside a cache, for sequences that share one until they differ.
//!
//! The invariant: the copied bytes are those of the rows, not of the padding between them, and pairs are read on the
//! device alone: one with an id outside the cache touches nothing.

use std::sync::Arc;

use attn_core::{CacheLayout, DType, PageStrides};
use cudarc::driver::CudaStream;

use super::append::{CacheMut, check_cache};
use super::call::check_memory;
use super::capture::Captures;
use super::config;
use super::engine::{CudaEngine, warp_blocks};
use super::params::{CopyBlocksParams, Rows, as_i32};
use super::tensor::{DeviceTensor, DeviceTensorMut, DeviceView};
use crate::error::Error;
use crate::launch::Launch;

impl CudaEngine {
    /// Copies pages of a cache to other pages, in stream order: `pairs` i32 `[count, 2]`, from and to.
    ///
    /// The pool's list has every target once and no target that is a source; with another list the pages in question
    /// hold either content.
    ///
    /// # Errors
    /// [`Error::Call`] for a cache made with another layout, or one whose elements overlap, and for a list of another
    /// shape; nothing was launched then. [`Error::Driver`].
    pub fn copy_blocks(
        &self,
        layout: &CacheLayout,
        cache: &mut CacheMut<'_>,
        pairs: &DeviceView<'_, i32>,
        stream: &Arc<CudaStream>,
    ) -> Result<(), Error> {
        check_cache(layout, cache)?;
        let count = check_pairs(pairs)?;
        let (k, v) = (cache.k_cache.tensor(), cache.v_cache.as_ref().map(DeviceTensorMut::tensor));
        let memory = || {
            let caches = [Some(k), v].into_iter().flatten().map(DeviceTensor::memory);
            caches.chain([pairs.memory()])
        };
        check_memory(self.context(), memory())?;
        let params = params(layout, k, v, pairs, count)?;
        let function = self.auxiliary(&config::copy_blocks_spec(), stream)?;
        let blocks = warp_blocks(&[count, layout.page_size(), layout.kv_heads()]);
        if blocks == 0 {
            return Ok(());
        }
        Captures::shared().hold([&function].into_iter(), [].into_iter(), memory());
        let launch = Launch::new(&function, blocks, config::HELPER_THREADS);
        launch.run(stream, &params, &[])
    }
}

fn check_pairs(pairs: &DeviceView<'_, i32>) -> Result<usize, Error> {
    let layout = pairs.layout();
    let is_dense = layout.is_row_contiguous()
        && (layout.strides().first() == Some(&2) || layout.shape().first() == Some(&1));
    if let ([count, 2], true) = (layout.shape(), is_dense) {
        return Ok(*count);
    }
    let got = format!("shape {:?}, strides {:?}", layout.shape(), layout.strides());
    Err(attn_core::Error::layout("pairs", "dense pairs [count, 2]", got).into())
}

fn params(
    layout: &CacheLayout,
    k: &DeviceTensor<'_>,
    v: Option<&DeviceTensor<'_>>,
    pairs: &DeviceView<'_, i32>,
    count: usize,
) -> Result<CopyBlocksParams, Error> {
    let dtype = layout.dtype();
    let v_dim = if v.is_some() { layout.value().dim() } else { 0 };
    Ok(CopyBlocksParams {
        k: in_bytes(k.address(), layout.key_strides(), dtype)?,
        v: match v {
            Some(v) => in_bytes(v.address(), layout.value_strides(), dtype)?,
            None => Rows::default(),
        },
        pairs: pairs.address(),
        count: count as i64,
        pages: k.layout().shape()[0] as i64,
        page_size: as_i32("page_size", layout.page_size())?,
        kv_heads: as_i32("kv_heads", layout.kv_heads())?,
        k_bytes: as_i32("head_dim", layout.key_dim().saturating_mul(dtype.size()))?,
        v_bytes: as_i32("value_dim", v_dim.saturating_mul(dtype.size()))?,
    })
}

fn in_bytes(data: u64, strides: PageStrides, dtype: DType) -> Result<Rows, Error> {
    let size = dtype.size() as i64;
    let scaled = |stride: i64| {
        let detail = || format!("a stride of {stride} elements of {dtype}");
        let overflow = || attn_core::Error::Overflow { what: "bytes of a page", detail: detail() };
        stride.checked_mul(size).ok_or_else(overflow)
    };
    Ok(Rows {
        data,
        sequence: scaled(strides.page)?,
        row: scaled(strides.slot)?,
        head: scaled(strides.head)?,
    })
}
