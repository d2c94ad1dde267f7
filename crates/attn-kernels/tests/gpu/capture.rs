//! Graphs, streams, and what a run costs the host.

use std::io::Write as _;
use std::sync::Arc;
use std::time::Instant;

use attn_core::{DType, Dropout, Plan, Problem, ProblemSpec, Split};
use attn_kernels::Error;
use attn_kernels::cuda::{
    CudaEngine, CudaStream, DeviceBuffer, DeviceTensor, DeviceTensorMut, DeviceView, Inputs,
    Outputs, Workspace,
};

use half::bf16;

use crate::{engine, is_hopper, plan};

const HEADS: usize = 4;
const DIM: usize = 64;

/// A small causal call with tensors of its own.
struct Call {
    plan: Plan,
    dtype: DType,
    q: DeviceBuffer,
    kv: DeviceBuffer,
    o: DeviceBuffer,
    /// Seed and offset of a call with dropout.
    numbers: Option<DeviceBuffer>,
    rows: usize,
    keys: usize,
}

impl Call {
    /// In f32, by the naive kernel.
    fn new(engine: &CudaEngine, stream: &CudaStream, rows: usize, keys: usize) -> Self {
        Self::of(engine, stream, ("cuda_naive", DType::F32), rows, keys)
    }

    fn of(
        engine: &CudaEngine,
        stream: &CudaStream,
        (kernel, dtype): (&str, DType),
        rows: usize,
        keys: usize,
    ) -> Self {
        let mut spec = ProblemSpec::new(dtype, HEADS, HEADS, DIM, &[rows], &[keys]);
        spec.causal = true;
        let problem = Problem::new(spec).expect("valid");
        let wave = |n: usize| (0..n).map(|i| (i as f32 * 0.37).sin());
        let upload = |rows: usize| {
            let wave = wave(rows * HEADS * DIM);
            if dtype == DType::F32 {
                DeviceBuffer::from_host(stream, &wave.collect::<Vec<_>>())
            } else {
                DeviceBuffer::from_host(stream, &wave.map(bf16::from_f32).collect::<Vec<_>>())
            }
            .expect("memory")
        };
        Self {
            plan: plan(engine, kernel, &problem, Split::Whole),
            dtype,
            q: upload(rows),
            kv: upload(keys),
            o: DeviceBuffer::zeroed(stream, rows * HEADS * DIM * dtype.size()).expect("memory"),
            numbers: None,
            rows,
            keys,
        }
    }

    fn run(
        &mut self,
        engine: &CudaEngine,
        workspace: &mut Workspace,
        stream: &Arc<CudaStream>,
    ) -> Result<(), Error> {
        let (q, kv) = ([self.rows, HEADS, DIM], [self.keys, HEADS, DIM]);
        let mut inputs = Inputs::dense(
            DeviceTensor::contiguous("q", &self.q, self.dtype, &q)?,
            DeviceTensor::contiguous("k", &self.kv, self.dtype, &kv)?,
            DeviceTensor::contiguous("v", &self.kv, self.dtype, &kv)?,
        );
        if let Some(numbers) = &self.numbers {
            inputs.dropout = Some(DeviceView::contiguous("dropout", numbers, &[2])?);
        }
        let o = DeviceTensorMut::contiguous("o", &mut self.o, self.dtype, &q)?;
        let mut outputs = Outputs { o, lse: None };
        engine.forward(&self.plan, &inputs, &mut outputs, workspace, stream)
    }

    fn bytes(&self, stream: &CudaStream) -> Vec<u8> {
        self.o.to_host(stream, self.rows * HEADS * DIM * self.dtype.size()).expect("a copy")
    }

    fn output(&self, stream: &CudaStream) -> Vec<f32> {
        self.o.to_host(stream, self.rows * HEADS * DIM).expect("a copy")
    }
}

