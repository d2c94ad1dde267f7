//! Cascade attention as data: sequences that share leading keys, and the two calls that such a batch is.
//!
//! Source: Juravsky et al., "Hydragen", arXiv:2402.05099, section 3 (shared prefixes attended as one product, joined by
//! the LSE); Ye et al., `ChunkAttention`, arXiv:2402.15220; Ye et al., `FlashInfer`, arXiv:2501.01005 (composable formats).
//!
//! The invariant: a [`Cascade`] that exists computes what its problem asks for. For every row the keys of its prefix call
//! and of its suffix call are disjoint, and their union is what the row sees in the whole call; whatever would
//! make that untrue is refused by [`Cascade::new`] with its reason. Engines run the two calls and merge the states,
//! and check none of it again.

use std::ops::Range;

use crate::call::CallLayout;
use crate::error::Error;
use crate::layout::CacheLayout;
use crate::plan::Plan;
use crate::problem::{Pass, Problem, ProblemSpec};
use crate::shape::Arrangement;
use crate::view::{Strided, View};

/// The entry of a written table past the pages of its row.
const NO_PAGE: i32 = -1;

/// Leading tokens that neighbouring sequences of a batch have in common.
///
/// Units: tokens, in whole pages. The pages must be the very same in the block tables of all the sequences; that is the
/// caller's word, since tables are data, and an allocator with a prefix cache can give it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SharedPrefix {
    /// The sequences, neighbours in the batch.
    pub sequences: Range<usize>,
    /// Tokens that they share, from the first on.
    pub tokens: usize,
}

/// A sequence of the prefix call: neighbouring query rows of the batch, and the keys that all of them see.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct PrefixPart {
    /// Packed query rows of the batch.
    pub rows: Range<usize>,
    /// A sequence of the batch whose block table starts with the part's pages.
    pub source: usize,
    /// Keys, in tokens; 0 for rows of sequences that share nothing, whose state is then the neutral one.
    pub tokens: usize,
    /// The sequences that `source` may be exchanged for.
    peers: Range<usize>,
}

/// A batch whose neighbouring sequences share prefixes, divided into a call over the prefixes and one over the rest.
///
/// The prefix call has one sequence for the rows of all sequences that share a prefix (or several, of bounded numbers of
/// rows), and is neither causal nor windowed, since every row comes after the prefix. The suffix call is the batch with
/// its shared pages cut off. Rows keep their places in both, so that the query tensor serves as it is.
///
/// ```
/// use attn_core::cascade::{Cascade, SharedPrefix};
/// use attn_core::{CacheLayout, DType, KvStorage, PageOrder, Problem, ProblemSpec, ValueStorage};
///
/// // Four sequences of which the first three share 1024 tokens, in pages of 16.
/// let mut spec = ProblemSpec::new(DType::BF16, 32, 8, 128, &[1; 4], &[1100, 1025, 1030, 700]);
/// let layout = CacheLayout::contiguous(DType::BF16, PageOrder::Nhd, 16, 8, 128, ValueStorage::Separate(128))?;
/// (spec.causal, spec.kv) = (true, KvStorage::Paged(layout));
/// let problem = Problem::new(spec)?;
/// let cascade = Cascade::new(&problem, &[SharedPrefix { sequences: 0..3, tokens: 1024 }], None)?;
/// assert_eq!(cascade.prefix().lengths().kv(0), 1024);
/// assert_eq!(cascade.prefix().lengths().q(0), 3);
/// assert_eq!(cascade.suffix().lengths().kv(0), 76);
///
/// let past = [SharedPrefix { sequences: 0..2, tokens: 1040 }];
/// let err = Cascade::new(&problem, &past, None).unwrap_err();
/// assert_eq!(err.to_string(), "shared prefix: expected at most the 1024 tokens before the rows of sequence 1, got 1040");
/// # Ok::<(), attn_core::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cascade {
    problem: Problem,
    prefixes: Vec<SharedPrefix>,
    parts: Vec<PrefixPart>,
    /// Tokens that each sequence of the batch has in the prefix call.
    skipped: Vec<usize>,
    prefix: Problem,
    suffix: Problem,
}

