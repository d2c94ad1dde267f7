//! libFuzzer's door to [`attn_fuzz::pool_programs`]: pool operations against a model.
//! The body lies in the library, where a stable toolchain can run it as well.

#![no_main]

use attn_fuzz::pool_programs::{Input, check};

libfuzzer_sys::fuzz_target!(|input: Input| check(&input));
