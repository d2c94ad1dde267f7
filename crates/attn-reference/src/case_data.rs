//! A case's data, owned: tensors in the storage the recipe asks for, and what should come out.
//!
//! The invariant: whatever a call may not read is NaN. That is padding, gaps, slots past a length, pages in
//! no table, keys that causal and window bounds hide from every row of their sequence, and bias entries
//! past the lengths. Zeros there would let an engine that multiplies hidden keys by a zero weight pass.

use std::sync::{Arc, OnceLock};

use attn_core::{
    Arrangement, CacheLayout, DType, Error, ForwardResults, Inputs, KvStorage, KvView, PageOrder,
    Pass, Problem, Strided, TensorView, ValueStorage, View,
};

use crate::adversarial::SequenceValues;
use crate::buffers::{GradientBuffers, OutputBuffers};
use crate::case::{Case, Scales};
use crate::elements::to_f32;
use crate::materialised::{self, BackwardError, ForwardError};
use crate::naive::{self, Reference, ReferenceGradients};
use crate::pages::Table;
use crate::pairs::{FIRST_TILE, Pairs};
use crate::random::Random;
use crate::storage::{InputTensor, Placement, Storage, write_elements};

/// A built case: hands out [`Inputs`], poisoned result buffers, and the expected results.
#[derive(Debug)]
pub struct CaseData {
    name: String,
    problem: Problem,
    backward_problem: Option<Problem>,
    outputs: Placement,
    q: InputTensor,
    k: InputTensor,
    v: InputTensor,
    d_o: InputTensor,
    table: Option<Table>,
    mask: Option<Pairs<u8>>,
    block_mask: Option<Pairs<u8>>,
    bias: Option<Pairs<f32>>,
    alibi: Option<Vec<f32>>,
    sinks: Option<Vec<f32>>,
    q_scale: Option<ScaleTensor>,
    k_scale: Option<ScaleTensor>,
    v_scale: Option<ScaleTensor>,
    /// Seed and offset.
    dropout: Option<[u64; 2]>,
    expected: OnceLock<Result<Expected, Error>>,
    expected_gradients: OnceLock<Result<ExpectedGradients, Error>>,
}

/// What a forward should give, and how far the baseline is from it.
#[derive(Debug, Clone, PartialEq)]
pub struct Expected {
    /// The f64 result.
    pub reference: Reference,
    /// The same-dtype baseline's error.
    pub baseline: ForwardError,
}

/// What a backward should give, and how far the baseline is from it.
#[derive(Debug, Clone)]
pub struct ExpectedGradients {
    /// The f64 result.
    pub reference: ReferenceGradients,
    /// The same-dtype baseline's error; of 16-bit types at least one rounding to f32 of the terms that cancel in a score's gradient.
    pub baseline: BackwardError,
    o: InputTensor,
    lse: Vec<f32>,
}

