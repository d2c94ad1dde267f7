//! What the pool is doing, in numbers that an operator acts on.
//!
//! Counts are exact also under sharing: a shared block counts once, and wastes only the slots that none
//! of its holders fills. Whatever can be derived is derived when asked for, in time proportional
//! to the number of sequences; a counter kept on the side of each operation could drift.

use std::collections::HashMap;

use crate::allocator::Allocator;

/// A snapshot of an allocator.
///
/// Units: counts in blocks, tokens or events as named; ratios are fractions, 0 where there is nothing
/// to divide by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Stats {
    /// Blocks of the pool.
    pub blocks: usize,
    /// Tokens of a block.
    pub block_size: usize,
    /// Blocks that no sequence holds.
    pub free: usize,
    /// Free blocks whose contents a lookup can still find; part of `free`.
    pub free_cached: usize,
    /// Blocks that some sequence holds.
    pub held: usize,
    /// Blocks that two or more sequences hold; part of `held`.
    pub shared: usize,
    /// The most blocks ever held at once.
    pub peak_held: usize,
    /// Free blocks that a new sequence must leave.
    pub reserve: usize,
    /// Live sequences.
    pub sequences: usize,
    /// Tokens of all sequences, shared ones counted once per sequence.
    pub tokens: usize,
    /// Entries of all tables, shared blocks counted once per sequence.
    pub table_entries: usize,
    /// Slots of held blocks that no sequence fills.
    pub wasted_slots: usize,
    /// Sequences that were allocated.
    pub lookups: u64,
    /// Tokens of these sequences.
    pub lookup_tokens: u64,
    /// Tokens of these that came from the prefix cache.
    pub hit_tokens: u64,
    /// Cached blocks that were taken for other contents.
    pub evictions: u64,
    /// Copies of shared tails that were asked of the engine.
    pub copies: u64,
}

impl Stats {
    /// The fraction of held slots that hold no token.
    #[must_use]
    pub fn waste(&self) -> f64 {
        ratio(self.wasted_slots, self.held * self.block_size)
    }

    /// The fraction of table entries that cost no block of their own.
    #[must_use]
    pub fn sharing(&self) -> f64 {
        ratio(self.table_entries - self.held, self.table_entries)
    }

    /// The fraction of allocated tokens that the prefix cache supplied.
    #[must_use]
    pub fn hit_rate(&self) -> f64 {
        ratio(self.hit_tokens, self.lookup_tokens)
    }

    /// The fraction of the pool that is held.
    #[must_use]
    pub fn usage(&self) -> f64 {
        ratio(self.held, self.blocks)
    }
}

/// `part / whole`, 0 for an empty whole.
fn ratio<T: TryInto<u64>>(part: T, whole: T) -> f64 {
    // Counts stay far below 2^53, where f64 is exact.
    let float = |count: T| count.try_into().unwrap_or(u64::MAX) as f64;
    let whole = float(whole);
    if whole == 0.0 { 0.0 } else { float(part) / whole }
}

/// What cannot be derived from the present state.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone, PartialEq))]
pub(crate) struct Counters {
    lookups: u64,
    lookup_tokens: u64,
    hit_tokens: u64,
    pub(crate) copies: u64,
}

impl Counters {
    pub(crate) const fn admitted(&mut self, tokens: usize, hit: usize) {
        self.lookups += 1;
        self.lookup_tokens += tokens as u64;
        self.hit_tokens += hit as u64;
    }
}

impl Allocator {
    /// The state in numbers. Takes time in proportion to the live sequences.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let (pool, counters) = (&self.store.pool, &self.counters);
        let mut stats = Stats {
            blocks: pool.len(),
            block_size: self.config.block_size(),
            free: pool.free(),
            free_cached: pool.parked(),
            held: pool.held(),
            shared: pool.shared(),
            peak_held: pool.peak_held(),
            reserve: self.config.reserved(),
            lookups: counters.lookups,
            lookup_tokens: counters.lookup_tokens,
            hit_tokens: counters.hit_tokens,
            evictions: self.store.evictions,
            copies: counters.copies,
            ..Stats::default()
        };
        // Of each shared tail: the sequences that end in it, and how far the longest fills it.
        let mut tails = HashMap::<u32, (u32, usize)>::new();
        for (_, sequence) in self.sequences.iter() {
            stats.sequences += 1;
            stats.tokens += sequence.len;
            stats.table_entries += sequence.blocks.len();
            let fill = sequence.len % stats.block_size;
            let Some(&tail) = sequence.blocks.last().filter(|_| fill > 0) else { continue };
            if pool.holders(tail) == 1 {
                stats.wasted_slots += stats.block_size - fill;
            } else {
                let (ends, longest) = tails.entry(tail).or_default();
                *ends += 1;
                *longest = fill.max(*longest);
            }
        }
        for (tail, (ends, longest)) in tails {
            // Where a holder does not end in the block it fills the whole of it.
            if ends == pool.holders(tail) {
                stats.wasted_slots += stats.block_size - longest;
            }
        }
        stats
    }
}
