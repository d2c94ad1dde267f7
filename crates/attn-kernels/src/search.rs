//! Where NVRTC and the CUDA driver may be.
//!
//! The invariant: the places are a function of the environment and of folder listings alone, in a fixed
//! order, and each that failed leaves one line that says why. The dynamic loader's own search is not
//! enough: a machine may have `libnvrtc.so.13` and no `libnvrtc.so`, or have it in a Python wheel.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

/// A library's file names, the way it is overridden and what to do without it.
#[derive(Debug)]
pub(crate) struct Library {
    /// File names, the preferred one first.
    pub(crate) names: &'static [&'static str],
    /// The environment variable that names the file or its folder.
    pub(crate) variable: &'static str,
    /// What would help, for an error.
    pub(crate) install: &'static str,
}

/// The compiler.
pub(crate) const NVRTC: Library = Library {
    names: if cfg!(windows) {
        &["nvrtc64_130_0.dll", "nvrtc64_120_0.dll"]
    } else {
        &["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"]
    },
    variable: "ATTN_NVRTC",
    install: "install version 12 or 13 of it (`pip install nvidia-cuda-nvrtc`, or the CUDA toolkit) \
              or set ATTN_NVRTC to the library or its folder",
};

/// The driver.
pub(crate) const DRIVER: Library = Library {
    names: if cfg!(windows) { &["nvcuda.dll"] } else { &["libcuda.so.1", "libcuda.so"] },
    variable: "ATTN_LIBCUDA",
    install: "install NVIDIA's driver, or run the container with its GPUs passed in, or set \
              ATTN_LIBCUDA to libcuda.so.1 or its folder",
};

/// One place to look in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// A bare name, which the dynamic loader looks for.
    Name(&'static str),
    /// This file.
    File(PathBuf),
    /// A file with one of the library's names in this folder.
    Folder(PathBuf),
}

/// What the search may ask of the machine.
pub(crate) struct Machine<'a> {
    /// An environment variable.
    var: &'a dyn Fn(&str) -> Option<OsString>,
    /// What is in a folder; `None` if it is not one.
    list: &'a dyn Fn(&Path) -> Option<Vec<PathBuf>>,
}

/// Where NVRTC may be on this machine.
pub(crate) fn compiler_places() -> Vec<Place> {
    nvrtc(&Machine { var: &|name| env::var_os(name), list: &list })
}

/// Where the driver may be on this machine.
pub(crate) fn driver_candidates() -> Vec<Place> {
    driver(&Machine { var: &|name| env::var_os(name), list: &list })
}

fn list(folder: &Path) -> Option<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).ok()?;
    Some(entries.filter_map(|entry| Some(entry.ok()?.path())).collect())
}

/// Opens the first library that opens, else says of each place why it did not.
pub(crate) fn first<T>(
    library: &Library,
    places: &[Place],
    mut open: impl FnMut(&Path) -> Result<T, String>,
) -> Result<T, Vec<String>> {
    let mut tried = Vec::new();
    let mut attempt = |path: &Path| match open(path) {
        Ok(opened) => Some(opened),
        Err(reason) => {
            tried.push(format!("{}: {reason}", path.display()));
            None
        }
    };
    let mut empty = Vec::new();
    for place in places {
        let opened = match place {
            Place::Name(name) => attempt(Path::new(name)),
            Place::File(path) => attempt(path),
            Place::Folder(folder) => {
                let there: Vec<_> = library
                    .names
                    .iter()
                    .map(|name| folder.join(name))
                    .filter(|path| path.is_file())
                    .collect();
                if there.is_empty() {
                    empty.push(folder.display().to_string());
                }
                there.iter().find_map(|path| attempt(path))
            }
        };
        if let Some(opened) = opened {
            return Ok(opened);
        }
    }
    if !empty.is_empty() {
        tried.push(format!("no {} in {}", library.names.join(" or "), empty.join(", ")));
    }
    Err(tried)
}