impl CaseData {
    pub(crate) fn new(case: &Case) -> Result<Self, Error> {
        let (problem, recipe) = (case.problem()?, &case.recipe);
        let (l, heads) = (problem.lengths(), problem.q_heads());
        let random = |salt: u64| Random::new(recipe.seed.wrapping_add(salt));
        let q_scales = if problem.q_dtype().is_fp8() { recipe.q_scales } else { Scales::None };
        let maker = Maker {
            problem: &problem,
            values: (0..l.batch())
                .map(|sequence| recipe.pattern.sequence(&problem, sequence, recipe.seed))
                .collect(),
            q_scale: ScaleTensor::new(q_scales, &problem, &mut random(9)),
            k_scale: ScaleTensor::new(recipe.scales, &problem, &mut random(1)),
            v_scale: ScaleTensor::new(recipe.scales, &problem, &mut random(2)),
        };
        let (table, (k, v)) = match problem.kv() {
            KvStorage::Paged(layout) => {
                let shared = recipe.pages.map_or((0, None), |pages| (pages.shared, pages.sharers));
                let table = Table::new(&problem, layout, shared, &mut random(3));
                let caches = maker.caches(layout, &table)?;
                (Some(table), caches)
            }
            KvStorage::Dense(at) => (None, maker.dense(*at, recipe.kv)?),
        };
        let alibi = problem.has_alibi().then(|| {
            // Press et al., "Train short, test long", arXiv:2108.12409: slopes 2^(-8 i / heads).
            (1..=heads).map(|h| to_f32((-8.0 * h as f64 / heads as f64).exp2())).collect()
        });
        let mut draws = random(5);
        let sinks = problem
            .has_sinks()
            .then(|| (0..heads).map(|_| recipe.sink.unwrap_or_else(|| draws.normal())).collect());
        let gap = recipe.pair_gap;
        let pairs = [l.batch(), heads, l.longest_q(), l.longest_kv()];
        let mask = recipe
            .mask
            .map(|tensor| Pairs::mask(tensor, pairs, FIRST_TILE, gap, &mut random(6)))
            .transpose()?;
        let block_mask = match (recipe.block_mask, problem.block_mask()) {
            (Some(tensor), Some(size)) => {
                let blocks =
                    [pairs[0], heads, pairs[2].div_ceil(size.q), pairs[3].div_ceil(size.kv)];
                Some(Pairs::mask(tensor, blocks, 1, gap, &mut random(7))?)
            }
            _ => None,
        };
        let bias = recipe
            .bias
            .map(|tensor| Pairs::bias(tensor, &problem, gap, &mut random(8)))
            .transpose()?;
        Ok(Self {
            name: case.name.clone(),
            backward_problem: backward_of(&problem)?,
            outputs: recipe.outputs,
            q: maker.queries(recipe.q)?,
            d_o: maker.d_o(recipe.q, &mut random(4))?,
            k,
            v,
            table,
            mask,
            block_mask,
            bias,
            alibi,
            sinks,
            q_scale: maker.q_scale,
            k_scale: maker.k_scale,
            v_scale: maker.v_scale,
            // Both words of each are in use.
            dropout: problem
                .dropout()
                .map(|_| [recipe.seed, recipe.seed.rotate_left(17) ^ 0x5851_F42D_4C95_7F2D]),
            expected: OnceLock::new(),
            expected_gradients: OnceLock::new(),
            problem,
        })
    }

    /// The case's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The forward problem.
    #[must_use]
    pub const fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The same call as a backward that wants every gradient; `None` for paged and fp8 keys, which have
    /// none.
    #[must_use]
    pub const fn backward_problem(&self) -> Option<&Problem> {
        self.backward_problem.as_ref()
    }

