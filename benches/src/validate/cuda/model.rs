//! What writing to a cache should leave in it, computed on the host element by element.
//!
//! The invariant: a model is a loop over tokens and elements in f64, with no layout but "token, head, element"; the
//! caches' layouts come in through [`CacheLayout`] alone, which every engine shares.

use attn_core::{CacheLayout, DType, Element, F8E4M3, F8E5M2, Problem};
use attn_reference::random::Random;
use half::{bf16, f16};

/// How keys are rotated before they are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rotary {
    None,
    /// Element `i` with `i + dim / 2`.
    Halves(usize),
    /// Element `2 i` with `2 i + 1`.
    Pairs(usize),
}

impl Rotary {
    /// Leading elements that are rotated.
    pub(super) const fn dim(self) -> usize {
        match self {
            Self::None => 0,
            Self::Halves(dim) | Self::Pairs(dim) => dim,
        }
    }

    /// Rotates a key by the angles of its position, in f32 with every product rounded, as the kernel states: where
    /// the two products cancel, another arithmetic is right too and gives other bits.
    pub(super) fn apply(self, key: &mut [f64], cos: &[f32], sin: &[f32]) {
        for i in 0..self.dim() / 2 {
            let (a, b) = match self {
                Self::None => return,
                Self::Halves(dim) => (i, i + dim / 2),
                Self::Pairs(_) => (2 * i, 2 * i + 1),
            };
            #[expect(
                clippy::cast_possible_truncation,
                reason = "elements of a stored type, exact in f32"
            )]
            let (x, y) = (key[a] as f32, key[b] as f32);
            key[a] = f64::from(x * cos[i] - y * sin[i]);
            key[b] = f64::from(y * cos[i] + x * sin[i]);
        }
    }
}

/// Elements of a tensor whose type is known at run time, as the bytes that a device takes.
#[derive(Debug, Clone)]
pub(super) struct Values {
    dtype: DType,
    bytes: Vec<u8>,
}

impl Values {
    /// Standard normal values, each rounded to the type.
    pub(super) fn normal(dtype: DType, len: usize, random: &mut Random) -> Self {
        Self::from_fn(dtype, len, |_| random.normal())
    }

    pub(super) fn from_fn(dtype: DType, len: usize, value: impl FnMut(usize) -> f32) -> Self {
        fn make<T: Element>(len: usize, value: impl FnMut(usize) -> f32) -> Vec<u8> {
            let elements: Vec<T> = (0..len).map(value).map(T::from_f32).collect();
            bytemuck::cast_slice(&elements).to_vec()
        }
        let bytes = match dtype {
            DType::F32 => make::<f32>(len, value),
            DType::F16 => make::<f16>(len, value),
            DType::BF16 => make::<bf16>(len, value),
            DType::F8E4M3 => make::<F8E4M3>(len, value),
            DType::F8E5M2 => make::<F8E5M2>(len, value),
        };
        Self { dtype, bytes }
    }

    pub(super) const fn from_bytes(dtype: DType, bytes: Vec<u8>) -> Self {
        Self { dtype, bytes }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The stored bits of an element.
    pub(super) fn bits(&self, at: usize) -> &[u8] {
        let size = self.dtype.size();
        &self.bytes[at * size..(at + 1) * size]
    }

    pub(super) fn get(&self, at: usize) -> f32 {
        fn read<T: Element>(bits: &[u8]) -> f32 {
            bytemuck::pod_read_unaligned::<T>(bits).to_f32()
        }
        let bits = self.bits(at);
        match self.dtype {
            DType::F32 => read::<f32>(bits),
            DType::F16 => read::<f16>(bits),
            DType::BF16 => read::<bf16>(bits),
            DType::F8E4M3 => read::<F8E4M3>(bits),
            DType::F8E5M2 => read::<F8E5M2>(bits),
        }
    }
}

/// A cache's elements before and after, and what the written ones should be.
#[derive(Debug)]
pub(super) struct Written<'a> {
    pub(super) layout: &'a CacheLayout,
    pub(super) before: &'a Values,
    pub(super) after: &'a Values,
    /// By element, the value that should be there, where something was written.
    pub(super) wanted: Vec<Option<f64>>,
}

