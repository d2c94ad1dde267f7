//! The CUDA driver: loading it, device memory, launches, graphs, events and tensor maps.
//!
//! The invariant: every driver call of this crate is made here or in `module.rs`, its return code is
//! checked, and nothing panics when there is no driver. Memory is taken by `cuMemAlloc` and returned by
//! `cuMemFree`, which waits for the device: a buffer may be dropped whatever stream last used it, which
//! stream-ordered allocation would leave to the caller. cudarc's own buffers are not used, since they
//! follow one stream or record events at every launch.

#![expect(unsafe_code, reason = "the driver is a C library")]

use std::ffi::c_void;
use std::fmt;
use std::marker::PhantomData;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::ptr;
use std::sync::{Arc, OnceLock};

use bytemuck::Pod;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::{CudaContext, CudaGraph, CudaStream, sys};

use crate::compile::reason;
use crate::cuda::backward::params::BackwardParams;
use crate::cuda::params::{AppendParams, CopyBlocksParams, ForwardParams, MergeStatesParams};
use crate::cuda::tensor_map::{TensorBox, TensorMap};
use crate::error::Error;
use crate::module::Function;
use crate::search;

/// Names that the driver must have: the newest that this crate and cudarc ask it for. cudarc resolves names at
/// their first use and panics where one is missing.
const SYMBOLS: [&[u8]; 4] = [
    b"cuLaunchKernelEx\0",
    b"cuGraphInstantiateWithFlags\0",
    b"cuTensorMapEncodeTiled\0",
    b"cuOccupancyMaxActiveClusters\0",
];

/// Finds and loads the driver, once; it stays loaded.
///
/// # Errors
/// [`Error::DriverMissing`] with every place and why it is not there.
pub(crate) fn load_driver() -> Result<(), Error> {
    static LOADED: OnceLock<Result<(), Vec<String>>> = OnceLock::new();
    let loaded = LOADED.get_or_init(|| {
        let places = search::driver_candidates();
        search::first(&search::DRIVER, &places, open_driver)
    });
    loaded.clone().map_err(|tried| Error::DriverMissing { tried, install: search::DRIVER.install })
}

fn open_driver(path: &Path) -> Result<(), String> {
    let open = |path: &Path| {
        // SAFETY: the initialisers of the driver's library ask nothing of the caller.
        unsafe { libloading::Library::new(path) }.map_err(|error| reason(&error))
    };
    let library = open(path)?;
    for symbol in SYMBOLS {
        // SAFETY: the address is compared with nothing and called by nobody.
        let found = unsafe { library.get::<*const c_void>(symbol) };
        if found.is_err() {
            let name = String::from_utf8_lossy(&symbol[..symbol.len() - 1]);
            return Err(format!("has no {name}: expected a driver for CUDA 12.0 or newer"));
        }
    }
    // cudarc opens the driver by bare names. A library that is loaded already answers to its own name,
    // from wherever it came.
    let bare = search::DRIVER.names.iter().any(|name| open(Path::new(name)).is_ok());
    if !bare {
        return Err("loads, but not by its bare name".to_owned());
    }
    let get = |name: &[u8]| {
        // SAFETY: the type is that of `cuDriverGetVersion`.
        unsafe { library.get::<unsafe extern "C" fn(*mut i32) -> i32>(name) }.map(|f| *f).ok()
    };
    let mut version = 0;
    if let Some(version_of) = get(b"cuDriverGetVersion\0") {
        // SAFETY: the function writes one integer, and may be called before `cuInit`.
        unsafe { version_of(&raw mut version) };
    }
    // Within a major version the names that are used do not change.
    let needed = i64::from(sys::CUDA_VERSION) / 1000;
    if i64::from(version) / 1000 < needed {
        return Err(format!(
            "is a driver for CUDA {}.{}, and this program binds names of CUDA {needed}: build it with \
             CUDARC_CUDA_VERSION=12080",
            version / 1000,
            version % 1000 / 10
        ));
    }
    mem::forget(library);
    Ok(())
}

