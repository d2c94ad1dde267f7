//! Programs of operations on [`attn_paged::Allocator`], each step compared with a model that is too
//! simple to be wrong ([`model::Model`]).
//!
//! The model predicts whether a step succeeds, with which kind of error, and everything that can be
//! seen afterwards. One thing it leaves open: which of the free blocks without cached contents is
//! taken first.

use arbitrary::Arbitrary;
use attn_paged::{
    Allocator, BlockCopy, BlockPool, Config, CsrBuffers, Error, ErrorKind, NO_PAGE, Namespace,
    PrefixHash, SeqId, SwappedGroup,
};

use model::{Group, Model, Tokens};

mod model;

/// Steps after which a program ends.
const MAX_STEPS: usize = 64;

/// A pool and a program for it.
#[derive(Debug, Arbitrary)]
pub struct Input {
    blocks: u8,
    host_blocks: u8,
    block_size: u8,
    no_cache: bool,
    constant_hash: bool,
    table_width: Option<u8>,
    reserve: u8,
    #[arbitrary(with = crate::lists::rest)]
    program: Vec<Op>,
}

/// An operation. A sequence is named by any byte, taken modulo the live ones.
#[derive(Debug, Arbitrary)]
enum Op {
    Alloc(Prompt),
    Append(u8, Prompt),
    Commit(u8, u8),
    Fork(u8),
    Truncate(u8, u8),
    Free(u8),
    SwapOut(u8, Option<u8>),
    SwapIn(u8),
    Discard(u8),
}

/// Tokens of which many begin alike: every block repeats one of two tokens, but for one twist.
#[derive(Debug, Arbitrary)]
struct Prompt {
    length: u8,
    pattern: u8,
    twist: Option<u8>,
    namespace: bool,
}

/// Runs the program.
pub fn check(input: &Input) {
    let blocks = usize::from(input.blocks % 14);
    let size = usize::from(input.block_size % 4) + 1;
    let reserve = usize::from(input.reserve % 4);
    let width = input.table_width.map(|w| usize::from(w % 12));
    let mut config = Config::new(blocks, size).prefix_cache(!input.no_cache).reserve(reserve);
    if input.constant_hash {
        config = config.hash(PrefixHash::Constant);
    }
    if let Some(width) = width {
        config = config.table_width(width);
    }
    let pool = match Allocator::new(config) {
        Ok(pool) => pool,
        Err(error) => {
            assert!(reserve > blocks && error.kind() == ErrorKind::InvalidArgument, "{error}");
            return;
        }
    };
    let host_blocks = usize::from(input.host_blocks % 8);
    let mut run = Run {
        pool,
        host: BlockPool::new(host_blocks).expect("small"),
        model: Model::new(blocks, size, !input.no_cache, width, reserve),
        host_free: host_blocks,
        handles: Vec::new(),
        groups: Vec::new(),
        ended: None,
    };
    for op in input.program.iter().take(MAX_STEPS) {
        run.step(op);
        if run.model.forgetful() {
            // Past this point the cache may drop what the model still remembers.
            return;
        }
        run.compare();
    }
}

struct Run {
    pool: Allocator,
    host: BlockPool,
    model: Model,
    host_free: usize,
    /// The handles of the model's sequences, in its order.
    handles: Vec<SeqId>,
    groups: Vec<(SwappedGroup, Group)>,
    /// A handle that must be refused.
    ended: Option<SeqId>,
}

impl Run {
    fn step(&mut self, op: &Op) {
        match op {
            Op::Alloc(prompt) => self.alloc(prompt),
            Op::Append(seq, prompt) => self.append(*seq, prompt),
            Op::Commit(seq, n) => {
                let Some(at) = self.pick(*seq) else { return };
                let n = self.count(at, *n);
                let expected = self.model.check_length(at, n);
                agree(self.pool.commit(self.handles[at], n), expected, |()| {
                    self.model.commit(at, n)
                });
            }
            Op::Fork(seq) => {
                let Some(at) = self.pick(*seq) else { return };
                let fork = self.pool.fork(self.handles[at]).expect("a live sequence forks");
                self.handles.push(fork);
                self.model.fork(at);
            }
            Op::Truncate(seq, n) => {
                let Some(at) = self.pick(*seq) else { return };
                let n = self.count(at, *n);
                let expected = self.model.check_length(at, n);
                let got = self.pool.truncate(self.handles[at], n);
                agree(got, expected, |()| self.model.truncate(at, n));
            }
            Op::Free(seq) => {
                let Some(at) = self.pick(*seq) else { return };
                let handle = self.handles.remove(at);
                self.pool.free(handle).expect("a live sequence ends");
                self.model.free(at);
                self.ended = Some(handle);
            }
            Op::SwapOut(first, second) => self.swap_out(*first, *second),
            Op::SwapIn(group) => self.swap_in(*group),
            Op::Discard(group) => {
                if self.groups.is_empty() {
                    return;
                }
                let (group, swapped) = self.groups.remove(usize::from(*group) % self.groups.len());
                group.discard(&mut self.host).expect("a group is discarded once");
                assert!(group.pages() == 0 || group.discard(&mut self.host).is_err());
                self.host_free += swapped.blocks;
            }
        }
    }

