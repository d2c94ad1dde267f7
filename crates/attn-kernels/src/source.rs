//! The device sources, embedded: what NVRTC is given comes from this binary and from nowhere else.
//!
//! The invariant: [`files`] is every `.cu` and `.cuh` file of `cuda/`, in the order of their paths, and
//! a kernel's programme is its file with exactly those that it includes. A build script would collect
//! the same list at the price of a build script; a test compares the list with the folder instead.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use sha2::{Digest, Sha256};

use crate::error::Error;
use crate::spec::Entry;

/// One embedded file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SourceFile {
    /// Its path in `cuda/`, which is also how it is included: `base/types.cuh`.
    pub path: &'static str,
    /// Its text.
    pub text: &'static str,
}

macro_rules! embed {
    ($($path:literal)*) => {
        &[$(SourceFile { path: $path, text: include_str!(concat!("../cuda/", $path)) }),*]
    };
}

/// Sorted by path, as the hash of the sources wants it.
static FILES: &[SourceFile] = embed! {
    "attn/append.cuh"
    "attn/backward.cuh"
    "attn/backward_block_sm90a.cuh"
    "attn/backward_consume_sm90a.cuh"
    "attn/backward_produce_sm90a.cuh"
    "attn/backward_rows.cuh"
    "attn/backward_score.cuh"
    "attn/backward_scores_sm90a.cuh"
    "attn/backward_stage.cuh"
    "attn/backward_tile_sm90a.cuh"
    "attn/backward_turn_sm90a.cuh"
    "attn/backward_unit.cuh"
    "attn/backward_weigh_sm90a.cuh"
    "attn/backward_wide_sm90a.cuh"
    "attn/backward_write_sm90a.cuh"
    "attn/band.cuh"
    "attn/block_mask.cuh"
    "attn/consume_sm90a.cuh"
    "attn/drop_tile.cuh"
    "attn/dropout.cuh"
    "attn/exchange.cuh"
    "attn/exponent.cuh"
    "attn/forward.cuh"
    "attn/fragment.cuh"
    "attn/hide.cuh"
    "attn/key_rows.cuh"
    "attn/latent_block_sm90a.cuh"
    "attn/latent_consume_sm90a.cuh"
    "attn/latent_produce_sm90a.cuh"
    "attn/latent_softmax_sm90a.cuh"
    "attn/latent_write_sm90a.cuh"
    "attn/locate.cuh"
    "attn/merge.cuh"
    "attn/near.cuh"
    "attn/options_sm90a.cuh"
    "attn/output.cuh"
    "attn/produce_sm90a.cuh"
    "attn/ring.cuh"
    "attn/ring_sm90a.cuh"
    "attn/row_sm90a.cuh"
    "attn/rows.cuh"
    "attn/schedule.cuh"
    "attn/score.cuh"
    "attn/shares.cuh"
    "attn/softmax.cuh"
    "attn/softmax_sm90a.cuh"
    "attn/split.cuh"
    "attn/stage.cuh"
    "attn/tanh.cuh"
    "attn/transpose_sm90a.cuh"
    "attn/turns.cuh"
    "attn/unit.cuh"
    "attn/visit.cuh"
    "attn/write_sm90a.cuh"
    "base/backward_params.cuh"
    "base/config.cuh"
    "base/config_backward.cuh"
    "base/config_backward_sm90a.cuh"
    "base/config_sm90a.cuh"
    "base/dtype.cuh"
    "base/kv_dtype.cuh"
    "base/params.cuh"
    "base/q_dtype.cuh"
    "base/types.cuh"
    "kernel/append_kv.cu"
    "kernel/backward.cu"
    "kernel/backward_finish.cu"
    "kernel/backward_naive.cu"
    "kernel/backward_prepare.cu"
    "kernel/backward_sm90a.cu"
    "kernel/copy_blocks.cu"
    "kernel/decode.cu"
    "kernel/decode_sm90a.cu"
    "kernel/latent_sm90a.cu"
    "kernel/merge_parts.cu"
    "kernel/merge_states.cu"
    "kernel/naive.cu"
    "kernel/prefill.cu"
    "kernel/prefill_sm90a.cu"
    "ptx/barrier.cuh"
    "ptx/bulk.cuh"
    "ptx/cluster.cuh"
    "ptx/convert.cuh"
    "ptx/cp_async.cuh"
    "ptx/global.cuh"
    "ptx/griddepcontrol.cuh"
    "ptx/half.cuh"
    "ptx/ldmatrix.cuh"
    "ptx/math.cuh"
    "ptx/mbarrier.cuh"
    "ptx/mma.cuh"
    "ptx/opaque.cuh"
    "ptx/setmaxnreg.cuh"
    "ptx/shared.cuh"
    "ptx/special.cuh"
    "ptx/tma.cuh"
    "ptx/wgmma.cuh"
    "tile/descriptor.cuh"
    "tile/panel.cuh"
    "tile/piece.cuh"
    "tile/reduce.cuh"
};

