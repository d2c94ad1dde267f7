//! The division of a forward into units of work, and the prefix sums that blocks find theirs by.
//!
//! The invariant: the host and the kernels divide alike (`cuda/attn/unit.cuh`, `split.cuh`): a unit is one
//! tile of flat rows and one part of the keys for one block of heads. It is a function of the problem, the
//! tile and the split alone, so that it is computed and uploaded once a plan. Computing it on the device would cost a
//! launch, and the host would still need the size of the grid. Only what a kernel reads is uploaded: of equal sequences
//! that are not split nothing is, for their lengths are parameters.

use std::cmp::Reverse;
use std::ops::Range;

use attn_core::{Arrangement, Problem, Split};

use crate::error::Error;

/// Longest sequence: key positions and their sums with a window stay within 31 bits.
pub(crate) const MAX_LEN: usize = 1 << 29;

/// How a kernel divides its rows and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Division {
    /// One block for each row and head.
    Rows,
    /// Tiles of `tile` flat rows, a flat row being one of `pack` heads of a position, and parts of the keys.
    Tiles {
        /// Flat rows of a tile.
        tile: usize,
        /// Query heads whose rows share a tile.
        pack: usize,
        /// Parts of the keys.
        split: Split,
    },
    /// As [`Division::Tiles`] with so many parts of every sequence, whatever its length: what a launch whose lengths grow is
    /// divided by.
    Growing {
        /// Flat rows of a tile.
        tile: usize,
        /// Query heads whose rows share a tile.
        pack: usize,
        /// Parts of the keys.
        parts: usize,
    },
    /// As [`Division::Tiles`], of which blocks take the units in an order of the host's ([`super::order`]).
    Ordered {
        /// Flat rows of a tile.
        tile: usize,
        /// Query heads whose rows share a tile.
        pack: usize,
        /// Parts of the keys.
        split: Split,
    },
}

impl Division {
    /// The tables that the kernels read, in the order of their upload: the forward of equal sequences has their lengths
    /// as parameters, but not where their partial results are.
    pub(crate) const fn tables(self, are_equal: bool, has_parts: bool) -> &'static [Table] {
        use Table::{Keys, Partials, Queries, Sequences, Units};
        match self {
            Self::Tiles { .. } if are_equal && !has_parts => &[],
            Self::Tiles { .. } if are_equal => &[Partials],
            // The merge works out where those of equal sequences are, too.
            Self::Ordered { .. } if are_equal => &[],
            // The list names sequences.
            Self::Ordered { .. } if has_parts => &[Queries, Keys, Partials],
            Self::Ordered { .. } => &[Queries, Keys],
            Self::Tiles { .. } | Self::Growing { .. } if has_parts => {
                &[Queries, Keys, Units, Sequences, Partials]
            }
            Self::Tiles { .. } | Self::Growing { .. } => &[Queries, Keys, Units, Sequences],
            Self::Rows => &[Queries, Keys, Units],
        }
    }
}

/// Prefix sums over the sequences, `batch + 1` entries each, and what else follows from the division.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lengths {
    /// All of them, one after the other, in the order of [`Table`].
    tables: Vec<i64>,
    /// Those that are uploaded.
    read: &'static [Table],
    /// Blocks of the forward's grid.
    pub(crate) blocks: u32,
    /// Rows of partial results; 0 when no sequence has a second part.
    pub(crate) partial_rows: i64,
    /// What every sequence has alike; `None` where they differ, or a grid counts rows.
    pub(crate) uniform: Option<Uniform>,
}

/// The lengths and units of each of several equal sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Uniform {
    /// Units of work.
    pub(crate) units: u32,
    /// Query rows.
    pub(crate) q_len: i32,
    /// Keys.
    pub(crate) kv_len: i32,
}

/// A prefix sum, or what another one counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Table {
    /// Packed query rows.
    Queries,
    /// Packed keys.
    Keys,
    /// What the grid counts: rows for [`Division::Rows`], else units, in the order of [`Table::Sequences`].
    Units,
    /// The sequences, those with the most keys first: blocks start in their order, and what starts last had better be short.
    Sequences,
    /// Rows of partial results.
    Partials,
}

impl Table {
    /// How many there are.
    const COUNT: usize = 5;
}

