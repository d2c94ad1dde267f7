//! Faults seen in the public trackers of serving engines, as short programs with the right answers.

use attn_paged::{Allocator, Config, ErrorKind, Namespace, PrefixHash, SeqId};

const NS: Namespace<'static> = Namespace::DEFAULT;

fn pool(blocks: usize) -> Allocator {
    Allocator::new(Config::new(blocks, 4)).expect("valid")
}

fn tokens(range: std::ops::RangeInclusive<u32>) -> Vec<u32> {
    range.collect()
}

/// Leaves `tokens` in the cache, held by nobody.
fn cache(pool: &mut Allocator, tokens: &[u32]) -> Vec<u32> {
    let seq = pool.alloc(tokens, NS).expect("valid").seq;
    pool.commit(seq, tokens.len()).expect("valid");
    let blocks = pool.blocks(seq).expect("valid").to_vec();
    pool.free(seq).expect("valid");
    blocks
}

fn kind<T>(result: Result<T, attn_paged::Error>) -> ErrorKind {
    result.map(drop).expect_err("refused").kind()
}

#[test]
fn alloc_never_evicts_its_own_hits() {
    let mut pool = pool(4);
    let cached = cache(&mut pool, &tokens(1..=12));
    let prompt: Vec<u32> = (1..=8).chain(21..=28).collect();
    let made = pool.alloc(&prompt, NS).unwrap();
    let blocks = pool.blocks(made.seq).unwrap();
    assert_eq!((made.hit, pool.free_blocks()), (8, 0));
    assert_eq!(blocks[..2], cached[..2]);
    let mut unique = blocks.to_vec();
    unique.sort_unstable();
    unique.dedup();
    assert_eq!(unique.len(), 4);
    assert!(pool.tokens(made.seq).unwrap().eq(prompt));
}

#[test]
fn alloc_counts_revived_hits_as_taken() {
    // Two of four blocks are held. The prompt finds one parked block and needs two more: one too many.
    let mut pool = pool(4);
    cache(&mut pool, &tokens(1..=8));
    pool.alloc(&[50; 8], NS).unwrap();
    let prompt: Vec<u32> = (1..=4).chain(60..=67).collect();
    assert_eq!((pool.match_prefix(&prompt, NS), pool.can_alloc(&prompt, NS)), (4, false));
    assert_eq!(kind(pool.alloc(&prompt, NS)), ErrorKind::OutOfBlocks);
    assert!(pool.can_alloc(&prompt[..8], NS));
    assert_eq!(pool.alloc(&prompt[..8], NS).unwrap().hit, 4);
    pool.audit().unwrap();
}

#[test]
fn match_never_finds_replaced_or_uncommitted_blocks() {
    let mut pool = pool(2);
    cache(&mut pool, &tokens(1..=4));
    let b = pool.alloc(&tokens(11..=18), NS).unwrap().seq;
    assert_eq!(pool.match_prefix(&tokens(1..=5), NS), 0);
    pool.free(b).unwrap();
    assert_eq!(pool.match_prefix(&tokens(11..=19), NS), 0);
    assert_eq!(pool.alloc(&tokens(1..=8), NS).unwrap().hit, 0);
}

#[test]
fn whole_prompt_in_cache_leaves_a_private_last_block() {
    let mut pool = pool(8);
    cache(&mut pool, &tokens(1..=8));
    let b = pool.alloc(&tokens(1..=8), NS).unwrap();
    let c = pool.alloc(&tokens(1..=8), NS).unwrap();
    assert_eq!((b.hit, c.hit, pool.free_blocks()), (4, 4, 5));
    let (b, c) = (pool.blocks(b.seq).unwrap(), pool.blocks(c.seq).unwrap());
    assert!(b[0] == c[0] && b[1] != c[1]);
}

