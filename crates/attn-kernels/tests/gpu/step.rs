//! Decode steps that store their new keys.

use std::sync::Arc;

use attn_core::{
    CacheLayout, DType, KvStorage, PageOrder, Problem, ProblemSpec, Split, ValueStorage,
};
use attn_kernels::Error;
use attn_kernels::cuda::{
    AppendKv, CacheMut, CudaEngine, CudaStream, DeviceBuffer, DeviceTensor, DeviceTensorMut,
    DeviceView, DeviceViewMut, Inputs, KvTensors, Outputs, Pages, Workspace,
};
use half::bf16;

use crate::{engine, is_hopper, plan};

const HEADS: (usize, usize) = (8, 2);
const DIM: usize = 64;
const Q_LENS: [usize; 4] = [1, 3, 0, 8];
const KV_LENS: [usize; 4] = [70, 401, 9, 8];
const ROWS: usize = 12;

/// A step over shuffled pages, the new rows in a place of their own.
struct Step {
    layout: CacheLayout,
    columns: usize,
    q: DeviceBuffer,
    new: [DeviceBuffer; 2],
    cache: [DeviceBuffer; 2],
    table: DeviceBuffer,
    slots: DeviceBuffer,
    o: DeviceBuffer,
    lse: DeviceBuffer,
}

impl Step {
    fn new(stream: &CudaStream, order: PageOrder, page: usize) -> Self {
        let wave = |n: usize, step: f32| {
            let values: Vec<_> = (0..n).map(|i| bf16::from_f32((i as f32 * step).sin())).collect();
            DeviceBuffer::from_host(stream, &values).expect("memory")
        };
        let value = ValueStorage::Separate(DIM);
        let layout = CacheLayout::contiguous(DType::BF16, order, page, HEADS.1, DIM, value);
        let columns = 401usize.div_ceil(page);
        let pages = columns * Q_LENS.len();
        let (rows, new) = (ROWS * HEADS.0, ROWS * HEADS.1 * DIM);
        let cache = pages * page * HEADS.1 * DIM;
        let ids: Vec<usize> = (0..pages).map(|n| (n * 7919) % pages).collect();
        let place = |(sequence, token): (usize, usize)| {
            let page_id = ids[sequence * columns + token / page];
            i64::try_from(page_id * page + token % page).expect("small")
        };
        let tokens = |n: usize| (KV_LENS[n] - Q_LENS[n]..KV_LENS[n]).map(move |token| (n, token));
        let slots: Vec<i64> = (0..Q_LENS.len()).flat_map(tokens).map(place).collect();
        let table: Vec<i32> = ids.iter().map(|&id| i32::try_from(id).expect("few")).collect();
        Self {
            layout: layout.expect("valid"),
            columns,
            q: wave(rows * DIM, 0.37),
            new: [wave(new, 0.11), wave(new, 0.23)],
            cache: [wave(cache, 0.71), wave(cache, 0.013)],
            table: DeviceBuffer::from_host(stream, &table).expect("memory"),
            slots: DeviceBuffer::from_host(stream, &slots).expect("memory"),
            o: DeviceBuffer::zeroed(stream, rows * DIM * 2).expect("memory"),
            lse: DeviceBuffer::zeroed(stream, rows * 4).expect("memory"),
        }
    }

    fn problem(&self, edit: impl FnOnce(&mut ProblemSpec)) -> Problem {
        let mut spec = ProblemSpec::new(DType::BF16, HEADS.0, HEADS.1, DIM, &Q_LENS, &KV_LENS);
        (spec.causal, spec.kv) = (true, KvStorage::Paged(self.layout.clone()));
        edit(&mut spec);
        Problem::new(spec).expect("valid")
    }

    /// By a launch that appends and attends, or by two.
    fn run(
        &mut self,
        engine: &CudaEngine,
        stream: &Arc<CudaStream>,
        plan: &attn_core::Plan,
        is_fused: bool,
    ) -> Result<(), Error> {
        let mut workspace = Workspace::new();
        let page = self.layout.page_size();
        let pages = self.columns * Q_LENS.len();
        let shape = match self.layout.order() {
            PageOrder::Nhd => [pages, page, HEADS.1, DIM],
            PageOrder::Hnd => [pages, HEADS.1, page, DIM],
        };
        let rows = |field, buffer, heads: usize| {
            DeviceTensor::contiguous(field, buffer, DType::BF16, &[ROWS, heads, DIM])
        };
        let [k, v] = &mut self.cache;
        let cache = |field, buffer| DeviceTensorMut::contiguous(field, buffer, DType::BF16, &shape);
        let block_table =
            DeviceView::contiguous("block_table", &self.table, &[Q_LENS.len(), self.columns])?;
        let mut pages = Pages {
            cache: CacheMut {
                k_cache: cache("k_cache", k)?,
                v_cache: Some(cache("v_cache", v)?),
                stamp: self.layout.id(),
            },
            block_table: block_table.clone(),
        };
        let (k_new, v_new) = (rows("k", &self.new[0], HEADS.1)?, rows("v", &self.new[1], HEADS.1)?);
        let q = rows("q", &self.q, HEADS.0)?;
        let o_shape = [ROWS, HEADS.0, DIM];
        let mut outputs = Outputs {
            o: DeviceTensorMut::contiguous("o", &mut self.o, DType::BF16, &o_shape)?,
            lse: Some(DeviceViewMut::contiguous("lse", &mut self.lse, &o_shape[..2])?),
        };
        if is_fused {
            let call = Inputs::dense(q, k_new, v_new);
            let outputs = &mut outputs;
            return engine.forward_append(plan, &call, &mut pages, outputs, &mut workspace, stream);
        }
        let append = AppendKv {
            k: k_new,
            v: Some(v_new),
            slots: DeviceView::contiguous("slots", &self.slots, &[ROWS])?,
            rotary: None,
            k_scale: None,
            v_scale: None,
            sequences: None,
        };
        engine.append_kv(&self.layout, &append, &mut pages.cache, stream)?;
        let values = pages.cache.v_cache.as_ref().expect("apart");
        let kv = KvTensors::Paged {
            k_cache: pages.cache.k_cache.shared(),
            v_cache: values.shared(),
            block_table,
            stamp: self.layout.id(),
        };
        engine.forward(plan, &Inputs::new(q, kv), &mut outputs, &mut workspace, stream)
    }