/// The error of a driver call.
pub(crate) fn failed(call: &'static str, what: impl fmt::Display, error: DriverError) -> Error {
    let text = |text: Result<&std::ffi::CStr, DriverError>| {
        text.map_or_else(|_| "unknown".to_owned(), |text| text.to_string_lossy().into_owned())
    };
    Error::Driver {
        call,
        what: what.to_string(),
        code: error.0 as u32,
        name: text(error.error_name()),
        reason: text(error.error_string()),
    }
}

/// The driver's version, major and minor.
pub(crate) fn driver_version() -> Result<(u32, u32), Error> {
    let mut version = 0;
    // SAFETY: the function writes one integer.
    let code = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    code.result().map_err(|e| failed("cuDriverGetVersion", "the driver", e))?;
    let version = version.unsigned_abs();
    Ok((version / 1000, version % 1000 / 10))
}

/// Turns cudarc's event tracking off: it records and waits at every use of one of its buffers, which a
/// capture does not allow.
pub(crate) fn disable_event_tracking(context: &CudaContext) {
    // SAFETY: none of cudarc's buffers, which the tracking is for, is ever made in this crate.
    unsafe { context.disable_event_tracking() };
}

/// A piece of device memory, freed with its last owner: the buffer, or a graph that uses it.
pub(crate) struct Allocation {
    address: u64,
    bytes: usize,
    context: Arc<CudaContext>,
}

impl Allocation {
    /// Uninitialised memory; none for 0 bytes.
    pub(crate) fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Arc<Self>, Error> {
        let mut address = 0;
        if bytes > 0 {
            bind(context)?;
            // SAFETY: a context is current, and the address is written to a local.
            let code = unsafe { sys::cuMemAlloc_v2(&raw mut address, bytes) };
            code.result().map_err(|error| match error.0 {
                sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                    let (free, total) = context.mem_get_info().unwrap_or_default();
                    Error::DeviceMemory {
                        needed: bytes as u64,
                        free: free as u64,
                        total: total as u64,
                    }
                }
                _ => failed("cuMemAlloc", format_args!("{bytes} bytes"), error),
            })?;
        }
        Ok(Arc::new(Self { address, bytes, context: Arc::clone(context) }))
    }

    pub(crate) const fn address(&self) -> u64 {
        self.address
    }

    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Copies from the host to the start, in stream order; pageable memory has been read when this returns.
    pub(crate) fn upload(&self, stream: &CudaStream, data: &[u8]) -> Result<(), Error> {
        self.upload_at(stream, 0, data)
    }

    /// Copies from the host to the bytes from `start` on.
    pub(crate) fn upload_at(
        &self,
        stream: &CudaStream,
        start: usize,
        data: &[u8],
    ) -> Result<(), Error> {
        if data.is_empty() {
            return Ok(());
        }
        let room = self.bytes.saturating_sub(start);
        if data.len() > room {
            return Err(outside("bytes to copy", room, data.len()));
        }
        bind(stream.context())?;
        let what = format_args!("{} bytes", data.len());
        // SAFETY: the destination was checked to hold the data.
        let code = unsafe {
            sys::cuMemcpyHtoDAsync_v2(
                self.address + start as u64,
                data.as_ptr().cast(),
                data.len(),
                stream.cu_stream(),
            )
        };
        code.result().map_err(|error| failed("cuMemcpyHtoDAsync", what, error))
    }

    /// Writes `byte` everywhere, in stream order.
    pub(crate) fn fill(&self, stream: &CudaStream, byte: u8) -> Result<(), Error> {
        if self.bytes == 0 {
            return Ok(());
        }
        bind(stream.context())?;
        // SAFETY: the memory is that long.
        let code =
            unsafe { sys::cuMemsetD8Async(self.address, byte, self.bytes, stream.cu_stream()) };
        code.result()
            .map_err(|e| failed("cuMemsetD8Async", format_args!("{} bytes", self.bytes), e))
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        if self.address != 0 {
            // A failure here belongs to the device, not to this buffer; the context reports it at the next call.
            self.context.record_err(self.context.bind_to_thread());
            // SAFETY: the address came from `cuMemAlloc` and is freed once.
            self.context.record_err(unsafe { sys::cuMemFree_v2(self.address) }.result());
        }
    }
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {:#x}", self.bytes, self.address)
    }
}

