//! A case made ready: its problem, its plan, and random tensors on the device.
//!
//! The invariant: the problem is the one that the peers are given. Pages are shuffled, decode rotates through so many
//! caches that none is found in the device's cache, and what is timed is the engine's own entry, with nothing of the
//! selector's or the driver's left out that a caller would pay at every call.

use attn_core::{
    BlockSizes, CacheLayout, DType, DeviceCaps, KernelDesc, KvStorage, PageOrder, Plan, Problem,
    ProblemSpec, Strided, Tile, ValueStorage,
};
use attn_kernels::Error;
use attn_kernels::cuda::{self, DeviceBuffer, DeviceTensor, DeviceTensorMut, DeviceView};
use attn_reference::random::Random;
use half::f16;

use super::normals::{Normals, in_e4m3};
use super::request::Heads;
use super::workload::{BLOCK, BLOCKS, block_table};
use crate::device::Gpu;

/// The type of every tensor of the protocol's cases but those of fp8.
const DTYPE: DType = DType::BF16;

/// Bytes of keys and values that outlast the device's cache.
const ROTATED_BYTES: f64 = 256e6;

/// Most sets of buffers to rotate through.
const MAX_ROTATIONS: usize = 512;

/// Elements of one tensor of the pool: what the peers take.
const POOL: usize = 32 * 32768 * 32 * 128;

/// What a case asks, before it has tensors.
#[derive(Debug, Clone)]
pub(super) struct Question {
    pub(super) spec: ProblemSpec,
    /// Tokens of a page, for a paged cache.
    pub(super) page_size: Option<usize>,
    /// Keys and values lie in the pool; with the bytes that say how often they fit the device's cache.
    pub(super) pooled: Option<f64>,
}

impl Question {
    /// A call over dense keys.
    pub(super) fn dense(heads: Heads, q_lens: &[usize], kv_lens: &[usize], causal: bool) -> Self {
        let Heads { q, kv, dim } = heads;
        let mut spec = ProblemSpec::new(DTYPE, q, kv, dim, q_lens, kv_lens);
        spec.causal = causal;
        Self { spec, page_size: None, pooled: None }
    }

    /// The same call over pages.
    pub(super) fn paged(mut self, page_size: usize) -> Result<Self, attn_core::Error> {
        let ProblemSpec { kv_heads, head_dim, .. } = self.spec;
        let value = ValueStorage::Separate(head_dim);
        let order = PageOrder::Nhd;
        let dtype = self.spec.kv_dtype;
        let layout = CacheLayout::contiguous(dtype, order, page_size, kv_heads, head_dim, value)?;
        self.spec.kv = KvStorage::Paged(layout);
        self.page_size = Some(page_size);
        Ok(self)
    }

    /// The same call with queries, keys and values in fp8, unscaled.
    pub(super) fn fp8(mut self) -> Self {
        (self.spec.q_dtype, self.spec.kv_dtype) = (DType::F8E4M3, DType::F8E4M3);
        self
    }

    /// The same call with keys and values in fp8, unscaled, before they are put in pages.
    pub(super) fn fp8_cache(mut self) -> Self {
        self.spec.kv_dtype = DType::F8E4M3;
        self
    }

    /// The same call under the block table of the workload.
    pub(super) fn block_sparse(mut self) -> Self {
        self.spec.block_mask = Some(BlockSizes { q: BLOCK, kv: BLOCK });
        self
    }

    /// The same call by one kernel, whatever selection would take.
    pub(super) fn by(mut self, kernel: &str) -> Self {
        self.spec.options.disabled_kernels = all_but(Gpu::catalogue(), kernel);
        self
    }

    /// The same call with keys and values in the pool.
    pub(super) fn pooled(mut self, bytes: f64) -> Self {
        self.pooled = Some(bytes);
        self
    }

    /// Pages of each sequence.
    fn columns(&self, page_size: usize) -> usize {
        self.spec.kv_lens.iter().copied().max().unwrap_or(0).div_ceil(page_size)
    }

