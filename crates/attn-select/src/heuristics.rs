//! Tiles, splits and shared memory as pure functions of problem and machine.
//!
//! The invariant: nothing here is measured or looked up at run time, and every number stands beside
//! its reason. None of it changes a result beyond rounding, and what the caller asked to be batch
//! invariant never looks at another sequence's length.
//!
//! Rows are counted flat: a tile holds all query heads of a group at a position, so that K and V are
//! read once a group, and a sequence of `q_len` rows has `q_len * group` flat rows a KV head.

use attn_core::{Bytes, CudaCaps, HostCaps, KernelDesc, Problem, Refusal, Split, Tile};

/// Flat query rows of a CPU product tile: three vectors of AVX-512 are the widest block whose sums stay
/// in registers beside the operands. A tile is computed whole, however few of its rows exist.
pub const TILE_ROWS: usize = 48;

/// Fewest flat rows of a CPU prefill task: fewer would use a converted block of K and V too briefly.
pub const TASK_ROWS: usize = 2 * TILE_ROWS;

/// Most flat rows of a CPU prefill task. Converting a block costs what a tenth of a 48-row tile costs, so
/// that past 2000 rows there is nothing left to save, on a machine with any cache.
pub const MOST_ROWS: usize = 42 * TILE_ROWS;

/// Most keys of a CPU tile. Scores of 48 rows by 128 keys are 24 KiB and stay in the first-level cache
/// between the two products; 128 was the fastest of 32 to 512 where it was measured.
pub const MOST_KEYS: usize = 128;

/// Key tiles are a multiple of this, one cache line of f32.
pub const KEY_STEP: usize = 16;

/// Keys of a CPU backward tile, which holds weights and their gradients: 24 KiB for 48 rows.
pub const BACKWARD_KEYS: usize = 64;

/// Most keys of a CPU decode tile: as many rows as the kernel addresses one by one in its inner loop.
pub const DECODE_TILE_KEYS: usize = 64;

/// Bytes of keys of a CPU decode tile. Values of the tile are fetched while its keys are met, and keys of the next
/// one while its values are: with more than this in flight the fetches come too early and are lost.
pub const DECODE_TILE_BYTES: usize = 128 << 10;

/// Fewest and most keys of a decode chunk. A chunk takes all KV heads of its keys along, so 128 of them are
/// already hundreds of KiB, well past what it costs to hand out a task; and with 512 a sequence of a few
/// thousand keys still makes a task for every thread of a host.
pub const CHUNK_KEYS: (usize, usize) = (128, 512);

/// Keys that must be there for each query row before rows count as few. Below this much of the score
/// matrix is the triangle of the rows' own keys, and one prefill tile holds all of it.
pub const KEYS_PER_ROW: usize = 16;

/// Whether few rows meet many keys, so that dividing the keys among threads beats dividing the rows.
///
/// Either the rows do not fill one prefill tile, which then computes for empty lanes what a decode
/// kernel would not; or there are fewer tasks of rows than threads, and the rest would idle.
#[must_use]
pub fn is_decode_shaped(problem: &Problem, host: &HostCaps) -> bool {
    let is_idle = row_tasks(problem, TASK_ROWS) < host.threads;
    has_many_keys_a_row(problem) && (flat_rows(problem) < TILE_ROWS || is_idle)
}

/// Whether there are rows, each of the longest sequence with [`KEYS_PER_ROW`] keys.
fn has_many_keys_a_row(problem: &Problem) -> bool {
    let rows = problem.lengths().longest_q();
    // A single row has no triangle.
    rows == 1 || (rows > 0 && visited_keys(problem) / KEYS_PER_ROW >= rows)
}

/// Tasks of so many flat rows of a KV head, every sequence counted as the longest.
fn row_tasks(problem: &Problem, rows: usize) -> usize {
    let heads = problem.lengths().batch().saturating_mul(problem.kv_heads());
    heads.saturating_mul(flat_rows(problem).div_ceil(rows))
}

/// Keys that the rows of the longest sequence can see: a left window bounds them however long the cache is.
fn visited_keys(problem: &Problem) -> usize {
    let lengths = problem.lengths();
    match problem.band().left {
        None => lengths.longest_kv(),
        Some(left) => lengths.longest_kv().min(left.saturating_add(lengths.longest_q())),
    }
}

