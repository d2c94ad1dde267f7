//! The CPU engine's kernels on the shapes of the speed section, in elements per second.
//!
//! The invariant: throughput counts FLOPs of both products, halved for causal, or bytes of keys and
//! values once. Peers are compared by `attn-bench peers`, in one run; this is for watching ourselves.

use std::time::Duration;

use attn_core::{
    CacheLayout, DType, Inputs, KvStorage, KvView, Outputs, PageOrder, Problem, ProblemSpec,
    TensorView, TensorViewMut, ValueStorage, View, ViewMut,
};
use attn_kernels::catalog;
use attn_kernels::cpu::{CpuEngine, Workspace};
use attn_select::choose;
use criterion::{Criterion, Throughput, criterion_group, criterion_main};

/// Values in -1..1 that repeat after 2^16: the kernels' speed does not depend on them.
fn values(len: usize) -> Vec<f32> {
    let mut state = 1u16;
    let mut next = || {
        state = state.wrapping_mul(25_173).wrapping_add(13_849);
        f32::from(state) / 32_768.0 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn prefill(c: &mut Criterion) {
    let engine = CpuEngine::new().expect("threads start");
    let mut group = c.benchmark_group("prefill_f32_h8");
    group.sample_size(10).measurement_time(Duration::from_secs(3));
    for (dim, len, causal) in
        [(64, 2048, true), (64, 2048, false), (128, 2048, true), (128, 2048, false)]
    {
        let mut spec = ProblemSpec::new(DType::F32, 8, 8, dim, &[len], &[len]);
        spec.causal = causal;
        let problem = Problem::new(spec).expect("valid");
        let plan = choose(&problem, &engine.caps(), catalog()).expect("a CPU kernel");
        let (data, mut o) = (values(len * 8 * dim), vec![0f32; len * 8 * dim]);
        let shape = [len, 8, dim];
        let mut workspace = Workspace::new();
        let pairs = (len * len / if causal { 2 } else { 1 }) as u64;
        group.throughput(Throughput::Elements(4 * 8 * dim as u64 * pairs));
        let mask = if causal { "causal" } else { "full" };
        group.bench_function(format!("d{dim}_s{len}_{mask}"), |b| {
            b.iter(|| {
                let view = || TensorView::F32(View::contiguous("x", &data, &shape).expect("fits"));
                let inputs = Inputs::dense(view(), view(), view());
                let o = ViewMut::contiguous("o", &mut o, &shape).expect("fits");
                let mut outputs = Outputs { o: TensorViewMut::F32(o), lse: None };
                engine.forward(&plan, &inputs, &mut outputs, &mut workspace).expect("runs");
            });
        });
    }
    group.finish();
}

fn decode(c: &mut Criterion) {
    const PAGE: usize = 16;
    let engine = CpuEngine::new().expect("threads start");
    let (batch, q_heads, kv_heads, dim, context) = (8, 32, 8, 128, 4096);
    let layout = CacheLayout::contiguous(
        DType::F32,
        PageOrder::Nhd,
        PAGE,
        kv_heads,
        dim,
        ValueStorage::Separate(dim),
    )
    .expect("valid");
    let mut spec = ProblemSpec::new(
        DType::F32,
        q_heads,
        kv_heads,
        dim,
        &vec![1; batch],
        &vec![context; batch],
    );
    spec.kv = KvStorage::Paged(layout.clone());
    let problem = Problem::new(spec).expect("valid");
    let plan = choose(&problem, &engine.caps(), catalog()).expect("a CPU kernel");
    let width = context / PAGE;
    let pages = batch * width;
    // An odd multiplier permutes the pages of a power of two.
    let table: Vec<i32> =
        (0..pages).map(|n| i32::try_from(n * 1_237 % pages).expect("small")).collect();
    let cache_shape = [pages, PAGE, kv_heads, dim];
    let cache = values(cache_shape.iter().product());
    let values_cache = values(cache.len());
    let q = values(batch * q_heads * dim);
    let mut o = vec![0f32; q.len()];
    let mut workspace = Workspace::new();
    let mut group = c.benchmark_group("decode_f32_paged");
    group.sample_size(10).measurement_time(Duration::from_secs(3));
    group.throughput(Throughput::Bytes(2 * 4 * cache.len() as u64));
    group.bench_function("b8_h32.8_d128_ctx4096_page16", |b| {
        b.iter(|| {
            let q = View::contiguous("q", &q, &[batch, q_heads, dim]).expect("fits");
            let view =
                |data| TensorView::F32(View::contiguous("x", data, &cache_shape).expect("fits"));
            let mut inputs = Inputs::dense(TensorView::F32(q), view(&cache), view(&values_cache));
            inputs.kv = KvView::Paged {
                k_cache: view(&cache),
                v_cache: view(&values_cache),
                block_table: View::contiguous("table", &table, &[batch, width]).expect("fits"),
                stamp: layout.id(),
            };
            let o = ViewMut::contiguous("o", &mut o, &[batch, q_heads, dim]).expect("fits");
            let mut outputs = Outputs { o: TensorViewMut::F32(o), lse: None };
            engine.forward(&plan, &inputs, &mut outputs, &mut workspace).expect("runs");
        });
    });
    group.finish();
}

criterion_group!(benches, prefill, decode);
criterion_main!(benches);
