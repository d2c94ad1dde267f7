#![doc = include_str!("../README.md")]

mod backward;
mod cache;
mod candidate;
mod choose;
mod decode;
mod error;
mod explain;
mod general;
pub mod heuristics;
mod prefill;

pub use crate::cache::PlanCache;
pub use crate::choose::choose;
pub use crate::error::Error;
pub use crate::explain::{Explanation, explain};

#[cfg(test)]
mod tests;
