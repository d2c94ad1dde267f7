//! The order in which the blocks of a persistent kernel take its units.
//!
//! The invariant: what `cuda/attn/schedule.cuh` counts is laid out here: of equal sequences only how many blocks of heads
//! form a section, of unequal ones a list of all tiles, of each part of the keys. The order is a function of the problem and the tile alone, and no
//! result depends on it.

use attn_core::{Bytes, Problem, Split};
use bytemuck::{Pod, Zeroable};

use super::lengths::{Division, Lengths, equal_lengths, parts, visited_keys, written_rows};

/// Units of a section where the longest sees few keys: about two for each multiprocessor of a large device. Their heads'
/// keys and values pass through the cache once.
const SHORT_SECTION: usize = 256;

/// Units of a section of longer ones: about four for each multiprocessor, for the longest is then a small part of what
/// each of them does. On an H200 rows of 2k gained 1 % over sections of half the size, and rows of 512 lost 3 %; a window
/// of 4k gained 2 % over one head at a time.
const LONG_SECTION: usize = 512;

/// Units of a section of the longest ones, which gained 0.5 to 1 % at 16k and lost 1 % at 8k, and of a list, whose tiles
/// differ most: 24 documents gained 7 and 3 % over half of it, and lost up to 4 % with all heads in one section.
const LONGEST_SECTION: usize = 1024;

/// Keys of a unit from which on it is long.
const LONG_KEYS: usize = 2048;

/// Keys of a unit from which on it is one of the longest.
const LONGEST_KEYS: usize = 16384;

/// Most bytes of a list and the tables beside it; more only where the tiles of one block of heads alone are more.
const MOST_BYTES: usize = 1 << 20;

/// Bytes of the counters that blocks take units by: the next unit, and the blocks that have ended.
pub(crate) const COUNTER_BYTES: usize = 2 * size_of::<u32>();

/// A tile of rows, as `OrderedTask` in `cuda/base/params.cuh`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Entry {
    /// The sequence.
    pub(crate) sequence: i32,
    /// The first block of heads.
    pub(crate) head_block: u32,
    /// The tile, counted from the last one of the sequence; of the next part of the keys the same again.
    pub(crate) inside: u32,
}

/// How rows and keys are cut into units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cut {
    /// Flat rows of a tile.
    pub(crate) tile: usize,
    /// Query heads whose rows share a tile.
    pub(crate) pack: usize,
    /// Parts of the keys.
    pub(crate) split: Split,
}

impl Cut {
    /// The units of the kernels that take them in an order.
    pub(crate) const fn division(self) -> Division {
        let Self { tile, pack, split } = self;
        Division::Ordered { tile, pack, split }
    }
}

/// How units follow one another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Order {
    /// Blocks of heads of a section, which divides their number through the batch, or of an entry of the list.
    pub(crate) section: i32,
    /// The tiles of unequal sequences; empty where all are equal.
    pub(crate) entries: Vec<Entry>,
}

impl Order {
    /// The order of a problem's units.
    pub(crate) fn new(problem: &Problem, lengths: &Lengths, cut: Cut) -> Self {
        let Cut { tile, pack, split } = cut;
        let heads = head_blocks(problem, pack);
        let narrow = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
        if let Some(uniform) = lengths.uniform {
            let section = if grows(problem) {
                let blocks = heads.saturating_mul(problem.lengths().batch());
                divisor_near(blocks, wanted(longest(problem, tile, pack)), uniform.units as usize)
            } else {
                1
            };
            return Self { section: narrow(section), entries: Vec::new() };
        }
        let section = list_section(problem, cut);
        let mut one_section: Vec<(usize, Entry)> = Vec::new();
        for sequence in 0..problem.lengths().batch() {
            let (q_len, kv_len) = (problem.lengths().q(sequence), problem.lengths().kv(sequence));
            let tiles = flat_rows(problem, sequence, pack).div_ceil(tile);
            let visited = visited_keys(problem, sequence);
            let part_keys = split.keys(visited.len());
            for part in 0..parts(problem, split, sequence) {
                let start = visited.start + part * part_keys;
                let end = visited.end.min(start.saturating_add(part_keys));
                for from_last in 0..tiles {
                    let first = (tiles - 1 - from_last) * tile;
                    let rows = (first / pack).min(q_len)..q_len.min((first + tile).div_ceil(pack));
                    let seen = problem.band().rows(rows, q_len, kv_len);
                    let keys = seen.end.min(end).saturating_sub(seen.start.max(start));
                    let wide = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
                    let inside = wide(part * tiles + from_last);
                    let entry = Entry { sequence: narrow(sequence), head_block: 0, inside };
                    one_section.push((keys, entry));
                }
            }
        }
        one_section.sort_by_key(|(keys, _)| std::cmp::Reverse(*keys));
        let blocks = (0..u32::try_from(heads).unwrap_or(u32::MAX)).step_by(section.max(1));
        let entries = blocks
            .flat_map(|head_block| {
                one_section.iter().map(move |(_, entry)| Entry { head_block, ..*entry })
            })
            .collect();
        Self { section: narrow(section), entries }
    }

