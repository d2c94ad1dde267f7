//! Why a case has no result, in the few kinds that the contract names.
//!
//! The invariant: the kind follows from the typed error that was met, never from its text. What the
//! rooms say about a tensor's shape becomes `layout_mismatch` where storage of keys and values disagrees with
//! its description, and `invalid_argument` where it is any other tensor.

use std::fmt::Display;

use serde::Serialize;

/// The error kinds of the contract.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Kind {
    /// Inconsistent or out of range.
    InvalidArgument,
    /// Valid, but not done by this backend.
    Unsupported,
    /// The pool has too few free blocks.
    OutOfBlocks,
    /// No such sequence.
    NotFound,
    /// The name is taken.
    AlreadyExists,
    /// Storage disagrees with its description.
    LayoutMismatch,
    /// The device is missing or failed.
    Device,
    /// The host's or the device's memory is too small.
    OutOfMemory,
    /// A bug.
    Internal,
}

/// An error of a case.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Failure {
    pub(crate) kind: Kind,
    pub(crate) message: String,
}

impl Failure {
    pub(crate) fn new(kind: Kind, message: impl Display) -> Self {
        Self { kind, message: message.to_string() }
    }

    pub(crate) fn invalid(message: impl Display) -> Self {
        Self::new(Kind::InvalidArgument, message)
    }

    /// A refusal of what the data is, before an engine sees it.
    pub(crate) fn of_data(error: &attn_core::Error) -> Self {
        let kind = match error {
            attn_core::Error::Layout { field, .. } if !is_key_side(field) => Kind::InvalidArgument,
            other => kind_of(other),
        };
        Self::new(kind, error)
    }

    pub(crate) fn out_of_memory(what: impl Display, bytes: usize) -> Self {
        Self::new(Kind::OutOfMemory, format!("{what}: {bytes} bytes could not be allocated"))
    }
}

/// Whether a tensor stores keys or values.
pub(crate) fn is_key_side(field: &str) -> bool {
    ["k", "v", "k_cache", "v_cache"].contains(&field)
}

const fn kind_of(error: &attn_core::Error) -> Kind {
    match error {
        attn_core::Error::Layout { .. } | attn_core::Error::CacheLayout { .. } => {
            Kind::LayoutMismatch
        }
        attn_core::Error::Unsupported { .. } => Kind::Unsupported,
        attn_core::Error::Invalid { .. } | attn_core::Error::Overflow { .. } => {
            Kind::InvalidArgument
        }
        _ => Kind::Internal,
    }
}

/// What an engine says about a call whose data was found to fit: a view that it does not take.
impl From<attn_core::Error> for Failure {
    fn from(error: attn_core::Error) -> Self {
        Self::new(kind_of(&error), error)
    }
}

impl From<attn_kernels::Error> for Failure {
    fn from(error: attn_kernels::Error) -> Self {
        use attn_kernels::Error;
        let kind = match error {
            Error::Call(error) => return error.into(),
            Error::OutOfMemory { .. } | Error::DeviceMemory { .. } => Kind::OutOfMemory,
            Error::Threads { .. }
            | Error::Level(_)
            | Error::DriverMissing { .. }
            | Error::CompilerMissing { .. }
            | Error::Driver { .. }
            | Error::Arch { .. } => Kind::Device,
            _ => Kind::Internal,
        };
        Self::new(kind, error)
    }
}

impl From<attn_select::Error> for Failure {
    fn from(error: attn_select::Error) -> Self {
        Self::new(Kind::Unsupported, error)
    }
}

impl From<attn_paged::Error> for Failure {
    fn from(error: attn_paged::Error) -> Self {
        let kind = match error.kind() {
            attn_paged::ErrorKind::InvalidArgument => Kind::InvalidArgument,
            attn_paged::ErrorKind::NotFound => Kind::NotFound,
            attn_paged::ErrorKind::OutOfBlocks => Kind::OutOfBlocks,
            attn_paged::ErrorKind::OutOfMemory => Kind::OutOfMemory,
            attn_paged::ErrorKind::LayoutMismatch => Kind::LayoutMismatch,
            _ => Kind::Internal,
        };
        Self::new(kind, error)
    }
}

/// A value of this program that does not serialise.
impl From<serde_json::Error> for Failure {
    fn from(error: serde_json::Error) -> Self {
        Self::new(Kind::Internal, error)
    }
}