#[test]
fn graph_replays_what_was_captured() {
    let Some(engine) = engine("graph_replays_what_was_captured") else {
        return;
    };
    let stream = engine.new_stream().expect("a stream");
    let mut workspace = Workspace::new();
    let mut call = Call::new(&engine, &stream, 7, 33);
    call.run(&engine, &mut workspace, &stream).expect("a run");
    let want = call.output(&stream);
    assert!(want.iter().any(|&x| x != 0.0));

    let graph = engine.capture(&stream, || call.run(&engine, &mut workspace, &stream));
    let graph = graph.expect("a graph");
    call.o.fill(&stream, 0).expect("a fill");
    for _ in 0..2 {
        graph.launch(&stream).expect("a replay");
        assert_eq!(call.output(&stream), want);
    }
    // Other inputs, same graph; then other lengths in the same workspace, which are not the graph's.
    let zeros = vec![0f32; 7 * HEADS * DIM];
    call.q.copy_from_host(&stream, &zeros).expect("a copy");
    let mut other = Call::new(&engine, &stream, 3, 90);
    for keys in 90..110 {
        other = Call::new(&engine, &stream, 3, keys);
        other.run(&engine, &mut workspace, &stream).expect("a run");
    }
    graph.launch(&stream).expect("a replay");
    let replayed = call.output(&stream);
    call.run(&engine, &mut workspace, &stream).expect("a run");
    assert_eq!(replayed, call.output(&stream));
    assert_ne!(replayed, want);
    // The graph keeps the memory of the buffers that it uses.
    drop((call, other, workspace));
    graph.launch(&stream).expect("a replay");
    engine.synchronize(&stream).expect("no fault");
}

#[test]
fn graph_drops_by_the_offset_of_its_replay() {
    let Some(engine) = engine("graph_drops_by_the_offset_of_its_replay") else {
        return;
    };
    let stream = engine.new_stream().expect("a stream");
    for (kernel, dtype) in [("cuda_naive", DType::F32), ("cuda_prefill", DType::BF16)] {
        let mut call = Call::of(&engine, &stream, (kernel, dtype), 40, 90);
        let mut spec = call.plan.problem.spec().clone();
        spec.dropout = Some(Dropout { p: 0.5 });
        let problem = Problem::new(spec).expect("valid");
        call.plan = plan(&engine, kernel, &problem, Split::Whole);
        call.numbers = Some(DeviceBuffer::from_host(&stream, &[7u64, 0]).expect("memory"));
        let mut workspace = Workspace::new();
        call.run(&engine, &mut workspace, &stream).expect("a run");
        let graph = engine.capture(&stream, || call.run(&engine, &mut workspace, &stream));
        let graph = graph.expect("a graph");
        let bits = |call: &Call| call.bytes(&stream);
        let mut seen = Vec::new();
        for offset in 0..3u64 {
            let numbers = call.numbers.as_mut().expect("dropout");
            numbers.copy_from_host(&stream, &[7, offset]).expect("a copy");
            graph.launch(&stream).expect("a replay");
            let replayed = bits(&call);
            call.run(&engine, &mut workspace, &stream).expect("a run");
            assert_eq!(replayed, bits(&call), "{kernel}, offset {offset}");
            assert!(!seen.contains(&replayed), "{kernel}, offset {offset}");
            seen.push(replayed);
        }
    }
}

