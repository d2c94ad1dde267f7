//! New keys and values scattered into the pages of a cache.
//!
//! The invariant: the cache is the one that its stamp names, no two of its elements share an address, and every
//! operand has a row for each token. Slots are read on the device alone: a negative one, or one past the cache, is
//! a token that is not stored.

use std::sync::Arc;

use attn_core::{Arrangement, CacheLayout, DType, LayoutId, Strided, ValueStorage};
use bytemuck::Pod;
use cudarc::driver::CudaStream;

use super::call::check_memory;
use super::capture::Captures;
use super::engine::{CudaEngine, warp_blocks};
use super::params::{AppendParams, Divisor, Rows, as_i32};
use super::tensor::{DeviceTensor, DeviceTensorMut, DeviceView};
use super::{config, forward};
use crate::error::Error;
use crate::launch::{DeviceMemory, Launch};

/// Rotary position embedding of the keys on their way into the cache.
#[derive(Debug, Clone)]
pub struct Rotary<'a> {
    /// Position of each token `[tokens]`.
    pub positions: DeviceView<'a, i32>,
    /// Cosines `[positions, rotary_dim / 2]`; the first `rotary_dim` elements of a key are turned.
    pub cos: DeviceView<'a, f32>,
    /// Sines, shaped as the cosines.
    pub sin: DeviceView<'a, f32>,
    /// Pairs `(x[2i], x[2i + 1])` are turned; otherwise halves `(x[i], x[i + rotary_dim / 2])`.
    pub interleaved: bool,
}

/// What is appended, and how.
///
/// Shapes: k `[tokens, kv_heads, head_dim]`, v `[tokens, kv_heads, value_dim]`, scales of rank 0, `[1]` or
/// `[sequences, kv_heads]`.
#[derive(Debug, Clone)]
pub struct AppendKv<'a> {
    /// New keys, f32, f16 or bf16.
    pub k: DeviceTensor<'a>,
    /// New values in the keys' type; `None` for a cache whose values are a prefix of its keys.
    pub v: Option<DeviceTensor<'a>>,
    /// Where each token goes `[tokens]`: page * page size + slot; not stored where negative or past the cache.
    pub slots: DeviceView<'a, i64>,
    /// Turn the keys first.
    pub rotary: Option<Rotary<'a>>,
    /// fp8 caches only: stored = key / scale. Without it, 1.
    pub k_scale: Option<DeviceView<'a, f32>>,
    /// fp8 caches only: stored = value / scale. Without it, 1.
    pub v_scale: Option<DeviceView<'a, f32>>,
    /// The sequence of each token `[tokens]`, where a scale has sequences.
    pub sequences: Option<DeviceView<'a, i32>>,
}

/// The cache that is appended to.
#[derive(Debug)]
pub struct CacheMut<'a> {
    /// Keys, four axes in page order.
    pub k_cache: DeviceTensorMut<'a>,
    /// Values; `None` where they are a prefix of the keys.
    pub v_cache: Option<DeviceTensorMut<'a>>,
    /// The identity stamped on the cache when it was made.
    pub stamp: LayoutId,
}

impl CudaEngine {
    /// Writes new keys and values into the pages of a cache, in stream order.
    ///
    /// # Errors
    /// [`Error::Call`] for a cache made with another layout, or one whose elements overlap, and for operands that
    /// do not fit it; nothing was launched then. [`Error::Driver`].
    pub fn append_kv(
        &self,
        layout: &CacheLayout,
        append: &AppendKv<'_>,
        cache: &mut CacheMut<'_>,
        stream: &Arc<CudaStream>,
    ) -> Result<(), Error> {
        check_cache(layout, cache)?;
        let tokens = check_rows(layout, append)?;
        check_scales(layout, append, tokens)?;
        check_memory(self.context(), memory(append, cache))?;
        let params = params(layout, append, cache, tokens)?;
        let spec = config::append_kv_spec(append.k.dtype(), layout.dtype());
        let function = self.auxiliary(&spec, stream)?;
        let blocks = warp_blocks(&[tokens, layout.kv_heads()]);
        if blocks == 0 {
            return Ok(());
        }
        Captures::shared().hold([&function].into_iter(), [].into_iter(), memory(append, cache));
        Launch::new(&function, blocks, config::HELPER_THREADS).run(stream, &params, &[])
    }
}