    fn kv_shape(&self) -> Vec<usize> {
        let ProblemSpec { kv_heads, head_dim, .. } = self.spec;
        match self.page_size {
            None => vec![self.spec.kv_lens.iter().sum(), kv_heads, head_dim],
            Some(size) => {
                vec![self.spec.kv_lens.len() * self.columns(size), size, kv_heads, head_dim]
            }
        }
    }
}

/// Keys and values that all decode cases share.
#[derive(Debug)]
pub(super) struct Pool {
    k: DeviceBuffer,
    v: DeviceBuffer,
    elements: usize,
}

impl Pool {
    /// A pool as large as the peers', or a quarter of a small device's memory for each tensor.
    pub(super) fn new(gpu: &Gpu, normals: &mut Normals) -> Result<Self, Error> {
        let memory = gpu.engine.caps().cuda.map_or(0, |cuda| cuda.memory.0);
        let elements = usize::try_from(memory / 8).unwrap_or(usize::MAX).min(POOL);
        let k = normal(gpu, normals, DTYPE, elements)?;
        Ok(Self { k, v: normal(gpu, normals, DTYPE, elements)?, elements })
    }
}

/// Device memory full of normal values in bf16, or in fp8 as the peers make them: bf16 rounded once more.
pub(crate) fn normal(
    gpu: &Gpu,
    normals: &mut Normals,
    dtype: DType,
    elements: usize,
) -> Result<DeviceBuffer, Error> {
    let mut buffer = gpu.engine.alloc(elements * dtype.size())?;
    let mut at = 0;
    for piece in normals.pieces(elements) {
        if dtype.is_fp8() {
            buffer.copy_from_host_at(&gpu.stream, at, &in_e4m3(piece))?;
        } else if dtype == DType::F16 {
            let narrow: Vec<f16> = piece.iter().map(|x| f16::from_f32(x.to_f32())).collect();
            buffer.copy_from_host_at(&gpu.stream, at, &narrow)?;
        } else {
            buffer.copy_from_host_at(&gpu.stream, at, piece)?;
        }
        at += piece.len();
    }
    Ok(buffer)
}

/// How plans are made: selection, and what the environment overrides of it to measure alternatives.
#[derive(Debug)]
pub(super) struct Planner {
    caps: DeviceCaps,
    catalogue: &'static [KernelDesc],
    kernel: Option<String>,
    tile: Option<Tile>,
    splits: Option<usize>,
}

impl Planner {
    /// Reads `ATTN_KERNEL`, `ATTN_TILE` and `ATTN_SPLITS`.
    pub(super) fn from_env(gpu: &Gpu) -> Result<Self, String> {
        let get = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
        Ok(Self {
            caps: gpu.engine.caps(),
            catalogue: Gpu::catalogue(),
            kernel: get("ATTN_KERNEL"),
            tile: get("ATTN_TILE").map(|text| parse_tile(&text)).transpose()?,
            splits: get("ATTN_SPLITS").map(|text| parse_count("ATTN_SPLITS", &text)).transpose()?,
        })
    }

    pub(super) fn plan(&self, problem: &Problem) -> Result<Plan, String> {
        let mut spec = problem.spec().clone();
        if let Some(kernel) = &self.kernel {
            // Not in place of the question's own: a contestant of one kernel is never answered by another.
            spec.options.disabled_kernels.extend(all_but(self.catalogue, kernel));
        }
        if self.splits.is_some() {
            spec.options.num_splits = self.splits;
        }
        let mut plan = self.choose(spec)?;
        if let Some(tile) = self.tile {
            plan.tile = tile;
        }
        Ok(plan)
    }

    /// The plan of the kernel that takes everything.
    pub(super) fn oracle(&self, spec: ProblemSpec) -> Result<Plan, String> {
        self.by("cuda_naive", spec)
    }