impl Cascade {
    /// Divides a problem.
    ///
    /// `prefixes` are in batch order and disjoint; sequences in none of them are whole in the suffix call. `most_rows`
    /// bounds the query rows of a sequence of the prefix call, for kernels that take few; each part reads its keys again.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a problem that two calls and a merge do not compute, with the reason: a backward; dense
    /// keys; padded queries; a boolean or block mask, a bias, ALiBi, or dropout; a window that hides part of a shared prefix;
    /// a batch-invariant call. [`Error::Invalid`] for prefixes that are empty, overlap, name sequences that are not there, or
    /// hold no whole pages or the keys of a row's own. [`Error::Overflow`] for parts whose keys are more than can be counted.
    pub fn new(
        problem: &Problem,
        prefixes: &[SharedPrefix],
        most_rows: Option<usize>,
    ) -> Result<Self, Error> {
        let layout = check_problem(problem)?;
        check_prefixes(problem, layout, prefixes)?;
        let batch = problem.lengths().batch();
        let mut skipped = vec![0; batch];
        for SharedPrefix { sequences, tokens } in prefixes {
            skipped[sequences.clone()].fill(*tokens);
        }
        let parts = parts(problem, prefixes, most_rows.unwrap_or(usize::MAX).max(1));
        let spec = problem.spec();
        let prefix = ProblemSpec {
            q_lens: parts.iter().map(|part| part.rows.len()).collect(),
            kv_lens: parts.iter().map(|part| part.tokens).collect(),
            // Every row comes after the prefix, and no window hides any of it.
            causal: false,
            window_left: None,
            window_right: None,
            // A sink joins a row's denominator once, in the suffix call.
            sinks: false,
            ..spec.clone()
        };
        // Bounds count from the last key, and cutting off the first ones does not move it.
        let kept = |sequence| problem.lengths().kv(sequence) - skipped[sequence];
        let suffix = ProblemSpec { kv_lens: (0..batch).map(kept).collect(), ..spec.clone() };
        let (prefix, suffix) = (Problem::new(prefix)?, Problem::new(suffix)?);
        let prefixes = prefixes.to_vec();
        Ok(Self { problem: problem.clone(), prefixes, parts, skipped, prefix, suffix })
    }

    /// The whole call.
    #[must_use]
    pub const fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Who shares what.
    #[must_use]
    pub fn prefixes(&self) -> &[SharedPrefix] {
        &self.prefixes
    }

    /// The sequences of the prefix call.
    #[must_use]
    pub fn parts(&self) -> &[PrefixPart] {
        &self.parts
    }

    /// The call over the shared prefixes: q, o and LSE as in the whole call, a block table row a part.
    #[must_use]
    pub const fn prefix(&self) -> &Problem {
        &self.prefix
    }

    /// The call over what is not shared: q, o and LSE as in the whole call, block tables without the shared pages.
    #[must_use]
    pub const fn suffix(&self) -> &Problem {
        &self.suffix
    }

    /// Columns of the prefix call's block table.
    #[must_use]
    pub fn prefix_width(&self) -> usize {
        self.pages_for(self.prefix.lengths().longest_kv())
    }

    /// Columns of the suffix call's block table.
    #[must_use]
    pub fn suffix_width(&self) -> usize {
        self.pages_for(self.suffix.lengths().longest_kv())
    }