    /// What the call reads.
    ///
    /// # Errors
    /// As the views' constructors, for data that does not fit its own storage.
    pub fn inputs(&self) -> Result<Inputs<'_>, Error> {
        let kv = match &self.table {
            None => KvView::Dense { k: self.k.view("k")?, v: self.v.view("v")? },
            Some(table) => KvView::Paged {
                k_cache: self.k.view("k_cache")?,
                v_cache: self.v.view("v_cache")?,
                block_table: table.view()?,
                stamp: table.stamp.clone(),
            },
        };
        Ok(Inputs {
            q: self.q.view("q")?,
            kv,
            mask: self.mask.as_ref().map(|x| x.view("mask")).transpose()?,
            block_mask: self.block_mask.as_ref().map(|x| x.view("block_mask")).transpose()?,
            bias: self.bias.as_ref().map(|x| x.view("bias")).transpose()?,
            alibi: self.alibi.as_deref().map(|x| vector("alibi", x)).transpose()?,
            sinks: self.sinks.as_deref().map(|x| vector("sinks", x)).transpose()?,
            q_scale: self.q_scale.as_ref().map(|x| x.view("q_scale")).transpose()?,
            k_scale: self.k_scale.as_ref().map(|x| x.view("k_scale")).transpose()?,
            v_scale: self.v_scale.as_ref().map(|x| x.view("v_scale")).transpose()?,
            dropout: match &self.dropout {
                None => None,
                Some(stream) => Some(View::contiguous("dropout", stream, &[2])?),
            },
        })
    }

    /// The output's gradient that the case's backward starts from.
    ///
    /// # Errors
    /// As [`CaseData::inputs`].
    pub fn d_o(&self) -> Result<TensorView<'_>, Error> {
        self.d_o.view("do")
    }

    /// What a backward reads besides the inputs: the reference's output and LSE, rounded, and `d_o`.
    ///
    /// # Errors
    /// As [`CaseData::expected_gradients`].
    pub fn forward_results(&self) -> Result<ForwardResults<'_>, Error> {
        let expected = self.expected_gradients()?;
        let rest = [self.problem.q_heads()];
        let shape = self.problem.lengths().q_shape(self.problem.q_arrangement(), &rest);
        Ok(ForwardResults {
            o: expected.o.view("o")?,
            lse: View::contiguous("lse", &expected.lse, &shape)?,
            d_o: self.d_o()?,
        })
    }

    /// Buffers for a forward: NaN where results go, a canary between them.
    ///
    /// # Errors
    /// As [`CaseData::inputs`].
    pub fn output_buffers(&self) -> Result<OutputBuffers, Error> {
        OutputBuffers::new(&self.problem, self.outputs)
    }

    /// Buffers for a backward.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a case without gradients.
    pub fn gradient_buffers(&self) -> Result<GradientBuffers, Error> {
        let bias = self.bias.as_ref().map(Pairs::shape);
        GradientBuffers::new(self.backward()?, bias, self.outputs)
    }

    /// The f64 result and the baseline's error, computed on first use.
    ///
    /// # Errors
    /// As [`naive::forward_f64`].
    pub fn expected(&self) -> Result<&Expected, Error> {
        let compute = || {
            let inputs = self.inputs()?;
            let reference = naive::forward_f64(&self.problem, &inputs)?;
            let baseline = materialised::forward_error(&self.problem, &inputs, &reference)?;
            Ok(Expected { reference, baseline })
        };
        self.expected.get_or_init(compute).as_ref().map_err(Clone::clone)
    }

    /// The f64 gradients and the baseline's errors, computed on first use.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a case without gradients; as [`naive::backward_f64`].
    pub fn expected_gradients(&self) -> Result<&ExpectedGradients, Error> {
        let compute = || {
            let (problem, inputs, d_o) = (self.backward()?, self.inputs()?, self.d_o()?);
            let reference = naive::backward_f64(problem, &inputs, &d_o)?;
            let mut baseline = materialised::backward_error(problem, &inputs, &d_o, &reference)?;
            if problem.q_dtype() != DType::F32 {
                // One rounding to f32 of all terms of which a gradient is what is left.
                let all = naive::cancelled(problem, &inputs, &d_o)?;
                let rounding = DType::F32.unit_roundoff();
                baseline.dq = baseline.dq.max(rounding * all.dq);
                baseline.dk = baseline.dk.max(rounding * all.dk);
                if problem.has_bias() {
                    baseline.dbias = baseline.dbias.max(rounding * all.score);
                }
            }
            let forward = &self.expected()?.reference;
            let mut o = forward.o.iter();
            let next = |_: &[usize]| to_f32(o.next().copied().unwrap_or(f64::NAN));
            let dtype = problem.out_dtype();
            let o = InputTensor::new("o", dtype, d_o.shape(), Placement::Contiguous, next)?;
            let lse = forward.lse.iter().map(|&x| to_f32(x)).collect();
            Ok(ExpectedGradients { reference, baseline, o, lse })
        };
        self.expected_gradients.get_or_init(compute).as_ref().map_err(Clone::clone)
    }

    fn backward(&self) -> Result<&Problem, Error> {
        self.backward_problem
            .as_ref()
            .ok_or_else(|| Error::unsupported("backward", "keys of this case are paged or fp8"))
    }
}

fn vector<'a>(field: &'static str, values: &'a [f32]) -> Result<View<'a, f32>, Error> {
    View::contiguous(field, values, &[values.len()])
}

fn backward_of(problem: &Problem) -> Result<Option<Problem>, Error> {
    if matches!(problem.kv(), KvStorage::Paged(_)) || problem.kv_dtype().is_fp8() {
        return Ok(None);
    }
    let mut spec = problem.spec().clone();
    spec.pass = Pass::Backward;
    (spec.want_dsinks, spec.want_dbias) = (spec.sinks, spec.bias);
    Problem::new(spec).map(Some)
}

/// fp8 scales of one tensor.
#[derive(Debug, Clone)]
struct ScaleTensor {
    values: Vec<f32>,
    shape: Vec<usize>,
}

impl ScaleTensor {
    fn new(scales: Scales, problem: &Problem, random: &mut Random) -> Option<Self> {
        let shape = match scales {
            Scales::None => return None,
            Scales::Scalar => vec![],
            Scales::One => vec![1],
            Scales::PerHead => vec![problem.lengths().batch(), problem.kv_heads()],
        };
        let len = shape.iter().product();
        let range = if problem.q_dtype().is_fp8() {
            // Between 1/64 and 2: from most of the range to values that scales pushed near its bottom.
            (1.0, 7.0)
        } else {
            // Between 1/64 and 1/8: standard normal values then use most of either fp8 range.
            (-3.0, 3.0)
        };
        let values =
            (0..len).map(|_| to_f32((range.0 - range.1 * random.uniform()).exp2())).collect();
        Some(Self { values, shape })
    }

