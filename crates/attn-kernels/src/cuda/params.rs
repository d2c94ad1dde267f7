//! What a launch is told: the host's mirror of `cuda/base/params.cuh`, field by field.
//!
//! The invariant: both sides lay out the same bytes. Every struct is `repr(C)` with explicit padding, and the
//! sizes stand in a test beside those that the device sources assert.

use crate::error::Error;

/// Division of `n < 2^31` by a value known at launch.
///
/// Source: T. Granlund, P. Montgomery, "Division by Invariant Integers using Multiplication", 1994, figure 4.1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Divisor {
    pub(crate) value: u32,
    pub(crate) multiplier: u32,
    pub(crate) shift: u32,
    reserved: u32,
}

impl Divisor {
    /// No divisor.
    pub(crate) const NONE: Self = Self { value: 0, multiplier: 0, shift: 0, reserved: 0 };

    /// The divisor `value`; 0 counts as 1.
    #[must_use]
    pub(crate) fn new(value: u32) -> Self {
        let value = value.max(1);
        // The number of bits that hold value - 1: 2^shift is the next power of two.
        let shift = (value - 1).checked_ilog2().map_or(0, |bits| bits + 1);
        let scaled = 1u64 << (32 + shift);
        let multiplier = scaled.div_ceil(u64::from(value)) - (1 << 32);
        #[expect(clippy::cast_possible_truncation, reason = "below 2^32: 2^shift < 2 * value")]
        let multiplier = multiplier as u32;
        Self { value, multiplier, shift, reserved: 0 }
    }
}

/// A count in the 31 bits that kernels take it in.
///
/// # Errors
/// [`Error::Call`] naming the field.
pub(crate) fn as_i32(field: &'static str, n: usize) -> Result<i32, Error> {
    let refuse = |_| attn_core::Error::invalid(field, "at most 2^31 - 1", n).into();
    i32::try_from(n).map_err(refuse)
}

/// A device address; 0 is an absent tensor.
pub(crate) type Address = u64;

/// Rows of a tensor `[sequence, row, head, element]`; pages and slots in place of sequence and row for a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub(crate) struct Rows {
    pub(crate) data: Address,
    pub(crate) sequence: i64,
    pub(crate) row: i64,
    pub(crate) head: i64,
}

/// A map over (sequence, head, query row or block, key or block).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub(crate) struct Pairs {
    pub(crate) data: Address,
    pub(crate) sequence: i64,
    pub(crate) head: i64,
    pub(crate) row: i64,
    pub(crate) key: i64,
}

/// One f32 for each head, or for each sequence and head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub(crate) struct PerHead {
    pub(crate) data: Address,
    pub(crate) sequence: i64,
    pub(crate) head: i64,
}

/// Where the pages of a sequence are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct BlockTable {
    pub(crate) data: Address,
    pub(crate) sequence: i64,
    pub(crate) column: i64,
    pub(crate) pages: i64,
    pub(crate) page_size: Divisor,
}

/// Query rows are padded to the longest.
pub(crate) const Q_PADDED: u32 = 1;
/// Keys are padded to the longest.
pub(crate) const KV_PADDED: u32 = 2;
/// Keys are in pages.
pub(crate) const PAGED: u32 = 4;
pub(crate) const FIXED_PARTS: u32 = 8;

