//! The toolchain with a real compiler: what a machine with NVRTC, and without a GPU, can check.
//!
//! The invariant: where NVRTC is not found each test says so on one line and passes, unless `ATTN_NVRTC`
//! names it: a machine that was told where the compiler is must not skip. Checks of text and of files that
//! need no compiler are unit tests of their modules.

#![cfg(feature = "cuda")]

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::{env, process, thread};

use attn_kernels::Error;
use attn_kernels::bundle::Bundle;
use attn_kernels::compile::Compiler;
use attn_kernels::cuda::CudaEngine;
use attn_kernels::instances::{self, Instance};
use attn_kernels::resources;
use attn_kernels::spec::{Arch, Entry, KernelSpec};
use attn_kernels::store::KernelStore;

/// The compiler, or `None` after a line that says what was looked for.
fn compiler(test: &str) -> Option<Compiler> {
    match Compiler::find() {
        Ok(compiler) => Some(compiler),
        Err(error) if env::var_os("ATTN_NVRTC").is_some() => panic!("{error}"),
        Err(_) => {
            let line = format!(
                "{test}: skipped: no libnvrtc.so, .so.13 or .so.12 in ATTN_NVRTC, the loader's path, \
                 CUDA_HOME, CUDA_PATH, VIRTUAL_ENV, CONDA_PREFIX or the usual prefixes\n"
            );
            // Past the capture of the test harness, which hides what a passing test prints.
            let _ = std::io::stderr().write_all(line.as_bytes());
            None
        }
    }
}

fn arch(name: &str) -> Arch {
    name.parse().expect("the name of an arch")
}

/// A kernel that compiles fast.
fn small() -> KernelSpec {
    let found = instances::representatives().into_iter().map(|i| i.spec);
    found
        .min_by_key(|spec| (spec.entry() != Entry::CopyBlocks, spec.clone()))
        .expect("a representative")
}

