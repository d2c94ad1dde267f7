//! The prefix cache: which blocks hold the keys and values of which whole prefix.
//!
//! Invariant: a block that a lookup returns holds exactly the tokens looked up, after exactly that
//! prefix, in exactly that namespace. A 64-bit chained hash only finds candidates; a match needs equal
//! tokens and the same parent node, and the parent was compared in the same way, so equality holds
//! down to the root. Equality of hashes alone would serve one user's cache to another on a collision.
//!
//! A node stands for one prefix, not for one block: two sequences that computed the same prefix each
//! keep their block (tables never change under a kernel), both hang on the node in order of commit,
//! and chains may run through either. Keying on the parent *block* instead would lose a chain when
//! one of the duplicates in its middle is evicted.
//!
//! A node whose last block is gone while longer prefixes are still cached becomes a ghost: it keeps
//! its own copy of the tokens, matches nothing, and connects its children again if the prefix
//! is committed anew. There are at most as many ghosts as blocks; past that a node is forgotten and its
//! children, whose parent has a new generation, can no longer be found.

use std::collections::HashMap;
use std::slice::ChunksExact;

use crate::error::{Error, ensure};
use crate::namespace::{DEFAULT_ID, Namespaces};
use crate::pool::NONE;
use crate::storage::{Contents, filled};

/// How prefixes are hashed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum PrefixHash {
    /// A chained multiply-and-fold hash, keyed at random per pool: a client that picks tokens cannot
    /// work out offline which of them collide.
    #[default]
    Default,
    /// Every prefix hashes alike. Answers stay right and lookups become slow: for tests.
    Constant,
}

/// A hash of a prefix, extended block by block.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(test, derive(PartialEq))]
enum Hasher {
    Keyed(u64),
    Constant,
}

impl Hasher {
    fn new(hash: PrefixHash) -> Self {
        match hash {
            PrefixHash::Default => {
                let state = std::hash::RandomState::new();
                Self::Keyed(std::hash::BuildHasher::hash_one(&state, 0u8))
            }
            PrefixHash::Constant => Self::Constant,
        }
    }

    fn start(self, namespace: u32) -> u64 {
        match self {
            Self::Keyed(key) => fold(key, u64::from(namespace)),
            Self::Constant => 0,
        }
    }

    fn extend(self, parent: u64, tokens: &[u32]) -> u64 {
        let Self::Keyed(key) = self else { return 0 };
        let (pairs, rest) = tokens.as_chunks::<2>();
        let mut hash = parent ^ key;
        for &[a, b] in pairs {
            hash = fold(hash, u64::from(a) | u64::from(b) << 32);
        }
        rest.iter().fold(hash, |hash, &token| fold(hash, u64::from(token)))
    }
}

/// Both halves of a 128-bit product, folded into 64 bits.
#[expect(clippy::cast_possible_truncation, reason = "the halves are taken apart on purpose")]
const fn fold(hash: u64, word: u64) -> u64 {
    // An odd constant without structure: the fraction of the golden ratio.
    let product = (hash ^ word) as u128 * 0x9e37_79b9_7f4a_7c15_u128;
    product as u64 ^ (product >> 64) as u64
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone, PartialEq))]
struct Node {
    hash: u64,
    /// The node of the prefix one block shorter, or [`NONE`] for a first block.
    parent: u32,
    /// The parent's generation when this node was made; a forgotten parent has a later one.
    parent_generation: u32,
    generation: u32,
    namespace: u32,
    /// Nodes whose live parent this is.
    children: u32,
    /// Blocks that hold this prefix, in order of commit.
    first: u32,
    last: u32,
    /// Neighbours in the hash bucket.
    next: u32,
    previous: u32,
}

/// A block's place in the cache.
#[derive(Debug, Clone)]
#[cfg_attr(test, derive(PartialEq))]
struct Entry {
    node: u32,
    /// Neighbours among the blocks of the node.
    next: u32,
    previous: u32,
}

/// The index from prefixes to blocks. Every operation costs the same however many blocks are cached.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone, PartialEq))]
pub(crate) struct PrefixIndex {
    hasher: Hasher,
    /// The first node of each bucket; the length is a power of two and never changes.
    buckets: Vec<u32>,
    nodes: Vec<Node>,
    vacant: Vec<u32>,
    entries: Vec<Entry>,
    /// Tokens of nodes that have no block.
    ghosts: HashMap<u32, Box<[u32]>>,
    pub(crate) namespaces: Namespaces,
}

impl PrefixIndex {
    pub(crate) fn new(blocks: usize, hash: PrefixHash) -> Result<Self, Error> {
        let entry = Entry { node: NONE, next: NONE, previous: NONE };
        Ok(Self {
            hasher: Hasher::new(hash),
            buckets: filled("the buckets of the prefix cache", blocks.next_power_of_two(), NONE)?,
            nodes: Vec::new(),
            vacant: Vec::new(),
            entries: filled("the entries of the prefix cache", blocks, entry)?,
            ghosts: HashMap::new(),
            namespaces: Namespaces::new(),
        })
    }

