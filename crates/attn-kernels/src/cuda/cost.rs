//! What a plan of a CUDA kernel takes beside its tensors.
//!
//! The invariant: a plan states what its run needs, counted here in closed form, without the tables that the
//! engine uploads. A workspace may hold more: it keeps several plans, and what it allocates for unequal lengths and for
//! partial results grows by steps.

use attn_core::{Bytes, HostCaps, Problem, Split, Tile};

use super::config::hopper;
use super::lengths::{Division, equal_lengths, parts, written_rows};
use super::order::{COUNTER_BYTES, Cut, Order};

/// Workspace of the naive kernel: the prefix sums.
pub(crate) fn rows(problem: &Problem, _: &HostCaps, _: Tile, _: Split) -> Bytes {
    tables(problem, Division::Rows, false)
}

/// Workspace of the Hopper prefill kernel: two counters; for unequal sequences, their prefix sums and the order of
/// their tiles; an f32 output row and an LSE for each part of each row of sequences with more than one part.
pub(crate) fn ordered(problem: &Problem, _: &HostCaps, tile: Tile, split: Split) -> Bytes {
    let cut = Cut { tile: tile.q, pack: hopper::pack(problem, tile), split };
    let rows = partial_rows(problem, split);
    let row = problem.q_heads().saturating_mul(problem.value_dim() + 1);
    let partials = Bytes::of(rows.saturating_mul(row), size_of::<f32>());
    let tables = tables(problem, cut.division(), rows > 0);
    Bytes::of(COUNTER_BYTES, 1) + tables + Order::bytes(problem, cut) + partials
}

/// Workspace of the portable kernels and of the Hopper decode kernel: prefix sums, and an f32 output row, an LSE and a count for each part of each row of
/// sequences with more than one part.
pub(crate) fn tiles(problem: &Problem, _: &HostCaps, tile: Tile, split: Split) -> Bytes {
    let rows = partial_rows(problem, split);
    let row = problem.q_heads().saturating_mul(problem.value_dim() + 2);
    let partials = rows.saturating_mul(row);
    // How heads are packed changes the number of units and not which tables there are.
    let division = Division::Tiles { tile: tile.q, pack: 1, split };
    tables(problem, division, partials > 0) + Bytes::of(partials, size_of::<f32>())
}

/// The same of the portable prefill kernel, whose blocks walk all keys whatever the split.
pub(crate) fn whole_tiles(problem: &Problem, host: &HostCaps, tile: Tile, _: Split) -> Bytes {
    tiles(problem, host, tile, Split::Whole)
}

/// Rows of partial results, of one head.
fn partial_rows(problem: &Problem, split: Split) -> usize {
    (0..problem.lengths().batch())
        .map(|sequence| match parts(problem, split, sequence) {
            0 | 1 => 0,
            parts => parts.saturating_mul(written_rows(problem, sequence)),
        })
        .fold(0, usize::saturating_add)
}

fn tables(problem: &Problem, division: Division, has_parts: bool) -> Bytes {
    let read = division.tables(equal_lengths(problem).is_some(), has_parts).len();
    Bytes::of(read.saturating_mul(problem.lengths().batch() + 1), size_of::<i64>())
}

#[cfg(test)]
mod tests {
    use attn_core::{DType, ProblemSpec};

    use super::super::lengths::Lengths;
    use super::*;

    const TILE: Tile = Tile { q: 16, kv: 16 };

    fn problem(q_lens: &[usize], kv_lens: &[usize]) -> Problem {
        Problem::new(ProblemSpec::new(DType::BF16, 8, 2, 64, q_lens, kv_lens)).expect("valid")
    }

    #[test]
    fn equal_sequences_take_nothing_but_two_counters() {
        for (q_lens, kv_lens) in [(&[100][..], &[300][..]), (&[7; 9], &[64; 9])] {
            let (problem, host) = (problem(q_lens, kv_lens), HostCaps::default());
            assert_eq!(tiles(&problem, &host, TILE, Split::Whole), Bytes::ZERO);
            assert_eq!(ordered(&problem, &host, TILE, Split::Whole), Bytes(8));
        }
    }

    #[test]
    fn stated_bytes_are_those_that_are_uploaded() {
        let host = HostCaps::default();
        let (unequal, equal) = (problem(&[1, 3, 0], &[40, 64, 5]), problem(&[2, 2], &[64, 64]));
        for problem in [unequal, equal] {
            for split in [Split::Whole, Split::Parts(3)] {
                let division = Division::Tiles { tile: 16, pack: 4, split };
                let lengths = Lengths::new(&problem, division).expect("small");
                let tables = lengths.upload().len() * size_of::<i64>();
                let partials = lengths.partial_bytes(64).expect("small");
                let all = tables + partials + lengths.count_bytes().expect("small");
                assert_eq!(tiles(&problem, &host, TILE, split), Bytes(all as u64), "{split}");
            }
            let lengths = Lengths::new(&problem, Division::Rows).expect("small");
            let all = lengths.upload().len() * size_of::<i64>();
            assert_eq!(rows(&problem, &host, TILE, Split::Whole), Bytes(all as u64));
            for split in [Split::Whole, Split::Parts(3), Split::Chunks(50)] {
                let cut = Cut { tile: 16, pack: hopper::pack(&problem, TILE), split };
                let lengths = Lengths::new(&problem, cut.division()).expect("small");
                let list = Order::new(&problem, &lengths, cut).entries.len() * 12;
                let partials = lengths.partial_bytes(64).expect("small");
                let all = 8 + lengths.upload().len() * size_of::<i64>() + list + partials;
                assert_eq!(ordered(&problem, &host, TILE, split), Bytes(all as u64), "{split}");
            }
        }
    }
}
