//! NVRTC: a spec in, code for one processor out.
//!
//! The invariant: a kernel is compiled from the embedded sources alone, to real machine code, and what
//! the compiler says is never lost. The library is loaded at run time through a table of our own:
//! cudarc's loader knows too few names, panics where the library is absent, and stops at PTX.

#![expect(unsafe_code, reason = "a C library is loaded and called")]

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::{env, fmt, fs, mem, ptr};

use crate::error::Error;
use crate::resources::{self, Resources};
use crate::search;
use crate::source::Program;
use crate::spec::{Arch, KernelSpec};

/// Machine code of one kernel for one processor, and what it takes.
#[derive(Clone, PartialEq, Eq)]
pub struct Cubin {
    /// The ELF file that the driver loads.
    pub image: Vec<u8>,
    /// Registers, spills and static shared memory.
    pub resources: Resources,
    /// What the compiler warned of; empty for shipped instances.
    pub warnings: String,
}

impl fmt::Debug for Cubin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cubin")
            .field("bytes", &self.image.len())
            .field("resources", &self.resources)
            .field("warnings", &self.warnings)
            .finish()
    }
}

/// NVRTC, loaded. Any number of threads may compile at once.
#[derive(Debug)]
pub struct Compiler {
    api: Api,
    path: PathBuf,
    version: (u32, u32),
}

impl Compiler {
    /// Finds and loads NVRTC, version 12 or newer.
    ///
    /// `ATTN_NVRTC` names the library or its folder; without it the dynamic loader, the usual prefixes
    /// of the toolkit, `CUDA_HOME`, and an active Python environment are searched.
    ///
    /// # Errors
    /// [`Error::CompilerMissing`] with every place and why it is not there.
    pub fn find() -> Result<Self, Error> {
        let places = search::compiler_places();
        search::first(&search::NVRTC, &places, Self::load).map_err(missing)
    }

    /// Loads the library at `path`.
    ///
    /// # Errors
    /// [`Error::CompilerMissing`] if it is not NVRTC, version 12 or newer.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let failed = |reason| missing(vec![format!("{}: {reason}", path.display())]);
        Self::load(path).map_err(failed)
    }

    fn load(path: &Path) -> Result<Self, String> {
        load_builtins(path);
        let library = load(path)?;
        let api = Api::of(&library)?;
        // NVRTC keeps threads and thread-local state, so it is never unloaded. Its functions are
        // therefore valid for as long as the process runs.
        mem::forget(library);
        let version = api.version()?;
        if version.0 < OLDEST {
            return Err(format!("expected version {OLDEST} or newer, got {}", version.0));
        }
        Ok(Self { api, path: path.to_path_buf(), version })
    }

    /// The compiler's version, major and minor.
    #[must_use]
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// Where it was loaded from: a path, or a bare name that the dynamic loader knew.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Compiles an instance for a processor.
    ///
    /// # Errors
    /// [`Error::Compile`] with the instance, the options and the compiler's log.
    pub fn compile(&self, spec: &KernelSpec, arch: &Arch) -> Result<Cubin, Error> {
        self.compile_program(&Program::of(spec.entry())?, spec, arch)
    }

    /// Compiles an instance from given sources.
    pub(crate) fn compile_program(
        &self,
        program: &Program,
        spec: &KernelSpec,
        arch: &Arch,
    ) -> Result<Cubin, Error> {
        let mut options = options(spec, arch);
        let compile = |options: &[String]| {
            let (image, log) = self.api.compile(program, options)?;
            Ok((image, resources::from_log(&log, spec.entry().symbol()), log))
        };
        let mut compiled = compile(&options);
        if matches!(&compiled, Ok((_, Err(_), log)) if log.trim().is_empty()) {
            // NVRTC 13 may answer what it compiled before from a cache of its own, with no log.
            options.push("--no-cache".to_owned());
            let again = compile(&options);
            compiled = if again.is_ok() { again } else { compiled };
        }
        let compiled = compiled.and_then(|(image, resources, log)| {
            Ok(Cubin { image, resources: resources?, warnings: resources::without_figures(&log) })
        });
        compiled.map_err(|log| Error::Compile {
            instance: format!("{spec} for {arch}"),
            options,
            log,
        })
    }
}

/// The oldest major version that is known to work.
const OLDEST: u32 = 12;

fn missing(tried: Vec<String>) -> Error {
    Error::CompilerMissing { tried, install: search::NVRTC.install }
}

