//! Programs of operations against a model, and the corners that programs reach too rarely.

mod model;

use proptest::collection::vec;
use proptest::prelude::*;

use self::model::Model;
use super::*;
use crate::{ErrorKind, PrefixHash};

const NS: Namespace<'static> = Namespace::DEFAULT;

/// Numbers pick a live sequence and a count, each modulo what there is.
#[derive(Debug, Clone)]
enum Op {
    Alloc(Vec<u32>, &'static str),
    Append(usize, Vec<u32>),
    Commit(usize, usize),
    Fork(usize),
    Truncate(usize, usize),
    Free(usize),
    Swap(usize),
}

fn prompt() -> impl Strategy<Value = Vec<u32>> {
    // Long common prefixes, so that chains, duplicates and near misses are frequent.
    (0usize..10, vec(2u32..4, 0..9)).prop_map(|(ones, rest)| {
        let mut tokens = vec![1; ones];
        tokens.extend(rest);
        tokens
    })
}

fn op() -> impl Strategy<Value = Op> {
    let index = || 0usize..1000;
    prop_oneof![
        5 => (prompt(), prop_oneof![4 => Just(""), 1 => Just("x"), 1 => Just("y")])
            .prop_map(|(tokens, namespace)| Op::Alloc(tokens, namespace)),
        6 => (index(), vec(1u32..4, 0..6)).prop_map(|(seq, tokens)| Op::Append(seq, tokens)),
        5 => (index(), index()).prop_map(|(seq, count)| Op::Commit(seq, count)),
        2 => index().prop_map(Op::Fork),
        3 => (index(), index()).prop_map(|(seq, count)| Op::Truncate(seq, count)),
        3 => index().prop_map(Op::Free),
        1 => index().prop_map(Op::Swap),
    ]
}

fn config() -> impl Strategy<Value = Config> {
    let width = proptest::option::weighted(0.2, 0usize..5);
    (0usize..15, 1usize..5, prop::bool::weighted(0.9), any::<bool>(), width, 0usize..3).prop_map(
        |(blocks, size, cache, constant, width, reserve)| {
            let hash = if constant { PrefixHash::Constant } else { PrefixHash::Default };
            let config = Config::new(blocks, size).prefix_cache(cache).hash(hash);
            let config = config.reserve(reserve.min(blocks));
            match width {
                Some(width) => config.table_width(width),
                None => config,
            }
        },
    )
}

/// One run: the allocator, the model, and the handles by the model's names.
struct Run {
    pool: Allocator,
    host: BlockPool,
    model: Model,
    names: Vec<(usize, SeqId)>,
    ended: Vec<SeqId>,
    serial: usize,
}

impl Run {
    fn new(config: Config) -> Self {
        Self {
            model: Model::new(&config),
            pool: Allocator::new(config).unwrap(),
            host: BlockPool::new(64).unwrap(),
            names: Vec::new(),
            ended: Vec::new(),
            serial: 0,
        }
    }

    fn name(&mut self, seq: SeqId) {
        self.names.push((self.serial, seq));
        self.serial += 1;
    }

    fn step(&mut self, op: &Op) {
        let before = self.pool.clone();
        let failed = self.apply(op);
        if failed {
            assert!(self.pool == before, "a failed operation changed the state");
        }
        for &seq in &self.ended {
            assert_eq!(self.pool.free(seq).unwrap_err().kind(), ErrorKind::NotFound);
        }
        self.compare();
    }