#[test]
fn capture_without_prepare_is_refused_and_leaves_the_stream() {
    let Some(engine) = engine("capture_without_prepare_is_refused_and_leaves_the_stream") else {
        return;
    };
    let stream = engine.new_stream().expect("a stream");
    let mut workspace = Workspace::new();
    let mut call = Call::new(&engine, &stream, 2, 5);
    let refused = engine.capture(&stream, || call.run(&engine, &mut workspace, &stream));
    let refused = refused.expect_err("not prepared");
    assert!(matches!(refused, Error::Workspace { .. }), "{refused}");
    assert!(refused.to_string().contains("prepare"), "{refused}");
    assert_eq!(workspace.bytes(), 0);
    // The stream is as usable as before, for a prepared capture too.
    engine.prepare(&call.plan, &mut workspace, &stream).expect("prepared");
    assert!(workspace.is_prepared(&call.plan));
    engine
        .capture(&stream, || call.run(&engine, &mut workspace, &stream))
        .expect("a graph")
        .launch(&stream)
        .expect("a replay");
    assert!(call.output(&stream).iter().any(|&x| x != 0.0));
    // The default stream cannot be captured, and says so as a value.
    let default = engine.default_stream();
    assert!(engine.capture(&default, || Ok(())).is_err());
}

#[test]
fn capture_ends_when_its_work_panics() {
    let Some(engine) = engine("capture_ends_when_its_work_panics") else {
        return;
    };
    let stream = engine.new_stream().expect("a stream");
    let work = || engine.capture(&stream, || panic!("inside a capture"));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
    assert!(panicked.is_err());
    engine.synchronize(&stream).expect("a stream that is not captured");
}

#[test]
fn capture_ends_when_its_work_drops_a_buffer() {
    let Some(engine) = engine("capture_ends_when_its_work_drops_a_buffer") else {
        return;
    };
    let stream = engine.new_stream().expect("a stream");
    let mut buffer = Some(engine.alloc(256).expect("memory"));
    // Whether the driver frees it during the capture is its own affair; that the stream can be used is ours.
    let outcome = engine.capture(&stream, || {
        drop(buffer.take());
        Ok(())
    });
    drop(outcome);
    let graph = engine.capture(&stream, || Ok(())).or_else(|_| engine.capture(&stream, || Ok(())));
    assert!(graph.is_ok(), "{graph:?}");
    engine.synchronize(&stream).expect("a stream that is not captured");
}

#[test]
fn two_streams_run_with_a_workspace_each() {
    let Some(engine) = engine("two_streams_run_with_a_workspace_each") else {
        return;
    };
    let streams = [engine.new_stream().expect("a"), engine.new_stream().expect("b")];
    let mut sides =
        streams.each_ref().map(|stream| (Call::new(&engine, stream, 5, 200), Workspace::new()));
    for _ in 0..20 {
        for (stream, (call, workspace)) in streams.iter().zip(&mut sides) {
            call.run(&engine, workspace, stream).expect("a run");
        }
    }
    let [a, b] = [0, 1].map(|n| sides[n].0.output(&streams[n]));
    assert_eq!(a, b);
    let (call, workspace) = &mut sides[0];
    let refused = call.run(&engine, workspace, &streams[1]).expect_err("another stream");
    assert!(matches!(refused, Error::Workspace { .. }), "{refused}");
}

/// What a call's plan has its workspace hold, run or not.
fn held(engine: &CudaEngine, stream: &Arc<CudaStream>, plan: &Plan) -> u64 {
    let mut workspace = Workspace::new();
    engine.prepare(plan, &mut workspace, stream).expect("prepared");
    workspace.bytes()
}

#[test]
fn equal_sequences_take_no_memory_but_two_counters() {
    let Some(engine) = engine("equal_sequences_take_no_memory_but_two_counters") else {
        return;
    };
    let stream = engine.new_stream().expect("a stream");
    let hopper = [("cuda_prefill_sm90a", 8), ("cuda_decode_sm90a", 0)];
    let hopper = hopper.into_iter().filter(|_| is_hopper(&engine));
    for (kernel, bytes) in [("cuda_prefill", 0), ("cuda_decode", 0)].into_iter().chain(hopper) {
        let held = |q_lens: &[usize], kv_lens: &[usize]| {
            let spec = ProblemSpec::new(DType::BF16, 32, HEADS, DIM, q_lens, kv_lens);
            let problem = Problem::new(spec).expect("valid");
            held(&engine, &stream, &plan(&engine, kernel, &problem, Split::Whole))
        };
        for batch in [1, 64] {
            let lens = vec![16; batch];
            assert_eq!(held(&lens, &vec![1000; batch]), bytes, "{kernel}, {batch} sequences");
        }
        let mut lens = vec![16; 2000];
        lens.push(3);
        let varied = held(&lens, &lens);
        assert!(varied > 0 && varied <= (1 << 20) + bytes, "{kernel}: {varied} bytes");
    }
}

