//! The identity of a block and of a copy between two blocks.
//!
//! An index alone cannot tell a block from its successor in the same place, so a [`BlockId`] carries
//! a generation, which rises each time the block is taken fresh. Tables store bare indices: an
//! entry of a live table holds its block, so its generation cannot have moved.

use std::fmt;

/// A block at one point of its life: a place in the pool and how often that place was taken fresh.
///
/// Invariants: two blocks handed out at different times differ, until the generation of one place
/// wraps after 2^32 uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId {
    index: u32,
    generation: u32,
}

impl BlockId {
    pub(crate) const fn new(index: u32, generation: u32) -> Self {
        Self { index, generation }
    }

    /// The place in the pool, which is the page number that kernels see.
    #[must_use]
    pub const fn index(self) -> u32 {
        self.index
    }

    /// How often that place had been taken fresh.
    #[must_use]
    pub const fn generation(self) -> u32 {
        self.generation
    }
}

impl fmt::Display for BlockId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {} of generation {}", self.index, self.generation)
    }
}

/// One whole-block copy of keys and values that the engine owes the cache.
///
/// Units: `from` and `to` are page numbers. They name pages of one pool, except in a swap plan,
/// where one side is a page of the host pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockCopy {
    /// The page to read.
    pub from: u32,
    /// The page to write.
    pub to: u32,
}
