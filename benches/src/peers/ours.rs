//! The workspace's own engine as a contestant, checked before it is timed.
//!
//! The invariant: [`Ours::time`] is reached only after sampled rows agreed with the f64 reference.
//! Decode runs over a paged cache with a shuffled block table, page 16.

use std::time::Instant;

use attn_core::{
    CacheLayout, DType, Element, Inputs, KvStorage, KvView, Outputs, PageOrder, Plan, Problem,
    ProblemSpec, TensorView, TensorViewMut, ValueStorage, View, ViewMut,
};
use attn_kernels::cpu::{CpuEngine, Workspace};
use attn_reference::random::Random;
use half::{bf16, f16};

use super::PeersError;
use super::case::{Case, Kind};

const PAGE_SIZE: usize = 16;

/// Element storage of one type.
#[derive(Debug)]
enum Buffer {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
}

/// One case, ready to run.
#[derive(Debug)]
pub(crate) struct Ours {
    plan: Plan,
    q: Buffer,
    k: Buffer,
    v: Buffer,
    o: Buffer,
    q_shape: [usize; 3],
    kv_shape: Vec<usize>,
    table: Vec<i32>,
    table_width: usize,
    workspace: Workspace,
}

impl Ours {
    /// Makes inputs, plans, runs once and compares sampled rows with the reference.
    pub(crate) fn new(case: &Case, engine: &CpuEngine) -> Result<Self, PeersError> {
        let dtype = match case.dtype {
            "f16" => DType::F16,
            "bf16" => DType::BF16,
            _ => DType::F32,
        };
        let Case { batch, q_heads, kv_heads, q_len, kv_len, dim, .. } = *case;
        let (q_lens, kv_lens) = (vec![q_len; batch], vec![kv_len; batch]);
        let mut spec = ProblemSpec::new(dtype, q_heads, kv_heads, dim, &q_lens, &kv_lens);
        spec.causal = case.causal;
        let table_width = kv_len.div_ceil(PAGE_SIZE);
        let pages = batch * table_width;
        let mut random = Random::new(0x5EED);
        let kv_shape = match case.kind {
            Kind::Prefill => vec![batch * kv_len, kv_heads, dim],
            Kind::Decode => {
                let value = ValueStorage::Separate(dim);
                let layout = CacheLayout::contiguous(
                    dtype,
                    PageOrder::Nhd,
                    PAGE_SIZE,
                    kv_heads,
                    dim,
                    value,
                )?;
                spec.kv = KvStorage::Paged(layout);
                vec![pages, PAGE_SIZE, kv_heads, dim]
            }
        };
        let problem = Problem::new(spec)?;
        let plan = attn_select::choose(&problem, &engine.caps(), attn_kernels::catalog())?;
        let q_shape = [batch * q_len, q_heads, dim];
        let rows: usize = q_shape.iter().product();
        let kv_elements: usize = kv_shape.iter().product();
        let mut ours = Self {
            plan,
            q: Buffer::normal(dtype, rows, &mut random),
            k: Buffer::normal(dtype, kv_elements, &mut random),
            v: Buffer::normal(dtype, kv_elements, &mut random),
            o: Buffer::poisoned(dtype, rows),
            q_shape,
            kv_shape,
            table: shuffled(pages, &mut random),
            table_width,
            workspace: Workspace::new(),
        };
        ours.time(engine)?;
        ours.check(case)?;
        Ok(ours)
    }

