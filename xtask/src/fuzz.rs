//! `fuzz`: the targets of `fuzz/`, one after another, for a set time each.
//!
//! cargo-fuzz needs a nightly compiler, which the rest of the workspace does not: the verb looks for
//! both and says what is missing, instead of letting cargo fail on an unknown `-Z` flag.

use std::fs;
use std::process::{Command, ExitCode};

use crate::error::Error;
use crate::flags::Fuzz;
use crate::process;

/// Runs the targets and stops at the first that finds something.
///
/// # Errors
/// [`Error::Missing`] without cargo-fuzz or a nightly, [`Error::Unknown`] for a target that does not
/// exist, [`Error::Read`] if `fuzz/fuzz_targets` cannot be read.
pub(crate) fn run(fuzz: &Fuzz) -> Result<ExitCode, Error> {
    let all = targets()?;
    let chosen = choose(&all, &fuzz.targets)?;
    find_tools()?;
    for target in chosen {
        println!("fuzz: {target} for {} s", fuzz.seconds);
        let mut command = nightly_cargo();
        command.args(["fuzz", "run", "--fuzz-dir", "fuzz", target, "--"]);
        command.arg(format!("-max_total_time={}", fuzz.seconds));
        let status = process::status(&mut command)?;
        if !status.success() {
            return Ok(process::exit_code(status));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The targets that exist: the files of `fuzz/fuzz_targets`, sorted.
fn targets() -> Result<Vec<String>, Error> {
    let folder = process::workspace_root().join("fuzz/fuzz_targets");
    let read = |source| Error::Read { path: folder.display().to_string(), source };
    let mut names = Vec::new();
    for entry in fs::read_dir(&folder).map_err(read)? {
        let path = entry.map_err(read)?.path();
        if path.extension().is_some_and(|e| e == "rs")
            && let Some(stem) = path.file_stem()
        {
            names.push(stem.to_string_lossy().into_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// The targets to run: the wanted ones, or all where none is named.
fn choose<'a>(all: &'a [String], wanted: &'a [String]) -> Result<&'a [String], Error> {
    match wanted.iter().find(|w| !all.contains(w)) {
        Some(got) => {
            Err(Error::Unknown { kind: "fuzz target", expected: all.to_vec(), got: got.clone() })
        }
        None if wanted.is_empty() => Ok(all),
        None => Ok(wanted),
    }
}

fn nightly_cargo() -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", "cargo"]).current_dir(process::workspace_root());
    // Set by the stable cargo that runs this task; cargo-fuzz would call it instead of the nightly.
    command.env_remove("CARGO");
    command
}

fn find_tools() -> Result<(), Error> {
    let nightly = process::output(nightly_cargo().arg("--version")).is_ok();
    let cargo_fuzz = process::output(process::cargo().args(["fuzz", "--version"])).is_ok();
    missing(nightly, cargo_fuzz).map_or(Ok(()), |what| Err(Error::Missing { what }))
}

/// One line on what is missing and how to get it.
fn missing(nightly: bool, cargo_fuzz: bool) -> Option<String> {
    let mut parts = Vec::new();
    if !nightly {
        parts.push("a nightly toolchain (`rustup toolchain install nightly`)");
    }
    if !cargo_fuzz {
        parts.push("cargo-fuzz (`cargo install cargo-fuzz`)");
    }
    (!parts.is_empty()).then(|| format!("fuzz needs what was not found: {}", parts.join(" and ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_found_in_the_fuzz_folder() {
        let targets = targets().unwrap();
        for name in ["mask_tiles", "pool_programs", "problem_constructors"] {
            assert!(targets.iter().any(|t| t == name), "{name} not in {targets:?}");
        }
    }

    #[test]
    fn choose_takes_all_or_the_named_ones() {
        let all = ["a".to_owned(), "b".to_owned()];
        assert_eq!(choose(&all, &[]).unwrap(), all);
        assert_eq!(choose(&all, &all[1..]).unwrap(), ["b"]);
    }

    #[test]
    fn choose_refuses_an_unknown_target_and_names_the_known() {
        let error = choose(&["a".to_owned()], &["c".to_owned()]).unwrap_err();
        assert_eq!(error.to_string(), "no fuzz target `c`; there are: a");
    }

    #[test]
    fn missing_names_each_tool_that_is_absent() {
        assert_eq!(missing(true, true), None);
        let line = missing(false, false).unwrap();
        assert!(line.contains("nightly") && line.contains("cargo-fuzz") && !line.contains('\n'));
        assert!(!missing(true, false).unwrap().contains("nightly"));
    }
}