/// The compiler's options for an instance, in a fixed order: they are part of the key of a cache.
pub(crate) fn options(spec: &KernelSpec, arch: &Arch) -> Vec<String> {
    let mut options = vec![
        format!("--gpu-architecture={arch}"),
        "--std=c++20".to_owned(),
        // Makes the log tell registers, spills and shared memory.
        "--ptxas-options=-v".to_owned(),
    ];
    if env::var_os("ATTN_KERNELS_LINEINFO").is_some_and(|value| !value.is_empty()) {
        options.push("--generate-line-info".to_owned());
    }
    let define = |(name, value): &(&str, i64)| {
        format!("--define-macro=ATTN_{}={value}", name.to_uppercase())
    };
    options.extend(spec.defines().iter().map(define));
    options
}

/// Opens a library by path or bare name.
fn load(path: &Path) -> Result<libloading::Library, String> {
    // SAFETY: opening a library runs its initialisers. The libraries named here are NVIDIA's, or what
    // the user named in their place; their initialisers ask nothing of the caller.
    unsafe { libloading::Library::new(path) }.map_err(|error| reason(&error))
}

/// What the dynamic loader said; the error itself only names the call that failed.
pub(crate) fn reason(error: &libloading::Error) -> String {
    let cause = std::error::Error::source(error);
    cause.map_or_else(|| error.to_string(), ToString::to_string)
}

/// Loads the file of built-in declarations that stands beside NVRTC.
///
/// NVRTC asks the dynamic loader for it by a bare name, which finds a file in no special folder only if it
/// is loaded already. Whatever goes wrong here, NVRTC itself tells of it when it compiles.
fn load_builtins(nvrtc: &Path) {
    let prefix = if cfg!(windows) { "nvrtc-builtins" } else { "libnvrtc-builtins.so" };
    let folder = nvrtc.parent().filter(|folder| !folder.as_os_str().is_empty());
    let Some(entries) = folder.and_then(|folder| fs::read_dir(folder).ok()) else { return };
    for entry in entries.flatten() {
        if entry.file_name().to_string_lossy().starts_with(prefix)
            && let Ok(library) = load(&entry.path())
        {
            mem::forget(library);
        }
    }
}

/// `nvrtcProgram`: a pointer that only NVRTC looks behind.
type Handle = *mut c_void;

/// The functions of NVRTC, of every version since 12. Zero is success.
#[derive(Clone, Copy, Debug)]
struct Api {
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    create: unsafe extern "C" fn(
        *mut Handle,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> c_int,
    destroy: unsafe extern "C" fn(*mut Handle) -> c_int,
    compile: unsafe extern "C" fn(Handle, c_int, *const *const c_char) -> c_int,
    log_size: Size,
    log: Get,
    cubin_size: Size,
    cubin: Get,
}

/// Writes the size of something of a program.
type Size = unsafe extern "C" fn(Handle, *mut usize) -> c_int;
/// Writes that something into a buffer of its size.
type Get = unsafe extern "C" fn(Handle, *mut c_char) -> c_int;

impl Api {
    fn of(library: &libloading::Library) -> Result<Self, String> {
        /// A function of the library by its name.
        fn get<T: Copy>(library: &libloading::Library, name: &str) -> Result<T, String> {
            // SAFETY: every field of `Api` has the type that NVRTC's header gives the function that it
            // is read from below, and the caller keeps the library loaded.
            let symbol = unsafe { library.get::<T>(name) };
            symbol.map(|symbol| *symbol).map_err(|error| reason(&error))
        }
        Ok(Self {
            version: get(library, "nvrtcVersion")?,
            error_string: get(library, "nvrtcGetErrorString")?,
            create: get(library, "nvrtcCreateProgram")?,
            destroy: get(library, "nvrtcDestroyProgram")?,
            compile: get(library, "nvrtcCompileProgram")?,
            log_size: get(library, "nvrtcGetProgramLogSize")?,
            log: get(library, "nvrtcGetProgramLog")?,
            cubin_size: get(library, "nvrtcGetCUBINSize")?,
            cubin: get(library, "nvrtcGetCUBIN")?,
        })
    }

    fn version(&self) -> Result<(u32, u32), String> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both point to integers of the type that the function writes.
        let code = unsafe { (self.version)(&raw mut major, &raw mut minor) };
        self.check("nvrtcVersion", code)?;
        let number = |value| u32::try_from(value).map_err(|_| format!("version {value}"));
        Ok((number(major)?, number(minor)?))
    }

