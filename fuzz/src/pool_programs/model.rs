//! The allocator as one would explain it: plain lists, searched from the front.
//!
//! It keeps whole prefixes as keys instead of hashes, and the age order as a list. Every taken block is
//! checked against the rule: blocks without cached contents first, then the one unheld longest.

use std::collections::{BTreeMap, BTreeSet};

use attn_paged::ErrorKind;

pub(super) type Tokens = Vec<u32>;

/// A whole prefix within a namespace.
type Key = (bool, Tokens);

/// A sequence.
#[derive(Debug, Clone)]
pub(super) struct Seq {
    pub(super) tokens: Tokens,
    pub(super) namespace: bool,
    pub(super) blocks: Vec<u32>,
}

/// Sequences on the host: their tables name places in the list of the group's blocks.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) blocks: usize,
    seqs: Vec<Seq>,
}

#[derive(Debug)]
pub(super) struct Model {
    size: usize,
    cache: bool,
    width: Option<usize>,
    reserve: usize,
    seqs: Vec<Seq>,
    holders: Vec<u32>,
    /// Unheld blocks without cached contents.
    blank: BTreeSet<u32>,
    /// Unheld blocks with cached contents, unheld longest first.
    parked: Vec<u32>,
    /// The blocks of each cached prefix, in order of commit.
    cached: BTreeMap<Key, Vec<u32>>,
    key_of: BTreeMap<u32, Key>,
    forgetful: bool,
}

impl Model {
    pub(super) fn new(
        blocks: usize,
        size: usize,
        cache: bool,
        width: Option<usize>,
        reserve: usize,
    ) -> Self {
        Self {
            size,
            cache,
            width,
            reserve,
            seqs: Vec::new(),
            holders: vec![0; blocks],
            blank: (0..).take(blocks).collect(),
            parked: Vec::new(),
            cached: BTreeMap::new(),
            key_of: BTreeMap::new(),
            forgetful: false,
        }
    }

    pub(super) fn size(&self) -> usize {
        self.size
    }

    pub(super) fn free_blocks(&self) -> usize {
        self.blank.len() + self.parked.len()
    }

    pub(super) fn parked(&self) -> usize {
        self.parked.len()
    }

    pub(super) fn shared(&self) -> usize {
        self.holders.iter().filter(|n| **n > 1).count()
    }

    pub(super) fn seqs(&self) -> &[Seq] {
        &self.seqs
    }

    pub(super) fn seq(&self, at: usize) -> &Seq {
        &self.seqs[at]
    }

    pub(super) fn holders(&self, at: usize) -> Vec<u32> {
        self.seqs[at].blocks.iter().map(|block| self.holders[*block as usize]).collect()
    }

    /// Whether there were ever more prefixes without a block, but with longer ones cached, than there
    /// are blocks. The allocator remembers no more of them than that.
    pub(super) fn forgetful(&self) -> bool {
        self.forgetful
    }

    /// Slots of held blocks that no sequence fills.
    pub(super) fn wasted_slots(&self) -> usize {
        let mut filled = BTreeMap::new();
        for seq in &self.seqs {
            for (at, block) in seq.blocks.iter().enumerate() {
                let fill = self.size.min(seq.tokens.len() - at * self.size);
                let most: &mut usize = filled.entry(*block).or_default();
                *most = fill.max(*most);
            }
        }
        filled.values().map(|fill| self.size - fill).sum()
    }

    /// The cached blocks that a new sequence of these tokens would start with.
    pub(super) fn chain(&self, tokens: &[u32], namespace: bool) -> Vec<u32> {
        let usable = tokens.len().saturating_sub(1) / self.size;
        let prefixes = (1..=usable).map(|n| (namespace, tokens[..n * self.size].to_vec()));
        prefixes.map_while(|key| self.cached.get(&key).map(|blocks| blocks[0])).collect()
    }

    /// The blocks that an alloc would reuse, or why it must fail.
    pub(super) fn plan_alloc(
        &self,
        tokens: &[u32],
        namespace: bool,
    ) -> Result<Vec<u32>, ErrorKind> {
        let total = tokens.len().div_ceil(self.size);
        self.check_width(total)?;
        let hits = self.chain(tokens, namespace);
        let revived = hits.iter().filter(|block| self.holders[**block as usize] == 0).count();
        self.check_admission(total - hits.len() + revived)?;
        Ok(hits)
    }

