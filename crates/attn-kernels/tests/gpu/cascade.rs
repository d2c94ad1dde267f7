//! Cascades on the device: against the reference, in graphs, and what is refused before anything is launched.

use std::sync::Arc;

use attn_core::{
    Cascade, CascadePlan, DType, Inputs, KvView, PageOrder, Plan, Problem, SharedPrefix, Split,
};
use attn_kernels::Error;
use attn_kernels::cuda::{
    CascadeTables, CascadeWorkspace, CudaEngine, CudaStream, DeviceBuffer, DeviceView, Outputs,
};
use attn_reference::case::Scales;
use attn_reference::{Case, CaseData, judge_forward};
use half::bf16;

use crate::upload::{Uploaded, UploadedOutputs};
use crate::{engine, plan};

const HEADS: usize = 8;
const DIM: usize = 128;
const PAGE: usize = 16;

/// Two groups, of three sequences and of two, and one that shares nothing; one to three rows each.
fn case(edit: impl FnOnce(Case) -> Case) -> CaseData {
    let (q, kv) = ([1, 2, 1, 1, 3, 1], [130, 145, 129, 90, 83, 40]);
    let case = Case::new("a cascade", DType::BF16, (HEADS, 2), DIM, &q, &kv).causal();
    let case = edit(case.paged(PageOrder::Nhd, PAGE)).shared_pages(8).sharers(3);
    case.build().expect("a valid case")
}

fn groups() -> [SharedPrefix; 2] {
    [SharedPrefix { sequences: 0..3, tokens: 128 }, SharedPrefix { sequences: 3..5, tokens: 64 }]
}

fn cascade_plan(
    engine: &CudaEngine,
    problem: &Problem,
    (kernel, most_rows): (&str, Option<usize>),
) -> CascadePlan {
    let cascade = Cascade::new(problem, &groups(), most_rows).expect("it is one");
    let of = |problem: &Problem| -> Plan { plan(engine, kernel, problem, Split::Parts(2)) };
    let whole = |mut plan: Plan| {
        plan.split = if kernel == "cuda_decode" { plan.split } else { Split::Whole };
        plan
    };
    let (prefix, suffix) = (whole(of(cascade.prefix())), whole(of(cascade.suffix())));
    CascadePlan::new(cascade, prefix, suffix).expect("plans of its calls")
}

/// The tables of both calls, on the device.
struct Tables {
    buffers: [DeviceBuffer; 2],
    shapes: [[usize; 2]; 2],
}

impl Tables {
    fn new(stream: &CudaStream, cascade: &Cascade, inputs: &Inputs<'_>) -> Self {
        let KvView::Paged { block_table, .. } = &inputs.kv else { panic!("a paged case") };
        let batch = cascade.problem().lengths().batch();
        let shapes =
            [[cascade.parts().len(), cascade.prefix_width()], [batch, cascade.suffix_width()]];
        let [mut prefix, mut suffix] = shapes.map(|[rows, width]| vec![i32::MAX; rows * width]);
        cascade.write_tables(block_table, &mut prefix, &mut suffix).expect("they fit");
        let up = |table: &[i32]| DeviceBuffer::from_host(stream, table).expect("memory");
        Self { buffers: [up(&prefix), up(&suffix)], shapes }
    }

    fn views(&self) -> CascadeTables<'_> {
        let view = |n: usize| DeviceView::contiguous("table", &self.buffers[n], &self.shapes[n]);
        CascadeTables { prefix: view(0).expect("fits"), suffix: view(1).expect("fits") }
    }
}

fn open(test: &str) -> Option<(CudaEngine, Arc<CudaStream>)> {
    let engine = engine(test)?;
    let stream = engine.new_stream().expect("a stream");
    Some((engine, stream))
}