    /// Compiles a program: the machine code and the log, or what went wrong.
    fn compile(&self, program: &Program, options: &[String]) -> Result<(Vec<u8>, String), String> {
        let handle = Open::new(self, program)?;
        let options = options.iter().map(|o| c_string(o)).collect::<Result<Vec<_>, _>>()?;
        let pointers: Vec<_> = options.iter().map(|o| o.as_ptr()).collect();
        let count = c_int::try_from(pointers.len()).map_err(|_| "too many options".to_owned())?;
        // SAFETY: the handle is a program of this library, and `pointers` holds `count` pointers to
        // strings that end in zero and outlive the call.
        let code = unsafe { (self.compile)(handle.program, count, pointers.as_ptr()) };
        let log = text(self.bytes(&handle, self.log_size, self.log, "nvrtcGetProgramLog")?);
        if let Err(failure) = self.check("nvrtcCompileProgram", code) {
            return Err(format!("{failure}\n{log}"));
        }
        let image = self.bytes(&handle, self.cubin_size, self.cubin, "nvrtcGetCUBIN")?;
        if image.is_empty() {
            return Err(format!("no machine code was made\n{log}"));
        }
        Ok((image, log))
    }

    /// Something of a program that is read by asking for its size, then for its bytes.
    fn bytes(
        &self,
        open: &Open<'_>,
        size: Size,
        get: Get,
        name: &'static str,
    ) -> Result<Vec<u8>, String> {
        let mut length = 0;
        // SAFETY: the handle is a program of this library, and `length` a size to write to.
        let code = unsafe { size(open.program, &raw mut length) };
        self.check(name, code)?;
        let mut bytes = vec![0u8; length];
        // SAFETY: the handle is a program of this library, and the buffer has the size that it told.
        let code = unsafe { get(open.program, bytes.as_mut_ptr().cast()) };
        self.check(name, code)?;
        Ok(bytes)
    }

    /// An error in NVRTC's own words unless `code` is success.
    fn check(&self, call: &'static str, code: c_int) -> Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: the function takes any code.
        let name = unsafe { (self.error_string)(code) };
        if name.is_null() {
            return Err(format!("{call}: error {code}"));
        }
        // SAFETY: the string ends in zero and is never freed.
        let name = unsafe { CStr::from_ptr(name) };
        Err(format!("{call}: {}", name.to_string_lossy()))
    }
}

/// A program of NVRTC, destroyed with this value.
struct Open<'a> {
    api: &'a Api,
    program: Handle,
}

impl<'a> Open<'a> {
    fn new(api: &'a Api, program: &Program) -> Result<Self, String> {
        let main = (c_string(program.main.text)?, c_string(program.main.path)?);
        let strings = |of: fn(&crate::source::SourceFile) -> &'static str| {
            program.headers.iter().map(|h| c_string(of(h))).collect::<Result<Vec<_>, _>>()
        };
        let (texts, names) = (strings(|h| h.text)?, strings(|h| h.path)?);
        let text_pointers: Vec<_> = texts.iter().map(|t| t.as_ptr()).collect();
        let name_pointers: Vec<_> = names.iter().map(|n| n.as_ptr()).collect();
        let count = c_int::try_from(names.len()).map_err(|_| "too many headers".to_owned())?;
        let mut handle = ptr::null_mut();
        // SAFETY: `handle` is a place for the program; every string ends in zero and outlives the call,
        // which copies them; both arrays hold `count` pointers.
        let code = unsafe {
            (api.create)(
                &raw mut handle,
                main.0.as_ptr(),
                main.1.as_ptr(),
                count,
                text_pointers.as_ptr(),
                name_pointers.as_ptr(),
            )
        };
        api.check("nvrtcCreateProgram", code)?;
        Ok(Self { api, program: handle })
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        // SAFETY: the program was created by this library and is destroyed this once. A failure to do
        // so could only be told to somebody who no longer has it.
        unsafe { (self.api.destroy)(&raw mut self.program) };
    }
}

fn c_string(text: &str) -> Result<CString, String> {
    CString::new(text).map_err(|_| format!("a zero byte in {text:?}"))
}

/// A string of C in a buffer of its size.
fn text(mut bytes: Vec<u8>) -> String {
    bytes.truncate(bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len()));
    String::from_utf8_lossy(&bytes).into_owned()
}
