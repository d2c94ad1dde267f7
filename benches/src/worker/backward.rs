//! A backward case: the forward that it starts from, gradients checked against the naive kernel's, then timed.
//!
//! The invariant: what is timed is the engine's own entry, all of its launches together, as the peers' is. The check is
//! of the last sequence under its last KV head and that head's query heads, as a call of its own on the same memory:
//! nothing else adds to these gradients.

use attn_core::{Pass, Problem, ProblemSpec, Strided};
use attn_kernels::Error;
use attn_kernels::cuda::{
    self, DeviceBuffer, DeviceTensor, DeviceTensorMut, DeviceView, DeviceViewMut, Workspace,
};
use half::bf16;
use serde_json::{Value, json};

use super::check::{LIMIT, RelativeError};
use super::clock::{Clock, Pace};
use super::merge;
use super::normals::Normals;
use super::request::Case;
use super::setup::{Planner, Question, normal};
use crate::device::Gpu;

fn text(error: Error) -> String {
    error.to_string()
}

/// The tensors of a case: packed rows, one dimension for keys and values.
#[derive(Debug)]
struct Tensors {
    problem: Problem,
    q: DeviceBuffer,
    k: DeviceBuffer,
    v: DeviceBuffer,
    o: DeviceBuffer,
    lse: DeviceBuffer,
    d_o: DeviceBuffer,
}

/// Gradients of a case or of part of one.
#[derive(Debug)]
struct Written {
    dq: DeviceBuffer,
    dk: DeviceBuffer,
    dv: DeviceBuffer,
}

/// Some rows and heads of packed tensors.
#[derive(Debug, Clone, Copy)]
struct Range {
    /// Rows of the storage, and heads.
    of: (usize, usize),
    rows: (usize, usize),
    heads: (usize, usize),
    dim: usize,
}

impl Range {
    fn layout(&self, field: &'static str, has_dim: bool) -> Result<Strided, String> {
        let Self { of, rows, heads, dim } = *self;
        let dim = if has_dim { dim } else { 1 };
        let step = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        let start = (rows.0 * of.1 + heads.0) * dim;
        let (shape, strides) = ([rows.1, heads.1, dim], [step(of.1 * dim), step(dim), 1]);
        let axes = if has_dim { 3 } else { 2 };
        Strided::new(field, &shape[..axes], &strides[..axes], start)
            .map_err(|error| error.to_string())
    }

    fn tensor<'b>(
        &self,
        field: &'static str,
        buffer: &'b DeviceBuffer,
        problem: &Problem,
    ) -> Result<DeviceTensor<'b>, String> {
        let layout = self.layout(field, true)?;
        DeviceTensor::new(field, buffer, problem.q_dtype(), layout).map_err(text)
    }

    /// All of its elements, in order.
    fn read(&self, gpu: &Gpu, buffer: &DeviceBuffer) -> Result<Vec<bf16>, String> {
        let Self { of, rows, heads, dim } = *self;
        let all: Vec<bf16> = buffer
            .to_host_at(&gpu.stream, rows.0 * of.1 * dim, rows.1 * of.1 * dim)
            .map_err(text)?;
        let head = heads.0 * dim..(heads.0 + heads.1) * dim;
        Ok(all.chunks(of.1 * dim).flat_map(|row| &row[head.clone()]).copied().collect())
    }
}

impl Tensors {
    /// Random inputs, and the results of their forward.
    fn new(
        gpu: &Gpu,
        planner: &Planner,
        normals: &mut Normals,
        question: &Question,
    ) -> Result<Self, String> {
        let core = |error: attn_core::Error| error.to_string();
        let problem = Problem::new(question.spec.clone()).map_err(core)?;
        let (l, dim, dtype) = (problem.lengths(), problem.head_dim(), problem.q_dtype());
        let (rows, keys) = (l.total_q() * problem.q_heads(), l.total_kv() * problem.kv_heads());
        let mut random = |elements: usize| normal(gpu, normals, dtype, elements).map_err(text);
        let (q, k, v, d_o) =
            (random(rows * dim)?, random(keys * dim)?, random(keys * dim)?, random(rows * dim)?);
        let alloc = |bytes: usize| gpu.engine.alloc(bytes).map_err(text);
        let (o, lse) = (alloc(rows * dim * dtype.size())?, alloc(rows * size_of::<f32>())?);
        let mut tensors = Self { problem, q, k, v, o, lse, d_o };
        tensors.forward(gpu, planner)?;
        Ok(tensors)
    }