    /// Applies an operation to both and says whether both refused it.
    fn apply(&mut self, op: &Op) -> bool {
        let (pool, model) = (&mut self.pool, &mut self.model);
        if let Op::Alloc(tokens, namespace) = op {
            let ns = Namespace::from(*namespace);
            let hit = model.hit(tokens, namespace);
            assert_eq!(pool.match_prefix(tokens, ns), hit);
            assert_eq!(pool.can_alloc(tokens, ns), model.can_alloc(tokens, namespace).is_ok());
            let made = pool.alloc(tokens, ns).map_err(|error| error.kind());
            let expected = model.alloc(self.serial, tokens, namespace);
            assert_eq!(made.map(|made| made.hit), expected);
            if let Ok(made) = made {
                assert_eq!(made.hit, hit);
                self.name(made.seq);
            }
            return made.is_err();
        }
        if self.names.is_empty() {
            return false;
        }
        match op {
            Op::Alloc(..) => false,
            Op::Append(at, tokens) => {
                let (name, seq) = self.names[at % self.names.len()];
                let copy = match &tokens[..] {
                    &[token] => pool.append_one(seq, token),
                    tokens => pool.append(seq, tokens),
                };
                let copy = copy.map_err(|error| error.kind());
                assert_eq!(copy, model.append(name, tokens));
                copy.is_err()
            }
            Op::Commit(at, count) => {
                let (name, seq) = self.names[at % self.names.len()];
                let count = count % (pool.len(seq).unwrap() + 2);
                let done = pool.commit(seq, count).map_err(|error| error.kind());
                assert_eq!(done, model.commit(name, count));
                done.is_err()
            }
            Op::Fork(at) => {
                let (name, seq) = self.names[at % self.names.len()];
                let fork = pool.fork(seq).unwrap();
                model.fork(name, self.serial);
                self.name(fork);
                false
            }
            Op::Truncate(at, count) => {
                let (name, seq) = self.names[at % self.names.len()];
                let count = count % (pool.len(seq).unwrap() + 2);
                let done = pool.truncate(seq, count).map_err(|error| error.kind());
                assert_eq!(done, model.truncate(name, count));
                done.is_err()
            }
            Op::Free(at) => {
                let (name, seq) = self.names.swap_remove(at % self.names.len());
                pool.free(seq).unwrap();
                model.free(name);
                self.ended.push(seq);
                false
            }
            Op::Swap(at) => {
                let at = at % self.names.len();
                let (name, seq) = self.names[at];
                let out = pool.swap_out(&[seq], &mut self.host).unwrap();
                self.ended.push(seq);
                match pool.swap_in(&out.group, &mut self.host) {
                    Ok(back) => {
                        assert!(model.swap(name));
                        self.names[at].1 = back.sequences[0].seq;
                    }
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::OutOfBlocks);
                        assert!(!model.swap(name));
                        out.group.discard(&mut self.host).unwrap();
                        self.names.swap_remove(at);
                    }
                }
                assert_eq!(self.host.held(), 0);
                false
            }
        }
    }

    fn compare(&self) {
        let (pool, model) = (&self.pool, &self.model);
        pool.audit().unwrap();
        assert_eq!(pool.free_blocks(), model.free_blocks());
        assert_eq!(pool.store.pool.parked_by_age().collect::<Vec<_>>(), model.parked);
        assert_eq!(pool.sequences().count(), model.sequences.len());
        let (mut tokens, mut entries) = (0, 0);
        for &(name, seq) in &self.names {
            let expected = &model.sequences[&name];
            assert_eq!(pool.blocks(seq).unwrap(), expected.blocks);
            assert!(pool.tokens(seq).unwrap().eq(expected.tokens.iter().copied()));
            let holders = expected.blocks.iter().map(|&block| model.holders(block));
            assert!(pool.holders(seq).unwrap().eq(holders));
            tokens += expected.tokens.len();
            entries += expected.blocks.len();
        }
        let stats = pool.stats();
        assert_eq!(stats.free + stats.held, stats.blocks);
        assert_eq!((stats.tokens, stats.table_entries), (tokens, entries));
        assert_eq!(stats.free_cached, model.parked.len());
        assert_eq!(stats.wasted_slots, model.wasted_slots());
        assert!(stats.peak_held >= stats.held && stats.peak_held <= stats.blocks);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn allocator_matches_model_on_programs(config in config(), ops in vec(op(), 1..70)) {
        let mut run = Run::new(config);
        for op in &ops {
            run.step(op);
        }
        while !run.names.is_empty() {
            run.step(&Op::Free(0));
        }
        let stats = run.pool.stats();
        prop_assert_eq!((stats.free, stats.held, stats.wasted_slots), (stats.blocks, 0, 0));
    }
}

fn pool(blocks: usize, size: usize) -> Allocator {
    Allocator::new(Config::new(blocks, size)).unwrap()
}

/// Makes a committed sequence of `tokens`.
fn committed(pool: &mut Allocator, tokens: &[u32]) -> SeqId {
    let seq = pool.alloc(tokens, NS).unwrap().seq;
    pool.commit(seq, tokens.len()).unwrap();
    seq
}

/// Cuts a sequence within the block that ends at `end` and lets it grow in place there.
fn diverge(pool: &mut Allocator, seq: SeqId, end: usize) {
    pool.truncate(seq, end - 1).unwrap();
    assert_eq!(pool.append(seq, &[99]), Ok(None));
}

