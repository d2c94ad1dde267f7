//! A small deterministic generator, so that a case is the same on every machine and in every release.
//!
//! The invariant: the n-th draw of a seed never changes; recorded failures and tolerances depend on it.
//! The `rand` crates reserve the right to change their streams between versions, which is why these
//! thirty lines are ours.

/// The `SplitMix64` generator, and normal variates by Box and Muller's transform.
///
/// Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014, figure 17.
///
/// ```
/// use attn_reference::random::Random;
///
/// let (mut a, mut b) = (Random::new(7), Random::new(7));
/// assert_eq!(a.next_u64(), b.next_u64());
/// assert!((0..100).all(|_| a.below(3) < 3));
/// ```
#[derive(Debug, Clone)]
pub struct Random {
    state: u64,
}

impl Random {
    /// A generator whose whole stream is given by the seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// The next 64 bits.
    pub const fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in `[0, 1)`.
    pub fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform below `bound`; 0 for a bound of 0.
    pub fn below(&mut self, bound: usize) -> usize {
        // The bias of a remainder is below 2^-40 for every bound used on test data.
        let draw = self.next_u64().checked_rem(bound as u64).unwrap_or(0);
        usize::try_from(draw).unwrap_or(0)
    }

    /// Normal with mean 0 and deviation 1.
    pub fn normal(&mut self) -> f32 {
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        let angle = std::f64::consts::TAU * self.uniform();
        crate::elements::to_f32(radius * angle.cos())
    }

    /// Puts items in random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_is_the_published_one() {
        // The first outputs for seed 1234567, as given with the public-domain C implementation.
        let mut r = Random::new(1_234_567);
        assert_eq!(r.next_u64(), 6_457_827_717_110_365_317);
        assert_eq!(r.next_u64(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn normal_has_the_moments_of_a_normal() {
        let mut r = Random::new(1);
        let draws: Vec<f64> = (0..20_000).map(|_| f64::from(r.normal())).collect();
        let mean = draws.iter().sum::<f64>() / 20_000.0;
        let variance = draws.iter().map(|x| x * x).sum::<f64>() / 20_000.0;
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.05, "{mean} {variance}");
    }

    #[test]
    fn shuffle_keeps_every_item() {
        let mut items: Vec<usize> = (0..50).collect();
        Random::new(3).shuffle(&mut items);
        assert_ne!(items, (0..50).collect::<Vec<_>>());
        items.sort_unstable();
        assert_eq!(items, (0..50).collect::<Vec<_>>());
    }
}
