//! The operations `forward` and `backward`.
//!
//! The invariant: everything that can be wrong with a case is found, and every output allocated, before
//! the engine is called. A backward runs the forward it needs on the same engine, under the same options.

use std::path::Path;

use attn_core::{
    DType, ForwardResults, Gradients, Inputs as CallInputs, KvStorage, KvView, Outputs,
    PageStrides, Pass, Problem, Strided, TensorView,
};

use super::backend::{Backend, Ran};
use super::description::{Attention, Fields, KeyType, Order, Placement};
use super::failure::{Failure, Kind};
use super::input::{InputFile, Inputs};
use super::operand::{Operand, StoredType};
use super::output::{self, Output};
use super::problem::{self, CacheStrides};
use super::report::Answer;

/// Computes `o` and `lse`.
///
/// # Errors
/// Whatever the case deserves.
pub(crate) fn forward(
    dir: &Path,
    mut fields: Fields,
    backend: &mut dyn Backend,
) -> Result<Answer, Failure> {
    let case = Attention::take(&mut fields)?;
    let placement = fields.placement()?;
    fields.finish()?;
    backend.check()?;
    let file = InputFile::read(dir)?;
    let file = file.tensors()?;
    let mut inputs = Inputs::new(&file, &placement);
    let operands = Operands::take(&case, &mut inputs)?;
    let problem = operands.problem(&case, Pass::Forward)?;
    // Inputs first: outputs are as large as the case claims, and inputs show whether that is true.
    let call = operands.call(&problem)?;
    check(&call, &problem)?;
    output::check_kept(&placement, &["o", "lse"])?;
    let mut results = Results::new(&problem, &mut inputs, &placement)?;
    inputs.finish()?;

    let ran = backend.forward(&problem, &call, results.outputs(&problem)?)?;
    output::write(dir, &[&results.o, &results.lse])?;
    Ok(Answer { kernel: ran.kernel, plan: ran.plan, ..Answer::default() })
}

/// Computes `o` and `lse`, then gradients of `sum(o * do)`.
///
/// # Errors
/// Whatever the case deserves.
pub(crate) fn backward(
    dir: &Path,
    mut fields: Fields,
    backend: &mut dyn Backend,
) -> Result<Answer, Failure> {
    let mut case = Attention::take(&mut fields)?;
    case.want = fields.optional("want")?;
    let placement = fields.placement()?;
    fields.finish()?;
    backend.check()?;
    let file = InputFile::read(dir)?;
    let file = file.tensors()?;
    let mut inputs = Inputs::new(&file, &placement);
    let operands = Operands::take(&case, &mut inputs)?;
    let d_o = inputs.take("do", StoredType::Float(case.dtype.dtype()))?;
    let problem = operands.problem(&case, Pass::Backward)?;
    let forward = problem::forward_of(&problem)?;
    let call = operands.call(&problem)?;
    check(&call, &problem)?;
    output::check_kept(&placement, &["o", "lse", "dq", "dk", "dv", "dsinks", "dbias"])?;
    let mut results = Results::new(&problem, &mut inputs, &placement)?;
    let mut gradients = GradientOutputs::new(&problem, &operands, &mut inputs, &placement)?;
    inputs.finish()?;

    let d_o = d_o.view()?;
    results.with(&d_o)?.check(&problem).map_err(|error| Failure::of_data(&error))?;
    gradients.gradients(&problem, &call)?;

    let first = backend.forward(&forward, &call, results.outputs(&forward)?)?;
    let views = gradients.gradients(&problem, &call)?;
    let Ran { kernel, plan } = backend.backward(&problem, &call, &results.with(&d_o)?, views)?;
    let mut outputs = vec![&results.o, &results.lse];
    outputs.extend(gradients.all());
    output::write(dir, &outputs)?;
    let plan = format!("{plan}\nafter {}", first.plan);
    Ok(Answer { kernel, plan, ..Answer::default() })
}

fn check(call: &CallInputs<'_>, problem: &Problem) -> Result<(), Failure> {
    call.check(problem).map_err(|error| Failure::of_data(&error))
}

/// Where keys and values are.
enum Keys<'a> {
    Dense { k: Operand<'a>, v: Operand<'a> },
    Paged { k_cache: Operand<'a>, v_cache: Operand<'a>, block_table: Operand<'a> },
}

/// The input tensors of a case.
struct Operands<'a> {
    q: Operand<'a>,
    keys: Keys<'a>,
    mask: Option<Operand<'a>>,
    block_mask: Option<Operand<'a>>,
    bias: Option<Operand<'a>>,
    alibi: Option<Operand<'a>>,
    sinks: Option<Operand<'a>>,
    k_scale: Option<Operand<'a>>,
    v_scale: Option<Operand<'a>>,
}

