//! `attn-bench cascade-bench`: cascades over shared prefixes beside plain decode over the same tables, to measure where the
//! one overtakes the other.
//!
//! The invariant: both contestants read the same cache through tables that name the same pages, in the same graph-replayed
//! rotation through more bytes than the device's cache holds; a row is written only after their outputs agreed. That
//! sequences of a call find a shared prefix in that cache is the plain call's right, and is not rotated away.

use std::io;

use attn_core::{
    CacheLayout, Cascade, CascadePlan, DType, KvStorage, PageOrder, Plan, Problem, ProblemSpec,
    SharedPrefix, Strided, ValueStorage, View,
};
use attn_kernels::Error;
use attn_kernels::cuda::{
    CascadeTables, CascadeWorkspace, DeviceBuffer, DeviceTensor, DeviceTensorMut, DeviceView,
    DeviceViewMut, Inputs, KvTensors, Outputs, Workspace,
};
use half::bf16;
use serde_json::{Value, json};

use crate::device::Gpu;
use crate::worker::check::{LIMIT, RelativeError};
use crate::worker::clock::{Clock, Pace};
use crate::worker::normals::Normals;
use crate::worker::setup::{normal, shuffled_pages};
use crate::worker::{merge, say};

/// Bytes of keys and values that outlast the device's cache.
const ROTATED_BYTES: usize = 256 << 20;

/// Options of `attn-bench cascade-bench`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Measuring aids, from the environment: PEERS_REST (idle seconds before timing), \
PEERS_TARGET_MS (timed milliseconds)."
)]
pub(crate) struct Args {
    /// Tokens of a shared prefix.
    #[arg(long, value_delimiter = ',', default_values_t = [1024, 8192, 32768])]
    prefix: Vec<usize>,
    /// Sequences that share a prefix.
    #[arg(long, value_delimiter = ',', default_values_t = [2, 4, 8, 16, 32, 64])]
    group: Vec<usize>,
    /// Groups of a batch, each with a prefix of its own.
    #[arg(long, default_value_t = 1)]
    groups: usize,
    /// Tokens of each sequence after its prefix, its rows included.
    #[arg(long, default_value_t = 128)]
    suffix: usize,
    /// Query rows of each sequence.
    #[arg(long, default_value_t = 1)]
    rows: usize,
    /// Query heads, KV heads and head dim.
    #[arg(long, default_value = "32.8.128")]
    heads: String,
    /// Tokens of a page.
    #[arg(long, default_value_t = 16)]
    page: usize,
    /// Most query rows of a part of a prefix, 0 for all in one, in place of what selection says; several are measured one
    /// after the other.
    #[arg(long, value_delimiter = ',')]
    part_rows: Vec<usize>,
}

