//! What a compiled kernel takes of a multiprocessor, and which spills are known and allowed.
//!
//! The invariant: every figure comes from the compiler that made the code, and a spill or a use of local
//! memory passes only with a reason written down here. The driver reports the same figures for a
//! loaded module, which would need the device.

use crate::spec::{Arch, Entry, KernelSpec};

/// What the compiler reports of one kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of local memory of a thread: arrays that could not be kept in registers, and spills.
    pub stack_bytes: u32,
    /// Bytes of spilled registers written by a thread.
    pub spill_store_bytes: u32,
    /// Bytes of spilled registers read by a thread.
    pub spill_load_bytes: u32,
    /// Bytes of static shared memory of a block.
    pub static_smem_bytes: u32,
}

impl Resources {
    /// Bytes of spilled registers, written and read.
    #[must_use]
    pub fn spill_bytes(&self) -> u32 {
        self.spill_store_bytes.saturating_add(self.spill_load_bytes)
    }
}

/// Local memory that a kernel may use, with the reason.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    /// The kernel.
    pub entry: Entry,
    /// The arch's name; every arch if absent.
    pub arch: Option<&'static str>,
    /// Macros of the variants, as `name=value`; every variant if empty.
    pub macros: &'static [&'static str],
    /// The most spilled bytes, written and read.
    pub spill_bytes_max: u32,
    /// The most bytes of local memory.
    pub stack_bytes_max: u32,
    /// Why that is accepted.
    pub reason: &'static str,
}

/// Every use of local memory that is known and accepted: at present no shipped instance has any.
pub static ALLOWANCES: &[Allowance] = &[];

/// The reason for a kernel's use of local memory: empty where it uses none.
///
/// # Errors
/// It uses local memory without an allowance, or more than its allowance; the text says how much.
pub fn judge(
    spec: &KernelSpec,
    arch: &Arch,
    resources: &Resources,
) -> Result<&'static str, String> {
    judge_by(ALLOWANCES, spec, arch, resources)
}

fn judge_by<'a>(
    allowances: &'a [Allowance],
    spec: &KernelSpec,
    arch: &Arch,
    resources: &Resources,
) -> Result<&'a str, String> {
    let (spill, stack) = (resources.spill_bytes(), resources.stack_bytes);
    if spill == 0 && stack == 0 {
        return Ok("");
    }
    let variant = spec.variant();
    let allowance = allowances.iter().find(|a| {
        let arch_fits = a.arch.is_none_or(|name| name == arch.name());
        a.entry == spec.entry()
            && arch_fits
            && a.macros.iter().all(|text| variant.split(',').any(|own| own == *text))
    });
    let used = format!("{spec} for {arch} uses {stack} bytes of local memory, {spill} of spills");
    match allowance {
        None => Err(format!("{used}; it is not listed with a reason")),
        Some(a) if spill > a.spill_bytes_max || stack > a.stack_bytes_max => Err(format!(
            "{used}; listed are at most {} and {}: {}",
            a.stack_bytes_max, a.spill_bytes_max, a.reason
        )),
        Some(a) => Ok(a.reason),
    }
}

/// How many blocks of a kernel a multiprocessor holds at once, by its registers, threads and shared
/// memory. An estimate from published limits; the driver knows better where there is one.
///
/// Source: CUDA C++ Programming Guide, technical specifications per compute capability.
///
/// Units: threads and bytes of a block.
#[must_use]
pub fn blocks_per_sm(arch: &Arch, registers: u32, threads: u32, shared_bytes: u32) -> u32 {
    let limits = Limits::of(arch);
    let warps = threads.div_ceil(32).max(1);
    // Registers are given to a warp in units of 256, and warps to four schedulers each.
    let warp_registers = (registers.max(1) * 32).next_multiple_of(256);
    let by_registers = 65_536 / warp_registers / 4 * 4 / warps;
    let by_threads = limits.threads / 32 / warps;
    // A block's shared memory is given in units of 128 bytes, and 1 KiB of it is the system's.
    let block_bytes = (shared_bytes.saturating_add(1024)).next_multiple_of(128);
    let by_memory = limits.shared_bytes / block_bytes;
    by_registers.min(by_threads).min(by_memory).min(limits.blocks)
}