/// Flat query rows a KV head of the longest sequence.
pub(crate) fn flat_rows(problem: &Problem) -> usize {
    problem.lengths().longest_q().saturating_mul(problem.group())
}

/// Pairs of a sequence and a KV head.
pub(crate) fn units(problem: &Problem) -> usize {
    problem.lengths().batch().saturating_mul(problem.kv_heads())
}

/// The tile of the CPU prefill kernel: the rows that share a converted block of K and V, and its keys.
///
/// Queries and outputs of the rows take half of the L2, K and V of the keys a quarter, widened to f32; the
/// last quarter is left to scores, bias and mask. Both are met again for every block and every tile.
#[must_use]
pub fn prefill_tile(problem: &Problem, host: &HostCaps) -> Tile {
    let row = dims(problem).saturating_mul(size_of::<f32>());
    let rows = l2_part(host, 2) / row / TILE_ROWS * TILE_ROWS;
    Tile {
        q: rows.clamp(TILE_ROWS, MOST_ROWS).min(whole_tiles(problem)),
        kv: tile_keys(problem, l2_part(host, 4) / row),
    }
}

/// The tile of the CPU backward kernel: the rows whose dQ one task keeps, and the keys whose dK and dV
/// another one does.
///
/// Both meet the other side tile by tile, so that what they keep takes half of the L2: queries, output
/// gradients and dQ of the rows; K, V and their gradients of the keys.
#[must_use]
pub fn backward_tile(problem: &Problem, host: &HostCaps) -> Tile {
    let half = l2_part(host, 2) / size_of::<f32>();
    let row = dims(problem).saturating_add(2 * problem.head_dim());
    let keys = half / dims(problem).saturating_mul(2) / BACKWARD_KEYS * BACKWARD_KEYS;
    let there = problem.lengths().longest_kv().clamp(1, MOST_ROWS);
    Tile {
        q: (half / row / TILE_ROWS * TILE_ROWS)
            .clamp(TILE_ROWS, MOST_ROWS)
            .min(whole_tiles(problem)),
        kv: keys.clamp(BACKWARD_KEYS, MOST_ROWS).min(there.next_multiple_of(BACKWARD_KEYS)),
    }
}

/// Keys of a tile that fit, within bounds, and no more than there are: cutting a tile at the end of
/// the longest sequence moves no tile boundary.
fn tile_keys(problem: &Problem, fit: usize) -> usize {
    let there = problem.lengths().longest_kv().clamp(1, MOST_KEYS).next_multiple_of(KEY_STEP);
    (fit / KEY_STEP * KEY_STEP).clamp(KEY_STEP, MOST_KEYS).min(there)
}

/// Flat rows of the longest sequence, in whole tiles.
fn whole_tiles(problem: &Problem) -> usize {
    flat_rows(problem).clamp(1, MOST_ROWS).next_multiple_of(TILE_ROWS)
}

/// Keys of a sequence that should make work for every thread.
const LONG_CONTEXT: usize = 4096;

/// Most keys of a chunk on a host.
const LONGEST_CHUNK: usize = 2048;

/// The tile of the CPU decode kernel: all flat rows of a KV head, and its keys.
#[must_use]
pub fn decode_tile(problem: &Problem) -> Tile {
    let row = problem.kv_heads() * problem.head_dim() * problem.kv_dtype().size();
    let fit = (DECODE_TILE_BYTES / row / KEY_STEP * KEY_STEP).clamp(KEY_STEP, DECODE_TILE_KEYS);
    let there = problem.lengths().longest_kv().max(1).next_multiple_of(KEY_STEP);
    Tile { q: flat_rows(problem).max(1), kv: fit.min(there) }
}

/// How a decode kernel divides the keys that a sequence sees: as the caller asked, or in chunks of a
/// fixed size.
///
/// A chunk leaves one f32 row and its sum behind for each query head where it read `chunk` rows of K and of V
/// for each KV head: 128 keys of f32, or 256 of a 16-bit type, for each head of a group keep what is
/// written and read back for the merge at 1 % of that. The size depends on no length, so that a
/// sequence is cut alike in every batch; one from the number of idle threads would fill them better and
/// change bits with the batch.
#[must_use]
pub fn decode_split(problem: &Problem) -> Split {
    if let Some(parts) = problem.options().num_splits {
        return Split::Parts(parts);
    }
    let (least, most) = CHUNK_KEYS;
    let keys = problem.group().saturating_mul(512 / problem.kv_dtype().size());
    Split::Chunks(keys.clamp(least, most))
}

