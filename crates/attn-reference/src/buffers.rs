//! Where a judged engine writes: poisoned, so that what it forgets shows, and fenced, so that what it
//! writes too much shows as well.
//!
//! The invariant: a fresh buffer holds no acceptable result anywhere. Zeroed buffers would pass an engine
//! that never writes padded rows, empty rows or gradients of hidden keys.

use attn_core::{DType, Error, Gradients, KvStorage, Outputs, Problem};

use crate::naive::Reference;
use crate::storage::{OutputTensor, Placement};

/// Buffers for a forward's results.
#[derive(Debug, Clone)]
pub struct OutputBuffers {
    pub(crate) o: OutputTensor,
    pub(crate) lse: OutputTensor,
}

impl OutputBuffers {
    /// Buffers that lie as `placement` says; the LSE follows its output.
    ///
    /// # Errors
    /// [`Error::Overflow`] when the sizes do not fit.
    pub fn new(problem: &Problem, placement: Placement) -> Result<Self, Error> {
        let (l, at, heads) = (problem.lengths(), problem.q_arrangement(), problem.q_heads());
        let o = l.q_shape(at, &[heads, problem.value_dim()]);
        Ok(Self {
            o: OutputTensor::new("o", problem.out_dtype(), &o, own(placement))?,
            lse: OutputTensor::per_head("lse", &l.q_shape(at, &[heads]), own(placement))?,
        })
    }

    /// Views for an engine to write to.
    ///
    /// # Errors
    /// None for buffers made here; views are checked when they are made.
    pub fn outputs(&mut self) -> Result<Outputs<'_>, Error> {
        Ok(Outputs { o: self.o.view_mut("o")?, lse: Some(self.lse.view_f32_mut("lse")?) })
    }

    /// What the buffers hold, in logical row-major order.
    #[must_use]
    pub fn values(&self) -> Reference {
        Reference { o: self.o.values(), lse: self.lse.values() }
    }
}

/// Buffers for a backward's results.
#[derive(Debug, Clone)]
pub struct GradientBuffers {
    pub(crate) dq: OutputTensor,
    pub(crate) dk: OutputTensor,
    pub(crate) dv: OutputTensor,
    pub(crate) dsinks: Option<OutputTensor>,
    pub(crate) dbias: Option<OutputTensor>,
}

impl GradientBuffers {
    pub(crate) fn new(
        problem: &Problem,
        bias: Option<&[usize]>,
        placement: Placement,
    ) -> Result<Self, Error> {
        let KvStorage::Dense(kv_at) = problem.kv() else {
            return Err(Error::invalid("kv", "dense keys and values", "a paged cache"));
        };
        let (l, dtype, placement) = (problem.lengths(), problem.out_dtype(), own(placement));
        let (heads, kv_heads) = (problem.q_heads(), problem.kv_heads());
        let dq = l.q_shape(problem.q_arrangement(), &[heads, problem.head_dim()]);
        let dk = l.kv_shape(*kv_at, &[kv_heads, problem.head_dim()]);
        let dv = l.kv_shape(*kv_at, &[kv_heads, problem.value_dim()]);
        let plain = |field, shape: &[usize]| {
            OutputTensor::new(field, DType::F32, shape, Placement::Contiguous)
        };
        let dbias = bias.filter(|_| problem.wants_dbias());
        Ok(Self {
            dq: OutputTensor::new("dq", dtype, &dq, placement)?,
            dk: OutputTensor::new("dk", dtype, &dk, placement)?,
            dv: OutputTensor::new("dv", dtype, &dv, placement)?,
            dsinks: problem.wants_dsinks().then(|| plain("dsinks", &[heads])).transpose()?,
            dbias: dbias.map(|shape| plain("dbias", shape)).transpose()?,
        })
    }

    /// Views for an engine to write to.
    ///
    /// # Errors
    /// None for buffers made here; views are checked when they are made.
    pub fn gradients(&mut self) -> Result<Gradients<'_>, Error> {
        Ok(Gradients {
            dq: self.dq.view_mut("dq")?,
            dk: self.dk.view_mut("dk")?,
            dv: self.dv.view_mut("dv")?,
            dsinks: self.dsinks.as_mut().map(|x| x.view_f32_mut("dsinks")).transpose()?,
            dbias: self.dbias.as_mut().map(|x| x.view_f32_mut("dbias")).transpose()?,
        })
    }
}

/// Placements that make elements share storage, or that are of keys, do not apply to outputs.
const fn own(placement: Placement) -> Placement {
    match placement {
        Placement::SharedHeads | Placement::InterleavedKv => Placement::Contiguous,
        other => other,
    }
}