    fn alloc(&mut self, prompt: &Prompt) {
        let (tokens, namespace) = (prompt.tokens(self.model.size()), prompt.namespace());
        let expected = self.model.plan_alloc(&tokens, prompt.namespace);
        assert_eq!(self.pool.can_alloc(&tokens, namespace), expected.is_ok());
        match (self.pool.alloc(&tokens, namespace), expected) {
            (Ok(allocation), Ok(hits)) => {
                assert_eq!(allocation.hit, hits.len() * self.model.size());
                let blocks = self.pool.blocks(allocation.seq).expect("just made");
                self.model.alloc(tokens, prompt.namespace, &hits, blocks);
                self.handles.push(allocation.seq);
            }
            (Err(got), Err(expected)) => assert_eq!(got.kind(), expected, "{got}"),
            (got, expected) => panic!("alloc: got {got:?}, the model says {expected:?}"),
        }
    }

    fn append(&mut self, seq: u8, prompt: &Prompt) {
        let Some(at) = self.pick(seq) else { return };
        let tokens = prompt.tokens(self.model.size());
        let expected = self.model.plan_append(at, tokens.len());
        match (self.pool.append(self.handles[at], &tokens), expected) {
            (Ok(copy), Ok(())) => {
                let blocks = self.pool.blocks(self.handles[at]).expect("live");
                let expected = self.model.append(at, &tokens, blocks);
                assert_eq!(copy, expected.map(|(from, to)| BlockCopy { from, to }));
            }
            (Err(got), Err(expected)) => assert_eq!(got.kind(), expected, "{got}"),
            (got, expected) => panic!("append: got {got:?}, the model says {expected:?}"),
        }
    }

    fn swap_out(&mut self, first: u8, second: Option<u8>) {
        let Some(first) = self.pick(first) else { return };
        let picked: Vec<_> =
            std::iter::once(first).chain(second.and_then(|s| self.pick(s))).collect();
        let seqs: Vec<_> = picked.iter().map(|at| self.handles[*at]).collect();
        let expected = self.model.plan_swap_out(&picked, self.host_free);
        match (self.pool.swap_out(&seqs, &mut self.host), expected) {
            (Ok(out), Ok(())) => {
                let group = self.model.swap_out(&picked);
                assert_eq!(out.copies.len(), group.blocks);
                self.host_free -= group.blocks;
                self.groups.push((out.group, group));
                self.handles.retain(|handle| !seqs.contains(handle));
                self.ended = seqs.first().copied();
            }
            (Err(got), Err(expected)) => assert_eq!(got.kind(), expected, "{got}"),
            (got, expected) => panic!("swap_out: got {got:?}, the model says {expected:?}"),
        }
    }

    fn swap_in(&mut self, which: u8) {
        if self.groups.is_empty() {
            return;
        }
        let which = usize::from(which) % self.groups.len();
        let (group, swapped) = &self.groups[which];
        let expected = self.model.plan_swap_in(swapped);
        match (self.pool.swap_in(group, &mut self.host), expected) {
            (Ok(back), Ok(())) => {
                let fresh: Vec<_> = back.copies.iter().map(|copy| copy.to).collect();
                self.host_free += swapped.blocks;
                self.model.swap_in(swapped, &fresh);
                self.handles.extend(back.sequences.iter().map(|returned| returned.seq));
                // Coming back has released the host pages; nothing is left to discard.
                drop(self.groups.remove(which));
            }
            (Err(got), Err(expected)) => assert_eq!(got.kind(), expected, "{got}"),
            (got, expected) => panic!("swap_in: got {got:?}, the model says {expected:?}"),
        }
    }

    /// The place of a live sequence.
    fn pick(&self, seq: u8) -> Option<usize> {
        usize::from(seq).checked_rem(self.handles.len())
    }

    /// A count from 0 to one more than the length.
    fn count(&self, at: usize, n: u8) -> usize {
        usize::from(n) % (self.model.seq(at).tokens.len() + 2)
    }

