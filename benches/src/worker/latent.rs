//! `attn-bench latent-bench`: one decode step over a latent cache, timed.
//!
//! The invariant: the method is the worker's ([`super::clock`]): an output that agreed with the naive kernel's on sampled
//! sequences, shuffled pages, buffers that together outlast the device's cache, replays of a captured graph. A latent
//! cache has no place in the worker's protocol, whose peers have none.

use attn_core::{
    CacheLayout, DType, KvStorage, PageOrder, Plan, Problem, ProblemSpec, Strided, ValueStorage,
};
use attn_kernels::Error;
use attn_kernels::cuda::{
    DeviceBuffer, DeviceTensor, DeviceTensorMut, DeviceView, Inputs, KvTensors, Outputs, Workspace,
};
use half::{bf16, f16};
use serde_json::{Value, json};

use super::check::{LIMIT, RelativeError};
use super::clock::{Clock, Pace};
use super::normals::Normals;
use super::setup::{Planner, at, normal, rotations, shuffled_pages};
use super::{WorkerError, merge, say};
use crate::device::Gpu;

/// Elements of a cached row, and those of it that are the value.
const DIM: usize = 576;
const VALUE_DIM: usize = 512;

/// Options of `attn-bench latent-bench`.
#[derive(Debug, Clone, clap::Args)]
#[command(
    after_help = "Measuring aids, from the environment, as the worker's: PEERS_REST, PEERS_TARGET_MS, ATTN_KERNEL, \
ATTN_SPLITS."
)]
pub(crate) struct Args {
    /// Query heads, all on one latent head.
    #[arg(long, default_value_t = 128)]
    heads: usize,
    /// Sequences.
    #[arg(long, default_value_t = 32)]
    batch: usize,
    /// Keys of each sequence.
    #[arg(long, default_value_t = 4096)]
    keys: usize,
    /// Query rows of each sequence, causal at the end.
    #[arg(long, default_value_t = 1)]
    rows: usize,
    /// Tokens of a page.
    #[arg(long, default_value_t = 64)]
    page: usize,
    /// f16 in place of bf16.
    #[arg(long)]
    f16: bool,
}

impl Args {
    const fn dtype(&self) -> DType {
        if self.f16 { DType::F16 } else { DType::BF16 }
    }

    /// Pages of a sequence.
    const fn columns(&self) -> usize {
        self.keys.div_ceil(self.page)
    }

    fn layout(&self) -> Result<CacheLayout, attn_core::Error> {
        let value = ValueStorage::PrefixOfKey(VALUE_DIM);
        CacheLayout::contiguous(self.dtype(), PageOrder::Nhd, self.page, 1, DIM, value)
    }

    /// The call, or the same of `batch` of its sequences.
    fn spec(&self, batch: usize) -> Result<ProblemSpec, attn_core::Error> {
        let (q, k) = (vec![self.rows; batch], vec![self.keys; batch]);
        let mut spec = ProblemSpec::new(self.dtype(), self.heads, 1, DIM, &q, &k);
        spec.value_dim = VALUE_DIM;
        spec.causal = true;
        spec.kv = KvStorage::Paged(self.layout()?);
        Ok(spec)
    }

    /// Bytes of latent rows that a call has to read.
    fn bytes(&self) -> f64 {
        (self.batch * self.keys * DIM * self.dtype().size()) as f64
    }

    /// Products of visible pairs of a row and a key, two operations each.
    fn flops(&self) -> f64 {
        let pairs: usize =
            (0..self.rows).map(|row| (self.keys - row.min(self.keys)) * self.heads).sum();
        (2 * self.batch * pairs * (DIM + VALUE_DIM)) as f64
    }
}

/// Times one step and prints a JSON line.
///
/// # Errors
/// No device, a call that it refuses, or an output that is wrong: a wrong kernel is not timed.
pub(crate) fn run(args: &Args) -> Result<(), WorkerError> {
    let gpu = Gpu::open()?;
    let planner = Planner::from_env(&gpu).map_err(WorkerError::Aid)?;
    let line = measure(args, &gpu, &planner).map_err(WorkerError::Aid)?;
    Ok(say(&line)?)
}