    /// The plan of one kernel.
    pub(super) fn by(&self, kernel: &str, mut spec: ProblemSpec) -> Result<Plan, String> {
        spec.options.disabled_kernels = all_but(self.catalogue, kernel);
        self.choose(spec)
    }

    /// The plan of whatever kernel selection takes.
    pub(super) fn any(&self, spec: ProblemSpec) -> Result<Plan, String> {
        self.choose(spec)
    }

    fn choose(&self, spec: ProblemSpec) -> Result<Plan, String> {
        let problem = Problem::new(spec).map_err(|error| error.to_string())?;
        attn_select::choose(&problem, &self.caps, self.catalogue).map_err(|error| error.to_string())
    }
}

/// The names of every kernel but one.
fn all_but(catalogue: &[KernelDesc], kernel: &str) -> Vec<String> {
    let names = catalogue.iter().map(|kernel| kernel.name);
    names.filter(|&name| name != kernel).map(str::to_owned).collect()
}

fn parse_tile(text: &str) -> Result<Tile, String> {
    let expected = || format!("ATTN_TILE: expected rows,keys as in 128,64, got {text:?}");
    let (q, kv) = text.split_once(',').ok_or_else(expected)?;
    let number = |text: &str| text.trim().parse().map_err(|_| expected());
    Ok(Tile { q: number(q)?, kv: number(kv)? })
}

fn parse_count(name: &str, text: &str) -> Result<usize, String> {
    text.trim().parse().map_err(|_| format!("{name}: expected a number, got {text:?}"))
}

/// A case, ready to run.
#[derive(Debug)]
pub(super) struct Setup {
    pub(super) plan: Plan,
    q: DeviceBuffer,
    pub(super) o: DeviceBuffer,
    /// Keys and values of its own; those of the pool otherwise.
    own: Option<(DeviceBuffer, DeviceBuffer)>,
    kv_shape: Vec<usize>,
    table: Option<(DeviceBuffer, usize)>,
    block_mask: Option<DeviceBuffer>,
    pub(super) rotations: usize,
}

/// Part of a sequence: rows, and the keys that they may see.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) sequence: usize,
    pub(super) row: usize,
    pub(super) rows: usize,
    pub(super) keys: usize,
}

impl Setup {
    /// Makes the tensors of a question and plans it.
    pub(super) fn new(
        gpu: &Gpu,
        planner: &Planner,
        normals: &mut Normals,
        pool: Option<&Pool>,
        question: &Question,
    ) -> Result<Self, String> {
        let problem = Problem::new(question.spec.clone()).map_err(|error| error.to_string())?;
        let plan = planner.plan(&problem)?;
        let text = |error: Error| error.to_string();
        let ProblemSpec { q_heads, head_dim, .. } = question.spec;
        let rows = problem.lengths().total_q() * q_heads * head_dim;
        let kv_shape = question.kv_shape();
        let elements: usize = kv_shape.iter().product();
        let (own, rotations) = match (question.pooled, pool) {
            // The pool is of 16 bits.
            (Some(bytes), _) if problem.kv_dtype().is_fp8() => {
                let rotations = rotations(bytes / 2.0);
                let mut own = || normal(gpu, normals, problem.kv_dtype(), elements * rotations);
                (Some((own().map_err(text)?, own().map_err(text)?)), rotations)
            }
            (Some(bytes), Some(pool)) if elements <= pool.elements => {
                (None, rotations(bytes).min(pool.elements / elements.max(1)).max(1))
            }
            (Some(_), Some(pool)) => {
                let most = pool.elements;
                return Err(format!("keys: expected at most {most} elements, got {elements}"));
            }
            _ => {
                let dtype = problem.kv_dtype();
                let k = normal(gpu, normals, dtype, elements).map_err(text)?;
                (Some((k, normal(gpu, normals, dtype, elements).map_err(text)?)), 1)
            }
        };
        let table = question
            .page_size
            .map(|size| {
                let columns = question.columns(size);
                let ids = shuffled_pages(question.spec.kv_lens.len() * columns);
                DeviceBuffer::from_host(&gpu.stream, &ids).map(|table| (table, columns))
            })
            .transpose()
            .map_err(text)?;
        let block_mask = question
            .spec
            .block_mask
            .map(|_| DeviceBuffer::from_host(&gpu.stream, &block_table()))
            .transpose()
            .map_err(text)?;
        let mut o = gpu.engine.alloc(rows * problem.out_dtype().size()).map_err(text)?;
        // NaN: what is not written shows in the check.
        o.fill(&gpu.stream, 0xFF).map_err(text)?;
        let q = normal(gpu, normals, problem.q_dtype(), rows).map_err(text)?;
        Ok(Self { plan, q, o, own, kv_shape, table, block_mask, rotations })
    }

