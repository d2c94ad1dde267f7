//! Where the code of a kernel comes from: memory, then a bundle, then the disk, then the compiler.
//!
//! The invariant: one store makes a kernel at most once, however many threads ask for it, and a failure
//! is not remembered: the next call tries again. The compiler is looked for on the first need, so a
//! program that finds everything in its bundle never loads it.

use std::collections::HashMap;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{fmt, thread};

use indicatif::{ProgressBar, ProgressStyle};
use parking_lot::Mutex;

use crate::bundle::Bundle;
use crate::compile::{Compiler, Cubin};
use crate::disk::{DiskCache, Key};
use crate::error::Error;
use crate::source::Program;
use crate::spec::{Arch, KernelSpec};

/// Compiled kernels, each made once and kept.
pub struct KernelStore {
    memory: Mutex<HashMap<Arch, HashMap<KernelSpec, Arc<Slot>>>>,
    bundle: Option<Bundle>,
    disk: DiskCache,
    /// Empty until the compiler was needed and found.
    compiler: Mutex<Option<Arc<Compiler>>>,
    /// How many compile at once in [`KernelStore::prepare`].
    threads: NonZero<usize>,
}

/// The code of one kernel, or nothing yet. Its lock is held while the kernel is made.
type Slot = Mutex<Option<Arc<Cubin>>>;

impl KernelStore {
    /// A store over the user's disk cache, see [`DiskCache::from_env`].
    #[must_use]
    pub fn new() -> Self {
        Self::over(DiskCache::from_env(), None)
    }

    /// A store that keeps compiled kernels in this folder, or with `None` in memory alone.
    #[must_use]
    pub fn with_cache_dir(folder: Option<PathBuf>) -> Self {
        Self::over(DiskCache::at(folder), None)
    }

    /// A store that takes from this bundle what it holds. The rest is compiled where there is a
    /// compiler, and is an error elsewhere.
    ///
    /// # Errors
    /// [`Error::BundleFile`] and [`Error::Bundle`] as for [`Bundle::read`].
    pub fn from_bundle(path: &Path) -> Result<Self, Error> {
        Ok(Self::over(DiskCache::from_env(), Some(Bundle::read(path)?)))
    }

    /// The same for a bundle in memory.
    ///
    /// # Errors
    /// [`Error::Bundle`] as for [`Bundle::from_bytes`].
    pub fn from_bundle_bytes(bytes: &[u8]) -> Result<Self, Error> {
        Ok(Self::over(DiskCache::from_env(), Some(Bundle::from_bytes(bytes)?)))
    }

    fn over(disk: DiskCache, bundle: Option<Bundle>) -> Self {
        let threads = thread::available_parallelism().unwrap_or(NonZero::<usize>::MIN);
        Self { memory: Mutex::default(), bundle, disk, compiler: Mutex::default(), threads }
    }

    /// The same store, whose [`KernelStore::prepare`] uses this many threads, not one a processor.
    #[must_use]
    pub fn with_threads(self, threads: NonZero<usize>) -> Self {
        Self { threads, ..self }
    }

    /// The compiler that this store uses, looked for on the first call.
    ///
    /// # Errors
    /// [`Error::CompilerMissing`].
    pub fn compiler(&self) -> Result<Arc<Compiler>, Error> {
        let mut compiler = self.compiler.lock();
        if let Some(compiler) = &*compiler {
            return Ok(Arc::clone(compiler));
        }
        let found = Arc::new(Compiler::find()?);
        Ok(Arc::clone(compiler.insert(found)))
    }

