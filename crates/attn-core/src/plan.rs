//! The outcome of selection: which kernel, how, why, and why not the others.
//!
//! The invariant: a plan holds everything an engine needs besides the data, and everything a person
//! needs to understand the choice. An engine executes a plan and never picks; it may refuse.

use std::fmt;

use crate::dtype::DType;
use crate::kernel::{DimRule, Engine, Family, Feature};
use crate::problem::{Pass, Phase, Problem};
use crate::units::Bytes;

/// Query rows and keys of one tile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tile {
    /// Query rows.
    pub q: usize,
    /// Keys.
    pub kv: usize,
}

/// How the keys of a sequence are divided among workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Split {
    /// Not at all.
    Whole,
    /// In chunks of this many keys, the last one shorter.
    Chunks(usize),
    /// In at most this many nearly equal parts, whatever the length; 0 counts as 1.
    Parts(usize),
    /// In nearly equal parts, at most so many, of so many keys at least: what a sequence of any length can be cut into by its
    /// own length alone. 0 of either counts as 1.
    Between {
        /// Most parts.
        parts: usize,
        /// Fewest keys of a part; a shorter sequence is one.
        keys: usize,
    },
}

impl Split {
    /// Keys of one part of a sequence of `kv_len` keys, at least 1.
    #[must_use]
    pub const fn keys(self, kv_len: usize) -> usize {
        let keys = match self {
            Self::Whole => kv_len,
            Self::Chunks(keys) => keys,
            Self::Parts(parts) => kv_len.div_ceil(if parts == 0 { 1 } else { parts }),
            Self::Between { parts, keys } => {
                let even = kv_len.div_ceil(if parts == 0 { 1 } else { parts });
                if even > keys { even } else { keys }
            }
        };
        if keys == 0 { 1 } else { keys }
    }

    /// Parts of a sequence of `kv_len` keys; at least 1, so that an empty sequence is written too.
    #[must_use]
    pub const fn parts(self, kv_len: usize) -> usize {
        let parts = kv_len.div_ceil(self.keys(kv_len));
        if parts == 0 { 1 } else { parts }
    }
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Whole => f.write_str("whole"),
            Self::Chunks(keys) => write!(f, "chunks of {keys} keys"),
            Self::Parts(parts) => write!(f, "{parts} parts"),
            Self::Between { parts, keys } => {
                write!(f, "at most {parts} parts of {keys} keys or more")
            }
        }
    }
}

/// Why a kernel was not taken.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Refusal {
    /// Switched off by the caller.
    Disabled,
    /// Its engine is not on this machine.
    NoDevice(Engine),
    /// The device is too old.
    Compute {
        /// Lowest compute capability.
        needs: (u32, u32),
        /// The device's.
        has: (u32, u32),
    },
    /// The device is too new for instructions of one architecture.
    ComputePast {
        /// Highest compute capability.
        takes: (u32, u32),
        /// The device's.
        has: (u32, u32),
    },
    /// It computes the other pass.
    Pass(Pass),
    /// The caller forced another kind of kernel.
    Phase(Phase),
    /// A type it does not take.
    DType {
        /// `q` or `kv`.
        operand: &'static str,
        /// The problem's type.
        got: DType,
    },
    /// A head dimension it does not take.
    Dim {
        /// `head_dim` or `value_dim`.
        field: &'static str,
        /// What it takes.
        takes: DimRule,
        /// The problem's.
        got: usize,
    },
    /// A sequence with more query rows than it takes.
    QueryRows {
        /// Most rows.
        most: usize,
        /// The problem's longest.
        got: usize,
    },
    /// Something it cannot be asked for.
    Feature(Feature),
    /// Something it has to be asked for.
    Requires(Feature),
    /// It would work, but another is expected to be faster: the measured or modelled reason.
    Slower(&'static str),
    /// It would work; a more special kernel was taken first.
    Outranked {
        /// The kernel that was taken.
        by: &'static str,
    },
    /// It would work, but is not there for every batch that a sequence may be part of, so it cannot promise
    /// bits that do not depend on the batch unless its phase is forced.
    NotInEveryBatch,
    /// It needs more shared memory than a block may have.
    SharedMemory {
        /// Bytes needed.
        needs: Bytes,
        /// Bytes there are.
        has: Bytes,
    },
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disabled => f.write_str("switched off by the caller"),
            Self::NoDevice(engine) => write!(f, "no {engine} device"),
            Self::Compute { needs, has } => write!(
                f,
                "needs compute capability {}.{}, the device has {}.{}",
                needs.0, needs.1, has.0, has.1
            ),
            Self::ComputePast { takes, has } => write!(
                f,
                "made for compute capability {}.{}, the device has {}.{}",
                takes.0, takes.1, has.0, has.1
            ),
            Self::Pass(Pass::Forward) => f.write_str("computes the forward pass only"),
            Self::Pass(Pass::Backward) => f.write_str("computes the backward pass only"),
            Self::Phase(phase) => write!(f, "the caller asked for a {} kernel", phase.name()),
            Self::DType { operand, got } => write!(f, "does not take {operand} in {got}"),
            Self::Dim { field, takes, got } => write!(f, "takes {field} {takes}, got {got}"),
            Self::QueryRows { most, got } => {
                write!(f, "takes at most {most} query rows a sequence, got {got}")
            }
            Self::Feature(feature) => write!(f, "cannot do: {feature}"),
            Self::Requires(feature) => write!(f, "made for calls with: {feature}"),
            Self::Slower(why) => f.write_str(why),
            Self::Outranked { by } => write!(f, "{by} is more special and took it"),
            Self::NotInEveryBatch => f.write_str(
                "is not there for every batch; a batch-invariant call gets it by asking for its phase",
            ),
            Self::SharedMemory { needs, has } => {
                write!(f, "needs {needs} of shared memory, a block may have {has}")
            }
        }
    }
}

