//! A fixed pool of blocks: holders per block, a stack of free ones, and a list of parked ones by age.
//!
//! Invariant: every block is in exactly one of three places: held (at least one holder), on the free
//! stack, or on the parked list (no holder, contents worth keeping). Each move costs a few writes
//! however large the pool is: the parked list is doubly linked through the blocks themselves, where a
//! timestamp per block would need a scan to find the oldest. The free stack hands out the block
//! that was freed last, whose entry is still in the processor's cache.

use crate::error::Error;
use crate::page::BlockId;
use crate::storage::filled;

/// No block: the end of a list.
pub(crate) const NONE: u32 = u32::MAX;

#[derive(Debug, Clone)]
#[cfg_attr(test, derive(PartialEq))]
struct Block {
    holders: u32,
    generation: u32,
    /// Neighbours on the parked list.
    older: u32,
    newer: u32,
}

/// A pool of blocks that are allocated, shared and released one by one, without sequences.
///
/// [`crate::Allocator`] is built on it. Alone it serves where there are no tokens to know of: the
/// host side of a swap, or scratch pages.
///
/// ```
/// use attn_paged::{BlockPool, ErrorKind};
///
/// let mut host = BlockPool::new(2)?;
/// let block = host.allocate()?;
/// host.retain(block)?;
/// assert_eq!(host.release(block)?, 1); // one holder is left
/// assert_eq!(host.release(block)?, 0);
/// assert_eq!(host.release(block).unwrap_err().kind(), ErrorKind::NotFound);
/// assert_eq!((host.free(), host.len()), (2, 2));
/// # Ok::<(), attn_paged::Error>(())
/// ```
#[derive(Debug)]
#[cfg_attr(test, derive(Clone, PartialEq))]
pub struct BlockPool {
    blocks: Vec<Block>,
    /// Free blocks that hold nothing worth keeping; the last is taken first.
    stack: Vec<u32>,
    oldest: u32,
    newest: u32,
    parked: usize,
    /// Blocks with two or more holders.
    shared: usize,
    peak_held: usize,
}

/// A block that was taken fresh.
pub(crate) struct Taken {
    pub(crate) index: u32,
    /// Whether it was parked: its former contents may be known elsewhere.
    pub(crate) was_parked: bool,
}

impl BlockPool {
    /// The most blocks a pool may have: tables name them by `i32`.
    pub const MAX_BLOCKS: usize = i32::MAX as usize;

    /// A pool of `blocks` free blocks. An empty pool is valid and always out of blocks.
    ///
    /// # Errors
    /// [`Error::Invalid`] above [`Self::MAX_BLOCKS`]; [`Error::OutOfMemory`].
    pub fn new(blocks: usize) -> Result<Self, Error> {
        let count = Self::check_count(blocks)?;
        let block = Block { holders: 0, generation: 0, older: NONE, newer: NONE };
        let mut stack = filled("the free stack", blocks, 0)?;
        for (place, index) in stack.iter_mut().zip((0..count).rev()) {
            *place = index;
        }
        Ok(Self {
            blocks: filled("the blocks", blocks, block)?,
            stack,
            oldest: NONE,
            newest: NONE,
            parked: 0,
            shared: 0,
            peak_held: 0,
        })
    }

