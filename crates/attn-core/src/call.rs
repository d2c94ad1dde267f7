//! The data of a call as far as it can be checked without reading it: types, shapes and strides.
//!
//! The invariant: these are the only shape checks there are. [`crate::Inputs`] adds what needs the contents
//! (page ids, scales), and an engine whose tensors lie on a device, where reading them would stall it, checks
//! the same descriptions and leaves the contents to its kernels. The check is O(batch), and allocates nothing
//! unless it refuses.

use crate::dtype::DType;
use crate::error::Error;
use crate::layout::{CacheLayout, LayoutId, PageOrder, PageStrides};
use crate::problem::{KvStorage, Pass, Problem};
use crate::view::{Strided, TensorView, TensorViewMut};

/// Type, shape and strides of a tensor, wherever its storage is.
#[derive(Debug, Clone, Copy)]
pub struct Operand<'a> {
    /// Stored type.
    pub dtype: DType,
    /// Shape, strides and first element.
    pub layout: &'a Strided,
}

impl<'a> Operand<'a> {
    /// The description of a host tensor.
    #[must_use]
    pub const fn of_view(view: &'a TensorView<'_>) -> Self {
        Self { dtype: view.dtype(), layout: view.layout() }
    }

    /// The description of a host tensor that is written.
    #[must_use]
    pub const fn of_view_mut(view: &'a TensorViewMut<'_>) -> Self {
        Self { dtype: view.dtype(), layout: view.layout() }
    }
}

/// Descriptions of keys and values; see [`crate::KvView`].
#[derive(Debug, Clone, Copy)]
pub enum KvLayout<'a> {
    /// Rows in logical order.
    Dense {
        /// Keys.
        k: Operand<'a>,
        /// Values.
        v: Operand<'a>,
    },
    /// Pages of a cache.
    Paged {
        /// Key cache.
        k_cache: Operand<'a>,
        /// Value cache.
        v_cache: Operand<'a>,
        /// i32 page ids.
        block_table: &'a Strided,
        /// The identity stamped on the cache when it was made.
        stamp: &'a LayoutId,
    },
}

/// Descriptions of everything a call reads; shapes as [`crate::Inputs`] states them.
#[derive(Debug, Clone, Copy)]
pub struct CallLayout<'a> {
    /// Queries.
    pub q: Operand<'a>,
    /// Keys and values.
    pub kv: KvLayout<'a>,
    /// Boolean mask, u8.
    pub mask: Option<&'a Strided>,
    /// Block mask, u8.
    pub block_mask: Option<&'a Strided>,
    /// Additive bias, f32.
    pub bias: Option<&'a Strided>,
    /// ALiBi slopes, f32.
    pub alibi: Option<&'a Strided>,
    /// Attention sinks, f32.
    pub sinks: Option<&'a Strided>,
    /// fp8 queries only: f32 scales.
    pub q_scale: Option<&'a Strided>,
    /// fp8 keys only: f32 scales.
    pub k_scale: Option<&'a Strided>,
    /// fp8 values only: f32 scales.
    pub v_scale: Option<&'a Strided>,
    /// Dropout only: seed and offset, u64.
    pub dropout: Option<&'a Strided>,
}

/// Descriptions of everything a forward writes.
#[derive(Debug, Clone, Copy)]
pub struct OutputLayout<'a> {
    /// Output.
    pub o: Operand<'a>,
    /// Natural-log LSE, f32, if wanted.
    pub lse: Option<&'a Strided>,
}

/// Descriptions of what a backward reads beside the inputs.
#[derive(Debug, Clone, Copy)]
pub struct ResultsLayout<'a> {
    /// The forward's output.
    pub o: Operand<'a>,
    /// The forward's LSE, f32.
    pub lse: &'a Strided,
    /// Gradient of the output.
    pub d_o: Operand<'a>,
}

/// Descriptions of everything a backward writes.
#[derive(Debug, Clone, Copy)]
pub struct GradientsLayout<'a> {
    /// Gradient of q.
    pub dq: Operand<'a>,
    /// Gradient of k.
    pub dk: Operand<'a>,
    /// Gradient of v.
    pub dv: Operand<'a>,
    /// Gradient of the sinks, f32, if wanted.
    pub dsinks: Option<&'a Strided>,
    /// Gradient of the bias, f32, if wanted.
    pub dbias: Option<&'a Strided>,
}

