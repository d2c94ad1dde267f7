//! Many compiled kernels in one file, for machines with a driver and no compiler.
//!
//! The invariant: a bundle that was read is whole and fits this program. Every part has a hash, and the
//! sources that it was made from are those of this program: kernels of other sources may read their
//! parameters at other places, which no later check would notice.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;

use crate::compile::Cubin;
use crate::disk;
use crate::encoding::{self, Reader};
use crate::error::Error;
use crate::source;
use crate::spec::{Arch, Entry, KernelSpec};

/// Compiled kernels by instance and arch.
#[derive(Clone, Debug, Default)]
pub struct Bundle {
    /// By the text of the spec, since the names of macros in a file are not those of the program.
    kernels: BTreeMap<(String, Arch), Arc<Cubin>>,
    /// The version of the compiler that made them.
    compiler: (u32, u32),
}

impl Bundle {
    /// An empty bundle of kernels made by a compiler of this version.
    #[must_use]
    pub fn new(compiler: (u32, u32)) -> Self {
        Self { kernels: BTreeMap::new(), compiler }
    }

    /// Adds a kernel; an equal one is replaced.
    pub fn insert(&mut self, spec: &KernelSpec, arch: Arch, cubin: Arc<Cubin>) {
        self.kernels.insert((spec.to_string(), arch), cubin);
    }

    /// Reads a file.
    ///
    /// # Errors
    /// [`Error::BundleFile`] if it cannot be read, [`Error::Bundle`] if it is damaged, of another
    /// version, or made from other sources than this program's.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let name = path.display().to_string();
        let bytes =
            fs::read(path).map_err(|source| Error::BundleFile { bundle: name.clone(), source })?;
        decode(&bytes, source::fingerprint()).map_err(|fault| fault.of(name))
    }

    /// Reads a bundle that is in memory, one that is part of a program say.
    ///
    /// # Errors
    /// [`Error::Bundle`] as for [`Bundle::read`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, Error> {
        decode(bytes, source::fingerprint()).map_err(|fault| fault.of("in memory".to_owned()))
    }

    /// Writes the file in one step.
    ///
    /// # Errors
    /// [`Error::BundleFile`]; a file that stood there is as it was.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        disk::replace(path, &encode(self, source::fingerprint()))
            .map_err(|source| Error::BundleFile { bundle: path.display().to_string(), source })
    }

    /// The kernel that a device of this arch runs: one compiled for it, else for an older minor.
    #[must_use]
    pub fn get(&self, spec: &KernelSpec, arch: &Arch) -> Option<&Arc<Cubin>> {
        let instance = spec.to_string();
        let of_instance = self.kernels.iter().filter(|((name, _), _)| *name == instance);
        let mut runs = of_instance.filter(|((_, code), _)| code.runs_on(arch));
        // Archs are sorted, so the last one that runs is the closest.
        runs.next_back().map(|(_, cubin)| cubin)
    }

    /// What there is of an entry, each with its arch: `decode[head_dim=128] for sm_80`.
    #[must_use]
    pub fn has(&self, entry: Entry) -> Vec<String> {
        let of_entry = |name: &str| name.split('[').next() == Some(entry.name());
        let kernels = self.kernels.keys().filter(|(name, _)| of_entry(name));
        kernels.map(|(name, arch)| format!("{name} for {arch}")).collect()
    }

    /// The number of kernels.
    #[must_use]
    pub fn len(&self) -> usize {
        self.kernels.len()
    }

    /// True if there is no kernel.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.kernels.is_empty()
    }

    /// The version of the compiler that made the kernels, major and minor.
    #[must_use]
    pub fn compiler(&self) -> (u32, u32) {
        self.compiler
    }
}

const MAGIC: [u8; 8] = *b"ATTNBNDL";
/// Changes with the layout of the file or the meaning of a field.
const FORMAT: u32 = 1;