impl<'a> Operands<'a> {
    fn take(case: &Attention, inputs: &mut Inputs<'a>) -> Result<Self, Failure> {
        let q_type = StoredType::Float(case.dtype.dtype());
        let cache = case.kv_cache.as_ref();
        let kv_type = match cache.map(|cache| cache.dtype) {
            None | Some(KeyType::Same) => q_type,
            Some(KeyType::E4M3) => StoredType::Float(DType::F8E4M3),
            Some(KeyType::E5M2) => StoredType::Float(DType::F8E5M2),
        };
        let keys = if cache.is_some_and(|cache| cache.page_size.is_some()) {
            Keys::Paged {
                k_cache: inputs.take("k_cache", kv_type)?,
                v_cache: inputs.take("v_cache", kv_type)?,
                block_table: inputs.take("block_table", StoredType::I32)?,
            }
        } else {
            Keys::Dense { k: inputs.take("k", kv_type)?, v: inputs.take("v", kv_type)? }
        };
        let f32 = StoredType::Float(DType::F32);
        let has = case.has;
        let mut optional = |present: bool, field, stored| match present {
            true => inputs.take(field, stored).map(Some),
            false => Ok(None),
        };
        Ok(Self {
            mask: optional(has.mask, "mask", StoredType::U8)?,
            block_mask: optional(has.block_mask, "block_mask", StoredType::U8)?,
            bias: optional(has.bias, "bias", f32)?,
            alibi: optional(has.alibi, "alibi", f32)?,
            sinks: optional(has.sinks, "sinks", f32)?,
            q: inputs.take("q", q_type)?,
            keys,
            k_scale: inputs.take_if_present("k_scale", f32)?,
            v_scale: inputs.take_if_present("v_scale", f32)?,
        })
    }

    fn problem(&self, case: &Attention, pass: Pass) -> Result<Problem, Failure> {
        let order = case.kv_cache.as_ref().map_or(Order::Nhd, |cache| cache.order);
        let strides = match &self.keys {
            Keys::Dense { .. } => CacheStrides::default(),
            Keys::Paged { k_cache, v_cache, .. } => CacheStrides {
                key: page_strides("k_cache", k_cache, order)?,
                value: page_strides("v_cache", v_cache, order)?,
            },
        };
        Ok(Problem::new(problem::spec(case, pass, strides)?)?)
    }

    fn call(&self, problem: &Problem) -> Result<CallInputs<'_>, Failure> {
        let kv = match (&self.keys, problem.kv()) {
            (Keys::Dense { k, v }, _) => KvView::Dense { k: k.view()?, v: v.view()? },
            (Keys::Paged { k_cache, v_cache, block_table }, KvStorage::Paged(layout)) => {
                KvView::Paged {
                    k_cache: k_cache.view()?,
                    v_cache: v_cache.view()?,
                    block_table: block_table.i32_view()?,
                    stamp: layout.id(),
                }
            }
            (Keys::Paged { .. }, KvStorage::Dense(_)) => {
                return Err(Failure::new(Kind::Internal, "a cache for dense keys"));
            }
        };
        Ok(CallInputs {
            q: self.q.view()?,
            kv,
            mask: self.mask.as_ref().map(Operand::u8_view).transpose()?,
            block_mask: self.block_mask.as_ref().map(Operand::u8_view).transpose()?,
            bias: self.bias.as_ref().map(Operand::f32_view).transpose()?,
            alibi: self.alibi.as_ref().map(Operand::f32_view).transpose()?,
            sinks: self.sinks.as_ref().map(Operand::f32_view).transpose()?,
            // A case's element types of queries have no fp8 among them.
            q_scale: None,
            k_scale: self.k_scale.as_ref().map(Operand::f32_view).transpose()?,
            v_scale: self.v_scale.as_ref().map(Operand::f32_view).transpose()?,
            // Nor is there dropout in one.
            dropout: None,
        })
    }
}

