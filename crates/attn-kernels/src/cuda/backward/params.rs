//! What the launches of a backward are told: the host's mirror of `cuda/base/backward_params.cuh`, field by field.
//!
//! The invariant: as of [`crate::cuda::params`], both sides lay out the same bytes; the size stands in a test beside that
//! which the device source asserts.

use crate::cuda::params::{Address, Divisor, ForwardParams, Pairs, PerHead, Rows};

/// Padded query rows of a sequence are a multiple of this.
pub(crate) const ROW_TILE: usize = 128;

/// Padded query rows that a turn counts for.
pub(crate) const TURN_ROWS: usize = 16;

/// `dq_sum` is added to in an order that depends on the problem alone.
pub(crate) const DETERMINISTIC: u32 = 1;
/// The gradient of the bias is left to the naive kernel.
pub(crate) const BIAS_LAST: u32 = 2;
/// The log-sum-exp of the workspace is a natural logarithm.
pub(crate) const NATURAL: u32 = 4;
/// The main kernel adds to `row_sums`.
pub(crate) const ROW_SUMS: u32 = 8;
/// `dq_sum` is in squares of 64 rows and columns, as products leave them.
pub(crate) const SUMS_IN_FOURS: u32 = 16;

/// A backward call; see the device header for each field.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub(crate) struct BackwardParams {
    pub(crate) call: ForwardParams,
    pub(crate) d_o: Rows,
    pub(crate) dq: Rows,
    pub(crate) dk: Rows,
    pub(crate) dv: Rows,
    pub(crate) dbias: Pairs,
    pub(crate) dsinks: PerHead,
    pub(crate) lse2: Address,
    pub(crate) delta: Address,
    pub(crate) dq_sum: Address,
    pub(crate) row_sums: Address,
    pub(crate) factor: Address,
    pub(crate) turns: Address,
    pub(crate) tile_starts: Address,
    pub(crate) padded_rows: i64,
    pub(crate) turn_stride: i64,
    pub(crate) uniform_tiles: Divisor,
    pub(crate) dq_dim: i32,
    pub(crate) row_tiles: i32,
    pub(crate) key_tiles: i32,
    pub(crate) written_keys: i32,
    pub(crate) kv_heads: i32,
    pub(crate) flags: u32,
    pub(crate) phase: i32,
    pub(crate) bias_extents: [i32; 4],
    pub(crate) reserved: i32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn params_have_the_size_that_the_device_asserts() {
        assert_eq!(size_of::<BackwardParams>(), size_of::<ForwardParams>() + 328);
    }
}
