//! PyTorch in a child process, asked case by case so that it meets the same machine as we do.
//!
//! The invariant: the child only ever runs between a request and its answer; it is idle while others
//! are timed.

use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::{Value, json};

use super::case::Case;

const SCRIPT: &str = include_str!("torch.py");

/// The running child.
#[derive(Debug)]
pub(crate) struct Torch {
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
    name: String,
}

impl Torch {
    /// Starts `python` with the peer script and waits until it is ready.
    pub(crate) fn start(python: &Path, threads: usize) -> io::Result<Self> {
        let mut child = Command::new(python)
            .args(["-c", SCRIPT, &threads.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (Some(requests), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(io::Error::other("the child has no pipes"));
        };
        let mut torch =
            Self { child, requests, answers: BufReader::new(answers), name: String::new() };
        let ready = torch.answer()?;
        torch.name = ready["ready"].as_str().unwrap_or("torch").to_owned();
        Ok(torch)
    }

    /// The version that answered.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Milliseconds of each of `calls` calls.
    pub(crate) fn time(&mut self, case: &Case, calls: usize) -> io::Result<Vec<f64>> {
        writeln!(self.requests, "{}", json!({ "case": case, "calls": calls }))?;
        self.requests.flush()?;
        let answer = self.answer()?;
        let millis =
            answer["ms"].as_array().map(|ms| ms.iter().filter_map(Value::as_f64).collect());
        millis.ok_or_else(|| io::Error::other(format!("unexpected answer {answer}")))
    }

    fn answer(&mut self) -> io::Result<Value> {
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            let status = self.child.wait()?;
            return Err(io::Error::other(format!("the child ended: {status}")));
        }
        serde_json::from_str(&line).map_err(io::Error::other)
    }
}

impl Drop for Torch {
    fn drop(&mut self) {
        // The child may have ended already; there is nobody to tell about a failed kill.
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