/// As [`decode_split`], with longer chunks where few threads share the keys.
///
/// A sequence of 4096 keys fills the threads; what each of them reads without a break is then as long as it
/// can be. On two threads chunks of 2048 keys read some 8 % faster than of 512
/// (`benches/record/xeon-avx512-2vcpu/decode-chunks-2026-11-30.txt`).
#[must_use]
pub fn host_decode_split(problem: &Problem, host: &HostCaps) -> Split {
    match decode_split(problem) {
        Split::Chunks(keys) => {
            Split::Chunks(keys.max((LONG_CONTEXT / host.threads.max(1)).min(LONGEST_CHUNK)))
        }
        asked => asked,
    }
}

/// The largest tile of a device kernel whose operands fit the shared memory of a block, and the bytes it takes.
///
/// # Errors
/// [`Refusal::SharedMemory`] with the need of the smallest tile.
pub fn device_tile(
    kernel: &KernelDesc,
    problem: &Problem,
    device: &CudaCaps,
) -> Result<(Tile, Bytes), Refusal> {
    let tiles = (kernel.tiles)(problem);
    let smallest = tiles.iter().map(|tile| tile.q).min().unwrap_or(1);
    // Rows that do not exist are not worth their memory, unless nothing else fits. But how many exist in the
    // longest sequence is no business of the others, when the caller says so.
    let rows = match (problem.options().batch_invariant, kernel.max_query_rows) {
        (false, _) => flat_rows(problem),
        // Of a kernel for few rows the smallest tile always is the one: most sequences have one row.
        (true, Some(_)) => 1,
        (true, None) => usize::MAX,
    };
    let is_wasteful = |tile: &Tile| tile.q > smallest && tile.q / 2 >= rows;
    let mut needs = Bytes::ZERO;
    for last_resort in [false, true] {
        for tile in tiles.iter().filter(|tile| is_wasteful(tile) == last_resort) {
            needs = (kernel.shared_memory)(problem, *tile);
            if needs <= device.smem_per_block {
                return Ok((*tile, needs));
            }
        }
    }
    Err(Refusal::SharedMemory { needs, has: device.smem_per_block })
}

/// Whether few rows meet many keys, so that dividing the keys among blocks beats dividing the rows.
///
/// As [`is_decode_shaped`], but a device has a hundred blocks to keep busy: rows that fill no more than one tile
/// of 128 leave most of it idle unless the keys are divided.
#[must_use]
pub fn is_device_decode_shaped(problem: &Problem, device: &CudaCaps) -> bool {
    let is_idle = row_tasks(problem, DEVICE_ROWS) < device.sm_count as usize;
    has_many_keys_a_row(problem) && (flat_rows(problem) <= DEVICE_ROWS || is_idle)
}

/// Query rows of the largest tile of a device.
const DEVICE_ROWS: usize = 128;

/// Most blocks of a decode kernel that a multiprocessor holds at once: two fill its registers.
const DECODE_BLOCKS: u64 = 2;

/// Keys of a decode part are a multiple of this, or of the tile's where that has more: a tile of keys of each of four teams.
const PART_STEP: usize = 64;

/// Most rows of partial results of a unit, for one block joins them: 16 query rows over 32k keys, on an H200, read 647 GB/s in
/// 64 parts and 514 in 128 (`benches/notes/cuda-decode.md`).
const MERGED_ROWS: usize = 1024;

/// Keys of a part of a full tile of rows up to which half the device takes less time than all of it: 32 sequences of 1k keys under 16
/// query heads over one took 9.6 us in 2 parts, a cluster each, and 11.3 in 4, on an H200 (`benches/notes/cuda-decode.md`).
const SHORT_PART: usize = 256;

/// Keys of a sequence from which two waves of blocks, a multiprocessor each, are no worse than smaller blocks.
const LONG_KEYS: usize = 8192;

/// Whether sequences have [`LONG_KEYS`] keys on average.
pub(crate) fn has_long_keys(problem: &Problem) -> bool {
    let lengths = problem.lengths();
    visited_keys(problem) >= LONG_KEYS
        && lengths.total_kv() >= LONG_KEYS.saturating_mul(lengths.batch())
}

/// Most blocks of a cluster, on GPUs that have clusters; the engine of the kernels bounds its own by the same number.
const CLUSTER: usize = 16;

