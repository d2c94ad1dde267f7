//! Inputs without a fuzzer: bytes of a seeded generator, read as libFuzzer's would be.

use arbitrary::{Arbitrary, Unstructured};

/// Calls `check` on `count` inputs of mixed lengths.
pub(crate) fn run<I: for<'b> Arbitrary<'b>>(count: u64, check: impl Fn(&I)) {
    for seed in 0..count {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let length = 16 + (seed % 13) * 64;
        let bytes: Vec<u8> = (0..length).map(|_| next(&mut state).to_le_bytes()[3]).collect();
        // Too few bytes for the input is no finding: libFuzzer skips those as well.
        if let Ok(input) = I::arbitrary_take_rest(Unstructured::new(&bytes)) {
            check(&input);
        }
    }
}

/// splitmix64.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut x = *state;
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
