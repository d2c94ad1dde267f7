//! Machine code as text, by NVIDIA's disassembler where it is installed.
//!
//! The invariant: what is shown was compiled from the present sources through the same store as what runs.
//! The disassembler reads a file, so each kernel passes through a temporary one.

use std::env;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{self, Command};

use attn_kernels::instances;
use attn_kernels::spec::Arch;
use attn_kernels::store::KernelStore;

use crate::kernels::KernelsError;

/// Disassembles every instance whose name contains `name`.
pub(super) fn run(name: &str, arch: &Arch, out: &mut impl Write) -> Result<(), KernelsError> {
    let mut specs: Vec<_> = instances::shipped()
        .into_iter()
        .chain(instances::representatives())
        .map(|instance| instance.spec)
        .filter(|spec| spec.entry().compiles_for(arch) && spec.to_string().contains(name))
        .collect();
    specs.sort();
    specs.dedup();
    if specs.is_empty() {
        return Err(KernelsError::NoInstance { got: name.to_owned() });
    }
    let program = disassembler()?;
    let store = KernelStore::new();
    store.prepare(&specs, arch)?;
    for spec in &specs {
        writeln!(out, "// {spec} for {arch}")?;
        out.write_all(&disassemble(&program, &store.cubin(spec, arch)?.image)?)?;
    }
    Ok(())
}

fn disassemble(program: &Path, image: &[u8]) -> Result<Vec<u8>, KernelsError> {
    let file = env::temp_dir().join(format!("attn-bench-{}.cubin", process::id()));
    fs::write(&file, image)?;
    let output = Command::new(program).arg("--print-code").arg(&file).output();
    fs::remove_file(&file)?;
    let output = output?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    let said = format!("{}: {}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    Err(KernelsError::Disassembler { program: program.display().to_string(), said })
}

/// `ATTN_NVDISASM` and nothing else where that is set; then the path, then the toolkit.
fn disassembler() -> Result<PathBuf, KernelsError> {
    if let Some(chosen) = env::var_os("ATTN_NVDISASM").filter(|value| !value.is_empty()) {
        return first(vec![chosen.into()]);
    }
    let path = env::var_os("PATH").unwrap_or_default();
    let mut folders: Vec<_> = env::split_paths(&path).collect();
    for variable in ["CUDA_HOME", "CUDA_PATH"] {
        folders.extend(env::var_os(variable).map(|home| PathBuf::from(home).join("bin")));
    }
    folders.push("/usr/local/cuda/bin".into());
    let name = format!("nvdisasm{}", env::consts::EXE_SUFFIX);
    first(folders.into_iter().map(|folder| folder.join(&name)).collect())
}

fn first(candidates: Vec<PathBuf>) -> Result<PathBuf, KernelsError> {
    let tried = candidates.iter().map(|path| path.display().to_string()).collect();
    let found = candidates.into_iter().find(|path| path.is_file());
    found.ok_or(KernelsError::NoDisassembler { tried })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_is_a_file_that_is_there() {
        let here = env::current_exe().unwrap();
        let found = first(vec!["/nowhere/nvdisasm".into(), here.clone()]).unwrap();
        assert_eq!(found, here);
    }

    #[test]
    fn first_tells_every_place_that_it_tried() {
        let error = first(vec!["/nowhere/nvdisasm".into()]).unwrap_err();
        assert!(error.to_string().contains("/nowhere/nvdisasm"), "{error}");
    }

    #[test]
    fn sass_of_an_unknown_name_is_an_error_with_the_name() {
        let arch = "sm_80".parse().unwrap();
        let error = run("no such kernel", &arch, &mut Vec::new()).unwrap_err();
        assert!(error.to_string().contains("no such kernel"), "{error}");
    }
}
