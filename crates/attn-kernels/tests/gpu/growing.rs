//! One captured graph for sequences that grow.

use std::sync::Arc;

use attn_core::{
    CacheLayout, DType, KvStorage, PageOrder, Problem, ProblemSpec, Split, ValueStorage,
};
use attn_kernels::Error;
use attn_kernels::cuda::{
    CudaEngine, CudaStream, DeviceBuffer, DeviceTensor, DeviceTensorMut, DeviceView, Inputs,
    KvTensors, Outputs, Workspace,
};
use half::bf16;

use crate::{engine, is_hopper, plan};

const HEADS: (usize, usize) = (8, 2);
const DIM: usize = 64;
const PAGE: usize = 16;
const MOST: [usize; 3] = [500, 300, 70];
const COLUMNS: usize = 32;
const PAGES: usize = MOST.len() * COLUMNS;

/// Tensors of three sequences, of one row each, over shuffled pages.
struct Step {
    q: DeviceBuffer,
    k: DeviceBuffer,
    v: DeviceBuffer,
    table: DeviceBuffer,
    o: DeviceBuffer,
}

impl Step {
    fn new(stream: &CudaStream) -> Self {
        let wave = |n: usize, step: f32| {
            let values: Vec<_> = (0..n).map(|i| bf16::from_f32((i as f32 * step).sin())).collect();
            DeviceBuffer::from_host(stream, &values).expect("memory")
        };
        let rows = MOST.len() * HEADS.0 * DIM;
        let cache = PAGES * PAGE * HEADS.1 * DIM;
        // A multiplier without a factor in common with the pages shuffles them.
        let page = |n: usize| i32::try_from(n * 31 % PAGES).expect("few pages");
        let table: Vec<i32> = (0..PAGES).map(page).collect();
        Self {
            q: wave(rows, 0.37),
            k: wave(cache, 0.71),
            v: wave(cache, 0.013),
            table: DeviceBuffer::from_host(stream, &table).expect("memory"),
            o: DeviceBuffer::zeroed(stream, rows * 2).expect("memory"),
        }
    }

    fn with<T>(
        &mut self,
        run: impl FnOnce(&Inputs<'_>, &mut Outputs<'_>) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let of = |field, buffer, shape: &[usize]| {
            DeviceTensor::contiguous(field, buffer, DType::BF16, shape)
        };
        let (q, pages) = ([MOST.len(), HEADS.0, DIM], [PAGES, PAGE, HEADS.1, DIM]);
        let mut inputs = Inputs::dense(
            of("q", &self.q, &q)?,
            of("k", &self.k, &pages)?,
            of("v", &self.v, &pages)?,
        );
        inputs.kv = KvTensors::Paged {
            k_cache: of("k_cache", &self.k, &pages)?,
            v_cache: of("v_cache", &self.v, &pages)?,
            block_table: DeviceView::contiguous(
                "block_table",
                &self.table,
                &[MOST.len(), COLUMNS],
            )?,
            stamp: layout().id(),
        };
        let o = DeviceTensorMut::contiguous("o", &mut self.o, DType::BF16, &q)?;
        run(&inputs, &mut Outputs { o, lse: None })
    }

    fn output(&self, stream: &CudaStream) -> Vec<f32> {
        let values: Vec<bf16> = self.o.to_host(stream, MOST.len() * HEADS.0 * DIM).expect("a copy");
        values.into_iter().map(bf16::to_f32).collect()
    }
}

fn layout() -> CacheLayout {
    let value = ValueStorage::Separate(DIM);
    CacheLayout::contiguous(DType::BF16, PageOrder::Nhd, PAGE, HEADS.1, DIM, value).expect("valid")
}

fn problem(kv_lens: &[usize]) -> Problem {
    let mut spec =
        ProblemSpec::new(DType::BF16, HEADS.0, HEADS.1, DIM, &vec![1; kv_lens.len()], kv_lens);
    (spec.causal, spec.kv) = (true, KvStorage::Paged(layout()));
    Problem::new(spec).expect("valid")
}

/// What the oracle answers for these lengths.
fn expected(engine: &CudaEngine, stream: &Arc<CudaStream>, kv_lens: &[usize]) -> Vec<f32> {
    let plan = plan(engine, "cuda_naive", &problem(kv_lens), Split::Whole);
    let (mut step, mut workspace) = (Step::new(stream), Workspace::new());
    step.with(|inputs, outputs| engine.forward(&plan, inputs, outputs, &mut workspace, stream))
        .expect("a run");
    step.output(stream)
}

#[test]
fn one_graph_serves_lengths_that_grow() {
    let Some(engine) = engine("one_graph_serves_lengths_that_grow") else {
        return;
    };
    let stream = engine.new_stream().expect("a stream");
    let kernels = if is_hopper(&engine) {
        &["cuda_decode", "cuda_decode_sm90a"][..]
    } else {
        &["cuda_decode"]
    };
    for kernel in kernels {
        for split in [Split::Whole, Split::Parts(4), Split::Chunks(128)] {
            let plan = plan(&engine, kernel, &problem(&MOST), split);
            let (mut step, mut workspace) = (Step::new(&stream), Workspace::new());
            let mut growing = engine.growing(&plan, &mut workspace, &stream).expect("prepared");
            let graph = engine.capture(&stream, || {
                step.with(|inputs, outputs| {
                    engine.forward_growing(&growing, inputs, outputs, &mut workspace, &stream)
                })
            });
            let graph = graph.expect("a graph");
            for lens in [MOST, [1, 1, 1], [500, 0, 2], [16, 17, 70], [129, 300, 33], MOST] {
                growing.set_lengths(&lens, &stream).expect("within the plan's");
                step.o.fill(&stream, 0xFF).expect("a fill");
                graph.launch(&stream).expect("a replay");
                let (got, want) = (step.output(&stream), expected(&engine, &stream, &lens));
                for (got, want) in got.iter().zip(&want) {
                    assert!((got - want).abs() <= 0.02, "{kernel} {split} {lens:?}: {got} {want}");
                }
            }
            let refused = growing.set_lengths(&[501, 1, 1], &stream).expect_err("too long");
            assert!(refused.to_string().contains("at most 500 keys"), "{refused}");
            let refused = growing.set_lengths(&[1, 1], &stream).expect_err("too few");
            assert!(refused.to_string().contains("3 sequences"), "{refused}");
            let refused = step
                .with(|inputs, outputs| {
                    let mut empty = Workspace::new();
                    engine.forward_growing(&growing, inputs, outputs, &mut empty, &stream)
                })
                .map_or_else(|error| error.to_string(), |()| "ran".to_owned());
            let has_parts = split != Split::Whole;
            assert_eq!(has_parts, refused.contains("the workspace that the plan was made with"));
        }
    }
}