fn bind(context: &CudaContext) -> Result<(), Error> {
    context.bind_to_thread().map_err(|error| failed("cuCtxSetCurrent", "the context", error))
}

fn outside(what: &'static str, expected: usize, got: usize) -> Error {
    attn_core::Error::invalid(what, format!("at most {expected}"), got).into()
}

/// Device memory that this process owns.
///
/// Work that uses a buffer runs after the call that started it has returned. Dropping a buffer waits for the
/// device, so that no stream is left with freed memory; writing to a buffer that another stream still reads gives
/// that stream either value, as on any device.
#[derive(Debug)]
pub struct DeviceBuffer {
    memory: Arc<Allocation>,
}

impl DeviceBuffer {
    /// Uninitialised memory in a context.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] when there is not enough.
    pub fn alloc(context: &Arc<CudaContext>, bytes: usize) -> Result<Self, Error> {
        Ok(Self { memory: Allocation::new(context, bytes)? })
    }

    /// Memory that holds zeros when this returns.
    ///
    /// # Errors
    /// As [`DeviceBuffer::alloc`], or [`Error::Driver`].
    pub fn zeroed(stream: &CudaStream, bytes: usize) -> Result<Self, Error> {
        let mut buffer = Self::alloc(stream.context(), bytes)?;
        buffer.fill(stream, 0)?;
        synchronize(stream)?;
        Ok(buffer)
    }

    /// Memory that holds a copy of `data` when this returns.
    ///
    /// # Errors
    /// As [`DeviceBuffer::alloc`], or [`Error::Driver`].
    pub fn from_host<T: Pod>(stream: &CudaStream, data: &[T]) -> Result<Self, Error> {
        const { assert!(size_of::<T>() > 0, "an element has a size") };
        let mut buffer = Self::alloc(stream.context(), mem::size_of_val(data))?;
        buffer.copy_from_host(stream, data)?;
        Ok(buffer)
    }

    /// Bytes of the buffer.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.memory.bytes
    }

    /// The context that it was made in.
    #[must_use]
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.memory.context
    }

    /// Copies `data` to the start of the buffer, and waits for the stream.
    ///
    /// # Errors
    /// [`Error::Call`] when the buffer is shorter; [`Error::Driver`].
    pub fn copy_from_host<T: Pod>(&mut self, stream: &CudaStream, data: &[T]) -> Result<(), Error> {
        const { assert!(size_of::<T>() > 0, "an element has a size") };
        self.copy_from_host_at(stream, 0, data)
    }

    /// Copies `data` to the elements from `start` on, and waits for the stream.
    ///
    /// # Errors
    /// [`Error::Call`] when the buffer is shorter; [`Error::Driver`].
    pub fn copy_from_host_at<T: Pod>(
        &mut self,
        stream: &CudaStream,
        start: usize,
        data: &[T],
    ) -> Result<(), Error> {
        self.check_stream(stream)?;
        let start = start.saturating_mul(mem::size_of::<T>());
        self.memory.upload_at(stream, start, bytemuck::cast_slice(data))?;
        synchronize(stream)
    }

    /// The first `count` elements of the buffer, once the stream has done what was asked of it.
    ///
    /// # Errors
    /// [`Error::Call`] when the buffer is shorter; [`Error::Driver`].
    pub fn to_host<T: Pod>(&self, stream: &CudaStream, count: usize) -> Result<Vec<T>, Error> {
        const { assert!(size_of::<T>() > 0, "an element has a size") };
        self.to_host_at(stream, 0, count)
    }

    /// The `count` elements from `start` on, once the stream has done what was asked of it.
    ///
    /// # Errors
    /// [`Error::Call`] when the buffer is shorter; [`Error::Driver`].
    pub fn to_host_at<T: Pod>(
        &self,
        stream: &CudaStream,
        start: usize,
        count: usize,
    ) -> Result<Vec<T>, Error> {
        self.check_stream(stream)?;
        let most = (self.bytes() / size_of::<T>()).saturating_sub(start);
        if count > most {
            return Err(outside("elements to copy", most, count));
        }
        let mut data = vec![T::zeroed(); count];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut data);
        if !bytes.is_empty() {
            bind(stream.context())?;
            let what = format_args!("{} bytes", bytes.len());
            // SAFETY: both sides hold that many bytes, and the copy has ended before `data` is looked at.
            let code = unsafe {
                sys::cuMemcpyDtoHAsync_v2(
                    bytes.as_mut_ptr().cast(),
                    self.memory.address + (start * mem::size_of::<T>()) as u64,
                    bytes.len(),
                    stream.cu_stream(),
                )
            };
            code.result().map_err(|error| failed("cuMemcpyDtoHAsync", what, error))?;
            synchronize(stream)?;
        }
        Ok(data)
    }

    /// Writes `byte` everywhere, in stream order.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn fill(&mut self, stream: &CudaStream, byte: u8) -> Result<(), Error> {
        self.check_stream(stream)?;
        self.memory.fill(stream, byte)
    }

    fn check_stream(&self, stream: &CudaStream) -> Result<(), Error> {
        check_context(&self.memory.context, stream.context())
    }
}

