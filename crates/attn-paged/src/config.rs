//! The options of an allocator, checked once when it is made.
//!
//! A struct with chained setters and not a builder type: every combination is valid to write down, and
//! [`crate::Allocator::new`] is the one place that refuses.

use crate::error::Error;
use crate::prefix::PrefixHash;

/// What an [`crate::Allocator`] manages and how.
///
/// ```
/// use attn_paged::{Allocator, Config};
///
/// // 1000 blocks of 16 tokens; running sequences can always grow by 10 blocks.
/// let pool = Allocator::new(Config::new(1000, 16).reserve(10).table_width(128))?;
/// assert_eq!(pool.config().blocks(), 1000);
/// # Ok::<(), attn_paged::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    blocks: usize,
    block_size: usize,
    prefix_cache: bool,
    hash: PrefixHash,
    table_width: Option<usize>,
    reserve: usize,
}

impl Config {
    /// `blocks` blocks of `block_size` tokens each, with a prefix cache, tables of any width, and no
    /// reserve.
    #[must_use]
    pub const fn new(blocks: usize, block_size: usize) -> Self {
        Self {
            blocks,
            block_size,
            prefix_cache: true,
            hash: PrefixHash::Default,
            table_width: None,
            reserve: 0,
        }
    }

    /// Whether full committed blocks are kept for sequences with the same prefix.
    #[must_use]
    pub const fn prefix_cache(mut self, on: bool) -> Self {
        self.prefix_cache = on;
        self
    }

    /// How prefixes are hashed.
    #[must_use]
    pub const fn hash(mut self, hash: PrefixHash) -> Self {
        self.hash = hash;
        self
    }

    /// The most blocks that one sequence may have.
    #[must_use]
    pub const fn table_width(mut self, blocks: usize) -> Self {
        self.table_width = Some(blocks);
        self
    }

    /// Free blocks that a new sequence must leave, so that running ones can grow before one of them
    /// has to be swapped out.
    #[must_use]
    pub const fn reserve(mut self, blocks: usize) -> Self {
        self.reserve = blocks;
        self
    }

    /// Blocks of the pool.
    #[must_use]
    pub const fn blocks(&self) -> usize {
        self.blocks
    }

    /// Tokens of a block.
    #[must_use]
    pub const fn block_size(&self) -> usize {
        self.block_size
    }

    /// Whether the prefix cache is on.
    #[must_use]
    pub const fn has_prefix_cache(&self) -> bool {
        self.prefix_cache
    }

    /// The hash of prefixes.
    #[must_use]
    pub const fn prefix_hash(&self) -> PrefixHash {
        self.hash
    }

    /// The most blocks of a sequence, if bounded.
    #[must_use]
    pub const fn max_table_width(&self) -> Option<usize> {
        self.table_width
    }

    /// Free blocks that a new sequence must leave.
    #[must_use]
    pub const fn reserved(&self) -> usize {
        self.reserve
    }

    pub(crate) const fn check_width(&self, blocks: usize) -> Result<(), Error> {
        match self.table_width {
            Some(expected) if blocks > expected => Err(Error::TableWidth { expected, got: blocks }),
            _ => Ok(()),
        }
    }
}