impl Lengths {
    /// The division of a problem.
    ///
    /// # Errors
    /// [`Error::Call`] for a sequence past [`MAX_LEN`] rows or keys, a batch past 31 bits, and a grid past
    /// 2^31 - 1 blocks.
    pub(crate) fn new(problem: &Problem, division: Division) -> Result<Self, Error> {
        let (lengths, batch) = (problem.lengths(), problem.lengths().batch());
        check_counts(problem)?;
        let (pack, tile, split) = match division {
            Division::Rows => (1, 1, Split::Whole),
            Division::Tiles { tile, pack, split } | Division::Ordered { tile, pack, split } => {
                (pack.max(1), tile.max(1), split)
            }
            Division::Growing { tile, pack, parts } => {
                (pack.max(1), tile.max(1), Split::Parts(parts))
            }
        };
        let heads = problem.q_heads();
        let mut tables = vec![0i64; Table::COUNT * (batch + 1)];
        let mut counts = Vec::with_capacity(batch);
        let (mut units, mut partials, mut rows) = (0i64, 0i64, 0i64);
        for sequence in 0..=batch {
            let at = |table: Table| table as usize * (batch + 1) + sequence;
            let row = |range: Range<usize>| range.start as i64;
            let last = sequence == batch;
            let q = if last { lengths.total_q() as i64 } else { row(lengths.q_rows(sequence)) };
            let kv = if last { lengths.total_kv() as i64 } else { row(lengths.kv_rows(sequence)) };
            (tables[at(Table::Queries)], tables[at(Table::Keys)]) = (q, kv);
            tables[at(Table::Partials)] = partials;
            tables[at(Table::Units)] = rows;
            if last {
                break;
            }
            let written = written_rows(problem, sequence);
            let flat = written.saturating_mul(pack);
            if i32::try_from(flat).is_err() {
                return Err(too_many("query rows times packed heads", i32::MAX as usize, flat));
            }
            let parts = match division {
                Division::Growing { parts, .. } => parts.max(1),
                _ => parts(problem, split, sequence),
            };
            // Products of counts below 2^31 each, summed over fewer than 2^31 sequences: checked, since only
            // absurd calls come here.
            let of_sequence = [flat.div_ceil(tile), parts];
            let unit_count = product(&of_sequence)?;
            let partial_count = if parts > 1 { product(&[parts, written, heads])? } else { 0 };
            units = sum(units, unit_count)?;
            counts.push(unit_count);
            partials = sum(partials, partial_count)?;
            rows = sum(rows, written as i64)?;
        }
        let is_rows = division == Division::Rows;
        if !is_rows {
            let mut places: Vec<_> = (0..batch).collect();
            places.sort_by_key(|&sequence| Reverse(visited(problem, sequence)));
            let [starts, sequences] =
                [Table::Units, Table::Sequences].map(|table| table as usize * (batch + 1));
            let mut before = 0;
            for (place, &sequence) in places.iter().enumerate() {
                (tables[starts + place], tables[sequences + place]) = (before, sequence as i64);
                before += counts[sequence];
            }
            tables[starts + batch] = before;
        }
        let counted = usize::try_from(if is_rows { rows } else { units }).unwrap_or(usize::MAX);
        let blocks = counted.saturating_mul(heads / pack);
        let most = i32::MAX.unsigned_abs();
        let blocks = match u32::try_from(blocks) {
            Ok(blocks) if blocks <= most => blocks,
            // A block takes several rows where there are more than the largest grid has blocks.
            _ if is_rows => most,
            _ => return Err(too_many("blocks of the grid", most as usize, blocks)),
        };
        let uniform = match division {
            // What is in parameters cannot grow.
            Division::Rows | Division::Growing { .. } => None,
            _ => uniform(problem, units),
        };
        let read = division.tables(uniform.is_some(), partials > 0);
        Ok(Self { tables, read, blocks, partial_rows: partials, uniform })
    }

    /// What is uploaded: the tables that kernels read, one after the other.
    pub(crate) fn upload(&self) -> Vec<i64> {
        self.read.iter().flat_map(|table| self.table(*table)).copied().collect()
    }

    /// Where a table begins in the upload, in bytes; `None` for one that no kernel reads.
    pub(crate) fn offset(&self, table: Table) -> Option<u64> {
        let before = self.read.iter().position(|read| *read == table)?;
        Some((before * size_of_val(self.table(table))) as u64)
    }