/// Checks that memory or a stream belongs to the context that is worked in.
pub(crate) fn check_context(own: &Arc<CudaContext>, other: &Arc<CudaContext>) -> Result<(), Error> {
    if Arc::ptr_eq(own, other) || own.cu_ctx() == other.cu_ctx() {
        return Ok(());
    }
    let expected = format!("the context of device {}", own.ordinal());
    let got = format!("another context, of device {}", other.ordinal());
    Err(attn_core::Error::invalid("context", expected, got).into())
}

/// Borrowed device memory: part of a [`DeviceBuffer`], or memory that something else owns.
#[derive(Debug, Clone, Copy)]
pub struct DeviceMemory<'a> {
    address: u64,
    bytes: usize,
    /// None for foreign memory.
    owner: Option<&'a Arc<Allocation>>,
}

/// Mutably borrowed device memory.
#[derive(Debug)]
pub struct DeviceMemoryMut<'a> {
    memory: DeviceMemory<'a>,
    exclusive: PhantomData<&'a mut DeviceBuffer>,
}

impl<'a> DeviceMemory<'a> {
    /// Memory that something else owns, another library's tensor for example.
    ///
    /// # Safety
    /// `address .. address + bytes` is device memory of the engine's context, and stays so until all work
    /// that was given it has ended, replays of graphs that captured such work included. Whoever else writes to it is
    /// ordered before or after that work.
    #[must_use]
    pub const unsafe fn from_raw(address: u64, bytes: usize) -> Self {
        Self { address, bytes, owner: None }
    }

    /// The address of the first byte; 0 when there is none.
    #[must_use]
    pub const fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) const fn owner(&self) -> Option<&'a Arc<Allocation>> {
        self.owner
    }

    pub(crate) fn check_context(&self, context: &Arc<CudaContext>) -> Result<(), Error> {
        self.owner.map_or(Ok(()), |owner| check_context(context, &owner.context))
    }
}

impl<'a> DeviceMemoryMut<'a> {
    /// Memory that something else owns.
    ///
    /// # Safety
    /// As [`DeviceMemory::from_raw`], and nothing else reads or writes it in the meantime.
    #[must_use]
    pub const unsafe fn from_raw(address: u64, bytes: usize) -> Self {
        let memory = DeviceMemory { address, bytes, owner: None };
        Self { memory, exclusive: PhantomData }
    }

