//! The operations on sequences: alloc, append, commit, fork, truncate, free.
//!
//! Invariant: an operation either happens whole or changes nothing. Each one first computes what it
//! needs from shared references, compares that with what there is, and only then writes; no step after the
//! comparison can fail. Undoing half an operation instead would have to restore the age order of the
//! cache too, which is where such code goes wrong.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::config::Config;
use crate::error::{Error, ensure};
use crate::namespace::{DEFAULT_ID, Namespace};
use crate::page::{BlockCopy, BlockId};
use crate::pool::BlockPool;
use crate::prefix::PrefixIndex;
use crate::stats::Counters;
use crate::storage::Contents;
use crate::store::Store;
use crate::table::{SeqId, Sequence, Sequences};

/// A paged KV-cache allocator: a fixed pool of blocks, a table per sequence, a prefix cache.
///
/// It keeps the books and never touches keys or values: the engine writes these into the pages that the
/// tables name, and performs the copies that operations return.
///
/// Units: lengths and counts in tokens unless they say blocks; token ids are `u32`.
/// Invariants: an operation that returns an error has changed nothing; a block is free exactly when no
/// sequence holds it; free and held blocks add up to the pool.
///
/// ```
/// use attn_paged::{Allocator, Config, Namespace};
///
/// let mut pool = Allocator::new(Config::new(8, 4))?;
/// let prompt = [1, 2, 3, 4, 5, 6];
/// let a = pool.alloc(&prompt, Namespace::DEFAULT)?;
/// assert_eq!((a.hit, pool.blocks(a.seq)?), (0, &[0, 1][..]));
///
/// // Once the engine has computed the prompt, its full blocks can serve others.
/// pool.commit(a.seq, prompt.len())?;
/// let b = pool.alloc(&prompt, Namespace::DEFAULT)?;
/// assert_eq!((b.hit, pool.blocks(b.seq)?), (4, &[0, 2][..]));
///
/// // A fork shares all blocks; the first to write into the shared tail gets a copy of it.
/// let c = pool.fork(b.seq)?;
/// let copy = pool.append(c, &[7])?.expect("the tail was shared");
/// assert_eq!((copy.from, copy.to), (2, 3));
/// assert_eq!(pool.append(b.seq, &[8])?, None);
/// # Ok::<(), attn_paged::Error>(())
/// ```
#[cfg_attr(test, derive(Clone, PartialEq))]
pub struct Allocator {
    pub(crate) config: Config,
    pub(crate) store: Store,
    pub(crate) sequences: Sequences,
    pub(crate) counters: Counters,
    /// Table storage between two owners; empty.
    pub(crate) spare: Vec<u32>,
}

/// A new sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allocation {
    /// Its handle.
    pub seq: SeqId,
    /// Leading tokens whose keys and values the prefix cache supplied; a multiple of the block size
    /// and less than the length, so that there is a token left to compute logits from.
    pub hit: usize,
}

/// What a new sequence would take.
#[derive(Default)]
struct Plan {
    hits: usize,
    fresh: usize,
}

impl Allocator {
    /// An allocator of free blocks. A pool of no blocks is valid and always out of blocks.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a block size of 0, more than [`BlockPool::MAX_BLOCKS`] blocks, or a
    /// reserve above the number of blocks; [`Error::OutOfMemory`].
    pub fn new(config: Config) -> Result<Self, Error> {
        static ALLOCATORS: AtomicU32 = AtomicU32::new(0);
        let blocks = config.blocks();
        if config.block_size() == 0 {
            return Err(Error::invalid("block_size", "at least 1", 0));
        }
        if config.reserved() > blocks {
            let expected = format!("at most the {blocks} blocks of the pool");
            return Err(Error::invalid("reserve", expected, config.reserved()));
        }
        BlockPool::check_count(blocks)?;
        // The largest array first: a size that cannot be had is refused before any memory is touched.
        let contents = Contents::new(blocks, config.block_size())?;
        let pool = BlockPool::new(blocks)?;
        let prefix = match config.has_prefix_cache() {
            true => Some(PrefixIndex::new(blocks, config.prefix_hash())?),
            false => None,
        };
        // Only uniqueness matters, so no ordering is needed.
        let number = ALLOCATORS.fetch_add(1, Ordering::Relaxed);
        Ok(Self {
            config,
            store: Store { pool, contents, prefix, evictions: 0 },
            sequences: Sequences::new(number),
            counters: Counters::default(),
            spare: Vec::new(),
        })
    }

