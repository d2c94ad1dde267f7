#![doc = include_str!("../README.md")]

pub mod adversarial;
mod buffers;
pub mod case;
mod case_data;
pub mod compare;
pub mod corpus;
pub mod elements;
mod error;
mod judge;
pub mod materialised;
pub mod naive;
pub mod paged;
mod pages;
mod pairs;
pub mod random;
mod rows;
mod storage;
pub mod tiled;

pub use crate::adversarial::Pattern;
pub use crate::buffers::{GradientBuffers, OutputBuffers};
pub use crate::case::{Case, Theme};
pub use crate::case_data::{CaseData, Expected, ExpectedGradients};
pub use crate::compare::{Comparison, Mismatch, compare};
pub use crate::corpus::corpus;
pub use crate::error::Failure;
pub use crate::judge::{
    BackwardVerdict, ExpectedRows, ForwardVerdict, judge_backward, judge_forward, judge_rows,
};
pub use crate::naive::{Reference, ReferenceGradients};
pub use crate::storage::Placement;
