#![doc = include_str!("../README.md")]

#[cfg(feature = "cuda")]
pub mod bundle;
pub mod catalog;
#[cfg(feature = "cuda")]
pub mod compile;
#[cfg(feature = "cpu")]
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
#[cfg(feature = "cuda")]
pub mod disk;
#[cfg(feature = "cuda")]
mod encoding;
pub mod error;
#[cfg(feature = "cuda")]
pub mod instances;
#[cfg(feature = "cuda")]
mod launch;
#[cfg(feature = "cuda")]
mod module;
#[cfg(feature = "cuda")]
pub mod resources;
#[cfg(feature = "cuda")]
mod search;
#[cfg(feature = "cuda")]
pub mod source;
#[cfg(feature = "cuda")]
pub mod spec;
#[cfg(feature = "cuda")]
pub mod store;

pub use crate::catalog::{catalog, catalog_of};
pub use crate::error::Error;