#[test]
fn equal_hashes_are_not_equal_contents() {
    for hash in [PrefixHash::Default, PrefixHash::Constant] {
        let mut pool = Allocator::new(Config::new(8, 4).hash(hash)).unwrap();
        cache(&mut pool, &tokens(1..=8));
        let hit = |tokens: &[u32]| pool.match_prefix(tokens, NS);
        assert_eq!(hit(&[5, 6, 7, 8, 0]), 0);
        assert_eq!(hit(&[9, 9, 9, 9, 5, 6, 7, 8, 0]), 0);
        assert_eq!(hit(&[1, 2, 3, 4, 9, 9, 9, 9, 0]), 4);
        assert_eq!(hit(&[1, 2, 3, 4, 5, 6, 7, 8, 9]), 8);
        assert_eq!(pool.match_prefix(&tokens(1..=9), Namespace::new(b"other")), 0);
    }
}

#[test]
fn namespaces_keep_equal_prompts_apart() {
    for hash in [PrefixHash::Default, PrefixHash::Constant] {
        let mut pool = Allocator::new(Config::new(16, 4).hash(hash)).unwrap();
        let [a, b] = [Namespace::from("adapter a"), Namespace::from("adapter b")];
        let first = pool.alloc(&tokens(1..=8), a).unwrap().seq;
        pool.commit(first, 8).unwrap();
        assert_eq!(pool.alloc(&tokens(1..=8), b).unwrap().hit, 0);
        assert_eq!(pool.alloc(&tokens(1..=8), NS).unwrap().hit, 0);
        assert_eq!(pool.alloc(&tokens(1..=8), a).unwrap().hit, 4);
        // A fork stays in its namespace.
        let fork = pool.fork(first).unwrap();
        pool.append(fork, &tokens(9..=12)).unwrap();
        pool.commit(fork, 12).unwrap();
        assert_eq!(pool.match_prefix(&tokens(1..=13), a), 12);
        assert_eq!(pool.match_prefix(&tokens(1..=13), b), 0);
        pool.audit().unwrap();
    }
}

#[test]
fn misuse_is_refused_and_changes_nothing() {
    let mut pool = pool(4);
    let a = pool.alloc(&tokens(1..=8), NS).unwrap().seq;
    pool.free(a).unwrap();
    assert_eq!(kind(pool.free(a)), ErrorKind::NotFound);
    assert_eq!(kind(pool.append(a, &[1])), ErrorKind::NotFound);
    assert_eq!(kind(pool.fork(a)), ErrorKind::NotFound);
    assert_eq!(kind(pool.commit(a, 0)), ErrorKind::NotFound);
    assert_eq!(kind(pool.truncate(a, 0)), ErrorKind::NotFound);
    assert_eq!(pool.free_blocks(), 4);
    let c = pool.alloc(&tokens(1..=16), NS).unwrap().seq;
    assert_eq!(kind(pool.append(c, &[5])), ErrorKind::OutOfBlocks);
    assert_eq!(kind(pool.truncate(c, 17)), ErrorKind::InvalidArgument);
    assert_eq!(kind(pool.commit(c, 17)), ErrorKind::InvalidArgument);
    // The slot has a new tenant; the old handle must not reach it.
    assert_eq!(kind(pool.free(a)), ErrorKind::NotFound);
    assert_eq!((pool.free_blocks(), pool.len(c)), (0, Ok(16)));
    pool.free(c).unwrap();
    assert_eq!(pool.free_blocks(), 4);
    let (before, mut other) = (pool.stats(), self::pool(4));
    let foreign = other.alloc(&[1], NS).unwrap().seq;
    assert_eq!(kind(pool.free(foreign)), ErrorKind::NotFound);
    assert_eq!(pool.stats(), before);
}

