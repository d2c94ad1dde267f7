//! `attn-bench step-bench`: a decode step whose new keys are stored by a launch of their own, and by the one that attends.
//!
//! The invariant: both ways are given the same cache, tables and new rows, and leave the same bits in output and cache
//! before either is timed, by the worker's method ([`super::clock`]).

use attn_core::{
    CacheLayout, DType, KvStorage, PageOrder, Problem, ProblemSpec, Strided, ValueStorage,
};
use attn_kernels::Error;
use attn_kernels::cuda::{
    AppendKv, CacheMut, DeviceBuffer, DeviceTensor, DeviceTensorMut, DeviceView, Inputs, KvTensors,
    Outputs, Pages, Workspace,
};
use serde_json::{Value, json};

use super::clock::{Clock, Pace};
use super::normals::Normals;
use super::setup::{Planner, at, normal, rotations, shuffled_pages};
use super::{WorkerError, say};
use crate::cascade_bench::parse_heads;
use crate::device::Gpu;

const PAGE: usize = 16;
const DTYPE: DType = DType::BF16;

/// Options of `attn-bench step-bench`.
#[derive(Debug, Clone, clap::Args)]
#[command(
    after_help = "Measuring aids, from the environment, as the worker's: PEERS_REST, PEERS_TARGET_MS, ATTN_KERNEL, \
ATTN_SPLITS."
)]
pub(crate) struct Args {
    /// Query heads, KV heads and head dim; several are measured one after the other.
    #[arg(long, value_delimiter = ',', default_values_t = ["32.8.128".to_owned(), "16.1.128".to_owned()])]
    heads: Vec<String>,
    /// Sequences.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 8, 32, 128])]
    batch: Vec<usize>,
    /// Keys of each sequence, the new ones included.
    #[arg(long, value_delimiter = ',', default_values_t = [1024, 8192])]
    keys: Vec<usize>,
    /// Query rows of each sequence, each with a new key.
    #[arg(long, default_value_t = 1)]
    rows: usize,
}

/// Times every combination, a JSON line each.
///
/// # Errors
/// No device, options that make no sense, and ways that do not agree.
pub(crate) fn run(args: &Args) -> Result<(), WorkerError> {
    let gpu = Gpu::open()?;
    let planner = Planner::from_env(&gpu).map_err(WorkerError::Aid)?;
    for text in &args.heads {
        let [q, kv, dim] =
            parse_heads(text).map_err(|error| WorkerError::Aid(error.to_string()))?;
        for &batch in &args.batch {
            for &keys in &args.keys {
                let shape = Shape { heads: [q, kv], dim, batch, keys, rows: args.rows };
                let line = measure(&gpu, &planner, shape).map_err(WorkerError::Aid)?;
                say(&line)?;
            }
        }
    }
    Ok(())
}

/// One step.
#[derive(Debug, Clone, Copy)]
struct Shape {
    heads: [usize; 2],
    dim: usize,
    batch: usize,
    keys: usize,
    rows: usize,
}

impl Shape {
    const fn columns(&self) -> usize {
        self.keys.div_ceil(PAGE)
    }

    const fn pages(&self) -> usize {
        self.batch * self.columns()
    }

    /// Elements of the keys of a cache.
    const fn elements(&self) -> usize {
        self.pages() * PAGE * self.heads[1] * self.dim
    }

    /// The cache of a rotation, in memory of all of them.
    fn place(&self, field: &'static str, rotation: usize) -> Result<Strided, attn_core::Error> {
        let shape = [self.pages(), PAGE, self.heads[1], self.dim];
        at(field, &shape, rotation * self.elements())
    }

    fn layout(&self) -> Result<CacheLayout, attn_core::Error> {
        let value = ValueStorage::Separate(self.dim);
        CacheLayout::contiguous(DTYPE, PageOrder::Nhd, PAGE, self.heads[1], self.dim, value)
    }

    fn problem(&self) -> Result<Problem, attn_core::Error> {
        let (q, k) = (vec![self.rows; self.batch], vec![self.keys; self.batch]);
        let mut spec = ProblemSpec::new(DTYPE, self.heads[0], self.heads[1], self.dim, &q, &k);
        (spec.causal, spec.kv) = (true, KvStorage::Paged(self.layout()?));
        Problem::new(spec)
    }

