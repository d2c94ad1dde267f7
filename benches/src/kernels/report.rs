//! What each compiled kernel takes of a multiprocessor.
//!
//! The invariant: the whole table is printed before a spill fails the report, so that one bad kernel does
//! not hide the next.

use std::io::Write;

use attn_kernels::instances::Instance;
use attn_kernels::resources;
use attn_kernels::spec::Arch;
use attn_kernels::store::KernelStore;
use serde::Serialize;

use crate::kernels::{KernelsError, Selection, specs};

/// One kernel for one processor. The names are those of the JSON report.
#[derive(Debug, Serialize)]
struct Row {
    entry: &'static str,
    variant: String,
    arch: String,
    registers: u32,
    stack_bytes: u32,
    spill_bytes: u32,
    static_smem_bytes: u32,
    dynamic_smem_bytes: u32,
    /// Why its local memory is accepted; empty if it uses none, or if it is not accepted.
    reason: &'static str,
    threads: u32,
    blocks_per_sm: u32,
}

/// Compiles the selection and prints a row for each kernel.
pub(super) fn run(
    selection: &Selection,
    json: bool,
    out: &mut impl Write,
) -> Result<(), KernelsError> {
    let store = KernelStore::new();
    let instances = selection.instances();
    let (mut rows, mut faults) = (Vec::new(), Vec::new());
    for arch in &selection.arch {
        store.prepare(&specs(&instances, arch), arch)?;
        for instance in instances.iter().filter(|instance| instance.ships_for(arch)) {
            let (row, fault) = row(&store, instance, arch)?;
            rows.push(row);
            faults.extend(fault);
        }
    }
    if json {
        serde_json::to_writer_pretty(&mut *out, &rows)?;
        writeln!(out)?;
    } else {
        write!(out, "{}", table(&rows))?;
    }
    out.flush()?;
    if faults.is_empty() { Ok(()) } else { Err(KernelsError::LocalMemory(faults)) }
}

/// The row of a kernel, and what is wrong with it.
fn row(
    store: &KernelStore,
    instance: &Instance,
    arch: &Arch,
) -> Result<(Row, Option<String>), KernelsError> {
    let Instance { spec, threads, dynamic_smem } = instance;
    let resources = store.cubin(spec, arch)?.resources;
    let (reason, fault) = match resources::judge(spec, arch, &resources) {
        Ok(reason) => (reason, None),
        Err(fault) => ("", Some(fault)),
    };
    let shared = resources.static_smem_bytes.saturating_add(*dynamic_smem);
    let row = Row {
        entry: spec.entry().name(),
        variant: spec.variant(),
        arch: arch.name(),
        registers: resources.registers,
        stack_bytes: resources.stack_bytes,
        spill_bytes: resources.spill_bytes(),
        static_smem_bytes: resources.static_smem_bytes,
        dynamic_smem_bytes: *dynamic_smem,
        reason,
        threads: *threads,
        blocks_per_sm: resources::blocks_per_sm(arch, resources.registers, *threads, shared),
    };
    Ok((row, fault))
}

/// The rows in columns, the variant last since it is as long as it likes.
fn table(rows: &[Row]) -> String {
    let mut text = String::from(
        "entry        arch     regs  stack  spill  static   dynamic  threads  blocks/SM  variant\n",
    );
    for row in rows {
        text += &format!(
            "{:<12} {:<8} {:>4} {:>6} {:>6} {:>7} {:>9} {:>8} {:>10}  {}",
            row.entry,
            row.arch,
            row.registers,
            row.stack_bytes,
            row.spill_bytes,
            row.static_smem_bytes,
            row.dynamic_smem_bytes,
            row.threads,
            row.blocks_per_sm,
            row.variant,
        );
        if !row.reason.is_empty() {
            text += &format!(" ({})", row.reason);
        }
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::{Path, PathBuf};

    use serde_json::Value;

    use super::*;

    fn sample() -> Row {
        Row {
            entry: "decode",
            variant: "head_dim=128".into(),
            arch: "sm_90a".into(),
            registers: 255,
            stack_bytes: 8,
            spill_bytes: 16,
            static_smem_bytes: 1024,
            dynamic_smem_bytes: 65_536,
            reason: "because",
            threads: 128,
            blocks_per_sm: 2,
        }
    }

    #[test]
    fn row_has_the_fields_of_the_report_in_order() {
        let json = serde_json::to_string(&sample()).unwrap();
        let expected = r#"{"entry":"decode","variant":"head_dim=128","arch":"sm_90a","registers":255,"stack_bytes":8,"spill_bytes":16,"static_smem_bytes":1024,"dynamic_smem_bytes":65536,"reason":"because","threads":128,"blocks_per_sm":2}"#;
        assert_eq!(json, expected);
    }

    #[test]
    fn recorded_instances_use_no_local_memory() {
        let records = concat!(env!("CARGO_MANIFEST_DIR"), "/record");
        let inside = |folder: &Path| -> Vec<PathBuf> {
            folder.read_dir().unwrap().map(|entry| entry.unwrap().path()).collect()
        };
        let machines = inside(Path::new(records)).into_iter().filter(|path| path.is_dir());
        let is_report = |path: &PathBuf| {
            let name = path.file_name().unwrap().to_string_lossy();
            name.starts_with("kernels-") && name.ends_with(".json")
        };
        let reports: Vec<_> = machines.flat_map(|path| inside(&path)).filter(is_report).collect();
        assert!(!reports.is_empty(), "no report in {records}");
        for path in reports {
            let rows: Vec<Value> = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
            for row in rows {
                let used = [&row["spill_bytes"], &row["stack_bytes"]].map(Value::as_u64);
                assert_eq!(used, [Some(0); 2], "{}: {row}", path.display());
            }
        }
    }

    #[test]
    fn table_lines_figures_up_under_their_names() {
        let text = table(&[sample()]);
        let lines: Vec<_> = text.lines().collect();
        for (name, figure) in [("regs", "255"), ("spill", "16"), ("blocks/SM", "2")] {
            let end = lines[0].find(name).unwrap() + name.len();
            assert!(lines[1][..end].ends_with(figure), "{name}:\n{text}");
        }
        assert!(lines[1].ends_with("head_dim=128 (because)"), "{text}");
    }
}
