//! The record of a sweep: a line for what was run where, then a line a point, as soon as it is known.
//!
//! The invariant: rows are appended whole and never changed, so that a run which is cut short loses at most the point that
//! it was at; a record is taken up again only on the same machine and by the same suite, for its ratios are of one run each.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::row::{COLUMNS, Row};
use super::suite::Suite;
use crate::machine::Machine;

/// A record that cannot be written or taken up.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RecordError {
    /// Files.
    #[error("record {path:?}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A table.
    #[error("table {path:?}: {source}")]
    Table {
        /// The file.
        path: PathBuf,
        /// Why.
        source: csv::Error,
    },
    /// A line that no sweep has written.
    #[error("record {path:?}, line {line}: {source}")]
    Line {
        /// The file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// Of another machine or suite.
    #[error("record {path:?}: expected {field} {expected}, got {got}; write to another file")]
    Other {
        /// The file.
        path: PathBuf,
        /// What differs.
        field: &'static str,
        /// Of this run.
        expected: Value,
        /// Of the record.
        got: Value,
    },
}

/// Rows, and where they are written.
#[derive(Debug)]
pub(crate) struct Record {
    file: Option<(PathBuf, File)>,
    rows: Vec<Row>,
}

impl Record {
    /// A record that is begun or, where the file is there, taken up; without a path it is kept in memory.
    ///
    /// # Errors
    /// [`RecordError`].
    pub(crate) fn open(
        path: Option<&Path>,
        machine: &Machine,
        suite: &Suite,
    ) -> Result<Self, RecordError> {
        let mut record = Self { file: None, rows: Vec::new() };
        let Some(path) = path else { return Ok(record) };
        let failed = |source| RecordError::Io { path: path.to_owned(), source };
        let header = json!({ "machine": machine, "suite": suite });
        let mut file =
            OpenOptions::new().read(true).create(true).append(true).open(path).map_err(failed)?;
        let mut text = String::new();
        file.read_to_string(&mut text).map_err(failed)?;
        // What a run that was cut short left of its last line.
        let whole = text.rfind('\n').map_or(0, |end| end + 1);
        if whole < text.len() {
            file.set_len(whole as u64).map_err(failed)?;
        }
        if whole == 0 {
            writeln!(file, "{header}").map_err(failed)?;
        } else {
            record.read(path, &text[..whole], &header)?;
        }
        record.file = Some((path.to_owned(), file));
        Ok(record)
    }

    fn read(&mut self, path: &Path, text: &str, header: &Value) -> Result<(), RecordError> {
        for (n, line) in text.lines().enumerate() {
            let wrong = |source| RecordError::Line { path: path.to_owned(), line: n + 1, source };
            if n == 0 {
                let there = serde_json::from_str(line).map_err(wrong)?;
                same(path, header, &there)?;
            } else {
                self.rows.push(serde_json::from_str(line).map_err(wrong)?);
            }
        }
        Ok(())
    }

    /// Whether a point has its row.
    pub(crate) fn has(&self, id: &str) -> bool {
        self.rows.iter().any(|row| row.id == id)
    }

    /// Adds a row.
    ///
    /// # Errors
    /// [`RecordError::Io`]; the row is then not among those known.
    pub(crate) fn add(&mut self, row: Row) -> Result<(), RecordError> {
        if let Some((path, file)) = &mut self.file {
            writeln!(file, "{}", json!(row))
                .and_then(|()| file.flush())
                .map_err(|source| RecordError::Io { path: path.clone(), source })?;
        }
        self.rows.push(row);
        Ok(())
    }

    pub(crate) fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Writes all rows as a table.
    ///
    /// # Errors
    /// [`RecordError::Table`].
    pub(crate) fn write_table(&self, path: &Path) -> Result<(), RecordError> {
        let failed = |source| RecordError::Table { path: path.to_owned(), source };
        let mut table = csv::Writer::from_path(path).map_err(failed)?;
        table.write_record(COLUMNS).map_err(failed)?;
        for row in &self.rows {
            table.write_record(row.cells()).map_err(failed)?;
        }
        table.flush().map_err(|source| RecordError::Io { path: path.to_owned(), source })
    }
}

/// Refuses a record of another machine or suite. Days may differ.
fn same(path: &Path, here: &Value, there: &Value) -> Result<(), RecordError> {
    let fields = [
        ("processor", "/machine/cpu"),
        ("threads", "/machine/threads"),
        ("instruction set", "/machine/level"),
        ("suite", "/suite/sha256"),
    ];
    for (field, at) in fields {
        let value = |of: &Value| of.pointer(at).cloned().unwrap_or(Value::Null);
        let (expected, got) = (value(here), value(there));
        if expected != got {
            return Err(RecordError::Other { path: path.to_owned(), field, expected, got });
        }
    }
    Ok(())
}