    /// Everything that can be seen, against the model.
    fn compare(&mut self) {
        self.pool.audit().expect("consistent books");
        assert_eq!(self.pool.free_blocks(), self.model.free_blocks());
        assert_eq!(self.host.free(), self.host_free);
        for (at, handle) in self.handles.iter().enumerate() {
            let seq = self.model.seq(at);
            assert_eq!(self.pool.len(*handle).expect("live"), seq.tokens.len());
            assert_eq!(self.pool.blocks(*handle).expect("live"), seq.blocks);
            let tokens: Vec<_> = self.pool.tokens(*handle).expect("live").collect();
            assert_eq!(tokens, seq.tokens);
            let holders: Vec<_> = self.pool.holders(*handle).expect("live").collect();
            assert_eq!(holders, self.model.holders(at));
        }
        for pattern in 0..4 {
            let prompt = Prompt { length: 23, pattern, twist: None, namespace: pattern % 2 == 1 };
            let tokens = prompt.tokens(self.model.size());
            let hit = self.pool.match_prefix(&tokens, prompt.namespace());
            let chain = self.model.chain(&tokens, prompt.namespace);
            assert_eq!(hit, chain.len() * self.model.size());
        }
        if let Some(ended) = self.ended {
            let refused = |kind: Option<ErrorKind>| assert_eq!(kind, Some(ErrorKind::NotFound));
            refused(self.pool.append(ended, &[1]).err().map(|e| e.kind()));
            refused(self.pool.free(ended).err().map(|e| e.kind()));
            refused(self.pool.fork(ended).err().map(|e| e.kind()));
            refused(self.pool.len(ended).err().map(|e| e.kind()));
        }
        self.compare_stats();
        self.compare_tables();
    }

    fn compare_stats(&self) {
        let stats = self.pool.stats();
        let seqs = || self.model.seqs();
        assert_eq!(stats.held + stats.free, stats.blocks);
        assert_eq!(stats.free_cached, self.model.parked());
        assert_eq!(stats.shared, self.model.shared());
        assert_eq!(stats.sequences, seqs().len());
        assert_eq!(stats.tokens, seqs().iter().map(|s| s.tokens.len()).sum::<usize>());
        assert_eq!(stats.table_entries, seqs().iter().map(|s| s.blocks.len()).sum::<usize>());
        assert_eq!(stats.wasted_slots, self.model.wasted_slots());
    }

    fn compare_tables(&self) {
        let seqs = self.model.seqs();
        let width = seqs.iter().map(|s| s.blocks.len()).max().unwrap_or(0);
        let pages = self.pool.page_count(&self.handles).expect("live");
        let page = |block: &u32| i32::try_from(*block).expect("small");

        let mut table = vec![-7; (seqs.len() + 1) * width];
        self.pool.write_padded_table(&self.handles, width, &mut table).expect("large enough");
        let (mut indptr, mut last) = (vec![-7; seqs.len() + 1], vec![-7; seqs.len()]);
        let mut indices = vec![-7; pages];
        let buffers =
            CsrBuffers { indptr: &mut indptr, indices: &mut indices, last_page_len: &mut last };
        assert_eq!(self.pool.write_csr_table(&self.handles, buffers).expect("large enough"), pages);

        let mut end = 0;
        for (at, seq) in seqs.iter().enumerate() {
            let blocks: Vec<_> = seq.blocks.iter().map(page).collect();
            let row = &table[at * width..(at + 1) * width];
            assert_eq!(&row[..blocks.len()], blocks);
            assert!(row[blocks.len()..].iter().all(|id| *id == NO_PAGE));
            assert_eq!(&indices[end..end + blocks.len()], blocks);
            end += blocks.len();
            assert_eq!(usize::try_from(indptr[at + 1]).expect("a count"), end);
            let slots = blocks.len() * self.model.size();
            let unused = slots - seq.tokens.len();
            let expected = if slots == 0 { 0 } else { self.model.size() - unused };
            assert_eq!(usize::try_from(last[at]).expect("a count"), expected);
        }
        assert!(table[seqs.len() * width..].iter().all(|id| *id == NO_PAGE));
    }
}

impl Prompt {
    fn tokens(&self, size: usize) -> Tokens {
        let length = usize::from(self.length) % (6 * size);
        let mut tokens: Tokens =
            (0..length).map(|i| u32::from(self.pattern >> (i / size) & 1)).collect();
        if let Some(at) = self.twist
            && let Some(place) = usize::from(at).checked_rem(length)
        {
            tokens[place] = 2;
        }
        tokens
    }

    fn namespace(&self) -> Namespace<'static> {
        if self.namespace { Namespace::new(b"adapter") } else { Namespace::DEFAULT }
    }
}

/// Applies a step to the model if both sides accept it; else both refuse it alike.
fn agree<T>(got: Result<T, Error>, expected: Result<(), ErrorKind>, apply: impl FnOnce(T)) {
    match (got, expected) {
        (Ok(value), Ok(())) => apply(value),
        (Err(got), Err(expected)) => assert_eq!(got.kind(), expected, "{got}"),
        (Ok(_), Err(expected)) => panic!("accepted where the model says {expected:?}"),
        (Err(got), Ok(())) => panic!("refused where the model accepts: {got}"),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn pool_programs_agree_with_the_model_on_seeded_inputs() {
        crate::seeded::run(5_000, super::check);
    }
}
