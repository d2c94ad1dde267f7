//! The same bits from the same call, however often, beside other work and with little memory left.

use std::io::Write as _;
use std::sync::Arc;

use attn_core::{DType, Plan, Problem, ProblemSpec, Split};
use attn_kernels::Error;
use attn_kernels::cuda::{
    CudaEngine, CudaStream, DeviceBuffer, DeviceTensor, DeviceTensorMut, Inputs, Outputs, Workspace,
};
use half::bf16;

use crate::{engine, is_hopper, plan};

const HEADS: usize = 8;
const KV_HEADS: usize = 2;

/// A call of unequal sequences, with tensors of its own.
struct Call {
    plan: Plan,
    dim: usize,
    rows: usize,
    keys: usize,
    q: DeviceBuffer,
    k: DeviceBuffer,
    v: DeviceBuffer,
    o: DeviceBuffer,
    workspace: Workspace,
}

impl Call {
    fn new(engine: &CudaEngine, stream: &CudaStream, kernel: &str, dim: usize) -> Self {
        Self::with_step(engine, stream, kernel, dim, 0.37)
    }

    /// With other queries for another `step`.
    fn with_step(
        engine: &CudaEngine,
        stream: &CudaStream,
        kernel: &str,
        dim: usize,
        step: f32,
    ) -> Self {
        let lens = ([700, 1, 130, 0, 257], [900, 64, 130, 9, 1024]);
        Self::of(engine, stream, (kernel, Split::Whole), dim, step, lens)
    }

    fn of(
        engine: &CudaEngine,
        stream: &CudaStream,
        (kernel, split): (&str, Split),
        dim: usize,
        step: f32,
        (q_lens, kv_lens): ([usize; 5], [usize; 5]),
    ) -> Self {
        let mut spec = ProblemSpec::new(DType::BF16, HEADS, KV_HEADS, dim, &q_lens, &kv_lens);
        spec.causal = true;
        let problem = Problem::new(spec).expect("valid");
        let (rows, keys) = (q_lens.iter().sum(), kv_lens.iter().sum());
        let upload = |n: usize, step: f32| {
            let wave: Vec<bf16> =
                (0..n).map(|i| bf16::from_f32(2.0 * (i as f32 * step).sin())).collect();
            DeviceBuffer::from_host(stream, &wave).expect("memory")
        };
        Self {
            plan: plan(engine, kernel, &problem, split),
            dim,
            rows,
            keys,
            q: upload(rows * HEADS * dim, step),
            k: upload(keys * KV_HEADS * dim, 0.34 + step),
            v: upload(keys * KV_HEADS * dim, 0.13),
            o: DeviceBuffer::zeroed(stream, rows * HEADS * dim * 2).expect("memory"),
            workspace: Workspace::new(),
        }
    }

    fn run(&mut self, engine: &CudaEngine, stream: &Arc<CudaStream>) -> Result<(), Error> {
        let (q, kv) = ([self.rows, HEADS, self.dim], [self.keys, KV_HEADS, self.dim]);
        let inputs = Inputs::dense(
            DeviceTensor::contiguous("q", &self.q, DType::BF16, &q)?,
            DeviceTensor::contiguous("k", &self.k, DType::BF16, &kv)?,
            DeviceTensor::contiguous("v", &self.v, DType::BF16, &kv)?,
        );
        let o = DeviceTensorMut::contiguous("o", &mut self.o, DType::BF16, &q)?;
        let mut outputs = Outputs { o, lse: None };
        engine.forward(&self.plan, &inputs, &mut outputs, &mut self.workspace, stream)
    }

    fn bits(&self, stream: &CudaStream) -> Vec<u16> {
        self.o.to_host(stream, self.rows * HEADS * self.dim).expect("a copy")
    }
}

/// The device's memory in pieces of 4 GiB and more; what is left is for tests that run beside this one.
fn pressure(stream: &CudaStream) -> Vec<DeviceBuffer> {
    let mut pieces = Vec::new();
    for shift in (32..=34).rev() {
        while let Ok(piece) = DeviceBuffer::zeroed(stream, 1 << shift) {
            pieces.push(piece);
        }
    }
    pieces
}

fn hopper(name: &str) -> Option<CudaEngine> {
    let engine = engine(name)?;
    if is_hopper(&engine) {
        return Some(engine);
    }
    let _ = writeln!(std::io::stderr(), "{name}: skipped: the device is no Hopper");
    None
}

