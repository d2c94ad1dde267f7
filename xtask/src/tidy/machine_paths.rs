//! No file names a folder of the machine that it was written on: such a path works for one person.
//!
//! The folders are kept apart from their slashes here, since this file is checked as well.

use crate::tidy::Problem;

/// First components of absolute paths that belong to one machine.
const FOLDERS: [&str; 4] = ["home", "root", "tmp", "work"];

/// Absolute paths of one machine, in any text file but a lock file.
pub(super) fn check(path: &str, text: &str) -> Vec<Problem> {
    if path.ends_with("Cargo.lock") {
        return Vec::new();
    }
    let mut problems = Vec::new();
    for (line, number) in text.lines().zip(1..) {
        for (at, _) in line.match_indices('/') {
            if let Some(folder) = machine_folder(&line[..at], &line[at + 1..]) {
                problems.push(Problem::new(path, number, format!("machine path in `/{folder}`")));
            }
        }
    }
    problems
}

/// The folder, where a slash between `before` and `after` begins an absolute path of one machine.
fn machine_folder(before: &str, after: &str) -> Option<&'static str> {
    // `a/home`, `./home`, `~/work`, `$X/tmp`, `${X}/tmp` and `//host/home` are not such paths.
    let inside = |c: char| c.is_alphanumeric() || "/._-~})".contains(c);
    if before.ends_with(inside) {
        return None;
    }
    let folder = FOLDERS.into_iter().find(|folder| {
        let rest = after.strip_prefix(folder);
        rest.is_some_and(|r| !r.starts_with(|c: char| c.is_alphanumeric() || c == '_' || c == '-'))
    })?;
    // The folder for temporary files itself exists everywhere; a name in it does not.
    let name = after[folder.len()..].strip_prefix('/').unwrap_or_default();
    let named = name.starts_with(|c: char| c.is_alphanumeric() || c == '.' || c == '_');
    (folder != "tmp" || named).then_some(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(template: &str) -> usize {
        check("a.md", &template.replace('|', "/")).len()
    }

    #[test]
    fn machine_paths_are_refused_quoted_and_bare() {
        for text in [
            "\"|home|me\"",
            "cd |root",
            "(|work|x)",
            "`|tmp|x.log`",
            "|home",
            "=|work|",
            "--out=|tmp|a|b",
            "a:|root|b",
        ] {
            assert_eq!(found(text), 1, "{text}");
        }
    }

    #[test]
    fn machine_paths_pass_relative_and_longer_names() {
        for text in [
            "src|home|x",
            ".|work|x",
            "https:||x.org|home|y",
            "|workspace",
            "|home-page",
            "|tmp",
            "|tmp|",
            "$X|tmp|y",
            "${X}|tmp|y",
            "~|work",
            "|usr|lib",
            "read|work",
        ] {
            assert_eq!(found(text), 0, "{text}");
        }
    }

    #[test]
    fn machine_paths_name_their_line_and_spare_lock_files() {
        let text = "a\nb |tmp|x\n".replace('|', "/");
        assert_eq!(check("a.md", &text)[0].line, 2);
        assert_eq!(check("Cargo.lock", &text), []);
    }
}