    /// Writes the block tables of the two calls from that of the whole call, -1 past the pages of a row.
    ///
    /// Shapes: `table` `[batch, width]`; `prefix` `[parts, prefix_width]`; `suffix` `[batch, suffix_width]`; longer buffers are
    /// left alone past that.
    ///
    /// # Errors
    /// [`Error::Layout`] for a table of another batch; [`Error::Invalid`] for a table that is too narrow or a buffer that is too
    /// short. Nothing was written then.
    pub fn write_tables(
        &self,
        table: &View<'_, i32>,
        prefix: &mut [i32],
        suffix: &mut [i32],
    ) -> Result<(), Error> {
        let (batch, parts) = (self.skipped.len(), self.parts.len());
        let longest = self.problem.lengths().longest_kv();
        let needed = self.pages_for(longest);
        match *table.shape() {
            [rows, width] if rows == batch && width >= needed => {}
            ref shape => {
                let expected = format!("shape [{batch}, {needed} or more]");
                return Err(Error::layout("block_table", expected, format!("{shape:?}")));
            }
        }
        let (wide, narrow) = (self.prefix_width(), self.suffix_width());
        for (field, needed, got) in [
            ("prefix table", parts.saturating_mul(wide), prefix.len()),
            ("suffix table", batch.saturating_mul(narrow), suffix.len()),
        ] {
            if got < needed {
                return Err(Error::invalid(field, format!("{needed} entries"), got));
            }
        }
        let page = |sequence, column| table.get(&[sequence, column]).unwrap_or(NO_PAGE);
        let write = |to: &mut [i32], sequence: usize, first: usize, count: usize| {
            let (used, rest) = to.split_at_mut(count);
            for (at, entry) in used.iter_mut().enumerate() {
                *entry = page(sequence, first + at);
            }
            rest.fill(NO_PAGE);
        };
        for (at, part) in self.parts.iter().enumerate() {
            let to = &mut prefix[at * wide..(at + 1) * wide];
            write(to, part.source, 0, self.pages_for(part.tokens));
        }
        for sequence in 0..batch {
            let to = &mut suffix[sequence * narrow..(sequence + 1) * narrow];
            let first = self.pages_for(self.skipped[sequence]);
            write(to, sequence, first, self.pages_for(self.suffix.lengths().kv(sequence)));
        }
        Ok(())
    }

    /// The block tables of the two calls as views of that of the whole call `[batch, width]`, by offset and strides.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where there are no such views: sequences that skip different numbers of pages have no common
    /// offset, and parts whose sequences are at no even distance no stride. [`Cascade::write_tables`] serves any cascade.
    /// [`Error::Layout`] for a table of another shape.
    pub fn table_views(&self, table: &Strided) -> Result<(Strided, Strided), Error> {
        const WHAT: &str = "a cascade over views of one block table";
        let batch = self.skipped.len();
        let &[rows, width] = table.shape() else {
            let got = format!("{:?}", table.shape());
            return Err(Error::layout("block_table", "shape [batch, width]", got));
        };
        if rows != batch {
            let got = format!("{:?}", table.shape());
            return Err(Error::layout("block_table", format!("shape [{batch}, width]"), got));
        }
        let lengths = self.suffix.lengths();
        // A sequence without keys of its own has no page to be found.
        let mut skips =
            (0..batch).filter(|&s| lengths.kv(s) > 0).map(|s| self.pages_for(self.skipped[s]));
        let skip = skips.next().unwrap_or(0);
        if let Some(other) = skips.find(|&other| other != skip) {
            let reason = format!(
                "sequences that skip {skip} and {other} pages have no common offset; write tables of their own"
            );
            return Err(Error::unsupported(WHAT, reason));
        }
        let Some((first, step)) = self.progression() else {
            let reason =
                "the sequences of its parts are at no even distance; write tables of their own";
            return Err(Error::unsupported(WHAT, reason));
        };
        let too_narrow = || {
            let expected = format!("{skip} entries or more");
            Error::invalid("block_table", expected, format!("width {width}"))
        };
        let suffix = table.narrow(1, skip..width).ok_or_else(too_narrow)?;
        let (row, column) = (table.strides()[0], table.strides()[1]);
        let stride = i64::try_from(step).ok().and_then(|step| row.checked_mul(step));
        let offset = table.at(first).map_or(table.offset(), |row| row.offset());
        let overflow =
            || Error::Overflow { what: "block_table", detail: format!("{row} * {step}") };
        let strides = [stride.ok_or_else(overflow)?, column];
        let prefix = Strided::new("block_table", &[self.parts.len(), width], &strides, offset)?;
        Ok((prefix, suffix))
    }

