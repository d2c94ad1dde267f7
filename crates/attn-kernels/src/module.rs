//! Kernels loaded into one context.
//!
//! The invariant: an instance is compiled and loaded once a context, and stays loaded as long as anything can launch
//! it. What is cached is the function, not the code: the store of compiled code knows nothing of devices.

#![expect(unsafe_code, reason = "the driver loads and forgets modules by handle")]

use std::collections::HashMap;
use std::ffi::CString;
use std::fmt;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::{CudaContext, sys};
use parking_lot::Mutex;

use crate::error::Error;
use crate::launch::failed;
use crate::spec::{Arch, KernelSpec};
use crate::store::KernelStore;

/// A loaded kernel.
pub(crate) struct Function {
    raw: sys::CUfunction,
    module: sys::CUmodule,
    context: Arc<CudaContext>,
    instance: String,
    /// Dynamic shared memory that a launch may ask for.
    smem: Mutex<u32>,
    /// Clusters that the device holds, by their blocks and the shared memory of one.
    clusters: Mutex<Vec<((u32, u32), u32)>>,
}

// SAFETY: both handles are keys of the driver, which may be used from any thread that has their context
// current; launches and attribute calls synchronise inside the driver.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

impl Function {
    fn load(
        context: &Arc<CudaContext>,
        image: &[u8],
        symbol: &'static str,
        instance: String,
    ) -> Result<Self, Error> {
        context.bind_to_thread().map_err(|e| failed("cuCtxSetCurrent", &instance, e))?;
        let mut module = ptr::null_mut();
        // SAFETY: the image is a whole CUBIN, which the store checked and the driver checks again.
        let code = unsafe { sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast()) };
        code.result().map_err(|error| failed("cuModuleLoadData", &instance, error))?;
        // From here on the module is unloaded by `Drop`, whatever fails.
        let mut function = Self {
            raw: ptr::null_mut(),
            module,
            context: Arc::clone(context),
            instance,
            smem: Mutex::new(0),
            clusters: Mutex::default(),
        };
        let name = CString::new(symbol).unwrap_or_default();
        // SAFETY: the module is loaded and the name ends with a zero.
        let code = unsafe {
            sys::cuModuleGetFunction(&raw mut function.raw, function.module, name.as_ptr())
        };
        code.result().map_err(|error| failed("cuModuleGetFunction", &function.instance, error))?;
        Ok(function)
    }

    pub(crate) const fn raw(&self) -> sys::CUfunction {
        self.raw
    }

    pub(crate) fn instance(&self) -> &str {
        &self.instance
    }

    /// Lets launches ask for `bytes` of dynamic shared memory.
    fn allow(&self, bytes: u32) -> Result<(), Error> {
        let mut allowed = self.smem.lock();
        if bytes <= *allowed {
            return Ok(());
        }
        let what = format_args!("{}, {bytes} B of shared memory", self.instance);
        let value = i32::try_from(bytes).unwrap_or(i32::MAX);
        let attribute = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        self.context.bind_to_thread().map_err(|e| failed("cuCtxSetCurrent", what, e))?;
        // SAFETY: the function is loaded in the context that is current.
        let code = unsafe { sys::cuFuncSetAttribute(self.raw, attribute, value) };
        code.result().map_err(|error| failed("cuFuncSetAttribute", what, error))?;
        *allowed = bytes;
        Ok(())
    }

    /// What `count` answered before for a launch of this function in clusters: how many the device holds depends on the
    /// blocks of one and their shared memory. Launches may ask for clusters of more blocks than every device has.
    pub(crate) fn most_clusters(
        &self,
        key: (u32, u32),
        count: impl FnOnce() -> Result<u32, Error>,
    ) -> Result<u32, Error> {
        let mut known = self.clusters.lock();
        if let Some((_, clusters)) = known.iter().find(|(own, _)| *own == key) {
            return Ok(*clusters);
        }
        self.allow_clusters()?;
        let clusters = count()?;
        known.push((key, clusters));
        Ok(clusters)
    }

    fn allow_clusters(&self) -> Result<(), Error> {
        let attribute =
            sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED;
        let what = format_args!("{}, clusters", self.instance);
        self.context.bind_to_thread().map_err(|e| failed("cuCtxSetCurrent", what, e))?;
        // SAFETY: the function is loaded in the context that is current.
        let code = unsafe { sys::cuFuncSetAttribute(self.raw, attribute, 1) };
        code.result().map_err(|error| failed("cuFuncSetAttribute", what, error))
    }
}

impl Drop for Function {
    fn drop(&mut self) {
        self.context.record_err(self.context.bind_to_thread());
        // A launch of this function may still be under way, and nothing says that unloading waits for it.
        self.context.record_err(self.context.synchronize());
        // SAFETY: the module was loaded once, and nothing else holds it.
        self.context.record_err(unsafe { sys::cuModuleUnload(self.module) }.result());
    }
}

impl fmt::Debug for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Function").field(&self.instance).finish()
    }
}

/// The kernels of one context, loaded as they are needed.
#[derive(Debug)]
pub(crate) struct Modules {
    context: Arc<CudaContext>,
    arch: Arch,
    store: KernelStore,
    functions: Mutex<HashMap<KernelSpec, Arc<Function>>>,
}

impl Modules {
    pub(crate) fn new(context: Arc<CudaContext>, arch: Arch, store: KernelStore) -> Self {
        Self { context, arch, store, functions: Mutex::default() }
    }

    pub(crate) const fn arch(&self) -> &Arch {
        &self.arch
    }

    pub(crate) const fn store(&self) -> &KernelStore {
        &self.store
    }

    /// The function of an instance that is loaded already.
    pub(crate) fn loaded(&self, spec: &KernelSpec) -> Option<Arc<Function>> {
        self.functions.lock().get(spec).cloned()
    }

    /// The function of an instance, compiled and loaded if it is not there yet.
    ///
    /// # Errors
    /// Those of the store; [`Error::Driver`] naming the instance.
    pub(crate) fn function(
        &self,
        spec: &KernelSpec,
        dynamic_smem: u32,
    ) -> Result<Arc<Function>, Error> {
        let function = match self.loaded(spec) {
            Some(function) => function,
            None => {
                // Not under the lock: compiling takes seconds, and other kernels are needed meanwhile. Of two threads that
                // load one instance at the same time the second's copy is dropped.
                let cubin = self.store.cubin(spec, &self.arch)?;
                let instance = format!("{spec} for {}", self.arch);
                let symbol = spec.entry().symbol();
                let loaded = Function::load(&self.context, &cubin.image, symbol, instance)?;
                let mut functions = self.functions.lock();
                Arc::clone(functions.entry(spec.clone()).or_insert_with(|| Arc::new(loaded)))
            }
        };
        function.allow(dynamic_smem)?;
        Ok(function)
    }
}