/// Magic, format, length and hash of the manifest, the manifest, the kernels.
///
/// The manifest: fingerprint of the sources, version of the compiler, number of kernels, and of each the
/// instance, the arch, its length and its hash. Kernels follow in the same order.
fn encode(bundle: &Bundle, fingerprint: &str) -> Vec<u8> {
    let (mut manifest, mut images) = (Vec::new(), Vec::new());
    encoding::put_text(&mut manifest, fingerprint);
    manifest.extend(bundle.compiler.0.to_le_bytes());
    manifest.extend(bundle.compiler.1.to_le_bytes());
    manifest.extend((bundle.kernels.len() as u64).to_le_bytes());
    for ((instance, arch), cubin) in &bundle.kernels {
        let mut image = Vec::new();
        encoding::put_cubin(&mut image, cubin);
        encoding::put_text(&mut manifest, instance);
        encoding::put_text(&mut manifest, &arch.name());
        manifest.extend((image.len() as u64).to_le_bytes());
        manifest.extend(encoding::sha256(&image));
        images.append(&mut image);
    }
    let mut bytes = MAGIC.to_vec();
    bytes.extend(FORMAT.to_le_bytes());
    bytes.extend((manifest.len() as u64).to_le_bytes());
    bytes.extend(encoding::sha256(&manifest));
    bytes.append(&mut manifest);
    bytes.append(&mut images);
    bytes
}

/// What is wrong with a file.
#[derive(Debug, PartialEq)]
struct Fault {
    expected: String,
    got: String,
}

impl Fault {
    fn new(expected: impl Into<String>, got: impl Into<String>) -> Self {
        Self { expected: expected.into(), got: got.into() }
    }

    fn of(self, bundle: String) -> Error {
        Error::Bundle { bundle, expected: self.expected, got: self.got }
    }
}

