//! The division of a backward: tiles of keys, which are units of work, and tiles of padded query rows.
//!
//! The invariant: the host and the kernels divide alike (`cuda/attn/backward_unit.cuh`, `backward_rows.cuh`). It is a
//! function of the problem and the tile alone. Of equal sequences nothing is uploaded, unless a kernel reads lengths
//! from tables alone.

use std::cmp::Reverse;

use attn_core::{Arrangement, KvStorage, Problem};

use super::config::{Config, Main, has_bias_pass};
use super::params::ROW_TILE;
use crate::cuda::lengths::{check_counts, equal_lengths, product, too_many, written_rows};
use crate::error::Error;

/// A prefix sum over the sequences, or what another one counts; `batch + 1` entries each, in the order of the upload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Table {
    /// Packed query rows.
    Queries,
    /// Packed keys.
    Keys,
    /// Tiles of padded rows.
    RowTiles,
    /// Tiles of keys, in the order of [`Table::Sequences`].
    KeyTiles,
    /// The sequences, those with the most pairs first.
    Sequences,
}

impl Table {
    pub(super) const COUNT: usize = 5;
}

/// How the rows and keys of a batch are divided.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Tiles {
    /// All tables, or none.
    tables: Vec<i64>,
    entries: usize,
    /// Tiles of padded rows of all sequences.
    pub(super) row_tiles: usize,
    /// Tiles of keys of all sequences, of one KV head.
    pub(super) key_tiles: usize,
    /// Tiles of rows and of keys of each sequence, where all are equal.
    pub(super) uniform: Option<(usize, usize)>,
    /// Rows and keys that are written, of all sequences.
    pub(super) written_rows: usize,
    pub(super) written_keys: usize,
}

impl Tiles {
    /// The division of a problem.
    ///
    /// # Errors
    /// [`Error::Call`] for a sequence past [`crate::cuda::lengths::MAX_LEN`] rows or keys, and for counts past 31 bits.
    pub(super) fn new(problem: &Problem, config: &Config) -> Result<Self, Error> {
        check_counts(problem)?;
        let batch = problem.lengths().batch();
        let of_rows = |sequence| written_rows(problem, sequence).div_ceil(ROW_TILE);
        let of_keys = |sequence| written_keys(problem, sequence).div_ceil(config.tile.kv.max(1));
        let all =
            |count: &dyn Fn(usize) -> usize| (0..batch).map(count).fold(0, usize::saturating_add);
        let (row_tiles, key_tiles) = (all(&of_rows), all(&of_keys));
        let most = i32::MAX as usize;
        for (field, tiles, heads) in [
            ("tiles of rows times heads", row_tiles.saturating_add(1), problem.q_heads()),
            ("tiles of keys times heads", key_tiles, problem.kv_heads()),
        ] {
            if tiles.saturating_mul(heads) > most {
                return Err(too_many(field, most, tiles.saturating_mul(heads)));
            }
        }
        let uniform = equal_lengths(problem).map(|_| (of_rows(0), of_keys(0)));
        let tables = if reads_tables(problem, config.main) {
            tables(problem, &of_rows, &of_keys)
        } else {
            Vec::new()
        };
        Ok(Self {
            tables,
            entries: batch + 1,
            row_tiles,
            key_tiles,
            uniform,
            written_rows: all(&|sequence| written_rows(problem, sequence)),
            written_keys: all(&|sequence| written_keys(problem, sequence)),
        })
    }

    /// What is uploaded.
    pub(super) fn upload(&self) -> &[i64] {
        &self.tables
    }

    /// Where a table begins in the upload, in bytes; `None` where nothing is uploaded.
    pub(super) fn offset(&self, table: Table) -> Option<u64> {
        let bytes = table as usize * self.entries * size_of::<i64>();
        (!self.tables.is_empty()).then_some(bytes as u64)
    }

    /// Rows of the workspace, of one head.
    ///
    /// # Errors
    /// [`Error::Call`] past 63 bits.
    pub(super) fn padded_rows(&self) -> Result<i64, Error> {
        product(&[self.row_tiles, ROW_TILE])
    }
}

/// Bytes of the tables of a plan.
pub(super) fn table_bytes(problem: &Problem, main: Main) -> usize {
    if !reads_tables(problem, main) {
        return 0;
    }
    let entries = problem.lengths().batch() + 1;
    entries.saturating_mul(Table::COUNT * size_of::<i64>())
}

/// The naive kernel reads lengths from tables, whether they are equal or not.
fn reads_tables(problem: &Problem, main: Main) -> bool {
    main == Main::Naive || equal_lengths(problem).is_none() || has_bias_pass(problem)
}

