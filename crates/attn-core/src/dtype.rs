//! Element types: what is stored, how wide it is, and the exact conversion of each to and from f32.
//!
//! The invariant: `from_f32` rounds to nearest, ties to even, for every type, and `to_f32` is exact.
//! The fp8 types are ours because the two OCP formats are 60 lines and every engine, the reference
//! included, must agree on their bits; f16 and bf16 come from `half`.

use std::fmt;

use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};

/// The stored type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16: 8 exponent bits, 7 stored mantissa bits.
    BF16,
    /// OCP fp8 E4M3: largest finite 448, no infinity.
    F8E4M3,
    /// OCP fp8 E5M2: largest finite 57344, with infinities.
    F8E5M2,
}

impl DType {
    /// Every element type, widest first.
    pub const ALL: [Self; 5] = [Self::F32, Self::F16, Self::BF16, Self::F8E4M3, Self::F8E5M2];

    /// Bytes of one element.
    #[must_use]
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::BF16 => 2,
            Self::F8E4M3 | Self::F8E5M2 => 1,
        }
    }

    /// Whether this is one of the two 8-bit formats, which no output has.
    #[must_use]
    pub const fn is_fp8(self) -> bool {
        matches!(self, Self::F8E4M3 | Self::F8E5M2)
    }

    /// The type of the outputs that queries of this type give: bf16 for fp8, whose range an output would not fit
    /// without a scale that nobody knows before.
    #[must_use]
    pub const fn output(self) -> Self {
        match self {
            Self::F8E4M3 | Self::F8E5M2 => Self::BF16,
            Self::F32 | Self::F16 | Self::BF16 => self,
        }
    }

    /// Half the distance from 1 to the next value: the largest relative error of one rounding.
    #[must_use]
    pub const fn unit_roundoff(self) -> f64 {
        match self {
            Self::F32 => 1.0 / (1u64 << 24) as f64,
            Self::F16 => 1.0 / (1u64 << 11) as f64,
            Self::BF16 => 1.0 / (1u64 << 8) as f64,
            Self::F8E4M3 => 1.0 / (1u64 << 4) as f64,
            Self::F8E5M2 => 1.0 / (1u64 << 3) as f64,
        }
    }

    /// Half the distance between the smallest values: the largest absolute error of one rounding near 0.
    #[must_use]
    pub fn underflow_roundoff(self) -> f64 {
        match self {
            Self::F32 => 2f64.powi(-150),
            Self::BF16 => 2f64.powi(-134),
            Self::F16 => 2f64.powi(-25),
            Self::F8E4M3 => 2f64.powi(-10),
            Self::F8E5M2 => 2f64.powi(-17),
        }
    }

    /// The value after one rounding to this type.
    #[must_use]
    pub fn round(self, x: f32) -> f32 {
        match self {
            Self::F32 => x,
            Self::F16 => f16::from_f32(x).to_f32(),
            Self::BF16 => bf16::from_f32(x).to_f32(),
            Self::F8E4M3 => F8E4M3::from_f32(x).to_f32(),
            Self::F8E5M2 => F8E5M2::from_f32(x).to_f32(),
        }
    }

    /// The lower-case name used in plans, records and case files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::BF16 => "bf16",
            Self::F8E4M3 => "fp8_e4m3",
            Self::F8E5M2 => "fp8_e5m2",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A Rust type that stores one element of a [`DType`].
pub trait Element: Pod + Send + Sync + fmt::Debug + PartialEq {
    /// The stored type.
    const DTYPE: DType;
    /// The exact value.
    fn to_f32(self) -> f32;
    /// The nearest value of this type, ties to even.
    fn from_f32(x: f32) -> Self;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
    fn to_f32(self) -> f32 {
        self
    }
    fn from_f32(x: f32) -> Self {
        x
    }
}

impl Element for f16 {
    const DTYPE: DType = DType::F16;
    fn to_f32(self) -> f32 {
        Self::to_f32(self)
    }
    fn from_f32(x: f32) -> Self {
        Self::from_f32(x)
    }
}

impl Element for bf16 {
    const DTYPE: DType = DType::BF16;
    fn to_f32(self) -> f32 {
        Self::to_f32(self)
    }
    fn from_f32(x: f32) -> Self {
        Self::from_f32(x)
    }
}

/// An fp8 E4M3 element, by its bits.
///
/// Source: OCP 8-bit floating point specification, revision 1.0, section 5.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Pod, Zeroable)]
#[repr(transparent)]
pub struct F8E4M3(pub u8);

/// An fp8 E5M2 element, by its bits.
///
/// Source: OCP 8-bit floating point specification, revision 1.0, section 5.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Pod, Zeroable)]
#[repr(transparent)]
pub struct F8E5M2(pub u8);

impl Element for F8E4M3 {
    const DTYPE: DType = DType::F8E4M3;
    fn to_f32(self) -> f32 {
        // The single exponent-and-mantissa pattern that is not a number; there is no infinity.
        if self.0 & 0x7F == 0x7F { f32::NAN } else { decode(self.0, 4, 7) }
    }
    fn from_f32(x: f32) -> Self {
        Self(encode(x, 4, 7, 0x7E, 0x7F))
    }
}

