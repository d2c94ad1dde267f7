//! The lengths of a batch, and where each sequence's rows are.
//!
//! The invariant: both sides have one length per sequence, and their sums fit. Prefix sums are made
//! once, so that no engine recomputes an offset and gets the empty sequence wrong.

use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::error::Error;

/// How the rows of several sequences share one tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arrangement {
    /// `[tokens, heads, dim]`: sequences one after another, without padding.
    Packed,
    /// `[batch, longest, heads, dim]`: every sequence padded to the longest.
    Padded,
}

impl Arrangement {
    /// The name used in plans and case files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Packed => "packed",
            Self::Padded => "padded",
        }
    }
}

/// One side's lengths with their prefix sums.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Side {
    /// Row at which each sequence starts in packed storage; one more entry than sequences.
    starts: Vec<usize>,
    longest: usize,
}

impl Side {
    fn new(field: &'static str, lens: &[usize]) -> Result<Self, Error> {
        let mut starts = Vec::with_capacity(lens.len() + 1);
        let mut at: usize = 0;
        starts.push(0);
        for &len in lens {
            at = at.checked_add(len).ok_or_else(|| Error::Overflow {
                what: field,
                detail: format!("sum of {} lengths", lens.len()),
            })?;
            starts.push(at);
        }
        if i64::try_from(at).is_err() {
            return Err(Error::Overflow { what: field, detail: format!("{at} rows") });
        }
        Ok(Self { starts, longest: lens.iter().copied().max().unwrap_or(0) })
    }

    fn range(&self, sequence: usize) -> Range<usize> {
        self.starts[sequence]..self.starts[sequence + 1]
    }

    fn total(&self) -> usize {
        self.starts.last().copied().unwrap_or(0)
    }
}

/// Query and key lengths of every sequence of a batch. Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Lengths {
    q: Arc<Side>,
    kv: Arc<Side>,
}

impl Lengths {
    /// Lengths from one entry per sequence on each side; 0 is allowed.
    ///
    /// # Errors
    /// [`Error::Invalid`] when the sides differ in length; [`Error::Overflow`] when a sum does not fit.
    pub fn new(q_lens: &[usize], kv_lens: &[usize]) -> Result<Self, Error> {
        if q_lens.len() != kv_lens.len() {
            let expected = format!("{} lengths, one per query length", q_lens.len());
            return Err(Error::invalid("kv_lens", expected, kv_lens.len()));
        }
        Ok(Self {
            q: Arc::new(Side::new("q_lens", q_lens)?),
            kv: Arc::new(Side::new("kv_lens", kv_lens)?),
        })
    }

    /// Sequences.
    #[must_use]
    pub fn batch(&self) -> usize {
        self.q.starts.len() - 1
    }

    /// Query rows of a sequence.
    ///
    /// # Panics
    /// When `sequence` is not below [`Lengths::batch`].
    #[must_use]
    pub fn q(&self, sequence: usize) -> usize {
        self.q.range(sequence).len()
    }

    /// Keys of a sequence.
    ///
    /// # Panics
    /// When `sequence` is not below [`Lengths::batch`].
    #[must_use]
    pub fn kv(&self, sequence: usize) -> usize {
        self.kv.range(sequence).len()
    }

    /// The packed query rows of a sequence.
    ///
    /// # Panics
    /// When `sequence` is not below [`Lengths::batch`].
    #[must_use]
    pub fn q_rows(&self, sequence: usize) -> Range<usize> {
        self.q.range(sequence)
    }

    /// The packed key rows of a sequence.
    ///
    /// # Panics
    /// When `sequence` is not below [`Lengths::batch`].
    #[must_use]
    pub fn kv_rows(&self, sequence: usize) -> Range<usize> {
        self.kv.range(sequence)
    }

    /// Query rows of all sequences.
    #[must_use]
    pub fn total_q(&self) -> usize {
        self.q.total()
    }

    /// Keys of all sequences.
    #[must_use]
    pub fn total_kv(&self) -> usize {
        self.kv.total()
    }

    /// The longest query side.
    #[must_use]
    pub fn longest_q(&self) -> usize {
        self.q.longest
    }

    /// The longest key side.
    #[must_use]
    pub fn longest_kv(&self) -> usize {
        self.kv.longest
    }

    /// `[rows..., heads, dim]` of a query-side tensor.
    #[must_use]
    pub fn q_shape(&self, arrangement: Arrangement, rest: &[usize]) -> SmallVec<[usize; 4]> {
        self.shape(arrangement, &self.q, rest)
    }

    /// `[rows..., heads, dim]` of a key-side tensor.
    #[must_use]
    pub fn kv_shape(&self, arrangement: Arrangement, rest: &[usize]) -> SmallVec<[usize; 4]> {
        self.shape(arrangement, &self.kv, rest)
    }

    fn shape(&self, arrangement: Arrangement, side: &Side, rest: &[usize]) -> SmallVec<[usize; 4]> {
        let mut shape: SmallVec<[usize; 4]> = match arrangement {
            Arrangement::Packed => SmallVec::from_slice(&[side.total()]),
            Arrangement::Padded => SmallVec::from_slice(&[self.batch(), side.longest]),
        };
        shape.extend_from_slice(rest);
        shape
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_place_empty_sequences() {
        let l = Lengths::new(&[2, 0, 3], &[0, 5, 1]).expect("equal batch");
        assert_eq!((l.batch(), l.total_q(), l.total_kv()), (3, 5, 6));
        assert_eq!((l.q_rows(1), l.kv_rows(1)), (2..2, 0..5));
        assert_eq!((l.longest_q(), l.longest_kv()), (3, 5));
        assert_eq!(l.q_shape(Arrangement::Padded, &[4, 8]).as_slice(), [3, 3, 4, 8]);
        assert_eq!(l.kv_shape(Arrangement::Packed, &[4, 8]).as_slice(), [6, 4, 8]);
    }

    #[test]
    fn lengths_reject_uneven_sides_and_overflow() {
        assert!(Lengths::new(&[1], &[]).is_err());
        assert!(Lengths::new(&[usize::MAX, 2], &[1, 1]).is_err());
        let empty = Lengths::new(&[], &[]).expect("an empty batch is a batch");
        assert_eq!((empty.batch(), empty.total_q(), empty.longest_kv()), (0, 0, 0));
    }
}