/// What a multiprocessor has.
struct Limits {
    threads: u32,
    blocks: u32,
    shared_bytes: u32,
}

impl Limits {
    fn of(arch: &Arch) -> Self {
        let (threads, blocks, kib) = match arch.compute() {
            (8, 0) => (2048, 32, 164),
            (8, 7) => (1536, 16, 164),
            (8, 9) => (1536, 24, 100),
            (8, _) => (1536, 16, 100),
            (9 | 10, _) => (2048, 32, 228),
            (11, _) => (1536, 24, 228),
            _ => (1536, 24, 100),
        };
        Self { threads, blocks, shared_bytes: kib * 1024 }
    }
}

/// The figures of one kernel in the compiler's log, or why they are not there.
pub(crate) fn from_log(log: &str, symbol: &str) -> Result<Resources, String> {
    let head = format!("Compiling entry function '{symbol}'");
    let missing = |what: &str| format!("the log has no {what} of {symbol}:\n{log}");
    let mut lines = log.lines().skip_while(|line| !line.contains(&head));
    lines.next().ok_or_else(|| missing("figures"))?;
    let lines: Vec<_> =
        lines.take_while(|line| !line.contains("Compiling entry function")).collect();

    let mut resources = Resources::default();
    let mut has_stack = false;
    // Functions that were not inlined have lines of their own; what they spill is the kernel's.
    for line in lines.iter().filter(|line| line.contains("bytes stack frame")) {
        has_stack = true;
        let figure = |name| before(line, name).unwrap_or(0);
        resources.stack_bytes = resources.stack_bytes.max(figure("bytes stack frame"));
        resources.spill_store_bytes += figure("bytes spill stores");
        resources.spill_load_bytes += figure("bytes spill loads");
    }
    let used =
        lines.iter().find(|line| line.contains("Used ")).ok_or_else(|| missing("registers"))?;
    resources.registers = before(used, "registers").ok_or_else(|| missing("registers"))?;
    resources.static_smem_bytes = before(used, "bytes smem").unwrap_or(0);
    let cumulative = before(used, "bytes cumulative stack size").unwrap_or(0);
    resources.stack_bytes = resources.stack_bytes.max(cumulative);
    if !has_stack {
        return Err(missing("stack frame"));
    }
    Ok(resources)
}

