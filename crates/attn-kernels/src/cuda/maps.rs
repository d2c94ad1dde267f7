//! The tensor maps of a launch: how the copy engine finds tiles of queries, keys and values, and of the gradient of the
//! output.
//!
//! The invariant: every map has the four axes that the kernels' coordinates name, sequence, row, head and element,
//! whatever the arrangement; a packed tensor is one sequence, and a cache has pages in their place. Encoding one
//! costs a microsecond of the host and needs the address, which a plan does not know: a workspace keeps those that its
//! launches used.

use attn_core::{CacheLayout, PageOrder, Problem, Strided, Tile};

use super::call::{Inputs, KvTensors};
use super::config::hopper;
use super::map_cache::{Boxed, MapCache};
use super::params::as_i32;
use super::tensor::DeviceTensor;
use super::tensor_map::{Swizzle, TensorMap};
use crate::error::Error;

/// A box along a row: the span of the swizzle.
const ROW_BYTES: usize = 128;

/// A stride of whole 16 bytes, of any type, for an axis along which there is no step.
const ANY_STRIDE: i64 = 128;

/// The maps that launches used, of each operand for itself: layers share queries and have keys of their own, or the reverse.
#[derive(Debug, Default)]
pub(crate) struct Caches {
    q: MapCache,
    k: MapCache,
    v: MapCache,
    d_o: MapCache,
}

/// Maps of q, k and v for boxes of a tile's rows.
pub(crate) fn forward<'a>(
    caches: &mut Caches,
    problem: &Problem,
    inputs: &Inputs<'a>,
    tile: Tile,
) -> Result<[TensorMap<'a>; 3], Error> {
    let pack = hopper::pack(problem, tile);
    let own = Boxed { heads: pack, ..four_axes(&inputs.q, tile.q / pack) };
    let q = map(&mut caches.q, "q", &inputs.q, &own)?;
    let (k, v, axis) = match &inputs.kv {
        KvTensors::Dense { k, v } => (k, v, None),
        KvTensors::Paged { k_cache, v_cache, .. } => (k_cache, v_cache, Some(page_axes(problem))),
    };
    // No map of nothing can be made, and a unit without keys has one tile of them copied all the same, whose scores are
    // hidden and whose values are cleared: queries do.
    let boxes = hopper::box_rows(problem, tile);
    if k.layout().is_empty() || v.layout().is_empty() {
        let stand_in = rows(&mut caches.k, "q", &inputs.q, boxes)?;
        return Ok([q, stand_in, stand_in]);
    }
    let of = |cache, field, tensor| match axis {
        None => rows(cache, field, tensor, boxes),
        Some(order) => pages(cache, field, tensor, order, boxes),
    };
    Ok([q, of(&mut caches.k, "k", k)?, of(&mut caches.v, "v", v)?])
}

/// Maps of q, k, v and the gradient of o for boxes of a tile's query rows and keys; some keys there are.
pub(crate) fn backward<'a>(
    caches: &mut Caches,
    inputs: &Inputs<'a>,
    d_o: &DeviceTensor<'a>,
    tile: Tile,
) -> Result<[TensorMap<'a>; 4], Error> {
    let KvTensors::Dense { k, v } = &inputs.kv else {
        return Err(
            attn_core::Error::invalid("kv", "dense keys and values", "a paged cache").into()
        );
    };
    let k = rows(&mut caches.k, "k", k, tile.kv)?;
    let v = rows(&mut caches.v, "v", v, tile.kv)?;
    // Of no rows no map can be made, and none is copied.
    if inputs.q.layout().is_empty() || d_o.layout().is_empty() {
        return Ok([k, k, v, v]);
    }
    let q = rows(&mut caches.q, "q", &inputs.q, tile.q)?;
    Ok([q, k, v, rows(&mut caches.d_o, "do", d_o, tile.q)?])
}

/// Which axes of a cache are slot and head.
fn page_axes(problem: &Problem) -> PageOrder {
    problem.cache_layout().map_or(PageOrder::Nhd, CacheLayout::order)
}

