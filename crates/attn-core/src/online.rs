//! The online softmax: a running maximum, a running sum and an unnormalised output.
//!
//! The invariant: after any sequence of pushes and merges the state stands for the softmax-weighted
//! sum over exactly the keys that went in, whatever the tiling and the order. A state without keys is
//! (-inf, 0, 0) and is neutral; no step forms `inf - inf`, so an empty tile in front of a full one,
//! or a merge of two empty states, yields no NaN. Scores of -inf (hidden keys) weigh nothing, and
//! their value rows are not read.

use std::fmt;

/// The arithmetic that the online softmax needs of a float.
pub trait Real: Copy + PartialOrd + fmt::Debug {
    /// 0.
    const ZERO: Self;
    /// Negative infinity.
    const NEG_INFINITY: Self;
    /// Sum.
    #[must_use]
    fn plus(self, other: Self) -> Self;
    /// Difference.
    #[must_use]
    fn minus(self, other: Self) -> Self;
    /// Product.
    #[must_use]
    fn times(self, other: Self) -> Self;
    /// Quotient.
    #[must_use]
    fn over(self, other: Self) -> Self;
    /// e to this power.
    #[must_use]
    fn exp(self) -> Self;
    /// Natural logarithm.
    #[must_use]
    fn ln(self) -> Self;
    /// The larger of two; a NaN loses.
    #[must_use]
    fn larger(self, other: Self) -> Self;
}

macro_rules! impl_real {
    ($float:ty) => {
        impl Real for $float {
            const ZERO: Self = 0.0;
            const NEG_INFINITY: Self = <$float>::NEG_INFINITY;
            fn plus(self, other: Self) -> Self {
                self + other
            }
            fn minus(self, other: Self) -> Self {
                self - other
            }
            fn times(self, other: Self) -> Self {
                self * other
            }
            fn over(self, other: Self) -> Self {
                self / other
            }
            fn exp(self) -> Self {
                <$float>::exp(self)
            }
            fn ln(self) -> Self {
                <$float>::ln(self)
            }
            fn larger(self, other: Self) -> Self {
                self.max(other)
            }
        }
    };
}

impl_real!(f32);
impl_real!(f64);

/// The state of one output row.
///
/// Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867,
/// algorithm 3; Dao et al., "FlashAttention", arXiv:2205.14135, algorithm 1.
/// Shapes: the output has `value_dim` elements.
/// Units: scores are natural-log weights; [`OnlineSoftmax::finish`] yields a natural-log LSE.
///
/// ```
/// use attn_core::OnlineSoftmax;
///
/// let values = [[1.0f64], [2.0], [3.0]];
/// let mut whole = OnlineSoftmax::new(1);
/// whole.push(&[0.0, 1.0, 2.0], |j| &values[j]);
///
/// // The same keys in two parts, the larger score last.
/// let (mut a, mut b) = (OnlineSoftmax::new(1), OnlineSoftmax::new(1));
/// a.push(&[0.0, 1.0], |j| &values[j]);
/// b.push(&[2.0], |_| &values[2]);
/// a.merge(&b);
///
/// let ((o, lse), (po, plse)) = (whole.finish(), a.finish());
/// assert!((o[0] - po[0]).abs() < 1e-12 && (lse - plse).abs() < 1e-12);
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct OnlineSoftmax<F> {
    max: F,
    sum: F,
    output: Vec<F>,
}

impl<F: Real> OnlineSoftmax<F> {
    /// The neutral state: no key yet.
    #[must_use]
    pub fn new(value_dim: usize) -> Self {
        Self { max: F::NEG_INFINITY, sum: F::ZERO, output: vec![F::ZERO; value_dim] }
    }

    /// The state that [`OnlineSoftmax::finish`] would turn into `(output, lse)`; an LSE of -inf is the
    /// neutral state, whatever the output holds.
    #[must_use]
    pub fn from_finished(output: &[F], lse: F) -> Self {
        let mut state = Self::new(output.len());
        if lse != F::NEG_INFINITY {
            state.max = lse;
            state.sum = F::ZERO.exp();
            state.output.copy_from_slice(output);
        }
        state
    }

    /// The running maximum; -inf while no key has weight.
    #[must_use]
    pub const fn max(&self) -> F {
        self.max
    }