fn ghosts(pool: &Allocator) -> usize {
    pool.store.prefix.as_ref().unwrap().ghosts()
}

#[test]
fn prefix_is_found_again_after_its_missing_block_is_committed_anew() {
    let mut pool = pool(8, 2);
    let chain = [1, 2, 3, 4, 5, 6];
    let probe = [1, 2, 3, 4, 5, 6, 7];
    let seq = committed(&mut pool, &chain);
    diverge(&mut pool, seq, 4);
    assert_eq!((pool.match_prefix(&probe, NS), ghosts(&pool)), (2, 1));
    pool.audit().unwrap();
    pool.free(seq).unwrap();
    let again = committed(&mut pool, &chain[..4]);
    assert_eq!((pool.match_prefix(&probe, NS), ghosts(&pool)), (6, 0));
    pool.audit().unwrap();
    // The chain runs through the first block of the old sequence, the new one's second, the old leaf.
    let third = pool.alloc(&probe, NS).unwrap();
    assert_eq!(third.hit, 6);
    assert_eq!(pool.blocks(third.seq).unwrap()[..2], *pool.blocks(again).unwrap());
    pool.audit().unwrap();
}

#[test]
fn ghost_ends_with_its_last_descendant() {
    let mut pool = pool(4, 2);
    let seq = committed(&mut pool, &[1, 2, 3, 4, 5, 6]);
    diverge(&mut pool, seq, 4);
    diverge(&mut pool, seq, 2);
    assert_eq!(ghosts(&pool), 2);
    pool.audit().unwrap();
    // One leaf is parked; taking it removes both ghosts above it.
    pool.append(seq, &[7; 6]).unwrap();
    assert_eq!((pool.free_blocks(), ghosts(&pool), pool.stats().evictions), (0, 0, 1));
    pool.audit().unwrap();
}

#[test]
fn ghosts_are_bounded_and_forgotten_parents_match_nothing() {
    let config = Config::new(5, 2).hash(PrefixHash::Constant);
    let mut pool = Allocator::new(config).unwrap();
    // A chain of five blocks, cut and overwritten from its end: four ghosts above one leaf.
    let seq = committed(&mut pool, &[1, 1, 2, 2, 3, 3, 4, 4, 5, 5]);
    [8, 6, 4, 2].iter().for_each(|&end| diverge(&mut pool, seq, end));
    pool.free(seq).unwrap();
    let seq = committed(&mut pool, &[6, 6, 7, 7, 8, 8]);
    diverge(&mut pool, seq, 4);
    assert_eq!(ghosts(&pool), 5);
    diverge(&mut pool, seq, 2);
    pool.free(seq).unwrap();
    let seq = committed(&mut pool, &[10, 10, 11, 11]);
    diverge(&mut pool, seq, 2);
    assert_eq!(ghosts(&pool), 5);
    pool.audit().unwrap();
    pool.free(seq).unwrap();
    assert_eq!(pool.store.pool.parked(), 3);
    // A new first block takes the place of the forgotten one. The orphan of that is not its child.
    committed(&mut pool, &[12, 12, 0]);
    assert_eq!(pool.match_prefix(&[12, 12, 11, 11, 0], NS), 2);
    assert_eq!(pool.match_prefix(&[10, 10, 11, 11, 0], NS), 0);
    pool.audit().unwrap();
    // With the pool full, all orphans are evicted and no ghost is left.
    let stats = pool.stats();
    let fill = pool.alloc(&vec![20; stats.free * 2], NS).unwrap();
    pool.audit().unwrap();
    assert_eq!((pool.free_blocks(), ghosts(&pool)), (0, 0));
    pool.free(fill.seq).unwrap();
}

#[test]
fn hash_spreads_similar_prefixes() {
    let mut pool = pool(4096, 4);
    for i in 0..1024u32 {
        committed(&mut pool, &[0, 0, 0, i, i, 0, 0, 0, 0, i, 0, 0, 1, 2, 3, 4]);
    }
    let index = pool.store.prefix.as_ref().unwrap();
    // 4096 prefixes in 4096 buckets: a good hash leaves 37 % of them empty, and the longest chain of a
    // random function is 8 or so.
    let longest = index.longest_chain();
    assert!(longest <= 16, "{longest} prefixes share a bucket");
}

