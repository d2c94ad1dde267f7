//! `result.json`, and the folder before it.
//!
//! The invariant: `result.json` appears last and at once, by rename, so that whoever waits for it finds it
//! whole and the outputs beside it; and nothing of an earlier run is left when a case starts.

use std::fs;
use std::path::Path;

use serde::Serialize;
use serde_json::Value;

use super::Error;
use super::failure::Failure;

/// The file of tensors that a case wrote.
pub(crate) const OUTPUT_FILE: &str = "out.safetensors";

/// What a case answers on success.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub(crate) kernel: String,
    pub(crate) plan: String,
    pub(crate) observations: Option<Vec<Value>>,
    pub(crate) smem_bytes: Option<u64>,
    pub(crate) workspace_bytes: Option<u64>,
}

/// The contents of `result.json`.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    status: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<Failure>,
    backend: &'static str,
    kernel: Option<String>,
    plan: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    observations: Option<Vec<Value>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    smem_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    workspace_bytes: Option<u64>,
}

impl Report {
    pub(crate) fn new(backend: &'static str, outcome: Result<Answer, Failure>) -> Self {
        match outcome {
            Ok(answer) => Self {
                status: "ok",
                error: None,
                backend,
                kernel: Some(answer.kernel),
                plan: Some(answer.plan),
                observations: answer.observations,
                smem_bytes: answer.smem_bytes,
                workspace_bytes: answer.workspace_bytes,
            },
            Err(failure) => Self {
                status: "error",
                error: Some(failure),
                backend,
                kernel: None,
                plan: None,
                observations: None,
                smem_bytes: None,
                workspace_bytes: None,
            },
        }
    }

    /// # Errors
    /// [`Error::Write`].
    pub(crate) fn write(&self, dir: &Path) -> Result<(), Error> {
        let (draft, path) = (dir.join("result.json.part"), dir.join("result.json"));
        let written = serde_json::to_vec_pretty(self)
            .map_err(std::io::Error::from)
            .and_then(|text| fs::write(&draft, text))
            .and_then(|()| fs::rename(&draft, &path));
        written.map_err(|source| Error::Write { path: path.display().to_string(), source })
    }
}

/// Removes what an earlier run left. A file that is not there, or cannot be removed, is overwritten.
pub(crate) fn clear(dir: &Path) {
    for name in [OUTPUT_FILE, "result.json"] {
        let _ = fs::remove_file(dir.join(name));
    }
}
