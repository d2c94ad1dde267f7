//! The shipped kernels on a machine that needs no GPU: list, compile, measure, disassemble, bundle.
//!
//! The invariant: everything here goes through the public toolchain of `attn-kernels`, the same code path
//! that compiles a kernel on first use, so that what is reported is what will run.

mod report;
mod sass;

use std::io::{self, Write};
use std::num::NonZero;
use std::path::PathBuf;
use std::time::Instant;

use attn_kernels::bundle::Bundle;
use attn_kernels::instances::{self, Instance};
use attn_kernels::source;
use attn_kernels::spec::{Arch, KernelSpec};
use attn_kernels::store::KernelStore;

/// Options of `attn-bench kernels`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    /// Print the shipped instances and their macros.
    List,
    /// Compile into the disk cache, and tell the time.
    Build(Build),
    /// Registers, local memory, shared memory and occupancy; fails on a spill that has no listed reason.
    Report(Report),
    /// Disassemble with nvdisasm.
    Sass(Sass),
    /// Write compiled kernels into one file, for machines without a compiler.
    Bundle(BundleArgs),
}

/// What to compile.
#[derive(Debug, clap::Args)]
struct Selection {
    /// Every shipped instance, not one a family.
    #[arg(long)]
    all: bool,
    /// The processors to compile for.
    #[arg(long, value_delimiter = ',', default_value = "sm_80,sm_90a", value_name = "ARCH,...")]
    arch: Vec<Arch>,
}

#[derive(Debug, clap::Args)]
struct Build {
    #[command(flatten)]
    selection: Selection,
    /// Compilers at once; as many as there are processors by default.
    #[arg(long, value_name = "N")]
    jobs: Option<NonZero<usize>>,
    /// Compile everything, whatever the disk cache holds, and leave it as it is.
    #[arg(long)]
    fresh: bool,
}

#[derive(Debug, clap::Args)]
struct Report {
    #[command(flatten)]
    selection: Selection,
    /// Print a JSON array instead of a table.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
struct Sass {
    /// The instances whose names contain this: `decode`, or `prefill[block_n=64`.
    name: String,
    /// The processor to compile for.
    #[arg(long, default_value = "sm_90a")]
    arch: Arch,
}

#[derive(Debug, clap::Args)]
struct BundleArgs {
    /// The processors to compile for.
    #[arg(long, value_delimiter = ',', required = true, value_name = "ARCH,...")]
    arch: Vec<Arch>,
    /// The file to write.
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Every shipped instance: the default, said aloud.
    #[arg(long, conflicts_with = "representatives")]
    all: bool,
    /// One instance a family instead of every shipped one.
    #[arg(long)]
    representatives: bool,
}

/// Why a verb did not do its work.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KernelsError {
    /// The toolchain.
    #[error(transparent)]
    Kernels(#[from] attn_kernels::Error),
    /// Standard output, or a temporary file.
    #[error("output: {0}")]
    Output(#[from] io::Error),
    /// The report as JSON.
    #[error("report: {0}")]
    Json(#[from] serde_json::Error),
    /// Kernels use local memory that is not accepted.
    #[error("local memory without a listed reason:\n  {}", .0.join("\n  "))]
    LocalMemory(Vec<String>),
    /// No instance has this in its name.
    #[error("instances: expected a part of a name that `kernels list` prints, got {got}")]
    NoInstance {
        /// What was asked for.
        got: String,
    },
    /// There is no disassembler.
    #[error(
        "nvdisasm was not found; it is part of the CUDA toolkit and of the wheel \
         nvidia-cuda-nvdisasm; looked for {}", tried.join(", ")
    )]
    NoDisassembler {
        /// The places.
        tried: Vec<String>,
    },
    /// The disassembler failed.
    #[error("{program}: {said}")]
    Disassembler {
        /// Its path.
        program: String,
        /// What it said.
        said: String,
    },
}

/// Runs the verb.
pub(crate) fn run(args: &Args) -> Result<(), KernelsError> {
    let out = &mut io::stdout().lock();
    match &args.verb {
        Verb::List => list(out),
        Verb::Build(args) => build(args, out),
        Verb::Report(args) => report::run(&args.selection, args.json, out),
        Verb::Sass(args) => sass::run(&args.name, &args.arch, out),
        Verb::Bundle(args) => bundle(args, out),
    }
}

impl Selection {
    fn instances(&self) -> Vec<Instance> {
        if self.all { instances::shipped() } else { instances::representatives() }
    }
}

/// The specs of those that an arch is shipped.
fn specs(instances: &[Instance], arch: &Arch) -> Vec<KernelSpec> {
    let shipped = instances.iter().filter(|instance| instance.ships_for(arch));
    shipped.map(|instance| instance.spec.clone()).collect()
}

fn list(out: &mut impl Write) -> Result<(), KernelsError> {
    let instances = instances::shipped();
    for Instance { spec, threads, dynamic_smem } in &instances {
        writeln!(out, "{spec} threads={threads} dynamic_smem_bytes={dynamic_smem}")?;
    }
    writeln!(out, "{} instances of the sources {}", instances.len(), source::fingerprint())?;
    Ok(())
}

fn build(args: &Build, out: &mut impl Write) -> Result<(), KernelsError> {
    let mut store = if args.fresh { KernelStore::with_cache_dir(None) } else { KernelStore::new() };
    if let Some(jobs) = args.jobs {
        store = store.with_threads(jobs);
    }
    let instances = args.selection.instances();
    let compiler = store.compiler()?;
    let (major, minor) = compiler.version();
    writeln!(out, "NVRTC {major}.{minor}, {}", compiler.path().display())?;
    for arch in &args.selection.arch {
        let specs = specs(&instances, arch);
        let start = Instant::now();
        store.prepare(&specs, arch)?;
        let seconds = start.elapsed().as_secs_f64();
        writeln!(out, "{arch}: {} kernels in {seconds:.2} s", specs.len())?;
        for spec in &specs {
            let warnings = &store.cubin(spec, arch)?.warnings;
            if !warnings.is_empty() {
                writeln!(out, "{spec} for {arch}: {warnings}")?;
            }
        }
    }
    Ok(())
}

fn bundle(args: &BundleArgs, out: &mut impl Write) -> Result<(), KernelsError> {
    let store = KernelStore::new();
    let instances =
        if args.representatives { instances::representatives() } else { instances::shipped() };
    let mut bundle = Bundle::new(store.compiler()?.version());
    for arch in &args.arch {
        let specs = specs(&instances, arch);
        store.prepare(&specs, arch)?;
        for spec in &specs {
            bundle.insert(spec, *arch, store.cubin(spec, arch)?);
        }
    }
    bundle.write(&args.output)?;
    let bytes = args.output.metadata()?.len();
    writeln!(out, "{}: {} kernels, {bytes} bytes", args.output.display(), bundle.len())?;
    Ok(())
}
