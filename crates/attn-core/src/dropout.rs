//! Dropout of attention weights, as a function of where a weight is.
//!
//! The invariant: whether a weight is dropped depends on seed, offset and its logical place (sequence of the
//! batch, query head, query row, key) and on nothing else: not on tiles, splits, threads, storage or the device.
//! So a backward drops what its forward dropped without having kept a mask, and every engine drops the same.
//!
//! Of a call with seed `s` and offset `o`, both of 64 bits, the low word of each first:
//!
//! - the call's key is words 0 and 1 of `philox(counter = (o, 0, 0), key = s)`: a word of the counter is left for
//!   each coordinate;
//! - word `j % 4` of `philox(counter = (j / 4, i, head, sequence), key = the call's)` belongs to the weight of
//!   row `i` and key `j`, both counted in their sequence: one call of the generator makes four neighbouring
//!   keys, and none makes a number that is not used;
//! - the weight is dropped where its word is less than [`DropoutMask::threshold`]. A word has 32 bits because a
//!   rate of 8 would be off by up to 1/512, which no scale of the kept weights can make good for both
//!   the mean and the rate that was asked for.
//!
//! The rate is a property of a call's [`Problem`], for it decides which kernel runs and how. Seed and offset are
//! data, [`Inputs::dropout`]: they differ from call to call of a plan, and where a captured graph is replayed they
//! must be read from memory that is written between replays.

use crate::error::Error;
use crate::inputs::Inputs;
use crate::philox::philox4x32_10;
use crate::problem::{Problem, ProblemSpec};

/// That weights are dropped, and how many.
///
/// Source: Srivastava et al., "Dropout", JMLR 15, 2014; of attention weights, Vaswani et al., arXiv:1706.03762,
/// section 5.4.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Dropout {
    /// Probability that a weight is dropped, at least 0 and below 1; 0 is no dropout at all.
    pub p: f32,
}

impl Dropout {
    /// A weight whose word is less is dropped: `p * 2^32`, rounded.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "p is less than 1 by 2^-24 or more, so that this is at most 2^32 - 2^8"
    )]
    pub fn threshold(self) -> u32 {
        (f64::from(self.p) * TWO_TO_32).round() as u32
    }

    /// What kept weights are multiplied by: the f32 nearest `1 / (1 - p)`, for every engine and precision.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "the rounding to f32 is meant")]
    pub fn factor(self) -> f32 {
        (1.0 / (1.0 - f64::from(self.p))) as f32
    }
}

const TWO_TO_32: f64 = 4_294_967_296.0;

/// Which weights of a call are dropped, and by what the others are multiplied.
///
/// ```
/// use attn_core::dropout::{Dropout, DropoutMask};
///
/// let mask = DropoutMask::new(Dropout { p: 0.25 }, 7, 1);
/// let kept = (0..1000).filter(|&key| mask.keeps(0, 0, 5, key)).count();
/// assert!((700..800).contains(&kept));
/// assert_eq!(mask.factor(), 4.0 / 3.0);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DropoutMask {
    key: [u32; 2],
    threshold: u32,
    factor: f32,
}

impl DropoutMask {
    /// The mask of a call.
    ///
    /// Calls that are to drop independently of each other have different offsets (or seeds): an engine counts
    /// its layers and steps in one.
    #[must_use]
    pub fn new(dropout: Dropout, seed: u64, offset: u64) -> Self {
        let ([s0, s1], [o0, o1]) = (halves(seed), halves(offset));
        let [k0, k1, ..] = philox4x32_10([o0, o1, 0, 0], [s0, s1]);
        Self { key: [k0, k1], threshold: dropout.threshold(), factor: dropout.factor() }
    }

    /// The generator's key for this call.
    #[must_use]
    pub const fn key(&self) -> [u32; 2] {
        self.key
    }

    /// A weight whose word is less is dropped.
    #[must_use]
    pub const fn threshold(&self) -> u32 {
        self.threshold
    }

    /// What kept weights are multiplied by.
    #[must_use]
    pub const fn factor(&self) -> f32 {
        self.factor
    }

    /// The words of keys `4 * block` to `4 * block + 3`.
    #[must_use]
    #[inline]
    pub fn words(&self, sequence: usize, head: usize, row: usize, block: usize) -> [u32; 4] {
        philox4x32_10([block, row, head, sequence].map(coordinate), self.key)
    }

    /// Whether the weight of a pair is kept.
    ///
    /// `row` and `key` count in their sequence, `head` counts query heads.
    #[must_use]
    pub fn keeps(&self, sequence: usize, head: usize, row: usize, key: usize) -> bool {
        self.words(sequence, head, row, key / 4)[key % 4] >= self.threshold
    }
}

impl Inputs<'_> {
    /// The dropout of this call, if its problem has any. Call after [`Inputs::check`].
    #[must_use]
    pub fn dropout_of(&self, problem: &Problem) -> Option<DropoutMask> {
        let (dropout, stream) = (problem.dropout()?, self.dropout.as_ref()?);
        let word = |n| stream.get(&[n]).unwrap_or(0);
        Some(DropoutMask::new(dropout, word(0), word(1)))
    }
}