    /// Adds a tile: one score per key, and the value row of the key at a position of the tile.
    ///
    /// A score of -inf hides its key: the value row is not asked for.
    ///
    /// # Panics
    /// When a value row is shorter than `value_dim`.
    pub fn push<'v>(&mut self, scores: &[F], value: impl Fn(usize) -> &'v [F])
    where
        F: 'v,
    {
        let tile_max = scores.iter().fold(F::NEG_INFINITY, |m, &s| m.larger(s));
        // A NaN score must not vanish behind the maximum of the others.
        let tile_max = scores.iter().copied().find(|&s| is_nan(s)).unwrap_or(tile_max);
        if !self.raise(tile_max) {
            return;
        }
        for (j, &score) in scores.iter().enumerate() {
            if score == F::NEG_INFINITY {
                continue;
            }
            let weight = score.minus(self.max).exp();
            self.sum = self.sum.plus(weight);
            let row = &value(j)[..self.output.len()];
            for (o, &v) in self.output.iter_mut().zip(row) {
                *o = o.plus(weight.times(v));
            }
        }
    }

    /// Adds weight to the denominator alone: an attention sink, a key without a value.
    pub fn push_sink(&mut self, score: F) {
        if self.raise(score) {
            self.sum = self.sum.plus(score.minus(self.max).exp());
        }
    }

    /// Joins the keys of another state to this one's. Commutative and associative to rounding.
    ///
    /// # Panics
    /// When the two differ in `value_dim`.
    pub fn merge(&mut self, other: &Self) {
        assert_eq!(self.output.len(), other.output.len(), "states of one row have one value_dim");
        if !self.raise(other.max) || other.max == F::NEG_INFINITY {
            return;
        }
        let weight = other.max.minus(self.max).exp();
        self.sum = self.sum.plus(weight.times(other.sum));
        for (o, &x) in self.output.iter_mut().zip(&other.output) {
            *o = o.plus(weight.times(x));
        }
    }

    /// The normalised output and the natural-log LSE of everything pushed.
    ///
    /// Without any weight: zeros and -inf.
    #[must_use]
    pub fn finish(self) -> (Vec<F>, F) {
        let Self { max, sum, mut output } = self;
        if max == F::NEG_INFINITY {
            return (output, F::NEG_INFINITY);
        }
        for o in &mut output {
            *o = o.over(sum);
        }
        (output, max.plus(sum.ln()))
    }

    /// Raises the maximum to at least `score`, rescaling what is there. Returns whether the state has
    /// any weight afterwards, so that differences to the maximum are meaningful; a NaN stays one.
    fn raise(&mut self, score: F) -> bool {
        if score > self.max || is_nan(score) {
            if self.max != F::NEG_INFINITY {
                let factor = self.max.minus(score).exp();
                self.sum = self.sum.times(factor);
                for o in &mut self.output {
                    *o = o.times(factor);
                }
            }
            self.max = score;
        }
        self.max != F::NEG_INFINITY
    }
}

