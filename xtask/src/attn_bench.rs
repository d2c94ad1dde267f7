//! The verbs `demo`, `case`, `validate`, `kernels`, `worker`, `cascade-bench`, `latent-bench`, `step-bench` and `train-step`: build `attn-bench` in
//! release, spawn it, pass its exit code on. They differ in one word, hence one file for all of them.
//!
//! `cargo run --release -p attn-bench` would do the same but for one thing: a failed build and a
//! failed run would both exit with 101, and the case contract gives exit codes a meaning.

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

use serde_json::Value;

use crate::error::Error;
use crate::process;

/// Builds `attn-bench` and runs `attn-bench VERB ARGS` in the caller's folder.
///
/// # Errors
/// A build that failed, or a program that could not be started.
pub(crate) fn run(verb: &str, args: &[OsString]) -> Result<ExitCode, Error> {
    let program = build()?;
    let status = process::status(Command::new(program).arg(verb).args(args))?;
    Ok(process::exit_code(status))
}

/// Builds the binary and returns its path, as cargo reports it: the target directory may be set by
/// the environment or by a configuration file outside this workspace.
fn build() -> Result<PathBuf, Error> {
    let mut command = process::cargo();
    command.args(["build", "--quiet", "--release", "--package", "attn-bench"]);
    command.args(["--bin", "attn-bench", "--message-format", "json-render-diagnostics"]);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let line = process::line(&command);
    let spawn = |source| Error::Spawn { command: line.clone(), source };

    let mut child = command.spawn().map_err(spawn)?;
    let mut executable = None;
    let mut told = false;
    if let Some(stdout) = child.stdout.take() {
        for message in BufReader::new(stdout).lines() {
            match artifact(&message.map_err(spawn)?) {
                Some(Artifact::Program(path)) => executable = Some(path),
                // Cargo is quiet so that the output is that of `attn-bench` alone. A first build
                // takes minutes, though, and silence for so long reads as a hang.
                Some(Artifact::Compiled) if !told => {
                    eprintln!("compiling attn-bench in release; the first time takes minutes");
                    told = true;
                }
                Some(Artifact::Compiled) | None => {}
            }
        }
    }
    let status = child.wait().map_err(spawn)?;
    if !status.success() {
        return Err(Error::Failed { command: line, detail: status.to_string() });
    }
    executable.ok_or(Error::Output {
        command: line,
        expected: "a message that names the executable",
        got: "none".to_owned(),
    })
}

/// What one line of cargo's message stream says that matters here.
#[derive(Debug, PartialEq)]
enum Artifact {
    /// The program stands at this path.
    Program(PathBuf),
    /// A dependency was compiled, not found fresh.
    Compiled,
}

fn artifact(message: &str) -> Option<Artifact> {
    let message: Value = serde_json::from_str(message).ok()?;
    if message["reason"] != "compiler-artifact" {
        return None;
    }
    if message["target"]["name"] == "attn-bench"
        && let Some(path) = message["executable"].as_str()
    {
        return Some(Artifact::Program(path.into()));
    }
    (message["fresh"] == false).then_some(Artifact::Compiled)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn artifact_names_the_executable() {
        let message = r#"{"reason":"compiler-artifact","target":{"name":"attn-bench"},
            "executable":"target/release/attn-bench","fresh":true}"#;
        let path = PathBuf::from("target/release/attn-bench");
        assert_eq!(artifact(message), Some(Artifact::Program(path)));
    }

    #[test]
    fn artifact_tells_compiled_from_fresh() {
        let message = |fresh| {
            format!(
                r#"{{"reason":"compiler-artifact","target":{{"name":"half"}},"executable":null,"fresh":{fresh}}}"#
            )
        };
        assert_eq!(artifact(&message(false)), Some(Artifact::Compiled));
        assert_eq!(artifact(&message(true)), None);
    }

    #[test]
    fn artifact_passes_over_other_lines() {
        assert_eq!(artifact(r#"{"reason":"build-finished","success":true}"#), None);
        assert_eq!(artifact("not json"), None);
    }
}