impl CallLayout<'_> {
    /// Checks every shape and type against the problem.
    ///
    /// # Errors
    /// [`Error::Layout`] for a tensor of the wrong shape or type; [`Error::CacheLayout`] for a cache made
    /// with another layout; [`Error::Invalid`] for a missing or unexpected tensor or a table too short.
    pub fn check(&self, problem: &Problem) -> Result<(), Error> {
        let l = problem.lengths();
        let q_shape = l.q_shape(problem.q_arrangement(), &[problem.q_heads(), problem.head_dim()]);
        check_tensor("q", self.q, problem.q_dtype(), &q_shape)?;
        self.check_kv(problem)?;
        self.check_masks(problem)?;
        for (field, given, wanted) in
            [("alibi", self.alibi, problem.has_alibi()), ("sinks", self.sinks, problem.has_sinks())]
        {
            check_presence(field, given.is_some(), wanted)?;
            if let Some(layout) = given {
                check_shape(field, layout, &[problem.q_heads()])?;
            }
        }
        check_presence("dropout", self.dropout.is_some(), problem.dropout().is_some())?;
        if let Some(stream) = self.dropout {
            check_shape("dropout", stream, &[2])?;
        }
        let (queries, keys) =
            (("queries", problem.q_dtype()), ("keys and values", problem.kv_dtype()));
        for (field, scale, of) in [
            ("q_scale", self.q_scale, queries),
            ("k_scale", self.k_scale, keys),
            ("v_scale", self.v_scale, keys),
        ] {
            if let Some(scale) = scale {
                check_scale(field, scale, of, problem)?;
            }
        }
        Ok(())
    }

    fn check_kv(&self, problem: &Problem) -> Result<(), Error> {
        let l = problem.lengths();
        let (heads, dim, vdim) = (problem.kv_heads(), problem.head_dim(), problem.value_dim());
        let dtype = problem.kv_dtype();
        match (self.kv, problem.kv()) {
            (KvLayout::Dense { k, v }, KvStorage::Dense(arrangement)) => {
                check_tensor("k", k, dtype, &l.kv_shape(*arrangement, &[heads, dim]))?;
                check_tensor("v", v, dtype, &l.kv_shape(*arrangement, &[heads, vdim]))
            }
            (
                KvLayout::Paged { k_cache, v_cache, block_table, stamp },
                KvStorage::Paged(layout),
            ) => {
                layout.check(stamp)?;
                layout.check_tensors(k_cache, v_cache)?;
                check_table(block_table, problem, layout)
            }
            (KvLayout::Dense { .. }, KvStorage::Paged(_)) => {
                Err(Error::invalid("kv", "a paged cache", "dense keys and values"))
            }
            (KvLayout::Paged { .. }, KvStorage::Dense(_)) => {
                Err(Error::invalid("kv", "dense keys and values", "a paged cache"))
            }
        }
    }

    fn check_masks(&self, problem: &Problem) -> Result<(), Error> {
        let pairs = pair_shape(problem);
        check_presence("mask", self.mask.is_some(), problem.has_mask())?;
        check_presence("bias", self.bias.is_some(), problem.has_bias())?;
        check_presence("block_mask", self.block_mask.is_some(), problem.block_mask().is_some())?;
        if let Some(mask) = self.mask {
            check_broadcast("mask", mask, &pairs)?;
        }
        if let Some(bias) = self.bias {
            check_broadcast("bias", bias, &pairs)?;
        }
        if let Some(blocks) = self.block_mask {
            check_broadcast("block_mask", blocks, &block_shape(problem))?;
        }
        Ok(())
    }
}

impl OutputLayout<'_> {
    /// Checks shapes and types against the problem.
    ///
    /// # Errors
    /// [`Error::Layout`] for a tensor of the wrong shape or type.
    pub fn check(&self, problem: &Problem) -> Result<(), Error> {
        let l = problem.lengths();
        let (heads, at) = (problem.q_heads(), problem.q_arrangement());
        let shape = l.q_shape(at, &[heads, problem.value_dim()]);
        check_tensor("o", self.o, problem.out_dtype(), &shape)?;
        match self.lse {
            None => Ok(()),
            Some(lse) => check_shape("lse", lse, &l.q_shape(at, &[heads])),
        }
    }
}

impl ResultsLayout<'_> {
    /// Checks shapes and types against the problem.
    ///
    /// # Errors
    /// [`Error::Layout`] for a tensor of the wrong shape or type.
    pub fn check(&self, problem: &Problem) -> Result<(), Error> {
        let l = problem.lengths();
        let (heads, at) = (problem.q_heads(), problem.q_arrangement());
        let shape = l.q_shape(at, &[heads, problem.value_dim()]);
        for (field, tensor) in [("o", self.o), ("do", self.d_o)] {
            check_tensor(field, tensor, problem.out_dtype(), &shape)?;
        }
        check_shape("lse", self.lse, &l.q_shape(at, &[heads]))
    }
}

