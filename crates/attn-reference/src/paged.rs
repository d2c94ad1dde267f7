//! Paged calls turned into dense ones, the slow and obvious way.
//!
//! The invariant: gathering copies bits and changes nothing else, so a paged call and its gathered twin have
//! the same result to the last bit. It is the oracle of every address map: an engine that walks block
//! tables is compared with one that has never heard of them.

use attn_core::{
    Arrangement, Error, Inputs, KvStorage, KvView, Outputs, Problem, TensorView, dispatch_view,
};

use crate::naive;
use crate::storage::{InputTensor, Placement};

/// A dense, packed copy of a paged call's keys and values, in their stored type.
#[derive(Debug, Clone)]
pub struct Gathered {
    problem: Problem,
    k: InputTensor,
    v: InputTensor,
}

impl Gathered {
    /// The same call over dense packed keys.
    #[must_use]
    pub const fn problem(&self) -> &Problem {
        &self.problem
    }

    /// The inputs with keys and values replaced; everything else is that of the paged call.
    ///
    /// # Errors
    /// None for keys gathered here; views are checked when they are made.
    pub fn inputs<'a>(&'a self, paged: &Inputs<'a>) -> Result<Inputs<'a>, Error> {
        let kv = KvView::Dense { k: self.k.view("k")?, v: self.v.view("v")? };
        Ok(Inputs { kv, ..paged.clone() })
    }
}

/// Copies the tokens of every sequence out of their pages. Dense calls are copied likewise, into packed
/// order.
///
/// # Errors
/// As [`Inputs::check`].
pub fn gather(problem: &Problem, inputs: &Inputs<'_>) -> Result<Gathered, Error> {
    inputs.check(problem)?;
    let mut spec = problem.spec().clone();
    spec.kv = KvStorage::Dense(Arrangement::Packed);
    let (k, v, table) = match &inputs.kv {
        KvView::Dense { k, v } => (k, v, None),
        KvView::Paged { k_cache, v_cache, block_table, .. } => {
            (k_cache, v_cache, Some(block_table))
        }
    };
    let copy = |field, tensor: &TensorView<'_>, dim| {
        let l = problem.lengths();
        let mut places =
            (0..l.batch()).flat_map(|sequence| (0..l.kv(sequence)).map(move |t| (sequence, t)));
        let shape = [l.total_kv(), problem.kv_heads(), dim];
        let mut current = (0, 0);
        InputTensor::new(field, tensor.dtype(), &shape, Placement::Contiguous, |at| {
            if at[1] == 0 && at[2] == 0 {
                current = places.next().unwrap_or(current);
            }
            let (sequence, token) = current;
            dispatch_view!(tensor, view => {
                problem
                    .cached_rows(view, table, sequence)
                    .and_then(|rows| rows.get(token, at[1], at[2]))
                    .map_or(f32::NAN, attn_core::Element::to_f32)
            })
        })
    };
    Ok(Gathered {
        k: copy("k", k, problem.head_dim())?,
        v: copy("v", v, problem.value_dim())?,
        problem: Problem::new(spec)?,
    })
}

/// Gathers, then computes in f64: [`naive::forward`] by another way to the keys.
///
/// # Errors
/// As [`naive::forward`].
pub fn forward(problem: &Problem, inputs: &Inputs<'_>, outputs: Outputs<'_>) -> Result<(), Error> {
    let gathered = gather(problem, inputs)?;
    naive::forward(gathered.problem(), &gathered.inputs(inputs)?, outputs)
}
