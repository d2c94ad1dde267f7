//! Records of checks on a device say which kernel sources they checked.
//!
//! A record of other sources than the present ones is a warning and no problem: whoever edits a kernel may
//! have no device at hand, and a rule that fails would be answered by editing the record.

use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::tidy::Problem;
use crate::tidy::tree::Tree;

/// The device sources.
const SOURCES: &str = "crates/attn-kernels/cuda/";

/// A warning for each `benches/record/*/{validate,sanitizer}.json` whose `sources` are not the present ones.
/// Records without that field are of engines without device sources.
pub(super) fn stale(tree: &Tree) -> Vec<Problem> {
    let present = fingerprint(tree);
    let is_record = |path: &str| {
        let current = path.ends_with("/validate.json") || path.ends_with("/sanitizer.json");
        path.starts_with("benches/record/") && current
    };
    let records = tree.files.iter().filter(|file| is_record(&file.path));
    let stale = records.filter_map(|file| {
        let record: Value = serde_json::from_str(&file.text).ok()?;
        let checked = record["sources"].as_str()?;
        (checked != present).then(|| {
            let message = format!("stale: it checked the sources {checked}, now {present}");
            Problem::new(&file.path, 1, message)
        })
    });
    stale.collect()
}

/// What `attn_kernels::source::fingerprint` returns. It is computed here once more, since this crate
/// depends on no product crate.
fn fingerprint(tree: &Tree) -> String {
    let is_source = |path: &str| path.ends_with(".cu") || path.ends_with(".cuh");
    let mut hash = Sha256::new();
    // The tree is sorted by path, and so are the paths below one folder.
    for file in &tree.files {
        if let Some(path) = file.path.strip_prefix(SOURCES)
            && is_source(path)
        {
            hash.update(path.as_bytes());
            hash.update([0]);
            hash.update((file.text.len() as u64).to_le_bytes());
            hash.update(file.text.as_bytes());
        }
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const KERNEL: (&str, &str) = ("crates/attn-kernels/cuda/kernel/naive.cu", "int x;\n");

    #[test]
    fn stale_records_are_those_of_other_sources() {
        let good = fingerprint(&Tree::of([KERNEL]));
        let with = |record: &str| {
            stale(&Tree::of([KERNEL, ("benches/record/h200/validate.json", record)])).len()
        };
        assert_eq!(with(&format!(r#"{{"sources":"{good}"}}"#)), 0);
        assert_eq!(with(r#"{"sources":"0123"}"#), 1);
        assert_eq!(with(r#"{"backend":"cpu"}"#), 0);
    }

    #[test]
    fn fingerprint_is_that_of_the_kernels_crate() {
        let tree = Tree::of([
            ("crates/attn-kernels/cuda/README.md", "not a source"),
            ("crates/attn-kernels/cuda/a.cuh", "x"),
            ("crates/attn-kernels/cuda/b.cu", ""),
        ]);
        // The definition, written out: path, zero, length as eight bytes with the lowest first, text.
        let expected = Sha256::digest(b"a.cuh\0\x01\0\0\0\0\0\0\0xb.cu\0\0\0\0\0\0\0\0\0");
        let expected: String = expected.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(fingerprint(&tree), expected);
    }
}