    fn view(&self, field: &'static str) -> Result<View<'_, f32>, Error> {
        View::contiguous(field, &self.values, &self.shape)
    }

    fn at(&self, sequence: usize, head: usize) -> f32 {
        match self.shape.as_slice() {
            [_, heads] => self.values[sequence * heads + head],
            _ => self.values[0],
        }
    }
}

/// Which of a key row's two tensors.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Part {
    Key,
    Value,
}

/// The value nearest to `x` that fp8 storage has a number for; 16-bit types have room for every recipe.
fn in_range(dtype: DType, x: f32) -> f32 {
    match dtype {
        DType::F8E4M3 => x.clamp(-448.0, 448.0),
        DType::F8E5M2 => x.clamp(-57344.0, 57344.0),
        DType::F32 | DType::F16 | DType::BF16 => x,
    }
}

/// Writes generated values to where the recipe wants them.
struct Maker<'p> {
    problem: &'p Problem,
    values: Vec<SequenceValues>,
    q_scale: Option<ScaleTensor>,
    k_scale: Option<ScaleTensor>,
    v_scale: Option<ScaleTensor>,
}

impl Maker<'_> {
    fn queries(&self, placement: Placement) -> Result<InputTensor, Error> {
        let (heads, dim) = (self.problem.q_heads(), self.problem.head_dim());
        let (dtype, group) = (self.problem.q_dtype(), self.problem.group());
        self.query_side("q", dtype, dim, placement, |sequence, row, head, d| {
            let value = self.values[sequence].q[(row * heads + head) * dim + d];
            let scale = self.q_scale.as_ref().map_or(1.0, |x| x.at(sequence, head / group));
            in_range(dtype, value / scale)
        })
    }

    fn d_o(&self, placement: Placement, random: &mut Random) -> Result<InputTensor, Error> {
        let (dtype, dim) = (self.problem.out_dtype(), self.problem.value_dim());
        self.query_side("do", dtype, dim, placement, |_, _, _, _| random.normal())
    }

    fn query_side(
        &self,
        field: &'static str,
        dtype: DType,
        dim: usize,
        placement: Placement,
        mut value: impl FnMut(usize, usize, usize, usize) -> f32,
    ) -> Result<InputTensor, Error> {
        let (l, at) = (self.problem.lengths(), self.problem.q_arrangement());
        let shape = l.q_shape(at, &[self.problem.q_heads(), dim]);
        let len_of = |sequence| l.q(sequence);
        let places = Places::new(at, l.batch(), l.longest_q(), len_of);
        InputTensor::new(field, dtype, &shape, placement, |at| {
            let Some((sequence, row)) = places.locate(at) else {
                return f32::NAN;
            };
            value(sequence, row, at[at.len() - 2], at[at.len() - 1])
        })
    }

    /// The element to store for a key or value; NaN for a token that no row may read.
    fn stored(&self, part: Part, at: [usize; 4], owner: usize) -> f32 {
        let [sequence, token, head, d] = at;
        let p = self.problem;
        let (q_len, kv_len) = (p.lengths().q(sequence), p.lengths().kv(sequence));
        if !p.band().rows(0..q_len, q_len, kv_len).contains(&token) {
            return f32::NAN;
        }
        let (values, dim, scale) = match part {
            Part::Key => (&self.values[owner].k, p.head_dim(), &self.k_scale),
            Part::Value => (&self.values[owner].v, p.value_dim(), &self.v_scale),
        };
        let value = values[(token * p.kv_heads() + head) * dim + d];
        let scaled = value / scale.as_ref().map_or(1.0, |scale| scale.at(sequence, head));
        in_range(p.kv_dtype(), scaled)
    }

    fn dense(
        &self,
        arrangement: Arrangement,
        placement: Placement,
    ) -> Result<(InputTensor, InputTensor), Error> {
        let (p, l) = (self.problem, self.problem.lengths());
        let (heads, dim, value_dim) = (p.kv_heads(), p.head_dim(), p.value_dim());
        let (k_shape, v_shape) =
            (l.kv_shape(arrangement, &[heads, dim]), l.kv_shape(arrangement, &[heads, value_dim]));
        let places = Places::new(arrangement, l.batch(), l.longest_kv(), |sequence| l.kv(sequence));
        let value = |part: Part| {
            let places = &places;
            move |at: &[usize]| {
                let Some((sequence, token)) = places.locate(at) else {
                    return f32::NAN;
                };
                self.stored(part, [sequence, token, at[at.len() - 2], at[at.len() - 1]], sequence)
            }
        };
        if placement != Placement::InterleavedKv {
            let k = InputTensor::new("k", p.kv_dtype(), &k_shape, placement, value(Part::Key))?;
            let v = InputTensor::new("v", p.kv_dtype(), &v_shape, placement, value(Part::Value))?;
            return Ok((k, v));
        }
        let (k_at, len) = Placement::Contiguous.strided("k", &k_shape, value_dim)?;
        let v_at = Strided::new("v", &v_shape, k_at.strides(), dim)?;
        let mut storage = Storage::filled(p.kv_dtype(), len, f32::NAN);
        write_elements(&mut storage, &k_at, value(Part::Key));
        write_elements(&mut storage, &v_at, value(Part::Value));
        let storage = Arc::new(storage);
        let k = InputTensor { storage: Arc::clone(&storage), layout: k_at };
        Ok((k, InputTensor { storage, layout: v_at }))
    }

    fn caches(
        &self,
        layout: &CacheLayout,
        table: &Table,
    ) -> Result<(InputTensor, InputTensor), Error> {
        let (heads, size) = (layout.kv_heads(), layout.page_size());
        let shape = |dim| match layout.order() {
            PageOrder::Nhd => [table.pages, size, heads, dim],
            PageOrder::Hnd => [table.pages, heads, size, dim],
        };
        let k_at = Strided::contiguous("k_cache", &shape(layout.key_dim()))?;
        let mut k = Storage::filled(layout.dtype(), k_at.len(), f32::NAN);
        self.write_pages(Part::Key, layout, table, &k_at, &mut k);
        let value_dim = layout.value().dim();
        if let ValueStorage::PrefixOfKey(_) = layout.value() {
            let v_at = Strided::new("v_cache", &shape(value_dim), k_at.strides(), 0)?;
            let storage = Arc::new(k);
            let k = InputTensor { storage: Arc::clone(&storage), layout: k_at };
            return Ok((k, InputTensor { storage, layout: v_at }));
        }
        let v_at = Strided::contiguous("v_cache", &shape(value_dim))?;
        let mut v = Storage::filled(layout.dtype(), v_at.len(), f32::NAN);
        self.write_pages(Part::Value, layout, table, &v_at, &mut v);
        let tensor = |storage, layout| InputTensor { storage: Arc::new(storage), layout };
        Ok((tensor(k, k_at), tensor(v, v_at)))
    }

    fn write_pages(
        &self,
        part: Part,
        layout: &CacheLayout,
        table: &Table,
        to: &Strided,
        storage: &mut Storage,
    ) {
        let l = self.problem.lengths();
        let dim = to.shape()[3];
        for sequence in 0..l.batch() {
            for token in 0..l.kv(sequence) {
                let (block, slot) = layout.locate(token);
                let owner = table.owner(sequence, block);
                for head in 0..layout.kv_heads() {
                    for d in 0..dim {
                        let value = self.stored(part, [sequence, token, head, d], owner);
                        let index = table.page(sequence, block).and_then(|page| {
                            to.index(&match layout.order() {
                                PageOrder::Nhd => [page, slot, head, d],
                                PageOrder::Hnd => [page, head, slot, d],
                            })
                        });
                        // A shared slot that one sequence may not read can be another's to read.
                        if let Some(index) = index.filter(|_| !value.is_nan()) {
                            storage.set(index, value);
                        }
                    }
                }
            }
        }
    }
}

/// Which sequence and row an index of a packed or padded tensor belongs to.
struct Places {
    arrangement: Arrangement,
    longest: usize,
    rows: Vec<Option<(usize, usize)>>,
}

impl Places {
    fn new(
        arrangement: Arrangement,
        batch: usize,
        longest: usize,
        len: impl Fn(usize) -> usize,
    ) -> Self {
        let mut rows = Vec::new();
        for sequence in 0..batch {
            rows.extend((0..len(sequence)).map(|row| Some((sequence, row))));
            if arrangement == Arrangement::Padded {
                rows.resize((sequence + 1) * longest, None);
            }
        }
        Self { arrangement, longest, rows }
    }

    /// `None` for padding.
    fn locate(&self, at: &[usize]) -> Option<(usize, usize)> {
        let place = match self.arrangement {
            Arrangement::Packed => at[0],
            Arrangement::Padded => at[0] * self.longest + at[1],
        };
        self.rows.get(place).copied().flatten()
    }
}