    /// Whether a block is in the cache.
    pub(crate) fn contains(&self, block: u32) -> bool {
        self.entries[block as usize].node != NONE
    }

    /// The blocks that hold the longest cached chain of full blocks of `tokens`, in order.
    pub(crate) fn walk<'a>(
        &'a self,
        tokens: &'a [u32],
        namespace: u32,
        contents: &'a Contents,
    ) -> Walk<'a> {
        Walk {
            index: self,
            contents,
            blocks: tokens.chunks_exact(contents.block_size()),
            namespace,
            parent: NONE,
            hash: self.hasher.start(namespace),
        }
    }

    /// Enters a full block that is not in the cache, after the block that precedes it in its sequence,
    /// which is.
    pub(crate) fn insert(
        &mut self,
        block: u32,
        after: Option<u32>,
        namespace: u32,
        contents: &Contents,
    ) {
        debug_assert!(after.is_none_or(|after| self.contains(after)), "commit goes front to back");
        let parent = after.map_or(NONE, |after| self.entries[after as usize].node);
        let so_far = match parent {
            NONE => self.hasher.start(namespace),
            parent => self.nodes[parent as usize].hash,
        };
        let tokens = contents.of(block);
        let hash = self.hasher.extend(so_far, tokens);
        let node = self
            .find(parent, namespace, hash, tokens, contents)
            .unwrap_or_else(|| self.add_node(parent, namespace, hash));
        let place = &mut self.nodes[node as usize];
        let previous = std::mem::replace(&mut place.last, block);
        match previous {
            NONE => {
                place.first = block;
                self.ghosts.remove(&node);
            }
            previous => self.entries[previous as usize].next = block,
        }
        self.entries[block as usize] = Entry { node, next: NONE, previous };
    }

    /// Drops a block from the cache, before its contents change.
    pub(crate) fn remove(&mut self, block: u32, contents: &Contents) {
        let gone = Entry { node: NONE, next: NONE, previous: NONE };
        let Entry { node, next, previous } =
            std::mem::replace(&mut self.entries[block as usize], gone);
        let place = &mut self.nodes[node as usize];
        match previous {
            NONE => place.first = next,
            previous => self.entries[previous as usize].next = next,
        }
        match next {
            NONE => place.last = previous,
            next => self.entries[next as usize].previous = previous,
        }
        if place.first != NONE {
            return;
        }
        if place.children > 0 && self.ghosts.len() < self.entries.len() {
            self.ghosts.insert(node, contents.of(block).into());
        } else {
            self.forget(node);
        }
    }

    /// Removes a node without blocks, and each ghost above it that has lost its last child.
    fn forget(&mut self, mut node: u32) {
        loop {
            self.unlink(node);
            self.vacant.push(node);
            let gone = &mut self.nodes[node as usize];
            gone.generation = gone.generation.wrapping_add(1);
            let (parent, parent_generation) = (gone.parent, gone.parent_generation);
            if parent == NONE {
                self.namespaces.release(gone.namespace);
                return;
            }
            let above = &mut self.nodes[parent as usize];
            if above.generation != parent_generation {
                return;
            }
            above.children -= 1;
            if above.children > 0 || above.first != NONE {
                return;
            }
            self.ghosts.remove(&parent);
            node = parent;
        }
    }

    fn find(
        &self,
        parent: u32,
        namespace: u32,
        hash: u64,
        tokens: &[u32],
        contents: &Contents,
    ) -> Option<u32> {
        let generation = self.generation(parent);
        let mut at = self.buckets[self.bucket(hash)];
        while at != NONE {
            let node = &self.nodes[at as usize];
            if node.hash == hash
                && node.parent == parent
                && node.parent_generation == generation
                && node.namespace == namespace
                && self.tokens(at, node, contents) == tokens
            {
                return Some(at);
            }
            at = node.next;
        }
        None
    }

    fn tokens<'a>(&'a self, at: u32, node: &Node, contents: &'a Contents) -> &'a [u32] {
        match node.first {
            NONE => self.ghosts.get(&at).map_or(&[], |tokens| tokens),
            block => contents.of(block),
        }
    }

    fn generation(&self, node: u32) -> u32 {
        if node == NONE { 0 } else { self.nodes[node as usize].generation }
    }

    #[expect(clippy::cast_possible_truncation, reason = "masked to the number of buckets")]
    fn bucket(&self, hash: u64) -> usize {
        hash as usize & (self.buckets.len() - 1)
    }

    fn add_node(&mut self, parent: u32, namespace: u32, hash: u64) -> u32 {
        match parent {
            NONE => self.namespaces.retain(namespace),
            parent => self.nodes[parent as usize].children += 1,
        }
        let bucket = self.bucket(hash);
        let next = self.buckets[bucket];
        let mut node = Node {
            hash,
            parent,
            parent_generation: self.generation(parent),
            generation: 0,
            namespace,
            children: 0,
            first: NONE,
            last: NONE,
            next,
            previous: NONE,
        };
        let at = if let Some(at) = self.vacant.pop() {
            node.generation = self.generation(at);
            self.nodes[at as usize] = node;
            at
        } else {
            self.nodes.push(node);
            u32::try_from(self.nodes.len() - 1)
                .expect("a node has a block or is a ghost, of which there are fewer than 2^31 each")
        };
        if next != NONE {
            self.nodes[next as usize].previous = at;
        }
        self.buckets[bucket] = at;
        at
    }

    fn unlink(&mut self, node: u32) {
        let Node { hash, next, previous, .. } = self.nodes[node as usize];
        match previous {
            NONE => {
                let bucket = self.bucket(hash);
                self.buckets[bucket] = next;
            }
            previous => self.nodes[previous as usize].next = next,
        }
        if next != NONE {
            self.nodes[next as usize].previous = previous;
        }
    }

    /// Ghosts, for tests of their bound.
    #[cfg(test)]
    pub(crate) fn ghosts(&self) -> usize {
        self.ghosts.len()
    }

    /// The most nodes of a bucket, for tests of the hash.
    #[cfg(test)]
    pub(crate) fn longest_chain(&self) -> usize {
        let next = |at: u32| (at != NONE).then_some(at);
        let chain = |&first: &u32| {
            std::iter::successors(next(first), |&at| next(self.nodes[at as usize].next)).count()
        };
        self.buckets.iter().map(chain).max().unwrap_or(0)
    }

    /// Checks every link of the index against the others; `users` are the namespaces of sequences.
    ///
    /// # Errors
    /// [`Error::Inconsistent`].
    pub(crate) fn audit(&self, users: impl Iterator<Item = u32>) -> Result<(), Error> {
        let mut names = HashMap::<u32, usize>::new();
        users.for_each(|id| *names.entry(id).or_default() += 1);
        let mut children = vec![None; self.nodes.len()];
        let (mut listed, mut ghosts) = (0, 0);
        for (bucket, &first) in self.buckets.iter().enumerate() {
            let (mut at, mut previous) = (first, NONE);
            while at != NONE {
                let node = &self.nodes[at as usize];
                ensure("bucket of a node", bucket, self.bucket(node.hash))?;
                ensure("previous node of a bucket", previous as usize, node.previous as usize)?;
                children[at as usize].get_or_insert(0);
                if node.parent == NONE {
                    *names.entry(node.namespace).or_default() += 1;
                } else if self.generation(node.parent) == node.parent_generation {
                    *children[node.parent as usize].get_or_insert(0) += 1;
                }
                let is_ghost = node.first == NONE;
                ensure(
                    "a ghost has tokens",
                    is_ghost.into(),
                    self.ghosts.contains_key(&at).into(),
                )?;
                ghosts += usize::from(is_ghost);
                listed += self.audit_blocks(at, node)?;
                previous = std::mem::replace(&mut at, node.next);
            }
        }
        ensure("ghosts", ghosts, self.ghosts.len())?;
        let mut live = 0;
        for (node, count) in self.nodes.iter().zip(&children) {
            let Some(count) = *count else { continue };
            live += 1;
            ensure("children of a node", count, node.children as usize)?;
            ensure("a childless node has a block", 0, (node.first == NONE && count == 0).into())?;
        }
        ensure("nodes live and vacant", self.nodes.len(), live + self.vacant.len())?;
        let cached = self.entries.iter().filter(|entry| entry.node != NONE).count();
        ensure("blocks on nodes", cached, listed)?;
        let named = names.keys().filter(|&&id| id != DEFAULT_ID).count();
        ensure("names in use", named, self.namespaces.len())?;
        names.iter().try_for_each(|(&id, &count)| {
            ensure("users of a namespace", count, self.namespaces.users(id))
        })
    }

    fn audit_blocks(&self, at: u32, node: &Node) -> Result<usize, Error> {
        let (mut block, mut before, mut count) = (node.first, NONE, 0);
        while block != NONE {
            let entry = &self.entries[block as usize];
            ensure("node of a block", at as usize, entry.node as usize)?;
            ensure("previous block of a node", before as usize, entry.previous as usize)?;
            before = std::mem::replace(&mut block, entry.next);
            count += 1;
        }
        ensure("last block of a node", before as usize, node.last as usize)?;
        Ok(count)
    }
}

/// The blocks of a cached chain, one by one.
#[derive(Debug)]
pub(crate) struct Walk<'a> {
    index: &'a PrefixIndex,
    contents: &'a Contents,
    blocks: ChunksExact<'a, u32>,
    namespace: u32,
    parent: u32,
    hash: u64,
}

impl Iterator for Walk<'_> {
    type Item = u32;

    fn next(&mut self) -> Option<u32> {
        let tokens = self.blocks.next()?;
        self.hash = self.index.hasher.extend(self.hash, tokens);
        self.parent =
            self.index.find(self.parent, self.namespace, self.hash, tokens, self.contents)?;
        let block = self.index.nodes[self.parent as usize].first;
        (block != NONE).then_some(block)
    }
}