    /// The same memory, to be read.
    #[must_use]
    pub const fn shared(&self) -> DeviceMemory<'_> {
        self.memory
    }

    pub(crate) const fn as_shared(&self) -> DeviceMemory<'a> {
        self.memory
    }

    /// The first `bytes` bytes, and the rest; `None` when there are fewer.
    #[must_use]
    pub fn split_at(self, bytes: usize) -> Option<(Self, Self)> {
        let DeviceMemory { address, bytes: all, owner } = self.memory;
        let rest = all.checked_sub(bytes)?;
        let part = |address, bytes| {
            let memory = DeviceMemory { address, bytes, owner };
            Self { memory, exclusive: PhantomData }
        };
        Some((part(address, bytes), part(address + bytes as u64, rest)))
    }
}

impl<'a> From<&'a DeviceBuffer> for DeviceMemory<'a> {
    fn from(buffer: &'a DeviceBuffer) -> Self {
        let memory = &buffer.memory;
        Self { address: memory.address, bytes: memory.bytes, owner: Some(memory) }
    }
}

impl<'a> From<&'a mut DeviceBuffer> for DeviceMemoryMut<'a> {
    fn from(buffer: &'a mut DeviceBuffer) -> Self {
        Self { memory: DeviceMemory::from(&*buffer), exclusive: PhantomData }
    }
}

/// Waits until a stream has done what was asked of it.
pub(crate) fn synchronize(stream: &CudaStream) -> Result<(), Error> {
    stream.synchronize().map_err(|error| failed("cuStreamSynchronize", "a stream", error))
}

/// Whether a stream is being captured.
pub(crate) fn is_capturing(stream: &CudaStream) -> Result<bool, Error> {
    let status = stream
        .capture_status()
        .map_err(|error| failed("cuStreamIsCapturing", "a stream", error))?;
    Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

/// What a kernel takes by value: a struct with the layout that its source states.
pub(crate) trait KernelParams: Copy + sealed::Sealed {}

mod sealed {
    pub(crate) trait Sealed {}
}

macro_rules! impl_kernel_params {
    ($($params:ty),*) => {
        $(impl sealed::Sealed for $params {}
        impl KernelParams for $params {})*
    };
}

impl_kernel_params!(ForwardParams, BackwardParams, MergeStatesParams);
impl_kernel_params!(AppendParams, CopyBlocksParams);

/// Most tensor maps of one kernel.
const MAX_MAPS: usize = 4;

/// A grid of blocks of one kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Launch<'a> {
    pub(crate) function: &'a Function,
    /// Blocks, along one axis: 2^31 - 1 at most, as the device has it.
    pub(crate) blocks: u32,
    pub(crate) threads: u32,
    pub(crate) dynamic_smem: u32,
    /// Blocks of a cluster; 1 is no cluster.
    pub(crate) cluster: u32,
    /// The kernel may start while the one before it in the stream is ending, and waits for it by itself.
    pub(crate) overlaps: bool,
}

impl<'a> Launch<'a> {
    pub(crate) const fn new(function: &'a Function, blocks: u32, threads: u32) -> Self {
        Self { function, blocks, threads, dynamic_smem: 0, cluster: 1, overlaps: false }
    }

