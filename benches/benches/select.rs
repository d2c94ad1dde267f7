//! What choosing a kernel costs on the host: cold, and from the cache.
//!
//! The invariant: the problem is made outside the timed closure, as its construction belongs to the
//! caller's description and not to the choice.

use std::hint::black_box;

use attn_core::{DType, DeviceCaps, HostCaps, Problem, ProblemSpec};
use attn_kernels::catalog;
use attn_select::{PlanCache, choose};
use criterion::{Criterion, criterion_group, criterion_main};

fn problem(batch: usize) -> Problem {
    let mut spec = ProblemSpec::new(DType::BF16, 32, 8, 128, &vec![1; batch], &vec![4096; batch]);
    spec.causal = true;
    Problem::new(spec).expect("valid")
}

fn benches(c: &mut Criterion) {
    let caps = DeviceCaps { host: HostCaps::default(), cuda: None };
    for batch in [1, 64] {
        let p = problem(batch);
        c.bench_function(&format!("choose/cold/batch_{batch}"), |b| {
            b.iter(|| choose(black_box(&p), &caps, catalog()).expect("a CPU kernel"));
        });
        let cache = PlanCache::new(caps.clone(), catalog(), 64);
        c.bench_function(&format!("choose/cached/batch_{batch}"), |b| {
            b.iter(|| cache.choose(black_box(&p)).expect("a CPU kernel"));
        });
        // An equal problem that is another object, as the next step of a server would build it.
        let again = problem(batch);
        c.bench_function(&format!("choose/cached_equal/batch_{batch}"), |b| {
            b.iter(|| cache.choose(black_box(&again)).expect("a CPU kernel"));
        });
    }
}

criterion_group!(group, benches);
criterion_main!(group);