    /// Sequences `first + n * step` of which the n-th has the pages of part n, if there are such numbers.
    fn progression(&self) -> Option<(usize, usize)> {
        let shared: Vec<_> =
            self.parts.iter().enumerate().filter(|(_, part)| part.tokens > 0).collect();
        let Some(&(at, start)) = shared.first() else {
            // No row shares anything, and no page of a part is looked for.
            return Some((0, 0));
        };
        let fits = |first: usize, step: usize| {
            let row = |n: usize| n.checked_mul(step)?.checked_add(first);
            (0..self.parts.len()).all(|n| row(n).is_some_and(|row| row < self.skipped.len()))
                && shared
                    .iter()
                    .all(|(n, part)| row(*n).is_some_and(|row| part.peers.contains(&row)))
        };
        if fits(start.source, 0) {
            return Some((start.source, 0));
        }
        let &(next, second) = shared.get(1)?;
        let distance = second.source.checked_sub(start.source)?;
        let step = distance / (next - at);
        let first = start.source.checked_sub(step.checked_mul(at)?)?;
        fits(first, step).then_some((first, step))
    }

    /// Checks that the fp8 scales of a call are one a tensor: a page that sequences share has no scale of each.
    ///
    /// # Errors
    /// [`Error::Layout`] for scales `[batch, kv_heads]`.
    pub fn check_scales(call: &CallLayout<'_>) -> Result<(), Error> {
        let scales =
            [("q_scale", call.q_scale), ("k_scale", call.k_scale), ("v_scale", call.v_scale)];
        for (field, scale) in scales {
            if let Some(scale) = scale
                && scale.shape().len() > 1
            {
                let expected = "one scale, for sequences of a cascade share pages";
                return Err(Error::layout(field, expected, format!("shape {:?}", scale.shape())));
            }
        }
        Ok(())
    }

    fn pages_for(&self, tokens: usize) -> usize {
        self.problem.cache_layout().map_or(0, |layout| layout.pages_for(tokens))
    }
}

/// The plans of a cascade's two calls.
///
/// The invariant: each plan is for its call of the cascade.
#[derive(Debug, Clone, PartialEq)]
pub struct CascadePlan {
    cascade: Cascade,
    prefix: Plan,
    suffix: Plan,
}

impl CascadePlan {
    /// Joins the plans.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a plan of another problem, or plans of different engines.
    pub fn new(cascade: Cascade, prefix: Plan, suffix: Plan) -> Result<Self, Error> {
        for (field, plan, problem) in
            [("prefix plan", &prefix, cascade.prefix()), ("suffix plan", &suffix, cascade.suffix())]
        {
            if plan.problem != *problem {
                let got = format!("one of {} for another problem", plan.kernel);
                return Err(Error::invalid(field, "a plan of the cascade's call", got));
            }
        }
        if prefix.engine != suffix.engine {
            let expected = format!("a plan of the prefix plan's engine, {}", prefix.engine);
            return Err(Error::invalid("suffix plan", expected, suffix.engine));
        }
        Ok(Self { cascade, prefix, suffix })
    }

    /// What is divided, and how.
    #[must_use]
    pub const fn cascade(&self) -> &Cascade {
        &self.cascade
    }

    /// The plan of the prefix call.
    #[must_use]
    pub const fn prefix(&self) -> &Plan {
        &self.prefix
    }

    /// The plan of the suffix call.
    #[must_use]
    pub const fn suffix(&self) -> &Plan {
        &self.suffix
    }
}

/// Checks that two calls and a merge compute a problem, as far as it does not depend on who shares what.
fn check_problem(problem: &Problem) -> Result<&CacheLayout, Error> {
    let refuse = |reason: &str| Err(Error::unsupported("a cascade", reason));
    if problem.pass() != Pass::Forward {
        return refuse("it is a forward; a backward has no merge");
    }
    let Some(layout) = problem.cache_layout() else {
        return refuse("keys are dense, so that no two sequences share any");
    };
    // Rows of neighbouring sequences are one range of a packed tensor alone.
    if problem.q_arrangement() == Arrangement::Padded {
        return refuse(
            "queries are padded; equal numbers of rows a sequence can be viewed as packed",
        );
    }
    // These are indexed by a row's sequence and by keys from its first one.
    if problem.has_mask() || problem.block_mask().is_some() {
        return refuse("a mask belongs to one sequence's rows and keys");
    }
    if problem.has_bias() {
        return refuse("a bias belongs to one sequence's rows and keys");
    }
    if problem.has_alibi() {
        return refuse(
            "ALiBi depends on the distance from a row to each key, which sequences do not share",
        );
    }
    if problem.dropout().is_some() {
        return refuse(
            "dropout counts a row's sequence and keys, which are others in the prefix call",
        );
    }
    if problem.options().batch_invariant {
        return refuse("a batch-invariant sequence must not depend on who shares its prefix");
    }
    Ok(layout)
}