/// Keys of a sequence that are written, padding included.
fn written_keys(problem: &Problem, sequence: usize) -> usize {
    match problem.kv() {
        KvStorage::Dense(Arrangement::Padded) => problem.lengths().longest_kv(),
        _ => problem.lengths().kv(sequence),
    }
}

fn tables(
    problem: &Problem,
    of_rows: &impl Fn(usize) -> usize,
    of_keys: &impl Fn(usize) -> usize,
) -> Vec<i64> {
    let (lengths, batch) = (problem.lengths(), problem.lengths().batch());
    // Counts of tiles are below 2^31, and those of rows below 2^63 by the problem.
    let entries = batch + 1;
    let mut tables = vec![0i64; Table::COUNT * entries];
    let mut set = |table: Table, at: usize, value: usize| {
        tables[table as usize * entries + at] = value as i64;
    };
    let mut order: Vec<_> = (0..batch).collect();
    order.sort_by_key(|&sequence| Reverse(problem.band_pairs(sequence)));
    let (mut rows, mut keys) = (0, 0);
    for (place, &sequence) in order.iter().enumerate() {
        set(Table::Queries, place, lengths.q_rows(place).start);
        set(Table::Keys, place, lengths.kv_rows(place).start);
        set(Table::RowTiles, place, rows);
        rows += of_rows(place);
        set(Table::Sequences, place, sequence);
        set(Table::KeyTiles, place, keys);
        keys += of_keys(sequence);
    }
    set(Table::Queries, batch, lengths.total_q());
    set(Table::Keys, batch, lengths.total_kv());
    set(Table::RowTiles, batch, rows);
    set(Table::KeyTiles, batch, keys);
    tables
}

#[cfg(test)]
mod tests {
    use attn_core::{DType, ProblemSpec, Tile};

    use super::super::config;
    use super::*;

    fn divide(q_lens: &[usize], kv_lens: &[usize], edit: impl FnOnce(&mut ProblemSpec)) -> Tiles {
        let mut spec = ProblemSpec::new(DType::BF16, 8, 2, 64, q_lens, kv_lens);
        edit(&mut spec);
        let problem = Problem::new(spec).expect("valid");
        let tile = Tile { q: 64, kv: 128 };
        let config = Config {
            main: Main::Tiled,
            has_maps: false,
            spec: config::naive_spec(DType::BF16),
            threads: 256,
            dynamic_smem: 0,
            tile,
            dq_dim: 64,
        };
        let tiles = Tiles::new(&problem, &config).expect("small");
        assert_eq!(size_of_val(tiles.upload()), table_bytes(&problem, Main::Tiled));
        tiles
    }

    fn table(tiles: &Tiles, table: Table) -> &[i64] {
        &tiles.tables[table as usize * tiles.entries..][..tiles.entries]
    }

    #[test]
    fn unequal_sequences_have_tiles_of_their_own_and_the_longest_first() {
        let got = divide(&[1, 0, 130], &[300, 7, 400], |_| ());
        assert_eq!(table(&got, Table::Queries), [0, 1, 1, 131]);
        assert_eq!(table(&got, Table::RowTiles), [0, 1, 1, 3]);
        assert_eq!(table(&got, Table::Sequences)[..3], [2, 0, 1]);
        assert_eq!(table(&got, Table::KeyTiles), [0, 4, 7, 8]);
        assert_eq!((got.row_tiles, got.key_tiles, got.uniform), (3, 8, None));
        assert_eq!(got.padded_rows().expect("small"), 384);
    }

    #[test]
    fn equal_sequences_take_no_table_unless_the_bias_is_summed_in_order() {
        let got = divide(&[200; 3], &[300; 3], |_| ());
        assert_eq!((got.upload().len(), got.uniform), (0, Some((2, 3))));
        assert_eq!(got.offset(Table::Keys), None);
        let got = divide(&[200; 3], &[300; 3], |spec| {
            spec.pass = attn_core::Pass::Backward;
            (spec.bias, spec.want_dbias, spec.options.deterministic) = (true, true, true);
        });
        assert_eq!((got.upload().len(), got.uniform), (20, Some((2, 3))));
    }

    #[test]
    fn padding_has_tiles_too() {
        let got = divide(&[1, 200], &[300, 7], |spec| {
            spec.q_arrangement = Arrangement::Padded;
            spec.kv = KvStorage::Dense(Arrangement::Padded);
        });
        assert_eq!(table(&got, Table::RowTiles), [0, 2, 4]);
        assert_eq!((got.key_tiles, got.written_rows, got.written_keys), (6, 400, 600));
    }
}