    /// Makes a sequence of `tokens`, on cached blocks as far as their prefix is found and on fresh ones
    /// for the rest.
    ///
    /// Fresh blocks are free ones without cached contents first, then the cached ones that nobody has
    /// held for longest. Blocks found in the cache are never taken as fresh by the same call.
    ///
    /// # Errors
    /// [`Error::TableWidth`]; [`Error::OutOfBlocks`], which leaves the reserve untouched;
    /// [`Error::TooManySequences`].
    pub fn alloc(&mut self, tokens: &[u32], namespace: Namespace<'_>) -> Result<Allocation, Error> {
        let mut blocks = std::mem::take(&mut self.spare);
        let plan = match self.plan(tokens, namespace, |block| blocks.push(block)) {
            Ok(plan) => plan,
            Err(error) => {
                blocks.clear();
                self.spare = blocks;
                return Err(error);
            }
        };
        // The hits are held before any block is taken: taking evicts, and must not evict them.
        for &block in &blocks {
            self.store.pool.hold(block);
        }
        let size = self.config.block_size();
        let hit = plan.hits * size;
        blocks.reserve(plan.fresh);
        for tokens in tokens[hit..].chunks(size) {
            blocks.push(self.store.take_with(tokens));
        }
        let namespace = self.enter_namespace(namespace);
        let (seq, sequence) = self.sequences.open(&mut blocks);
        sequence.len = tokens.len();
        sequence.committed = plan.hits;
        sequence.namespace = namespace;
        self.spare = blocks;
        self.counters.admitted(tokens.len(), hit);
        Ok(Allocation { seq, hit })
    }

    /// Whether [`Self::alloc`] of the same arguments would succeed now.
    #[must_use]
    pub fn can_alloc(&self, tokens: &[u32], namespace: Namespace<'_>) -> bool {
        self.plan(tokens, namespace, |_| ()).is_ok()
    }

    /// The tokens that [`Self::alloc`] of the same arguments would find in the cache.
    ///
    /// Looking does not count as use: it changes neither the age of a block nor a statistic.
    #[must_use]
    pub fn match_prefix(&self, tokens: &[u32], namespace: Namespace<'_>) -> usize {
        self.walk(tokens, namespace).count() * self.config.block_size()
    }

    /// Adds tokens to the end of a sequence.
    ///
    /// A partly filled last block that other sequences share is replaced by a fresh one; the returned
    /// copy must be done before the engine writes the new keys and values. If nobody shares it, it
    /// is written in place, and leaves the prefix cache should it have been there (after a
    /// [`Self::truncate`]). Appends may use the reserve.
    ///
    /// # Errors
    /// A stale or foreign handle; [`Error::TableWidth`]; [`Error::OutOfBlocks`].
    pub fn append(&mut self, seq: SeqId, tokens: &[u32]) -> Result<Option<BlockCopy>, Error> {
        let size = self.config.block_size();
        let sequence = self.sequences.get_mut(seq)?;
        if tokens.is_empty() {
            return Ok(None);
        }
        let fill = sequence.len % size;
        // The partly filled last block, if there is one, and whether writing it needs a copy.
        let tail = sequence.blocks.last().copied().filter(|_| fill > 0);
        let copied = tail.filter(|&block| self.store.pool.holders(block) > 1);
        let total = (sequence.len + tokens.len()).div_ceil(size);
        self.config.check_width(total)?;
        let needed = total - sequence.blocks.len() + usize::from(copied.is_some());
        if needed > self.store.pool.free() {
            return Err(self.store.pool.out_of_blocks(needed, 0));
        }

        let (head, rest) = match tail {
            Some(_) => tokens.split_at(tokens.len().min(size - fill)),
            None => tokens.split_at(0),
        };
        let mut copy = None;
        if let Some(from) = copied {
            let to = self.store.take();
            self.store.contents.copy(from, to, fill);
            self.store.put_back(from);
            sequence.blocks.pop();
            sequence.blocks.push(to);
            copy = Some(BlockCopy { from, to });
            self.counters.copies += 1;
        }
        if let Some(&tail) = sequence.blocks.last().filter(|_| fill > 0) {
            self.store.overwrite(tail, fill, head);
            sequence.committed = sequence.committed.min(sequence.len / size);
        }
        for tokens in rest.chunks(size) {
            sequence.blocks.push(self.store.take_with(tokens));
        }
        sequence.len += tokens.len();
        Ok(copy)
    }

    /// Adds one token, as each step of decoding does; the same as [`Self::append`] of a slice of one.
    ///
    /// # Errors
    /// As for [`Self::append`].
    pub fn append_one(&mut self, seq: SeqId, token: u32) -> Result<Option<BlockCopy>, Error> {
        self.append(seq, &[token])
    }

