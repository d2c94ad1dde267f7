//! `bench`: the criterion benches of `attn-bench`. Only bench targets are built: `cargo bench` alone
//! would also run the binaries under the test harness, which knows none of criterion's arguments.

use std::process::ExitCode;

use crate::error::Error;
use crate::flags::Bench;
use crate::process;

/// Builds and runs the benches, and passes the exit code on.
///
/// # Errors
/// [`Error::Spawn`] if cargo could not be started.
pub(crate) fn run(bench: &Bench) -> Result<ExitCode, Error> {
    let mut command = process::cargo();
    command.args(["bench", "--quiet", "--package", "attn-bench", "--bench", &bench.target, "--"]);
    let status = process::status(command.args(&bench.args))?;
    Ok(process::exit_code(status))
}
