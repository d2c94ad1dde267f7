//! The rules of the pool, once more, in the slowest and plainest form.
//!
//! Every lookup compares whole prefixes, every list is searched, nothing is linked or hashed: what the
//! allocator does with indices is stated here with values. It also takes fresh blocks in the same order,
//! so that tables can be compared entry by entry and an evicted block by its number.

use std::collections::{BTreeMap, HashMap};

use crate::{BlockCopy, Config, ErrorKind};

/// A namespace and a whole prefix.
type Key = (&'static str, Vec<u32>);

#[derive(Clone)]
pub(super) struct ModelSequence {
    pub(super) blocks: Vec<u32>,
    pub(super) tokens: Vec<u32>,
    namespace: &'static str,
}

pub(super) struct Model {
    size: usize,
    cache: bool,
    width: Option<usize>,
    reserve: usize,
    keys: Vec<Option<Key>>,
    /// Cached blocks, those committed first in front.
    committed: Vec<u32>,
    blank: Vec<u32>,
    /// Free cached blocks, those given back first in front.
    pub(super) parked: Vec<u32>,
    pub(super) sequences: BTreeMap<usize, ModelSequence>,
}

impl Model {
    pub(super) fn new(config: &Config) -> Self {
        let blocks = u32::try_from(config.blocks()).unwrap();
        Self {
            size: config.block_size(),
            cache: config.has_prefix_cache(),
            width: config.max_table_width(),
            reserve: config.reserved(),
            keys: vec![None; config.blocks()],
            committed: Vec::new(),
            blank: (0..blocks).rev().collect(),
            parked: Vec::new(),
            sequences: BTreeMap::new(),
        }
    }

    pub(super) fn free_blocks(&self) -> usize {
        self.blank.len() + self.parked.len()
    }

    pub(super) fn holders(&self, block: u32) -> u32 {
        let tables = self.sequences.values().flat_map(|sequence| &sequence.blocks);
        u32::try_from(tables.filter(|&&b| b == block).count()).unwrap()
    }

    /// Slots of held blocks that nobody fills.
    pub(super) fn wasted_slots(&self) -> usize {
        let mut fill = HashMap::<u32, usize>::new();
        for sequence in self.sequences.values() {
            for (tokens, &block) in sequence.tokens.chunks(self.size).zip(&sequence.blocks) {
                let most = fill.entry(block).or_default();
                *most = tokens.len().max(*most);
            }
        }
        fill.values().map(|fill| self.size - fill).sum()
    }

    fn take(&mut self) -> u32 {
        let block = self.blank.pop().unwrap_or_else(|| self.parked.remove(0));
        self.forget(block);
        block
    }

    fn forget(&mut self, block: u32) {
        self.keys[block as usize] = None;
        self.committed.retain(|&b| b != block);
    }

    /// Frees blocks that no table lists any more, in this order.
    fn put_back(&mut self, blocks: impl IntoIterator<Item = u32>) {
        for block in blocks {
            if self.holders(block) > 0 {
                continue;
            }
            if self.keys[block as usize].is_some() {
                self.parked.push(block);
            } else {
                self.blank.push(block);
            }
        }
    }

    fn chain(&self, tokens: &[u32], namespace: &'static str) -> Vec<u32> {
        let mut chain = Vec::new();
        let mut end = self.size;
        while end < tokens.len() {
            let key = Some((namespace, tokens[..end].to_vec()));
            match self.committed.iter().find(|&&block| self.keys[block as usize] == key) {
                Some(&block) => chain.push(block),
                None => break,
            }
            end += self.size;
        }
        chain
    }

    fn check_width(&self, blocks: usize) -> Result<(), ErrorKind> {
        match self.width {
            Some(width) if blocks > width => Err(ErrorKind::InvalidArgument),
            _ => Ok(()),
        }
    }

    fn check_admission(&self, blocks: usize) -> Result<(), ErrorKind> {
        let usable = self.free_blocks().saturating_sub(self.reserve);
        if blocks > usable { Err(ErrorKind::OutOfBlocks) } else { Ok(()) }
    }

    pub(super) fn can_alloc(
        &self,
        tokens: &[u32],
        namespace: &'static str,
    ) -> Result<(), ErrorKind> {
        let total = tokens.len().div_ceil(self.size);
        self.check_width(total)?;
        let hits = self.chain(tokens, namespace);
        let revived = hits.iter().filter(|block| self.parked.contains(block)).count();
        self.check_admission(total - hits.len() + revived)
    }

    pub(super) fn hit(&self, tokens: &[u32], namespace: &'static str) -> usize {
        self.chain(tokens, namespace).len() * self.size
    }

    pub(super) fn alloc(
        &mut self,
        name: usize,
        tokens: &[u32],
        namespace: &'static str,
    ) -> Result<usize, ErrorKind> {
        self.can_alloc(tokens, namespace)?;
        let mut blocks = self.chain(tokens, namespace);
        let hit = blocks.len() * self.size;
        self.parked.retain(|block| !blocks.contains(block));
        while blocks.len() < tokens.len().div_ceil(self.size) {
            blocks.push(self.take());
        }
        self.sequences.insert(name, ModelSequence { blocks, tokens: tokens.to_vec(), namespace });
        Ok(hit)
    }

    pub(super) fn append(
        &mut self,
        name: usize,
        tokens: &[u32],
    ) -> Result<Option<BlockCopy>, ErrorKind> {
        let old = self.sequences[&name].clone();
        let partial = !old.tokens.len().is_multiple_of(self.size) && !tokens.is_empty();
        let tail = old.blocks.last().copied().filter(|_| partial);
        let shared = tail.filter(|&block| self.holders(block) > 1);
        let total = (old.tokens.len() + tokens.len()).div_ceil(self.size);
        self.check_width(total)?;
        let needed = total - old.blocks.len() + shared.iter().count();
        if needed > self.free_blocks() {
            return Err(ErrorKind::OutOfBlocks);
        }
        let mut new = old;
        let mut copy = None;
        if let Some(from) = shared {
            let to = self.take();
            *new.blocks.last_mut().unwrap() = to;
            copy = Some(BlockCopy { from, to });
        } else if let Some(tail) = tail {
            self.forget(tail);
        }
        while new.blocks.len() < total {
            new.blocks.push(self.take());
        }
        new.tokens.extend_from_slice(tokens);
        self.sequences.insert(name, new);
        Ok(copy)
    }

    pub(super) fn commit(&mut self, name: usize, count: usize) -> Result<(), ErrorKind> {
        let sequence = &self.sequences[&name];
        if count > sequence.tokens.len() {
            return Err(ErrorKind::InvalidArgument);
        }
        for (at, &block) in sequence.blocks.iter().take(count / self.size).enumerate() {
            let key = &mut self.keys[block as usize];
            if self.cache && key.is_none() {
                let prefix = &sequence.tokens[..(at + 1) * self.size];
                *key = Some((sequence.namespace, prefix.to_vec()));
                self.committed.push(block);
            }
        }
        Ok(())
    }

    pub(super) fn fork(&mut self, name: usize, fork: usize) {
        let sequence = self.sequences[&name].clone();
        self.sequences.insert(fork, sequence);
    }

    pub(super) fn truncate(&mut self, name: usize, count: usize) -> Result<(), ErrorKind> {
        let sequence = self.sequences.get_mut(&name).unwrap();
        if count > sequence.tokens.len() {
            return Err(ErrorKind::InvalidArgument);
        }
        sequence.tokens.truncate(count);
        let gone = sequence.blocks.split_off(count.div_ceil(self.size));
        self.put_back(gone.into_iter().rev());
        Ok(())
    }

    pub(super) fn free(&mut self, name: usize) {
        let sequence = self.sequences.remove(&name).unwrap();
        self.put_back(sequence.blocks.into_iter().rev());
    }

    /// Out to the host and back; `false` if there was no room to come back to.
    pub(super) fn swap(&mut self, name: usize) -> bool {
        let mut sequence = self.sequences[&name].clone();
        self.free(name);
        let back = self.check_admission(sequence.blocks.len()).is_ok();
        if back {
            sequence.blocks.fill_with(|| self.take());
            self.sequences.insert(name, sequence);
        }
        back
    }
}