fn check_prefixes(
    problem: &Problem,
    layout: &CacheLayout,
    prefixes: &[SharedPrefix],
) -> Result<(), Error> {
    const FIELD: &str = "shared prefix";
    if prefixes.is_empty() {
        return Err(Error::invalid("shared prefixes", "at least one", "none"));
    }
    let lengths = problem.lengths();
    let (batch, page) = (lengths.batch(), layout.page_size());
    let mut free = 0;
    for SharedPrefix { sequences, tokens } in prefixes {
        let &Range { start, end } = sequences;
        // Members are neighbours by construction, and groups follow one another.
        if start < free || start >= end || end > batch {
            let expected = format!("neighbouring sequences from {free} on, below {batch}");
            return Err(Error::invalid(FIELD, expected, format!("{start}..{end}")));
        }
        free = end;
        if *tokens == 0 || !tokens.is_multiple_of(page) {
            let expected = format!("whole pages of {page} tokens, at least one");
            return Err(Error::invalid(FIELD, expected, format!("{tokens} tokens")));
        }
        for sequence in sequences.clone() {
            let (rows, keys) = (lengths.q(sequence), lengths.kv(sequence));
            let before = keys.saturating_sub(rows);
            if *tokens > before {
                let expected =
                    format!("at most the {before} tokens before the rows of sequence {sequence}");
                return Err(Error::invalid(FIELD, expected, tokens));
            }
        }
    }
    // Whatever is wrong is said before what is only not there.
    let members = prefixes.iter().flat_map(|prefix| prefix.sequences.clone());
    for sequence in members {
        // The last row's window reaches the first key, or it hides some key of the prefix from that row.
        if let Some(left) = problem.band().left
            && lengths.q(sequence) > 0
            && left < lengths.kv(sequence) - 1
        {
            let reason = format!(
                "a window of {left} keys hides part of the shared prefix from a row of sequence {sequence}"
            );
            return Err(Error::unsupported("a cascade", reason));
        }
    }
    Ok(())
}

/// The sequences of the prefix call, which hold every row of the batch, in order.
fn parts(problem: &Problem, prefixes: &[SharedPrefix], most_rows: usize) -> Vec<PrefixPart> {
    let batch = problem.lengths().batch();
    let mut parts = Vec::new();
    let mut next = 0;
    for SharedPrefix { sequences, tokens } in prefixes {
        push_parts(&mut parts, problem, next..sequences.start, 0, most_rows);
        push_parts(&mut parts, problem, sequences.clone(), *tokens, most_rows);
        next = sequences.end;
    }
    push_parts(&mut parts, problem, next..batch, 0, most_rows);
    parts
}

/// The rows of neighbouring sequences, in as few parts as the bound leaves, of nearly equal sizes.
fn push_parts(
    parts: &mut Vec<PrefixPart>,
    problem: &Problem,
    sequences: Range<usize>,
    tokens: usize,
    most_rows: usize,
) {
    let lengths = problem.lengths();
    let (Some(first), Some(last)) = (sequences.clone().next(), sequences.clone().next_back())
    else {
        return;
    };
    let (mut row, end) = (lengths.q_rows(first).start, lengths.q_rows(last).end);
    if row == end {
        return;
    }
    let count = (end - row).div_ceil(most_rows);
    let size = (end - row).div_ceil(count);
    let mut source = first;
    while row < end {
        while lengths.q_rows(source).end <= row {
            source += 1;
        }
        let rows = row..end.min(row + size);
        row = rows.end;
        parts.push(PrefixPart { rows, source, tokens, peers: sequences.clone() });
    }
}

#[cfg(test)]
mod tests;