/// A NaN is the only value that is not in order with itself.
fn is_nan<F: Real>(x: F) -> bool {
    x.partial_cmp(&x).is_none()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Key = (f64, [f64; 2]);

    fn state(keys: &[Key]) -> OnlineSoftmax<f64> {
        let mut s = OnlineSoftmax::new(2);
        let scores: Vec<f64> = keys.iter().map(|k| k.0).collect();
        s.push(&scores, |j| &keys[j].1);
        s
    }

    fn direct(keys: &[Key]) -> (Vec<f64>, f64) {
        let max = keys.iter().map(|k| k.0).fold(f64::NEG_INFINITY, f64::max);
        if max == f64::NEG_INFINITY {
            return (vec![0.0; 2], max);
        }
        let sum: f64 = keys.iter().map(|k| (k.0 - max).exp()).sum();
        let o = (0..2).map(|d| keys.iter().map(|k| (k.0 - max).exp() * k.1[d]).sum::<f64>() / sum);
        (o.collect(), max + sum.ln())
    }

    fn close(a: &(Vec<f64>, f64), b: &(Vec<f64>, f64)) -> bool {
        let near = |x: f64, y: f64| x == y || (x - y).abs() <= 1e-9 * (1.0 + x.abs().max(y.abs()));
        near(a.1, b.1) && a.0.iter().zip(&b.0).all(|(&x, &y)| near(x, y))
    }

    fn keys() -> impl Strategy<Value = Vec<Key>> {
        let score = prop_oneof![
            6 => -30.0..30.0f64,
            1 => Just(f64::NEG_INFINITY),
            1 => -1e5..-9e4f64,
            1 => 9e4..1e5f64,
        ];
        proptest::collection::vec((score, [-3.0..3.0f64, -3.0..3.0f64]), 0..12)
    }

    proptest! {
        #[test]
        fn push_in_any_tiling_matches_direct(keys in keys(), cut in 1usize..5) {
            let mut s = OnlineSoftmax::new(2);
            for tile in keys.chunks(cut) {
                let scores: Vec<f64> = tile.iter().map(|k| k.0).collect();
                s.push(&scores, |j| &tile[j].1);
            }
            prop_assert!(close(&s.finish(), &direct(&keys)));
        }

        #[test]
        fn merge_is_commutative_and_associative(a in keys(), b in keys(), c in keys()) {
            let (sa, sb, sc) = (state(&a), state(&b), state(&c));
            let join = |x: &OnlineSoftmax<f64>, y: &OnlineSoftmax<f64>| {
                let mut x = x.clone();
                x.merge(y);
                x
            };
            let left = join(&join(&sa, &sb), &sc).finish();
            let right = join(&sa, &join(&sb, &sc)).finish();
            let swapped = join(&sc, &join(&sb, &sa)).finish();
            let all: Vec<Key> = [a, b, c].concat();
            prop_assert!(close(&left, &direct(&all)));
            prop_assert!(close(&right, &left) && close(&swapped, &left));
        }

        #[test]
        fn neutral_state_changes_nothing(keys in keys()) {
            let s = state(&keys);
            let mut left = OnlineSoftmax::new(2);
            left.merge(&s);
            let mut right = s.clone();
            right.merge(&OnlineSoftmax::new(2));
            prop_assert_eq!(&left, &s);
            prop_assert_eq!(&right, &s);
        }

        #[test]
        fn finished_states_can_be_merged_again(a in keys(), b in keys()) {
            let (oa, la) = state(&a).finish();
            let (ob, lb) = state(&b).finish();
            let mut s = OnlineSoftmax::from_finished(&oa, la);
            s.merge(&OnlineSoftmax::from_finished(&ob, lb));
            prop_assert!(close(&s.finish(), &direct(&[a, b].concat())));
        }
    }

    #[test]
    fn late_maximum_rescales_what_is_there() {
        let keys: Vec<Key> = (0..40).map(|j| (f64::from(j) * 25.0, [f64::from(j), 1.0])).collect();
        let mut s = OnlineSoftmax::new(2);
        for key in &keys {
            s.push(&[key.0], |_| &key.1);
        }
        assert!(close(&s.finish(), &direct(&keys)));
    }

    #[test]
    fn hidden_first_tile_leaves_no_trace() {
        let mut s = OnlineSoftmax::new(1);
        s.push(&[f64::NEG_INFINITY; 3], |_| panic!("a hidden key's value is not read"));
        s.push(&[-1e5], |_| &[4.0]);
        assert_eq!(s.finish(), (vec![4.0], -1e5));
    }

    #[test]
    fn sink_takes_weight_and_gives_no_value() {
        let mut s = OnlineSoftmax::new(1);
        s.push(&[0.0f64], |_| &[6.0]);
        s.push_sink(0.0);
        let (o, lse) = s.finish();
        assert!((o[0] - 3.0).abs() < 1e-12 && (lse - 2f64.ln()).abs() < 1e-12);
        let mut alone = OnlineSoftmax::<f32>::new(1);
        alone.push_sink(1.5);
        assert_eq!(alone.finish(), (vec![0.0], 1.5));
    }

    #[test]
    fn nan_is_never_taken_for_an_empty_row() {
        let ends_in_nan = |state: OnlineSoftmax<f64>| {
            let (o, lse) = state.finish();
            assert!(lse.is_nan() && o[0].is_nan(), "{o:?}, {lse}");
        };
        for scores in [&[f64::NAN][..], &[0.0, f64::NAN], &[f64::NAN, 5.0]] {
            let mut s = OnlineSoftmax::new(1);
            s.push(scores, |_| &[1.0]);
            ends_in_nan(s);
        }
        let mut late = OnlineSoftmax::new(1);
        late.push(&[1.0], |_| &[1.0]);
        late.push_sink(f64::NAN);
        ends_in_nan(late);
        let mut merged = OnlineSoftmax::new(1);
        merged.push(&[1.0], |_| &[1.0]);
        merged.merge(&OnlineSoftmax::from_finished(&[1.0], f64::NAN));
        ends_in_nan(merged);
    }

    #[test]
    fn empty_finish_is_zero_and_negative_infinity() {
        assert_eq!(OnlineSoftmax::<f32>::new(2).finish(), (vec![0.0, 0.0], f32::NEG_INFINITY));
    }
}
