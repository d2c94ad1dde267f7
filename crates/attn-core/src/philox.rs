//! Philox4x32-10: random words as a function of a counter and a key.
//!
//! The invariant: no state. A word depends on its counter and key alone, so that whoever computes an element,
//! in whatever order and on whatever device, draws the same number for it; a generator that steps would tie the
//! numbers to an order of computation.
//!
//! Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, section 3.3.

/// Multipliers of words 0 and 2 of the counter.
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// What a round adds to the key: the golden ratio and the square root of 3 less 1, as fractions of 2^32.
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
/// Rounds.
const ROUNDS: u32 = 10;

/// Four random words.
///
/// ```
/// let words = attn_core::philox::philox4x32_10([0; 4], [0; 2]);
/// assert_eq!(words, [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]);
/// ```
#[must_use]
#[expect(
    clippy::inline_always,
    reason = "a loop of such calls is vectorised where it is compiled for vectors"
)]
#[inline(always)]
pub const fn philox4x32_10(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [mut a, mut b, mut c, mut d] = counter;
    let [mut k0, mut k1] = key;
    let mut round = 0;
    while round < ROUNDS {
        let (high_a, low_a) = multiply(MULTIPLIERS[0], a);
        let (high_c, low_c) = multiply(MULTIPLIERS[1], c);
        [a, b, c, d] = [high_c ^ b ^ k0, low_c, high_a ^ d ^ k1, low_a];
        k0 = k0.wrapping_add(WEYL[0]);
        k1 = k1.wrapping_add(WEYL[1]);
        round += 1;
    }
    [a, b, c, d]
}

/// Both halves of a product.
#[expect(clippy::cast_possible_truncation, reason = "the halves are meant")]
const fn multiply(a: u32, b: u32) -> (u32, u32) {
    // `u64::from` is not const.
    let product = a as u64 * b as u64;
    ((product >> 32) as u32, product as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Source: the known answers that the authors' Random123 library is tested by.
    #[test]
    fn philox_gives_the_published_answers() {
        let ones = u32::MAX;
        for (counter, key, words) in [
            ([0; 4], [0; 2], [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]),
            ([ones; 4], [ones; 2], [0x408F_276D, 0x41C8_3B0E, 0xA20B_C7C6, 0x6D54_51FD]),
            (
                [0x243F_6A88, 0x85A3_08D3, 0x1319_8A2E, 0x0370_7344],
                [0xA409_3822, 0x299F_31D0],
                [0xD16C_FE09, 0x94FD_CCEB, 0x5001_E420, 0x2412_6EA1],
            ),
        ] {
            assert_eq!(philox4x32_10(counter, key), words, "{counter:x?} {key:x?}");
        }
    }
}
