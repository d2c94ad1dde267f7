//! Every way a call can be refused, as values that carry what was expected and what was got.
//!
//! One enum for the crate, sorted by [`Error::kind`] into the few classes that a server acts on:
//! waiting for blocks, rejecting a request, and reporting a bug are different reactions, and a
//! caller should not have to list variants of a non-exhaustive enum to tell them apart.

use crate::page::BlockId;
use crate::table::SeqId;

/// Why an operation was refused. The operation changed nothing.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option is out of range.
    #[error("{field}: expected {expected}, got {got}")]
    Invalid {
        /// The option, as named in [`crate::Config`] or in the operation.
        field: &'static str,
        /// What would have been accepted.
        expected: String,
        /// What was given.
        got: String,
    },
    /// Storage of the pool does not fit the address space or the memory.
    #[error("no memory for {what}: expected at most what the process can reserve, got {got} bytes")]
    OutOfMemory {
        /// The array that was being made.
        what: &'static str,
        /// Its size; saturated where even the size overflows.
        got: usize,
    },
    /// A handle names a sequence that was freed or swapped out.
    #[error("{got} is not live: expected generation {expected} of its slot")]
    StaleSequence {
        /// The generation that the next or the present sequence of that slot has.
        expected: u32,
        /// The handle.
        got: SeqId,
    },
    /// A handle was made by another allocator.
    #[error("{got} belongs to another allocator: expected one of allocator {expected}")]
    ForeignSequence {
        /// The allocator that was asked.
        expected: u32,
        /// The handle.
        got: SeqId,
    },
    /// One sequence is named twice where each may appear once.
    #[error("{got} is named twice: expected different sequences")]
    DuplicateSequence {
        /// The handle.
        got: SeqId,
    },
    /// All 2^32 slots for sequences are in use.
    #[error("expected fewer than {expected} live sequences")]
    TooManySequences {
        /// The number of slots.
        expected: u32,
    },
    /// The operation needs more blocks than are free.
    #[error(
        "out of blocks: expected at most {free} less {reserve} in reserve, got a need of {needed}"
    )]
    OutOfBlocks {
        /// Free blocks that the operation would take, cached ones it would bring back included.
        needed: usize,
        /// Blocks that no sequence holds.
        free: usize,
        /// Blocks of these that the operation must leave; 0 for operations that may use all.
        reserve: usize,
        /// Blocks of the pool. Where `needed + reserve` exceeds them, waiting does not help.
        total: usize,
    },
    /// A sequence would need more blocks than a table has columns, or a written table is too narrow.
    #[error("block table: expected at most {expected} blocks, got {got}")]
    TableWidth {
        /// Columns of the table.
        expected: usize,
        /// Blocks of the sequence.
        got: usize,
    },
    /// A token count passes the length of the sequence.
    #[error("{operation}: expected at most the {expected} tokens of the sequence, got {got}")]
    PastLength {
        /// The operation.
        operation: &'static str,
        /// The length.
        expected: usize,
        /// The count.
        got: usize,
    },
    /// A buffer of the caller is too short.
    #[error("{buffer}: expected room for {expected} elements, got {got}")]
    BufferTooSmall {
        /// The buffer.
        buffer: &'static str,
        /// Elements that are written.
        expected: usize,
        /// Elements that there are.
        got: usize,
    },
    /// An index lies outside what it indexes.
    #[error("{what}: expected below {expected}, got {got}")]
    OutOfRange {
        /// The index.
        what: &'static str,
        /// The bound.
        expected: usize,
        /// The index given.
        got: usize,
    },
    /// A block was taken fresh since the handle was made.
    #[error("{got} is stale: expected generation {expected}")]
    StaleBlock {
        /// The generation of the block now.
        expected: u32,
        /// The handle.
        got: BlockId,
    },
    /// A block that nobody holds was given back or shared.
    #[error("{got} is held by nobody: expected at least one holder")]
    BlockNotHeld {
        /// The handle.
        got: BlockId,
    },
    /// A count does not fit the integers of a table.
    #[error("{what} overflows: expected at most {expected}, got {got}")]
    Overflow {
        /// The count.
        what: &'static str,
        /// The largest value that fits.
        expected: u64,
        /// The count's value, saturated.
        got: u64,
    },
    /// The cache layout refused.
    #[error(transparent)]
    Layout(#[from] attn_core::Error),
    /// The books contradict each other, which is a bug of this crate. Only [`crate::Allocator::audit`] reports it.
    #[error("inconsistent books: {what}: expected {expected}, got {got}")]
    Inconsistent {
        /// The rule and the place.
        what: String,
        /// The value that the rule asks for.
        expected: usize,
        /// The value found.
        got: usize,
    },
}

/// What a caller can do about an [`Error`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The call itself is wrong; repeating it is of no use.
    InvalidArgument,
    /// The sequence or block does not exist any more, or never did here.
    NotFound,
    /// Free, truncate or swap something out, then try again.
    OutOfBlocks,
    /// The process has no memory for the books.
    OutOfMemory,
    /// Keys and values are stored otherwise than stated.
    LayoutMismatch,
    /// A bug of this crate.
    Internal,
}

impl Error {
    pub(crate) fn invalid(
        field: &'static str,
        expected: impl Into<String>,
        got: impl ToString,
    ) -> Self {
        Self::Invalid { field, expected: expected.into(), got: got.to_string() }
    }

    /// The class of the error.
    #[must_use]
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::StaleSequence { .. }
            | Self::ForeignSequence { .. }
            | Self::StaleBlock { .. }
            | Self::BlockNotHeld { .. } => ErrorKind::NotFound,
            Self::OutOfBlocks { .. } => ErrorKind::OutOfBlocks,
            Self::OutOfMemory { .. } | Self::TooManySequences { .. } => ErrorKind::OutOfMemory,
            Self::Layout(attn_core::Error::CacheLayout { .. }) => ErrorKind::LayoutMismatch,
            Self::Inconsistent { .. } => ErrorKind::Internal,
            Self::Invalid { .. }
            | Self::DuplicateSequence { .. }
            | Self::TableWidth { .. }
            | Self::PastLength { .. }
            | Self::BufferTooSmall { .. }
            | Self::OutOfRange { .. }
            | Self::Overflow { .. }
            | Self::Layout(_) => ErrorKind::InvalidArgument,
        }
    }
}

/// One rule of an audit.
pub(crate) fn ensure(what: &str, expected: usize, got: usize) -> Result<(), Error> {
    if expected == got {
        Ok(())
    } else {
        Err(Error::Inconsistent { what: what.to_owned(), expected, got })
    }
}
