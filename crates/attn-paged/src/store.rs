//! Blocks together with what they hold: the pool, the tokens, and the prefix cache as one.
//!
//! Invariant: a block leaves the prefix cache before its contents change, and a block that nobody holds
//! is parked exactly when it is in the cache. Both rules span the three parts, so no code outside this
//! file takes, releases or overwrites a block.

use crate::error::{Error, ensure};
use crate::pool::BlockPool;
use crate::prefix::PrefixIndex;
use crate::storage::Contents;

#[derive(Debug)]
#[cfg_attr(test, derive(Clone, PartialEq))]
pub(crate) struct Store {
    pub(crate) pool: BlockPool,
    pub(crate) contents: Contents,
    /// Absent when the prefix cache is off.
    pub(crate) prefix: Option<PrefixIndex>,
    pub(crate) evictions: u64,
}

impl Store {
    /// Takes a block fresh. The caller has compared its whole need with [`BlockPool::free`].
    pub(crate) fn take(&mut self) -> u32 {
        let taken = self.pool.take().expect("the caller counted the free blocks");
        if taken.was_parked {
            self.uncache(taken.index);
            self.evictions += 1;
        }
        taken.index
    }

    /// Takes a block fresh, with these tokens in its first slots.
    pub(crate) fn take_with(&mut self, tokens: &[u32]) -> u32 {
        let block = self.take();
        self.contents.write(block, 0, tokens);
        block
    }

    /// Removes a holder of a block.
    pub(crate) fn put_back(&mut self, block: u32) {
        let keep = self.is_cached(block);
        self.pool.put_back(block, keep);
    }

    /// Writes tokens into a block that one sequence holds; what the cache knew of it is no longer true.
    pub(crate) fn overwrite(&mut self, block: u32, slot: usize, tokens: &[u32]) {
        if self.is_cached(block) {
            self.uncache(block);
        }
        self.contents.write(block, slot, tokens);
    }

    pub(crate) fn is_cached(&self, block: u32) -> bool {
        self.prefix.as_ref().is_some_and(|prefix| prefix.contains(block))
    }

    fn uncache(&mut self, block: u32) {
        if let Some(prefix) = &mut self.prefix {
            prefix.remove(block, &self.contents);
        }
    }

    /// Checks the pool and the cache, given how many tables list each block.
    ///
    /// # Errors
    /// [`Error::Inconsistent`].
    pub(crate) fn audit(&self, listed: &[u32]) -> Result<(), Error> {
        let mut shared = 0;
        for (index, &tables) in (0u32..).zip(listed) {
            ensure("holders of a block", tables as usize, self.pool.holders(index) as usize)?;
            shared += usize::from(tables > 1);
        }
        ensure("shared blocks", shared, self.pool.shared())?;
        let mut places = vec![0usize; listed.len()];
        for &block in self.pool.blank() {
            places[block as usize] += 1;
            ensure("a blank block is not cached", 0, self.is_cached(block).into())?;
        }
        let mut parked = 0;
        for block in self.pool.parked_by_age().take(listed.len() + 1) {
            parked += 1;
            places[block as usize] += 1;
            ensure("a parked block is cached", 1, self.is_cached(block).into())?;
        }
        ensure("parked blocks", self.pool.parked(), parked)?;
        for (&place, &tables) in places.iter().zip(listed) {
            ensure("places of a free block", usize::from(tables == 0), place)?;
        }
        Ok(())
    }
}