    /// States that the keys and values of the first `tokens` tokens exist: their full blocks enter the
    /// prefix cache.
    ///
    /// A block whose contents are cached already is kept as a duplicate; lookups return the block that
    /// has been in the cache longest.
    ///
    /// # Errors
    /// A stale or foreign handle; [`Error::PastLength`].
    pub fn commit(&mut self, seq: SeqId, tokens: usize) -> Result<(), Error> {
        let sequence = self.sequences.get_mut(seq)?;
        check_length("commit", sequence, tokens)?;
        let Some(prefix) = &mut self.store.prefix else {
            return Ok(());
        };
        let full = tokens / self.config.block_size();
        let mut after = sequence.committed.checked_sub(1).map(|last| sequence.blocks[last]);
        for &block in sequence.blocks.iter().take(full).skip(sequence.committed) {
            if !prefix.contains(block) {
                prefix.insert(block, after, sequence.namespace, &self.store.contents);
            }
            after = Some(block);
        }
        sequence.committed = sequence.committed.max(full);
        Ok(())
    }

    /// Makes a sequence that equals another and shares all its blocks.
    ///
    /// # Errors
    /// A stale or foreign handle; [`Error::TooManySequences`].
    pub fn fork(&mut self, seq: SeqId) -> Result<SeqId, Error> {
        let source = self.sequences.get(seq)?;
        self.sequences.check_room(1)?;
        let Sequence { len, committed, namespace, .. } = *source;
        let mut blocks = std::mem::take(&mut self.spare);
        blocks.extend_from_slice(&source.blocks);
        for &block in &blocks {
            self.store.pool.hold(block);
        }
        if let Some(prefix) = &mut self.store.prefix {
            prefix.namespaces.retain(namespace);
        }
        let (fork, sequence) = self.sequences.open(&mut blocks);
        (sequence.len, sequence.committed, sequence.namespace) = (len, committed, namespace);
        self.spare = blocks;
        Ok(fork)
    }

    /// Cuts a sequence to its first `tokens` tokens and gives back the blocks past them, last first.
    ///
    /// # Errors
    /// A stale or foreign handle; [`Error::PastLength`].
    pub fn truncate(&mut self, seq: SeqId, tokens: usize) -> Result<(), Error> {
        let sequence = self.sequences.get_mut(seq)?;
        check_length("truncate", sequence, tokens)?;
        let keep = tokens.div_ceil(self.config.block_size());
        for block in sequence.blocks.drain(keep..).rev() {
            self.store.put_back(block);
        }
        sequence.len = tokens;
        sequence.committed = sequence.committed.min(keep);
        Ok(())
    }

    /// Ends a sequence and gives back its blocks, last first: what is cached ages from the leaf.
    ///
    /// # Errors
    /// A stale or foreign handle.
    pub fn free(&mut self, seq: SeqId) -> Result<(), Error> {
        let sequence = self.sequences.get(seq)?;
        for &block in sequence.blocks.iter().rev() {
            self.store.put_back(block);
        }
        if let Some(prefix) = &mut self.store.prefix {
            prefix.namespaces.release(sequence.namespace);
        }
        self.sequences.close(seq);
        Ok(())
    }

    /// The options that the allocator was made with.
    #[must_use]
    pub const fn config(&self) -> &Config {
        &self.config
    }

    /// Blocks that no sequence holds, cached ones included.
    #[must_use]
    pub fn free_blocks(&self) -> usize {
        self.store.pool.free()
    }

    /// The length of a sequence.
    ///
    /// # Errors
    /// A stale or foreign handle.
    pub fn len(&self, seq: SeqId) -> Result<usize, Error> {
        self.sequences.get(seq).map(|sequence| sequence.len)
    }

    /// The pages of a sequence, in order.
    ///
    /// # Errors
    /// A stale or foreign handle.
    pub fn blocks(&self, seq: SeqId) -> Result<&[u32], Error> {
        self.sequences.get(seq).map(|sequence| &*sequence.blocks)
    }

    /// How many sequences hold each block of a sequence, this one included.
    ///
    /// # Errors
    /// A stale or foreign handle.
    pub fn holders(&self, seq: SeqId) -> Result<impl Iterator<Item = u32>, Error> {
        let blocks = self.blocks(seq)?;
        Ok(blocks.iter().map(|&block| self.store.pool.holders(block)))
    }

    /// The tokens of a sequence.
    ///
    /// # Errors
    /// A stale or foreign handle.
    pub fn tokens(&self, seq: SeqId) -> Result<impl Iterator<Item = u32>, Error> {
        let Sequence { blocks, len, .. } = self.sequences.get(seq)?;
        Ok(blocks.iter().flat_map(|&block| self.store.contents.of(block)).copied().take(*len))
    }

    /// Leading tokens of a sequence that are in the prefix cache by its own knowledge.
    ///
    /// # Errors
    /// A stale or foreign handle.
    pub fn committed(&self, seq: SeqId) -> Result<usize, Error> {
        let sequence = self.sequences.get(seq)?;
        Ok((sequence.committed * self.config.block_size()).min(sequence.len))
    }

