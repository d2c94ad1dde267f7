//! The bodies of the fuzz targets, one module each: an input that any bytes can be read as, and a
//! check that panics when a promise is broken.
//!
//! They are a library, and not written inside the targets, so that `cargo test` on a stable toolchain
//! runs them on seeded bytes: a target that only libFuzzer can run rots unseen.

#![forbid(unsafe_code)]

mod lists;
pub mod mask_tiles;
pub mod pool_programs;
pub mod problem_constructors;

#[cfg(test)]
mod seeded;
