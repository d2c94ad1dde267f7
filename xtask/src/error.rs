//! Why a task could not do its work. A child that ran and failed is not an error here: its exit
//! code is passed on as it is, so that scripts see the code of the program that they asked for.

use std::{error, fmt, io};

/// A task that could not be carried out.
#[derive(Debug)]
pub(crate) enum Error {
    /// A program could not be started.
    Spawn {
        /// The command line.
        command: String,
        /// What the system said.
        source: io::Error,
    },
    /// A program that this task reads from ended with a failure.
    Failed {
        /// The command line.
        command: String,
        /// Its exit status and what it wrote to standard error.
        detail: String,
    },
    /// The output of a program was not what its documentation promises.
    Output {
        /// The command line.
        command: String,
        /// What was expected.
        expected: &'static str,
        /// What was there instead.
        got: String,
    },
    /// A file or folder of the workspace could not be read.
    Read {
        /// Its path.
        path: String,
        /// What the system said.
        source: io::Error,
    },
    /// Tools that the task needs are not installed.
    Missing {
        /// One line: what is missing and how to get it.
        what: String,
    },
    /// An argument names something that does not exist.
    Unknown {
        /// The kind of thing, as the user would call it.
        kind: &'static str,
        /// The names that exist.
        expected: Vec<String>,
        /// The name that was given.
        got: String,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Spawn { command, .. } => write!(f, "could not start `{command}`"),
            Self::Failed { command, detail } => write!(f, "`{command}` failed: {detail}"),
            Self::Output { command, expected, got } => {
                write!(f, "`{command}` printed something else than {expected}: {got}")
            }
            Self::Read { path, .. } => write!(f, "could not read {path}"),
            Self::Missing { what } => f.write_str(what),
            Self::Unknown { kind, expected, got } => {
                write!(f, "no {kind} `{got}`; there are: {}", expected.join(", "))
            }
        }?;
        match error::Error::source(self) {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}

impl error::Error for Error {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match self {
            Self::Spawn { source, .. } | Self::Read { source, .. } => Some(source),
            Self::Failed { .. }
            | Self::Output { .. }
            | Self::Missing { .. }
            | Self::Unknown { .. } => None,
        }
    }
}
