//! Block tables of paged cases, shuffled so that no engine gets by with reading pages in order.
//!
//! The invariant: the table alone says where a token is. Ids are a random permutation with unused pages
//! among them, rows hold -1 and then an id out of range past what the length needs, and what no table
//! names is NaN.

use std::num::NonZero;

use attn_core::{CacheLayout, Error, LayoutId, Problem, View};

use crate::random::Random;

/// An owned block table.
#[derive(Debug, Clone)]
pub(crate) struct Table {
    ids: Vec<i32>,
    batch: usize,
    width: usize,
    /// Pages of the cache.
    pub(crate) pages: usize,
    /// Leading blocks of each sequence that are another's, and whose they are.
    shared: Vec<(usize, usize)>,
    pub(crate) stamp: LayoutId,
}

impl Table {
    pub(crate) fn new(
        problem: &Problem,
        layout: &CacheLayout,
        (shared, sharers): (usize, Option<NonZero<usize>>),
        random: &mut Random,
    ) -> Self {
        let l = problem.lengths();
        let batch = l.batch();
        let full = |sequence: usize| l.kv(sequence) / layout.page_size();
        let shared: Vec<(usize, usize)> = (0..batch)
            .map(|s| {
                let owner = sharers.map_or(0, |sharers| s / sharers * sharers.get());
                (if s == owner { 0 } else { shared.min(full(owner)).min(full(s)) }, owner)
            })
            .collect();
        let needed: Vec<usize> = (0..batch).map(|s| layout.pages_for(l.kv(s))).collect();
        let fresh: usize =
            needed.iter().zip(&shared).map(|(needed, (shared, _))| needed - shared).sum();
        let pages = fresh + 3;
        let mut free: Vec<i32> = (0..pages).filter_map(|id| i32::try_from(id).ok()).collect();
        random.shuffle(&mut free);
        let width = needed.iter().copied().max().unwrap_or(0) + 2;
        let mut ids = vec![-1; batch * width];
        for sequence in 0..batch {
            let (shared, owner) = shared[sequence];
            for block in 0..needed[sequence] {
                ids[sequence * width + block] = if block < shared {
                    ids[owner * width + block]
                } else {
                    free.pop().unwrap_or(-1)
                };
            }
            ids[(sequence + 1) * width - 1] = i32::MAX;
        }
        Self { ids, batch, width, pages, shared, stamp: layout.id() }
    }

    pub(crate) fn view(&self) -> Result<View<'_, i32>, Error> {
        View::contiguous("block_table", &self.ids, &[self.batch, self.width])
    }

    /// The page that holds a block of a sequence.
    pub(crate) fn page(&self, sequence: usize, block: usize) -> Option<usize> {
        usize::try_from(*self.ids.get(sequence * self.width + block)?).ok()
    }

    /// The sequence whose values a block holds.
    pub(crate) fn owner(&self, sequence: usize, block: usize) -> usize {
        let (shared, owner) = self.shared[sequence];
        if block < shared { owner } else { sequence }
    }
}
