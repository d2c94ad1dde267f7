//! `ci`: what a change must pass, in the order in which a failure is cheapest to find.
//!
//! The steps are those of `.ci/run`, and one closing table says what ran, what did not and how long
//! it took. It stops at the first failure: a later step's output would bury the reason.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};
use std::{env, fs};

use clap::ValueEnum;

use crate::error::Error;
use crate::flags::Ci;
use crate::{process, tidy};

/// One step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Step {
    /// Formatting.
    Fmt,
    /// Lints of all targets, warnings refused.
    Clippy,
    /// House rules.
    Tidy,
    /// The pinned CUDA compiler, installed once below `.nvrtc/`.
    Nvrtc,
    /// Tests of the workspace, with that compiler if it is there.
    Test,
    /// Documentation, warnings refused.
    Doc,
}

impl Step {
    const ALL: [Self; 6] =
        [Self::Fmt, Self::Clippy, Self::Tidy, Self::Nvrtc, Self::Test, Self::Doc];

    fn name(self) -> &'static str {
        match self {
            Self::Fmt => "fmt",
            Self::Clippy => "clippy",
            Self::Tidy => "tidy",
            Self::Nvrtc => "nvrtc",
            Self::Test => "test",
            Self::Doc => "doc",
        }
    }

    /// The command of the step; `tidy` has none, it is a function of this crate.
    fn command(self) -> Option<Command> {
        let args: &[&str] = match self {
            Self::Fmt => &["fmt", "--all", "--", "--check"],
            Self::Clippy => &["clippy", "--workspace", "--all-targets", "--", "--deny", "warnings"],
            Self::Tidy => return None,
            Self::Nvrtc => {
                let mut command = Command::new("bash");
                command.arg(".ci/nvrtc").current_dir(process::workspace_root());
                return Some(command);
            }
            Self::Test => &["test", "--workspace"],
            Self::Doc => &["doc", "--workspace", "--no-deps"],
        };
        let mut command = process::cargo();
        command.args(args);
        if self == Self::Doc {
            command.env("RUSTDOCFLAGS", "-D warnings");
        }
        // Told where the compiler is, the tests that need it fail where they would else skip.
        if self == Self::Test
            && env::var_os("ATTN_NVRTC").is_none()
            && let Some(folder) = nvrtc(&process::workspace_root())
        {
            command.env("ATTN_NVRTC", folder);
        }
        Some(command)
    }

    /// Runs the step: `None` if it passed, else the exit code of its failure.
    fn run(self) -> Result<Option<ExitCode>, Error> {
        let Some(mut command) = self.command() else {
            println!("ci: {}", self.name());
            return Ok((!tidy::passes()?).then_some(ExitCode::FAILURE));
        };
        println!("ci: {}: {}", self.name(), process::line(&command));
        let status = process::status(&mut command)?;
        Ok((!status.success()).then(|| process::exit_code(status)))
    }
}

/// The folder of the newest compiler that `.ci/nvrtc` installed.
fn nvrtc(root: &Path) -> Option<PathBuf> {
    let versions = fs::read_dir(root.join(".nvrtc")).ok()?;
    let folders = versions.flatten().map(|version| version.path().join("nvidia/cu13/lib"));
    folders.filter(|folder| folder.join("libnvrtc.so.13").is_file()).max()
}

/// Runs the steps and prints the table.
///
/// # Errors
/// A step that could not be started; one that ran and failed gives its exit code.
pub(crate) fn run(ci: &Ci) -> Result<ExitCode, Error> {
    let (rows, failure) = run_steps(&ci.skip, Step::run);
    print!("{}", table(&rows));
    Ok(failure?.unwrap_or(ExitCode::SUCCESS))
}

/// How a step ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Passed,
    Failed,
    Skipped,
    NotReached,
}

/// A row of the table.
#[derive(Debug)]
struct Row {
    step: Step,
    outcome: Outcome,
    took: Duration,
}