fn measure(args: &Args, gpu: &Gpu, planner: &Planner) -> Result<Value, String> {
    let text = |error: Error| error.to_string();
    let core = |error: attn_core::Error| error.to_string();
    if args.page == 0 || args.keys == 0 || args.batch == 0 {
        return Err("batch, keys and page: expected at least 1 each".to_owned());
    }
    let problem = Problem::new(args.spec(args.batch).map_err(core)?).map_err(core)?;
    let plan = planner.plan(&problem)?;
    let tensors = Tensors::new(args, gpu).map_err(text)?;
    let shape = [args.batch * args.rows, args.heads, VALUE_DIM];
    let mut buffer =
        gpu.engine.alloc(shape.iter().product::<usize>() * args.dtype().size()).map_err(text)?;
    // NaN: what is not written shows in the check.
    buffer.fill(&gpu.stream, 0xFF).map_err(text)?;
    let mut workspace = Workspace::new();
    {
        let inputs = tensors.inputs(args, 0, None).map_err(text)?;
        let o = DeviceTensorMut::contiguous("o", &mut buffer, args.dtype(), &shape);
        let mut outputs = Outputs { o: o.map_err(text)?, lse: None };
        gpu.engine
            .forward(&plan, &inputs, &mut outputs, &mut workspace, &gpu.stream)
            .map_err(text)?;
    }
    let rel_err = check(args, gpu, planner, &tensors, &buffer)?;
    let inputs: Result<Vec<_>, Error> =
        (0..tensors.rotations).map(|rotation| tensors.inputs(args, rotation, None)).collect();
    let inputs = inputs.map_err(text)?;
    let o = DeviceTensorMut::contiguous("o", &mut buffer, args.dtype(), &shape);
    let mut outputs = Outputs { o: o.map_err(text)?, lse: None };
    let mut call =
        |n: usize| gpu.engine.forward(&plan, &inputs[n], &mut outputs, &mut workspace, &gpu.stream);
    let clock = Clock { engine: &gpu.engine, stream: &gpu.stream, pace: Pace::from_env() };
    let times = clock.bench(&mut call, tensors.rotations, false).map_err(text)?;
    let ms = times.ms;
    let mut line = describe(args, gpu, &plan);
    line["rotations"] = tensors.rotations.into();
    line["rel_err"] = rel_err.into();
    line["us"] = (ms * 1e3).into();
    line["gbps"] = (args.bytes() / ms / 1e6).into();
    line["tflops"] = (args.flops() / ms / 1e9).into();
    line["temp_bytes"] = workspace.bytes().into();
    merge(&mut line, json!(times));
    Ok(line)
}

fn describe(args: &Args, gpu: &Gpu, plan: &Plan) -> Value {
    json!({
        "bench": "latent",
        "gpu": gpu.engine.caps().cuda.map(|cuda| cuda.name),
        "driver": crate::machine::driver(),
        "sources": attn_kernels::source::fingerprint(),
        "dtype": args.dtype().name(),
        "heads": args.heads,
        "batch": args.batch,
        "keys": args.keys,
        "rows": args.rows,
        "page": args.page,
        "kernel": plan.kernel,
        "tile": format!("{}x{}", plan.tile.q, plan.tile.kv),
        "split": plan.split.to_string(),
    })
}

/// What a step reads: queries, caches to rotate through, and one block table for all of them.
#[derive(Debug)]
struct Tensors {
    q: DeviceBuffer,
    cache: DeviceBuffer,
    table: DeviceBuffer,
    rotations: usize,
}

impl Tensors {
    fn new(args: &Args, gpu: &Gpu) -> Result<Self, Error> {
        let mut normals = Normals::new();
        let rotations = rotations(args.bytes());
        let rows = args.batch * args.columns() * args.page;
        let q = args.batch * args.rows * args.heads * DIM;
        let ids = shuffled_pages(args.batch * args.columns());
        Ok(Self {
            q: normal(gpu, &mut normals, args.dtype(), q)?,
            cache: normal(gpu, &mut normals, args.dtype(), rotations * rows * DIM)?,
            table: DeviceBuffer::from_host(&gpu.stream, &ids)?,
            rotations,
        })
    }