/// A coordinate as a word of the counter.
#[expect(
    clippy::cast_possible_truncation,
    reason = "a problem with dropout has less than 2^32 of each"
)]
const fn coordinate(n: usize) -> u32 {
    n as u32
}

/// Low and high word.
#[expect(clippy::cast_possible_truncation, reason = "the halves are meant")]
const fn halves(x: u64) -> [u32; 2] {
    [x as u32, (x >> 32) as u32]
}

/// Checks the rate, and that each coordinate of a weight is a word of the counter.
pub(crate) fn check(spec: &ProblemSpec) -> Result<(), Error> {
    let Some(Dropout { p }) = spec.dropout else {
        return Ok(());
    };
    // Written so that NaN is refused.
    if !(0.0..1.0).contains(&p) {
        return Err(Error::invalid("dropout", "a probability of at least 0 and below 1", p));
    }
    let longest = |lens: &[usize]| lens.iter().copied().max().unwrap_or(0);
    for (what, count) in [
        ("sequences", spec.q_lens.len()),
        ("rows", longest(&spec.q_lens)),
        ("keys", longest(&spec.kv_lens)),
    ] {
        if u32::try_from(count).is_err() {
            let got = format!("{count} {what}");
            return Err(Error::invalid("dropout", "less than 2^32 sequences, rows and keys", got));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    #[test]
    fn dropout_refuses_what_is_no_probability() {
        let problem = |p| {
            let mut spec = ProblemSpec::new(DType::F32, 1, 1, 8, &[3], &[5]);
            spec.dropout = Some(Dropout { p });
            Problem::new(spec)
        };
        for bad in [-0.1, 1.0, 1.5, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let error = problem(bad).expect_err("refused").to_string();
            let expected = "dropout: expected a probability of at least 0 and below 1, got";
            assert!(error.starts_with(expected), "{error}");
        }
        assert_eq!(problem(0.5).expect("valid").dropout(), Some(Dropout { p: 0.5 }));
        // A rate of 0 is the problem without dropout, and has its plans.
        let none = Problem::new(ProblemSpec::new(DType::F32, 1, 1, 8, &[3], &[5])).expect("valid");
        for zero in [0.0, -0.0] {
            assert_eq!(problem(zero).expect("valid"), none);
        }
        assert_ne!(problem(0.5).expect("valid"), none);
        assert_ne!(problem(0.5).expect("valid"), problem(0.25).expect("valid"));
    }

    #[test]
    fn threshold_is_the_rate_of_all_words() {
        for (p, threshold) in [
            (0.0, 0),
            (0.5, 1 << 31),
            (0.25, 1 << 30),
            (1.0 - f32::EPSILON / 2.0, u32::MAX - 255),
            (f32::MIN_POSITIVE, 0),
        ] {
            assert_eq!(Dropout { p }.threshold(), threshold, "{p}");
        }
        assert_eq!(Dropout { p: 0.5 }.factor().to_bits(), 2f32.to_bits());
    }

    #[test]
    fn mask_keeps_the_stated_share_everywhere() {
        // 5 standard deviations of 2^16 draws: a wrong rate or a coordinate that is left out shows.
        let n = 1 << 16;
        for p in [0.1f32, 0.5, 0.9] {
            let mask = DropoutMask::new(Dropout { p }, 0x1234_5678_9ABC, 42);
            let q = f64::from(p);
            let allowed = 5.0 * (f64::from(n) * q * (1.0 - q)).sqrt();
            let place: [fn(usize) -> [usize; 4]; 4] =
                [|n| [0, 0, 0, n], |n| [0, 0, n, 1], |n| [0, n, 1, 2], |n| [n, 1, 2, 3]];
            for at in place {
                let kept = (0..n as usize)
                    .filter(|&n| {
                        let [sequence, head, row, key] = at(n);
                        mask.keeps(sequence, head, row, key)
                    })
                    .count();
                let off = kept as f64 - f64::from(n) * (1.0 - q);
                assert!(off.abs() < allowed, "{p}: {kept} of {n}");
            }
        }
    }

    #[test]
    fn masks_of_other_offsets_and_seeds_are_independent() {
        let set = |seed, offset| -> Vec<bool> {
            let mask = DropoutMask::new(Dropout { p: 0.5 }, seed, offset);
            (0..4096).map(|key| mask.keeps(0, 0, 0, key)).collect()
        };
        let first = set(1, 1);
        assert_eq!(first, set(1, 1));
        // A seed that is one more and an offset that is one less is another call.
        for (seed, offset) in [(1, 2), (2, 1), (2, 0), (0, 2), (1, 1 << 32), (1 << 32 | 1, 1)] {
            let same = first.iter().zip(set(seed, offset)).filter(|(a, b)| **a == *b).count();
            assert!((1888..2208).contains(&same), "{seed} {offset}: {same} of 4096 alike");
        }
    }
}