/// The map of a cache, `[pages, slots, heads, dim]` or `[pages, heads, slots, dim]`: pages where sequences are otherwise.
fn pages<'a>(
    cache: &mut MapCache,
    field: &'static str,
    tensor: &DeviceTensor<'a>,
    order: PageOrder,
    rows: usize,
) -> Result<TensorMap<'a>, Error> {
    let mut boxed = four_axes(tensor, rows);
    if order == PageOrder::Hnd {
        boxed.shape.swap(1, 2);
        boxed.strides.swap(1, 2);
    }
    map(cache, field, tensor, &boxed)
}

/// The map of a tensor `[rows, heads, dim]` or `[sequences, rows, heads, dim]`.
fn rows<'a>(
    cache: &mut MapCache,
    field: &'static str,
    tensor: &DeviceTensor<'a>,
    rows: usize,
) -> Result<TensorMap<'a>, Error> {
    map(cache, field, tensor, &four_axes(tensor, rows))
}

fn map<'a>(
    cache: &mut MapCache,
    field: &'static str,
    tensor: &DeviceTensor<'a>,
    boxed: &Boxed,
) -> Result<TensorMap<'a>, Error> {
    let map = cache.map(boxed, || Ok(*encode(field, tensor, boxed)?.raw()))?;
    Ok(TensorMap::again(map, tensor))
}

fn encode<'a>(
    field: &'static str,
    tensor: &DeviceTensor<'a>,
    boxed: &Boxed,
) -> Result<TensorMap<'a>, Error> {
    let Boxed { shape, strides, rows, heads, .. } = boxed;
    if let Some(stride) = strides.iter().find(|stride| **stride < 0) {
        let expected = "strides that are not negative (others: disable the kernels of Hopper alone, portable ones take them)";
        return Err(attn_core::Error::layout(field, expected, stride).into());
    }
    // Coordinates are 32-bit.
    as_i32(field, shape[0])?;
    as_i32(field, shape[1])?;
    let columns = ROW_BYTES / tensor.dtype().size();
    let extents =
        [1, *rows, *heads, columns].map(|extent| u32::try_from(extent).unwrap_or(u32::MAX));
    let layout = Strided::new(field, shape, strides, tensor.layout().offset())?;
    TensorMap::tiled(field, tensor.memory(), tensor.dtype(), &layout, &extents, Swizzle::Bytes128)
}

/// A tensor of up to four axes, the missing ones of one extent.
fn four_axes(tensor: &DeviceTensor<'_>, rows: usize) -> Boxed {
    let (shape, strides) = padded_axes(tensor.layout());
    Boxed { address: tensor.address(), shape, strides, rows, heads: 1, dtype: tensor.dtype() }
}

fn padded_axes(layout: &Strided) -> ([usize; 4], [i64; 4]) {
    let (mut shape, mut strides) = ([1usize; 4], [0i64; 4]);
    let missing = 4usize.saturating_sub(layout.shape().len());
    for (axis, (&extent, &stride)) in layout.shape().iter().zip(layout.strides()).enumerate() {
        if let (Some(to), Some(step)) =
            (shape.get_mut(missing + axis), strides.get_mut(missing + axis))
        {
            (*to, *step) = (extent, stride);
        }
    }
    // A stride along an axis of one extent may be any number, also one that no map can have.
    for (step, _) in strides[..3].iter_mut().zip(shape).filter(|(_, extent)| *extent == 1) {
        *step = ANY_STRIDE;
    }
    (shape, strides)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_tensor_is_one_sequence() {
        let packed = Strided::contiguous("k", &[100, 8, 128]).expect("small");
        assert_eq!(padded_axes(&packed), ([1, 100, 8, 128], [128, 1024, 128, 1]));
    }

    #[test]
    fn stride_that_is_never_taken_does_not_matter() {
        let single = Strided::new("k", &[2, 100, 1, 128], &[12_800, 128, 3, 1], 0).expect("ranks");
        assert_eq!(padded_axes(&single), ([2, 100, 1, 128], [12_800, 128, 128, 1]));
    }
}