/// Runs the steps in order up to the first failure, which is returned beside the rows.
fn run_steps(
    skip: &[Step],
    mut run: impl FnMut(Step) -> Result<Option<ExitCode>, Error>,
) -> (Vec<Row>, Result<Option<ExitCode>, Error>) {
    let mut rows = Vec::new();
    let mut failure = Ok(None);
    for step in Step::ALL {
        let start = Instant::now();
        let outcome = if skip.contains(&step) {
            Outcome::Skipped
        } else if !matches!(failure, Ok(None)) {
            Outcome::NotReached
        } else {
            failure = run(step);
            if matches!(failure, Ok(None)) { Outcome::Passed } else { Outcome::Failed }
        };
        rows.push(Row { step, outcome, took: start.elapsed() });
    }
    (rows, failure)
}

fn table(rows: &[Row]) -> String {
    let mut text = String::from("\nstep     result       seconds\n");
    for row in rows {
        let (result, ran) = match row.outcome {
            Outcome::Passed => ("ok", true),
            Outcome::Failed => ("FAILED", true),
            Outcome::Skipped => ("skipped", false),
            Outcome::NotReached => ("not reached", false),
        };
        let seconds = if ran { format!("{:.1}", row.took.as_secs_f64()) } else { "-".to_owned() };
        text += &format!("{:<8} {result:<11} {seconds:>8}\n", row.step.name());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcomes(rows: &[Row]) -> Vec<Outcome> {
        rows.iter().map(|r| r.outcome).collect()
    }

    #[test]
    fn ci_runs_every_step_in_order() {
        let mut ran = Vec::new();
        let (rows, failure) = run_steps(&[], |step| {
            ran.push(step);
            Ok(None)
        });
        assert_eq!(ran, Step::ALL);
        assert_eq!(outcomes(&rows), [Outcome::Passed; 6]);
        assert!(matches!(failure, Ok(None)));
    }

    #[test]
    fn ci_stops_at_the_first_failure() {
        let (rows, failure) =
            run_steps(&[], |step| Ok((step == Step::Clippy).then_some(ExitCode::FAILURE)));
        use Outcome::{Failed, NotReached, Passed};
        assert_eq!(
            outcomes(&rows),
            [Passed, Failed, NotReached, NotReached, NotReached, NotReached]
        );
        assert!(matches!(failure, Ok(Some(_))));
    }

    #[test]
    fn ci_leaves_out_skipped_steps() {
        let (rows, _) = run_steps(&[Step::Clippy, Step::Test], |step| {
            assert!(step != Step::Clippy && step != Step::Test);
            Ok(None)
        });
        use Outcome::{Passed, Skipped};
        assert_eq!(outcomes(&rows), [Passed, Skipped, Passed, Passed, Skipped, Passed]);
    }

    #[test]
    fn ci_keeps_the_error_of_a_step_that_could_not_start() {
        let (rows, failure) = run_steps(&[], |_| Err(Error::Missing { what: "cargo".to_owned() }));
        assert_eq!(rows[0].outcome, Outcome::Failed);
        assert_eq!(failure.unwrap_err().to_string(), "cargo");
    }

    #[test]
    fn nvrtc_is_the_newest_that_is_whole() {
        let root = env::temp_dir().join(format!("xtask-nvrtc-{}", std::process::id()));
        assert_eq!(nvrtc(&root), None);
        for version in ["13.0.88", "13.1.1", "13.2.part"] {
            fs::create_dir_all(root.join(".nvrtc").join(version).join("nvidia/cu13/lib")).unwrap();
        }
        let lib = |version: &str| root.join(".nvrtc").join(version).join("nvidia/cu13/lib");
        for version in ["13.0.88", "13.1.1"] {
            fs::write(lib(version).join("libnvrtc.so.13"), "").unwrap();
        }
        let found = nvrtc(&root);
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(found, Some(lib("13.1.1")));
    }

    #[test]
    fn table_shows_seconds_of_the_steps_that_ran() {
        let row = |step, outcome| Row { step, outcome, took: Duration::from_millis(1500) };
        let rows = [row(Step::Fmt, Outcome::Passed), row(Step::Doc, Outcome::NotReached)];
        let text = table(&rows);
        let lines: Vec<_> = text.lines().skip(2).collect();
        assert_eq!(lines, ["fmt      ok               1.5", "doc      not reached        -"]);
    }
}