impl Written<'_> {
    /// The worst error as a share of one rounding, or the first element that is wrong.
    ///
    /// Elements that nothing was written to must have kept their bits. One rounding is granted, and nothing else: a
    /// product or a quotient in f32 before it can move a value across one boundary of the type.
    pub(super) fn judge(&self, exact: bool) -> Result<f64, String> {
        let dtype = self.layout.dtype();
        let mut worst = 0f64;
        for (at, want) in self.wanted.iter().enumerate() {
            let Some(want) = want else {
                if self.before.bits(at) != self.after.bits(at) {
                    let (had, has) = (self.before.get(at), self.after.get(at));
                    return Err(format!("element {at}: expected {had} untouched, got {has}"));
                }
                continue;
            };
            let got = f64::from(self.after.get(at));
            let want = clamp(dtype, *want);
            let error = (got - want).abs();
            let limit = if exact {
                f64::MIN_POSITIVE
            } else {
                2.0 * dtype.unit_roundoff() * want.abs() + 2.0 * dtype.underflow_roundoff()
            };
            if error.is_nan() || error > limit {
                return Err(format!("element {at}: expected {want}, got {got}"));
            }
            worst = worst.max(error / limit);
        }
        Ok(worst)
    }
}

/// What an 8-bit type makes of a value past its range.
fn clamp(dtype: DType, value: f64) -> f64 {
    match dtype {
        DType::F8E4M3 => value.clamp(-448.0, 448.0),
        DType::F8E5M2 => value.clamp(-57344.0, 57344.0),
        DType::F32 | DType::F16 | DType::BF16 => value,
    }
}

/// Sequence and row of every row of a call.
pub(super) fn all_rows(problem: &Problem) -> Vec<(usize, usize)> {
    let l = problem.lengths();
    (0..l.batch()).flat_map(|sequence| (0..l.q(sequence)).map(move |row| (sequence, row))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotary_turns_the_pairs_of_its_convention() {
        let (cos, sin) = ([0.0, 1.0], [1.0, 0.0]);
        let mut key = [1.0, 2.0, 3.0, 4.0, 5.0];
        Rotary::Halves(4).apply(&mut key, &cos, &sin);
        assert_eq!(key, [-3.0, 2.0, 1.0, 4.0, 5.0]);
        let mut key = [1.0, 2.0, 3.0, 4.0, 5.0];
        Rotary::Pairs(4).apply(&mut key, &cos, &sin);
        assert_eq!(key, [-2.0, 1.0, 3.0, 4.0, 5.0]);
        let mut key = [1.0, 2.0];
        Rotary::None.apply(&mut key, &cos, &sin);
        assert_eq!(key, [1.0, 2.0]);
    }

    #[test]
    fn values_keep_every_type_by_its_bits() {
        for dtype in DType::ALL {
            let values = Values::from_fn(dtype, 3, |n| if n == 1 { -1.5 } else { 0.5 });
            assert_eq!(
                (values.get(0), values.get(1), values.bits(0).len()),
                (0.5, -1.5, dtype.size())
            );
            let copy = Values::from_bytes(dtype, values.bytes().to_vec());
            assert_eq!(copy.bits(2), values.bits(2));
        }
    }

    #[test]
    fn judge_sees_a_stray_write_and_a_wrong_one() {
        let value = attn_core::ValueStorage::Separate(2);
        let order = attn_core::PageOrder::Nhd;
        let layout = CacheLayout::contiguous(DType::BF16, order, 1, 1, 2, value).unwrap();
        let before = Values::from_fn(DType::BF16, 2, |_| 7.0);
        let judge = |after: [f32; 2], wanted: [Option<f64>; 2]| {
            let after = Values::from_fn(DType::BF16, 2, |n| after[n]);
            let (layout, before) = (&layout, &before);
            Written { layout, before, after: &after, wanted: wanted.to_vec() }.judge(false)
        };
        assert!(judge([1.0, 7.0], [Some(1.0), None]).is_ok());
        assert!(judge([1.0, 7.0], [Some(1.001), None]).is_ok());
        assert!(judge([1.0, 7.0], [Some(1.1), None]).unwrap_err().contains("element 0"));
        assert!(judge([1.0, 8.0], [Some(1.0), None]).unwrap_err().contains("untouched"));
        assert!(judge([f32::NAN, 7.0], [Some(1.0), None]).is_err());
    }
}
