//! Rules on the text of a file: white space, length, and marks of unfinished or unrun code.

use crate::tidy::{Problem, code};

/// A file of code past this many lines holds more than one noun.
pub(super) const MAX_LINES: usize = 800;

/// No tabs and no white space at the end of a line, in Rust, Markdown and TOML.
pub(super) fn whitespace(path: &str, text: &str) -> Vec<Problem> {
    if !has_ending(path, &["rs", "md", "toml"]) {
        return Vec::new();
    }
    let mut problems = Vec::new();
    for (line, number) in text.split('\n').zip(1..) {
        if line.contains('\t') {
            problems.push(Problem::new(path, number, "tab: use spaces"));
        }
        if line.ends_with(char::is_whitespace) {
            problems.push(Problem::new(path, number, "white space at the end of the line"));
        }
    }
    problems
}

/// Files of code stay within [`MAX_LINES`].
pub(super) fn length(path: &str, text: &str) -> Vec<Problem> {
    let lines = text.lines().count();
    if lines <= MAX_LINES || !has_ending(path, &["rs", "cu", "cuh", "py", "sh"]) {
        return Vec::new();
    }
    vec![Problem::new(path, MAX_LINES + 1, format!("{lines} lines, at most {MAX_LINES}: split it"))]
}

/// Code that is finished, and tests that run and can fail for one reason only.
pub(super) fn unfinished(path: &str, code: &str) -> Vec<Problem> {
    let mut problems = Vec::new();
    for name in ["todo", "unimplemented", "dbg"] {
        for (line, rest) in code::words(code, name) {
            if rest.trim_start().starts_with('!') && !rest.trim_start().starts_with("!=") {
                problems.push(Problem::new(path, line, format!("unfinished code: `{name}!`")));
            }
        }
    }
    for (line, number) in code.lines().zip(1..) {
        let attribute = line.trim_start();
        if !attribute.starts_with("#[") {
            continue;
        }
        for name in ["ignore", "should_panic"] {
            if code::words(attribute, name).next().is_some() {
                let message = format!("`{name}`: a test runs, and asserts on a value");
                problems.push(Problem::new(path, number, message));
            }
        }
    }
    problems
}

/// Examples in the docs are compiled: none is marked to be ignored.
pub(super) fn ignored_examples(path: &str, text: &str) -> Vec<Problem> {
    let fence = |line: &str| {
        let line = line.trim_start();
        let doc = line.strip_prefix("///").or_else(|| line.strip_prefix("//!"))?;
        doc.trim_start().strip_prefix("```").map(|info| code::words(info, "ignore").count() > 0)
    };
    let ignored = text.lines().zip(1..).filter(|(line, _)| fence(line) == Some(true));
    ignored
        .map(|(_, number)| Problem::new(path, number, "doc example that is never compiled"))
        .collect()
}

fn has_ending(path: &str, endings: &[&str]) -> bool {
    path.rsplit_once('.').is_some_and(|(_, ending)| endings.contains(&ending))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(problems: &[Problem]) -> Vec<usize> {
        problems.iter().map(|p| p.line).collect()
    }

    #[test]
    fn whitespace_refuses_tabs_and_ends_of_lines() {
        assert_eq!(lines(&whitespace("a.rs", "a\n\tb\nc \nd\r\n")), [2, 3, 4]);
        assert_eq!(lines(&whitespace("a.md", "a  \nb")), [1]);
        assert_eq!(whitespace("a.txt", "a \t\n"), []);
        assert_eq!(whitespace("a.toml", "a\n\nb\n"), []);
    }

    #[test]
    fn length_refuses_one_line_too_many() {
        let exact = "x\n".repeat(MAX_LINES);
        assert_eq!(length("a.rs", &exact), []);
        assert_eq!(lines(&length("a.rs", &format!("{exact}x\n"))), [MAX_LINES + 1]);
        assert_eq!(length("a.csv", &format!("{exact}x\n")), []);
    }

    #[test]
    fn unfinished_refuses_each_mark() {
        let code = "todo!()\nunimplemented!(1)\ndbg!(x)\n#[ignore]\n#[should_panic(a)]\n\
                    #[cfg_attr(slow, ignore)]\n";
        let mut found = lines(&unfinished("a.rs", code));
        found.sort_unstable();
        assert_eq!(found, [1, 2, 3, 4, 5, 6]);
    }

    #[test]
    fn unfinished_passes_names_that_resemble_a_mark() {
        assert_eq!(unfinished("a.rs", "todo != 1\nmy_todo!()\nlet ignore = 1;\n"), []);
    }

    #[test]
    fn ignored_examples_refuses_a_fence_marked_ignore() {
        let text = "//! ```ignore\n/// ```rust,ignore\n/// ```text\n/// ignore\n// ```ignore\n";
        assert_eq!(lines(&ignored_examples("a.rs", text)), [1, 2]);
    }
}
