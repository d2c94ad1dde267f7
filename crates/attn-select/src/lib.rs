#![doc = include_str!("../README.md")]

mod backward;
mod cache;
mod candidate;
mod cascade;
mod choose;
mod decode;
mod error;
mod explain;
mod general;
pub mod heuristics;
mod prefill;

pub use crate::cache::PlanCache;
pub use crate::cascade::{
    CACHED_MOST, CACHED_RATE, CascadeChoice, CascadeExplanation, DEVICE_LEAST, HOST_LEAST,
    NoCascade, PrefixReads, cascade_pays, choose_cascade, explain_cascade, plan_cascade,
};
pub use crate::choose::choose;
pub use crate::error::Error;
pub use crate::explain::{Explanation, explain};

#[cfg(test)]
mod tests;
