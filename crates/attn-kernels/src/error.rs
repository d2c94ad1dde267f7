//! Why an engine could not be made or did not run a plan.
//!
//! The invariant: on an error nothing was launched, the outputs are as they were unless the error
//! says otherwise, and the workspace is still usable.

/// An engine's refusal or failure.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The data does not fit the problem, or the problem is not one this engine does.
    #[error(transparent)]
    Call(#[from] attn_core::Error),
    /// A plan for another engine, or for the other pass.
    #[error("plan: expected {expected}, got {got}")]
    Plan {
        /// What this call executes.
        expected: &'static str,
        /// The plan's kernel.
        got: String,
    },
    /// The workspace could not grow; it is as it was.
    #[error("workspace: {needed} bytes could not be allocated")]
    OutOfMemory {
        /// Bytes asked for.
        needed: u64,
    },
    /// The asked instruction set is not on this processor.
    #[error("instruction set {0} is not available on this processor")]
    Level(&'static str),
    /// More worker threads than an engine may have.
    #[error("threads: expected at most {expected}, got {got}")]
    TooManyThreads {
        /// [`CpuEngine::MAX_THREADS`](crate::cpu::CpuEngine::MAX_THREADS).
        expected: usize,
        /// How many were asked for.
        got: usize,
    },
    /// The worker threads could not be started.
    #[error("{threads} worker threads could not be started")]
    Threads {
        /// How many were asked for.
        threads: usize,
        /// The thread pool's error.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}
