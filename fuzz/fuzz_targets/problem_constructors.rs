//! libFuzzer's door to [`attn_fuzz::problem_constructors`]: constructors on any values.
//! The body lies in the library, where a stable toolchain can run it as well.

#![no_main]

use attn_fuzz::problem_constructors::{Input, check};

libfuzzer_sys::fuzz_target!(|input: Input| check(&input));
