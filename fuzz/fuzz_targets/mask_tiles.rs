//! libFuzzer's door to [`attn_fuzz::mask_tiles`]: tiles of a mask against every pair.
//! The body lies in the library, where a stable toolchain can run it as well.

#![no_main]

use attn_fuzz::mask_tiles::{Input, check};

libfuzzer_sys::fuzz_target!(|input: Input| check(&input));
