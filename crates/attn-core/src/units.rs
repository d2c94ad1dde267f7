//! Quantities that are easily taken for one another, as types of their own.
//!
//! Only bytes are wrapped: token, head and page counts index slices on every line of an engine, where a
//! wrapper would be noise, but a byte count that is used as an element count is a silent error.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, Mul};

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Bytes(pub u64);

impl Bytes {
    /// None.
    pub const ZERO: Self = Self(0);

    /// The bytes of `count` elements of `size` bytes, saturating.
    #[must_use]
    pub const fn of(count: usize, size: usize) -> Self {
        Self((count as u64).saturating_mul(size as u64))
    }
}

impl Add for Bytes {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl Mul<u64> for Bytes {
    type Output = Self;
    fn mul(self, count: u64) -> Self {
        Self(self.0.saturating_mul(count))
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Self>>(iter: I) -> Self {
        iter.fold(Self::ZERO, Add::add)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scaled = |shift: u32| self.0 as f64 / (1u64 << shift) as f64;
        match self.0 {
            0..1024 => write!(f, "{} B", self.0),
            1024..1_048_576 => write!(f, "{:.1} KiB", scaled(10)),
            1_048_576..1_073_741_824 => write!(f, "{:.1} MiB", scaled(20)),
            _ => write!(f, "{:.2} GiB", scaled(30)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_print_at_a_readable_scale() {
        assert_eq!(Bytes(512).to_string(), "512 B");
        assert_eq!(Bytes(1536).to_string(), "1.5 KiB");
        assert_eq!(Bytes(64 << 20).to_string(), "64.0 MiB");
        assert_eq!(Bytes(3 << 30).to_string(), "3.00 GiB");
    }

    #[test]
    fn bytes_saturate() {
        assert_eq!(Bytes::of(usize::MAX, 4), Bytes(u64::MAX));
        assert_eq!(Bytes(u64::MAX) + Bytes(1), Bytes(u64::MAX));
    }
}