    fn table(&self, table: Table) -> &[i64] {
        let entries = self.tables.len() / Table::COUNT;
        &self.tables[table as usize * entries..][..entries]
    }

    /// Bytes of f32 partial outputs and LSEs of `value_dim` elements.
    pub(crate) fn partial_bytes(&self, value_dim: usize) -> Result<usize, Error> {
        let rows = usize::try_from(self.partial_rows).unwrap_or(usize::MAX);
        let bytes = product(&[rows, value_dim + 1, size_of::<f32>()])?;
        usize::try_from(bytes).map_err(|_| overflow("partial results"))
    }

    /// Bytes of the counts of parts that have ended: a tile of rows takes that of its first row, of clusters one for each of their blocks.
    pub(crate) fn count_bytes(&self) -> Result<usize, Error> {
        let rows = usize::try_from(self.partial_rows).unwrap_or(usize::MAX);
        let bytes = product(&[rows, size_of::<u32>()])?;
        usize::try_from(bytes).map_err(|_| overflow("partial results"))
    }
}

/// Checks that kernels can count rows, keys and sequences in 31 bits.
pub(crate) fn check_counts(problem: &Problem) -> Result<(), Error> {
    let lengths = problem.lengths();
    for (field, longest) in [("q_lens", lengths.longest_q()), ("kv_lens", lengths.longest_kv())] {
        if longest > MAX_LEN {
            return Err(too_many(field, MAX_LEN, longest));
        }
    }
    if i32::try_from(lengths.batch()).is_err() {
        return Err(too_many("batch", i32::MAX as usize, lengths.batch()));
    }
    Ok(())
}

/// Rows of a sequence that are written, padding included.
pub(crate) fn written_rows(problem: &Problem, sequence: usize) -> usize {
    match problem.q_arrangement() {
        Arrangement::Packed => problem.lengths().q(sequence),
        Arrangement::Padded => problem.lengths().longest_q(),
    }
}

/// Parts that a split makes of the keys that the rows of a sequence see.
pub(crate) fn parts(problem: &Problem, split: Split, sequence: usize) -> usize {
    split.parts(visited(problem, sequence))
}

/// Keys that some row of a sequence sees.
fn visited(problem: &Problem, sequence: usize) -> usize {
    visited_keys(problem, sequence).len()
}

/// Which ones these are.
pub(crate) fn visited_keys(problem: &Problem, sequence: usize) -> Range<usize> {
    let (q_len, kv_len) = (problem.lengths().q(sequence), problem.lengths().kv(sequence));
    problem.band().rows(0..q_len, q_len, kv_len)
}

/// The rows and keys of every sequence, where all have as many.
pub(crate) fn equal_lengths(problem: &Problem) -> Option<(usize, usize)> {
    let lengths = problem.lengths();
    let first = (lengths.batch() > 0).then(|| (lengths.q(0), lengths.kv(0)))?;
    (1..lengths.batch()).all(|n| (lengths.q(n), lengths.kv(n)) == first).then_some(first)
}

/// What equal sequences have alike, `units` being those of all.
fn uniform(problem: &Problem, units: i64) -> Option<Uniform> {
    let (q_len, kv_len) = equal_lengths(problem)?;
    let batch = i64::try_from(problem.lengths().batch()).ok()?;
    let units = u32::try_from(units.checked_div(batch)?).ok()?;
    let (q_len, kv_len) = (i32::try_from(q_len).ok()?, i32::try_from(kv_len).ok()?);
    Some(Uniform { units, q_len, kv_len })
}

pub(crate) fn product(factors: &[usize]) -> Result<i64, Error> {
    let wide = factors.iter().try_fold(1usize, |product, &factor| product.checked_mul(factor));
    wide.and_then(|n| i64::try_from(n).ok()).ok_or_else(|| overflow("units of work"))
}

fn sum(a: i64, b: i64) -> Result<i64, Error> {
    a.checked_add(b).ok_or_else(|| overflow("units of work"))
}

fn overflow(what: &'static str) -> Error {
    attn_core::Error::Overflow { what, detail: "counted over all sequences".to_owned() }.into()
}

