//! What users of the crate rely on, through its public API alone.

mod contract;
mod tables;
mod waste;