/// A kernel that was considered and not taken.
#[derive(Debug, Clone, PartialEq)]
pub struct Reject {
    /// Its name.
    pub kernel: &'static str,
    /// Why.
    pub why: Refusal,
}

impl fmt::Display for Reject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kernel, self.why)
    }
}

/// Which kernel runs a problem, how, and why.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The problem that was planned.
    pub problem: Problem,
    /// The kernel's name.
    pub kernel: &'static str,
    /// Who runs it.
    pub engine: Engine,
    /// How it divides its work.
    pub family: Family,
    /// Tile sizes.
    pub tile: Tile,
    /// Division of the keys.
    pub split: Split,
    /// Scratch that the run needs beyond inputs and outputs.
    pub workspace: Bytes,
    /// Shared memory of one block; 0 on the CPU.
    pub shared_memory: Bytes,
    /// Why this kernel.
    pub reason: &'static str,
    /// Every kernel that was considered before and after it, in catalogue order.
    pub rejects: Vec<Reject>,
}

impl fmt::Display for Plan {
    /// One line; the refused kernels are listed by the selector's `explain`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} ({}, {}): tile {}x{}, keys {}, workspace {}: {}",
            self.kernel,
            self.engine,
            self.family,
            self.tile.q,
            self.tile.kv,
            self.split,
            self.workspace,
            self.reason
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_covers_every_key_once() {
        for split in [
            Split::Whole,
            Split::Chunks(5),
            Split::Chunks(0),
            Split::Parts(3),
            Split::Parts(40),
            Split::Parts(0),
            Split::Parts(usize::MAX),
            Split::Between { parts: 3, keys: 4 },
            Split::Between { parts: 0, keys: 0 },
        ] {
            for kv_len in 0..30 {
                let (keys, parts) = (split.keys(kv_len), split.parts(kv_len));
                assert!(parts >= 1 && keys >= 1);
                assert!(keys * parts >= kv_len, "{split} {kv_len}");
                assert!(kv_len == 0 || keys * (parts - 1) < kv_len, "{split} {kv_len}");
            }
        }
        assert_eq!(Split::Whole.parts(30), 1);
        assert_eq!(Split::Parts(3).parts(30), 3);
    }

    #[test]
    fn refusals_say_expected_and_got() {
        let dim = Refusal::Dim {
            field: "head_dim",
            takes: DimRule { min: 8, max: 256, multiple_of: 8 },
            got: 260,
        };
        assert_eq!(dim.to_string(), "takes head_dim multiples of 8 from 8 to 256, got 260");
        let rows = Refusal::QueryRows { most: 16, got: 64 };
        assert_eq!(rows.to_string(), "takes at most 16 query rows a sequence, got 64");
    }
}