    /// Where the new rows go.
    fn slots(&self, table: &[i32]) -> Vec<i64> {
        let tokens = self.keys - self.rows..self.keys;
        let slot = |sequence: usize, token: usize| {
            let page = table[sequence * self.columns() + token / PAGE];
            i64::from(page) * PAGE as i64 + (token % PAGE) as i64
        };
        (0..self.batch).flat_map(|n| tokens.clone().map(move |token| slot(n, token))).collect()
    }
}

/// Memory of a step: what is read alone, and caches to rotate through.
#[derive(Debug)]
struct Tensors {
    rest: Rest,
    cache: [DeviceBuffer; 2],
    rotations: usize,
}

impl Tensors {
    fn new(gpu: &Gpu, shape: Shape) -> Result<Self, Error> {
        let mut normals = Normals::new();
        let rotations = rotations((2 * shape.elements() * DTYPE.size()) as f64);
        let rows = shape.batch * shape.rows;
        let mut some = |elements: usize| normal(gpu, &mut normals, DTYPE, elements);
        let new = rows * shape.heads[1] * shape.dim;
        let table = shuffled_pages(shape.pages());
        let slots = shape.slots(&table);
        let rest = Rest {
            layout: shape.layout()?,
            q: some(rows * shape.heads[0] * shape.dim)?,
            new: [some(new)?, some(new)?],
            table: DeviceBuffer::from_host(&gpu.stream, &table)?,
            slots: DeviceBuffer::from_host(&gpu.stream, &slots)?,
            shape,
        };
        let cache = [some(rotations * shape.elements())?, some(rotations * shape.elements())?];
        Ok(Self { rest, cache, rotations })
    }

    /// The call over the cache of a rotation.
    fn inputs(&self, rotation: usize) -> Result<Inputs<'_>, Error> {
        let Self { rest, cache: [k, v], .. } = self;
        let place = |field, buffer| {
            DeviceTensor::new(field, buffer, DTYPE, rest.shape.place(field, rotation)?)
        };
        let kv = KvTensors::Paged {
            k_cache: place("k_cache", k)?,
            v_cache: place("v_cache", v)?,
            block_table: rest.block_table()?,
            stamp: rest.layout.id(),
        };
        Ok(Inputs::new(rest.q()?, kv))
    }

    /// The cache of a rotation, to be written, beside the rest.
    fn writable(&mut self, rotation: usize) -> Result<(&Rest, CacheMut<'_>), Error> {
        let Self { rest, cache: [k, v], .. } = self;
        let place = |field, buffer| {
            DeviceTensorMut::new(field, buffer, DTYPE, rest.shape.place(field, rotation)?)
        };
        let cache = CacheMut {
            k_cache: place("k_cache", k)?,
            v_cache: Some(place("v_cache", v)?),
            stamp: rest.layout.id(),
        };
        Ok((rest, cache))
    }
}

/// What a step reads beside the cache.
#[derive(Debug)]
struct Rest {
    shape: Shape,
    layout: CacheLayout,
    q: DeviceBuffer,
    /// New keys and values.
    new: [DeviceBuffer; 2],
    table: DeviceBuffer,
    slots: DeviceBuffer,
}

impl Rest {
    fn rows<'a>(
        &self,
        field: &'static str,
        buffer: &'a DeviceBuffer,
        heads: usize,
    ) -> Result<DeviceTensor<'a>, Error> {
        let shape = [self.shape.batch * self.shape.rows, heads, self.shape.dim];
        DeviceTensor::contiguous(field, buffer, DTYPE, &shape)
    }

    fn q(&self) -> Result<DeviceTensor<'_>, Error> {
        self.rows("q", &self.q, self.shape.heads[0])
    }

    fn new_rows(&self) -> Result<[DeviceTensor<'_>; 2], Error> {
        let heads = self.shape.heads[1];
        Ok([self.rows("k", &self.new[0], heads)?, self.rows("v", &self.new[1], heads)?])
    }

    fn append(&self) -> Result<AppendKv<'_>, Error> {
        let [k, v] = self.new_rows()?;
        let slots = self.shape.batch * self.shape.rows;
        Ok(AppendKv {
            k,
            v: Some(v),
            slots: DeviceView::contiguous("slots", &self.slots, &[slots])?,
            rotary: None,
            k_scale: None,
            v_scale: None,
            sequences: None,
        })
    }

    fn call(&self) -> Result<Inputs<'_>, Error> {
        let [k, v] = self.new_rows()?;
        Ok(Inputs::dense(self.q()?, k, v))
    }

    fn block_table(&self) -> Result<DeviceView<'_, i32>, Error> {
        let shape = [self.shape.batch, self.shape.columns()];
        DeviceView::contiguous("block_table", &self.table, &shape)
    }
}