#[test]
fn cascade_matches_the_reference_by_every_kernel() {
    let Some((engine, stream)) = open("cascade_matches_the_reference_by_every_kernel") else {
        return;
    };
    let mut workspace = CascadeWorkspace::new();
    for data in [case(|case| case), case(|case| case.sinks().softcap(20.0))] {
        for kernel in [
            ("cuda_decode", Some(16)),
            ("cuda_decode", Some(2)),
            ("cuda_prefill", None),
            ("cuda_naive", None),
        ] {
            let plan = cascade_plan(&engine, data.problem(), kernel);
            let verdict = judge_forward(&data, |_, inputs, mut outputs| -> Result<(), Error> {
                let uploaded = Uploaded::new(&stream, inputs)?;
                let mut results = UploadedOutputs::new(&stream, &outputs)?;
                let tables = Tables::new(&stream, plan.cascade(), inputs);
                engine.prepare_cascade(&plan, &mut workspace, &stream)?;
                workspace.fill(&stream, 0xFF)?;
                let there = &mut results.outputs()?;
                let (inputs, tables) = (uploaded.inputs()?, tables.views());
                engine.cascade(&plan, &inputs, Some(&tables), there, &mut workspace, &stream)?;
                results.download(&stream, &mut outputs)
            });
            verdict.unwrap_or_else(|failure| panic!("{kernel:?}: {failure}"));
        }
    }
}

/// Device outputs as bits: outputs, and LSEs where there are some.
struct Results {
    o: DeviceBuffer,
    lse: DeviceBuffer,
    rows: usize,
}

impl Results {
    fn new(stream: &CudaStream, rows: usize) -> Self {
        let zeroed = |bytes| DeviceBuffer::zeroed(stream, bytes).expect("memory");
        Self { o: zeroed(rows * HEADS * DIM * 2), lse: zeroed(rows * HEADS * 4), rows }
    }

    fn outputs(&mut self, with_lse: bool) -> Outputs<'_> {
        use attn_kernels::cuda::{DeviceTensorMut, DeviceViewMut};
        let Self { o, lse, rows } = self;
        let shape = [*rows, HEADS, DIM];
        let o = DeviceTensorMut::contiguous("o", o, DType::BF16, &shape).expect("fits");
        let lse =
            with_lse.then(|| DeviceViewMut::contiguous("lse", lse, &shape[..2]).expect("fits"));
        Outputs { o, lse }
    }

    fn bits(&self, stream: &CudaStream) -> (Vec<bf16>, Vec<f32>) {
        let count = self.rows * HEADS;
        let lse = self.lse.to_host(stream, count).expect("a copy");
        (self.o.to_host(stream, count * DIM).expect("a copy"), lse)
    }
}

#[test]
fn cascade_is_captured_and_allocates_once() {
    let Some((engine, stream)) = open("cascade_is_captured_and_allocates_once") else {
        return;
    };
    let data = case(|case| case);
    let plan = cascade_plan(&engine, data.problem(), ("cuda_decode", Some(16)));
    let on_host = data.inputs().expect("valid");
    let uploaded = Uploaded::new(&stream, &on_host).expect("memory");
    let (inputs, tables) =
        (uploaded.inputs().expect("valid"), Tables::new(&stream, plan.cascade(), &on_host));
    let tables = tables.views();
    let mut workspace = CascadeWorkspace::new();
    let mut results = Results::new(&stream, data.problem().lengths().total_q());

    // Not prepared: refused, and nothing is held.
    let outputs = &mut results.outputs(true);
    let refused = engine.capture(&stream, || {
        engine.cascade(&plan, &inputs, Some(&tables), outputs, &mut workspace, &stream)
    });
    assert!(matches!(refused, Err(Error::Workspace { .. })), "{refused:?}");
    assert!(!workspace.is_prepared(&plan));

    engine.prepare_cascade(&plan, &mut workspace, &stream).expect("prepared");
    assert!(workspace.is_prepared(&plan));
    let held = workspace.bytes();
    let run = |results: &mut Results, with_lse: bool, workspace: &mut CascadeWorkspace| {
        let outputs = &mut results.outputs(with_lse);
        engine.cascade(&plan, &inputs, Some(&tables), outputs, workspace, &stream)
    };
    run(&mut results, true, &mut workspace).expect("a run");
    let want = results.bits(&stream);
    assert!(want.0.iter().any(|&x| x != bf16::ZERO));
    let graph = engine.capture(&stream, || run(&mut results, true, &mut workspace));
    let graph = graph.expect("a graph");
    for _ in 0..3 {
        results.o.fill(&stream, 0xFF).expect("a fill");
        results.lse.fill(&stream, 0xFF).expect("a fill");
        workspace.fill(&stream, 0xFF).expect("a fill");
        graph.launch(&stream).expect("a replay");
        assert_eq!(results.bits(&stream), want);
    }
    // Without an LSE the outputs are the same.
    let mut other = Results::new(&stream, data.problem().lengths().total_q());
    run(&mut other, false, &mut workspace).expect("a run");
    assert_eq!(other.bits(&stream).0, want.0);
    assert!(other.bits(&stream).1.iter().all(|&lse| lse == 0.0));
    assert_eq!(workspace.bytes(), held, "a steady state allocates nothing");
    // The graph keeps the states and the workspace that it was captured with.
    drop(workspace);
    graph.launch(&stream).expect("a replay");
    assert_eq!(results.bits(&stream), want);
}