    /// Bytes of the list that a problem takes; nothing where all sequences are equal.
    pub(crate) fn bytes(problem: &Problem, cut: Cut) -> Bytes {
        if equal_lengths(problem).is_some() {
            return Bytes::ZERO;
        }
        let sections = head_blocks(problem, cut.pack) / list_section(problem, cut).max(1);
        Bytes::of(all_tiles(problem, cut).saturating_mul(sections), size_of::<Entry>())
    }
}

/// Whether later rows see more keys, so that units differ; under a window only the first ones see fewer, and these are
/// what blocks end with.
fn grows(problem: &Problem) -> bool {
    problem.band().right.is_some()
}

/// Keys of the last unit of equal sequences, which sees the most of them.
fn longest(problem: &Problem, tile: usize, pack: usize) -> usize {
    let (q_len, kv_len) = (problem.lengths().longest_q(), problem.lengths().longest_kv());
    let pack = pack.max(1);
    let last = q_len.saturating_sub(1).saturating_mul(pack) / tile.max(1) * tile / pack;
    problem.band().rows(last.min(q_len)..q_len, q_len, kv_len).len()
}

/// Units of a section whose longest one sees so many keys.
const fn wanted(keys: usize) -> usize {
    match keys {
        ..LONG_KEYS => SHORT_SECTION,
        LONG_KEYS..LONGEST_KEYS => LONG_SECTION,
        _ => LONGEST_SECTION,
    }
}

fn head_blocks(problem: &Problem, pack: usize) -> usize {
    problem.q_heads() / pack.max(1)
}

/// Rows of a sequence that are written, once for each head of a block.
fn flat_rows(problem: &Problem, sequence: usize, pack: usize) -> usize {
    written_rows(problem, sequence).saturating_mul(pack)
}

/// Tiles of all parts of all sequences.
fn all_tiles(problem: &Problem, Cut { tile, pack, split }: Cut) -> usize {
    let tiles = |sequence| flat_rows(problem, sequence, pack).div_ceil(tile.max(1));
    (0..problem.lengths().batch())
        .map(|sequence| tiles(sequence).saturating_mul(parts(problem, split, sequence)))
        .fold(0, usize::saturating_add)
}

/// Blocks of heads of an entry of the list: as many as share a section, and as many as keep it short.
fn list_section(problem: &Problem, cut: Cut) -> usize {
    let (heads, tiles) = (head_blocks(problem, cut.pack), all_tiles(problem, cut).max(1));
    let near = divisor_near(heads, LONGEST_SECTION, tiles);
    let has_parts = (0..problem.lengths().batch()).any(|n| parts(problem, cut.split, n) > 1);
    let tables = cut.division().tables(false, has_parts).len() * size_of::<i64>();
    let tables = tables.saturating_mul(problem.lengths().batch() + 1);
    let most = MOST_BYTES.saturating_sub(tables) / size_of::<Entry>();
    let fits = |section: &usize| (heads / section).saturating_mul(tiles) <= most;
    (near..=heads).find(|n| heads.is_multiple_of(*n) && fits(n)).unwrap_or(heads)
}