/// Why there is a row less.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BenchError {
    /// The device.
    #[error(transparent)]
    Engine(#[from] Error),
    /// A shape that makes no sense.
    #[error(transparent)]
    Call(#[from] attn_core::Error),
    /// Selection.
    #[error(transparent)]
    Select(#[from] attn_select::Error),
    /// The rows.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// An option.
    #[error("heads: expected query heads, KV heads and head dim as in 32.8.128, got {0}")]
    Heads(String),
    /// There is no cascade.
    #[error("{0}")]
    NoCascade(attn_select::NoCascade),
    /// Outputs that differ.
    #[error("relative error: expected at most {LIMIT}, got {0:.3e}; a wrong kernel is not timed")]
    Wrong(f64),
}

/// Times every combination, a JSON line each.
///
/// # Errors
/// No device, options that make no sense, and the last combination that failed, whose line says so.
pub(crate) fn run(args: &Args) -> Result<(), BenchError> {
    let gpu = Gpu::open()?;
    let mut normals = Normals::new();
    let mut last = Ok(());
    for &prefix in &args.prefix {
        for &group in &args.group {
            let title = json!({ "prefix": prefix, "group": group, "groups": args.groups, "suffix": args.suffix,
                "rows": args.rows, "heads": args.heads, "page": args.page });
            match Bench::new(&gpu, &mut normals, args, (prefix, group)).and_then(|b| b.rows(args)) {
                Ok(lines) => {
                    for more in lines {
                        let mut line = title.clone();
                        merge(&mut line, more);
                        say(&line)?;
                    }
                }
                Err(error) => {
                    let mut line = title;
                    merge(&mut line, json!({ "error": error.to_string() }));
                    say(&line)?;
                    last = Err(error);
                }
            }
        }
    }
    last
}

/// Query heads, KV heads and a dimension, as in 32.8.128.
pub(crate) fn parse_heads(text: &str) -> Result<[usize; 3], BenchError> {
    let wrong = || BenchError::Heads(text.to_owned());
    let numbers: Result<Vec<usize>, _> = text.split('.').map(str::parse).collect();
    numbers.map_err(|_| wrong())?.try_into().map_err(|_| wrong())
}

/// The plain call of a combination, its cache, and its groups.
fn call(
    args: &Args,
    (prefix, group): (usize, usize),
) -> Result<(Problem, CacheLayout, Vec<SharedPrefix>), BenchError> {
    let [q_heads, kv_heads, dim] = parse_heads(&args.heads)?;
    let batch = group * args.groups;
    let (q_lens, kv_lens) = (vec![args.rows; batch], vec![prefix + args.suffix; batch]);
    let mut spec = ProblemSpec::new(DType::BF16, q_heads, kv_heads, dim, &q_lens, &kv_lens);
    let (order, value) = (PageOrder::Nhd, ValueStorage::Separate(dim));
    let layout = CacheLayout::contiguous(DType::BF16, order, args.page, kv_heads, dim, value)?;
    (spec.causal, spec.kv) = (true, KvStorage::Paged(layout.clone()));
    let shared = |n: usize| SharedPrefix { sequences: n * group..(n + 1) * group, tokens: prefix };
    Ok((Problem::new(spec)?, layout, (0..args.groups).map(shared).collect()))
}

/// A batch on the device.
struct Bench<'g> {
    gpu: &'g Gpu,
    problem: Problem,
    prefixes: Vec<SharedPrefix>,
    q: DeviceBuffer,
    k: DeviceBuffer,
    v: DeviceBuffer,
    /// The whole call's block table, on both sides.
    ids: Vec<i32>,
    table: DeviceBuffer,
    /// Pages of one rotation, and rotations.
    pages: usize,
    rotations: usize,
}

impl<'g> Bench<'g> {
    fn new(
        gpu: &'g Gpu,
        normals: &mut Normals,
        args: &Args,
        (prefix, group): (usize, usize),
    ) -> Result<Self, BenchError> {
        let (problem, layout, prefixes) = call(args, (prefix, group))?;
        let (ids, pages) = shared_table(&layout, prefix, args.suffix, (args.groups, group));
        let bytes = pages * layout.page_bytes();
        let rotations = ROTATED_BYTES.div_ceil(bytes.max(1)).clamp(1, 128);
        let row = problem.kv_heads() * problem.head_dim();
        let elements = pages * rotations * args.page * row;
        let queries = problem.lengths().total_q() * problem.q_heads() * problem.head_dim();
        Ok(Self {
            q: normal(gpu, normals, DType::BF16, queries)?,
            k: normal(gpu, normals, DType::BF16, elements)?,
            v: normal(gpu, normals, DType::BF16, elements)?,
            table: DeviceBuffer::from_host(&gpu.stream, &ids)?,
            gpu,
            problem,
            prefixes,
            ids,
            pages,
            rotations,
        })
    }

    /// A line for each way to cut the prefixes' rows.
    fn rows(&self, args: &Args) -> Result<Vec<Value>, BenchError> {
        let (caps, catalogue) = (self.gpu.engine.caps(), Gpu::catalogue());
        let planned = attn_select::plan_cascade(&self.problem, &self.prefixes, &caps, catalogue)?;
        let (chosen, reads) = planned.map_err(BenchError::NoCascade)?;
        let (least, pays) = attn_select::cascade_pays(reads, attn_core::Engine::Cuda);
        let plain = attn_select::choose(&self.problem, &caps, catalogue)?;
        let (want, plain_us, method) = self.plain(&plain)?;
        let mut plans = vec![chosen];
        if !args.part_rows.is_empty() {
            plans.clear();
        }
        for &rows in &args.part_rows {
            let rows = (rows > 0).then_some(rows);
            let cascade = Cascade::new(&self.problem, &self.prefixes, rows)?;
            let prefix = attn_select::choose(cascade.prefix(), &caps, catalogue)?;
            let suffix = attn_select::choose(cascade.suffix(), &caps, catalogue)?;
            plans.push(CascadePlan::new(cascade, prefix, suffix)?);
        }
        let mut lines = Vec::new();
        for plan in plans {
            let (rel_err, times) = self.cascade(&plan, &want)?;
            let [cascade_us, prefix_us, suffix_us] = times;
            lines.push(json!({
                "plain_us": plain_us,
                "cascade_us": cascade_us,
                "speedup": plain_us / cascade_us,
                "prefix_us": prefix_us,
                "suffix_us": suffix_us,
                "plain": named(&plain),
                "prefix_call": named(plan.prefix()),
                "suffix_call": named(plan.suffix()),
                "parts": plan.cascade().parts().len(),
                "part_rows": plan.cascade().prefix().lengths().longest_q(),
                "saved_mib": (reads.plain.0 - reads.cascade.0.min(reads.plain.0)) >> 20,
                "least_mib": least.0 >> 20,
                "rule_pays": pays,
                "rel_err": rel_err,
                "rotations": self.rotations,
                "method": method,
            }));
        }
        Ok(lines)
    }

    /// The inputs of a rotation.
    fn inputs(&self, rotation: usize) -> Result<Inputs<'_>, Error> {
        let problem = &self.problem;
        let KvStorage::Paged(layout) = problem.kv() else {
            return Err(attn_core::Error::invalid("kv", "a paged cache", "dense keys").into());
        };
        let (heads, dim) = (problem.kv_heads(), problem.head_dim());
        let place = |field, buffer| {
            let shape = [self.pages, layout.page_size(), heads, dim];
            let dense = Strided::contiguous(field, &shape)?;
            let at = Strided::new(field, &shape, dense.strides(), rotation * dense.len())?;
            DeviceTensor::new(field, buffer, DType::BF16, at)
        };
        let shape = [problem.lengths().total_q(), problem.q_heads(), dim];
        let batch = problem.lengths().batch();
        let kv = KvTensors::Paged {
            k_cache: place("k_cache", &self.k)?,
            v_cache: place("v_cache", &self.v)?,
            block_table: DeviceView::contiguous(
                "block_table",
                &self.table,
                &[batch, self.ids.len() / batch],
            )?,
            stamp: layout.id(),
        };
        Ok(Inputs::new(DeviceTensor::contiguous("q", &self.q, DType::BF16, &shape)?, kv))
    }

    fn all_inputs(&self) -> Result<Vec<Inputs<'_>>, Error> {
        (0..self.rotations).map(|rotation| self.inputs(rotation)).collect()
    }

    /// An output full of NaN.
    fn output(&self) -> Result<DeviceBuffer, Error> {
        let mut o = self.gpu.engine.alloc(self.elements() * DType::BF16.size())?;
        o.fill(&self.gpu.stream, 0xFF)?;
        Ok(o)
    }

    fn elements(&self) -> usize {
        self.problem.lengths().total_q() * self.problem.q_heads() * self.problem.value_dim()
    }

    fn tensor<'a>(&self, o: &'a mut DeviceBuffer) -> Result<DeviceTensorMut<'a>, Error> {
        let p = &self.problem;
        let shape = [p.lengths().total_q(), p.q_heads(), p.value_dim()];
        DeviceTensorMut::contiguous("o", o, DType::BF16, &shape)
    }

    fn clock(&self, pace: Pace) -> Clock<'_> {
        Clock { engine: &self.gpu.engine, stream: &self.gpu.stream, pace }
    }

    /// The outputs of the plain call over the first rotation, and its time in microseconds.
    fn plain(&self, plan: &Plan) -> Result<(Vec<bf16>, f64, &'static str), Error> {
        let Gpu { engine, stream } = self.gpu;
        let (inputs, mut workspace) = (self.all_inputs()?, Workspace::new());
        let mut buffer = self.output()?;
        let mut outputs = Outputs { o: self.tensor(&mut buffer)?, lse: None };
        engine.forward(plan, &inputs[0], &mut outputs, &mut workspace, stream)?;
        drop(outputs);
        let want = buffer.to_host(stream, self.elements())?;
        let mut outputs = Outputs { o: self.tensor(&mut buffer)?, lse: None };
        let mut call =
            |n: usize| engine.forward(plan, &inputs[n], &mut outputs, &mut workspace, stream);
        let times = self.clock(Pace::from_env()).bench(&mut call, self.rotations, false)?;
        Ok((want, times.ms * 1e3, times.method))
    }

    /// The relative error of a cascade over the first rotation, and the times of it, of its prefix call and of its suffix
    /// call, in microseconds.
    fn cascade(&self, plan: &CascadePlan, want: &[bf16]) -> Result<(f64, [f64; 3]), BenchError> {
        let Gpu { engine, stream } = self.gpu;
        let cascade = plan.cascade();
        let batch = self.problem.lengths().batch();
        let shapes =
            [[cascade.parts().len(), cascade.prefix_width()], [batch, cascade.suffix_width()]];
        let [mut prefix, mut suffix] = shapes.map(|[rows, width]| vec![-1; rows * width]);
        let whole = View::contiguous("block_table", &self.ids, &[batch, self.ids.len() / batch])?;
        cascade.write_tables(&whole, &mut prefix, &mut suffix)?;
        let (prefix, suffix) =
            (DeviceBuffer::from_host(stream, &prefix)?, DeviceBuffer::from_host(stream, &suffix)?);
        let tables = CascadeTables {
            prefix: DeviceView::contiguous("prefix table", &prefix, &shapes[0])?,
            suffix: DeviceView::contiguous("suffix table", &suffix, &shapes[1])?,
        };
        let (inputs, mut workspace) = (self.all_inputs()?, CascadeWorkspace::new());
        let mut buffer = self.output()?;
        let mut outputs = Outputs { o: self.tensor(&mut buffer)?, lse: None };
        engine.cascade(plan, &inputs[0], Some(&tables), &mut outputs, &mut workspace, stream)?;
        drop(outputs);
        let got: Vec<bf16> = buffer.to_host(stream, self.elements())?;
        let rel_err = relative_error(&got, want);
        if rel_err.is_nan() || rel_err > LIMIT {
            return Err(BenchError::Wrong(rel_err));
        }
        let clock = self.clock(Pace::from_env());
        let mut outputs = Outputs { o: self.tensor(&mut buffer)?, lse: None };
        let mut call = |n: usize| {
            engine.cascade(plan, &inputs[n], Some(&tables), &mut outputs, &mut workspace, stream)
        };
        let whole = clock.bench(&mut call, self.rotations, false)?.ms * 1e3;
        drop(outputs);

        let of_prefix = self.alone(plan.prefix(), &tables.prefix)?;
        let of_suffix = self.alone(plan.suffix(), &tables.suffix)?;
        Ok((rel_err, [whole, of_prefix, of_suffix]))
    }

    /// The time of one of a cascade's calls alone, with an LSE as in the cascade, in microseconds.
    fn alone(&self, plan: &Plan, table: &DeviceView<'_, i32>) -> Result<f64, Error> {
        let Gpu { engine, stream } = self.gpu;
        let p = &self.problem;
        let shape = [p.lengths().total_q(), p.q_heads()];
        let inputs: Vec<_> =
            self.all_inputs()?.into_iter().map(|inputs| with_table(inputs, table)).collect();
        let mut buffer = self.output()?;
        let mut lse = engine.alloc(shape[0] * shape[1] * size_of::<f32>())?;
        let mut outputs = Outputs {
            o: self.tensor(&mut buffer)?,
            lse: Some(DeviceViewMut::contiguous("lse", &mut lse, &shape)?),
        };
        let mut workspace = Workspace::new();
        let mut call =
            |n: usize| engine.forward(plan, &inputs[n], &mut outputs, &mut workspace, stream);
        let times = self.clock(Pace::from_env()).bench(&mut call, self.rotations, false)?;
        Ok(times.ms * 1e3)
    }
}

