//! Tensors over pairs of rows and keys: boolean masks, block masks and biases, broadcast along any axis.
//!
//! The invariant: every entry that some pair of the batch reads has a value, and a bias entry that none
//! reads is NaN. Broadcast axes make the two hard to tell apart by lengths alone, so the pairs are walked.

use attn_core::{Error, Problem, Strided, View};

use crate::case::{Hiding, PairTensor};
use crate::elements::for_each_index;
use crate::naive::bias_place;
use crate::random::Random;
use crate::storage::Placement;

/// An owned pair tensor.
#[derive(Debug, Clone)]
pub(crate) struct Pairs<T> {
    data: Vec<T>,
    layout: Strided,
}

impl<T: Copy> Pairs<T> {
    fn new(
        tensor: PairTensor,
        extents: [usize; 4],
        gap: usize,
        unused: T,
        mut value: impl FnMut(&[usize]) -> T,
    ) -> Result<Self, Error> {
        let shape = shape_of(tensor.axes, extents)?;
        let (layout, len) = Placement::Contiguous.strided("pairs", &shape, gap)?;
        let mut data = vec![unused; len];
        for_each_index(&shape, |at| {
            let value = value(at);
            if let Some(x) = layout.index(at).and_then(|i| data.get_mut(i)) {
                *x = value;
            }
        });
        Ok(Self { data, layout })
    }

    pub(crate) fn view(&self, field: &'static str) -> Result<View<'_, T>, Error> {
        View::new(field, &self.data, self.layout.clone())
    }

    pub(crate) fn shape(&self) -> &[usize] {
        self.layout.shape()
    }
}

impl Pairs<u8> {
    /// A mask whose hidden entries are 0; those that keep are any other byte.
    pub(crate) fn mask(
        tensor: PairTensor,
        extents: [usize; 4],
        first_tile: usize,
        gap: usize,
        random: &mut Random,
    ) -> Result<Self, Error> {
        Self::new(tensor, extents, gap, 255, |at| {
            if hides(tensor.hiding, at, first_tile, random) { 0 } else { 1 }
        })
    }
}

impl Pairs<f32> {
    /// A standard normal bias whose hidden entries are -inf and whose unread entries are NaN.
    pub(crate) fn bias(
        tensor: PairTensor,
        problem: &Problem,
        gap: usize,
        random: &mut Random,
    ) -> Result<Self, Error> {
        let l = problem.lengths();
        let extents = [l.batch(), problem.q_heads(), l.longest_q(), l.longest_kv()];
        let shape = shape_of(tensor.axes, extents)?;
        let mut read = vec![false; shape.iter().product()];
        for_each_index(&extents, |at| {
            if at[2] < l.q(at[0]) && at[3] < l.kv(at[0]) {
                read[bias_place(&shape, [at[0], at[1], at[2], at[3]])] = true;
            }
        });
        let mut read = read.into_iter();
        Self::new(tensor, extents, gap, f32::NAN, |at| {
            let hidden = hides(tensor.hiding, at, FIRST_TILE, random);
            let value = if hidden { f32::NEG_INFINITY } else { random.normal() };
            if read.next() == Some(true) { value } else { f32::NAN }
        })
    }
}

/// Keys that [`Hiding::FirstTile`] hides: more than the first tile of any engine that tiles by 64.
pub(crate) const FIRST_TILE: usize = 70;

fn shape_of(axes: &str, extents: [usize; 4]) -> Result<Vec<usize>, Error> {
    let letters = axes.as_bytes();
    let invalid = || Error::invalid("axes", "2 to 4 of b, h, q, k from the right, or 1", axes);
    if !(2..=4).contains(&letters.len()) {
        return Err(invalid());
    }
    let missing = 4 - letters.len();
    let extent = |(n, letter): (usize, &u8)| match letter {
        b'1' => Some(1),
        letter if *letter == b"bhqk"[missing + n] => Some(extents[missing + n]),
        _ => None,
    };
    letters.iter().enumerate().map(extent).collect::<Option<_>>().ok_or_else(invalid)
}

fn hides(hiding: Hiding, at: &[usize], first_tile: usize, random: &mut Random) -> bool {
    let (row, key) = (at[at.len() - 2], at[at.len() - 1]);
    let drawn = random.uniform() < 0.3;
    match hiding {
        Hiding::None => false,
        Hiding::Some => drawn,
        Hiding::FirstTile => key < first_tile,
        Hiding::EvenRows => row % 2 == 0 || drawn,
        Hiding::All => true,
    }
}

#[cfg(test)]
mod tests {
    use attn_core::{DType, ProblemSpec};

    use super::*;

    #[test]
    fn bias_is_nan_exactly_where_no_pair_reads() {
        let mut spec = ProblemSpec::new(DType::F32, 1, 1, 1, &[1, 3], &[4, 2]);
        spec.bias = true;
        let problem = Problem::new(spec).unwrap();
        let unread = |axes| {
            let tensor = PairTensor { axes, hiding: Hiding::None };
            let bias = Pairs::bias(tensor, &problem, 0, &mut Random::new(1)).unwrap();
            bias.data.iter().filter(|x| x.is_nan()).count()
        };
        assert_eq!(unread("bhqk"), 24 - 4 - 6);
        // Broadcast over the batch: the union of 1 x 4 and 3 x 2 entries is read.
        assert_eq!(unread("qk"), 12 - 4 - 4);
        assert_eq!(unread("b1q1"), 6 - 4);
    }

    #[test]
    fn axes_are_checked() {
        for bad in ["", "k", "kq", "bhq", "qkk", "xbhqk", "b1k"] {
            assert!(shape_of(bad, [2, 3, 4, 5]).is_err(), "{bad}");
        }
        assert_eq!(shape_of("h1k", [2, 3, 4, 5]).unwrap(), [3, 1, 5]);
    }
}