    fn forward(&mut self, gpu: &Gpu, planner: &Planner) -> Result<(), String> {
        let spec = ProblemSpec {
            pass: Pass::Forward,
            options: attn_core::Options::default(),
            ..self.problem.spec().clone()
        };
        let plan = planner.any(spec)?;
        let (queries, keys) = self.all();
        let [q, k, v] = [("q", &self.q, queries), ("k", &self.k, keys), ("v", &self.v, keys)]
            .map(|(field, buffer, range)| range.tensor(field, buffer, &self.problem));
        let inputs = cuda::Inputs::dense(q?, k?, v?);
        let o = queries.layout("o", true)?;
        let o = DeviceTensorMut::new("o", &mut self.o, self.problem.q_dtype(), o).map_err(text)?;
        let lse = queries.layout("lse", false)?;
        let lse = Some(DeviceViewMut::new("lse", &mut self.lse, lse).map_err(text)?);
        let mut outputs = cuda::Outputs { o, lse };
        let workspace = &mut Workspace::new();
        gpu.engine.forward(&plan, &inputs, &mut outputs, workspace, &gpu.stream).map_err(text)?;
        // The workspace is gone when the stream is done with it.
        gpu.engine.synchronize(&gpu.stream).map_err(text)
    }

    /// Everything: query side and key side.
    fn all(&self) -> (Range, Range) {
        let (l, dim) = (self.problem.lengths(), self.problem.head_dim());
        let whole = |rows: usize, heads: usize| Range {
            of: (rows, heads),
            rows: (0, rows),
            heads: (0, heads),
            dim,
        };
        let problem = &self.problem;
        (whole(l.total_q(), problem.q_heads()), whole(l.total_kv(), problem.kv_heads()))
    }

    /// The last sequence, under its last KV head.
    fn last(&self) -> (Range, Range) {
        let (problem, l) = (&self.problem, self.problem.lengths());
        let last = l.batch().saturating_sub(1);
        let (q, kv) = (l.q_rows(last), l.kv_rows(last));
        let (all_q, all_kv) = self.all();
        let group = problem.group();
        let heads = (problem.q_heads() - group, group);
        let queries = Range { rows: (q.start, q.len()), heads, ..all_q };
        let heads = (problem.kv_heads() - 1, 1);
        (queries, Range { rows: (kv.start, kv.len()), heads, ..all_kv })
    }

    fn call(
        &self,
        at: (Range, Range),
    ) -> Result<(cuda::Inputs<'_>, cuda::ForwardResults<'_>), String> {
        let (queries, keys) = at;
        let tensor = |field, buffer, range: Range| range.tensor(field, buffer, &self.problem);
        let inputs = cuda::Inputs::dense(
            tensor("q", &self.q, queries)?,
            tensor("k", &self.k, keys)?,
            tensor("v", &self.v, keys)?,
        );
        let lse = queries.layout("lse", false)?;
        let results = cuda::ForwardResults {
            o: tensor("o", &self.o, queries)?,
            lse: DeviceView::new("lse", &self.lse, lse).map_err(text)?,
            d_o: tensor("do", &self.d_o, queries)?,
        };
        Ok((inputs, results))
    }
}

impl Written {
    /// NaN: what is not written shows in the check.
    fn new(gpu: &Gpu, problem: &Problem) -> Result<Self, String> {
        let (l, row) = (problem.lengths(), problem.head_dim() * problem.q_dtype().size());
        let alloc = |rows: usize| {
            let mut buffer = gpu.engine.alloc(rows * row)?;
            buffer.fill(&gpu.stream, 0xFF)?;
            Ok(buffer)
        };
        let keys = l.total_kv() * problem.kv_heads();
        Ok(Self {
            dq: alloc(l.total_q() * problem.q_heads()).map_err(text)?,
            dk: alloc(keys).map_err(text)?,
            dv: alloc(keys).map_err(text)?,
        })
    }

    fn gradients(&mut self, problem: &Problem) -> Result<cuda::Gradients<'_>, String> {
        let (l, dim) = (problem.lengths(), problem.head_dim());
        let queries = [l.total_q(), problem.q_heads(), dim];
        let keys = [l.total_kv(), problem.kv_heads(), dim];
        let tensor = |field, buffer, shape: &[usize]| {
            DeviceTensorMut::contiguous(field, buffer, problem.q_dtype(), shape).map_err(text)
        };
        let Self { dq, dk, dv } = self;
        Ok(cuda::Gradients {
            dq: tensor("dq", dq, &queries)?,
            dk: tensor("dk", dk, &keys)?,
            dv: tensor("dv", dv, &keys)?,
            dsinks: None,
            dbias: None,
        })
    }
}

