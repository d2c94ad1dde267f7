//! The crate's engines on the whole corpus, the reference's gradients, and what the judge refuses.
//!
//! The invariant: every engine here runs every case; there is no list of exceptions.

#![expect(clippy::unwrap_used, reason = "a panic in a test's helper is a failed test")]

mod corpus;
mod gradients;
mod judging;
mod properties;