fn memory<'a>(
    append: &'a AppendKv<'_>,
    cache: &'a CacheMut<'_>,
) -> impl Iterator<Item = DeviceMemory<'a>> {
    let tensors = [Some(&append.k), append.v.as_ref(), Some(cache.k_cache.tensor())];
    let values = cache.v_cache.as_ref().map(DeviceTensorMut::tensor);
    let rotary = append.rotary.as_ref();
    let integers = [append.sequences.as_ref(), rotary.map(|rotary| &rotary.positions)];
    let floats = [append.k_scale.as_ref(), append.v_scale.as_ref()];
    let angles = [rotary.map(|rotary| &rotary.cos), rotary.map(|rotary| &rotary.sin)];
    let tensors = tensors.into_iter().flatten().chain(values).map(DeviceTensor::memory);
    let integers = integers.into_iter().flatten().map(DeviceView::memory);
    let floats = floats.into_iter().chain(angles).flatten().map(DeviceView::memory);
    tensors.chain(integers).chain(floats).chain([append.slots.memory()])
}

/// Checks stamp, layout and tensors of a cache that is written.
pub(crate) fn check_cache(layout: &CacheLayout, cache: &CacheMut<'_>) -> Result<(), Error> {
    layout.check(&cache.stamp)?;
    layout.check_writable()?;
    let k = cache.k_cache.tensor().operand();
    match (&cache.v_cache, layout.value()) {
        (Some(v), ValueStorage::Separate(_)) => Ok(layout.check_tensors(k, v.tensor().operand())?),
        (None, ValueStorage::PrefixOfKey(dim)) => {
            // The values are the keys' own rows, seen narrower.
            let values = k.layout.narrow(k.layout.shape().len().saturating_sub(1), 0..dim);
            let values = values.unwrap_or_else(|| k.layout.clone());
            let v = attn_core::Operand { dtype: k.dtype, layout: &values };
            Ok(layout.check_tensors(k, v)?)
        }
        (Some(_), ValueStorage::PrefixOfKey(_)) => Err(presence("v_cache", false)),
        (None, ValueStorage::Separate(_)) => Err(presence("v_cache", true)),
    }
}

fn presence(field: &'static str, wanted: bool) -> Error {
    let (expected, got) = if wanted { ("a tensor", "none") } else { ("none", "a tensor") };
    let expected = format!("{expected}, as the cache layout states");
    attn_core::Error::invalid(field, expected, got).into()
}

fn check_rows(layout: &CacheLayout, append: &AppendKv<'_>) -> Result<usize, Error> {
    let tokens = append.k.layout().shape().first().copied().unwrap_or(0);
    let dtype = append.k.dtype();
    if dtype.is_fp8() || (dtype != layout.dtype() && !layout.dtype().is_fp8()) {
        let expected = match layout.dtype() {
            DType::F8E4M3 | DType::F8E5M2 => "f32, f16 or bf16",
            other => other.name(),
        };
        return Err(attn_core::Error::layout("k", expected, dtype).into());
    }
    check_tensor("k", &append.k, dtype, [tokens, layout.kv_heads(), layout.key_dim()])?;
    match (&append.v, layout.value()) {
        (Some(v), ValueStorage::Separate(dim)) => {
            check_tensor("v", v, dtype, [tokens, layout.kv_heads(), dim])?;
        }
        (None, ValueStorage::PrefixOfKey(_)) => {}
        (Some(_), ValueStorage::PrefixOfKey(_)) => return Err(presence("v", false)),
        (None, ValueStorage::Separate(_)) => return Err(presence("v", true)),
    }
    check_list("slots", &append.slots, tokens)?;
    if let Some(rotary) = &append.rotary {
        check_rotary(layout, rotary, tokens)?;
    }
    Ok(tokens)
}

fn check_rotary(layout: &CacheLayout, rotary: &Rotary<'_>, tokens: usize) -> Result<(), Error> {
    check_list("positions", &rotary.positions, tokens)?;
    let (cos, sin) = (rotary.cos.layout(), rotary.sin.layout());
    let half = cos.shape().last().copied().unwrap_or(0);
    let most = layout.key_dim() / 2;
    let fits = cos.shape().len() == 2 && (1..=most).contains(&half) && cos.is_row_contiguous();
    if !fits {
        let expected = format!("[positions, 1 to {most}] with innermost stride 1");
        return Err(attn_core::Error::layout("cos", expected, layout_text(cos)).into());
    }
    // One stride serves both.
    if sin.shape() != cos.shape() || sin.strides() != cos.strides() {
        return Err(attn_core::Error::layout("sin", layout_text(cos), layout_text(sin)).into());
    }
    Ok(())
}

fn layout_text(layout: &Strided) -> String {
    format!("shape {:?}, strides {:?}", layout.shape(), layout.strides())
}

fn check_tensor(
    field: &'static str,
    tensor: &DeviceTensor<'_>,
    dtype: DType,
    shape: [usize; 3],
) -> Result<(), Error> {
    let layout = tensor.layout();
    if tensor.dtype() != dtype {
        return Err(attn_core::Error::layout(field, dtype.name(), tensor.dtype()).into());
    }
    if layout.shape() != shape || !layout.is_row_contiguous() {
        let expected = format!("shape {shape:?} with innermost stride 1");
        return Err(attn_core::Error::layout(field, expected, layout_text(layout)).into());
    }
    Ok(())
}