/// Checks a contestant and, unless it is only to be checked, times it.
pub(super) fn measure(
    gpu: &Gpu,
    planner: &Planner,
    normals: &mut Normals,
    pace: Pace,
    (section, case): (&str, &Case),
    question: &Question,
) -> Result<Value, String> {
    let tensors = Tensors::new(gpu, planner, normals, question)?;
    let problem = &tensors.problem;
    let plan = planner.plan(problem)?;
    let mut written = Written::new(gpu, problem)?;
    let mut workspace = Workspace::new();
    let (inputs, results) = tensors.call(tensors.all())?;
    let run = |gradients: &mut cuda::Gradients<'_>, workspace: &mut Workspace| {
        gpu.engine.backward(&plan, &inputs, &results, gradients, workspace, &gpu.stream)
    };
    run(&mut written.gradients(problem)?, &mut workspace).map_err(text)?;
    let errors = check(gpu, planner, &tensors, &written)?;
    let mut line = json!({
        "rel_err": errors.iter().map(|(_, error)| *error).fold(0.0, f64::max),
        "kernel": plan.kernel,
        "tile": format!("{}x{}", plan.tile.q, plan.tile.kv),
        "reason": plan.reason,
    });
    for (name, error) in errors {
        line[format!("rel_err_{name}")] = error.into();
    }
    if section != "check" {
        let clock = Clock { engine: &gpu.engine, stream: &gpu.stream, pace };
        let gradients = &mut written.gradients(problem)?;
        let times = clock.bench_by_event(&mut |_| run(gradients, &mut workspace)).map_err(text)?;
        if let Some(flops) = case.flops {
            line["tflops"] = (flops / times.ms / 1e9).into();
        }
        merge(&mut line, json!(times));
    }
    line["temp_bytes"] = workspace.bytes().into();
    Ok(line)
}

/// The relative error of each gradient of the part that is computed again.
fn check(
    gpu: &Gpu,
    planner: &Planner,
    tensors: &Tensors,
    written: &Written,
) -> Result<[(&'static str, f64); 3], String> {
    let (queries, keys) = tensors.last();
    let spec = ProblemSpec {
        q_heads: queries.heads.1,
        kv_heads: 1,
        q_lens: vec![queries.rows.1],
        kv_lens: vec![keys.rows.1],
        ..tensors.problem.spec().clone()
    };
    let plan = planner.by("cuda_backward_naive", spec)?;
    let mut wanted = Written::new(gpu, &plan.problem)?;
    let (inputs, results) = tensors.call((queries, keys))?;
    let workspace = &mut Workspace::new();
    let gradients = &mut wanted.gradients(&plan.problem)?;
    gpu.engine
        .backward(&plan, &inputs, &results, gradients, workspace, &gpu.stream)
        .map_err(text)?;
    let error = |name: &'static str, range: Range, got: &DeviceBuffer, want: &DeviceBuffer| {
        let got = range.read(gpu, got)?;
        let want: Vec<bf16> = want.to_host(&gpu.stream, got.len()).map_err(text)?;
        let mut error = RelativeError::default();
        error.add_all(&got, &want);
        let error = error.within(LIMIT).map_err(|why| format!("{name}: {why}"))?;
        Ok::<_, String>((name, error))
    };
    Ok([
        error("dq", queries, &written.dq, &wanted.dq)?,
        error("dk", keys, &written.dk, &wanted.dk)?,
        error("dv", keys, &written.dv, &wanted.dv)?,
    ])
}

/// The problem of a backward, its sums in order or as they come.
pub(super) fn question(mut forward: Question, is_deterministic: bool) -> Question {
    forward.spec.pass = Pass::Backward;
    forward.spec.options.deterministic = is_deterministic;
    forward
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_of_heads_steps_over_the_others() {
        let range = Range { of: (10, 4), rows: (6, 3), heads: (2, 2), dim: 8 };
        let layout = range.layout("q", true).unwrap();
        assert_eq!((layout.shape(), layout.strides()), (&[3, 2, 8][..], &[32, 8, 1][..]));
        assert_eq!(layout.offset(), 6 * 32 + 16);
        assert_eq!(range.layout("lse", false).unwrap().strides(), [4, 1]);
    }
}