impl GradientsLayout<'_> {
    /// Checks shapes and types against the problem and, for the bias' gradient, against the bias.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a forward problem or a gradient that was not asked for;
    /// [`Error::Layout`] for a tensor of the wrong shape or type.
    pub fn check(&self, problem: &Problem, bias: Option<&Strided>) -> Result<(), Error> {
        if problem.pass() != Pass::Backward {
            return Err(Error::invalid("pass", "backward", "forward"));
        }
        let KvStorage::Dense(kv_at) = problem.kv() else {
            return Err(Error::invalid("kv", "dense keys and values", "a paged cache"));
        };
        let l = problem.lengths();
        let (heads, kv_heads) = (problem.q_heads(), problem.kv_heads());
        let dtype = problem.out_dtype();
        let shape = l.q_shape(problem.q_arrangement(), &[heads, problem.head_dim()]);
        check_tensor("dq", self.dq, dtype, &shape)?;
        let shape = l.kv_shape(*kv_at, &[kv_heads, problem.head_dim()]);
        check_tensor("dk", self.dk, dtype, &shape)?;
        let shape = l.kv_shape(*kv_at, &[kv_heads, problem.value_dim()]);
        check_tensor("dv", self.dv, dtype, &shape)?;
        check_presence("dsinks", self.dsinks.is_some(), problem.wants_dsinks())?;
        check_presence("dbias", self.dbias.is_some(), problem.wants_dbias())?;
        if let Some(dsinks) = self.dsinks {
            check_shape("dsinks", dsinks, &[heads])?;
        }
        if let (Some(dbias), Some(bias)) = (self.dbias, bias) {
            check_shape("dbias", dbias, bias.shape())?;
        }
        Ok(())
    }
}

impl CacheLayout {
    /// Checks type, shape and strides of the two tensors of a cache against this layout, and that both have
    /// the same number of pages.
    ///
    /// # Errors
    /// [`Error::Layout`] naming the tensor.
    pub fn check_tensors(&self, k_cache: Operand<'_>, v_cache: Operand<'_>) -> Result<(), Error> {
        let pages = k_cache.layout.shape().first().copied().unwrap_or(0);
        let (keys, values) = (self.key_strides(), self.value_strides());
        check_cache("k_cache", k_cache, self, keys, self.key_dim(), pages)?;
        check_cache("v_cache", v_cache, self, values, self.value().dim(), pages)
    }
}

pub(crate) fn pair_shape(problem: &Problem) -> [usize; 4] {
    let l = problem.lengths();
    [l.batch(), problem.q_heads(), l.longest_q(), l.longest_kv()]
}

pub(crate) fn block_shape(problem: &Problem) -> [usize; 4] {
    let [batch, heads, q, kv] = pair_shape(problem);
    match problem.block_mask() {
        None => [batch, heads, 0, 0],
        Some(sizes) => [batch, heads, q.div_ceil(sizes.q), kv.div_ceil(sizes.kv)],
    }
}

fn check_presence(field: &'static str, given: bool, wanted: bool) -> Result<(), Error> {
    match (given, wanted) {
        (true, false) => Err(Error::invalid(field, "none, as the problem states", "a tensor")),
        (false, true) => Err(Error::invalid(field, "a tensor, as the problem states", "none")),
        _ => Ok(()),
    }
}

fn check_shape(field: &'static str, layout: &Strided, shape: &[usize]) -> Result<(), Error> {
    if layout.shape() == shape {
        return Ok(());
    }
    Err(Error::layout(field, format!("shape {shape:?}"), format!("{:?}", layout.shape())))
}

fn check_tensor(
    field: &'static str,
    operand: Operand<'_>,
    dtype: DType,
    shape: &[usize],
) -> Result<(), Error> {
    if operand.dtype != dtype {
        return Err(Error::layout(field, dtype.name(), operand.dtype));
    }
    check_shape(field, operand.layout, shape)
}

fn check_broadcast(field: &'static str, layout: &Strided, shape: &[usize; 4]) -> Result<(), Error> {
    let rank = layout.shape().len();
    let fits = (2..=4).contains(&rank)
        && layout
            .shape()
            .iter()
            .zip(&shape[4 - rank..])
            .all(|(&have, &want)| have == want || have == 1);
    if fits {
        return Ok(());
    }
    let expected = format!("rank 2 to 4, extents of {shape:?} (from the right) or 1");
    Err(Error::layout(field, expected, format!("{:?}", layout.shape())))
}

