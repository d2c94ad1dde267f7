//! A decode step that writes the new keys and values to their pages and attends to them, in one launch.
//!
//! The invariant: the call that a kernel meets is one that was checked as any other, over the cache that is written; the new rows
//! are in the query rows' order, so that a block finds those among its keys without a list.

use attn_core::{Arrangement, Plan};

use super::append::{CacheMut, check_cache};
use super::call::{Inputs, KvTensors};
use super::forward::{is_aligned, row_heads};
use super::params::Rows;
use super::tensor::{DeviceTensor, DeviceView};
use crate::error::Error;
use crate::launch::DeviceMemory;

/// The pages of the sequences of a step, which are read and written.
#[derive(Debug)]
pub struct Pages<'a> {
    /// The cache.
    pub cache: CacheMut<'a>,
    /// Page ids `[batch, width]`, the page of each new key among them.
    pub block_table: DeviceView<'a, i32>,
}

/// New rows, one for each query row.
#[derive(Debug)]
pub(crate) struct NewRows<'a> {
    k: DeviceTensor<'a>,
    v: DeviceTensor<'a>,
}

impl<'a> NewRows<'a> {
    pub(crate) fn rows(&self) -> (Rows, Rows) {
        let rows = |t: &DeviceTensor<'_>| row_heads(t.address(), t.layout(), Arrangement::Packed);
        (rows(&self.k), rows(&self.v))
    }

    pub(crate) fn memory(&self) -> impl Iterator<Item = DeviceMemory<'a>> + Clone + use<'a> {
        [self.k.memory(), self.v.memory()].into_iter()
    }
}

/// The new rows of a call, and the call over the cache.
pub(crate) fn split<'b, 'a: 'b>(
    plan: &Plan,
    call: &Inputs<'a>,
    pages: &'b mut Pages<'_>,
) -> Result<(NewRows<'a>, Inputs<'b>), Error> {
    let problem = &plan.problem;
    if !matches!(plan.kernel, "cuda_decode" | "cuda_decode_sm90a") {
        let expected = "a plan of cuda_decode or cuda_decode_sm90a, which append";
        return Err(Error::Plan { expected, got: plan.kernel.to_owned() });
    }
    let Some(layout) = problem.cache_layout() else {
        return Err(attn_core::Error::invalid("kv", "pages", "rows in order").into());
    };
    if problem.kv_dtype() != problem.q_dtype() {
        let expected = format!("a cache of {}, as the queries", problem.q_dtype());
        return Err(attn_core::Error::invalid("kv_dtype", expected, problem.kv_dtype()).into());
    }
    if problem.q_arrangement() != Arrangement::Packed {
        return Err(attn_core::Error::invalid("q_arrangement", "packed rows", "padded").into());
    }
    if problem.q_heads() == 0 {
        return Err(attn_core::Error::invalid("q_heads", "at least 1", 0).into());
    }
    let lengths = problem.lengths();
    if let Some(short) = (0..lengths.batch()).find(|&n| lengths.kv(n) < lengths.q(n)) {
        let expected = format!("at least {} keys in sequence {short}", lengths.q(short));
        return Err(attn_core::Error::invalid("kv_lens", expected, lengths.kv(short)).into());
    }
    check_cache(layout, &pages.cache)?;
    let KvTensors::Dense { k, v } = &call.kv else {
        return Err(attn_core::Error::invalid("kv", "the new rows, in order", "pages").into());
    };
    let rows = lengths.total_q();
    for (field, tensor, dim) in [("k", k, problem.head_dim()), ("v", v, problem.value_dim())] {
        check_new(field, tensor, problem, [rows, problem.kv_heads(), dim])?;
    }
    let Some(v_cache) = &pages.cache.v_cache else {
        let expected = "a cache of keys and values apart";
        return Err(attn_core::Error::invalid("v_cache", expected, "values within keys").into());
    };
    let kv = KvTensors::Paged {
        k_cache: pages.cache.k_cache.shared(),
        v_cache: v_cache.shared(),
        block_table: pages.block_table.clone(),
        stamp: pages.cache.stamp.clone(),
    };
    Ok((NewRows { k: k.clone(), v: v.clone() }, Inputs { kv, ..call.clone() }))
}

fn check_new(
    field: &'static str,
    tensor: &DeviceTensor<'_>,
    problem: &attn_core::Problem,
    shape: [usize; 3],
) -> Result<(), Error> {
    let layout = tensor.layout();
    let is_fit = tensor.dtype() == problem.kv_dtype()
        && layout.shape() == shape
        && layout.is_row_contiguous()
        && is_aligned(tensor.address(), tensor.operand());
    if is_fit {
        return Ok(());
    }
    let expected = format!("{} of shape {shape:?}, rows on 16 bytes", problem.kv_dtype());
    let (shape, strides) = (layout.shape(), layout.strides());
    let got = format!("{} of shape {shape:?}, strides {strides:?}", tensor.dtype());
    Err(attn_core::Error::layout(field, expected, got).into())
}
