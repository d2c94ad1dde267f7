//! What the machine can do, as plain data.
//!
//! The invariant: nothing here asks a driver or a CPU. Whoever knows the machine fills it in; a test
//! fills in a machine that does not exist, and selection cannot tell the difference.

use crate::units::Bytes;

/// The host and, where there is one, the CUDA device.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct DeviceCaps {
    /// The host's processor.
    pub host: HostCaps,
    /// The CUDA device, if any.
    pub cuda: Option<CudaCaps>,
}

/// A CPU, as far as blocking and work division depend on it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HostCaps {
    /// Worker threads of the engine.
    pub threads: usize,
    /// Second-level cache of one core.
    pub l2: Bytes,
}

impl Default for HostCaps {
    /// One thread and 1 MiB: what can be assumed without looking.
    fn default() -> Self {
        Self { threads: 1, l2: Bytes(1 << 20) }
    }
}

/// A CUDA device.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CudaCaps {
    /// Marketing name.
    pub name: String,
    /// Compute capability, major and minor.
    pub compute: (u32, u32),
    /// Streaming multiprocessors.
    pub sm_count: u32,
    /// Shared memory that one block may opt in to.
    pub smem_per_block: Bytes,
    /// Device memory.
    pub memory: Bytes,
}