    /// Starts the kernel in stream order, with its parameters and the tensor maps that follow them.
    ///
    /// Invariants: the caller has checked the operands against the shapes in `params`; what they do not
    /// cover, page ids and slots, kernels check themselves.
    ///
    /// # Errors
    /// [`Error::Driver`] naming the instance and the launch.
    pub(crate) fn run<P: KernelParams>(
        &self,
        stream: &CudaStream,
        params: &P,
        maps: &[TensorMap<'_>],
    ) -> Result<(), Error> {
        bind(stream.context())?;
        let mut arguments = [ptr::null_mut::<c_void>(); 1 + MAX_MAPS];
        arguments[0] = ptr::from_ref(params).cast_mut().cast();
        if maps.len() > MAX_MAPS {
            return Err(outside("tensor maps", MAX_MAPS, maps.len()));
        }
        for (argument, map) in arguments[1..].iter_mut().zip(maps) {
            *argument = ptr::from_ref(map.raw()).cast_mut().cast();
        }
        let mut attributes = [ignored(); 2];
        let mut count = 0;
        if self.cluster > 1 {
            attributes[count] = cluster(self.cluster);
            count += 1;
        }
        if self.overlaps {
            attributes[count] = overlap();
            count += 1;
        }
        let config = self.config(stream.cu_stream(), &mut attributes[..count]);
        // SAFETY: the function is loaded, for its module lives in `self.function`; its parameters are one struct of
        // type `P` and then maps, as its source states; all of them are read before the call returns.
        let code = unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                self.function.raw(),
                arguments.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        code.result().map_err(|error| failed("cuLaunchKernelEx", self, error))
    }

    /// How many clusters of this launch the device holds at one time.
    ///
    /// # Errors
    /// [`Error::Driver`] naming the instance and the launch.
    pub(crate) fn most_clusters(&self) -> Result<u32, Error> {
        self.function.most_clusters((self.cluster, self.dynamic_smem), || self.count_clusters())
    }

    fn count_clusters(&self) -> Result<u32, Error> {
        let mut attributes = [cluster(self.cluster)];
        let config = self.config(ptr::null_mut(), &mut attributes);
        let mut clusters = 0;
        // SAFETY: the function is loaded, for its module lives in `self.function`; the driver reads the launch and
        // writes one integer.
        let code = unsafe {
            sys::cuOccupancyMaxActiveClusters(
                &raw mut clusters,
                self.function.raw(),
                &raw const config,
            )
        };
        // No part of the device is large enough for one.
        if code == sys::CUresult::CUDA_ERROR_INVALID_CLUSTER_SIZE {
            return Ok(0);
        }
        code.result().map_err(|e| failed("cuOccupancyMaxActiveClusters", self, e))?;
        Ok(u32::try_from(clusters).unwrap_or(0))
    }

    fn config(
        &self,
        stream: sys::CUstream,
        attributes: &mut [sys::CUlaunchAttribute],
    ) -> sys::CUlaunchConfig {
        sys::CUlaunchConfig {
            gridDimX: self.blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: self.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.dynamic_smem,
            hStream: stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: u32::try_from(attributes.len()).unwrap_or(0),
        }
    }
}

impl fmt::Display for Launch<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { function, blocks, threads, dynamic_smem, cluster, .. } = self;
        let instance = function.instance();
        write!(
            f,
            "{instance}, {blocks} blocks of {threads} threads, {dynamic_smem} B of shared memory"
        )?;
        if *cluster > 1 { write!(f, ", clusters of {cluster}") } else { Ok(()) }
    }
}

fn attribute(
    id: sys::CUlaunchAttributeID,
    value: sys::CUlaunchAttributeValue,
) -> sys::CUlaunchAttribute {
    sys::CUlaunchAttribute { id, pad: [0; 4], value }
}

fn ignored() -> sys::CUlaunchAttribute {
    let value = sys::CUlaunchAttributeValue { pad: [0; 64] };
    attribute(sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_IGNORE, value)
}

fn cluster(blocks: u32) -> sys::CUlaunchAttribute {
    let mut value = sys::CUlaunchAttributeValue { pad: [0; 64] };
    value.clusterDim.x = blocks;
    value.clusterDim.y = 1;
    value.clusterDim.z = 1;
    attribute(sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value)
}

fn overlap() -> sys::CUlaunchAttribute {
    let mut value = sys::CUlaunchAttributeValue { pad: [0; 64] };
    value.programmaticStreamSerializationAllowed = 1;
    let id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute(id, value)
}

/// Work that was captured once and can be started again by one call.
///
/// It holds the memory of every buffer that the engine was given during the capture, so that a replay never meets
/// freed memory. It does not hold foreign memory, and it is not ordered with its workspace: run it
/// on the workspace's stream, or not at the same time.
///
/// Not `Send`: the driver does not synchronise graphs.
pub struct Graph {
    graph: CudaGraph,
    context: Arc<CudaContext>,
    held: Held,
}

/// What captured work uses: memory and code that a graph keeps until it is dropped.
#[derive(Debug, Default)]
pub(crate) struct Held {
    pub(crate) memory: Vec<Arc<Allocation>>,
    pub(crate) functions: Vec<Arc<Function>>,
}