/// The parts of a sequence whose bits must not depend on its batch: enough for a lone one to occupy the device, and of keys enough
/// for a batch of short ones.
const INVARIANT: Split = Split::Between { parts: 16, keys: 256 };

/// KV heads up to which parts that depend on no batch are worth whole multiprocessors: of one head 8 sequences of 8k keys take 15.4 us
/// on them and 18.3 on halves, of eight 85.8 and 73.6, on an H200 (`benches/notes/cuda-decode.md`).
pub(crate) const FEW_HEADS: usize = 2;

/// How a device decode kernel divides the keys that a sequence sees: as the caller asked, or so that the blocks
/// fill the device once.
///
/// Each part should stream equally many bytes, so all parts have one length, that of the whole batch's keys over
/// the blocks that run at once; it is stretched so that the longest sequence has no short last part, and the blocks
/// do not pass what runs at once by a few. Nor are there more parts than one block joins in time. A kernel of whole
/// multiprocessors joins parts of equal sequences in clusters: of these there are as many as make whole ones.
#[must_use]
pub fn device_decode_split(
    kernel: &KernelDesc,
    problem: &Problem,
    tile: Tile,
    shared_memory: Bytes,
    device: &CudaCaps,
) -> Split {
    if let Some(parts) = problem.options().num_splits {
        return Split::Parts(parts);
    }
    if problem.options().batch_invariant {
        return INVARIANT;
    }
    let lengths = problem.lengths();
    let keys = (0..lengths.batch()).map(|sequence| visited_by(problem, sequence));
    let (total, longest) =
        keys.fold((0usize, 0), |(sum, most), n| (sum.saturating_add(n), most.max(n)));
    let tiles = flat_rows(problem).div_ceil(tile.q.max(1)).saturating_mul(problem.kv_heads());
    let has_clusters = kernel.most_units.is_some();
    let most = if has_clusters { 1 } else { DECODE_BLOCKS };
    let held = (device.smem_per_block.0 / shared_memory.0.max(1)).clamp(1, most);
    let held = usize::try_from(held).unwrap_or(1);
    let blocks = held.saturating_mul(device.sm_count as usize).max(1);
    let least = PART_STEP.max(tile.kv);
    let step = |keys: usize| keys.max(least).div_ceil(least).saturating_mul(least);
    let even = step(total.saturating_mul(tiles).div_ceil(blocks));
    let merged = MERGED_ROWS / flat_rows(problem).clamp(1, tile.q.clamp(1, MERGED_ROWS));
    let parts = (longest / even).clamp(1, merged.max(1));
    if parts == 1 {
        return Split::Whole;
    }
    let is_equal = longest.saturating_mul(lengths.batch()) == total;
    if has_clusters && is_equal {
        let units = tiles.saturating_mul(lengths.batch());
        let rows = flat_rows(problem);
        // Half the device, which clusters of two find room on at once, is enough for so few bytes.
        let is_short = rows >= tile.q && longest.div_ceil(parts) <= SHORT_PART;
        let most = if is_short { blocks / 2 } else { blocks };
        let parts = if is_short { parts.min((most / units.max(1)).max(1)) } else { parts };
        return Split::Parts(whole_clusters(parts, most / units.max(1)));
    }
    Split::Chunks(step(longest.div_ceil(parts)))
}

/// Keys that the rows of a sequence visit: its window bounds them however long it is.
fn visited_by(problem: &Problem, sequence: usize) -> usize {
    let lengths = problem.lengths();
    let (q_len, kv_len) = (lengths.q(sequence), lengths.kv(sequence));
    match problem.band().left {
        _ if q_len == 0 => 0,
        None => kv_len,
        Some(left) => kv_len.min(left.saturating_add(q_len)),
    }
}

/// Fewest flat rows of a sequence for which a tile of 128 is worth its empty half.
const WIDE_ROWS: usize = 64;

/// Whether the rows of the longest sequence, the heads of a group side by side, fill half of a tile or more.
pub(crate) fn has_wide_rows(problem: &Problem) -> bool {
    flat_rows(problem) >= WIDE_ROWS
}

/// Whether a kernel puts the heads of a group into one tile of rows, as it does where they divide it.
pub(crate) fn packs_group(problem: &Problem, tile: Tile) -> bool {
    tile.q.is_multiple_of(problem.group().max(1))
}

/// Query rows of a sequence that are as few as a decode step's.
const STEP_ROWS: usize = 16;

