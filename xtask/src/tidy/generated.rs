//! Files that a script of the tree writes are what it writes.
//!
//! The script is run and prints the file instead of writing it. A machine without Python cannot tell, and says so: it
//! may build and test everything else.

use std::io;
use std::process::Command;

use crate::error::Error;
use crate::process;
use crate::tidy::Problem;
use crate::tidy::tree::Tree;

/// Files, and the scripts that write them.
const GENERATED: [(&str, &str); 1] =
    [("crates/attn-kernels/cuda/ptx/wgmma.cuh", "crates/attn-kernels/cuda/ptx/wgmma.py")];

/// A problem for each file that differs from what its script prints.
///
/// # Errors
/// A script that fails; `None` where there is nothing to run scripts with.
pub(super) fn check(
    tree: &Tree,
    print: impl Fn(&str) -> Result<Option<String>, Error>,
) -> Result<Option<Vec<Problem>>, Error> {
    let mut problems = Vec::new();
    for (path, script) in GENERATED {
        let Some(printed) = print(script)? else { return Ok(None) };
        let text = tree.text(path).unwrap_or_default();
        if text != printed {
            let same = text.lines().zip(printed.lines()).take_while(|(own, new)| own == new);
            let message = format!("from here on not what {script} writes: run it, or edit it");
            problems.push(Problem::new(path, same.count() + 1, message));
        }
    }
    Ok(Some(problems))
}

/// What a script of the tree prints; `None` where there is no Python.
///
/// # Errors
/// [`Error::Spawn`] and [`Error::Failed`].
pub(super) fn print(script: &str) -> Result<Option<String>, Error> {
    let mut command = Command::new("python3");
    command.args([script, "--print"]).current_dir(process::workspace_root());
    match process::output(&mut command) {
        Ok(printed) => Ok(Some(String::from_utf8_lossy(&printed).into_owned())),
        Err(Error::Spawn { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generated_file_is_what_its_script_prints() {
        let (path, _) = GENERATED[0];
        let tree = Tree::of([(path, "a\nb\nc\n")]);
        let problems = |printed: &str| {
            check(&tree, |_| Ok(Some(printed.to_owned()))).unwrap().expect("printed")
        };
        assert_eq!(problems("a\nb\nc\n"), []);
        let edited = problems("a\nB\nc\n");
        assert_eq!((edited.len(), edited[0].line), (1, 2));
        assert!(edited[0].to_string().contains("wgmma.py"), "{}", edited[0]);
        assert_eq!(problems("a\nb\nc\nd\n")[0].line, 4);
        assert_eq!(check(&Tree::of([]), |_| Ok(Some("a\n".to_owned()))).unwrap().unwrap().len(), 1);
    }

    #[test]
    fn without_python_nothing_is_said_about_generated_files() {
        assert_eq!(check(&Tree::of([]), |_| Ok(None)).unwrap(), None);
    }
}