fn check_cache(
    field: &'static str,
    cache: Operand<'_>,
    layout: &CacheLayout,
    strides: PageStrides,
    dim: usize,
    pages: usize,
) -> Result<(), Error> {
    let PageStrides { page, slot, head } = strides;
    let (size, heads) = (layout.page_size(), layout.kv_heads());
    let (shape, strides) = match layout.order() {
        PageOrder::Nhd => ([pages, size, heads, dim], [page, slot, head, 1]),
        PageOrder::Hnd => ([pages, heads, size, dim], [page, head, slot, 1]),
    };
    check_tensor(field, cache, layout.dtype(), &shape)?;
    // A stride along an axis of extent 1 is never taken.
    let same = cache
        .layout
        .strides()
        .iter()
        .zip(&strides)
        .zip(&shape)
        .all(|((have, want), &extent)| have == want || extent <= 1);
    if same {
        return Ok(());
    }
    let got = format!("{:?}", cache.layout.strides());
    Err(Error::layout(field, format!("strides {strides:?} of the cache layout"), got))
}

fn check_table(table: &Strided, problem: &Problem, layout: &CacheLayout) -> Result<(), Error> {
    let (batch, longest) = (problem.lengths().batch(), problem.lengths().longest_kv());
    let shape = table.shape();
    if shape.len() != 2 || shape[0] != batch {
        let expected = format!("shape [{batch}, width]");
        return Err(Error::layout("block_table", expected, format!("{shape:?}")));
    }
    let needed = layout.pages_for(longest);
    if needed > shape[1] {
        let expected = format!("{needed} entries for the longest sequence of {longest} tokens");
        return Err(Error::invalid("block_table", expected, format!("width {}", shape[1])));
    }
    Ok(())
}

fn check_scale(
    field: &'static str,
    scale: &Strided,
    (scaled, dtype): (&'static str, DType),
    problem: &Problem,
) -> Result<(), Error> {
    if !dtype.is_fp8() {
        let expected = format!("none with {dtype} {scaled}");
        return Err(Error::invalid(field, expected, "a tensor"));
    }
    let (batch, heads) = (problem.lengths().batch(), problem.kv_heads());
    if scale.shape().is_empty() || scale.shape() == [1] || scale.shape() == [batch, heads] {
        return Ok(());
    }
    let expected = format!("shape [], [1] or [{batch}, {heads}]");
    Err(Error::layout(field, expected, format!("{:?}", scale.shape())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::ValueStorage;
    use crate::problem::ProblemSpec;

    fn dense<'a>(q: &'a Strided, kv: &'a Strided) -> CallLayout<'a> {
        let of = |layout| Operand { dtype: DType::F32, layout };
        CallLayout {
            q: of(q),
            kv: KvLayout::Dense { k: of(kv), v: of(kv) },
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

    fn strided(shape: &[usize]) -> Strided {
        Strided::contiguous("x", shape).expect("small")
    }

    #[test]
    fn layouts_are_checked_without_any_storage() {
        // Shapes far past any memory: nothing but the description is looked at.
        let rows = 1 << 40;
        let spec = ProblemSpec::new(DType::F32, 4, 2, 2, &[rows], &[6]);
        let problem = Problem::new(spec).expect("valid");
        let (q, kv) = (strided(&[rows, 4, 2]), strided(&[6, 2, 2]));
        assert_eq!(dense(&q, &kv).check(&problem), Ok(()));
        let err = dense(&kv, &kv).check(&problem).expect_err("too short").to_string();
        assert!(err.starts_with("layout of q: expected shape [1099511627776, 4, 2]"), "{err}");
        let output = |layout, lse| OutputLayout { o: Operand { dtype: DType::F32, layout }, lse };
        let lse = strided(&[rows, 4]);
        assert_eq!(output(&q, Some(&lse)).check(&problem), Ok(()));
        assert!(output(&kv, None).check(&problem).is_err());
        assert!(output(&q, Some(&q)).check(&problem).is_err());
    }

    #[test]
    fn cache_tensors_agree_in_pages_and_strides() {
        let layout = CacheLayout::contiguous(
            DType::BF16,
            PageOrder::Nhd,
            4,
            3,
            8,
            ValueStorage::Separate(16),
        )
        .expect("valid");
        let (k, v) = (strided(&[5, 4, 3, 8]), strided(&[5, 4, 3, 16]));
        let of = |layout| Operand { dtype: DType::BF16, layout };
        assert_eq!(layout.check_tensors(of(&k), of(&v)), Ok(()));
        let fewer = strided(&[4, 4, 3, 16]);
        let err = layout.check_tensors(of(&k), of(&fewer)).expect_err("a page less").to_string();
        assert!(err.starts_with("layout of v_cache"), "{err}");
        let wide = Strided::new("k", &[5, 4, 3, 8], &[100, 24, 8, 1], 0).expect("same rank");
        assert!(layout.check_tensors(of(&wide), of(&v)).is_err());
        assert!(layout.check_tensors(Operand { dtype: DType::F16, layout: &k }, of(&v)).is_err());
    }
}
