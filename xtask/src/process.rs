//! Child processes: where the workspace is, how cargo is called, how an exit status is passed on.
//!
//! The workspace folder is asked of the environment at run time, which `cargo run` and `cargo test`
//! set. A path compiled in would be that of another checkout when two share a target directory.

use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};

use crate::error::Error;

/// The folder of the workspace.
pub(crate) fn workspace_root() -> PathBuf {
    let manifest = env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    manifest.parent().map_or_else(|| manifest.clone(), Path::to_path_buf)
}

/// The cargo that runs this task, in the workspace folder.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace_root());
    command
}

/// Runs a command with this process's standard streams, to its end.
///
/// # Errors
/// [`Error::Spawn`] if it could not be started.
pub(crate) fn status(command: &mut Command) -> Result<ExitStatus, Error> {
    command.status().map_err(|source| Error::Spawn { command: line(command), source })
}

/// Runs a command and returns what it wrote to standard output.
///
/// # Errors
/// [`Error::Spawn`] if it could not be started, [`Error::Failed`] if it exited with a failure.
pub(crate) fn output(command: &mut Command) -> Result<Vec<u8>, Error> {
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|source| Error::Spawn { command: line(command), source })?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let said = String::from_utf8_lossy(&output.stderr);
    let detail = format!("{}: {}", output.status, said.trim());
    Err(Error::Failed { command: line(command), detail })
}

/// The command line of a command, for messages: the program's name without its folder.
pub(crate) fn line(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let program = program.file_name().unwrap_or(program.as_os_str());
    let words = std::iter::once(program).chain(command.get_args());
    words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}

/// The exit code that stands for a child's status: its own, or 128 + signal as shells have it.
pub(crate) fn exit_code(status: ExitStatus) -> ExitCode {
    if status.success() {
        return ExitCode::SUCCESS;
    }
    let code = status.code().or_else(|| signal(status).map(|s| 128 + s));
    // A failure stays a failure even where its code does not fit in the eight bits of an exit code.
    match code.and_then(|c| u8::try_from(c).ok()) {
        Some(0) | None => ExitCode::FAILURE,
        Some(code) => ExitCode::from(code),
    }
}

#[cfg(unix)]
fn signal(status: ExitStatus) -> Option<i32> {
    std::os::unix::process::ExitStatusExt::signal(&status)
}

#[cfg(not(unix))]
fn signal(_status: ExitStatus) -> Option<i32> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workspace_root_holds_the_lock_file() {
        assert!(workspace_root().join("Cargo.lock").is_file());
    }

    #[test]
    fn line_joins_program_name_and_arguments() {
        let mut command = Command::new("/bin/cargo");
        command.args(["test", "-p", "xtask"]);
        assert_eq!(line(&command), "cargo test -p xtask");
    }

    #[test]
    fn status_reports_a_program_that_does_not_exist() {
        let error = status(&mut Command::new("no-such-program-here")).unwrap_err();
        assert!(matches!(error, Error::Spawn { .. }), "{error}");
        assert!(error.to_string().contains("no-such-program-here"));
    }

    #[test]
    fn output_reports_the_failure_of_a_child() {
        let error = output(cargo().arg("no-such-verb")).unwrap_err();
        assert!(matches!(error, Error::Failed { .. }), "{error}");
    }

    #[cfg(unix)]
    #[test]
    fn exit_code_keeps_codes_and_marks_signals() {
        use std::os::unix::process::ExitStatusExt;
        let code = |raw| format!("{:?}", exit_code(ExitStatus::from_raw(raw)));
        let want = |code: u8| format!("{:?}", ExitCode::from(code));
        assert_eq!(code(0), want(0));
        assert_eq!(code(2 << 8), want(2));
        assert_eq!(code(9), want(137));
    }
}