fn decode(bytes: &[u8], fingerprint: &str) -> Result<Bundle, Fault> {
    let end = |what: &'static str| move || Fault::new(what, "the end of the file");
    let mut reader = Reader { left: bytes };
    if reader.array() != Some(MAGIC) {
        return Err(Fault::new("a bundle of compiled kernels", "another kind of file"));
    }
    let format = reader.u32().ok_or_else(end("a format number"))?;
    if format != FORMAT {
        return Err(Fault::new(format!("format {FORMAT}"), format!("format {format}")));
    }
    let length = reader.u64().ok_or_else(end("the length of the manifest"))?;
    let hash: [u8; 32] = reader.array().ok_or_else(end("the hash of the manifest"))?;
    let manifest = reader.take(length).ok_or_else(end("a manifest"))?;
    if encoding::sha256(manifest) != hash {
        return Err(Fault::new("a manifest of the hash beside it", "one of another hash"));
    }
    let mut manifest = Reader { left: manifest };
    // The hash was right, so from here on only a writer that is wrong can surprise.
    let short = || Fault::new("a complete manifest", "one that ends early");
    let sources = manifest.text().ok_or_else(short)?;
    if sources != fingerprint {
        return Err(Fault::new(
            format!("kernels of this program's sources, {fingerprint}"),
            format!("kernels of {sources}"),
        ));
    }
    let compiler = (manifest.u32().ok_or_else(short)?, manifest.u32().ok_or_else(short)?);
    let count = manifest.u64().ok_or_else(short)?;
    let mut bundle = Bundle::new(compiler);
    for _ in 0..count {
        let instance = manifest.text().ok_or_else(short)?;
        let arch = manifest.text().ok_or_else(short)?;
        let length = manifest.u64().ok_or_else(short)?;
        let hash: [u8; 32] = manifest.array().ok_or_else(short)?;
        let name = || format!("{instance} for {arch}");
        let image = reader.take(length).ok_or_else(|| {
            Fault::new(
                format!("{} in {length} bytes", name()),
                format!("{} bytes", reader.left.len()),
            )
        })?;
        let cubin = (encoding::sha256(image) == hash).then(|| encoding::cubin(image)).flatten();
        let cubin = cubin
            .ok_or_else(|| Fault::new(format!("{} as it was written", name()), "an altered one"))?;
        let arch = arch.parse().map_err(|error: Error| Fault::new("an arch", error.to_string()))?;
        bundle.kernels.insert((instance.to_owned(), arch), Arc::new(cubin));
    }
    if !reader.left.is_empty() || !manifest.left.is_empty() {
        return Err(Fault::new("the end of the file", format!("{} bytes more", reader.left.len())));
    }
    Ok(bundle)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::tests::Folder;
    use crate::encoding::example;

    fn arch(name: &str) -> Arch {
        name.parse().unwrap()
    }

    fn spec(entry: Entry, head_dim: i64) -> KernelSpec {
        KernelSpec::new(entry, [("head_dim", head_dim)])
    }

    fn sample() -> Bundle {
        let mut bundle = Bundle::new((13, 0));
        bundle.insert(&spec(Entry::Decode, 64), arch("sm_80"), Arc::new(example(1)));
        bundle.insert(&spec(Entry::Decode, 64), arch("sm_86"), Arc::new(example(2)));
        bundle.insert(&spec(Entry::Decode, 64), arch("sm_90a"), Arc::new(example(3)));
        bundle.insert(&spec(Entry::Naive, 64), arch("sm_80"), Arc::new(example(4)));
        bundle
    }

    #[test]
    fn bundle_is_read_as_it_was_written() {
        let folder = Folder::new("bundle");
        let path = folder.join("kernels.bundle");
        sample().write(&path).unwrap();
        let read = Bundle::read(&path).unwrap();
        assert_eq!(read.kernels, sample().kernels);
        assert_eq!((read.len(), read.is_empty(), read.compiler()), (4, false, (13, 0)));
    }

    #[test]
    fn bundle_gives_the_closest_arch_that_runs() {
        let bundle = sample();
        let found = |entry, head_dim, name: &str| {
            bundle.get(&spec(entry, head_dim), &arch(name)).map(|c| c.image[0])
        };
        assert_eq!(found(Entry::Decode, 64, "sm_80"), Some(1));
        assert_eq!(found(Entry::Decode, 64, "sm_86"), Some(2));
        assert_eq!(found(Entry::Decode, 64, "sm_89"), Some(2));
        assert_eq!(found(Entry::Decode, 64, "sm_90a"), Some(3));
        assert_eq!(found(Entry::Decode, 64, "sm_100a"), None);
        assert_eq!(found(Entry::Decode, 128, "sm_80"), None);
        assert_eq!(found(Entry::Prefill, 64, "sm_80"), None);
        assert_eq!(bundle.has(Entry::Naive), ["naive[head_dim=64] for sm_80"]);
        assert_eq!(bundle.has(Entry::Prefill), Vec::<String>::new());
    }

    #[test]
    fn bundle_refuses_every_cut_and_every_altered_byte() {
        let good = encode(&sample(), "sources");
        assert_eq!(decode(&good, "sources").unwrap().len(), 4);
        for cut in 0..good.len() {
            assert!(decode(&good[..cut], "sources").is_err(), "cut to {cut}");
        }
        for at in 0..good.len() {
            let mut altered = good.clone();
            altered[at] ^= 0x01;
            assert!(decode(&altered, "sources").is_err(), "byte {at}");
        }
        assert!(decode(&[good.as_slice(), b"x"].concat(), "sources").is_err());
    }

    #[test]
    fn bundle_of_other_sources_is_refused_with_both() {
        let fault = decode(&encode(&sample(), "theirs"), "ours").unwrap_err();
        assert!(fault.expected.contains("ours") && fault.got.contains("theirs"), "{fault:?}");
    }

    #[test]
    fn bundle_that_is_not_there_is_an_error_with_its_name() {
        let error = Bundle::read(Path::new("no-such.bundle")).unwrap_err();
        assert!(matches!(error, Error::BundleFile { .. }));
        assert!(error.to_string().contains("no-such.bundle"), "{error}");
    }
}