/// The memory of plans that made room serves later ones, so that a steady mix of lengths neither allocates nor frees.
#[test]
fn workspace_of_many_lengths_stops_growing() {
    let Some(engine) = engine("workspace_of_many_lengths_stops_growing") else {
        return;
    };
    let stream = engine.new_stream().expect("a stream");
    let mut workspace = Workspace::new();
    let mut step = |n: usize| {
        let varied = [3, n + 1, 5];
        let q_lens: &[usize] = if n.is_multiple_of(3) { &varied[1..2] } else { &varied };
        let spec = ProblemSpec::new(DType::BF16, HEADS, HEADS, DIM, q_lens, q_lens);
        let problem = Problem::new(spec).expect("valid");
        let plan = plan(&engine, "cuda_prefill", &problem, Split::Whole);
        engine.prepare(&plan, &mut workspace, &stream).expect("prepared");
        workspace.bytes()
    };
    let grown = (0..24).map(&mut step).max();
    for n in 24..120 {
        assert!(Some(step(n)) <= grown, "step {n}");
    }
}

/// What a run of prepared plans costs the host: the median of rounds of runs, in microseconds, taking the calls in turn.
fn host_us(engine: &CudaEngine, stream: &Arc<CudaStream>, calls: &mut [Call]) -> f64 {
    const ROUNDS: usize = 41;
    // Few enough that the queue of the stream does not fill, whose wait is the device's.
    const RUNS: usize = 200;
    let mut workspace = Workspace::new();
    for call in &mut *calls {
        call.run(engine, &mut workspace, stream).expect("a run");
    }
    let bytes = workspace.bytes();
    let mut rounds = Vec::new();
    for _ in 0..ROUNDS {
        engine.synchronize(stream).expect("done");
        let start = Instant::now();
        for n in 0..RUNS {
            let at = n % calls.len();
            calls[at].run(engine, &mut workspace, stream).expect("a run");
        }
        rounds.push(start.elapsed().as_secs_f64() * 1e6 / RUNS as f64);
    }
    assert_eq!(workspace.bytes(), bytes, "a steady state allocates nothing");
    rounds.sort_by(f64::total_cmp);
    rounds[ROUNDS / 2]
}

#[test]
fn run_of_a_prepared_plan_costs_the_host_microseconds() {
    let Some(engine) = engine("run_of_a_prepared_plan_costs_the_host_microseconds") else {
        return;
    };
    let stream = engine.new_stream().expect("a stream");
    let hopper = is_hopper(&engine).then_some(("cuda_prefill_sm90a", DType::BF16));
    // A busy machine takes twice what a quiet one does; an unoptimised build only guards the order of magnitude.
    let most = if cfg!(debug_assertions) { 50.0 } else { 10.0 };
    for kind in [("cuda_naive", DType::F32)].into_iter().chain(hopper) {
        // A call alone, and as many as a model has layers, each with tensors of its own.
        for layers in [1, 32] {
            let call = || Call::of(&engine, &stream, kind, 1, 1);
            let mut calls: Vec<_> = std::iter::repeat_with(call).take(layers).collect();
            let us = host_us(&engine, &stream, &mut calls);
            let kernel = kind.0;
            let _ = writeln!(
                std::io::stderr(),
                "forward of a prepared plan, {kernel}, {layers} sets of tensors: {us:.2} us of the host"
            );
            assert!(us <= most, "{kernel}, {layers} sets: expected at most {most} us, got {us}");
        }
    }
}
