//! `tidy`: the house rules that neither rustc, clippy nor rustfmt can see.
//!
//! Every rule is a pure function from text, or from cargo's metadata, to a list of [`Problem`]s, and
//! has a test with a small example that it must refuse: a rule that finds nothing anywhere looks
//! just like a clean tree. The whole runs both as `cargo xtask tidy` and as a unit test, so that a
//! plain `cargo test` cannot miss it.

mod arrows;
mod code;
mod generated;
mod header;
mod machine_paths;
mod manifest;
mod metadata;
mod names;
mod records;
mod text;
mod tree;
mod unsafe_code;

use std::fmt;
use std::process::ExitCode;

use crate::error::Error;
use crate::process;
use crate::tidy::metadata::Metadata;
use crate::tidy::tree::Tree;

/// A broken rule, at the line that breaks it.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Problem {
    /// Path from the workspace folder, with `/`.
    path: String,
    /// Line, from 1.
    line: usize,
    /// What is wrong, and what would be right.
    message: String,
}

impl Problem {
    fn new(path: &str, line: usize, message: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, message: message.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.message)
    }
}

/// Checks the workspace, prints each problem and fails if there is one.
///
/// # Errors
/// The tree or cargo's metadata could not be read.
pub(crate) fn run() -> Result<ExitCode, Error> {
    Ok(if passes()? { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Checks the workspace and prints each problem and each warning; true if there is no problem.
///
/// # Errors
/// The tree or cargo's metadata could not be read.
pub(crate) fn passes() -> Result<bool, Error> {
    let tree = Tree::read(&process::workspace_root())?;
    let mut problems = problems(&tree, &Metadata::read()?);
    match generated::check(&tree, generated::print)? {
        Some(differing) => problems.extend(differing),
        None => eprintln!("note: generated files were not compared: python3 was not found"),
    }
    for problem in &problems {
        eprintln!("{problem}");
    }
    let warnings = records::stale(&tree);
    for warning in &warnings {
        eprintln!("warning: {warning}");
    }
    let counts = (tree.files.len(), problems.len(), warnings.len());
    println!("tidy: {} files, {} problems, {} warnings", counts.0, counts.1, counts.2);
    Ok(problems.is_empty())
}

/// Every problem of the tree, sorted by place.
fn problems(tree: &Tree, metadata: &Metadata) -> Vec<Problem> {
    let mut problems = Vec::new();
    for file in &tree.files {
        let (path, text) = (file.path.as_str(), file.text.as_str());
        problems.extend(names::file_name(path));
        problems.extend(machine_paths::check(path, text));
        problems.extend(text::whitespace(path, text));
        problems.extend(text::length(path, text));
        if path.ends_with(".rs") {
            let code = code::only(text);
            problems.extend(header::check(path, text));
            problems.extend(names::modules(path, &code));
            problems.extend(text::unfinished(path, &code));
            problems.extend(text::ignored_examples(path, text));
            problems.extend(unsafe_code::check(path, &code));
        }
    }
    problems.extend(arrows::check(metadata, tree));
    problems.extend(manifest::check(metadata, tree));
    problems.sort();
    problems.dedup();
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workspace_keeps_the_house_rules() {
        let tree = Tree::read(&process::workspace_root()).unwrap();
        let mut problems = problems(&tree, &Metadata::read().unwrap());
        problems.extend(generated::check(&tree, generated::print).unwrap().unwrap_or_default());
        let lines: Vec<_> = problems.iter().map(Problem::to_string).collect();
        assert!(lines.is_empty(), "{} problems:\n{}", lines.len(), lines.join("\n"));
    }

    #[test]
    fn problem_displays_as_path_line_message() {
        let problem = Problem::new("a/b.rs", 3, "tab");
        assert_eq!(problem.to_string(), "a/b.rs:3: tab");
    }

    #[test]
    fn problems_reach_every_rule_on_files() {
        // One bad file; each rule on files must speak up about it at least once.
        let bad = format!(
            "fn main() {{\t\n    unsafe {{ {}!() }}\n}}\nconst P: &str = \"/{}/x\";\n/// ```ignore\n{}",
            "todo",
            "home",
            "mod helpers;\n".repeat(text::MAX_LINES),
        );
        let tree = Tree::of([("crates/attn-core/src/utils.rs", bad.as_str())]);
        let found = problems(&tree, &Metadata::default());
        for words in [
            "header",
            "`utils`",
            "`helpers`",
            "tab",
            "white space",
            "unfinished",
            "unsafe",
            "machine",
            "lines",
            "doc example",
        ] {
            assert!(found.iter().any(|p| p.message.contains(words)), "no problem on {words}");
        }
    }
}