/// The inputs with another block table.
fn with_table<'a>(mut inputs: Inputs<'a>, table: &DeviceView<'a, i32>) -> Inputs<'a> {
    if let KvTensors::Paged { block_table, .. } = &mut inputs.kv {
        *block_table = table.clone();
    }
    inputs
}

fn named(plan: &Plan) -> String {
    format!("{} {}x{}, {}", plan.kernel, plan.tile.q, plan.tile.kv, plan.split)
}

/// The relative error over all elements.
fn relative_error(got: &[bf16], want: &[bf16]) -> f64 {
    let mut error = RelativeError::default();
    error.add_all(got, want);
    error.value()
}

/// A block table of groups that share their first pages, in random order, and how many pages there are.
fn shared_table(
    layout: &CacheLayout,
    prefix: usize,
    suffix: usize,
    (groups, group): (usize, usize),
) -> (Vec<i32>, usize) {
    let (width, shared) = (layout.pages_for(prefix + suffix), prefix / layout.page_size());
    let own = width - shared;
    let pages = groups * (shared + group * own);
    let mut next = shuffled_pages(pages).into_iter();
    let mut ids = Vec::with_capacity(groups * group * width);
    for _ in 0..groups {
        let common: Vec<i32> = next.by_ref().take(shared).collect();
        for _ in 0..group {
            ids.extend_from_slice(&common);
            ids.extend(next.by_ref().take(own));
        }
    }
    (ids, pages)
}

