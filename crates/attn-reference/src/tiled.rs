//! The scalar tiled model: the algorithm of the FlashAttention papers, with nothing left out but the speed.
//!
//! The invariant: a tile is visited as [`Mask::tile`] says and a row's state is the online softmax of exactly
//! the keys it sees, for any tile sizes and any number of splits. Fast engines are this walk with other
//! loops inside, so it is what to compare one with, line by line, when it is wrong.
//!
//! Source: Dao, "FlashAttention-2", arXiv:2307.08691, algorithm 1; splits as in "Flash-Decoding".

use attn_core::{
    DropoutMask, Error, Inputs, Mask, OnlineSoftmax, Outputs, Problem, Real, TileClass, View,
};

use crate::elements::{self, to_f32};
use crate::naive::Reference;
use crate::rows::{key_rows, q_place, q_places, query_rows, value_rows};

/// How the walk is cut up. Zeros count as 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tiling {
    /// Query rows of a tile.
    pub rows: usize,
    /// Keys of a tile.
    pub keys: usize,
    /// Parts of a sequence's keys that are computed apart and merged.
    pub splits: usize,
}

/// Computes a call tile by tile in f32 and writes it, each element rounded once.
///
/// # Errors
/// As [`Inputs::check`] and [`Outputs::check`]. Nothing is written then.
pub fn forward(
    problem: &Problem,
    inputs: &Inputs<'_>,
    tiling: Tiling,
    mut outputs: Outputs<'_>,
) -> Result<(), Error> {
    outputs.check(problem)?;
    let result = walk::<f32>(problem, inputs, tiling)?;
    elements::write(&mut outputs.o, &result.o);
    if let Some(lse) = &mut outputs.lse {
        elements::write_view(lse, &result.lse);
    }
    Ok(())
}

/// Computes a call tile by tile in f64.
///
/// # Errors
/// As [`Inputs::check`].
pub fn forward_f64(
    problem: &Problem,
    inputs: &Inputs<'_>,
    tiling: Tiling,
) -> Result<Reference, Error> {
    walk::<f64>(problem, inputs, tiling)
}

/// What the walk needs of a float beside the softmax's arithmetic.
trait Scalar: Real {
    fn from_f32(x: f32) -> Self;
    fn to_f64(self) -> f64;
    fn tanh(self) -> Self;
}

impl Scalar for f32 {
    fn from_f32(x: f32) -> Self {
        x
    }
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
    fn tanh(self) -> Self {
        self.tanh()
    }
}

impl Scalar for f64 {
    fn from_f32(x: f32) -> Self {
        Self::from(x)
    }
    fn to_f64(self) -> f64 {
        self
    }
    fn tanh(self) -> Self {
        self.tanh()
    }
}

fn walk<F: Scalar>(
    problem: &Problem,
    inputs: &Inputs<'_>,
    tiling: Tiling,
) -> Result<Reference, Error> {
    inputs.check(problem)?;
    let (heads, value_dim) = (problem.q_heads(), problem.value_dim());
    let places = q_places(problem);
    let mut result = Reference {
        o: vec![0.0; places * heads * value_dim],
        lse: vec![f64::NEG_INFINITY; places * heads],
    };
    for sequence in 0..problem.lengths().batch() {
        for head in 0..heads {
            let this = Head::<F>::new(problem, inputs, sequence, head)?;
            for first in (0..this.q_len).step_by(tiling.rows.max(1)) {
                let rows = first..(first + tiling.rows.max(1)).min(this.q_len);
                for (row, state) in rows.clone().zip(this.row_tile(rows, tiling)) {
                    let (o, lse) = state.finish();
                    let at = q_place(problem, sequence, row) * heads + head;
                    result.lse[at] = lse.to_f64();
                    for (to, from) in result.o[at * value_dim..].iter_mut().zip(o) {
                        *to = from.times(this.keep_factor()).to_f64();
                    }
                }
            }
        }
    }
    Ok(result)
}

/// One query head of one sequence.
struct Head<'a, F> {
    q: Vec<F>,
    k: Vec<F>,
    v: Vec<F>,
    head_dim: usize,
    value_dim: usize,
    q_len: usize,
    kv_len: usize,
    scale: F,
    softcap: Option<F>,
    mask: Mask<'a>,
    bias: Option<View<'a, f32>>,
    slope: Option<F>,
    sink: Option<F>,
    /// Sequence and query head, where weights are dropped by.
    place: (usize, usize),
    dropout: Option<DropoutMask>,
    /// The values of a dropped key: a weight of 0 and a value of 0 are the same sum.
    dropped: Vec<F>,
}