#[test]
fn append_spares_what_a_fork_shares() {
    let mut pool = pool(6, 4);
    let a = pool.alloc(&[1, 2, 3, 4, 5, 6], NS).unwrap().seq;
    let b = pool.fork(a).unwrap();
    // An empty append needs no copy.
    assert_eq!(pool.append(b, &[]), Ok(None));
    let copy = pool.append(b, &[7, 8, 9]).unwrap().unwrap();
    assert_eq!(copy, BlockCopy { from: 1, to: 2 });
    assert_eq!(pool.blocks(a), Ok(&[0, 1][..]));
    assert_eq!(pool.blocks(b), Ok(&[0, 2, 3][..]));
    assert!(pool.tokens(a).unwrap().eq(1..=6));
    assert!(pool.tokens(b).unwrap().eq(1..=9));
    // The former sharer is alone now and writes in place.
    assert_eq!(pool.append_one(a, 70), Ok(None));
    assert_eq!(pool.stats().copies, 1);
    // A fork at a block boundary shares no partial block.
    let c = pool.alloc(&[0; 4], NS).unwrap().seq;
    let d = pool.fork(c).unwrap();
    assert_eq!(pool.append_one(d, 1), Ok(None));
    assert_eq!(pool.blocks(d).unwrap()[0], pool.blocks(c).unwrap()[0]);
}

#[test]
fn reserve_binds_admissions_and_not_appends() {
    let mut pool = Allocator::new(Config::new(4, 2).reserve(2)).unwrap();
    let a = pool.alloc(&[1, 2, 3, 4], NS).unwrap().seq;
    let expected = Error::OutOfBlocks { needed: 1, free: 2, reserve: 2, total: 4 };
    assert_eq!(pool.alloc(&[5], NS), Err(expected));
    assert!(!pool.can_alloc(&[5], NS) && pool.can_alloc(&[], NS));
    assert_eq!(pool.append(a, &[5, 6, 7]), Ok(None));
    assert_eq!(pool.free_blocks(), 0);
    assert_eq!(pool.stats().reserve, 2);
    // With less than the reserve free, an admission that takes nothing still goes through.
    assert!(pool.alloc(&[], NS).is_ok());
}

#[test]
fn allocator_refuses_wrong_options() {
    let kind = |config| Allocator::new(config).unwrap_err().kind();
    assert_eq!(kind(Config::new(4, 0)), ErrorKind::InvalidArgument);
    assert_eq!(kind(Config::new(4, 4).reserve(5)), ErrorKind::InvalidArgument);
    assert_eq!(kind(Config::new(usize::MAX, 1)), ErrorKind::InvalidArgument);
    assert_eq!(kind(Config::new(4, usize::MAX)), ErrorKind::OutOfMemory);
    assert_eq!(kind(Config::new(4, usize::MAX / 8)), ErrorKind::OutOfMemory);
    let mut empty = pool(0, 4);
    assert_eq!(empty.alloc(&[1], NS).unwrap_err().kind(), ErrorKind::OutOfBlocks);
    assert_eq!(empty.alloc(&[], NS).unwrap().hit, 0);
    empty.audit().unwrap();
}

#[test]
fn block_identity_goes_stale_when_the_block_is_taken() {
    let mut pool = pool(1, 2);
    assert_eq!(pool.block_id(0).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(pool.block_id(1).unwrap_err().kind(), ErrorKind::InvalidArgument);
    let a = committed(&mut pool, &[1, 2]);
    let id = pool.block_id(0).unwrap();
    assert_eq!(pool.check_block(id), Ok(()));
    pool.free(a).unwrap();
    assert_eq!(pool.check_block(id), Err(Error::BlockNotHeld { got: id }));
    pool.alloc(&[3], NS).unwrap();
    assert!(matches!(pool.check_block(id), Err(Error::StaleBlock { .. })));
}

#[test]
fn namespace_names_are_forgotten_with_their_last_user() {
    let mut pool = pool(4, 2);
    for user in 0..100u32 {
        let name = format!("user {user}");
        let seq = pool.alloc(&[1, 2, 3], name.as_str().into()).unwrap().seq;
        pool.commit(seq, 3).unwrap();
        let fork = pool.fork(seq).unwrap();
        pool.free(seq).unwrap();
        pool.free(fork).unwrap();
        assert_eq!(pool.match_prefix(&[1, 2, 3], name.as_str().into()), 2);
        pool.audit().unwrap();
    }
    // One per parked first block at most.
    assert!(pool.store.prefix.as_ref().unwrap().namespaces.len() <= 4);
}