    /// The live sequences, in no order of meaning.
    pub fn sequences(&self) -> impl Iterator<Item = SeqId> {
        self.sequences.iter().map(|(seq, _)| seq)
    }

    /// The present identity of a held block, to be checked later with [`Self::check_block`].
    ///
    /// # Errors
    /// [`Error::OutOfRange`]; [`Error::BlockNotHeld`].
    pub fn block_id(&self, page: u32) -> Result<BlockId, Error> {
        let (expected, got) = (self.config.blocks(), page as usize);
        if got >= expected {
            return Err(Error::OutOfRange { what: "page", expected, got });
        }
        let id = self.store.pool.id(page);
        self.check_block(id)?;
        Ok(id)
    }

    /// Checks that a block is still what it was when its identity was asked for: work that finishes
    /// later, such as a transfer, must not land in a page that has a new owner.
    ///
    /// # Errors
    /// [`Error::OutOfRange`], [`Error::StaleBlock`], [`Error::BlockNotHeld`].
    pub fn check_block(&self, block: BlockId) -> Result<(), Error> {
        self.store.pool.check(block)
    }

    /// Checks all books against one another: holders, free and parked blocks, cached prefixes, names.
    ///
    /// Takes time in proportion to the pool. For tests and for reports of trouble.
    ///
    /// # Errors
    /// [`Error::Inconsistent`], which is a bug of this crate.
    pub fn audit(&self) -> Result<(), Error> {
        let size = self.config.block_size();
        let mut listed = vec![0; self.config.blocks()];
        for (_, sequence) in self.sequences.iter() {
            let blocks = &sequence.blocks;
            ensure("blocks of a sequence", sequence.len.div_ceil(size), blocks.len())?;
            for (at, &block) in blocks.iter().enumerate() {
                listed[block as usize] += 1;
                let known = at < sequence.committed;
                ensure(
                    "a committed block is cached",
                    1,
                    (!known || self.store.is_cached(block)).into(),
                )?;
            }
        }
        let held = listed.iter().filter(|&&tables| tables > 0).count();
        ensure("free and held blocks", self.config.blocks(), self.free_blocks() + held)?;
        self.store.audit(&listed)?;
        match &self.store.prefix {
            Some(prefix) => prefix.audit(self.sequences.iter().map(|(_, s)| s.namespace)),
            None => Ok(()),
        }
    }

    /// Checks that an admission may take `blocks` free blocks.
    pub(crate) fn check_admission(&self, blocks: usize) -> Result<(), Error> {
        let reserve = self.config.reserved();
        if blocks > self.free_blocks().saturating_sub(reserve) {
            return Err(self.store.pool.out_of_blocks(blocks, reserve));
        }
        Ok(())
    }

    pub(crate) fn enter_namespace(&mut self, namespace: Namespace<'_>) -> u32 {
        match &mut self.store.prefix {
            Some(prefix) => prefix.namespaces.enter(namespace),
            None => DEFAULT_ID,
        }
    }

    /// Computes what a new sequence would take and names the cached blocks among it.
    fn plan(
        &self,
        tokens: &[u32],
        namespace: Namespace<'_>,
        mut on_hit: impl FnMut(u32),
    ) -> Result<Plan, Error> {
        let total = tokens.len().div_ceil(self.config.block_size());
        self.config.check_width(total)?;
        self.sequences.check_room(1)?;
        let (mut hits, mut revived) = (0, 0);
        for block in self.walk(tokens, namespace) {
            hits += 1;
            revived += usize::from(self.store.pool.holders(block) == 0);
            on_hit(block);
        }
        let fresh = total - hits;
        self.check_admission(fresh + revived)?;
        Ok(Plan { hits, fresh })
    }

    /// The cached blocks that a sequence of these tokens can use: all but its last token are looked up.
    fn walk<'a>(
        &'a self,
        tokens: &'a [u32],
        namespace: Namespace<'_>,
    ) -> impl Iterator<Item = u32> + use<'a> {
        let tokens = &tokens[..tokens.len().saturating_sub(1)];
        self.store
            .prefix
            .as_ref()
            // PERF: spares short prompts the start of a lookup, 5 of the 55 ns of alloc and free.
            .filter(|_| tokens.len() >= self.config.block_size())
            .and_then(|prefix| {
                let namespace = prefix.namespaces.find(namespace)?;
                Some(prefix.walk(tokens, namespace, &self.store.contents))
            })
            .into_iter()
            .flatten()
    }
}

impl std::fmt::Debug for Allocator {
    /// Totals instead of a million blocks.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Allocator")
            .field("config", &self.config)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

fn check_length(operation: &'static str, sequence: &Sequence, tokens: usize) -> Result<(), Error> {
    if tokens > sequence.len {
        return Err(Error::PastLength { operation, expected: sequence.len, got: tokens });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