    /// The inputs over a cache of the rotation, of all sequences or of one.
    fn inputs(
        &self,
        args: &Args,
        rotation: usize,
        sequence: Option<usize>,
    ) -> Result<Inputs<'_>, Error> {
        let (columns, pages) = (args.columns(), args.batch * args.columns());
        let (first, batch) = sequence.map_or((0, args.batch), |sequence| (sequence, 1));
        let start = rotation * pages * args.page * DIM;
        let cache = |field, dim: usize| {
            let strides = [args.page * DIM, DIM, DIM, 1].map(|stride| stride as i64);
            let layout = Strided::new(field, &[pages, args.page, 1, dim], &strides, start)?;
            DeviceTensor::new(field, &self.cache, args.dtype(), layout)
        };
        let shape = [batch * args.rows, args.heads, DIM];
        let q = at("q", &shape, first * args.rows * args.heads * DIM)?;
        let table = at("block_table", &[batch, columns], first * columns)?;
        let kv = KvTensors::Paged {
            k_cache: cache("k_cache", DIM)?,
            v_cache: cache("v_cache", VALUE_DIM)?,
            block_table: DeviceView::new("block_table", &self.table, table)?,
            stamp: args.layout()?.id(),
        };
        Ok(Inputs::new(DeviceTensor::new("q", &self.q, args.dtype(), q)?, kv))
    }
}

/// The relative error of the first, the middle and the last sequence against the naive kernel's.
fn check(
    args: &Args,
    gpu: &Gpu,
    planner: &Planner,
    tensors: &Tensors,
    output: &DeviceBuffer,
) -> Result<f64, String> {
    let text = |error: Error| error.to_string();
    let shape = [args.rows, args.heads, VALUE_DIM];
    let elements: usize = shape.iter().product();
    let mut sequences = vec![0, args.batch / 2, args.batch - 1];
    sequences.dedup();
    let mut error = RelativeError::default();
    for sequence in sequences {
        let plan = planner.oracle(args.spec(1).map_err(|error| error.to_string())?)?;
        let mut buffer = gpu.engine.alloc(elements * args.dtype().size()).map_err(text)?;
        let inputs = tensors.inputs(args, 0, Some(sequence)).map_err(text)?;
        let o = DeviceTensorMut::contiguous("o", &mut buffer, args.dtype(), &shape);
        let mut outputs = Outputs { o: o.map_err(text)?, lse: None };
        let workspace = &mut Workspace::new();
        gpu.engine.forward(&plan, &inputs, &mut outputs, workspace, &gpu.stream).map_err(text)?;
        let want = values(args, gpu, &buffer, 0, elements).map_err(text)?;
        let got = values(args, gpu, output, sequence * elements, elements).map_err(text)?;
        error.add_all(&got, &want);
    }
    error.within(LIMIT)
}

/// Elements of an output, widened.
fn values(
    args: &Args,
    gpu: &Gpu,
    buffer: &DeviceBuffer,
    start: usize,
    count: usize,
) -> Result<Vec<f64>, Error> {
    Ok(if args.f16 {
        let narrow: Vec<f16> = buffer.to_host_at(&gpu.stream, start, count)?;
        narrow.into_iter().map(f64::from).collect()
    } else {
        let narrow: Vec<bf16> = buffer.to_host_at(&gpu.stream, start, count)?;
        narrow.into_iter().map(f64::from).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const ARGS: Args = Args { heads: 128, batch: 32, keys: 4096, rows: 1, page: 64, f16: false };

    #[test]
    fn bytes_and_operations_are_counted_once() {
        assert_eq!(ARGS.bytes(), 32.0 * 4096.0 * 1152.0);
        assert_eq!(ARGS.flops(), 2.0 * 32.0 * 4096.0 * 128.0 * 1088.0);
        // The first of two rows does not see the last key.
        let two = Args { rows: 2, batch: 1, keys: 10, heads: 1, ..ARGS };
        assert_eq!(two.flops(), 2.0 * 19.0 * 1088.0);
    }

    #[test]
    fn step_is_taken_by_the_latent_kernel_of_a_hopper() {
        let caps = crate::device::tests::hopper();
        for (heads, rows, page) in [(16, 1, 1), (128, 1, 64), (128, 4, 16)] {
            let args = Args { heads, rows, page, ..ARGS };
            let problem = Problem::new(args.spec(args.batch).unwrap()).unwrap();
            let plan = attn_select::choose(&problem, &caps, Gpu::catalogue()).unwrap();
            assert_eq!(plan.kernel, "cuda_latent_sm90a", "{}", attn_select::explain(&plan));
            assert!(attn_kernels::cuda::instances(&plan).is_ok());
        }
    }
}