/// A workspace keeps tensor maps by address: more sets of tensors than it keeps, and new tensors where freed ones lay.
#[test]
fn one_workspace_serves_each_set_of_tensors_its_own() {
    let Some(engine) = hopper("one_workspace_serves_each_set_of_tensors_its_own") else { return };
    let stream = engine.new_stream().expect("a stream");
    let mut shared = Workspace::new();
    for dim in [64, 128] {
        let mut calls: Vec<_> = (0..140u8)
            .map(|n| {
                let step = 0.2 + f32::from(n) * 0.003;
                Call::with_step(&engine, &stream, "cuda_prefill_sm90a", dim, step)
            })
            .collect();
        let mut expected = Vec::new();
        for call in &mut calls {
            call.run(&engine, &stream).expect("a run");
            expected.push(call.bits(&stream));
        }
        assert_ne!(expected[0], expected[1]);
        for round in 0..2 {
            for (n, call) in calls.iter_mut().enumerate() {
                std::mem::swap(&mut call.workspace, &mut shared);
                call.o.fill(&stream, 0xFF).expect("a fill");
                call.run(&engine, &stream).expect("a run");
                std::mem::swap(&mut call.workspace, &mut shared);
                assert!(call.bits(&stream) == expected[n], "dim {dim}, set {n}, round {round}");
            }
        }
    }
}

#[test]
fn thousand_runs_give_equal_bits_beside_other_work() {
    let name = "thousand_runs_give_equal_bits_beside_other_work";
    let Some(engine) = hopper(name) else { return };
    let stream = engine.new_stream().expect("a stream");
    let beside = engine.new_stream().expect("another");
    let mut calls =
        [64, 128, 256].map(|dim| Call::new(&engine, &stream, "cuda_prefill_sm90a", dim));
    let mut other = Call::new(&engine, &beside, "cuda_prefill", 128);
    other.run(&engine, &beside).expect("a run");
    let expected = calls.each_mut().map(|call| {
        call.run(&engine, &stream).expect("a run");
        call.bits(&stream)
    });
    let pieces = pressure(&stream);
    for n in 0..1000 {
        other.run(&engine, &beside).expect("a run");
        for (call, expected) in calls.iter_mut().zip(&expected) {
            call.run(&engine, &stream).expect("a run");
            assert!(call.bits(&stream) == *expected, "dim {}, run {n}", call.dim);
        }
    }
    drop(pieces);
}

/// Who ends last is chance: the counters must be back, and the sums in order, whatever ran before on the workspace.
#[test]
fn parts_join_alike_however_often() {
    let Some(engine) = engine("parts_join_alike_however_often") else { return };
    let stream = engine.new_stream().expect("a stream");
    let lens = ([1, 16, 3, 0, 7], [900, 64, 3000, 9, 1024]);
    let equal = ([2; 5], [777; 5]);
    let mut calls = Vec::new();
    for (n, split) in
        [Split::Parts(5), Split::Chunks(64), Split::Parts(33), Split::Whole].into_iter().enumerate()
    {
        for (dim, lens) in [(64, lens), (128, equal), (256, lens)] {
            let step = 0.2 + n as f32 * 0.03;
            calls.push(Call::of(&engine, &stream, ("cuda_decode", split), dim, step, lens));
        }
    }
    if is_hopper(&engine) {
        calls.push(Call::new(&engine, &stream, "cuda_prefill_sm90a", 128));
        // Parts in clusters, of several clusters, and of unequal sequences.
        let long = ([2; 5], [1024; 5]);
        for (parts, lens) in [(8, equal), (2, equal), (64, long), (3, equal), (8, lens)] {
            let kernel = ("cuda_decode_sm90a", Split::Parts(parts));
            calls.push(Call::of(&engine, &stream, kernel, 128, 0.3, lens));
        }
    }
    let mut expected = Vec::new();
    for call in &mut calls {
        call.run(&engine, &stream).expect("a run");
        expected.push(call.bits(&stream));
    }
    let mut shared = Workspace::new();
    // A graph keeps what it was captured with, though later calls want more of the workspace.
    std::mem::swap(&mut calls[0].workspace, &mut shared);
    calls[0].run(&engine, &stream).expect("a run");
    let graph = engine.capture(&stream, || calls[0].run(&engine, &stream)).expect("a graph");
    std::mem::swap(&mut calls[0].workspace, &mut shared);
    for round in 0..100 {
        for (n, call) in calls.iter_mut().enumerate() {
            std::mem::swap(&mut call.workspace, &mut shared);
            call.o.fill(&stream, 0xFF).expect("a fill");
            call.run(&engine, &stream).expect("a run");
            std::mem::swap(&mut call.workspace, &mut shared);
            assert!(call.bits(&stream) == expected[n], "call {n}, round {round}");
        }
        calls[0].o.fill(&stream, 0xFF).expect("a fill");
        graph.launch(&stream).expect("a replay");
        assert!(calls[0].bits(&stream) == expected[0], "the graph, round {round}");
    }
}