#[test]
fn eviction_takes_the_longest_unheld_from_the_leaf() {
    let mut pool = pool(6);
    cache(&mut pool, &tokens(1..=12));
    cache(&mut pool, &tokens(21..=32));
    // A hit makes the first two blocks of the older chain young again.
    let a = pool.alloc(&tokens(1..=9), NS).unwrap().seq;
    pool.free(a).unwrap();
    let hits = |pool: &Allocator| {
        (pool.match_prefix(&tokens(1..=13), NS), pool.match_prefix(&tokens(21..=33), NS))
    };
    // That request took the oldest leaf for its last block.
    assert_eq!(hits(&pool), (8, 12));
    let mut held: Vec<SeqId> = Vec::new();
    let mut left = Vec::new();
    for n in 0..6 {
        held.push(pool.alloc(&[100 + n], NS).unwrap().seq);
        left.push(hits(&pool));
    }
    assert_eq!(left, [(8, 12), (8, 8), (8, 4), (8, 0), (4, 0), (0, 0)]);
    assert_eq!(pool.stats().evictions, 6);
}

#[test]
fn duplicates_stay_and_the_first_committed_is_found() {
    let mut pool = pool(8);
    let a = pool.alloc(&tokens(1..=8), NS).unwrap().seq;
    let b = pool.alloc(&tokens(1..=8), NS).unwrap().seq;
    pool.commit(b, 8).unwrap();
    pool.commit(a, 8).unwrap();
    let c = pool.alloc(&tokens(1..=9), NS).unwrap();
    assert_eq!(c.hit, 8);
    assert_eq!(pool.blocks(c.seq).unwrap()[..2], *pool.blocks(b).unwrap());
    // The chain survives the loss of one duplicate in its middle.
    pool.free(c.seq).unwrap();
    pool.truncate(b, 6).unwrap();
    pool.append(b, &[99]).unwrap();
    let d = pool.alloc(&tokens(1..=9), NS).unwrap();
    assert_eq!(d.hit, 8);
    let (d, a, b) = (pool.blocks(d.seq).unwrap(), pool.blocks(a).unwrap(), pool.blocks(b).unwrap());
    assert_eq!((d[0], d[1]), (b[0], a[1]));
    pool.audit().unwrap();
}

#[test]
fn table_width_bounds_alloc_and_append() {
    let mut pool = Allocator::new(Config::new(8, 4).table_width(2)).unwrap();
    assert!(!pool.can_alloc(&tokens(1..=9), NS));
    assert_eq!(kind(pool.alloc(&tokens(1..=9), NS)), ErrorKind::InvalidArgument);
    let a = pool.alloc(&tokens(1..=7), NS).unwrap().seq;
    assert_eq!(pool.append(a, &[8]), Ok(None));
    assert_eq!(kind(pool.append(a, &[9])), ErrorKind::InvalidArgument);
    assert_eq!((pool.len(a), pool.free_blocks()), (Ok(8), 6));
}

#[test]
fn stats_add_up_and_rates_are_fractions() {
    let mut pool = pool(10);
    assert_eq!(
        (pool.stats().waste(), pool.stats().sharing(), pool.stats().hit_rate()),
        (0.0, 0.0, 0.0)
    );
    let a = pool.alloc(&tokens(1..=6), NS).unwrap().seq;
    pool.commit(a, 6).unwrap();
    let b = pool.alloc(&tokens(1..=6), NS).unwrap().seq;
    let c = pool.fork(b).unwrap();
    let stats = pool.stats();
    // Tables: a [0, 1], b [0, 2], c [0, 2]; blocks 1 and 2 are half full.
    assert_eq!((stats.held, stats.free, stats.shared, stats.table_entries), (3, 7, 2, 6));
    assert_eq!((stats.tokens, stats.wasted_slots, stats.sequences), (18, 4, 3));
    assert_eq!((stats.lookups, stats.lookup_tokens, stats.hit_tokens), (2, 12, 4));
    assert!((stats.waste() - 4.0 / 12.0).abs() < 1e-12);
    assert!((stats.sharing() - 0.5).abs() < 1e-12);
    assert!((stats.hit_rate() - 1.0 / 3.0).abs() < 1e-12);
    assert!((stats.usage() - 0.3).abs() < 1e-12);
    [a, b, c].iter().for_each(|&seq| pool.free(seq).unwrap());
    let stats = pool.stats();
    assert_eq!((stats.held, stats.free, stats.free_cached, stats.peak_held), (0, 10, 1, 3));
}
