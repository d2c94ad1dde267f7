//! Which neighbouring sequences of a batch share leading pages, for an attention that reads these once.
//!
//! Invariant: what is reported is read off the tables, so that it holds whoever shared the pages: a hit of the prefix cache, a
//! fork, or a fork of a fork. Pages are compared and not tokens: two sequences that computed the same prefix
//! each keep their pages, and reading one in place of the other would save nothing.

use attn_core::SharedPrefix;

use crate::allocator::Allocator;
use crate::error::Error;
use crate::table::SeqId;

impl Allocator {
    /// Groups neighbours of a batch by the leading pages that their tables have in common.
    ///
    /// Only pages before a sequence's query rows count, and only full ones. Of all ways to divide the batch into groups it is
    /// the one that saves the reading of most pages; sequences that save nothing are in no group. A batch sorted by prefix
    /// shares most, which is the caller's to do.
    ///
    /// Shapes: `q_lens` has one entry a sequence of `seqs`.
    /// Units: query rows in tokens; they are the last ones of their sequence.
    ///
    /// # Errors
    /// A stale or foreign handle; [`Error::Invalid`] for another number of lengths than sequences;
    /// [`Error::PastLength`] for a sequence with more rows than tokens.
    ///
    /// ```
    /// use attn_paged::{Allocator, Config, Namespace};
    ///
    /// let mut pool = Allocator::new(Config::new(64, 4))?;
    /// let first = pool.alloc(&[7; 13], Namespace::DEFAULT)?.seq;
    /// pool.commit(first, 13)?;
    /// let second = pool.alloc(&[7; 14], Namespace::DEFAULT)?.seq;
    /// let other = pool.alloc(&[9; 14], Namespace::DEFAULT)?.seq;
    ///
    /// let shared = pool.shared_prefixes(&[first, second, other], &[1, 1, 1])?;
    /// assert_eq!((shared.len(), shared[0].sequences.clone(), shared[0].tokens), (1, 0..2, 12));
    /// # Ok::<(), attn_paged::Error>(())
    /// ```
    pub fn shared_prefixes(
        &self,
        seqs: &[SeqId],
        q_lens: &[usize],
    ) -> Result<Vec<SharedPrefix>, Error> {
        if q_lens.len() != seqs.len() {
            let expected = format!("{} lengths, one a sequence", seqs.len());
            return Err(Error::invalid("q_lens", expected, q_lens.len()));
        }
        let size = self.config.block_size();
        let mut tables = Vec::with_capacity(seqs.len());
        for (&seq, &rows) in seqs.iter().zip(q_lens) {
            let sequence = self.sequences.get(seq)?;
            let before = sequence.len.checked_sub(rows).ok_or(Error::PastLength {
                operation: "shared_prefixes",
                expected: sequence.len,
                got: rows,
            })?;
            tables.push(&sequence.blocks[..before / size]);
        }
        let common: Vec<usize> = tables.windows(2).map(|pair| common(pair[0], pair[1])).collect();
        let group = |(sequences, pages)| SharedPrefix { sequences, tokens: pages * size };
        Ok(groups(&common).into_iter().map(group).collect())
    }
}

/// Leading pages that two tables have in common.
fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// The groups of neighbours that save most pages, each with the pages that all of it share: `common[n]` are those of
/// sequences n and n + 1.
///
/// By dynamic programming over where the last group starts; a start past which nothing is shared ends the search, so
/// that it is quadratic in the longest run of sequences that share, and not in the batch.
fn groups(common: &[usize]) -> Vec<(std::ops::Range<usize>, usize)> {
    let batch = common.len() + 1;
    // What the first n sequences save at most, and where their last group starts and what it shares.
    let mut best = vec![(0usize, 0usize, 0usize); batch + 1];
    for end in 1..=batch {
        let (alone, ..) = best[end - 1];
        best[end] = (alone, end - 1, 0);
        let mut pages = usize::MAX;
        for start in (0..end - 1).rev() {
            pages = pages.min(common[start]);
            if pages == 0 {
                break;
            }
            let saved = best[start].0 + (end - 1 - start) * pages;
            // Of equal savings the fewest groups, which are found last.
            if saved >= best[end].0 {
                best[end] = (saved, start, pages);
            }
        }
    }
    let mut groups = Vec::new();
    let mut end = batch;
    while end > 0 {
        let (_, start, pages) = best[end];
        if pages > 0 {
            groups.push((start..end, pages));
        }
        end = start;
    }
    groups.reverse();
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, Namespace};

    #[test]
    fn groups_save_most_pages() {
        assert_eq!(groups(&[]), []);
        assert_eq!(groups(&[0, 0]), []);
        assert_eq!(groups(&[3, 3, 0, 2]), [(0..3, 3), (3..5, 2)]);
        // Two long prefixes behind a short common one: apart they save 20, together 3.
        assert_eq!(groups(&[10, 1, 10]), [(0..2, 10), (2..4, 10)]);
        // A short common one of many beats a long one of two.
        assert_eq!(groups(&[5, 4, 4, 4, 4]), [(0..6, 4)]);
        assert_eq!(groups(&[50, 4, 4]), [(0..2, 50), (2..4, 4)]);
    }

    #[test]
    fn groups_match_every_division() {
        /// The most pages that the sequences from `start` on save.
        fn most(common: &[usize], start: usize) -> usize {
            let batch = common.len() + 1;
            let saved = |end: usize| {
                let pages = common[start..end - 1].iter().min().copied().unwrap_or(0);
                (end - 1 - start) * pages + most(common, end)
            };
            (start + 1..=batch).map(saved).max().unwrap_or(0)
        }
        for seed in 0..729usize {
            let common: Vec<_> = (0..6).map(|n| seed / 3usize.pow(n) % 3).collect();
            let got = groups(&common);
            let saved: usize = got.iter().map(|(range, pages)| (range.len() - 1) * pages).sum();
            assert_eq!(saved, most(&common, 0), "{common:?}: {got:?}");
            for (range, pages) in &got {
                assert!(
                    range.len() > 1
                        && common[range.start..range.end - 1].iter().all(|c| c >= pages)
                );
            }
            assert!(got.windows(2).all(|pair| pair[0].0.end <= pair[1].0.start));
        }
    }

    #[test]
    fn shared_prefixes_stop_before_the_rows() {
        let mut pool = Allocator::new(Config::new(32, 4)).expect("valid");
        let first = pool.alloc(&[1; 12], Namespace::DEFAULT).expect("room").seq;
        let fork = pool.fork(first).expect("room");
        let shared = |rows: &[usize]| pool.shared_prefixes(&[first, fork], rows).expect("valid");
        let tokens = |rows: &[usize]| shared(rows).first().map_or(0, |group| group.tokens);
        // A whole last page of a fork is shared, too, and its rows are not before themselves.
        assert_eq!((tokens(&[0, 0]), tokens(&[1, 1]), tokens(&[0, 5])), (12, 8, 4));
        assert_eq!(tokens(&[12, 0]), 0);
        assert!(matches!(
            pool.shared_prefixes(&[first, fork], &[13, 0]),
            Err(Error::PastLength { expected: 12, got: 13, .. })
        ));
        assert!(pool.shared_prefixes(&[first], &[1, 1]).is_err());
        assert_eq!(pool.shared_prefixes(&[], &[]).expect("nothing"), []);
    }
}