impl Element for F8E5M2 {
    const DTYPE: DType = DType::F8E5M2;
    fn to_f32(self) -> f32 {
        match self.0 & 0x7F {
            0x7C => f32::INFINITY.copysign(if self.0 & 0x80 == 0 { 1.0 } else { -1.0 }),
            0x7D..=0x7F => f32::NAN,
            _ => decode(self.0, 5, 15),
        }
    }
    fn from_f32(x: f32) -> Self {
        Self(encode(x, 5, 15, 0x7B, 0x7C))
    }
}

/// The finite value of an fp8 pattern with `exp_bits` exponent bits and the given bias.
fn decode(bits: u8, exp_bits: u32, bias: i32) -> f32 {
    let man_bits = 7 - exp_bits;
    let man = f32::from(bits & ((1 << man_bits) - 1));
    let exp = i32::from((bits & 0x7F) >> man_bits);
    let one = f32::from(1u8 << man_bits);
    let magnitude = if exp == 0 {
        man / one * 2f32.powi(1 - bias)
    } else {
        (1.0 + man / one) * 2f32.powi(exp - bias)
    };
    if bits & 0x80 == 0 { magnitude } else { -magnitude }
}

/// The nearest fp8 pattern, ties to even; what lies beyond the largest finite value after rounding
/// becomes `beyond` (infinity in E5M2, NaN in E4M3, as the specification's non-saturating mode).
fn encode(x: f32, exp_bits: u32, bias: i32, largest: u8, beyond: u8) -> u8 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    if x.is_nan() {
        return sign | 0x7F;
    }
    let man_bits = 7 - exp_bits;
    let magnitude = x.abs();
    // The spacing of values around `magnitude`: that of its binade, or of the subnormals below it.
    #[expect(clippy::cast_possible_wrap, reason = "an exponent field has 8 bits")]
    let exp = ((magnitude.to_bits() >> 23) as i32 - 127).max(1 - bias);
    #[expect(clippy::cast_possible_wrap, reason = "2 or 3")]
    let step = f64::from(2f32).powi(exp - man_bits as i32);
    let quotient = (f64::from(magnitude) / step).round_ties_even();
    // Patterns of one sign are consecutive integers in value order, so a carry into the next
    // binade is the addition itself.
    let base = f64::from((exp - (1 - bias)) << man_bits);
    let code = base + quotient;
    if code > f64::from(largest) {
        return sign | beyond;
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "an integer in 0..=largest, and largest is a u8"
    )]
    let code = code as u8;
    sign | code
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nearest<T: Element>(x: f32, decode: impl Fn(u8) -> T) -> f32 {
        let mut best = f32::NAN;
        for bits in 0..=255u8 {
            let v = decode(bits).to_f32();
            if v.is_finite() && (best.is_nan() || (v - x).abs() < (best - x).abs()) {
                best = v;
            }
        }
        best
    }

    #[test]
    fn fp8_round_trips_every_pattern() {
        for bits in 0..=255u8 {
            let (a, b) = (F8E4M3(bits), F8E5M2(bits));
            if !a.to_f32().is_nan() {
                assert_eq!(F8E4M3::from_f32(a.to_f32()), a);
            }
            if !b.to_f32().is_nan() {
                assert_eq!(F8E5M2::from_f32(b.to_f32()), b);
            }
        }
    }

    #[test]
    fn fp8_rounds_to_nearest() {
        let mut x = 1e-6f32;
        while x < 440.0 {
            let got = F8E4M3::from_f32(x).to_f32();
            assert!((got - x).abs() <= (nearest(x, F8E4M3) - x).abs(), "{x} gave {got}");
            let got = F8E5M2::from_f32(-x).to_f32();
            assert!((got + x).abs() <= (nearest(-x, F8E5M2) + x).abs(), "{x} gave {got}");
            x *= 1.013;
        }
    }

    #[test]
    fn fp8_breaks_ties_to_even() {
        // 17 lies between 16 (mantissa 0) and 18 (mantissa 1) in E4M3, 19 between 18 and 20.
        assert_eq!(F8E4M3::from_f32(17.0).to_f32(), 16.0);
        assert_eq!(F8E4M3::from_f32(19.0).to_f32(), 20.0);
        assert_eq!(F8E5M2::from_f32(9.0).to_f32(), 8.0);
        assert_eq!(F8E5M2::from_f32(11.0).to_f32(), 12.0);
    }

    #[test]
    fn fp8_leaves_the_range_as_the_format_says() {
        assert_eq!(F8E4M3::from_f32(448.0).to_f32(), 448.0);
        assert!(F8E4M3::from_f32(1e9).to_f32().is_nan());
        assert_eq!(F8E5M2::from_f32(57344.0).to_f32(), 57344.0);
        assert_eq!(F8E5M2::from_f32(-1e9).to_f32(), f32::NEG_INFINITY);
        assert!(F8E5M2::from_f32(f32::NAN).to_f32().is_nan());
        assert_eq!(F8E4M3::from_f32(0.0).0, 0);
        assert_eq!(F8E4M3::from_f32(-0.0).0, 0x80);
    }

    #[test]
    fn rounding_stays_within_the_stated_bound() {
        for dtype in DType::ALL {
            let mut x = 1e-3f32;
            while x < 400.0 {
                let err = f64::from((dtype.round(x) - x).abs());
                let bound = (f64::from(x) * dtype.unit_roundoff()).max(dtype.underflow_roundoff());
                assert!(err <= bound, "{dtype} {x}: {err} > {bound}");
                x *= 1.37;
            }
        }
    }
}
