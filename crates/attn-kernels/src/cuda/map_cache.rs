//! Tensor maps that were encoded before.
//!
//! The invariant: a map is answered only for the tensor and boxes that it was encoded for, and [`Boxed`] is all of them that
//! the driver looks at. A map names memory by its address alone: one that outlives its memory is the map of whatever lies there next
//! with the same extents and strides, so that nothing here goes stale. Memory is not kept alive either: who gets a map has
//! borrowed the memory for the launch ([`super::TensorMap`]'s lifetime).

use attn_core::DType;
use cudarc::driver::sys::CUtensorMap;

use crate::error::Error;

/// Most maps of one operand. A model's layers have each their own keys and values, and the largest common ones have 126
/// layers; a map and its key take 256 bytes of the host.
const MOST: usize = 128;

/// A tensor by its four axes, and the rows of its boxes: all that a map depends on, since columns and swizzle are the same
/// for all. The address comes first, for it is what most often tells two apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Boxed {
    /// Of the first element.
    pub(crate) address: u64,
    pub(crate) shape: [usize; 4],
    /// In elements.
    pub(crate) strides: [i64; 4],
    pub(crate) rows: usize,
    /// Of a box, beside its rows.
    pub(crate) heads: usize,
    pub(crate) dtype: DType,
}

/// The maps of one operand.
#[derive(Debug, Default)]
pub(crate) struct MapCache {
    entries: Vec<(Boxed, CUtensorMap)>,
    /// Where the last answer was.
    last: usize,
    /// Which entry makes room, where all are taken: each in turn.
    oldest: usize,
}

impl MapCache {
    /// The map of a tensor, from `encode` where there is none yet. A failure leaves everything as it was.
    pub(crate) fn map(
        &mut self,
        boxed: &Boxed,
        encode: impl FnOnce() -> Result<CUtensorMap, Error>,
    ) -> Result<CUtensorMap, Error> {
        // Layers follow one another in the same order at every step: what is asked for is most often where the last
        // answer was, or next to it.
        let (before, from) = self.entries.split_at(self.last);
        let known = from.iter().chain(before).position(|(own, _)| own == boxed);
        if let Some(steps) = known {
            self.last = (self.last + steps) % self.entries.len();
            return Ok(self.entries[self.last].1);
        }
        let map = encode()?;
        if self.entries.len() < MOST {
            self.last = self.entries.len();
            self.entries.push((*boxed, map));
        } else {
            self.last = self.oldest;
            self.oldest = (self.oldest + 1) % MOST;
            self.entries[self.last] = (*boxed, map);
        }
        Ok(map)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(address: u64) -> Boxed {
        let (shape, strides) = ([1, 8, 4, 64], [64, 256, 64, 1]);
        Boxed { address, shape, strides, rows: 8, heads: 1, dtype: DType::BF16 }
    }

    /// A cache that counts what it encodes, in maps that tell their number.
    #[derive(Default)]
    struct Counted {
        cache: MapCache,
        encoded: u64,
    }

    impl Counted {
        fn map(&mut self, boxed: Boxed) -> u64 {
            let encode = || {
                self.encoded += 1;
                Ok(CUtensorMap { opaque: [self.encoded; 16] })
            };
            self.cache.map(&boxed, encode).expect("encoded").opaque[0]
        }
    }

    #[test]
    fn map_is_encoded_once_a_tensor() {
        let mut counted = Counted::default();
        for _ in 0..3 {
            for layer in 0..MOST as u64 {
                assert_eq!(counted.map(at(layer * 4096)), layer + 1);
            }
        }
        assert_eq!(counted.encoded, MOST as u64);
    }

    #[test]
    fn all_that_a_map_depends_on_tells_tensors_apart() {
        let mut counted = Counted::default();
        let tensor = at(4096);
        let different = [
            tensor,
            Boxed { address: 8192, ..tensor },
            Boxed { shape: [1, 9, 4, 64], ..tensor },
            Boxed { strides: [64, 512, 64, 1], ..tensor },
            Boxed { rows: 4, ..tensor },
            Boxed { heads: 2, ..tensor },
            Boxed { dtype: DType::F16, ..tensor },
        ];
        let first = different.map(|boxed| counted.map(boxed));
        assert_eq!(first, [1, 2, 3, 4, 5, 6, 7]);
        assert_eq!(different.map(|boxed| counted.map(boxed)), first);
    }

    #[test]
    fn full_cache_gives_up_the_oldest_map() {
        let mut counted = Counted::default();
        for n in 0..=MOST as u64 {
            counted.map(at(n * 4096));
        }
        let encoded = counted.encoded;
        assert_eq!(counted.map(at(4096)), 2);
        assert_eq!(counted.encoded, encoded);
        assert_eq!(counted.map(at(0)), encoded + 1);
        assert_eq!(counted.cache.entries.len(), MOST);
        // The new one is in the place of the next oldest.
        assert_eq!(counted.map(at(4096)), encoded + 2);
    }

    #[test]
    fn failed_encoding_leaves_the_cache_as_it_was() {
        let mut counted = Counted::default();
        counted.map(at(4096));
        let refused = || Err(attn_core::Error::invalid("map", "a driver", "none").into());
        assert!(counted.cache.map(&at(8192), refused).is_err());
        assert_eq!((counted.map(at(4096)), counted.encoded), (1, 1));
    }
}