/// A folder of one test, removed with this value.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = env::temp_dir().join(format!("attn-kernels-{}-{name}", process::id()));
        drop(fs::remove_dir_all(&path));
        fs::create_dir_all(&path).expect("a temporary folder");
        Self(path)
    }

    fn store(&self) -> KernelStore {
        KernelStore::with_cache_dir(Some(self.0.clone()))
    }

    fn files(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(&self.0).expect("the folder of the test");
        entries.map(|entry| entry.expect("an entry of it").path()).collect()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

#[test]
fn representatives_compile_without_warnings_or_unlisted_spills() {
    let instances = instances::representatives();
    for entry in Entry::ALL {
        assert!(instances.iter().any(|i| i.spec.entry() == entry), "{entry} has no representative");
    }
    if compiler("representatives").is_none() {
        return;
    }
    let store = KernelStore::with_cache_dir(None);
    let specs: Vec<_> = instances.into_iter().map(|Instance { spec, .. }| spec).collect();
    let mut faults = Vec::new();
    for arch in [arch("sm_80"), arch("sm_90a")] {
        let specs: Vec<_> =
            specs.iter().filter(|spec| spec.entry().compiles_for(&arch)).cloned().collect();
        store.prepare(&specs, &arch).unwrap();
        for spec in &specs {
            let cubin = store.cubin(spec, &arch).unwrap();
            assert!(cubin.image.starts_with(b"\x7fELF"), "{spec} for {arch}");
            assert!((1..=255).contains(&cubin.resources.registers), "{spec} for {arch}");
            faults.extend(resources::judge(spec, &arch, &cubin.resources).err());
            if !cubin.warnings.is_empty() {
                faults.push(format!("{spec} for {arch}: {}", cubin.warnings));
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn naive_compiles_for_fp8_queries_and_for_no_mixture() {
    let Some(compiler) = compiler("naive_compiles_for_fp8") else { return };
    let naive = |q, kv| KernelSpec::new(Entry::Naive, [("dtype", q), ("kv_dtype", kv)]);
    for arch in [arch("sm_80"), arch("sm_90a")] {
        let (e4m3, spec) = (3, naive(3, 3));
        let cubin = compiler.compile(&spec, &arch).unwrap();
        assert_eq!(cubin.warnings, "", "{spec} for {arch}");
        resources::judge(&spec, &arch, &cubin.resources).unwrap();
        for (q, kv) in [(4, 4), (e4m3, 2), (e4m3, 4)] {
            let error = compiler.compile(&naive(q, kv), &arch).unwrap_err().to_string();
            assert!(error.contains("q_dtype.cuh") || error.contains("naive.cu"), "{error}");
        }
    }
}

#[test]
fn store_reads_back_what_another_store_compiled() {
    let Some(_) = compiler("store_reads_back") else { return };
    let folder = Folder::new("reads-back");
    let (spec, arch) = (small(), arch("sm_80"));
    let compiled = folder.store().cubin(&spec, &arch).unwrap();
    assert_eq!(folder.files().len(), 1);

    let start = Instant::now();
    let read = folder.store().cubin(&spec, &arch).unwrap();
    let took = start.elapsed();
    assert_eq!(read, compiled);
    // The bound on a quiet machine is 20 ms; compiling takes ten times this one.
    assert!(took < Duration::from_millis(200), "{took:?}");
}

#[test]
fn store_replaces_a_damaged_file() {
    let Some(_) = compiler("store_replaces") else { return };
    let folder = Folder::new("damaged");
    let (spec, arch) = (small(), arch("sm_80"));
    let compiled = folder.store().cubin(&spec, &arch).unwrap();
    let [path] = &folder.files()[..] else { panic!("{:?}", folder.files()) };
    let good = fs::read(path).unwrap();

    let mut altered = good.clone();
    altered[good.len() / 2] ^= 1;
    for damaged in [&good[..good.len() / 2], &altered, b"", b"of another program"] {
        fs::write(path, damaged).unwrap();
        assert_eq!(folder.store().cubin(&spec, &arch).unwrap(), compiled);
        assert_eq!(fs::read(path).unwrap(), good);
    }
}

#[test]
fn store_compiles_where_the_cache_cannot_be_written() {
    let Some(_) = compiler("store_compiles") else { return };
    let folder = Folder::new("unwritable");
    let file = folder.0.join("file");
    fs::write(&file, "").unwrap();
    let store = KernelStore::with_cache_dir(Some(file));
    let cubin = store.cubin(&small(), &arch("sm_80")).unwrap();
    assert!(!cubin.image.is_empty());
}

#[test]
fn store_compiles_once_for_many_threads() {
    let Some(_) = compiler("store_compiles_once") else { return };
    let store = KernelStore::with_cache_dir(None);
    let (spec, arch) = (small(), arch("sm_80"));
    let found: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> =
            (0..8).map(|_| scope.spawn(|| store.cubin(&spec, &arch).unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    // One allocation: the second to ask got what the first had made.
    assert!(found.iter().all(|cubin| Arc::ptr_eq(cubin, &found[0])));
}

#[test]
fn stores_share_a_folder_at_once() {
    let Some(_) = compiler("stores_share") else { return };
    let folder = Folder::new("shared");
    let (spec, arch) = (small(), arch("sm_80"));
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| folder.store().cubin(&spec, &arch).unwrap());
        }
    });
    assert_eq!(folder.files().len(), 1, "{:?}", folder.files());
    assert!(folder.store().cubin(&spec, &arch).is_ok());
}

#[test]
fn bundle_gives_the_kernels_that_were_put_in() {
    let Some(compiler) = compiler("bundle_gives") else { return };
    let folder = Folder::new("bundle");
    let (spec, arch) = (small(), arch("sm_80"));
    let cubin = Arc::new(compiler.compile(&spec, &arch).unwrap());
    let mut bundle = Bundle::new(compiler.version());
    bundle.insert(&spec, arch, Arc::clone(&cubin));
    let path = folder.0.join("kernels.bundle");
    bundle.write(&path).unwrap();

    let store = KernelStore::from_bundle(&path).unwrap();
    assert_eq!(store.cubin(&spec, &arch).unwrap(), cubin);
    let in_memory = KernelStore::from_bundle_bytes(&fs::read(&path).unwrap()).unwrap();
    assert_eq!(in_memory.cubin(&spec, &arch).unwrap(), cubin);
}

#[test]
fn compile_error_names_instance_options_and_reason() {
    let Some(compiler) = compiler("compile_error") else { return };
    let spec = KernelSpec::new(Entry::Prefill, [("head_dim", 7)]);
    let error = compiler.compile(&spec, &arch("sm_80")).unwrap_err();
    let Error::Compile { instance, options, log } = &error else { panic!("{error}") };
    assert_eq!(instance, "prefill[head_dim=7] for sm_80");
    assert!(options.iter().any(|o| o == "--define-macro=ATTN_HEAD_DIM=7"), "{options:?}");
    assert!(log.contains("config.cuh"), "{log}");
}

#[test]
fn compile_refuses_an_arch_that_the_compiler_does_not_know() {
    let Some(compiler) = compiler("compile_refuses") else { return };
    let error = compiler.compile(&small(), &arch("sm_999a")).unwrap_err();
    assert!(matches!(&error, Error::Compile { .. }), "{error}");
    assert!(error.to_string().contains("sm_999a"), "{error}");
}

#[test]
fn compiler_opens_by_path_and_tells_its_version() {
    let Some(found) = compiler("compiler_opens") else { return };
    let opened = Compiler::open(found.path()).unwrap();
    assert_eq!(opened.version(), found.version());
    assert!(opened.version().0 >= 12);
}

#[test]
fn compiler_that_is_not_there_is_an_error_with_its_path_and_a_remedy() {
    let error = Compiler::open(Path::new("/nowhere/libnvrtc.so.13")).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("/nowhere/libnvrtc.so.13") && text.contains("pip install"), "{text}");
}

#[test]
fn engine_without_a_driver_says_what_was_tried() {
    match CudaEngine::new(0) {
        Err(Error::DriverMissing { tried, install }) => {
            assert!(!tried.is_empty());
            let text = Error::DriverMissing { tried, install }.to_string();
            assert!(text.contains("ATTN_LIBCUDA"), "{text}");
        }
        // A driver without a device, or with one.
        Err(Error::Driver { .. }) | Ok(_) => {}
        Err(error) => panic!("{error}"),
    }
}