    /// The kernel that the plan names.
    pub(crate) const fn kernel(&self) -> &'static str {
        self.plan.kernel
    }

    /// Milliseconds of one call.
    pub(crate) fn time(&mut self, engine: &CpuEngine) -> Result<f64, PeersError> {
        let inputs = inputs(
            &self.plan.problem,
            (&self.q, &self.q_shape),
            (&self.k, &self.v, &self.kv_shape),
            (&self.table, self.table_width),
        )?;
        let mut outputs = Outputs { o: self.o.view_mut(&self.q_shape)?, lse: None };
        let start = Instant::now();
        engine.forward(&self.plan, &inputs, &mut outputs, &mut self.workspace)?;
        Ok(start.elapsed().as_secs_f64() * 1e3)
    }

    /// Compares a few rows of the last call with an f64 computation over the same elements.
    fn check(&self, case: &Case) -> Result<(), PeersError> {
        let problem = &self.plan.problem;
        let inputs = inputs(
            problem,
            (&self.q, &self.q_shape),
            (&self.k, &self.v, &self.kv_shape),
            (&self.table, self.table_width),
        )?;
        let last = case.q_len - 1;
        let rows = [(0, 0), (0, last / 2), (case.batch - 1, last)];
        let want = attn_reference::naive::forward_rows(problem, &inputs, &rows)?;
        // The rounding of the output, and f32 accumulation over thousands of keys.
        let limit = 1e-5 + 2.0 * problem.out_dtype().unit_roundoff();
        let row_elements = case.q_heads * case.dim;
        for (&(sequence, row), want) in rows.iter().zip(want.o.chunks_exact(row_elements)) {
            let at = (sequence * case.q_len + row) * row_elements;
            for (n, &want) in want.iter().enumerate() {
                let got = self.o.get(at + n);
                let error = (f64::from(got) - want).abs();
                if error.is_nan() || error > limit {
                    return Err(PeersError::Wrong { case: case.id(), got: f64::from(got), want });
                }
            }
        }
        Ok(())
    }
}

/// Page ids in random order.
fn shuffled(pages: usize, random: &mut Random) -> Vec<i32> {
    let mut ids: Vec<i32> = (0..pages).filter_map(|page| i32::try_from(page).ok()).collect();
    random.shuffle(&mut ids);
    ids
}

fn inputs<'a>(
    problem: &Problem,
    (q, q_shape): (&'a Buffer, &[usize]),
    (k, v, kv_shape): (&'a Buffer, &'a Buffer, &[usize]),
    (table, width): (&'a [i32], usize),
) -> Result<Inputs<'a>, attn_core::Error> {
    let (q, k, v) = (q.view(q_shape)?, k.view(kv_shape)?, v.view(kv_shape)?);
    let mut inputs = Inputs::dense(q, k.clone(), v.clone());
    if let Some(layout) = problem.cache_layout() {
        let batch = problem.lengths().batch();
        inputs.kv = KvView::Paged {
            k_cache: k,
            v_cache: v,
            block_table: View::contiguous("block_table", table, &[batch, width])?,
            stamp: layout.id(),
        };
    }
    Ok(inputs)
}

impl Buffer {
    fn normal(dtype: DType, len: usize, random: &mut Random) -> Self {
        fn fill<T: Element>(len: usize, random: &mut Random) -> Vec<T> {
            (0..len).map(|_| T::from_f32(random.normal())).collect()
        }
        match dtype {
            DType::F16 => Self::F16(fill(len, random)),
            DType::BF16 => Self::BF16(fill(len, random)),
            _ => Self::F32(fill(len, random)),
        }
    }

    fn poisoned(dtype: DType, len: usize) -> Self {
        match dtype {
            DType::F16 => Self::F16(vec![f16::NAN; len]),
            DType::BF16 => Self::BF16(vec![bf16::NAN; len]),
            _ => Self::F32(vec![f32::NAN; len]),
        }
    }

    fn view(&self, shape: &[usize]) -> Result<TensorView<'_>, attn_core::Error> {
        Ok(match self {
            Self::F32(data) => TensorView::F32(View::contiguous("tensor", data, shape)?),
            Self::F16(data) => TensorView::F16(View::contiguous("tensor", data, shape)?),
            Self::BF16(data) => TensorView::BF16(View::contiguous("tensor", data, shape)?),
        })
    }

    fn view_mut(&mut self, shape: &[usize]) -> Result<TensorViewMut<'_>, attn_core::Error> {
        Ok(match self {
            Self::F32(data) => TensorViewMut::F32(ViewMut::contiguous("o", data, shape)?),
            Self::F16(data) => TensorViewMut::F16(ViewMut::contiguous("o", data, shape)?),
            Self::BF16(data) => TensorViewMut::BF16(ViewMut::contiguous("o", data, shape)?),
        })
    }

    fn get(&self, at: usize) -> f32 {
        match self {
            Self::F32(data) => data[at],
            Self::F16(data) => data[at].to_f32(),
            Self::BF16(data) => data[at].to_f32(),
        }
    }
}
