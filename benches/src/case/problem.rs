//! From the fields of a case to a [`Problem`].
//!
//! The invariant: nothing is decided here. A field goes where it belongs, and what the vocabulary refuses
//! is refused with its words.

use attn_core::{
    Arrangement, BlockSizes, CacheLayout, KvStorage, Options, PageOrder, PageStrides, Pass, Phase,
    Problem, ProblemSpec, ValueStorage,
};

use super::description::{
    Attention, KeyType, KvCache, Layout, Order, PhaseName, Want, count, counts,
};
use super::failure::{Failure, Kind};

/// Strides of the two caches, where their tensors are placed by strides.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct CacheStrides {
    pub(crate) key: Option<PageStrides>,
    pub(crate) value: Option<PageStrides>,
}

/// The specification of a case.
///
/// # Errors
/// `invalid_argument` for what the fields alone show to be wrong.
pub(crate) fn spec(
    case: &Attention,
    pass: Pass,
    cache: CacheStrides,
) -> Result<ProblemSpec, Failure> {
    let dtype = case.dtype.dtype();
    let q_lens = counts("q_lens", &case.q_lens)?;
    let kv_lens = counts("kv_lens", &case.kv_lens)?;
    let (q_heads, kv_heads) = (count("q_heads", case.q_heads)?, count("kv_heads", case.kv_heads)?);
    let head_dim = count("head_dim", case.head_dim)?;
    let mut spec = ProblemSpec::new(dtype, q_heads, kv_heads, head_dim, &q_lens, &kv_lens);
    spec.pass = pass;
    spec.value_dim = count("value_dim", case.value_dim)?;
    let arrangement = match case.layout {
        Layout::Packed => Arrangement::Packed,
        Layout::Padded => Arrangement::Padded,
    };
    spec.q_arrangement = arrangement;
    spec.kv = KvStorage::Dense(arrangement);
    if let Some(stored) = &case.kv_cache {
        spec.kv_dtype = match stored.dtype {
            KeyType::Same => dtype,
            KeyType::E4M3 => attn_core::DType::F8E4M3,
            KeyType::E5M2 => attn_core::DType::F8E5M2,
        };
        if let Some(page_size) = stored.page_size {
            spec.kv = KvStorage::Paged(cache_layout(&spec, stored, page_size, cache)?);
        }
    }
    spec.scale = case.scale.map(narrow);
    spec.softcap = case.softcap.map(narrow);
    spec.causal = case.causal;
    spec.window_left = optional_count("window_left", case.window_left)?;
    spec.window_right = optional_count("window_right", case.window_right)?;
    spec.mask = case.has.mask;
    spec.bias = case.has.bias;
    spec.alibi = case.has.alibi;
    spec.sinks = case.has.sinks;
    spec.block_mask = block_sizes(case)?;
    spec.want_dsinks = case.want.contains(&Want::Dsinks);
    spec.want_dbias = case.want.contains(&Want::Dbias);
    let options = &case.options;
    spec.options = Options {
        num_splits: optional_count("num_splits", options.num_splits)?,
        deterministic: options.deterministic,
        batch_invariant: options.batch_invariant,
        phase: options.phase.map(|phase| match phase {
            PhaseName::Prefill => Phase::Prefill,
            PhaseName::Decode => Phase::Decode,
        }),
        disabled_kernels: options.disable_kernels.clone(),
    };
    Ok(spec)
}

/// The forward whose results a backward starts from.
///
/// # Errors
/// As [`Problem::new`].
pub(crate) fn forward_of(backward: &Problem) -> Result<Problem, Failure> {
    let mut spec = backward.spec().clone();
    spec.pass = Pass::Forward;
    (spec.want_dsinks, spec.want_dbias) = (false, false);
    Ok(Problem::new(spec)?)
}

fn cache_layout(
    spec: &ProblemSpec,
    stored: &KvCache,
    page_size: i64,
    strides: CacheStrides,
) -> Result<CacheLayout, Failure> {
    let order = match stored.order {
        Order::Nhd => PageOrder::Nhd,
        Order::Hnd => PageOrder::Hnd,
    };
    let page_size = count("page_size", page_size)?;
    let value = ValueStorage::Separate(spec.value_dim);
    let (dtype, heads, dim) = (spec.kv_dtype, spec.kv_heads, spec.head_dim);
    let dense = CacheLayout::contiguous(dtype, order, page_size, heads, dim, value)?;
    if strides.key.is_none() && strides.value.is_none() {
        return Ok(dense);
    }
    let key = strides.key.unwrap_or(dense.key_strides());
    let value_strides = strides.value.unwrap_or(dense.value_strides());
    if [key, value_strides].iter().any(|s| s.page < 0 || s.slot < 0 || s.head < 0) {
        let reason = "a cache layout holds non-negative strides only";
        return Err(Failure::new(
            Kind::Unsupported,
            format!("negative strides of a cache: {reason}"),
        ));
    }
    Ok(CacheLayout::strided(dtype, order, page_size, heads, dim, value, key, value_strides)?)
}

fn block_sizes(case: &Attention) -> Result<Option<BlockSizes>, Failure> {
    match (case.has.block_mask, &case.block_mask) {
        (false, None) => Ok(None),
        (true, Some(sizes)) => Ok(Some(BlockSizes {
            q: count("block_q", sizes.block_q)?,
            kv: count("block_kv", sizes.block_kv)?,
        })),
        (true, None) => {
            Err(Failure::invalid("block_mask: expected block sizes for the tensor, got null"))
        }
        (false, Some(_)) => {
            Err(Failure::invalid("block_mask: expected null without the tensor, got block sizes"))
        }
    }
}

fn optional_count(field: &str, value: Option<i64>) -> Result<Option<usize>, Failure> {
    value.map(|value| count(field, value)).transpose()
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "scores are f32; what leaves its range is refused"
)]
const fn narrow(x: f64) -> f32 {
    x as f32
}