pub(crate) fn too_many(field: &'static str, most: usize, got: usize) -> Error {
    attn_core::Error::invalid(field, format!("at most {most}"), got).into()
}

#[cfg(test)]
mod tests {
    use attn_core::{DType, ProblemSpec};

    use super::*;

    fn table(lengths: &Lengths, table: Table) -> &[i64] {
        lengths.table(table)
    }

    fn spec(q_lens: &[usize], kv_lens: &[usize]) -> ProblemSpec {
        ProblemSpec::new(DType::BF16, 8, 2, 64, q_lens, kv_lens)
    }

    fn divide(spec: ProblemSpec, division: Division) -> Lengths {
        Lengths::new(&Problem::new(spec).expect("valid"), division).expect("small")
    }

    const fn tiles(tile: usize, pack: usize, split: Split) -> Division {
        Division::Tiles { tile, pack, split }
    }

    #[test]
    fn units_are_tiles_of_packed_rows_times_parts() {
        let got = divide(spec(&[1, 0, 5], &[100, 7, 33]), tiles(16, 4, Split::Chunks(32)));
        assert_eq!(table(&got, Table::Queries), [0, 1, 1, 6]);
        assert_eq!(table(&got, Table::Keys), [0, 100, 107, 140]);
        // 4 parts of one tile; two tiles of 20 flat rows in two parts; no rows.
        assert_eq!(table(&got, Table::Units), [0, 4, 8, 8]);
        assert_eq!(table(&got, Table::Sequences)[..3], [0, 2, 1]);
        assert_eq!(table(&got, Table::Partials), [0, 32, 32, 112]);
        assert_eq!((got.blocks, got.partial_rows), (16, 112));
        assert_eq!(got.partial_bytes(64).expect("small"), 112 * 65 * 4);
        assert_eq!(got.count_bytes().expect("small"), 112 * 4);
    }

    #[test]
    fn growing_sequences_have_as_many_parts_each_and_tables_for_all() {
        let division = Division::Growing { tile: 16, pack: 4, parts: 3 };
        let got = divide(spec(&[1, 1], &[2, 900]), division);
        assert_eq!(table(&got, Table::Units), [0, 3, 6]);
        assert_eq!(table(&got, Table::Partials), [0, 24, 48]);
        let equal = divide(spec(&[1, 1], &[64, 64]), division);
        assert_eq!((equal.uniform, equal.offset(Table::Keys)), (None, Some(24)));
    }

    #[test]
    fn sequences_with_most_keys_come_first() {
        let got = divide(spec(&[1, 2, 1, 40], &[9, 900, 70, 900]), tiles(16, 4, Split::Whole));
        assert_eq!(table(&got, Table::Sequences)[..4], [1, 3, 2, 0]);
        assert_eq!(table(&got, Table::Units), [0, 1, 11, 12, 13]);
        // A window of few keys makes all alike, and they stay in order.
        let mut windowed = spec(&[1, 1, 1], &[100, 50, 200]);
        (windowed.causal, windowed.window_left) = (true, Some(15));
        let got = divide(windowed, tiles(16, 4, Split::Whole));
        assert_eq!(table(&got, Table::Sequences)[..3], [0, 1, 2]);
    }

    #[test]
    fn single_parts_leave_no_partial_results() {
        let got = divide(spec(&[3, 2], &[64, 0]), tiles(64, 1, Split::Whole));
        assert_eq!(table(&got, Table::Partials), [0, 0, 0]);
        assert_eq!((got.blocks, got.partial_rows), (2 * 8, 0));
        assert_eq!(got.partial_bytes(64).expect("small"), 0);
    }

    #[test]
    fn parts_are_of_the_keys_that_some_row_sees() {
        let mut windowed = spec(&[1], &[1000]);
        (windowed.causal, windowed.window_left) = (true, Some(63));
        let got = divide(windowed, tiles(16, 4, Split::Chunks(32)));
        assert_eq!(table(&got, Table::Units), [0, 2]);
    }

    #[test]
    fn padded_rows_are_written_too() {
        let mut padded = spec(&[1, 5], &[8, 8]);
        padded.q_arrangement = Arrangement::Padded;
        let got = divide(padded.clone(), tiles(16, 4, Split::Whole));
        assert_eq!(table(&got, Table::Units), [0, 2, 4]);
        assert_eq!(table(&got, Table::Queries), [0, 1, 6]);
        let rows = divide(padded, Division::Rows);
        assert_eq!(table(&rows, Table::Units), [0, 5, 10]);
        assert_eq!((rows.blocks, rows.partial_rows), (80, 0));
    }