fn nvrtc(machine: &Machine<'_>) -> Vec<Place> {
    if let Some(place) = chosen(&NVRTC, machine) {
        return vec![place];
    }
    let mut places = names(&NVRTC);
    for variable in ["CUDA_HOME", "CUDA_PATH"] {
        if let Some(home) = set(machine, variable) {
            places.extend(toolkit(Path::new(&home)));
        }
    }
    for home in toolkits(machine) {
        places.extend(toolkit(&home));
    }
    places.push(Place::Folder(SYSTEM.into()));
    places.push(Place::Folder("/usr/local/nvidia/lib64".into()));
    // A Python environment is looked into only if it is the active one: the user named it.
    for variable in ["VIRTUAL_ENV", "CONDA_PREFIX"] {
        if let Some(prefix) = set(machine, variable) {
            places.extend(wheels(Path::new(&prefix), machine));
        }
    }
    without_repeats(places)
}

fn driver(machine: &Machine<'_>) -> Vec<Place> {
    if let Some(place) = chosen(&DRIVER, machine) {
        return vec![place];
    }
    let mut places = names(&DRIVER);
    let folders = [
        SYSTEM,
        "/usr/lib64",
        "/usr/lib",
        "/usr/lib/wsl/lib",
        "/usr/local/nvidia/lib64",
        "/usr/local/nvidia/lib",
        "/run/opengl-driver/lib",
    ];
    places.extend(folders.map(|folder| Place::Folder(folder.into())));
    // The driver of a toolkit's compatibility package, which some containers bring.
    places.extend(toolkits(machine).into_iter().map(|home| Place::Folder(home.join("compat"))));
    places
}

/// Where a distribution's own packages put libraries.
const SYSTEM: &str = if cfg!(target_arch = "aarch64") {
    "/usr/lib/aarch64-linux-gnu"
} else {
    "/usr/lib/x86_64-linux-gnu"
};

/// A variable's value; an empty one is as good as none.
fn set(machine: &Machine<'_>, variable: &str) -> Option<OsString> {
    (machine.var)(variable).filter(|value| !value.is_empty())
}

/// The place that the user chose. It is then the only one: another library than the chosen one would
/// be an option that is silently ignored.
fn chosen(library: &Library, machine: &Machine<'_>) -> Option<Place> {
    let path = PathBuf::from(set(machine, library.variable)?);
    Some(if (machine.list)(&path).is_some() { Place::Folder(path) } else { Place::File(path) })
}

fn names(library: &Library) -> Vec<Place> {
    library.names.iter().copied().map(Place::Name).collect()
}

/// The folders of a toolkit that may hold its libraries.
fn toolkit(home: &Path) -> [Place; 4] {
    let target = if cfg!(target_arch = "aarch64") { "sbsa-linux" } else { "x86_64-linux" };
    [
        Place::Folder(home.join("lib64")),
        Place::Folder(home.join("lib")),
        Place::Folder(home.join("targets").join(target).join("lib")),
        Place::Folder(home.join("bin")),
    ]
}

/// The toolkits in the usual prefixes: the machine's default first, then the newest first.
fn toolkits(machine: &Machine<'_>) -> Vec<PathBuf> {
    let is_toolkit = |path: &PathBuf| {
        path.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.starts_with("cuda-"))
    };
    let mut versions: Vec<_> = (machine.list)(Path::new("/usr/local")).unwrap_or_default();
    versions.retain(is_toolkit);
    versions.sort();
    versions.reverse();
    let mut homes = vec![PathBuf::from("/usr/local/cuda")];
    homes.append(&mut versions);
    homes.push("/opt/cuda".into());
    homes
}

/// The folders of NVIDIA's wheels in a Python prefix: that of CUDA 13, then that of CUDA 12.
fn wheels(prefix: &Path, machine: &Machine<'_>) -> Vec<Place> {
    let is_python = |path: &PathBuf| {
        path.file_name().and_then(|n| n.to_str()).is_some_and(|n| n.starts_with("python3"))
    };
    let mut pythons = (machine.list)(&prefix.join("lib")).unwrap_or_default();
    pythons.retain(is_python);
    pythons.sort();
    let folders = pythons.iter().flat_map(|python| {
        let nvidia = python.join("site-packages").join("nvidia");
        ["cu13", "cuda_nvrtc"].map(|wheel| Place::Folder(nvidia.join(wheel).join("lib")))
    });
    folders.collect()
}

