//! Names of files and modules. A module is named after the noun it holds: a name that fits anything
//! gathers everything, and soon depends on all the rest.

use std::path::Path;

use crate::tidy::{Problem, code};

/// Names that say nothing.
const VAGUE: [&str; 7] = ["base", "common", "helper", "helpers", "misc", "util", "utils"];

/// Endings of the files that hold code.
const CODE: [&str; 5] = ["rs", "cu", "cuh", "py", "sh"];

/// The file, and for Rust its folders, which are modules, have telling names.
pub(super) fn file_name(path: &str) -> Vec<Problem> {
    let file = Path::new(path);
    let ending = file.extension().and_then(|e| e.to_str()).unwrap_or_default();
    if !CODE.contains(&ending) {
        return Vec::new();
    }
    let stem = file.file_stem().and_then(|s| s.to_str());
    let folders = file.iter().rev().skip(1).filter_map(|f| f.to_str());
    stem.into_iter()
        .chain(folders.filter(|_| ending == "rs"))
        .filter(|name| VAGUE.contains(name))
        .map(|name| vague(path, 1, name))
        .collect()
}

/// Modules declared in `code` have telling names.
pub(super) fn modules(path: &str, code: &str) -> Vec<Problem> {
    let declared = code::words(code, "mod").map(|(line, rest)| {
        let rest = rest.trim_start();
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        (line, &rest[..end])
    });
    declared
        .filter(|(_, name)| VAGUE.contains(name))
        .map(|(line, name)| vague(path, line, name))
        .collect()
}

fn vague(path: &str, line: usize, name: &str) -> Problem {
    Problem::new(path, line, format!("`{name}` says nothing: name the noun it holds"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_name_refuses_vague_files_and_rust_folders() {
        for path in ["a/utils.rs", "a/utils/x.rs", "a/misc/mod.rs", "b/base.cuh", "common.py"] {
            assert_eq!(file_name(path).len(), 1, "{path}");
        }
    }

    #[test]
    fn file_name_passes_nouns_and_folders_of_device_headers() {
        for path in ["a/page.rs", "a/database.rs", "cuda/base/config.cuh", "docs/common.md"] {
            assert_eq!(file_name(path), [], "{path}");
        }
    }

    #[test]
    fn modules_refuses_vague_modules_with_their_line() {
        let found = modules("a.rs", "mod page;\n    pub(crate) mod helpers {\n}\nmod model {}\n");
        assert_eq!(found, [vague("a.rs", 2, "helpers")]);
    }
}
