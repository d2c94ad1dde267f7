//! Numbers as a careless or hostile caller gives them.

use arbitrary::Arbitrary;
use attn_core::DType;

/// A count of rows, heads or elements.
#[derive(Debug, Clone, Copy, Arbitrary)]
pub enum Size {
    /// 0 to 8, where most combinations are valid.
    Small(u8),
    /// As [`Size::Small`]; twice, so that half of all sizes are.
    Tiny(u8),
    /// A power of two.
    Power(u8),
    /// Near the end of the type.
    Huge(u8),
}

impl Size {
    /// The size.
    pub fn get(self) -> usize {
        match self {
            Self::Small(x) | Self::Tiny(x) => usize::from(x % 9),
            Self::Power(x) => 1 << (u32::from(x) % usize::BITS),
            Self::Huge(x) => usize::MAX - usize::from(x),
        }
    }

    /// The size as a stride, of either sign.
    pub fn stride(self, negative: bool) -> i64 {
        let stride = i64::try_from(self.get()).unwrap_or(i64::MAX);
        if negative { -stride } else { stride }
    }
}

/// A factor: any bits, or one of the values that bits hardly ever give.
#[derive(Debug, Clone, Copy, Arbitrary)]
pub enum Float {
    /// These bits.
    Bits(f32),
    /// One of [`Float::SPECIAL`].
    Special(u8),
}

impl Float {
    const SPECIAL: [f32; 6] = [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX];

    /// The number.
    pub fn get(self) -> f32 {
        match self {
            Self::Bits(x) => x,
            Self::Special(i) => Self::SPECIAL[usize::from(i) % Self::SPECIAL.len()],
        }
    }
}

/// An element type from a byte.
pub fn dtype(byte: u8) -> DType {
    DType::ALL[usize::from(byte) % DType::ALL.len()]
}