/// Fewest keys of a part of the few rows of a step, which are one or two tiles.
const STEP_PART: usize = 128;

/// Fewest keys of a part of more rows, whose partial results are as many more.
const CHUNK_PART: usize = 512;

/// Keys that parts must save the longest sequence: a tile of 128 rows meets about a hundred in a microsecond, and the join
/// takes two or three of these.
const SAVED_KEYS: usize = 256;

/// How a device kernel of row tiles divides the keys that a sequence sees: as the caller asked, or so that the blocks fill
/// the device once; not at all where rows are as many as keys, where tiles of rows fill the device alone, and where a
/// sequence's bits must not depend on its batch.
///
/// As [`device_decode_split`] all parts have one length, that of the whole batch's keys, once for each tile of rows, over the
/// blocks that run at once; but a launch of its own joins them, so that there may be any number.
#[must_use]
pub fn device_prefill_split(
    kernel: &KernelDesc,
    problem: &Problem,
    tile: Tile,
    device: &CudaCaps,
) -> Split {
    if !kernel.divides_keys {
        return Split::Whole;
    }
    if let Some(parts) = problem.options().num_splits {
        return Split::Parts(parts);
    }
    if problem.options().batch_invariant || !has_many_keys_a_row(problem) {
        return Split::Whole;
    }
    let lengths = problem.lengths();
    let rows = tile.q.max(1);
    // Tiles of rows of a sequence, of all heads: of one head, or of the heads of a group side by side.
    let tiles = |sequence: usize| {
        let (q_len, group) = (lengths.q(sequence), problem.group().max(1));
        let alone = q_len.div_ceil(rows).saturating_mul(problem.q_heads());
        let packed = q_len.saturating_mul(group).div_ceil(rows).saturating_mul(problem.kv_heads());
        if rows.is_multiple_of(group) { packed.min(alone) } else { alone }
    };
    let (mut work, mut longest) = (0usize, 0);
    for sequence in 0..lengths.batch() {
        let keys = visited_by(problem, sequence);
        work = work.saturating_add(keys.saturating_mul(tiles(sequence)));
        longest = longest.max(keys);
    }
    let step = tile.kv.max(1);
    let least = if lengths.longest_q() <= STEP_ROWS { STEP_PART } else { CHUNK_PART };
    let whole_tiles = |keys: usize| keys.max(least).div_ceil(step).saturating_mul(step);
    let even = whole_tiles(work.div_ceil((device.sm_count as usize).max(1)));
    let part = whole_tiles(longest.div_ceil((longest / even.max(1)).max(1)));
    if part.saturating_add(SAVED_KEYS) > longest { Split::Whole } else { Split::Chunks(part) }
}

/// About as many parts that make whole clusters, whose sizes are powers of two; as many where there is no room for more than
/// `most`.
fn whole_clusters(parts: usize, most: usize) -> usize {
    if parts > CLUSTER {
        return parts / CLUSTER * CLUSTER;
    }
    let whole = parts.next_power_of_two();
    if whole <= most { whole } else { parts }
}

/// Elements of a key and a value row. Sizes saturate here and below: a problem without rows may state any
/// dimension.
fn dims(problem: &Problem) -> usize {
    problem.head_dim().saturating_add(problem.value_dim())
}