    /// Output, LSE and cache, as bits.
    fn left(&self, stream: &CudaStream) -> [Vec<u16>; 4] {
        let read = |buffer: &DeviceBuffer| buffer.to_host(stream, buffer.bytes() / 2);
        [&self.o, &self.lse, &self.cache[0], &self.cache[1]].map(|b| read(b).expect("a copy"))
    }
}

fn kernels(engine: &CudaEngine) -> &'static [&'static str] {
    if is_hopper(engine) { &["cuda_decode", "cuda_decode_sm90a"] } else { &["cuda_decode"] }
}

#[test]
fn step_that_appends_leaves_what_two_launches_leave() {
    let Some(engine) = engine("step_that_appends_leaves_what_two_launches_leave") else {
        return;
    };
    let stream = engine.new_stream().expect("a stream");
    let windows: [(Option<usize>, Option<usize>); 3] =
        [(None, None), (Some(5), None), (None, Some(2))];
    for kernel in kernels(&engine) {
        for (order, page) in [(PageOrder::Nhd, 16), (PageOrder::Hnd, 3), (PageOrder::Nhd, 1)] {
            for (split, (left, right)) in [Split::Whole, Split::Parts(3), Split::Chunks(128)]
                .into_iter()
                .flat_map(|split| windows.map(|window| (split, window)))
            {
                let mut left_by = [true, false].map(|is_fused| {
                    let mut step = Step::new(&stream, order, page);
                    let problem = step.problem(|spec| {
                        (spec.causal, spec.window_left) = (right.is_none(), left);
                        spec.window_right = right;
                    });
                    let plan = plan(&engine, kernel, &problem, split);
                    let before = step.left(&stream);
                    step.run(&engine, &stream, &plan, is_fused).expect("a run");
                    let after = step.left(&stream);
                    assert_ne!(before[2], after[2], "no key was written");
                    after
                });
                let [fused, apart] = &mut left_by;
                assert!(fused == apart, "{kernel} {order} {page} {split} {left:?} {right:?}");
            }
        }
    }
}

#[test]
fn step_writes_no_key_whose_page_is_outside_the_cache() {
    let Some(engine) = engine("step_writes_no_key_whose_page_is_outside_the_cache") else {
        return;
    };
    let stream = engine.new_stream().expect("a stream");
    for kernel in kernels(&engine) {
        let mut step = Step::new(&stream, PageOrder::Nhd, 16);
        let mut ids: Vec<i32> = step.table.to_host(&stream, step.columns * 4).expect("a copy");
        // The last page of the first sequence, and the only one of the last.
        (ids[69 / 16], ids[3 * step.columns]) = (-1, i32::MAX);
        step.table = DeviceBuffer::from_host(&stream, &ids).expect("memory");
        let problem = step.problem(|_| ());
        let before = step.left(&stream);
        let plan = plan(&engine, kernel, &problem, Split::Parts(2));
        step.run(&engine, &stream, &plan, true).expect("a run");
        let after = step.left(&stream);
        let wide: Vec<bf16> = after[0].iter().map(|&bits| bf16::from_bits(bits)).collect();
        let row = HEADS.0 * DIM;
        for (at, x) in wide.iter().enumerate() {
            let is_its = at / row == 0 || at / row >= 4;
            assert_eq!(x.is_nan(), is_its, "{kernel}: element {at}");
        }
        let changed = before[2].iter().zip(&after[2]).filter(|(before, after)| before != after);
        // Three rows of the second sequence.
        assert!((1..=3 * HEADS.1 * DIM).contains(&changed.count()), "{kernel}");
    }
}

#[test]
fn step_refuses_what_it_does_not_append_to() {
    let Some(engine) = engine("step_refuses_what_it_does_not_append_to") else {
        return;
    };
    let stream = engine.new_stream().expect("a stream");
    let mut step = Step::new(&stream, PageOrder::Nhd, 16);
    let mut refusal = |kernel: &str, edit: &dyn Fn(&mut ProblemSpec)| {
        let problem = step.problem(edit);
        let plan = plan(&engine, kernel, &problem, Split::Whole);
        let before = step.left(&stream);
        let error = step.run(&engine, &stream, &plan, true).expect_err("refused").to_string();
        assert_eq!(before, step.left(&stream));
        error
    };
    let naive = refusal("cuda_naive", &|_| ());
    assert!(naive.contains("cuda_naive"), "{naive}");
    let short = refusal("cuda_decode", &|spec| spec.kv_lens[3] = 7);
    assert!(short.contains("at least 8 keys in sequence 3"), "{short}");
    let padded = refusal("cuda_decode", &|spec| {
        spec.q_arrangement = attn_core::Arrangement::Padded;
    });
    assert!(padded.contains("packed rows"), "{padded}");
    let fewer = refusal("cuda_decode", &|spec| spec.q_lens[1] = 2);
    assert!(fewer.contains("shape"), "{fewer}");
}