    /// The call's inputs and outputs, one set of inputs for each rotation.
    pub(super) fn tensors<'a>(
        &'a mut self,
        pool: Option<&'a Pool>,
    ) -> Result<(&'a Plan, Vec<cuda::Inputs<'a>>, cuda::Outputs<'a>), String> {
        let Self { plan, q, o, own, kv_shape, table, block_mask, rotations } = self;
        let problem = &plan.problem;
        let shape = [problem.lengths().total_q(), problem.q_heads(), problem.head_dim()];
        let text = |error: Error| error.to_string();
        let (k, v) = keys_and_values(own.as_ref(), pool)?;
        let elements: usize = kv_shape.iter().product();
        let mut inputs = Vec::new();
        for rotation in 0..*rotations {
            let q = DeviceTensor::contiguous("q", &*q, problem.q_dtype(), &shape).map_err(text)?;
            let place = |field, buffer| {
                let layout = at(field, kv_shape, rotation * elements)?;
                DeviceTensor::new(field, buffer, problem.kv_dtype(), layout)
            };
            let (k, v) = (place("k", k).map_err(text)?, place("v", v).map_err(text)?);
            let kv = match (problem.cache_layout(), &*table) {
                (Some(layout), Some((table, width))) => {
                    let shape = [problem.lengths().batch(), *width];
                    let table = DeviceView::contiguous("block_table", table, &shape);
                    let (block_table, stamp) = (table.map_err(text)?, layout.id());
                    cuda::KvTensors::Paged { k_cache: k, v_cache: v, block_table, stamp }
                }
                _ => cuda::KvTensors::Dense { k, v },
            };
            let mut one = cuda::Inputs::new(q, kv);
            one.block_mask = block_mask
                .as_ref()
                .map(|mask| DeviceView::contiguous("block_mask", mask, &[BLOCKS, BLOCKS]))
                .transpose()
                .map_err(text)?;
            inputs.push(one);
        }
        let o =
            DeviceTensorMut::contiguous("o", &mut *o, problem.out_dtype(), &shape).map_err(text)?;
        Ok((plan, inputs, cuda::Outputs { o, lse: None }))
    }

    /// The first set of inputs cut down to part of a sequence, as a call of its own.
    pub(super) fn part<'a>(
        &'a self,
        pool: Option<&'a Pool>,
        part: Part,
    ) -> Result<(ProblemSpec, cuda::Inputs<'a>), String> {
        let problem = &self.plan.problem;
        let text = |error: Error| error.to_string();
        let core = |error: attn_core::Error| error.to_string();
        let mut spec = problem.spec().clone();
        (spec.q_lens, spec.kv_lens) = (vec![part.rows], vec![part.keys]);
        spec.options = attn_core::Options::default();
        let (k, v) = keys_and_values(self.own.as_ref(), pool)?;
        let row = problem.q_heads() * problem.head_dim();
        let shape = [part.rows, problem.q_heads(), problem.head_dim()];
        let start = problem.lengths().q_rows(part.sequence).start + part.row;
        let q_at = at("q", &shape, start * row).map_err(core)?;
        let q = DeviceTensor::new("q", &self.q, problem.q_dtype(), q_at).map_err(text)?;
        let kv = match (problem.cache_layout(), &self.table) {
            (Some(layout), Some((table, width))) => {
                let cache = |field, buffer| {
                    DeviceTensor::contiguous(field, buffer, problem.kv_dtype(), &self.kv_shape)
                        .map_err(text)
                };
                let row = at("block_table", &[1, *width], part.sequence * width).map_err(core)?;
                let block_table = DeviceView::new("block_table", table, row).map_err(text)?;
                let (k_cache, v_cache) = (cache("k_cache", k)?, cache("v_cache", v)?);
                cuda::KvTensors::Paged { k_cache, v_cache, block_table, stamp: layout.id() }
            }
            _ => {
                let shape = [part.keys, problem.kv_heads(), problem.head_dim()];
                let start = problem.lengths().kv_rows(part.sequence).start;
                let start = start * problem.kv_heads() * problem.head_dim();
                let rows = |field, buffer| {
                    let layout = at(field, &shape, start).map_err(core)?;
                    DeviceTensor::new(field, buffer, problem.kv_dtype(), layout).map_err(text)
                };
                cuda::KvTensors::Dense { k: rows("k", k)?, v: rows("v", v)? }
            }
        };
        let mut inputs = cuda::Inputs::new(q, kv);
        if let Some(mask) = &self.block_mask {
            let shape = [part.rows.div_ceil(BLOCK), BLOCKS];
            let start = part.row / BLOCK * BLOCKS;
            let rows = at("block_mask", &shape, start).map_err(core)?;
            inputs.block_mask = Some(DeviceView::new("block_mask", mask, rows).map_err(text)?);
        }
        Ok((spec, inputs))
    }
}

