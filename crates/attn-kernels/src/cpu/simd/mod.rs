//! SIMD primitives of the CPU engine: every intrinsic and every unchecked pointer of the crate.
//!
//! Invariant: a [`Simd`] of some [`Level`] exists only where the processor has that level's
//! instructions, and every safe function checks its slice lengths before pointer code runs. So the
//! engine above this module is safe code, and a wrong length is a panic at the boundary, never a
//! stray read.
//!
//! Kernels are written once, generic over [`Lanes`], and compiled three times inside functions that
//! enable the instructions of one level ([`Simd::dispatch`]). The obvious alternative, one
//! hand-written copy for each instruction set, triples the code that can be wrong; compiling the
//! whole crate for the native processor makes binaries that do not start elsewhere.
//!
//! Layout: scores are kept transposed, `[keys, queries]`, with queries along the vector lanes. Then
//! neither K nor V needs a transposing pack (their scalars are broadcast), the row maximum and sum
//! of the softmax become vertical operations, and rescaling O is one multiply in the product that
//! follows. Only Q and O, visited once for a whole pass over the keys, are transposed.
#![expect(
    unsafe_code,
    reason = "intrinsics and unchecked pointers live here, behind checked slices"
)]

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod dropout;
mod lanes;
mod pointwise;
mod portable;
mod product;
mod scattered;
mod softmax;
mod stream;
mod sums;
#[cfg(test)]
mod tests;
mod transpose;
mod widen;

pub(crate) use dropout::DropLanes;
use lanes::Lanes;
pub(crate) use product::{Order, Product, Start};
pub(crate) use scattered::{
    MAX_ROWS, Pass, RowStarts, RowState, Scattered, packed_len, widened_len,
};
pub(crate) use softmax::ColumnState;
pub(crate) use transpose::transpose;
pub(crate) use widen::Widen;

/// Width granularity of the score tiles: every `[rows, width]` tile whose columns are vector lanes
/// has a width that is a multiple of this many f32.
pub(crate) const LANE_GROUP: usize = 16;

/// An instruction-set level of the CPU engine.
///
/// Units: none; ordered from the slowest to the fastest.
/// Example: tests walk [`Level::ALL`] and keep the levels that [`Level::is_available`] accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Plain Rust loops that the compiler may vectorise; the only level of other architectures.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ and VL, besides what [`Level::Avx2`] needs.
    Avx512,
}

impl Level {
    /// Every level, slowest first.
    pub const ALL: [Self; 3] = [Self::Portable, Self::Avx2, Self::Avx512];

    /// The fastest level that this processor has.
    #[must_use]
    pub fn detect() -> Self {
        let mut best = Self::Portable;
        for level in Self::ALL {
            if level.is_available() {
                best = level;
            }
        }
        best
    }

    /// Whether this processor has the level's instructions.
    #[must_use]
    pub fn is_available(self) -> bool {
        match self {
            Self::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(not(target_arch = "x86_64"))]
            Self::Avx2 | Self::Avx512 => false,
        }
    }

    /// The level's name, as printed by reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
        }
    }
}

/// The primitives at one level; a value proves that the processor has that level.
///
/// Invariants: made only by [`Simd::with_level`], which asks the processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Simd {
    level: Level,
}

impl Simd {
    /// The primitives at one chosen level, or `None` where the processor lacks it.
    pub(crate) fn with_level(level: Level) -> Option<Self> {
        level.is_available().then_some(Self { level })
    }

    /// The level of these primitives.
    pub(crate) fn level(self) -> Level {
        self.level
    }

    /// Runs a kernel compiled for this level.
    #[inline]
    fn dispatch<K: Kernel>(self, kernel: K) -> K::Output {
        match self.level {
            Level::Portable => kernel.run(portable::Portable),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a `Simd` of this level was made only after the processor reported AVX2, FMA
            // and F16C.
            Level::Avx2 => unsafe { avx2::run(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a `Simd` of this level was made only after the processor reported AVX-512 F,
            // BW, DQ and VL.
            Level::Avx512 => unsafe { avx512::run(kernel) },
            #[cfg(not(target_arch = "x86_64"))]
            Level::Avx2 | Level::Avx512 => kernel.run(portable::Portable),
        }
    }
}

/// A computation written once over [`Lanes`].
///
/// Invariants: `run` and all that it calls are `#[inline(always)]`, so that their code is generated
/// inside the function that enables the level's instructions.
trait Kernel {
    /// What the computation returns.
    type Output;

    /// Computes with the vectors of one level.
    fn run<L: Lanes>(self, lanes: L) -> Self::Output;
}
