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
    /// Kernels are compiled for real processors from 8.0 on, and for nothing else.
    #[cfg(feature = "cuda")]
    #[error("arch: expected sm_80 or newer, as in `sm_80` or `sm_90a`, got {got}")]
    Arch {
        /// What was asked for.
        got: String,
    },
    /// A kernel did not compile.
    #[cfg(feature = "cuda")]
    #[error("{instance} did not compile with {}:\n{log}", options.join(" "))]
    Compile {
        /// The instance and its arch.
        instance: String,
        /// The compiler's options.
        options: Vec<String>,
        /// What the compiler said.
        log: String,
    },
    /// NVRTC, the compiler of CUDA C++, was not found.
    #[cfg(feature = "cuda")]
    #[error("NVRTC was not found; {install}; tried:\n  {}", tried.join("\n  "))]
    CompilerMissing {
        /// Every place, and why it is not there.
        tried: Vec<String>,
        /// What would help.
        install: &'static str,
    },
    /// The CUDA driver's library was not found.
    #[cfg(feature = "cuda")]
    #[error("the CUDA driver was not found; {install}; tried:\n  {}", tried.join("\n  "))]
    DriverMissing {
        /// Every place, and why it is not there.
        tried: Vec<String>,
        /// What would help.
        install: &'static str,
    },
    /// A call of the CUDA driver failed.
    #[cfg(feature = "cuda")]
    #[error("{call} failed for {what}: {name} ({code}), {reason}")]
    Driver {
        /// The function of the driver.
        call: &'static str,
        /// The kernel instance and its launch, or whatever else it was called for.
        what: String,
        /// The driver's code.
        code: u32,
        /// The code's name.
        name: String,
        /// What the driver says of it.
        reason: String,
    },
    /// There is not enough device memory.
    #[cfg(feature = "cuda")]
    #[error("device memory: {needed} bytes could not be allocated, {free} of {total} are free")]
    DeviceMemory {
        /// Bytes asked for.
        needed: u64,
        /// Bytes that are free, perhaps in pieces.
        free: u64,
        /// Bytes of the device.
        total: u64,
    },
    /// A device workspace that this call cannot use; it is as it was.
    #[cfg(feature = "cuda")]
    #[error("workspace: expected {expected}, got {got}")]
    Workspace {
        /// What the call takes.
        expected: &'static str,
        /// What it was given.
        got: String,
    },
    /// A bundle of compiled kernels could not be read, or is not for this program.
    #[cfg(feature = "cuda")]
    #[error("bundle {bundle}: expected {expected}, got {got}")]
    Bundle {
        /// The file.
        bundle: String,
        /// What a bundle has there.
        expected: String,
        /// What this one has.
        got: String,
    },
    /// A bundle's file could not be read or written.
    #[cfg(feature = "cuda")]
    #[error("bundle {bundle}")]
    BundleFile {
        /// The file.
        bundle: String,
        /// What the system said.
        #[source]
        source: std::io::Error,
    },
    /// The bundle does not hold this kernel, and there is no compiler to make it.
    #[cfg(feature = "cuda")]
    #[error("{instance} for {arch} is not in the bundle, which has {}", has_list(has))]
    NotInBundle {
        /// The instance that was asked for.
        instance: String,
        /// The arch that was asked for.
        arch: String,
        /// What the bundle has of that entry, each with its arch.
        has: Vec<String>,
        /// Why it cannot be compiled instead.
        #[source]
        compiler: Box<Error>,
    },
}

#[cfg(feature = "cuda")]
fn has_list(has: &[String]) -> String {
    if has.is_empty() { "nothing of that entry".to_owned() } else { has.join(" ") }
}
