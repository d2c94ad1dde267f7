//! The CUDA engine: plans executed on the caller's stream.
//!
//! The invariant: what reaches a kernel has been checked against the plan's problem, on the host and without
//! reading device memory; what only the device can see (page ids, slots) its kernels check. Nothing here picks
//! a kernel, and nothing in steady state allocates, waits for the device or copies from it.
//!
//! ```no_run
//! use attn_core::{Strided, DType};
//! use attn_kernels::cuda::{CudaEngine, DeviceBuffer, DeviceTensor, Workspace};
//!
//! let engine = CudaEngine::new(0)?;
//! let stream = engine.new_stream()?;
//! let buffer = DeviceBuffer::from_host(&stream, &vec![0f32; 5 * 8 * 64])?;
//! let q = DeviceTensor::contiguous("q", &buffer, DType::F32, &[5, 8, 64])?;
//! assert_eq!(q.layout().strides(), [512, 64, 1]);
//! # Ok::<(), attn_kernels::Error>(())
//! ```

mod append;
pub(crate) mod backward;
mod call;
mod capture;
mod cascade;
mod cluster;
pub(crate) mod config;
mod copy;
pub(crate) mod cost;
mod engine;
mod event;
mod forward;
mod growing;
mod lengths;
mod map_cache;
mod maps;
mod merge;
mod order;
pub(crate) mod params;
mod step;
mod tensor;
pub(crate) mod tensor_map;
mod workspace;

pub use cudarc::driver::{CudaContext, CudaStream};

pub use self::append::{AppendKv, CacheMut, Rotary};
pub use self::backward::{ForwardResults, Gradients};
pub use self::call::{Inputs, KvTensors, Outputs};
pub use self::cascade::{CascadeTables, CascadeWorkspace};
pub use self::engine::{CudaEngine, instances};
pub use self::event::Event;
pub use self::growing::Growing;
pub use self::step::Pages;
pub use self::tensor::{DeviceTensor, DeviceTensorMut, DeviceView, DeviceViewMut};
pub use self::tensor_map::{Swizzle, TensorMap};
pub use self::workspace::Workspace;
pub use crate::launch::{DeviceBuffer, DeviceMemory, DeviceMemoryMut, Graph};