    #[test]
    fn only_tables_that_are_read_are_uploaded() {
        use Table::{Keys, Partials, Queries, Sequences, Units};
        let (equal, unequal) = (spec(&[4, 4], &[64, 64]), spec(&[4, 5], &[64, 64]));
        let ordered = |split| Division::Ordered { tile: 16, pack: 1, split };
        let (in_order, in_parts) = (ordered(Split::Whole), ordered(Split::Parts(2)));
        let (whole, parts) = (tiles(16, 1, Split::Whole), tiles(16, 1, Split::Parts(2)));
        for (spec, division, read) in [
            (&equal, Division::Rows, &[Queries, Keys, Units][..]),
            (&equal, in_order, &[]),
            (&equal, in_parts, &[]),
            (&equal, whole, &[]),
            (&equal, parts, &[Partials]),
            (&unequal, Division::Rows, &[Queries, Keys, Units]),
            (&unequal, in_order, &[Queries, Keys]),
            (&unequal, in_parts, &[Queries, Keys, Partials]),
            (&unequal, whole, &[Queries, Keys, Units, Sequences]),
            (&unequal, parts, &[Queries, Keys, Units, Sequences, Partials]),
        ] {
            let got = divide(spec.clone(), division);
            let upload = got.upload();
            assert_eq!(upload.len(), read.len() * 3, "{division:?}");
            for (n, &one) in read.iter().enumerate() {
                assert_eq!(got.offset(one), Some(n as u64 * 24), "{division:?} {one:?}");
                assert_eq!(&upload[n * 3..][..3], got.table(one), "{division:?} {one:?}");
            }
            let all = [Queries, Keys, Units, Sequences, Partials];
            let absent = all.iter().filter(|table| !read.contains(table));
            assert!(absent.into_iter().all(|&table| got.offset(table).is_none()));
        }
    }

    #[test]
    fn nothing_to_do_is_no_block() {
        let empty = divide(spec(&[], &[]), tiles(64, 1, Split::Whole));
        assert_eq!((empty.blocks, empty.tables.as_slice()), (0, &[0; Table::COUNT][..]));
        let rows = divide(spec(&[0, 0], &[5, 0]), Division::Rows);
        assert_eq!(rows.blocks, 0);
        let mut headless = spec(&[4], &[4]);
        headless.q_heads = 0;
        assert_eq!(divide(headless, Division::Rows).blocks, 0);
    }

    #[test]
    fn lengths_refuse_what_does_not_fit_the_kernels_integers() {
        let refused = |spec: ProblemSpec, division| {
            let problem = Problem::new(spec).expect("valid");
            Lengths::new(&problem, division).expect_err("too large").to_string()
        };
        let error = refused(spec(&[1], &[MAX_LEN + 1]), Division::Rows);
        assert!(error.contains("kv_lens") && error.contains("536870913"), "{error}");
        let most = i32::MAX.unsigned_abs();
        assert_eq!(divide(spec(&[MAX_LEN], &[1]), Division::Rows).blocks, most);
        let error = refused(spec(&[MAX_LEN], &[1]), tiles(64, 4, Split::Whole));
        assert!(error.contains("packed heads"), "{error}");
        let error = refused(spec(&[1; 64], &[MAX_LEN; 64]), tiles(1, 1, Split::Chunks(1)));
        assert!(error.contains("blocks of the grid"), "{error}");
    }

    #[test]
    fn every_key_count_splits_as_the_plan_says() {
        for kv_len in 0..70 {
            for split in [Split::Whole, Split::Chunks(7), Split::Parts(5), Split::Parts(100)] {
                let got = divide(spec(&[1], &[kv_len]), tiles(16, 1, split));
                let parts = split.parts(kv_len) as i64;
                assert_eq!(table(&got, Table::Units)[1], parts, "{kv_len} {split}");
                let partial = if parts > 1 { parts * 8 } else { 0 };
                assert_eq!(got.partial_rows, partial, "{kv_len} {split}");
            }
        }
    }
}