fn check_list<T: Pod>(
    field: &'static str,
    list: &DeviceView<'_, T>,
    tokens: usize,
) -> Result<(), Error> {
    let layout = list.layout();
    if layout.shape() == [tokens] && layout.is_row_contiguous() {
        return Ok(());
    }
    let expected = format!("shape [{tokens}] with stride 1");
    Err(attn_core::Error::layout(field, expected, layout_text(layout)).into())
}

fn check_scales(layout: &CacheLayout, append: &AppendKv<'_>, tokens: usize) -> Result<(), Error> {
    let mut has_sequences = false;
    for (field, scale) in [("k_scale", &append.k_scale), ("v_scale", &append.v_scale)] {
        let Some(scale) = scale else {
            continue;
        };
        if !layout.dtype().is_fp8() {
            let expected = format!("none with a {} cache", layout.dtype());
            return Err(attn_core::Error::invalid(field, expected, "a tensor").into());
        }
        match scale.layout().shape() {
            [] | [1] => {}
            [_, heads] if *heads == layout.kv_heads() => has_sequences = true,
            got => {
                let expected = format!("shape [], [1] or [sequences, {}]", layout.kv_heads());
                return Err(attn_core::Error::layout(field, expected, format!("{got:?}")).into());
            }
        }
    }
    if append.v_scale.is_some() && append.v.is_none() {
        return Err(presence("v_scale", false));
    }
    match &append.sequences {
        Some(sequences) if has_sequences => check_list("sequences", sequences, tokens),
        None if !has_sequences => Ok(()),
        Some(_) => {
            let expected = "none, for no scale has sequences";
            Err(attn_core::Error::invalid("sequences", expected, "a tensor").into())
        }
        None => {
            let expected = "a tensor, for a scale has sequences";
            Err(attn_core::Error::invalid("sequences", expected, "none").into())
        }
    }
}

/// The fewest sequences that a scale which has them tells apart.
fn scale_sequences(append: &AppendKv<'_>) -> usize {
    let scales = [&append.k_scale, &append.v_scale].into_iter().flatten();
    let with_sequences = scales.filter_map(|scale| match scale.layout().shape() {
        &[sequences, _] => Some(sequences),
        _ => None,
    });
    with_sequences.min().unwrap_or(0)
}

fn params(
    layout: &CacheLayout,
    append: &AppendKv<'_>,
    cache: &CacheMut<'_>,
    tokens: usize,
) -> Result<AppendParams, Error> {
    let rows = |tensor: &DeviceTensor<'_>| {
        forward::row_heads(tensor.address(), tensor.layout(), Arrangement::Packed)
    };
    let k_cache = cache.k_cache.tensor();
    let v_cache = cache.v_cache.as_ref().map(DeviceTensorMut::tensor);
    let value_dim = if append.v.is_some() { layout.value().dim() } else { 0 };
    let rotary = append.rotary.as_ref();
    let cos = rotary.map(|rotary| rotary.cos.layout());
    let half = cos.map_or(0, |cos| cos.shape()[1]);
    Ok(AppendParams {
        k: rows(&append.k),
        v: append.v.as_ref().map_or_else(Rows::default, rows),
        k_cache: forward::pages(k_cache, layout.key_strides()),
        v_cache: v_cache.map_or_else(Rows::default, |v| forward::pages(v, layout.value_strides())),
        slots: append.slots.address(),
        positions: rotary.map_or(0, |rotary| rotary.positions.address()),
        sequences: append.sequences.as_ref().map_or(0, DeviceView::address),
        cos: rotary.map_or(0, |rotary| rotary.cos.address()),
        sin: rotary.map_or(0, |rotary| rotary.sin.address()),
        rotary_row: cos.map_or(0, |cos| cos.strides()[0]),
        rotary_rows: cos.map_or(0, |cos| cos.shape()[0] as i64),
        k_scale: forward::scale(append.k_scale.as_ref()),
        v_scale: forward::scale(append.v_scale.as_ref()),
        tokens: tokens as i64,
        pages: k_cache.layout().shape()[0] as i64,
        page_size: Divisor::new(as_i32("page_size", layout.page_size())?.unsigned_abs()),
        kv_heads: as_i32("kv_heads", layout.kv_heads())?,
        head_dim: as_i32("head_dim", layout.key_dim())?,
        value_dim: as_i32("value_dim", value_dim)?,
        rotary_dim: as_i32("rotary_dim", 2 * half)?,
        rotary_interleaved: u32::from(rotary.is_some_and(|rotary| rotary.interleaved)),
        scale_sequences: as_i32("scales", scale_sequences(append))?,
    })
}