/// The strides of a cache that is not contiguous; its shape is checked with the data.
fn page_strides(
    field: &'static str,
    cache: &Operand<'_>,
    order: Order,
) -> Result<Option<PageStrides>, Failure> {
    let layout = cache.layout();
    let dense =
        Strided::contiguous(field, layout.shape()).map_err(|error| Failure::of_data(&error))?;
    if dense.strides() == layout.strides() {
        return Ok(None);
    }
    let &[page, second, third, _] = layout.strides() else {
        let message = format!("{field}: expected four axes, got {:?}", layout.shape());
        return Err(Failure::new(Kind::LayoutMismatch, message));
    };
    if !layout.is_row_contiguous() {
        let message = format!("{field}: expected innermost stride 1, got {:?}", layout.strides());
        return Err(Failure::new(Kind::Unsupported, message));
    }
    Ok(Some(match order {
        Order::Nhd => PageStrides { page, slot: second, head: third },
        Order::Hnd => PageStrides { page, slot: third, head: second },
    }))
}

/// `o` and `lse`.
struct Results {
    o: Output,
    lse: Output,
}

impl Results {
    fn new(
        problem: &Problem,
        inputs: &mut Inputs<'_>,
        placement: &Placement,
    ) -> Result<Self, Failure> {
        let (lengths, heads) = (problem.lengths(), problem.q_heads());
        let at = problem.q_arrangement();
        let shape = lengths.q_shape(at, &[heads, problem.value_dim()]);
        let o = Output::new(inputs, placement, "o", problem.out_dtype(), &shape)?;
        let shape = lengths.q_shape(at, &[heads]);
        let lse = Output::new(inputs, placement, "lse", DType::F32, &shape)?;
        Ok(Self { o, lse })
    }

    fn outputs(&mut self, problem: &Problem) -> Result<Outputs<'_>, Failure> {
        let outputs = Outputs { o: self.o.view_mut()?, lse: Some(self.lse.f32_view_mut()?) };
        outputs.check(problem).map_err(|error| Failure::of_data(&error))?;
        Ok(outputs)
    }

    fn with<'v>(&'v self, d_o: &TensorView<'v>) -> Result<ForwardResults<'v>, Failure> {
        Ok(ForwardResults { o: self.o.view()?, lse: self.lse.f32_view()?, d_o: d_o.clone() })
    }
}

/// The outputs of a backward beside `o` and `lse`.
struct GradientOutputs {
    dq: Output,
    dk: Output,
    dv: Output,
    dsinks: Option<Output>,
    dbias: Option<Output>,
}

impl GradientOutputs {
    fn new(
        problem: &Problem,
        operands: &Operands<'_>,
        inputs: &mut Inputs<'_>,
        placement: &Placement,
    ) -> Result<Self, Failure> {
        let KvStorage::Dense(kv_at) = *problem.kv() else {
            return Err(Failure::new(Kind::Unsupported, "gradients of a paged cache"));
        };
        let (lengths, dtype) = (problem.lengths(), problem.out_dtype());
        let (heads, kv_heads) = (problem.q_heads(), problem.kv_heads());
        let (dim, vdim) = (problem.head_dim(), problem.value_dim());
        let shape = lengths.q_shape(problem.q_arrangement(), &[heads, dim]);
        let dq = Output::new(inputs, placement, "dq", dtype, &shape)?;
        let shape = lengths.kv_shape(kv_at, &[kv_heads, dim]);
        let dk = Output::new(inputs, placement, "dk", dtype, &shape)?;
        let shape = lengths.kv_shape(kv_at, &[kv_heads, vdim]);
        let dv = Output::new(inputs, placement, "dv", dtype, &shape)?;
        let dsinks = match problem.wants_dsinks() {
            false => None,
            true => Some(Output::new(inputs, placement, "dsinks", DType::F32, &[heads])?),
        };
        let dbias = match &operands.bias {
            Some(bias) if problem.wants_dbias() => {
                let shape = bias.layout().shape();
                Some(Output::new(inputs, placement, "dbias", DType::F32, shape)?)
            }
            _ => None,
        };
        Ok(Self { dq, dk, dv, dsinks, dbias })
    }

    fn gradients(
        &mut self,
        problem: &Problem,
        call: &CallInputs<'_>,
    ) -> Result<Gradients<'_>, Failure> {
        let gradients = Gradients {
            dq: self.dq.view_mut()?,
            dk: self.dk.view_mut()?,
            dv: self.dv.view_mut()?,
            dsinks: self.dsinks.as_mut().map(Output::f32_view_mut).transpose()?,
            dbias: self.dbias.as_mut().map(Output::f32_view_mut).transpose()?,
        };
        gradients.check(problem, call).map_err(|error| Failure::of_data(&error))?;
        Ok(gradients)
    }

    fn all(&self) -> impl Iterator<Item = &Output> {
        [&self.dq, &self.dk, &self.dv].into_iter().chain(&self.dsinks).chain(&self.dbias)
    }
}