#[test]
fn cascade_over_views_gives_the_bits_of_one_over_tables() {
    let Some((engine, stream)) = open("cascade_over_views_gives_the_bits_of_one_over_tables")
    else {
        return;
    };
    let case = Case::new("views", DType::BF16, (HEADS, 2), DIM, &[1; 6], &[70, 65, 66, 90, 80, 71]);
    let case = case.causal().paged(PageOrder::Hnd, PAGE).shared_pages(4).sharers(3);
    let data = case.build().expect("valid");
    let prefixes = [
        SharedPrefix { sequences: 0..3, tokens: 64 },
        SharedPrefix { sequences: 3..6, tokens: 64 },
    ];
    let cascade = Cascade::new(data.problem(), &prefixes, None).expect("it is one");
    let decode = |problem: &Problem| plan(&engine, "cuda_decode", problem, Split::Whole);
    let (prefix, suffix) = (decode(cascade.prefix()), decode(cascade.suffix()));
    let plan = CascadePlan::new(cascade, prefix, suffix).expect("plans of its calls");
    let on_host = data.inputs().expect("valid");
    let uploaded = Uploaded::new(&stream, &on_host).expect("memory");
    let inputs = uploaded.inputs().expect("valid");
    let tables = Tables::new(&stream, plan.cascade(), &on_host);
    let mut workspace = CascadeWorkspace::new();
    let [with, without] = [Some(tables.views()), None].map(|tables| {
        let mut results = Results::new(&stream, 6);
        let outputs = &mut results.outputs(true);
        let ran = engine.cascade(&plan, &inputs, tables.as_ref(), outputs, &mut workspace, &stream);
        ran.expect("a run");
        results.bits(&stream)
    });
    assert_eq!(with, without);
}

#[test]
fn cascade_refuses_before_the_first_launch() {
    let Some((engine, stream)) = open("cascade_refuses_before_the_first_launch") else {
        return;
    };
    let mut workspace = CascadeWorkspace::new();
    let mut refuse = |data: &CaseData, tables: &dyn Fn(Tables) -> Option<Tables>, word: &str| {
        let plan = cascade_plan(&engine, data.problem(), ("cuda_decode", Some(16)));
        let on_host = data.inputs().expect("valid");
        let uploaded = Uploaded::new(&stream, &on_host).expect("memory");
        let tables = tables(Tables::new(&stream, plan.cascade(), &on_host));
        let tables = tables.as_ref().map(Tables::views);
        let mut results = Results::new(&stream, data.problem().lengths().total_q());
        let inputs = uploaded.inputs().expect("valid");
        let outputs = &mut results.outputs(true);
        let refused =
            engine.cascade(&plan, &inputs, tables.as_ref(), outputs, &mut workspace, &stream);
        let refused = refused.expect_err("refused");
        assert!(
            matches!(refused, Error::Call(_)) && refused.to_string().contains(word),
            "{refused}"
        );
        assert!(results.bits(&stream).0.iter().all(|&x| x == bf16::ZERO));
    };
    // Sequences that skip different numbers of pages have no views of one table.
    refuse(&case(|case| case), &|_| None, "skip");
    let narrow = |mut tables: Tables| {
        tables.shapes[1][1] -= 1;
        Some(tables)
    };
    refuse(&case(|case| case), &narrow, "entries");
    let of_sequences = case(|case| case.fp8(DType::F8E4M3, Scales::PerHead));
    refuse(&of_sequences, &Some, "one scale");
}
