//! The text files that belong to the workspace: tracked, or untracked and not ignored.
//!
//! Git is asked first, since it alone knows what is ignored. Where it cannot answer (a source
//! archive, or a checkout that git distrusts because another user owns it) the folder is walked with
//! the few patterns of `.gitignore` applied, so that the rules are checked there too.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::{fs, io};

use crate::error::Error;
use crate::process;

/// A text file of the workspace.
#[derive(Debug)]
pub(super) struct SourceFile {
    /// Path from the workspace folder, with `/`.
    pub(super) path: String,
    /// Its content.
    pub(super) text: String,
}

/// The text files of the workspace.
#[derive(Debug)]
pub(super) struct Tree {
    /// The files, sorted by path.
    pub(super) files: Vec<SourceFile>,
}

impl Tree {
    /// Reads the files under `root`. Files that are not UTF-8 text are data and are left out.
    ///
    /// # Errors
    /// [`Error::Read`] if a file or folder cannot be read.
    pub(super) fn read(root: &Path) -> Result<Self, Error> {
        let paths = match git_files(root) {
            Some(paths) => paths,
            None => walk(root)?,
        };
        let mut files = Vec::new();
        for path in paths {
            let full = root.join(&path);
            // A link to a folder is listed as a file, and a deleted file is listed until committed.
            if !full.is_file() {
                continue;
            }
            let bytes = fs::read(&full)
                .map_err(|source| Error::Read { path: full.display().to_string(), source })?;
            if let Ok(text) = String::from_utf8(bytes)
                && !text.contains('\0')
            {
                files.push(SourceFile { path, text });
            }
        }
        Ok(Self { files })
    }

    /// The text of the file at `path`.
    pub(super) fn text(&self, path: &str) -> Option<&str> {
        self.files.iter().find(|f| f.path == path).map(|f| f.text.as_str())
    }

    /// A tree in memory.
    #[cfg(test)]
    pub(super) fn of<const N: usize>(files: [(&str, &str); N]) -> Self {
        let file = |(path, text): (&str, &str)| SourceFile {
            path: path.to_owned(),
            text: text.to_owned(),
        };
        Self { files: files.map(file).into() }
    }
}

/// What git lists, or `None` where git is absent or refuses.
fn git_files(root: &Path) -> Option<BTreeSet<String>> {
    let mut command = Command::new("git");
    command.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
    let listed = String::from_utf8(process::output(command.current_dir(root)).ok()?).ok()?;
    let paths: BTreeSet<_> = listed.split_terminator('\0').map(str::to_owned).collect();
    // An unpacked archive inside some other checkout: that one's git knows none of its files.
    paths.contains("Cargo.toml").then_some(paths)
}

/// Every file below `root` that no pattern of `.gitignore` covers.
fn walk(root: &Path) -> Result<BTreeSet<String>, Error> {
    let ignored = fs::read_to_string(root.join(".gitignore")).unwrap_or_default();
    let mut paths = BTreeSet::new();
    let mut folders = vec![String::new()];
    while let Some(folder) = folders.pop() {
        let full = root.join(&folder);
        let read = |source: io::Error| Error::Read { path: full.display().to_string(), source };
        for entry in fs::read_dir(&full).map_err(read)? {
            let entry = entry.map_err(read)?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            let path = if folder.is_empty() { name } else { format!("{folder}/{name}") };
            if path == ".git" || is_ignored(&ignored, &path) {
                continue;
            }
            let kind = entry.file_type().map_err(read)?;
            if kind.is_dir() {
                folders.push(path);
            } else if kind.is_file() {
                paths.insert(path);
            }
        }
    }
    Ok(paths)
}

/// The two kinds of pattern that this project's `.gitignore` uses: `/path` and `*.ending`.
fn is_ignored(patterns: &str, path: &str) -> bool {
    patterns.lines().any(|pattern| match pattern.strip_prefix('/') {
        Some(anchored) => anchored.trim_end_matches('/') == path,
        None => pattern.strip_prefix('*').is_some_and(|e| !e.is_empty() && path.ends_with(e)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tree_holds_this_file_and_no_build_output() {
        let tree = Tree::read(&process::workspace_root()).unwrap();
        assert!(tree.text("xtask/src/tidy/tree.rs").is_some());
        assert!(tree.files.iter().all(|f| !f.path.starts_with("target/")));
    }

    #[test]
    fn walk_finds_every_file_that_git_lists() {
        let root = process::workspace_root();
        let walked = walk(&root).unwrap();
        assert!(walked.contains("xtask/src/tidy/tree.rs"));
        assert!(walked.iter().all(|p| !p.starts_with(".git/") && !p.starts_with("target/")));
        let listed = git_files(&root).unwrap_or_default();
        let lost: Vec<_> =
            listed.iter().filter(|p| root.join(p).is_file() && !walked.contains(*p)).collect();
        assert!(lost.is_empty(), "{lost:?}");
    }

    #[test]
    fn is_ignored_reads_anchored_paths_and_endings() {
        let patterns = "/target\n/fuzz/corpus/\n*.profraw\n";
        for path in ["target", "fuzz/corpus", "a/b.profraw"] {
            assert!(is_ignored(patterns, path), "{path}");
        }
        for path in ["src/target", "fuzz/corpus.rs", "a/b.prof"] {
            assert!(!is_ignored(patterns, path), "{path}");
        }
    }
}
