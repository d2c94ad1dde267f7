//! The data of a call on the device, in the shapes of [`attn_core::Inputs`] and [`attn_core::Outputs`].
//!
//! The invariant: these are checked by the same code as host tensors ([`attn_core::CallLayout`]), so that the
//! two engines refuse the same calls in the same words. What a host check reads, page ids and scales, a
//! kernel meets unchecked: an id outside the cache yields NaN and is never followed.

use std::sync::Arc;

use attn_core::{CallLayout, KvLayout, LayoutId, OutputLayout};
use cudarc::driver::CudaContext;

use super::tensor::{DeviceTensor, DeviceTensorMut, DeviceView, DeviceViewMut};
use crate::error::Error;
use crate::launch::DeviceMemory;

/// Keys and values.
#[derive(Debug, Clone)]
#[expect(clippy::large_enum_variant, reason = "one value per call, read by reference")]
pub enum KvTensors<'a> {
    /// k `[rows, kv_heads, head_dim]` and v `[rows, kv_heads, value_dim]`, packed or padded.
    Dense {
        /// Keys.
        k: DeviceTensor<'a>,
        /// Values.
        v: DeviceTensor<'a>,
    },
    /// Caches of four axes in page order, found through a block table `[batch, width]`.
    ///
    /// Under [`attn_core::ValueStorage::PrefixOfKey`] the value tensor lies on the key cache.
    Paged {
        /// Key cache.
        k_cache: DeviceTensor<'a>,
        /// Value cache.
        v_cache: DeviceTensor<'a>,
        /// Page ids; entries past a sequence's last needed page are not read.
        block_table: DeviceView<'a, i32>,
        /// The identity stamped on the cache when it was made.
        stamp: LayoutId,
    },
}

/// Everything a call reads; shapes as [`attn_core::Inputs`].
#[derive(Debug, Clone)]
pub struct Inputs<'a> {
    /// Queries.
    pub q: DeviceTensor<'a>,
    /// Keys and values.
    pub kv: KvTensors<'a>,
    /// Boolean mask: non-zero keeps.
    pub mask: Option<DeviceView<'a, u8>>,
    /// Block mask: non-zero keeps.
    pub block_mask: Option<DeviceView<'a, u8>>,
    /// Additive bias.
    pub bias: Option<DeviceView<'a, f32>>,
    /// ALiBi slopes.
    pub alibi: Option<DeviceView<'a, f32>>,
    /// Attention sinks.
    pub sinks: Option<DeviceView<'a, f32>>,
    /// fp8 queries only: query = stored * scale, a positive finite one; query heads that share a KV head share it.
    pub q_scale: Option<DeviceView<'a, f32>>,
    /// fp8 keys only: key = stored * scale, a positive finite one.
    pub k_scale: Option<DeviceView<'a, f32>>,
    /// fp8 values only: value = stored * scale, a positive finite one.
    pub v_scale: Option<DeviceView<'a, f32>>,
    /// Dropout only: seed and offset, read by the kernel, so that a captured graph drops by what lies there when it
    /// is replayed. See [`attn_core::dropout`].
    pub dropout: Option<DeviceView<'a, u64>>,
}

/// What a forward writes; padding rows too (0, and -inf for the LSE).
#[derive(Debug)]
pub struct Outputs<'a> {
    /// Output, shaped as q with `value_dim`.
    pub o: DeviceTensorMut<'a>,
    /// Natural-log LSE `[rows, q_heads]`, if wanted.
    pub lse: Option<DeviceViewMut<'a, f32>>,
}

impl<'a> Inputs<'a> {
    /// A dense call without masks, biases, sinks or scales; the rest is set by field.
    #[must_use]
    pub const fn dense(q: DeviceTensor<'a>, k: DeviceTensor<'a>, v: DeviceTensor<'a>) -> Self {
        Self::new(q, KvTensors::Dense { k, v })
    }

    /// A call over dense or paged keys without masks, biases, sinks or scales; the rest is set by field.
    #[must_use]
    pub const fn new(q: DeviceTensor<'a>, kv: KvTensors<'a>) -> Self {
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
            KvTensors::Dense { k, v } => KvLayout::Dense { k: k.operand(), v: v.operand() },
            KvTensors::Paged { k_cache, v_cache, block_table, stamp } => KvLayout::Paged {
                k_cache: k_cache.operand(),
                v_cache: v_cache.operand(),
                block_table: block_table.layout(),
                stamp,
            },
        };
        CallLayout {
            q: self.q.operand(),
            kv,
            mask: self.mask.as_ref().map(DeviceView::layout),
            block_mask: self.block_mask.as_ref().map(DeviceView::layout),
            bias: self.bias.as_ref().map(DeviceView::layout),
            alibi: self.alibi.as_ref().map(DeviceView::layout),
            sinks: self.sinks.as_ref().map(DeviceView::layout),
            q_scale: self.q_scale.as_ref().map(DeviceView::layout),
            k_scale: self.k_scale.as_ref().map(DeviceView::layout),
            v_scale: self.v_scale.as_ref().map(DeviceView::layout),
            dropout: self.dropout.as_ref().map(DeviceView::layout),
        }
    }

    /// Every piece of memory that a launch is given.
    pub(crate) fn memory(&self) -> impl Iterator<Item = DeviceMemory<'a>> + '_ {
        let (k, v, table) = match &self.kv {
            KvTensors::Dense { k, v } => (k, v, None),
            KvTensors::Paged { k_cache, v_cache, block_table, .. } => {
                (k_cache, v_cache, Some(block_table.memory()))
            }
        };
        let masks = [&self.mask, &self.block_mask].into_iter().flatten().map(DeviceView::memory);
        let scales = [&self.q_scale, &self.k_scale, &self.v_scale];
        let floats = [&self.bias, &self.alibi, &self.sinks].into_iter().chain(scales);
        let floats = floats.flatten().map(DeviceView::memory);
        [self.q.memory(), k.memory(), v.memory()]
            .into_iter()
            .chain(table)
            .chain(masks)
            .chain(floats)
            .chain(self.dropout.as_ref().map(DeviceView::memory))
    }
}

impl<'a> Outputs<'a> {
    /// What the tensors are, without what they hold.
    #[must_use]
    pub fn layout(&self) -> OutputLayout<'_> {
        OutputLayout {
            o: self.o.tensor().operand(),
            lse: self.lse.as_ref().map(|lse| lse.view().layout()),
        }
    }

    /// Every piece of memory that a launch is given.
    pub(crate) fn memory(&self) -> impl Iterator<Item = DeviceMemory<'a>> + '_ {
        let lse = self.lse.as_ref().map(|lse| lse.view().memory());
        [self.o.tensor().memory()].into_iter().chain(lse)
    }
}

/// Checks that all memory belongs to a context.
pub(crate) fn check_memory<'a>(
    context: &Arc<CudaContext>,
    mut memory: impl Iterator<Item = DeviceMemory<'a>>,
) -> Result<(), Error> {
    memory.try_for_each(|memory| memory.check_context(context))
}