/// Every file, sorted by path.
#[must_use]
pub fn files() -> &'static [SourceFile] {
    FILES
}

/// A hash of all the sources, in hexadecimal: SHA-256 over, for every file in the order of their paths,
/// the path, a zero byte, the length as eight bytes with the lowest first, and the text.
///
/// Records of checks and measurements carry it, and a bundle is refused by a programme of another one.
#[must_use]
pub fn fingerprint() -> &'static str {
    static FINGERPRINT: OnceLock<String> = OnceLock::new();
    FINGERPRINT.get_or_init(|| hex(&digest(FILES)))
}

/// What one kernel is compiled from.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    /// The file with the entry point.
    pub(crate) main: SourceFile,
    /// Every file that it includes, directly or not, sorted by path.
    pub(crate) headers: Vec<SourceFile>,
}

impl Program {
    /// The programme of an entry.
    ///
    /// # Errors
    /// [`Error::Compile`] if there is no such file.
    pub(crate) fn of(entry: Entry) -> Result<Self, Error> {
        Self::from_files(entry, FILES)
    }

    /// The programme of an entry in a given tree.
    pub(crate) fn from_files(entry: Entry, files: &[SourceFile]) -> Result<Self, Error> {
        let find = |path: &str| files.iter().find(|f| f.path == path).copied();
        let main = find(entry.file()).ok_or_else(|| Error::Compile {
            instance: entry.to_string(),
            options: Vec::new(),
            log: format!("there is no source file {}", entry.file()),
        })?;
        let mut headers = BTreeMap::new();
        let mut unread = vec![main];
        while let Some(file) = unread.pop() {
            // A name that is no file here is left to the compiler, whose message has the line.
            for header in includes(file.text).filter_map(find) {
                if headers.insert(header.path, header).is_none() {
                    unread.push(header);
                }
            }
        }
        Ok(Self { main, headers: headers.into_values().collect() })
    }

    /// A hash of every file, for the key of a cache.
    pub(crate) fn digest(&self) -> [u8; 32] {
        let mut files = vec![self.main];
        files.extend(&self.headers);
        digest(&files)
    }
}

/// The names in `#include "..."` lines.
fn includes(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| {
        let directive = line.trim_start().strip_prefix('#')?;
        let rest =
            directive.trim_start().strip_prefix("include")?.trim_start().strip_prefix('"')?;
        rest.split_once('"').map(|(name, _)| name)
    })
}

fn digest(files: &[SourceFile]) -> [u8; 32] {
    let mut hash = Sha256::new();
    for file in files {
        hash.update(file.path.as_bytes());
        hash.update([0]);
        hash.update((file.text.len() as u64).to_le_bytes());
        hash.update(file.text.as_bytes());
    }
    hash.finalize().into()
}

