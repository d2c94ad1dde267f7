//! Moving sequences out of the pool and back, as plans: which page to copy where.
//!
//! Invariant: a plan is data and the books are already as if it had been carried out. The engine
//! performs the copies before anything else that it orders after the call, which on one stream is the order
//! of submission. Sequences move in groups, so that blocks they share are copied once and shared again
//! afterwards; moving them one by one would multiply a shared prefix by its holders. Host pages come from
//! a plain [`BlockPool`]: the host keeps bytes and needs no tables.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use crate::allocator::Allocator;
use crate::error::Error;
use crate::namespace::Namespace;
use crate::page::{BlockCopy, BlockId};
use crate::pool::BlockPool;
use crate::table::SeqId;

/// Sequences that are on the host: what [`Allocator::swap_in`] needs to bring them back.
///
/// It holds host pages until it is swapped in or discarded; dropping it leaks them. It can be used
/// once: its host pages are then released, and a second use finds them stale.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone, PartialEq))]
#[must_use = "the host pages of a group that is dropped are never released"]
pub struct SwappedGroup {
    block_size: usize,
    /// The different blocks of the group.
    pages: Vec<BlockId>,
    /// Their tokens, `block_size` each.
    tokens: Vec<u32>,
    sequences: Vec<SwappedSequence>,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone, PartialEq))]
struct SwappedSequence {
    /// Indices into the pages of the group.
    table: Vec<usize>,
    len: usize,
    /// Tokens that were in the prefix cache.
    committed: usize,
    namespace: Arc<[u8]>,
}

/// A plan that moves sequences to the host.
#[derive(Debug)]
pub struct SwapOut {
    /// From pages of the allocator to pages of the host pool.
    pub copies: Vec<BlockCopy>,
    /// The sequences.
    pub group: SwappedGroup,
}

/// A plan that brings sequences back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SwapIn {
    /// From pages of the host pool to pages of the allocator.
    pub copies: Vec<BlockCopy>,
    /// The sequences, in the order in which they were swapped out.
    pub sequences: Vec<Returned>,
}

/// A sequence that is back, under a new handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Returned {
    /// The handle.
    pub seq: SeqId,
    /// Tokens that may be committed again once the copies are done.
    pub committed: usize,
}

impl SwappedGroup {
    /// Host pages that the group holds.
    #[must_use]
    pub fn pages(&self) -> usize {
        self.pages.len()
    }

    /// Gives up the sequences and releases their host pages.
    ///
    /// # Errors
    /// [`Error::StaleBlock`], [`Error::BlockNotHeld`] or [`Error::OutOfRange`] if the group was used
    /// before or belongs to another pool.
    pub fn discard(&self, host: &mut BlockPool) -> Result<(), Error> {
        self.pages.iter().try_for_each(|&page| host.check(page))?;
        self.pages.iter().try_for_each(|&page| host.release(page).map(drop))
    }
}

impl Allocator {
    /// Moves sequences to the host: their handles end, their blocks are given back, and the plan says
    /// which pages to copy. Blocks in the prefix cache stay matchable until they are taken.
    ///
    /// # Errors
    /// A stale or foreign handle; [`Error::DuplicateSequence`]; [`Error::OutOfBlocks`] of the host.
    pub fn swap_out(&mut self, seqs: &[SeqId], host: &mut BlockPool) -> Result<SwapOut, Error> {
        let size = self.config.block_size();
        let mut places = HashMap::<u32, usize>::new();
        let mut blocks = Vec::new();
        let mut sequences = Vec::with_capacity(seqs.len());
        let mut named = HashSet::with_capacity(seqs.len());
        for &seq in seqs {
            if !named.insert(seq) {
                return Err(Error::DuplicateSequence { got: seq });
            }
            let sequence = self.sequences.get(seq)?;
            let place = |&block: &u32| {
                *places.entry(block).or_insert_with(|| {
                    blocks.push(block);
                    blocks.len() - 1
                })
            };
            sequences.push(SwappedSequence {
                table: sequence.blocks.iter().map(place).collect(),
                len: sequence.len,
                committed: (sequence.committed * size).min(sequence.len / size * size),
                namespace: match &self.store.prefix {
                    Some(prefix) => prefix.namespaces.name(sequence.namespace),
                    None => Arc::from(Namespace::DEFAULT.name()),
                },
            });
        }
        if blocks.len() > host.free() {
            return Err(host.out_of_blocks(blocks.len(), 0));
        }

        let mut copies = Vec::with_capacity(blocks.len());
        let mut pages = Vec::with_capacity(blocks.len());
        let mut tokens = Vec::with_capacity(blocks.len() * size);
        for &from in &blocks {
            let page = host.allocate()?;
            copies.push(BlockCopy { from, to: page.index() });
            pages.push(page);
            tokens.extend_from_slice(self.store.contents.of(from));
        }
        for &seq in seqs {
            self.free(seq)?;
        }
        Ok(SwapOut { copies, group: SwappedGroup { block_size: size, pages, tokens, sequences } })
    }

