//! Reading memory once, as fast as the level's loads allow.
//!
//! Invariant: every element is loaded exactly once and enters the sum, so that nothing can be left out by
//! a compiler that sees no use for it. This is the ceiling that a decode is compared with: both read
//! each byte once, and this does nothing else.

use super::scattered::prefetch;
use super::{Kernel, Lanes, Simd};

/// Vectors in flight: more do not read faster where it was tried.
const IN_FLIGHT: usize = 8;
/// Elements that prefetches run ahead, 8 KiB: two pages of the hardware's own prefetcher.
const AHEAD: usize = 2048;

impl Simd {
    /// The sum of a slice, with explicit prefetches or without.
    pub(crate) fn stream_sum(self, data: &[f32], fetch: bool) -> f32 {
        self.dispatch(Stream { data, fetch })
    }
}

struct Stream<'a> {
    data: &'a [f32],
    fetch: bool,
}

impl Kernel for Stream<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<L: Lanes>(self, l: L) -> f32 {
        let mut sums = [l.splat(0.0); IN_FLIGHT];
        let blocks = self.data.chunks_exact(IN_FLIGHT * L::LANES);
        let tail: f32 = blocks.remainder().iter().sum();
        for block in blocks {
            if self.fetch {
                for line in (0..IN_FLIGHT * L::LANES).step_by(16) {
                    prefetch(block.as_ptr().wrapping_add(line + AHEAD));
                }
            }
            for (i, sum) in sums.iter_mut().enumerate() {
                // SAFETY: a block has IN_FLIGHT * LANES elements.
                let x = unsafe { l.load(block.as_ptr().wrapping_add(i * L::LANES)) };
                *sum = l.add(*sum, x);
            }
        }
        let mut lanes = [0.0f32; IN_FLIGHT * 16];
        for (i, &sum) in sums.iter().enumerate() {
            // SAFETY: there is room for IN_FLIGHT vectors of at most 16 lanes.
            unsafe { l.store(sum, lanes.as_mut_ptr().wrapping_add(i * L::LANES)) };
        }
        lanes[..IN_FLIGHT * L::LANES].iter().sum::<f32>() + tail
    }
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::*;

    #[test]
    fn stream_sum_counts_every_element_at_every_level() {
        for simd in Level::ALL.into_iter().filter_map(Simd::with_level) {
            for len in [0, 1, 31, 128, 129, 1000] {
                let data = vec![1.0f32; len];
                for fetch in [false, true] {
                    assert_eq!(simd.stream_sum(&data, fetch), len as f32, "{len}");
                }
            }
        }
    }
}