/// The number before a name: 72 for `registers` in `Used 72 registers, used 1 barriers`.
fn before(line: &str, name: &str) -> Option<u32> {
    let (left, _) = line.split_once(&format!(" {name}"))?;
    left.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// What the compiler's log says beside the figures: warnings, one a line.
pub(crate) fn without_figures(log: &str) -> String {
    let is_figure = |line: &&str| {
        let line = line.trim_start();
        line.is_empty() || line.starts_with("ptxas info") || line.contains("bytes stack frame")
    };
    log.lines().filter(|line| !is_figure(line)).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As NVRTC 13.0 writes it.
    const LOG: &str = "\
kernel/t.cu(3): warning #177-D: variable \"x\" was declared but never referenced
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'attn_other' for 'sm_90a'
ptxas info    : Function properties for attn_other
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 72 registers, used 0 barriers
ptxas info    : Compile time = 11.889 ms
ptxas info    : Compiling entry function 'attn_decode' for 'sm_90a'
ptxas info    : Function properties for attn_decode
ptxas         .     848 bytes stack frame, 1276 bytes spill stores, 1596 bytes spill loads
ptxas info    : Function properties for helper
ptxas         .     16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 864 bytes cumulative stack size, 512 bytes smem
ptxas info    : Compile time = 28.609 ms
";

    fn arch(name: &str) -> Arch {
        name.parse().unwrap()
    }

    #[test]
    fn figures_are_those_of_the_named_kernel() {
        let resources = from_log(LOG, "attn_decode").unwrap();
        let expected = Resources {
            registers: 32,
            stack_bytes: 864,
            spill_store_bytes: 1280,
            spill_load_bytes: 1604,
            static_smem_bytes: 512,
        };
        assert_eq!(resources, expected);
        assert_eq!(resources.spill_bytes(), 2884);
        let other = from_log(LOG, "attn_other").unwrap();
        assert_eq!(other, Resources { registers: 72, ..Resources::default() });
    }

    #[test]
    fn figures_that_are_absent_are_an_error_never_zero() {
        assert!(from_log(LOG, "attn_naive").is_err());
        for part in ["Used 32", "bytes stack frame"] {
            let cut: Vec<_> = LOG.lines().filter(|line| !line.contains(part)).collect();
            assert!(from_log(&cut.join("\n"), "attn_decode").is_err(), "{part}");
        }
    }

    #[test]
    fn warnings_are_what_is_left_of_the_log() {
        let warning =
            "kernel/t.cu(3): warning #177-D: variable \"x\" was declared but never referenced";
        assert_eq!(without_figures(LOG), warning);
    }

    #[test]
    fn judge_wants_a_reason_that_fits_for_local_memory() {
        let listed = [Allowance {
            entry: Entry::Decode,
            arch: Some("sm_80"),
            macros: &["head_dim=256"],
            spill_bytes_max: 16,
            stack_bytes_max: 8,
            reason: "because",
        }];
        let spec = |entry, head_dim| KernelSpec::new(entry, [("head_dim", head_dim)]);
        let with = |stack_bytes, spill_store_bytes| Resources {
            stack_bytes,
            spill_store_bytes,
            ..Resources::default()
        };
        let judge = |spec: &KernelSpec, name, resources: &Resources| {
            judge_by(&listed, spec, &arch(name), resources)
        };
        let decode = spec(Entry::Decode, 256);
        assert_eq!(judge(&decode, "sm_80", &with(8, 16)), Ok("because"));
        assert_eq!(judge(&decode, "sm_80", &with(0, 0)), Ok(""));
        for (spec, name, resources) in [
            (&decode, "sm_80", with(8, 17)),
            (&decode, "sm_80", with(9, 16)),
            (&decode, "sm_90a", with(8, 0)),
            (&spec(Entry::Decode, 128), "sm_80", with(8, 0)),
            (&spec(Entry::Prefill, 256), "sm_80", with(0, 1)),
        ] {
            let refusal = judge(spec, name, &resources).unwrap_err();
            assert!(refusal.contains(&spec.to_string()) && refusal.contains(name), "{refusal}");
        }
    }

    #[test]
    fn allowances_have_reasons() {
        assert!(ALLOWANCES.iter().all(|a| !a.reason.is_empty()));
    }

    #[test]
    fn blocks_are_limited_by_the_scarcest_resource() {
        let (a100, h200) = (arch("sm_80"), arch("sm_90a"));
        // 65536 registers: two blocks of 128 threads at 255, sixteen warps at 128.
        assert_eq!(blocks_per_sm(&a100, 255, 128, 0), 2);
        assert_eq!(blocks_per_sm(&a100, 128, 128, 0), 4);
        assert_eq!(blocks_per_sm(&a100, 32, 1024, 0), 2);
        assert_eq!(blocks_per_sm(&a100, 16, 32, 0), 32);
        assert_eq!(blocks_per_sm(&a100, 32, 128, 81 << 10), 2);
        assert_eq!(blocks_per_sm(&a100, 32, 128, 82 << 10), 1);
        assert_eq!(blocks_per_sm(&h200, 32, 128, 227 << 10), 1);
        assert_eq!(blocks_per_sm(&h200, 32, 128, 228 << 10), 0);
    }
}