    /// Brings sequences back from the host onto fresh blocks, and releases their host pages.
    ///
    /// Nothing is committed: the keys and values arrive with the copies, and the caller commits
    /// [`Returned::committed`] tokens after these. A group that fails to come back stays as it was.
    ///
    /// # Errors
    /// [`Error::Invalid`] for another block size; [`Error::TableWidth`]; [`Error::OutOfBlocks`], which
    /// leaves the reserve untouched; [`Error::StaleBlock`], [`Error::BlockNotHeld`] or
    /// [`Error::OutOfRange`] if the group was used before or belongs to another host pool.
    pub fn swap_in(&mut self, group: &SwappedGroup, host: &mut BlockPool) -> Result<SwapIn, Error> {
        let size = self.config.block_size();
        if group.block_size != size {
            return Err(Error::invalid("block_size", size.to_string(), group.block_size));
        }
        for sequence in &group.sequences {
            self.config.check_width(sequence.table.len())?;
        }
        self.sequences.check_room(group.sequences.len())?;
        self.check_admission(group.pages.len())?;
        group.discard(host)?;

        let blocks: Vec<u32> =
            group.tokens.chunks_exact(size).map(|tokens| self.store.take_with(tokens)).collect();
        let copies = group.pages.iter().zip(&blocks);
        let copies = copies.map(|(page, &to)| BlockCopy { from: page.index(), to }).collect();
        // Taking a block made one holder, which the first table that lists it stands for.
        let mut listed = vec![false; blocks.len()];
        let mut sequences = Vec::with_capacity(group.sequences.len());
        for swapped in &group.sequences {
            let mut table = Vec::with_capacity(swapped.table.len());
            for &place in &swapped.table {
                let block = blocks[place];
                if std::mem::replace(&mut listed[place], true) {
                    self.store.pool.hold(block);
                }
                table.push(block);
            }
            let namespace = self.enter_namespace(Namespace::new(&swapped.namespace));
            let (seq, sequence) = self.sequences.open(&mut table);
            (sequence.len, sequence.committed, sequence.namespace) = (swapped.len, 0, namespace);
            sequences.push(Returned { seq, committed: swapped.committed });
        }
        Ok(SwapIn { copies, sequences })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, ErrorKind};

    const NS: Namespace<'static> = Namespace::new(b"adapter");

    fn forked() -> (Allocator, [SeqId; 2]) {
        let mut pool = Allocator::new(Config::new(8, 4)).unwrap();
        let a = pool.alloc(&[1, 2, 3, 4, 5, 6, 7, 8, 9], NS).unwrap().seq;
        pool.commit(a, 9).unwrap();
        let b = pool.fork(a).unwrap();
        pool.append(b, &[10, 11]).unwrap();
        (pool, [a, b])
    }

