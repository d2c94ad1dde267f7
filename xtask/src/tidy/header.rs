//! Every Rust file opens by saying what it keeps. rustc's `missing_docs` asks that of public modules
//! alone, and not of tests, binaries or private files, where the reason for a file is lost first.

use crate::tidy::Problem;

/// The first line of a Rust file is a `//!` with words on it, or includes a README as its docs.
pub(super) fn check(path: &str, text: &str) -> Vec<Problem> {
    let first = text.lines().next().unwrap_or_default();
    let has_words = first.strip_prefix("//!").is_some_and(|words| !words.trim().is_empty());
    if has_words || first.starts_with("#![doc = include_str!(") {
        return Vec::new();
    }
    vec![Problem::new(path, 1, "no module header: the first line must be `//!` and what it keeps")]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_is_required_on_the_first_line() {
        for text in ["", "fn f() {}\n", "// x\n", "/// x\n", "//!\n//! x\n", "\n//! x\n"] {
            assert_eq!(check("a.rs", text).len(), 1, "{text:?}");
        }
    }

    #[test]
    fn header_passes_with_words_or_an_included_readme() {
        assert_eq!(check("a.rs", "//! Keeps x.\n\nfn f() {}\n"), []);
        assert_eq!(check("lib.rs", "#![doc = include_str!(\"../README.md\")]\n"), []);
    }
}