/// A case's own keys and values, or those of the pool.
fn keys_and_values<'a>(
    own: Option<&'a (DeviceBuffer, DeviceBuffer)>,
    pool: Option<&'a Pool>,
) -> Result<(&'a DeviceBuffer, &'a DeviceBuffer), String> {
    match (own, pool) {
        (Some((k, v)), _) => Ok((k, v)),
        (None, Some(pool)) => Ok((&pool.k, &pool.v)),
        (None, None) => Err("the pool of keys is gone".to_owned()),
    }
}

/// A dense tensor that starts at an element.
pub(super) fn at(
    field: &'static str,
    shape: &[usize],
    start: usize,
) -> Result<Strided, attn_core::Error> {
    let dense = Strided::contiguous(field, shape)?;
    Strided::new(field, shape, dense.strides(), start)
}

/// Sets of buffers that together outlast the device's cache.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped")]
pub(super) fn rotations(bytes: f64) -> usize {
    (ROTATED_BYTES / bytes.max(1.0)).ceil().clamp(1.0, MAX_ROTATIONS as f64) as usize
}

/// The ids of so many pages in random order, the same every time.
pub(crate) fn shuffled_pages(pages: usize) -> Vec<i32> {
    let mut ids: Vec<i32> = (0..).take(pages).collect();
    Random::new(0x7AB1E).shuffle(&mut ids);
    ids
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotations_are_those_of_the_peers() {
        assert_eq!(rotations(33_554_432.0), 8);
        assert_eq!(rotations(4_194_304.0), 62);
        assert_eq!((rotations(17e9), rotations(1000.0)), (1, MAX_ROTATIONS));
    }

    #[test]
    fn tile_of_the_environment_is_rows_and_keys() {
        assert_eq!(parse_tile("128, 64"), Ok(Tile { q: 128, kv: 64 }));
        assert!(parse_tile("128").unwrap_err().contains("ATTN_TILE"));
        assert!(parse_tile("a,b").is_err());
    }

    #[test]
    fn question_counts_pages_of_the_longest_sequence() {
        let heads = Heads { q: 8, kv: 2, dim: 64 };
        let dense = Question::dense(heads, &[1, 1], &[100, 65], false);
        assert_eq!(dense.kv_shape(), [165, 2, 64]);
        assert_eq!(dense.paged(16).unwrap().kv_shape(), [14, 16, 2, 64]);
    }
}
