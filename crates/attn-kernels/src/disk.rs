//! Compiled kernels on disk: one file a kernel, named by the hash of all that it depends on.
//!
//! The invariant: what is read is what was written for exactly this key, or it is not used. A file is
//! written beside its place and renamed into it, so that any number of processes may share a folder
//! without locks: two that compile the same kernel write the same file. A folder that cannot be written
//! costs time, never a failure.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use sha2::{Digest, Sha256};

use crate::compile::{self, Cubin};
use crate::encoding::{self, Reader};
use crate::source::{self, Program};
use crate::spec::{Arch, KernelSpec};

/// A folder of compiled kernels, or none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskCache {
    folder: Option<PathBuf>,
}

impl DiskCache {
    /// The user's cache: the folder that `ATTN_KERNELS_CACHE` names, or none if that is `off`; else
    /// `attn-kernels` in the user's folder for caches.
    #[must_use]
    pub fn from_env() -> Self {
        Self { folder: user_folder(&|name| env::var_os(name)) }
    }

    /// A cache in a folder, which is made on first need; without one nothing is kept.
    #[must_use]
    pub fn at(folder: Option<PathBuf>) -> Self {
        Self { folder }
    }

    /// Where the files are.
    #[must_use]
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// The kernel of this key, if an intact file holds it.
    pub(crate) fn read(&self, key: &Key) -> Option<Cubin> {
        let bytes = fs::read(self.path(key)?).ok()?;
        decode(&bytes, key)
    }

    /// Keeps a kernel, replacing whatever stands in its place.
    ///
    /// # Errors
    /// The file could not be written; nothing has changed then.
    pub(crate) fn write(&self, key: &Key, cubin: &Cubin) -> io::Result<()> {
        match self.path(key) {
            Some(path) => replace(&path, &encode(cubin, key)),
            None => Ok(()),
        }
    }

    fn path(&self, key: &Key) -> Option<PathBuf> {
        Some(self.folder.as_ref()?.join(format!("{}.cubin", source::hex(&key.0))))
    }
}

/// The hash of everything that the code of a kernel depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key([u8; 32]);

impl Key {
    /// The key of a kernel compiled from `program` by a compiler of this version.
    pub(crate) fn new(
        program: &Program,
        spec: &KernelSpec,
        arch: &Arch,
        compiler: (u32, u32),
    ) -> Self {
        let mut fields = Vec::new();
        fields.extend(FORMAT.to_le_bytes());
        fields.extend(program.digest());
        encoding::put_text(&mut fields, spec.entry().name());
        // The options hold the macros and the arch.
        for option in compile::options(spec, arch) {
            encoding::put_text(&mut fields, &option);
        }
        fields.extend(compiler.0.to_le_bytes());
        fields.extend(compiler.1.to_le_bytes());
        Self(Sha256::digest(fields).into())
    }
}

/// Writes a file in one step: whoever reads sees the old one or the new one.
///
/// # Errors
/// The folder or the file could not be written; the old file is as it was.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    // Unique in the machine by the process, and in the process by the count.
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let temporary = folder.join(format!(".{name}.{}.{count}.tmp", process::id()));
    let written = fs::write(&temporary, bytes).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        // It may not exist; the error that counts is the one above.
        drop(fs::remove_file(&temporary));
    }
    written
}

const MAGIC: [u8; 8] = *b"ATTNCUBN";
/// Changes with the layout of the file or the meaning of a field.
const FORMAT: u32 = 1;

/// Magic, format, key, hash of the rest, the rest.
fn encode(cubin: &Cubin, key: &Key) -> Vec<u8> {
    let mut payload = Vec::with_capacity(cubin.image.len() + 64);
    encoding::put_cubin(&mut payload, cubin);
    let mut bytes = Vec::with_capacity(payload.len() + 76);
    bytes.extend(MAGIC);
    bytes.extend(FORMAT.to_le_bytes());
    bytes.extend(key.0);
    bytes.extend(encoding::sha256(&payload));
    bytes.append(&mut payload);
    bytes
}

fn decode(bytes: &[u8], key: &Key) -> Option<Cubin> {
    let mut reader = Reader { left: bytes };
    let ours = reader.array()? == MAGIC && reader.u32()? == FORMAT && reader.array()? == key.0;
    let intact = ours && reader.array()? == encoding::sha256(reader.left);
    if intact { encoding::cubin(reader.left) } else { None }
}

