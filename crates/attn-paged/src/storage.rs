//! Storage that is sized once: the fallible way to make it, and the tokens that each block holds.
//!
//! Blocks keep their own tokens, in one flat array, instead of each sequence keeping its list: forks
//! and prefix hits then share tokens along with blocks, and a prefix lookup compares against memory
//! that cannot have been freed. `vec![x; n]` is avoided for sizes that a caller chooses, because it
//! aborts where this returns an error.

use crate::error::Error;

/// `len` copies of `value`.
///
/// # Errors
/// [`Error::OutOfMemory`].
pub(crate) fn filled<T: Clone>(what: &'static str, len: usize, value: T) -> Result<Vec<T>, Error> {
    let mut storage = Vec::new();
    storage
        .try_reserve_exact(len)
        .map_err(|_| Error::OutOfMemory { what, got: len.saturating_mul(size_of::<T>()) })?;
    storage.resize(len, value);
    Ok(storage)
}

/// The tokens of every block. Slots that no sequence reaches keep what they last held.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone, PartialEq))]
pub(crate) struct Contents {
    tokens: Vec<u32>,
    block_size: usize,
}

impl Contents {
    pub(crate) fn new(blocks: usize, block_size: usize) -> Result<Self, Error> {
        const WHAT: &str = "the tokens of all blocks";
        let len = blocks
            .checked_mul(block_size)
            .ok_or(Error::OutOfMemory { what: WHAT, got: usize::MAX })?;
        Ok(Self { tokens: filled(WHAT, len, 0)?, block_size })
    }

    pub(crate) const fn block_size(&self) -> usize {
        self.block_size
    }

    /// All slots of a block.
    pub(crate) fn of(&self, block: u32) -> &[u32] {
        let start = block as usize * self.block_size;
        &self.tokens[start..start + self.block_size]
    }

    /// Writes `tokens` from slot `slot` on; the caller keeps them within the block.
    pub(crate) fn write(&mut self, block: u32, slot: usize, tokens: &[u32]) {
        let start = block as usize * self.block_size + slot;
        self.tokens[start..start + tokens.len()].copy_from_slice(tokens);
    }

    /// Copies the first `count` tokens of one block to another.
    pub(crate) fn copy(&mut self, from: u32, to: u32, count: usize) {
        let start = from as usize * self.block_size;
        self.tokens.copy_within(start..start + count, to as usize * self.block_size);
    }
}
