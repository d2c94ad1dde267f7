//! The peak memory of one long prefill, as the operating system saw it.
//!
//! The invariant: inputs and outputs are allocated and touched before the watermark is reset, so the
//! reading is the engine's own scratch: what it adds beyond the data it was given.

use std::io::{self, Write};

use attn_core::{
    Bytes, DType, Inputs, Outputs, Problem, ProblemSpec, TensorView, TensorViewMut, View, ViewMut,
};
use attn_kernels::cpu::{CpuEngine, Workspace};
use serde_json::json;

use crate::machine::Machine;

/// Options of `attn-bench memory`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Query rows and keys.
    #[arg(long, default_value_t = 16_384)]
    len: usize,
    /// Heads.
    #[arg(long, default_value_t = 8)]
    heads: usize,
    /// Head dimension.
    #[arg(long, default_value_t = 128)]
    dim: usize,
    /// Extra bytes beyond inputs and outputs that are still accepted, in MiB.
    #[arg(long, default_value_t = 64)]
    limit_mib: u64,
}

/// Why there is no verdict, or a bad one.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MemoryError {
    /// The call.
    #[error(transparent)]
    Call(#[from] attn_core::Error),
    /// The engine.
    #[error(transparent)]
    Engine(#[from] attn_kernels::Error),
    /// The selector.
    #[error(transparent)]
    Select(#[from] attn_select::Error),
    /// The watermark can only be read on Linux.
    #[error("peak memory: {0}")]
    Watermark(#[from] io::Error),
    /// Too much.
    #[error("extra peak memory: expected at most {expected}, got {got}")]
    Exceeded {
        /// Limit.
        expected: Bytes,
        /// Reading.
        got: Bytes,
    },
}

/// Runs the prefill and compares its peak with the limit.
pub(crate) fn run(args: &Args) -> Result<(), MemoryError> {
    let out = &mut io::stdout().lock();
    let engine = CpuEngine::new()?;
    let shape = [args.len, args.heads, args.dim];
    let elements: usize = shape.iter().product();
    for causal in [true, false] {
        let mut spec = ProblemSpec::new(
            DType::F32,
            args.heads,
            args.heads,
            args.dim,
            &[args.len],
            &[args.len],
        );
        spec.causal = causal;
        let problem = Problem::new(spec)?;
        let plan = attn_select::choose(&problem, &engine.caps(), attn_kernels::catalog())?;
        // Not zero, so that every page exists before the run.
        let data: [Vec<f32>; 3] = [0.25, 0.5, 0.75].map(|x| vec![x; elements]);
        let mut o = vec![1f32; elements];
        let mut lse = vec![1f32; args.len * args.heads];
        let [q, k, v] = &data;
        let view = |name, data| View::contiguous(name, data, &shape).map(TensorView::F32);
        let inputs = Inputs::dense(view("q", q)?, view("k", k)?, view("v", v)?);
        let mut outputs = Outputs {
            o: TensorViewMut::F32(ViewMut::contiguous("o", &mut o, &shape)?),
            lse: Some(ViewMut::contiguous("lse", &mut lse, &shape[..2])?),
        };
        let before = reset_watermark()?;
        engine.forward(&plan, &inputs, &mut outputs, &mut Workspace::new())?;
        let got = Bytes(status("VmHWM:")?.0.saturating_sub(before.0));
        // Equal keys and values: every output row is the value row.
        let wrong = o.iter().find(|&&x| (x - 0.75).abs() > 1e-5);
        if let Some(x) = wrong {
            return Err(attn_core::Error::invalid("o", "0.75 in every element", x).into());
        }
        let line = json!({ "machine": Machine::detect(&engine), "kernel": plan.kernel, "shape": shape,
            "causal": causal, "extra_peak_bytes": got.0, "plan_workspace_bytes": plan.workspace.0,
            "limit_bytes": args.limit_mib << 20 });
        writeln!(out, "{line}")?;
        let expected = Bytes(args.limit_mib << 20);
        if got > expected {
            return Err(MemoryError::Exceeded { expected, got });
        }
    }
    Ok(())
}

/// Sets the peak to the present resident size and returns that.
fn reset_watermark() -> io::Result<Bytes> {
    std::fs::write("/proc/self/clear_refs", "5")?;
    status("VmRSS:")
}

/// A field of `/proc/self/status`, which is in KiB.
fn status(field: &str) -> io::Result<Bytes> {
    let text = std::fs::read_to_string("/proc/self/status")?;
    let value = text.lines().find_map(|line| line.strip_prefix(field));
    let kib = value.and_then(|v| v.trim().trim_end_matches(" kB").parse::<u64>().ok());
    kib.map(|kib| Bytes(kib << 10)).ok_or_else(|| io::Error::other(format!("no {field} in status")))
}