    #[test]
    fn swap_brings_back_tokens_sharing_and_commits() {
        let (mut pool, [a, b]) = forked();
        let tokens = |pool: &Allocator, seq| pool.tokens(seq).unwrap().collect::<Vec<_>>();
        let before = [tokens(&pool, a), tokens(&pool, b)];
        let mut host = BlockPool::new(4).unwrap();
        let out = pool.swap_out(&[a, b], &mut host).unwrap();
        // Two shared blocks and two tails.
        assert_eq!((out.copies.len(), out.group.pages(), host.free()), (4, 4, 0));
        assert_eq!((pool.free_blocks(), pool.sequences().count()), (8, 0));
        assert_eq!(pool.free(a).unwrap_err().kind(), ErrorKind::NotFound);

        // Others use every device block meanwhile.
        let other = pool.alloc(&[77; 32], Namespace::DEFAULT).unwrap().seq;
        let full = pool.clone();
        let err = pool.swap_in(&out.group, &mut host).unwrap_err();
        assert_eq!(err, Error::OutOfBlocks { needed: 4, free: 0, reserve: 0, total: 8 });
        assert!(pool == full && host.free() == 0);
        pool.free(other).unwrap();

        let back = pool.swap_in(&out.group, &mut host).unwrap();
        pool.audit().unwrap();
        assert_eq!((back.copies.len(), host.free(), pool.free_blocks()), (4, 4, 4));
        let [a, b] = [back.sequences[0], back.sequences[1]];
        assert_eq!([tokens(&pool, a.seq), tokens(&pool, b.seq)], before);
        assert_eq!(pool.holders(a.seq).unwrap().collect::<Vec<_>>(), [2, 2, 1]);
        // Each page comes from the host page that its device page went to.
        let there: HashMap<u32, u32> = out.copies.iter().map(|c| (c.from, c.to)).collect();
        assert_eq!(there.len(), 4);
        assert!(back.copies.iter().all(|c| there.values().any(|&to| to == c.from)));
        // Nothing is in the cache until the caller says that the copies are done.
        assert_eq!(pool.match_prefix(&before[0], NS), 0);
        assert_eq!((a.committed, b.committed), (8, 8));
        pool.commit(a.seq, a.committed).unwrap();
        assert_eq!(pool.match_prefix(&before[0], NS), 8);
        assert_eq!(pool.match_prefix(&before[0], Namespace::DEFAULT), 0);
        pool.audit().unwrap();
    }

    #[test]
    fn swap_in_refuses_a_used_group() {
        let (mut pool, seqs) = forked();
        let mut host = BlockPool::new(9).unwrap();
        let out = pool.swap_out(&seqs, &mut host).unwrap();
        pool.swap_in(&out.group, &mut host).unwrap();
        let (before, hosted) = (pool.clone(), host.clone());
        assert_eq!(pool.swap_in(&out.group, &mut host).unwrap_err().kind(), ErrorKind::NotFound);
        host.allocate().unwrap();
        assert!(matches!(
            out.group.discard(&mut host),
            Err(Error::StaleBlock { .. } | Error::BlockNotHeld { .. })
        ));
        assert!(pool == before && host.held() == hosted.held() + 1);
    }

    #[test]
    fn swap_in_refuses_another_block_size_and_a_narrow_table() {
        let (mut pool, seqs) = forked();
        let mut host = BlockPool::new(9).unwrap();
        let out = pool.swap_out(&seqs, &mut host).unwrap();
        let mut other = Allocator::new(Config::new(9, 8)).unwrap();
        let err = other.swap_in(&out.group, &mut host).unwrap_err();
        assert_eq!(err, Error::invalid("block_size", "8", 4));
        let mut narrow = Allocator::new(Config::new(9, 4).table_width(2)).unwrap();
        let err = narrow.swap_in(&out.group, &mut host).unwrap_err();
        assert_eq!(err, Error::TableWidth { expected: 2, got: 3 });
        let mut reserved = Allocator::new(Config::new(9, 4).reserve(6)).unwrap();
        let err = reserved.swap_in(&out.group, &mut host).unwrap_err();
        assert_eq!(err, Error::OutOfBlocks { needed: 4, free: 9, reserve: 6, total: 9 });
        assert_eq!(host.held(), 4);
        out.group.discard(&mut host).unwrap();
        assert_eq!(host.held(), 0);
    }

    #[test]
    fn swap_out_changes_nothing_when_refused() {
        let (mut pool, [a, b]) = forked();
        let mut host = BlockPool::new(3).unwrap();
        let before = (pool.clone(), host.clone());
        let err = pool.swap_out(&[a, b], &mut host).unwrap_err();
        assert_eq!(err, Error::OutOfBlocks { needed: 4, free: 3, reserve: 0, total: 3 });
        let err = pool.swap_out(&[a, a], &mut host).unwrap_err();
        assert_eq!(err, Error::DuplicateSequence { got: a });
        assert!((pool, host) == before);
    }

    #[test]
    fn swap_moves_an_empty_group_and_an_empty_sequence() {
        let mut pool = Allocator::new(Config::new(2, 4).prefix_cache(false)).unwrap();
        let mut host = BlockPool::new(0).unwrap();
        let out = pool.swap_out(&[], &mut host).unwrap();
        assert_eq!(pool.swap_in(&out.group, &mut host).unwrap().sequences, []);
        let empty = pool.alloc(&[], NS).unwrap().seq;
        let out = pool.swap_out(&[empty], &mut host).unwrap();
        let back = pool.swap_in(&out.group, &mut host).unwrap();
        assert_eq!(pool.len(back.sequences[0].seq), Ok(0));
        assert_eq!(back.copies, []);
    }
}