/// One of `parts` equal parts of the L2, in bytes.
fn l2_part(host: &HostCaps, parts: u64) -> usize {
    usize::try_from(host.l2.0 / parts).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use attn_core::{DType, DimRule, Engine, Family, Features, ProblemSpec};

    use super::*;

    const HOST: HostCaps = HostCaps { threads: 2, l2: Bytes(2 << 20) };

    fn problem(q: &[usize], kv: &[usize], heads: (usize, usize), dim: usize) -> Problem {
        Problem::new(ProblemSpec::new(DType::F32, heads.0, heads.1, dim, q, kv)).expect("valid")
    }

    #[test]
    fn prefill_tile_stays_within_its_parts_of_the_l2() {
        for (dim, rows, keys) in
            [(64, 2016, 128), (128, 1008, 128), (512, 240, 128), (2048, 48, 32)]
        {
            let tile = prefill_tile(&problem(&[4096], &[4096], (8, 8), dim), &HOST);
            assert_eq!(tile, Tile { q: rows, kv: keys }, "{dim}");
            assert!((tile.q * 2 * dim * 4) as u64 <= HOST.l2.0 / 2, "{dim}");
            assert!((tile.kv * 2 * dim * 4) as u64 <= HOST.l2.0 / 4, "{dim}");
        }
    }

    #[test]
    fn tile_is_no_larger_than_the_call() {
        let tile = prefill_tile(&problem(&[10], &[20], (8, 2), 64), &HOST);
        assert_eq!(tile, Tile { q: TILE_ROWS, kv: 32 });
    }

    #[test]
    fn tile_stays_valid_at_extremes() {
        let tiny = HostCaps { threads: 0, l2: Bytes(0) };
        let huge = HostCaps { threads: usize::MAX, l2: Bytes(u64::MAX) };
        for host in [&tiny, &HOST, &huge] {
            for (q, kv) in [(&[][..], &[][..]), (&[0], &[0]), (&[1], &[7]), (&[9], &[1 << 40])] {
                let problem = problem(q, kv, (4, 2), 72);
                for tile in [
                    prefill_tile(&problem, host),
                    backward_tile(&problem, host),
                    decode_tile(&problem),
                ] {
                    assert!(tile.q >= 1 && tile.kv >= KEY_STEP, "{tile:?}");
                    assert!(tile.kv <= MOST_ROWS, "{tile:?}");
                }
            }
        }
    }

    #[test]
    fn decode_chunks_grow_with_the_group_alone() {
        let alone = problem(&[1], &[700], (8, 2), 128);
        let batch = problem(&[1, 4, 1], &[700, 9000, 3], (8, 2), 128);
        assert_eq!(decode_split(&alone), decode_split(&batch));
        assert_eq!(decode_split(&alone), Split::Chunks(512));
        let ungrouped = problem(&[1], &[700], (8, 8), 128);
        assert_eq!(decode_split(&ungrouped), Split::Chunks(128));
        let many = HostCaps { threads: 64, ..HOST };
        assert_eq!(host_decode_split(&ungrouped, &HOST), Split::Chunks(2048));
        assert_eq!(host_decode_split(&ungrouped, &many), Split::Chunks(128));
    }

    const DEVICE: CudaCaps = CudaCaps {
        name: String::new(),
        compute: (9, 0),
        sm_count: 132,
        smem_per_block: Bytes(227 << 10),
        memory: Bytes(1 << 30),
    };

    const SMALL: Tile = Tile { q: 16, kv: 16 };

    /// Shared memory of which a multiprocessor has twice as much, and of which it has not.
    const HALF: Bytes = Bytes(100 << 10);
    const WHOLE: Bytes = Bytes(200 << 10);

    const fn kernel(most_units: Option<usize>) -> KernelDesc {
        KernelDesc {
            name: "made_up",
            engine: Engine::Cuda,
            family: Family::Decode,
            q_dtypes: &[],
            kv_dtypes: &[],
            head_dims: DimRule::ANY,
            value_dims: DimRule::ANY,
            max_query_rows: Some(16),
            most_units,
            divides_keys: false,
            features: Features::ALL,
            requires: Features::NONE,
            min_compute: None,
            max_compute: None,
            tiles: |_| &[],
            shared_memory: |_, _| Bytes::ZERO,
            workspace: |_, _, _, _| Bytes::ZERO,
        }
    }

    #[test]
    fn device_split_fills_the_device_once() {
        let split = |q: &[usize], kv: &[usize], heads| {
            device_decode_split(&kernel(None), &problem(q, kv, heads, 128), SMALL, HALF, &DEVICE)
        };
        // 64 heads of sequences, 264 blocks at once: four parts each.
        assert_eq!(split(&[1; 8], &[8192; 8], (32, 8)), Split::Chunks(2048));
        // 256 fill it already; a second part for each would be a second wave.
        assert_eq!(split(&[1; 32], &[8192; 32], (32, 8)), Split::Whole);
        // Few keys are not cut into crumbs.
        assert_eq!(split(&[1], &[512], (32, 8)), Split::Chunks(64));
        assert_eq!(split(&[1], &[100], (32, 8)), Split::Whole);
        // Nor many into more parts than one block can join.
        assert_eq!(split(&[1], &[32768], (16, 1)), Split::Chunks(512));
    }

    #[test]
    fn device_split_makes_whole_clusters_of_equal_sequences() {
        let tile = Tile { q: 16, kv: 128 };
        let split = |kv: &[usize], heads| {
            let problem = problem(&[1; 8][..kv.len()], kv, heads, 128);
            device_decode_split(&kernel(Some(1)), &problem, tile, WHOLE, &DEVICE)
        };
        assert_eq!(split(&[8192; 8], (32, 8)), Split::Parts(2));
        for keys in [600, 1023, 1024, 1025] {
            let parts = if keys < 768 { 4 } else { 8 };
            assert_eq!(split(&[keys], (32, 8)), Split::Parts(parts), "{keys}");
        }
        assert_eq!(split(&[8193], (32, 8)), Split::Parts(16));
        assert_eq!(split(&[5000], (16, 1)), Split::Parts(32));
        // Three parts of five sequences are 120 blocks; four would be more than the device holds.
        assert_eq!(split(&[8192; 5], (32, 8)), Split::Parts(3));
        assert_eq!(split(&[8192, 8000], (32, 8)), Split::Chunks(1024));
    }

    #[test]
    fn device_split_counts_the_blocks_that_a_multiprocessor_holds() {
        let eight = problem(&[1; 8], &[8192; 8], (32, 8), 128);
        let split = |most_units, memory| {
            device_decode_split(&kernel(most_units), &eight, SMALL, memory, &DEVICE)
        };
        assert_eq!(split(None, HALF), Split::Chunks(2048));
        assert_eq!(split(None, WHOLE), Split::Chunks(4096));
        assert_eq!(split(Some(1), HALF), Split::Parts(2));
    }

    #[test]
    fn prefill_split_fills_the_device_where_rows_leave_it_idle() {
        let tile = Tile { q: 128, kv: 128 };
        let kernel = KernelDesc { divides_keys: true, ..kernel(None) };
        let with = |q: &[usize], kv: &[usize], heads, edit: fn(&mut ProblemSpec)| {
            let mut spec = ProblemSpec::new(DType::BF16, heads, 1, 128, q, kv);
            edit(&mut spec);
            let problem = Problem::new(spec).expect("valid");
            device_prefill_split(&kernel, &problem, tile, &DEVICE)
        };
        let split = |q: &[usize], kv: &[usize], heads| with(q, kv, heads, |_| ());
        // One tile of 128 rows: 132 parts at most, of one tile of keys at least.
        assert_eq!(split(&[8], &[1024], 16), Split::Chunks(128));
        assert_eq!(split(&[8], &[384], 16), Split::Chunks(128));
        assert_eq!(split(&[8], &[383], 16), Split::Whole);
        assert_eq!(split(&[8], &[32768], 16), Split::Chunks(256));
        assert_eq!(split(&[8], &[1 << 20], 16), Split::Chunks(8192));
        // 66 tiles are half of the device, 67 more than that.
        assert_eq!(split(&[8; 66], &[4096; 66], 16), Split::Chunks(2048));
        assert_eq!(split(&[8; 67], &[4096; 67], 16), Split::Whole);
        // More rows leave more to join.
        assert_eq!(split(&[128], &[8192], 8), Split::Chunks(512));
        assert_eq!(split(&[64], &[1024], 2), Split::Chunks(512));
        assert_eq!(split(&[64], &[1000], 2), Split::Whole);
        // A prompt's own keys are a triangle.
        assert_eq!(split(&[1024], &[1024], 2), Split::Whole);
        // One long sequence among short ones.
        assert_eq!(split(&[8, 8, 8], &[100, 65536, 100], 16), Split::Chunks(512));
        // A group that makes no tile has a tile for each head.
        assert_eq!(split(&[8], &[65536], 12), Split::Chunks(6656));
        assert_eq!(with(&[8], &[65536], 16, |s| s.window_left = Some(100)), Split::Whole);
        assert_eq!(with(&[8], &[900], 16, |s| s.options.num_splits = Some(5)), Split::Parts(5));
        assert_eq!(with(&[8], &[9000], 16, |s| s.options.batch_invariant = true), Split::Whole);
    }

    #[test]
    fn device_split_of_an_invariant_call_knows_its_own_length_alone() {
        let mut spec = ProblemSpec::new(DType::BF16, 8, 2, 64, &[1, 1], &[70, 90_000]);
        spec.options.batch_invariant = true;
        let problem = Problem::new(spec).expect("valid");
        assert_eq!(
            device_decode_split(&kernel(None), &problem, SMALL, HALF, &DEVICE),
            Split::Between { parts: 16, keys: 256 }
        );
    }
}