    /// Takes a free block; its caller is the only holder.
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`].
    pub fn allocate(&mut self) -> Result<BlockId, Error> {
        match self.take() {
            Some(taken) => Ok(self.id(taken.index)),
            None => Err(self.out_of_blocks(1, 0)),
        }
    }

    /// Adds a holder to a held block.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::StaleBlock`] or [`Error::BlockNotHeld`] for a block that is not
    /// there to share; [`Error::Overflow`] at 2^32 holders.
    pub fn retain(&mut self, block: BlockId) -> Result<(), Error> {
        self.check(block)?;
        if self.holders(block.index()) == u32::MAX {
            let most = u64::from(u32::MAX);
            return Err(Error::Overflow { what: "holders", expected: most, got: most + 1 });
        }
        self.hold(block.index());
        Ok(())
    }

    /// Removes a holder and says how many are left; with none left the block is free.
    ///
    /// # Errors
    /// [`Error::BlockNotHeld`] when released once too often, [`Error::StaleBlock`] when the block has
    /// a new life since, [`Error::OutOfRange`] for a block of a larger pool.
    pub fn release(&mut self, block: BlockId) -> Result<u32, Error> {
        self.check(block)?;
        self.put_back(block.index(), false);
        Ok(self.holders(block.index()))
    }

    /// Checks that a block is held and that the handle means its present life.
    ///
    /// # Errors
    /// As for [`Self::retain`].
    pub fn check(&self, block: BlockId) -> Result<(), Error> {
        let entry = self.blocks.get(block.index() as usize).ok_or(Error::OutOfRange {
            what: "block",
            expected: self.blocks.len(),
            got: block.index() as usize,
        })?;
        if entry.generation != block.generation() {
            return Err(Error::StaleBlock { expected: entry.generation, got: block });
        }
        if entry.holders == 0 {
            return Err(Error::BlockNotHeld { got: block });
        }
        Ok(())
    }

    /// Blocks of the pool.
    #[must_use]
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether the pool has no blocks at all.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Blocks that nobody holds.
    #[must_use]
    pub fn free(&self) -> usize {
        self.stack.len() + self.parked
    }

    /// Blocks that somebody holds.
    #[must_use]
    pub fn held(&self) -> usize {
        self.blocks.len() - self.free()
    }

    /// The most blocks that were ever held at once.
    #[must_use]
    pub const fn peak_held(&self) -> usize {
        self.peak_held
    }

    /// Blocks with two or more holders.
    #[must_use]
    pub const fn shared(&self) -> usize {
        self.shared
    }

    /// Blocks that nobody holds but whose contents are kept until they are taken.
    pub(crate) const fn parked(&self) -> usize {
        self.parked
    }

    /// The number of blocks in the width of an index.
    ///
    /// # Errors
    /// [`Error::Invalid`] above [`Self::MAX_BLOCKS`].
    pub(crate) fn check_count(blocks: usize) -> Result<u32, Error> {
        match u32::try_from(blocks) {
            Ok(count) if blocks <= Self::MAX_BLOCKS => Ok(count),
            _ => {
                let expected = format!("at most {}", Self::MAX_BLOCKS);
                Err(Error::invalid("num_blocks", expected, blocks))
            }
        }
    }

    pub(crate) fn id(&self, index: u32) -> BlockId {
        BlockId::new(index, self.blocks[index as usize].generation)
    }

    pub(crate) fn holders(&self, index: u32) -> u32 {
        self.blocks[index as usize].holders
    }

    pub(crate) fn out_of_blocks(&self, needed: usize, reserve: usize) -> Error {
        Error::OutOfBlocks { needed, free: self.free(), reserve, total: self.len() }
    }

    /// Takes the free block freed last or, when there is none, the one parked longest.
    pub(crate) fn take(&mut self) -> Option<Taken> {
        let (index, was_parked) = match self.stack.pop() {
            Some(index) => (index, false),
            None if self.parked > 0 => (self.oldest, true),
            None => return None,
        };
        if was_parked {
            self.unpark(index);
        }
        let block = &mut self.blocks[index as usize];
        block.holders = 1;
        block.generation = block.generation.wrapping_add(1);
        self.peak_held = self.peak_held.max(self.held());
        Some(Taken { index, was_parked })
    }

    /// Adds a holder to a block that is held or parked.
    pub(crate) fn hold(&mut self, index: u32) {
        let holders = self.holders(index);
        if holders == 0 {
            self.unpark(index);
            self.peak_held = self.peak_held.max(self.held());
        }
        self.shared += usize::from(holders == 1);
        self.blocks[index as usize].holders = holders + 1;
    }

    /// Removes a holder of a held block; the last one parks it if its contents are to be kept.
    pub(crate) fn put_back(&mut self, index: u32, keep: bool) {
        let block = &mut self.blocks[index as usize];
        block.holders -= 1;
        match block.holders {
            0 if keep => self.park(index),
            0 => self.stack.push(index),
            1 => self.shared -= 1,
            _ => {}
        }
    }

    fn park(&mut self, index: u32) {
        let older = std::mem::replace(&mut self.newest, index);
        let block = &mut self.blocks[index as usize];
        (block.older, block.newer) = (older, NONE);
        match older {
            NONE => self.oldest = index,
            older => self.blocks[older as usize].newer = index,
        }
        self.parked += 1;
    }

    fn unpark(&mut self, index: u32) {
        let block = &mut self.blocks[index as usize];
        let older = std::mem::replace(&mut block.older, NONE);
        let newer = std::mem::replace(&mut block.newer, NONE);
        match older {
            NONE => self.oldest = newer,
            older => self.blocks[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => self.blocks[newer as usize].older = older,
        }
        self.parked -= 1;
    }

    /// The parked blocks, longest parked first.
    pub(crate) fn parked_by_age(&self) -> impl Iterator<Item = u32> {
        let next = |index: u32| (index != NONE).then_some(index);
        std::iter::successors(next(self.oldest), move |&i| next(self.blocks[i as usize].newer))
    }

    /// The free blocks that hold nothing.
    pub(crate) fn blank(&self) -> &[u32] {
        &self.stack
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_gives_every_block_once() {
        let mut pool = BlockPool::new(5).unwrap();
        let mut taken: Vec<u32> = (0..5).map(|_| pool.allocate().unwrap().index()).collect();
        taken.sort_unstable();
        assert_eq!(taken, [0, 1, 2, 3, 4]);
        let full = pool.clone();
        let err = pool.allocate().unwrap_err();
        assert_eq!(err, Error::OutOfBlocks { needed: 1, free: 0, reserve: 0, total: 5 });
        assert_eq!(pool, full);
        assert_eq!((pool.held(), pool.peak_held()), (5, 5));
    }

    #[test]
    fn pool_rejects_double_release_and_stale_block() {
        let mut pool = BlockPool::new(1).unwrap();
        let first = pool.allocate().unwrap();
        assert_eq!(pool.release(first), Ok(0));
        assert_eq!(pool.release(first), Err(Error::BlockNotHeld { got: first }));
        assert_eq!(pool.retain(first), Err(Error::BlockNotHeld { got: first }));
        let second = pool.allocate().unwrap();
        assert_eq!(second.index(), first.index());
        let stale = Error::StaleBlock { expected: second.generation(), got: first };
        assert_eq!(pool.release(first), Err(stale.clone()));
        assert_eq!(pool.retain(first), Err(stale));
        assert_eq!(pool.held(), 1);
    }

    #[test]
    fn pool_rejects_block_of_larger_pool() {
        let mut large = BlockPool::new(9).unwrap();
        let mut small = BlockPool::new(1).unwrap();
        let far = (0..9).map(|_| large.allocate().unwrap()).last().unwrap();
        small.allocate().unwrap();
        assert_eq!(
            small.release(far),
            Err(Error::OutOfRange { what: "block", expected: 1, got: 8 })
        );
    }

    #[test]
    fn pool_refuses_more_blocks_than_tables_can_name() {
        let err = BlockPool::new(BlockPool::MAX_BLOCKS + 1).unwrap_err();
        assert_eq!(err.kind(), crate::ErrorKind::InvalidArgument);
        assert!(BlockPool::new(usize::MAX).is_err());
    }

    #[test]
    fn pool_takes_blank_blocks_first_then_the_longest_parked() {
        let mut pool = BlockPool::new(4).unwrap();
        for _ in 0..4 {
            pool.take().unwrap();
        }
        pool.put_back(2, true);
        pool.put_back(0, true);
        pool.put_back(3, false);
        pool.put_back(1, true);
        assert_eq!(pool.parked_by_age().collect::<Vec<_>>(), [2, 0, 1]);
        // A block that comes back in between and is parked again is the newest.
        pool.hold(2);
        pool.put_back(2, true);
        let order: Vec<_> =
            std::iter::from_fn(|| pool.take()).map(|t| (t.index, t.was_parked)).collect();
        assert_eq!(order, [(3, false), (0, true), (1, true), (2, true)]);
    }

    #[test]
    fn pool_counts_shared_blocks_and_peak() {
        let mut pool = BlockPool::new(3).unwrap();
        let a = pool.allocate().unwrap();
        let b = pool.allocate().unwrap();
        pool.retain(a).unwrap();
        pool.retain(a).unwrap();
        assert_eq!((pool.shared(), pool.held()), (1, 2));
        assert_eq!(pool.release(a), Ok(2));
        assert_eq!(pool.shared(), 1);
        assert_eq!(pool.release(a), Ok(1));
        assert_eq!(pool.shared(), 0);
        pool.release(a).unwrap();
        pool.release(b).unwrap();
        assert_eq!((pool.held(), pool.peak_held()), (0, 2));
    }
}