/// The divisor of `total` that comes nearest to `units / each`, by ratio.
fn divisor_near(total: usize, units: usize, each: usize) -> usize {
    let target = units as f64 / each.max(1) as f64;
    let distance = |n: usize| (n as f64 / target).ln().abs();
    let divisors = (1..=total).filter(|n| total.is_multiple_of(*n));
    divisors.min_by(|&a, &b| distance(a).total_cmp(&distance(b))).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use attn_core::{DType, ProblemSpec};

    use super::*;

    fn order(spec: ProblemSpec, tile: usize) -> Order {
        packed_order(spec, tile, 1)
    }

    fn packed_order(spec: ProblemSpec, tile: usize, pack: usize) -> Order {
        cut_order(spec, Cut { tile, pack, split: Split::Whole })
    }

    fn cut_order(spec: ProblemSpec, cut: Cut) -> Order {
        let pack = cut.pack;
        let problem = Problem::new(spec).expect("valid");
        let lengths = Lengths::new(&problem, cut.division()).expect("small");
        let order = Order::new(&problem, &lengths, cut);
        let bytes = order.entries.len() * size_of::<Entry>();
        assert_eq!(Order::bytes(&problem, cut), Bytes(bytes as u64));
        // What the device divides the number of a unit by.
        assert!(order.section > 0);
        let heads = problem.q_heads() / pack * problem.lengths().batch();
        assert!(heads.is_multiple_of(order.section.unsigned_abs() as usize));
        if !order.entries.is_empty() {
            let units = order.entries.len() * order.section.unsigned_abs() as usize;
            assert_eq!(units, lengths.blocks as usize);
        }
        order
    }

    fn causal(q_lens: &[usize], kv_lens: &[usize]) -> ProblemSpec {
        let mut spec = ProblemSpec::new(DType::BF16, 16, 16, 128, q_lens, kv_lens);
        spec.causal = true;
        spec
    }

    #[test]
    fn equal_sequences_need_no_list() {
        let long = order(causal(&[16384], &[16384]), 128);
        assert_eq!((long.section, long.entries.len()), (8, 0));
        assert_eq!(order(causal(&[8192; 2], &[8192; 2]), 128).section, 8);
        let mut window = causal(&[16384], &[16384]);
        window.window_left = Some(4095);
        assert_eq!(order(window, 128).section, 4);
        let short = order(causal(&[512; 32], &[512; 32]), 128);
        assert_eq!(short.section, 64);
    }

    #[test]
    fn without_a_causal_bound_heads_follow_one_another() {
        let spec = ProblemSpec::new(DType::BF16, 16, 16, 128, &[4096; 4], &[4096; 4]);
        assert_eq!(order(spec, 128).section, 1);
    }

    #[test]
    fn unequal_sequences_come_longest_tile_first() {
        let got = order(causal(&[300, 0, 100], &[300, 7, 500]), 128);
        let first: Vec<_> = got.entries.iter().map(|e| (e.sequence, e.inside)).take(4).collect();
        // Keys of the tiles: 500 of the third sequence; 300, 256 and 128 of the first.
        assert_eq!(first, [(2, 0), (0, 0), (0, 1), (0, 2)]);
        assert_eq!(got.section, 16);
    }

    #[test]
    fn many_tiles_are_listed_by_few_heads_while_the_list_is_short() {
        let mut lens = vec![2048; 40];
        lens.push(100);
        let got = order(causal(&lens, &lens), 128);
        assert_eq!(got.section, 2);
        assert_eq!(got.entries.len(), 641 * 8);
        let huge = vec![130; 6000];
        let mut uneven = huge;
        uneven.push(1);
        let got = order(causal(&uneven, &uneven), 128);
        let tables = 2 * size_of::<i64>() * (uneven.len() + 1);
        assert!(tables + got.entries.len() * size_of::<Entry>() <= MOST_BYTES);
    }

    #[test]
    fn packed_heads_share_tiles() {
        let mut spec = causal(&[20, 70], &[500, 900]);
        spec.kv_heads = 2;
        let got = packed_order(spec, 128, 8);
        // 160 and 560 flat rows: two and five tiles, of two blocks of heads.
        assert_eq!((got.entries.len(), got.section), (7, 2));
        let first: Vec<_> = got.entries.iter().map(|e| (e.sequence, e.inside)).take(2).collect();
        assert_eq!(first, [(1, 0), (1, 1)]);
    }

    #[test]
    fn parts_of_most_keys_come_first() {
        let mut spec = causal(&[20, 4], &[500, 900]);
        spec.kv_heads = 2;
        let got = cut_order(spec, Cut { tile: 128, pack: 8, split: Split::Chunks(400) });
        // Two tiles of 160 flat rows in two parts of 400 and 100 keys; one tile of 32 in 400, 400 and 100.
        assert_eq!((got.entries.len(), got.section), (7, 2));
        let all: Vec<_> = got.entries.iter().map(|e| (e.sequence, e.inside)).collect();
        assert_eq!(all, [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (1, 2), (0, 3)]);
        let equal = cut_order(
            causal(&[8; 2], &[4096; 2]),
            Cut { tile: 128, pack: 1, split: Split::Parts(4) },
        );
        assert!(equal.entries.is_empty());
    }

    #[test]
    fn padded_rows_have_units_too() {
        let mut spec = causal(&[1, 400], &[400, 400]);
        spec.q_arrangement = attn_core::Arrangement::Padded;
        assert_eq!(order(spec, 128).entries.len(), 8);
    }
}