/// What a step leaves, as bits: the output and the first cache.
type Left = [Vec<u16>; 3];

fn measure(gpu: &Gpu, planner: &Planner, shape: Shape) -> Result<Value, String> {
    let text = |error: Error| error.to_string();
    let Gpu { engine, stream } = gpu;
    if shape.rows == 0 || shape.keys < shape.rows || shape.batch == 0 {
        return Err("rows: expected at least 1 and no more than keys".to_owned());
    }
    let plan = planner.plan(&shape.problem().map_err(|error| error.to_string())?)?;
    let mut tensors = Tensors::new(gpu, shape).map_err(text)?;
    let o_shape = [shape.batch * shape.rows, shape.heads[0], shape.dim];
    let o_elements = o_shape.iter().product::<usize>();
    let mut buffer = engine.alloc(o_elements * DTYPE.size()).map_err(text)?;
    let mut workspace = Workspace::new();

    let attend = |tensors: &Tensors, n: usize, o: &mut DeviceBuffer, w: &mut Workspace| {
        let o = DeviceTensorMut::contiguous("o", o, DTYPE, &o_shape)?;
        engine.forward(&plan, &tensors.inputs(n)?, &mut Outputs { o, lse: None }, w, stream)
    };
    let apart = |tensors: &mut Tensors, n: usize, o: &mut DeviceBuffer, w: &mut Workspace| {
        let (rest, mut cache) = tensors.writable(n)?;
        engine.append_kv(&rest.layout, &rest.append()?, &mut cache, stream)?;
        attend(tensors, n, o, w)
    };
    let fused = |tensors: &mut Tensors, n: usize, o: &mut DeviceBuffer, w: &mut Workspace| {
        let (rest, cache) = tensors.writable(n)?;
        let mut pages = Pages { cache, block_table: rest.block_table()? };
        let o = DeviceTensorMut::contiguous("o", o, DTYPE, &o_shape)?;
        let mut outputs = Outputs { o, lse: None };
        engine.forward_append(&plan, &rest.call()?, &mut pages, &mut outputs, w, stream)
    };

    let left = |tensors: &Tensors, o: &DeviceBuffer| -> Result<Left, Error> {
        let [k, v] = &tensors.cache;
        let cache = shape.elements();
        Ok([o.to_host(stream, o_elements)?, k.to_host(stream, cache)?, v.to_host(stream, cache)?])
    };
    let before = left(&tensors, &buffer).map_err(text)?;
    let mut ways = Vec::new();
    for is_fused in [false, true] {
        for (cache, before) in tensors.cache.iter_mut().zip(&before[1..]) {
            cache.copy_from_host(stream, before).map_err(text)?;
        }
        buffer.fill(stream, 0xFF).map_err(text)?;
        let ran = if is_fused {
            fused(&mut tensors, 0, &mut buffer, &mut workspace)
        } else {
            apart(&mut tensors, 0, &mut buffer, &mut workspace)
        };
        ran.map_err(text)?;
        ways.push(left(&tensors, &buffer).map_err(text)?);
    }
    if ways[0] != ways[1] || ways[0][1] == before[1] {
        return Err("the two ways left other bits, or no new ones".to_owned());
    }

    let clock = Clock { engine, stream, pace: Pace::from_env() };
    let rotations = tensors.rotations;
    let time = |call: &mut dyn FnMut(usize) -> Result<(), Error>| {
        clock.bench(call, rotations, false).map(|times| times.ms * 1e3).map_err(text)
    };
    let attend_us = time(&mut |n| attend(&tensors, n, &mut buffer, &mut workspace))?;
    let apart_us = time(&mut |n| apart(&mut tensors, n, &mut buffer, &mut workspace))?;
    let fused_us = time(&mut |n| fused(&mut tensors, n, &mut buffer, &mut workspace))?;
    Ok(json!({
        "bench": "step",
        "gpu": engine.caps().cuda.map(|cuda| cuda.name),
        "driver": crate::machine::driver(),
        "sources": attn_kernels::source::fingerprint(),
        "heads": format!("{}.{}.{}", shape.heads[0], shape.heads[1], shape.dim),
        "batch": shape.batch,
        "keys": shape.keys,
        "rows": shape.rows,
        "page": PAGE,
        "kernel": plan.kernel,
        "split": plan.split.to_string(),
        "attend_us": attend_us,
        "append_then_attend_us": apart_us,
        "fused_us": fused_us,
    }))
}
