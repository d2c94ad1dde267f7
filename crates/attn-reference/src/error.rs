//! Why a judged engine failed, as a value that a test can print or match.
//!
//! The invariant: a failure of the engine itself is kept as it was, so that a test can tell "refused, with
//! this reason" from "computed, wrongly". Panicking inside the judge would lose which case it was for
//! callers that want to go on and report them all.

use crate::compare::Comparison;

/// Why a judged call did not pass.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Failure<E> {
    /// The case's own data does not fit its problem, or the call cannot be judged this way.
    #[error("{case}: the case cannot be run: {source}")]
    Case {
        /// The case.
        case: String,
        /// What does not fit.
        source: attn_core::Error,
    },
    /// The engine gave an error instead of a result.
    #[error("{case}: the engine refused: {source}")]
    Engine {
        /// The case.
        case: String,
        /// The engine's error.
        source: E,
    },
    /// A result is further from the reference than the error rule allows.
    #[error("{case}: {tensor} is wrong: {comparison}")]
    Wrong {
        /// The case.
        case: String,
        /// The output.
        tensor: &'static str,
        /// How far, and where.
        comparison: Box<Comparison>,
    },
    /// The engine wrote to storage that is not part of an output.
    #[error("{case}: {tensor}: wrote {got} outside the view, at storage element {index}")]
    StrayWrite {
        /// The case.
        case: String,
        /// The output.
        tensor: &'static str,
        /// The first such storage element.
        index: usize,
        /// What it holds now.
        got: f32,
    },
}