impl Graph {
    /// Starts the captured work in stream order.
    ///
    /// # Errors
    /// [`Error::Driver`], and [`Error::Call`] for a stream of another context, or one that is being captured: the outer
    /// graph would not hold what this one uses.
    pub fn launch(&self, stream: &CudaStream) -> Result<(), Error> {
        check_context(&self.context, stream.context())?;
        bind(&self.context)?;
        if is_capturing(stream)? {
            let got = "a stream that is being captured";
            return Err(attn_core::Error::invalid("stream", "no capture under way", got).into());
        }
        // SAFETY: the executable graph lives in `self.graph`, and the memory that it uses in `self.held`.
        unsafe { result::graph::launch(self.graph.cu_graph_exec(), stream.cu_stream()) }
            .map_err(|error| failed("cuGraphLaunch", "a captured graph", error))
    }

    /// Bytes of the buffers that the graph keeps, its workspaces among them.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.held.memory.iter().map(|memory| memory.bytes as u64).sum()
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph").field("held", &self.held).finish_non_exhaustive()
    }
}

/// Captures what `work` does on `stream`. However `work` ends, the capture ends too.
///
/// `held` is asked, when the capture has ended, for what the work uses.
pub(crate) fn capture(
    stream: &Arc<CudaStream>,
    work: impl FnOnce() -> Result<(), Error>,
    held: impl FnOnce() -> Held,
) -> Result<Graph, Error> {
    // Of this thread alone: others may allocate meanwhile.
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    stream
        .begin_capture(mode)
        .map_err(|error| failed("cuStreamBeginCapture", "a stream", error))?;
    let outcome = catch_unwind(AssertUnwindSafe(work));
    let end = || stream.end_capture(sys::CUgraphInstantiate_flags(0));
    let graph = end();
    // cudarc answers with an error that a drop left behind in place of ending the capture: that of a buffer which
    // `work` dropped and the driver would not free, for example.
    if graph.is_err() && is_capturing(stream).unwrap_or(true) {
        drop(end());
    }
    // After the capture: a buffer whose last owner this is is freed here, which no capture allows.
    let held = held();
    match outcome {
        Err(panic) => resume_unwind(panic),
        Ok(Err(error)) => return Err(error),
        Ok(Ok(())) => {}
    }
    let graph = graph.map_err(|error| failed("cuStreamEndCapture", "a captured stream", error))?;
    let Some(graph) = graph else {
        let got = "a capture that was ended inside";
        return Err(attn_core::Error::invalid("capture", "a graph", got).into());
    };
    Ok(Graph { graph, context: Arc::clone(stream.context()), held })
}

/// The driver's form of a box and its tensor, which have been checked.
pub(crate) fn encode_tiled(
    field: &'static str,
    address: u64,
    tiled: &TensorBox,
    element: sys::CUtensorMapDataType,
    swizzle: sys::CUtensorMapSwizzle,
) -> Result<sys::CUtensorMap, Error> {
    let steps = [1; TensorBox::MAX_RANK];
    let mut map = sys::CUtensorMap { opaque: [0; 16] };
    // SAFETY: every array has an entry for each axis of the largest rank; the driver keeps the address and does
    // not follow it.
    let code = unsafe {
        sys::cuTensorMapEncodeTiled(
            &raw mut map,
            element,
            tiled.rank,
            address as *mut c_void,
            tiled.dims.as_ptr(),
            tiled.strides.as_ptr(),
            tiled.extents.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    code.result().map_err(|error| {
        failed("cuTensorMapEncodeTiled", format_args!("{field}, {tiled:?}"), error)
    })?;
    Ok(map)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn driver_search_never_panics_and_says_what_it_tried() {
        if let Err(error) = load_driver() {
            let Error::DriverMissing { tried, install } = &error else {
                panic!("expected DriverMissing, got {error}");
            };
            assert!(!tried.is_empty() && install.contains("driver"), "{error}");
        }
    }
}