fn without_repeats(places: Vec<Place>) -> Vec<Place> {
    let mut unique: Vec<Place> = Vec::new();
    for place in places {
        if !unique.contains(&place) {
            unique.push(place);
        }
    }
    unique
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A machine with these variables and these folders.
    fn with<T>(
        vars: &[(&str, &str)],
        folders: &[(&str, &[&str])],
        search: impl Fn(&Machine<'_>) -> T,
    ) -> T {
        let var = |name: &str| {
            vars.iter().find(|(n, _)| *n == name).map(|(_, value)| OsString::from(value))
        };
        let list = |path: &Path| {
            let (folder, names) = folders.iter().find(|(f, _)| Path::new(f) == path)?;
            Some(names.iter().map(|name| Path::new(folder).join(name)).collect())
        };
        search(&Machine { var: &var, list: &list })
    }

    fn folder(path: &str) -> Place {
        Place::Folder(path.into())
    }

    fn position(places: &[Place], place: &Place) -> usize {
        places.iter().position(|p| p == place).unwrap_or_else(|| panic!("no {place:?}"))
    }

    #[test]
    fn search_of_nvrtc_asks_the_loader_then_the_toolkits() {
        let places = with(
            &[("CUDA_HOME", "/opt/nv"), ("CUDA_PATH", "/opt/nv"), ("VIRTUAL_ENV", "")],
            &[("/usr/local", &["bin", "cuda", "cuda-12.8", "cuda-13.0"])],
            nvrtc,
        );
        let order: Vec<_> = [
            Place::Name(NVRTC.names[0]),
            folder("/opt/nv/lib64"),
            folder("/usr/local/cuda/lib64"),
            folder("/usr/local/cuda-13.0/lib64"),
            folder("/usr/local/cuda-12.8/lib64"),
            folder("/opt/cuda/lib64"),
            folder("/usr/local/nvidia/lib64"),
        ]
        .iter()
        .map(|place| position(&places, place))
        .collect();
        assert!(order.is_sorted(), "{order:?} in {places:?}");
        let twice = places.iter().filter(|p| **p == folder("/opt/nv/lib64")).count();
        assert_eq!(twice, 1);
    }

    #[test]
    fn search_of_nvrtc_looks_into_an_active_python_alone() {
        let folders: &[(&str, &[&str])] = &[("/venv/lib", &["python3.12", "other"])];
        let wheel = folder("/venv/lib/python3.12/site-packages/nvidia/cu13/lib");
        assert!(with(&[("VIRTUAL_ENV", "/venv")], folders, nvrtc).contains(&wheel));
        assert!(with(&[("CONDA_PREFIX", "/venv")], folders, nvrtc).contains(&wheel));
        assert!(!with(&[], folders, nvrtc).contains(&wheel));
    }

    #[test]
    fn search_keeps_to_the_place_that_was_chosen() {
        let folders: &[(&str, &[&str])] = &[("/here", &[])];
        assert_eq!(with(&[("ATTN_NVRTC", "/here")], folders, nvrtc), [folder("/here")]);
        let file = Place::File("/here/libnvrtc.so.13".into());
        assert_eq!(with(&[("ATTN_NVRTC", "/here/libnvrtc.so.13")], folders, nvrtc), [file]);
        assert_eq!(with(&[("ATTN_LIBCUDA", "/here")], folders, driver), [folder("/here")]);
    }

    #[test]
    fn search_of_the_driver_knows_containers_and_subsystems() {
        let places = with(&[], &[], driver);
        assert_eq!(places[0], Place::Name(DRIVER.names[0]));
        for path in ["/usr/lib/wsl/lib", "/usr/local/nvidia/lib64", "/run/opengl-driver/lib"] {
            position(&places, &folder(path));
        }
    }

    #[test]
    fn first_says_of_each_place_why_it_failed() {
        let places = [Place::Name("libx.so"), folder("/nowhere"), Place::File("/y.so".into())];
        let tried = first::<()>(&NVRTC, &places, |_| Err("cannot open".into())).unwrap_err();
        assert_eq!(tried[0], "libx.so: cannot open");
        assert_eq!(tried[1], "/y.so: cannot open");
        assert!(tried[2].starts_with("no ") && tried[2].ends_with("/nowhere"), "{tried:?}");
    }

    #[test]
    fn first_stops_at_the_first_that_opens() {
        let places = [Place::Name("a"), Place::Name("b"), Place::Name("c")];
        let mut asked = Vec::new();
        let opened = first(&NVRTC, &places, |path| {
            asked.push(path.display().to_string());
            if path == Path::new("b") { Ok(7) } else { Err(String::new()) }
        });
        assert_eq!((opened, asked), (Ok(7), vec!["a".to_owned(), "b".to_owned()]));
    }
}