/// Lower-case hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use super::*;

    fn in_folder() -> Vec<(String, String)> {
        let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("cuda");
        let mut found = Vec::new();
        let mut folders = vec![root.clone()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let is_source = path.extension().is_some_and(|e| e == "cu" || e == "cuh");
                if path.is_dir() {
                    folders.push(path);
                } else if is_source {
                    let name =
                        path.strip_prefix(&root).unwrap().to_str().unwrap().replace('\\', "/");
                    found.push((name, fs::read_to_string(&path).unwrap()));
                }
            }
        }
        found.sort();
        found
    }

    #[test]
    fn files_are_those_of_the_folder_in_order() {
        let embedded: Vec<_> = files().iter().map(|f| f.path.to_owned()).collect();
        let expected: Vec<_> = in_folder().into_iter().map(|(path, _)| path).collect();
        assert_eq!(embedded, expected, "the list in source.rs");
    }

    #[test]
    fn every_include_names_a_file_and_points_to_the_left() {
        let rooms = ["base", "ptx", "tile", "attn", "kernel"];
        let room = |path: &str| {
            let first = Path::new(path).iter().next().and_then(|f| f.to_str()).unwrap();
            rooms.iter().position(|r| *r == first).unwrap_or_else(|| panic!("{path} has no room"))
        };
        for file in files() {
            for name in includes(file.text) {
                let found = files().iter().any(|f| f.path == name);
                assert!(found, "{} includes {name}, which is no file of cuda/", file.path);
                assert!(room(name) <= room(file.path), "{} includes {name}", file.path);
            }
        }
    }

    #[test]
    fn every_entry_has_a_file_that_defines_its_symbol() {
        for entry in Entry::ALL {
            let program = Program::of(entry).unwrap();
            assert!(program.main.text.contains(entry.symbol()), "{entry}");
        }
    }

    const TREE: [SourceFile; 4] = [
        SourceFile { path: "base/a.cuh", text: "#pragma once\n" },
        SourceFile {
            path: "base/b.cuh",
            text: "# include \"base/a.cuh\"\n#include \"base/b.cuh\"",
        },
        SourceFile { path: "base/c.cuh", text: "" },
        SourceFile {
            path: "kernel/naive.cu",
            text: "  #include \"base/b.cuh\" // why\n#include <x>",
        },
    ];

    #[test]
    fn program_holds_what_its_file_includes_and_no_more() {
        let program = Program::from_files(Entry::Naive, &TREE).unwrap();
        let headers: Vec<_> = program.headers.iter().map(|h| h.path).collect();
        assert_eq!(headers, ["base/a.cuh", "base/b.cuh"]);
        assert_eq!(program.main.path, "kernel/naive.cu");
    }

    #[test]
    fn program_digest_changes_with_an_included_file_alone() {
        let of = |tree: &[SourceFile]| Program::from_files(Entry::Naive, tree).unwrap().digest();
        let mut tree = TREE;
        tree[2].text = "int unused;";
        assert_eq!(of(&tree), of(&TREE));
        tree[0].text = "#pragma once \n";
        assert_ne!(of(&tree), of(&TREE));
    }

    #[test]
    fn program_of_a_missing_file_is_an_error_with_its_name() {
        let error = Program::from_files(Entry::Decode, &TREE).unwrap_err();
        assert!(error.to_string().contains("kernel/decode.cu"), "{error}");
    }

    #[test]
    fn fingerprint_follows_its_definition() {
        let two = [SourceFile { path: "a", text: "x" }, SourceFile { path: "b", text: "" }];
        let mut hash = Sha256::new();
        hash.update(b"a\0\x01\0\0\0\0\0\0\0xb\0\0\0\0\0\0\0\0\0");
        assert_eq!(digest(&two), <[u8; 32]>::from(hash.finalize()));
        assert_eq!(fingerprint().len(), 64);
    }
}
