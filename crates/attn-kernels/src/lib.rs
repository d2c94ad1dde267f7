#![doc = include_str!("../README.md")]

pub mod catalog;
#[cfg(feature = "cpu")]
pub mod cpu;
pub mod error;

pub use crate::catalog::catalog;
pub use crate::error::Error;