impl<'a, F: Scalar> Head<'a, F> {
    fn new(
        problem: &Problem,
        inputs: &Inputs<'a>,
        sequence: usize,
        head: usize,
    ) -> Result<Self, Error> {
        let kv_head = head / problem.group();
        let scaled = |stored: Vec<f32>, scale: f32| -> Vec<F> {
            stored.into_iter().map(|x| F::from_f32(x).times(F::from_f32(scale))).collect()
        };
        let k = key_rows(problem, inputs, sequence, kv_head)?;
        let v = value_rows(problem, inputs, sequence, kv_head)?;
        let of_head = |tensor: &Option<View<'_, f32>>| {
            tensor.as_ref().and_then(|view| view.get(&[head])).map(F::from_f32)
        };
        Ok(Self {
            q: scaled(
                query_rows(problem, "q", &inputs.q, sequence, head)?,
                inputs.q_scale_of(sequence, kv_head),
            ),
            k: scaled(k, inputs.k_scale_of(sequence, kv_head)),
            v: scaled(v, inputs.v_scale_of(sequence, kv_head)),
            head_dim: problem.head_dim(),
            value_dim: problem.value_dim(),
            q_len: problem.lengths().q(sequence),
            kv_len: problem.lengths().kv(sequence),
            scale: F::from_f32(problem.scale()),
            softcap: problem.softcap().map(F::from_f32),
            mask: inputs.mask_of(problem, sequence, head)?,
            bias: inputs.bias_of(problem, sequence, head)?,
            slope: of_head(&inputs.alibi),
            sink: of_head(&inputs.sinks),
            place: (sequence, head),
            dropout: inputs.dropout_of(problem),
            dropped: vec![F::ZERO; problem.value_dim()],
        })
    }

    /// The finished states of a tile of rows: splits merged, then the sink.
    fn row_tile(&self, rows: std::ops::Range<usize>, tiling: Tiling) -> Vec<OnlineSoftmax<F>> {
        let neutral = || vec![OnlineSoftmax::new(self.value_dim); rows.len()];
        let mut whole = neutral();
        let keys = self.mask.keys(rows.clone());
        let part = keys.len().div_ceil(tiling.splits.max(1)).max(1);
        for start in keys.clone().step_by(part) {
            let mut states = neutral();
            let end = (start + part).min(keys.end);
            for first in (start..end).step_by(tiling.keys.max(1)) {
                let tile = first..(first + tiling.keys.max(1)).min(end);
                let class = self.mask.tile(rows.clone(), tile.clone());
                if class == TileClass::Skip {
                    continue;
                }
                for (row, state) in rows.clone().zip(&mut states) {
                    let score = |key| {
                        if class == TileClass::Full || self.mask.sees(row, key) {
                            self.score(row, key)
                        } else {
                            F::NEG_INFINITY
                        }
                    };
                    let scores: Vec<F> = tile.clone().map(score).collect();
                    // The denominator has every key, dropped or not.
                    state.push(&scores, |j| self.value(row, tile.start + j));
                }
            }
            for (whole, state) in whole.iter_mut().zip(&states) {
                whole.merge(state);
            }
        }
        if let Some(sink) = self.sink {
            for state in &mut whole {
                state.push_sink(sink);
            }
        }
        whole
    }

    /// The value row that a weight meets.
    fn value(&self, row: usize, key: usize) -> &[F] {
        let (sequence, head) = self.place;
        if self.dropout.as_ref().is_some_and(|mask| !mask.keeps(sequence, head, row, key)) {
            return &self.dropped;
        }
        &self.v[key * self.value_dim..][..self.value_dim]
    }

    /// What dropout multiplies the weights that it leaves by.
    fn keep_factor(&self) -> F {
        F::from_f32(self.dropout.as_ref().map_or(1.0, DropoutMask::factor))
    }

    fn score(&self, row: usize, key: usize) -> F {
        let q = &self.q[row * self.head_dim..][..self.head_dim];
        let k = &self.k[key * self.head_dim..][..self.head_dim];
        let dot = q.iter().zip(k).fold(F::ZERO, |sum, (&q, &k)| sum.plus(q.times(k)));
        let mut score = dot.times(self.scale);
        if let Some(cap) = self.softcap {
            score = cap.times(score.over(cap).tanh());
        }
        if let Some(bias) = &self.bias {
            score = score.plus(F::from_f32(bias.get(&[row, key]).unwrap_or(f32::NAN)));
        }
        if let Some(slope) = self.slope {
            let distance = (row + self.kv_len).abs_diff(self.q_len + key) as f64;
            score = score.minus(slope.times(F::from_f32(to_f32(distance))));
        }
        score
    }
}

#[cfg(test)]
mod tests;