    /// The code of a kernel for a device of this arch. Threads that ask for the same kernel wait for the
    /// one that makes it.
    ///
    /// # Errors
    /// [`Error::Compile`], [`Error::CompilerMissing`], or [`Error::NotInBundle`] in a store from a
    /// bundle on a machine without a compiler.
    pub fn cubin(&self, spec: &KernelSpec, arch: &Arch) -> Result<Arc<Cubin>, Error> {
        let slot = self.slot(spec, arch);
        let mut slot = slot.lock();
        if slot.is_none() {
            *slot = self.read(spec, arch)?;
        }
        let cubin = match &*slot {
            Some(cubin) => Arc::clone(cubin),
            None => Arc::clone(slot.insert(Arc::new(self.make(spec, arch)?))),
        };
        Ok(cubin)
    }

    /// Makes several kernels ready, a thread for each processor. On a terminal a
    /// progress line is shown while more than one has to be compiled.
    ///
    /// # Errors
    /// That of the first spec in the list that failed, as for [`KernelStore::cubin`]. Kernels that were
    /// made until then are kept.
    pub fn prepare(&self, specs: &[KernelSpec], arch: &Arch) -> Result<(), Error> {
        let found = in_parallel(self.threads, specs, |spec| self.is_ready(spec, arch))?;
        let absent: Vec<_> =
            specs.iter().zip(found).filter(|(_, found)| !found).map(|(spec, _)| spec).collect();
        let progress = (absent.len() > 1).then(|| progress(absent.len(), arch));
        let made = in_parallel(self.threads, &absent, |spec| {
            let made = self.cubin(spec, arch).map(drop);
            if let Some(progress) = &progress {
                progress.inc(1);
            }
            made
        });
        if let Some(progress) = progress {
            progress.finish_and_clear();
        }
        made.map(drop)
    }

    /// True if the kernel need not be compiled; it is in memory then.
    fn is_ready(&self, spec: &KernelSpec, arch: &Arch) -> Result<bool, Error> {
        let slot = self.slot(spec, arch);
        let mut slot = slot.lock();
        if slot.is_none() {
            *slot = self.read(spec, arch)?;
        }
        Ok(slot.is_some())
    }

    fn slot(&self, spec: &KernelSpec, arch: &Arch) -> Arc<Slot> {
        let mut memory = self.memory.lock();
        let of_arch = memory.entry(*arch).or_default();
        if let Some(slot) = of_arch.get(spec) {
            return Arc::clone(slot);
        }
        Arc::clone(of_arch.entry(spec.clone()).or_default())
    }

    /// From the bundle or the disk.
    fn read(&self, spec: &KernelSpec, arch: &Arch) -> Result<Option<Arc<Cubin>>, Error> {
        if let Some(cubin) = self.bundle.as_ref().and_then(|bundle| bundle.get(spec, arch)) {
            return Ok(Some(Arc::clone(cubin)));
        }
        // Without a compiler the version that the key needs is unknown.
        let compiler =
            self.compiler().map_err(|missing| self.not_in_bundle(spec, arch, missing))?;
        let key = Key::new(&Program::of(spec.entry())?, spec, arch, compiler.version());
        Ok(self.disk.read(&key).map(Arc::new))
    }

    fn make(&self, spec: &KernelSpec, arch: &Arch) -> Result<Cubin, Error> {
        let compiler = self.compiler()?;
        let program = Program::of(spec.entry())?;
        let cubin = compiler.compile_program(&program, spec, arch)?;
        let key = Key::new(&program, spec, arch, compiler.version());
        // A cache that cannot be written makes the next process compile again, which is no failure
        // of this one.
        drop(self.disk.write(&key, &cubin));
        Ok(cubin)
    }

    fn not_in_bundle(&self, spec: &KernelSpec, arch: &Arch, missing: Error) -> Error {
        let Some(bundle) = &self.bundle else { return missing };
        Error::NotInBundle {
            instance: spec.to_string(),
            arch: arch.name(),
            has: bundle.has(spec.entry()),
            compiler: Box::new(missing),
        }
    }
}

impl Default for KernelStore {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for KernelStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KernelStore")
            .field("bundle", &self.bundle.as_ref().map(Bundle::len))
            .field("disk", &self.disk)
            .finish_non_exhaustive()
    }
}