/// A forward call; see the device header for each field.
#[derive(Debug, Clone, Copy, PartialEq)]
#[repr(C)]
pub(crate) struct ForwardParams {
    pub(crate) q: Rows,
    pub(crate) o: Rows,
    pub(crate) lse: Rows,
    pub(crate) k: Rows,
    pub(crate) v: Rows,
    pub(crate) table: BlockTable,
    pub(crate) mask: Pairs,
    pub(crate) bias: Pairs,
    pub(crate) block_mask: Pairs,
    pub(crate) alibi: PerHead,
    pub(crate) sinks: PerHead,
    pub(crate) q_scale: PerHead,
    pub(crate) k_scale: PerHead,
    pub(crate) v_scale: PerHead,
    pub(crate) q_starts: Address,
    pub(crate) kv_starts: Address,
    pub(crate) unit_starts: Address,
    pub(crate) partial_starts: Address,
    pub(crate) partial_o: Address,
    pub(crate) partial_lse: Address,
    pub(crate) batch: i32,
    pub(crate) q_heads: i32,
    pub(crate) head_dim: i32,
    pub(crate) value_dim: i32,
    pub(crate) group: Divisor,
    pub(crate) pack: Divisor,
    pub(crate) padded_rows: i32,
    pub(crate) flags: u32,
    pub(crate) left: i32,
    pub(crate) right: i32,
    pub(crate) scale: f32,
    pub(crate) softcap: f32,
    pub(crate) split_keys: i32,
    pub(crate) split_parts: i32,
    pub(crate) block_q: Divisor,
    pub(crate) block_kv: Divisor,
    pub(crate) uniform_units: Divisor,
    pub(crate) uniform_q: i32,
    pub(crate) uniform_kv: i32,
    pub(crate) counter: Address,
    pub(crate) order: Address,
    pub(crate) work: i32,
    pub(crate) section: i32,
    pub(crate) most_visits: i32,
    pub(crate) reserved: i32,
    pub(crate) sequences: Address,
    pub(crate) k_new: Rows,
    pub(crate) v_new: Rows,
    pub(crate) seed: Address,
    pub(crate) offset: Address,
    pub(crate) drop_below: u32,
    pub(crate) keep_factor: f32,
}

/// The union of two attention states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct MergeStatesParams {
    pub(crate) a: Rows,
    pub(crate) a_lse: Rows,
    pub(crate) b: Rows,
    pub(crate) b_lse: Rows,
    pub(crate) o: Rows,
    pub(crate) lse: Rows,
    pub(crate) rows: i64,
    pub(crate) heads: i32,
    pub(crate) dim: i32,
}

/// New keys and values scattered into pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct AppendParams {
    pub(crate) k: Rows,
    pub(crate) v: Rows,
    pub(crate) k_cache: Rows,
    pub(crate) v_cache: Rows,
    pub(crate) slots: Address,
    pub(crate) positions: Address,
    pub(crate) sequences: Address,
    pub(crate) cos: Address,
    pub(crate) sin: Address,
    pub(crate) rotary_row: i64,
    pub(crate) rotary_rows: i64,
    pub(crate) k_scale: PerHead,
    pub(crate) v_scale: PerHead,
    pub(crate) tokens: i64,
    pub(crate) pages: i64,
    pub(crate) page_size: Divisor,
    pub(crate) kv_heads: i32,
    pub(crate) head_dim: i32,
    pub(crate) value_dim: i32,
    pub(crate) rotary_dim: i32,
    pub(crate) rotary_interleaved: u32,
    pub(crate) scale_sequences: i32,
}

/// Pages copied inside a cache; strides in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct CopyBlocksParams {
    pub(crate) k: Rows,
    pub(crate) v: Rows,
    pub(crate) pairs: Address,
    pub(crate) count: i64,
    pub(crate) pages: i64,
    pub(crate) page_size: i32,
    pub(crate) kv_heads: i32,
    pub(crate) k_bytes: i32,
    pub(crate) v_bytes: i32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divisor_divides_at_every_edge() {
        for value in (1..2000u32).chain([4095, 4096, 65537, (1 << 29) - 1, (1 << 31) - 1]) {
            let d = Divisor::new(value);
            let edges =
                [0, 1, value - 1, value, value.saturating_add(1), 12_345_678, (1 << 31) - 1];
            for n in edges.into_iter().filter(|&n| n < 1 << 31) {
                let high = (u64::from(n) * u64::from(d.multiplier)) >> 32;
                let got = (high + u64::from(n)) >> d.shift;
                assert_eq!(got, u64::from(n / value), "{n} / {value}");
            }
        }
    }

    #[test]
    fn params_have_the_sizes_that_the_device_asserts() {
        assert_eq!(size_of::<ForwardParams>(), 760);
        assert_eq!(size_of::<MergeStatesParams>(), 208);
        assert_eq!(size_of::<AppendParams>(), 288);
        assert_eq!(size_of::<CopyBlocksParams>(), 104);
    }
}
