//! Every way a description can be wrong, as values that carry what was expected and what was got.
//!
//! One enum for the whole vocabulary, because a caller meets these errors through [`crate::Problem`],
//! views and layouts in one call and wants one `match`. Engines wrap it; they never rename it.

use crate::layout::LayoutId;

/// Why a problem, a view, a layout or a call was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A field is out of range, or two fields contradict each other.
    #[error("{field}: expected {expected}, got {got}")]
    Invalid {
        /// The field, as named in [`crate::ProblemSpec`] or [`crate::Inputs`].
        field: &'static str,
        /// What would have been accepted.
        expected: String,
        /// What was given.
        got: String,
    },
    /// A view does not fit its storage, or a tensor's shape or strides do not fit the problem.
    #[error("layout of {field}: expected {expected}, got {got}")]
    Layout {
        /// The tensor.
        field: &'static str,
        /// What would have been accepted.
        expected: String,
        /// What was given.
        got: String,
    },
    /// A cache was made with one layout and used with another.
    #[error("cache layout mismatch: expected {expected}, got {got}")]
    CacheLayout {
        /// The layout that the problem states.
        expected: Box<LayoutId>,
        /// The layout stamped on the cache.
        got: Box<LayoutId>,
    },
    /// A valid call that this engine or this catalogue cannot do.
    #[error("{what} is not supported: {reason}")]
    Unsupported {
        /// The option or the combination.
        what: &'static str,
        /// Why, in words that name the way out where there is one.
        reason: String,
    },
    /// A size in bytes or elements does not fit the address space.
    #[error("{what} overflows: {detail}")]
    Overflow {
        /// The size that was being computed.
        what: &'static str,
        /// The factors.
        detail: String,
    },
}

impl Error {
    /// An [`Error::Invalid`] from displayable parts.
    pub fn invalid(
        field: &'static str,
        expected: impl Into<String>,
        got: impl std::fmt::Display,
    ) -> Self {
        Self::Invalid { field, expected: expected.into(), got: got.to_string() }
    }

    /// An [`Error::Layout`] from displayable parts.
    pub fn layout(
        field: &'static str,
        expected: impl Into<String>,
        got: impl std::fmt::Display,
    ) -> Self {
        Self::Layout { field, expected: expected.into(), got: got.to_string() }
    }

    /// An [`Error::Unsupported`] from displayable parts.
    pub fn unsupported(what: &'static str, reason: impl Into<String>) -> Self {
        Self::Unsupported { what, reason: reason.into() }
    }
}