/// Where the user's cache is, by the rules of the platform.
fn user_folder(var: &dyn Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let set = |name| var(name).filter(|value| !value.is_empty());
    if let Some(chosen) = set("ATTN_KERNELS_CACHE") {
        return (!chosen.eq_ignore_ascii_case("off")).then(|| chosen.into());
    }
    // A relative one is to be ignored, says the XDG specification.
    let caches = set("XDG_CACHE_HOME").map(PathBuf::from).filter(|folder| folder.is_absolute());
    let local = || set("LOCALAPPDATA").filter(|_| cfg!(windows)).map(PathBuf::from);
    let home = || set("HOME").map(|home| PathBuf::from(home).join(".cache"));
    caches.or_else(local).or_else(home).map(|folder| folder.join("attn-kernels"))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::ops::Deref;
    use std::thread;

    use super::*;
    use crate::encoding::example;
    use crate::source::SourceFile;
    use crate::spec::Entry;

    /// A folder of this test alone, removed with this value.
    pub(crate) struct Folder(PathBuf);

    impl Folder {
        pub(crate) fn new(name: &str) -> Self {
            let path = env::temp_dir().join(format!("attn-kernels-{}-{name}", process::id()));
            drop(fs::remove_dir_all(&path));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Deref for Folder {
        type Target = Path;

        fn deref(&self) -> &Path {
            &self.0
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            drop(fs::remove_dir_all(&self.0));
        }
    }

    fn key(seed: u8) -> Key {
        Key([seed; 32])
    }

    fn cache(folder: &Path) -> DiskCache {
        DiskCache::at(Some(folder.to_path_buf()))
    }

    #[test]
    fn cache_returns_what_it_was_given() {
        let folder = Folder::new("returns");
        let cache = cache(&folder.join("made/on/need"));
        assert_eq!(cache.read(&key(1)), None);
        cache.write(&key(1), &example(1)).unwrap();
        assert_eq!(cache.read(&key(1)), Some(example(1)));
        assert_eq!(cache.read(&key(2)), None);
        cache.write(&key(1), &example(2)).unwrap();
        assert_eq!(cache.read(&key(1)), Some(example(2)));
    }

    #[test]
    fn cache_refuses_truncated_altered_and_foreign_files() {
        let folder = Folder::new("refuses");
        let cache = cache(&folder);
        let good = encode(&example(1), &key(1));
        let path = cache.path(&key(1)).unwrap();
        let with = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            cache.read(&key(1))
        };
        assert_eq!(with(&good), Some(example(1)));
        for cut in [0, 7, 11, 43, 75, 80, good.len() - 1] {
            assert_eq!(with(&good[..cut]), None, "cut to {cut}");
        }
        for at in 0..good.len() {
            let mut altered = good.clone();
            altered[at] ^= 0x10;
            assert_eq!(with(&altered), None, "byte {at}");
        }
        assert_eq!(with(&encode(&example(1), &key(2))), None, "the file of another key");
        assert_eq!(with(&[good.as_slice(), b"x"].concat()), None, "a longer file");
    }

    #[test]
    fn cache_without_a_folder_keeps_nothing() {
        let cache = DiskCache::at(None);
        cache.write(&key(1), &example(1)).unwrap();
        assert_eq!(cache.read(&key(1)), None);
    }

    #[test]
    fn cache_reports_a_folder_that_cannot_be_made() {
        let folder = Folder::new("file");
        fs::write(folder.join("file"), "").unwrap();
        let cache = cache(&folder.join("file/below"));
        assert!(cache.write(&key(1), &example(1)).is_err());
        assert_eq!(cache.read(&key(1)), None);
    }

    #[test]
    fn cache_is_never_seen_half_written() {
        let folder = Folder::new("race");
        let cache = cache(&folder);
        thread::scope(|scope| {
            for writer in 0..4 {
                let cache = &cache;
                scope.spawn(move || {
                    for _ in 0..50 {
                        cache.write(&key(1), &example(writer)).unwrap();
                        let read = cache.read(&key(1)).unwrap();
                        assert!((0..4).any(|seed| read == example(seed)));
                    }
                });
            }
        });
        let names: Vec<_> =
            fs::read_dir(&*folder).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names.len(), 1, "temporary files are left: {names:?}");
    }

    #[test]
    fn key_depends_on_each_of_its_parts() {
        let file = SourceFile { path: "kernel/naive.cu", text: "a" };
        let program = |text| Program { main: SourceFile { text, ..file }, headers: Vec::new() };
        let spec = |value| KernelSpec::new(Entry::Naive, [("dtype", value)]);
        let arch = |name: &str| name.parse::<Arch>().unwrap();
        let one = Key::new(&program("a"), &spec(1), &arch("sm_80"), (13, 0));
        assert_eq!(one, Key::new(&program("a"), &spec(1), &arch("sm_80"), (13, 0)));
        for other in [
            Key::new(&program("b"), &spec(1), &arch("sm_80"), (13, 0)),
            Key::new(&program("a"), &spec(2), &arch("sm_80"), (13, 0)),
            Key::new(&program("a"), &spec(1), &arch("sm_86"), (13, 0)),
            Key::new(&program("a"), &spec(1), &arch("sm_80"), (13, 1)),
        ] {
            assert_ne!(one, other);
        }
    }

    #[test]
    fn user_folder_follows_the_variables() {
        let of = |vars: &[(&str, &str)]| {
            user_folder(&|name| vars.iter().find(|v| v.0 == name).map(|v| OsString::from(v.1)))
        };
        let home = ("HOME", "/h");
        assert_eq!(of(&[home]), Some("/h/.cache/attn-kernels".into()));
        assert_eq!(of(&[home, ("XDG_CACHE_HOME", "/x")]), Some("/x/attn-kernels".into()));
        assert_eq!(of(&[home, ("XDG_CACHE_HOME", "x")]), Some("/h/.cache/attn-kernels".into()));
        assert_eq!(of(&[home, ("ATTN_KERNELS_CACHE", "here")]), Some("here".into()));
        assert_eq!(of(&[home, ("ATTN_KERNELS_CACHE", "off")]), None);
        assert_eq!(of(&[home, ("ATTN_KERNELS_CACHE", "OFF")]), None);
        assert_eq!(of(&[home, ("ATTN_KERNELS_CACHE", "")]), of(&[home]));
        assert_eq!(of(&[]), None);
    }
}