    pub(super) fn alloc(&mut self, tokens: Tokens, namespace: bool, hits: &[u32], blocks: &[u32]) {
        assert_eq!(blocks.len(), tokens.len().div_ceil(self.size));
        assert_eq!(&blocks[..hits.len()], hits);
        for block in hits {
            self.hold(*block);
        }
        for block in &blocks[hits.len()..] {
            self.take(*block);
        }
        self.seqs.push(Seq { tokens, namespace, blocks: blocks.to_vec() });
    }

    /// Why an append of so many tokens must fail, if it must.
    pub(super) fn plan_append(&self, at: usize, count: usize) -> Result<(), ErrorKind> {
        if count == 0 {
            return Ok(());
        }
        let seq = &self.seqs[at];
        let total = (seq.tokens.len() + count).div_ceil(self.size);
        self.check_width(total)?;
        let copies = usize::from(self.shared_tail(at).is_some());
        if total - seq.blocks.len() + copies > self.free_blocks() {
            return Err(ErrorKind::OutOfBlocks);
        }
        Ok(())
    }

    /// Appends, given the table afterwards; returns the copy that is owed.
    pub(super) fn append(
        &mut self,
        at: usize,
        tokens: &[u32],
        blocks: &[u32],
    ) -> Option<(u32, u32)> {
        if tokens.is_empty() {
            return None;
        }
        let mut table = self.seqs[at].blocks.clone();
        let mut copy = None;
        if let Some(from) = self.shared_tail(at) {
            let to = blocks[table.len() - 1];
            self.take(to);
            self.put_back(from);
            table.pop();
            table.push(to);
            copy = Some((from, to));
        } else if !self.seqs[at].tokens.len().is_multiple_of(self.size) {
            self.uncache(table[table.len() - 1]);
        }
        assert_eq!(&blocks[..table.len()], table);
        for block in &blocks[table.len()..] {
            self.take(*block);
        }
        let seq = &mut self.seqs[at];
        seq.blocks = blocks.to_vec();
        seq.tokens.extend_from_slice(tokens);
        copy
    }

    /// Refuses a count past the length of a sequence.
    pub(super) fn check_length(&self, at: usize, n: usize) -> Result<(), ErrorKind> {
        if n > self.seqs[at].tokens.len() { Err(ErrorKind::InvalidArgument) } else { Ok(()) }
    }

    pub(super) fn commit(&mut self, at: usize, n: usize) {
        let seq = self.seqs[at].clone();
        for (i, block) in seq.blocks.iter().enumerate().take(n / self.size) {
            let key = (seq.namespace, seq.tokens[..(i + 1) * self.size].to_vec());
            match self.key_of.get(block) {
                _ if !self.cache => {}
                Some(known) => assert_eq!(*known, key, "block {block} is known as another prefix"),
                None => {
                    self.key_of.insert(*block, key.clone());
                    self.cached.entry(key).or_default().push(*block);
                }
            }
        }
    }

    pub(super) fn fork(&mut self, at: usize) {
        let seq = self.seqs[at].clone();
        for block in &seq.blocks {
            self.hold(*block);
        }
        self.seqs.push(seq);
    }

    pub(super) fn truncate(&mut self, at: usize, n: usize) {
        let keep = n.div_ceil(self.size);
        let seq = &mut self.seqs[at];
        seq.tokens.truncate(n);
        for block in seq.blocks.split_off(keep).into_iter().rev() {
            self.put_back(block);
        }
    }

    pub(super) fn free(&mut self, at: usize) {
        for block in self.seqs.remove(at).blocks.into_iter().rev() {
            self.put_back(block);
        }
    }

    /// Why these sequences cannot be moved to a host with so many free blocks, if they cannot.
    pub(super) fn plan_swap_out(&self, picked: &[usize], host: usize) -> Result<(), ErrorKind> {
        if picked.len() == 2 && picked[0] == picked[1] {
            return Err(ErrorKind::InvalidArgument);
        }
        if self.group(picked).blocks > host { Err(ErrorKind::OutOfBlocks) } else { Ok(()) }
    }