/// A line on standard error if that is a terminal, else nothing.
fn progress(kernels: usize, arch: &Arch) -> ProgressBar {
    let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len} {elapsed}");
    let progress = ProgressBar::new(kernels as u64).with_message(format!("kernels for {arch}"));
    progress.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

/// Calls a function for each item, on so many threads. The results are in the order of the
/// items; after a failure no further item is begun.
fn in_parallel<T: Sync, R: Send>(
    threads: NonZero<usize>,
    items: &[T],
    call: impl Fn(&T) -> Result<R, Error> + Sync,
) -> Result<Vec<R>, Error> {
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<(usize, Result<R, Error>)>> = Mutex::default();
    let work = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(at) else { break };
            let result = call(item);
            if result.is_err() {
                next.store(items.len(), Ordering::Relaxed);
            }
            results.lock().push((at, result));
        }
    };
    let threads = threads.get().min(items.len());
    thread::scope(|scope| {
        // One that cannot be started leaves its work to the others, of which this thread is one.
        let spawn = |_| thread::Builder::new().spawn_scoped(scope, work).ok();
        let helpers: Vec<_> = (1..threads).filter_map(spawn).collect();
        work();
        drop(helpers);
    });
    let mut results = results.into_inner();
    results.sort_by_key(|(at, _)| *at);
    results.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::encoding::example;
    use crate::spec::Entry;

    fn spec(head_dim: i64) -> KernelSpec {
        KernelSpec::new(Entry::Decode, [("head_dim", head_dim)])
    }

    fn arch(name: &str) -> Arch {
        name.parse().unwrap()
    }

    fn bundled() -> KernelStore {
        let mut bundle = Bundle::new((13, 0));
        bundle.insert(&spec(64), arch("sm_80"), Arc::new(example(1)));
        KernelStore::over(DiskCache::at(None), Some(bundle))
    }

    #[test]
    fn store_takes_from_its_bundle_and_asks_no_compiler() {
        let store = bundled();
        assert_eq!(*store.cubin(&spec(64), &arch("sm_80")).unwrap(), example(1));
        store.prepare(&[spec(64), spec(64)], &arch("sm_89")).unwrap();
        assert!(store.compiler.lock().is_none());
    }

    #[test]
    fn store_says_what_its_bundle_has_when_nothing_can_be_compiled() {
        let missing = Error::CompilerMissing { tried: vec!["here".into()], install: "install it" };
        let error = bundled().not_in_bundle(&spec(128), &arch("sm_90a"), missing);
        let text = error.to_string();
        for part in ["decode[head_dim=128]", "sm_90a", "decode[head_dim=64] for sm_80"] {
            assert!(text.contains(part), "{part} in {text}");
        }
        let cause = std::error::Error::source(&error).unwrap().to_string();
        assert!(cause.contains("here") && cause.contains("install it"), "{cause}");
    }

    #[test]
    fn in_parallel_keeps_the_order_of_the_items() {
        let items: Vec<usize> = (0..100).collect();
        for threads in [1, 3, 200] {
            let threads = NonZero::new(threads).unwrap();
            let doubled = in_parallel(threads, &items, |item| Ok(item * 2)).unwrap();
            assert!(doubled.iter().zip(&items).all(|(d, i)| *d == i * 2));
        }
    }

    #[test]
    fn in_parallel_begins_nothing_after_a_failure() {
        let began = AtomicUsize::new(0);
        let one = NonZero::<usize>::MIN;
        let result = in_parallel(one, &[1, 2, 3], |item| {
            began.fetch_add(1, Ordering::Relaxed);
            if *item == 2 { Err(Error::Level("two")) } else { Ok(()) }
        });
        assert!(matches!(result, Err(Error::Level("two"))));
        assert_eq!(began.load(Ordering::Relaxed), 2);
    }
}
