#![doc = include_str!("../README.md")]
//!
//! # Modules
//!
//! | module | what it holds |
//! |---|---|
//! | `allocator` | [`Allocator`]: the operations on sequences; start here |
//! | `config` | [`Config`]: its options |
//! | `page` | [`BlockId`], [`BlockCopy`] |
//! | `pool` | [`BlockPool`]: holders, free stack, parked blocks by age |
//! | `storage` | the tokens of blocks |
//! | `prefix`, `namespace` | the prefix cache, [`PrefixHash`], [`Namespace`] |
//! | `store` | pool, tokens and prefix cache as one |
//! | `table` | [`SeqId`] and the tables behind it |
//! | `device_tables` | padded and [compressed](CsrBuffers) tables for kernels |
//! | `sharing` | which neighbours of a batch [share leading pages](Allocator::shared_prefixes) |
//! | `swap` | [`SwapOut`], [`SwapIn`]: plans as data |
//! | `address` | [`AddressMap`]: where a token lies |
//! | `stats` | [`Stats`]: waste, sharing, hit rate |
//! | `shared` | [`SharedAllocator`]: one allocator, many threads |
//! | `error` | [`Error`], [`ErrorKind`] |

mod address;
mod allocator;
mod config;
mod device_tables;
mod error;
mod namespace;
mod page;
mod pool;
mod prefix;
mod shared;
mod sharing;
mod stats;
mod storage;
mod store;
mod swap;
mod table;

pub use crate::address::{AddressMap, PageSlot};
pub use crate::allocator::{Allocation, Allocator};
pub use crate::config::Config;
pub use crate::device_tables::{CsrBuffers, NO_PAGE};
pub use crate::error::{Error, ErrorKind};
pub use crate::namespace::Namespace;
pub use crate::page::{BlockCopy, BlockId};
pub use crate::pool::BlockPool;
pub use crate::prefix::PrefixHash;
pub use crate::shared::SharedAllocator;
pub use crate::stats::Stats;
pub use crate::swap::{Returned, SwapIn, SwapOut, SwappedGroup};
pub use crate::table::SeqId;
