//! How many neighbouring parts of the keys share a cluster, whose blocks join them.
//!
//! The invariant: a cluster holds parts of one unit, and all clusters of a launch run at one time: what waits for room for
//! a whole cluster waits much longer than a block does. Of a call whose bits must not depend on the batch a cluster has all parts
//! of a unit or one, since these come to the same sums (`cuda/attn/merge.cuh`).

use attn_core::{Problem, Split};

use super::config::MOST_CLUSTER;
use super::lengths::{Lengths, parts};
use crate::error::Error;

/// Rows of a unit from which it is worth joining some of its parts, where a cluster cannot have all of them: the block that
/// ends last would read all parts of 16 rows alone, on an H200 for some 3 us. Of 4 rows it reads 16 parts in less time than
/// a cluster takes to find room (`benches/notes/cuda-decode.md`).
const MANY_ROWS: usize = 16;

/// Blocks of a cluster; 1 is no cluster. `most` answers how many clusters of so many blocks the device holds.
pub(super) fn blocks(
    problem: &Problem,
    lengths: &Lengths,
    split: Split,
    most: impl Fn(u32) -> Result<u32, Error>,
) -> Result<u32, Error> {
    // Unequal sequences have parts of their own.
    if lengths.uniform.is_none() {
        return Ok(1);
    }
    let parts = parts(problem, split, 0);
    let rows = problem.lengths().longest_q().saturating_mul(problem.group());
    // All of them, of any number; else some, which are joined before the others: other sums than of all at once, which bits
    // that no batch mate changes do not allow.
    let is_worth = rows >= MANY_ROWS && !problem.options().batch_invariant;
    let halves = (1..=MOST_CLUSTER.ilog2()).rev().map(|power| 1 << power);
    let some = halves.filter(|&blocks| is_worth && parts.is_multiple_of(blocks as usize));
    let all = u32::try_from(parts).ok().filter(|parts| (2..=MOST_CLUSTER).contains(parts));
    for blocks in all.into_iter().chain(some) {
        if lengths.blocks / blocks <= most(blocks)? {
            return Ok(blocks);
        }
    }
    Ok(1)
}

#[cfg(test)]
mod tests {
    use attn_core::{DType, ProblemSpec};

    use super::super::lengths::Division;
    use super::*;

    /// The cluster of one query row a sequence, on a device that holds 7 clusters of 16 blocks, 16 of 8, 32 of 4, and
    /// 66 of 2.
    fn cluster(heads: (usize, usize), kv_lens: &[usize], parts: usize) -> u32 {
        let q_lens = vec![1; kv_lens.len()];
        let spec = ProblemSpec::new(DType::BF16, heads.0, heads.1, 128, &q_lens, kv_lens);
        let problem = Problem::new(spec).expect("valid");
        let split = Split::Parts(parts);
        let division = Division::Tiles { tile: 16, pack: problem.group(), split };
        let lengths = Lengths::new(&problem, division).expect("small");
        let most = |blocks: u32| {
            Ok([66, 66, 44, 32, 24, 21, 16, 16, 8, 8, 8, 8, 8, 7, 7, 7][blocks as usize - 1])
        };
        blocks(&problem, &lengths, split, most).expect("no driver")
    }

    #[test]
    fn cluster_has_all_parts_where_the_device_holds_it() {
        assert_eq!(cluster((32, 8), &[1024], 8), 8);
        assert_eq!(cluster((16, 1), &[1024; 7], 16), 16);
        assert_eq!(cluster((32, 8), &[1024; 8], 2), 2);
        // Eight clusters of 16, and few rows to join.
        assert_eq!(cluster((32, 8), &[8192], 16), 1);
        assert_eq!(cluster((32, 8), &[1024], 3), 3);
        assert_eq!(cluster((16, 1), &[8192; 8], 12), 12);
        assert_eq!(cluster((32, 8), &[1024], 1), 1);
    }

    #[test]
    fn cluster_has_some_of_many_parts() {
        assert_eq!(cluster((16, 1), &[8192], 64), 16);
        assert_eq!(cluster((16, 1), &[32768], 128), 8);
    }

    #[test]
    fn cluster_is_of_equal_sequences() {
        assert_eq!(cluster((32, 8), &[1024, 1000], 8), 1);
    }
}