#[cfg(test)]
mod tests {
    use attn_core::Split;

    use super::*;

    #[test]
    fn table_shares_the_first_pages_of_a_group_and_no_others() {
        let value = ValueStorage::Separate(64);
        let layout =
            CacheLayout::contiguous(DType::BF16, PageOrder::Nhd, 16, 2, 64, value).unwrap();
        let (ids, pages) = shared_table(&layout, 64, 17, (2, 3));
        assert_eq!((ids.len(), pages), (6 * 6, 2 * (4 + 3 * 2)));
        let row = |n: usize| &ids[n * 6..(n + 1) * 6];
        assert_eq!(row(0)[..4], row(2)[..4]);
        assert_ne!(row(0)[..4], row(3)[..4]);
        let mut all: Vec<_> = ids.clone();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), pages);
    }

    #[test]
    fn every_default_combination_is_planned_on_a_hopper() {
        #[derive(clap::Parser)]
        struct Line {
            #[command(flatten)]
            args: Args,
        }
        let args = <Line as clap::Parser>::parse_from(["cascade-bench"]).args;
        let caps = crate::device::tests::hopper();
        for &prefix in &args.prefix {
            for &group in &args.group {
                let (problem, _, prefixes) = call(&args, (prefix, group)).unwrap();
                let planned =
                    attn_select::plan_cascade(&problem, &prefixes, &caps, Gpu::catalogue());
                let (plan, reads) = planned.unwrap().unwrap();
                assert!(reads.cascade < reads.plain, "{prefix} x {group}");
                // Of so few rows a prefill kernel leaves most of the device idle, unless it divides their keys.
                let rows = plan.cascade().prefix().lengths().longest_q();
                assert!(rows <= 16 || plan.prefix().split != Split::Whole, "{prefix} x {group}");
            }
        }
    }

    #[test]
    fn heads_are_three_numbers() {
        assert_eq!(parse_heads("32.8.128").unwrap(), [32, 8, 128]);
        assert!(parse_heads("32.8").is_err() && parse_heads("a.b.c.d").is_err());
        assert!(parse_heads("32.x.8.128").is_err());
    }

    #[test]
    fn relative_error_is_that_of_all_elements_and_sees_nan() {
        let one = [bf16::ONE; 4];
        assert_eq!(relative_error(&one, &one), 0.0);
        assert!(relative_error(&[bf16::NAN; 4], &one).is_nan());
    }
}