    pub(super) fn swap_out(&mut self, picked: &[usize]) -> Group {
        let group = self.group(picked);
        for at in picked {
            for block in self.seqs[*at].blocks.clone().into_iter().rev() {
                self.put_back(block);
            }
        }
        let mut at = 0;
        self.seqs.retain(|_| {
            at += 1;
            !picked.contains(&(at - 1))
        });
        group
    }

    pub(super) fn plan_swap_in(&self, group: &Group) -> Result<(), ErrorKind> {
        self.check_admission(group.blocks)
    }

    /// Brings a group back onto these fresh blocks.
    pub(super) fn swap_in(&mut self, group: &Group, fresh: &[u32]) {
        assert_eq!(fresh.len(), group.blocks);
        for block in fresh {
            self.take(*block);
            self.holders[*block as usize] = 0;
        }
        for seq in &group.seqs {
            let blocks: Vec<_> = seq.blocks.iter().map(|place| fresh[*place as usize]).collect();
            for block in &blocks {
                self.holders[*block as usize] += 1;
            }
            self.seqs.push(Seq { blocks, ..seq.clone() });
        }
    }

    fn group(&self, picked: &[usize]) -> Group {
        let mut blocks: Vec<u32> = Vec::new();
        let mut place = |block: &u32| {
            let known = blocks.iter().position(|b| b == block).unwrap_or_else(|| {
                blocks.push(*block);
                blocks.len() - 1
            });
            u32::try_from(known).expect("small")
        };
        let mut seqs = Vec::new();
        for at in picked {
            let seq = &self.seqs[*at];
            seqs.push(Seq { blocks: seq.blocks.iter().map(&mut place).collect(), ..seq.clone() });
        }
        Group { blocks: blocks.len(), seqs }
    }

    fn check_width(&self, blocks: usize) -> Result<(), ErrorKind> {
        let fits = self.width.is_none_or(|width| blocks <= width);
        if fits { Ok(()) } else { Err(ErrorKind::InvalidArgument) }
    }

    fn check_admission(&self, blocks: usize) -> Result<(), ErrorKind> {
        let fits = blocks + self.reserve <= self.free_blocks() || blocks == 0;
        if fits { Ok(()) } else { Err(ErrorKind::OutOfBlocks) }
    }

    /// The partly filled last block, where others hold it too.
    fn shared_tail(&self, at: usize) -> Option<u32> {
        let seq = &self.seqs[at];
        let partial = !seq.tokens.len().is_multiple_of(self.size);
        let tail = seq.blocks.last().copied().filter(|_| partial);
        tail.filter(|block| self.holders[*block as usize] > 1)
    }

    fn take(&mut self, block: u32) {
        assert_eq!(self.holders[block as usize], 0, "block {block} is held");
        if self.blank.is_empty() {
            assert_eq!(self.parked.first(), Some(&block), "not the block unheld longest");
            self.parked.remove(0);
            self.uncache(block);
        } else {
            assert!(self.blank.remove(&block), "block {block} taken before blank ones");
        }
        self.holders[block as usize] = 1;
    }

    fn hold(&mut self, block: u32) {
        if self.holders[block as usize] == 0 {
            self.parked.retain(|parked| *parked != block);
        }
        self.holders[block as usize] += 1;
    }

    fn put_back(&mut self, block: u32) {
        self.holders[block as usize] -= 1;
        if self.holders[block as usize] > 0 {
            return;
        }
        if self.key_of.contains_key(&block) {
            self.parked.push(block);
        } else {
            self.blank.insert(block);
        }
    }

    fn uncache(&mut self, block: u32) {
        let Some(key) = self.key_of.remove(&block) else { return };
        let blocks = self.cached.get_mut(&key).expect("a known block is listed");
        blocks.retain(|listed| *listed != block);
        if blocks.is_empty() {
            self.cached.remove(&key);
        }
        self.forgetful |= self.bare_prefixes() > self.holders.len();
    }

    /// Prefixes without a block of which a longer one is cached.
    fn bare_prefixes(&self) -> usize {
        let mut bare = BTreeSet::new();
        for (namespace, tokens) in self.cached.keys() {
            for end in (self.size..tokens.len()).step_by(self.size) {
                let key = (*namespace, tokens[..end].to_vec());
                if !self.cached.contains_key(&key) {
                    bare.insert(key);
                }
            }
        }
        bare.len()
    }
}
