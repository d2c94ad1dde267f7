//! The allocator's operations, one at a time, and their dependence on the size of the pool.
//!
//! The invariant: what a bench measures is what its name says; set-up is outside the timed closure.

use attn_paged::{Allocator, BlockPool, Config, CsrBuffers, Namespace, SeqId};
use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

const BLOCK: usize = 16;

fn pool(blocks: usize) -> Allocator {
    Allocator::new(Config::new(blocks, BLOCK)).expect("valid")
}

fn tokens(from: u32, count: u32) -> Vec<u32> {
    (from..from + count).collect()
}

fn allocate_free(c: &mut Criterion) {
    let mut group = c.benchmark_group("allocate_free");
    group.throughput(Throughput::Elements(1));
    let mut blocks = BlockPool::new(4096).expect("valid");
    group.bench_function("block", |b| {
        b.iter(|| {
            let block = blocks.allocate().expect("one is free");
            blocks.release(block)
        });
    });
    let mut sequences = pool(4096);
    group.bench_function("sequence_of_one_block", |b| {
        b.iter(|| {
            let a = sequences.alloc(&[1, 2, 3], Namespace::DEFAULT).expect("one is free");
            sequences.free(a.seq)
        });
    });
    group.finish();
}

fn append(c: &mut Criterion) {
    let mut group = c.benchmark_group("append");
    group.throughput(Throughput::Elements(8192));
    group.bench_function("one_token_8192_times", |b| {
        b.iter_batched(
            || {
                let mut p = pool(1024);
                let seq = p.alloc(&[1], Namespace::DEFAULT).expect("fits").seq;
                (p, seq)
            },
            |(mut p, seq)| {
                for token in 0..8192 {
                    p.append_one(seq, token).expect("fits");
                }
                p
            },
            BatchSize::LargeInput,
        );
    });
    group.finish();
}

fn batch_of_256() -> (Allocator, Vec<SeqId>) {
    let mut p = pool(256 * 8192 / BLOCK);
    let seqs = (0..256u32)
        .map(|n| p.alloc(&tokens(n * 10_000, 8192), Namespace::DEFAULT).expect("fits").seq)
        .collect();
    (p, seqs)
}

fn tables(c: &mut Criterion) {
    let (p, seqs) = batch_of_256();
    let width = 8192 / BLOCK;
    let mut table = vec![0i32; 256 * width];
    let mut group = c.benchmark_group("tables_256_x_8192");
    group.bench_function("padded", |b| {
        b.iter(|| p.write_padded_table(&seqs, width, &mut table).expect("fits"));
    });
    let (mut indptr, mut indices, mut last) = (vec![0; 257], vec![0; 256 * width], vec![0; 256]);
    group.bench_function("csr", |b| {
        b.iter(|| {
            let buffers =
                CsrBuffers { indptr: &mut indptr, indices: &mut indices, last_page_len: &mut last };
            p.write_csr_table(&seqs, buffers).expect("fits")
        });
    });
    group.finish();
}

fn prefix_match(c: &mut Criterion) {
    let mut p = pool(1024);
    let prompt = tokens(7, 8192);
    let seq = p.alloc(&prompt, Namespace::DEFAULT).expect("fits").seq;
    p.commit(seq, prompt.len()).expect("its own length");
    c.bench_function("prefix_match/8192_tokens", |b| {
        b.iter(|| p.match_prefix(&prompt, Namespace::DEFAULT));
    });
}

/// Allocation when every free block is cached, so that each one evicts: flat in the pool's size.
fn evict(c: &mut Criterion) {
    let mut group = c.benchmark_group("evict_and_allocate");
    for blocks in [1_000u32, 10_000, 100_000, 1_000_000] {
        let mut p = pool(blocks as usize);
        for n in 0..blocks {
            let block = tokens(n.wrapping_mul(2_654_435_761) >> 4, 16);
            let seq = p.alloc(&block, Namespace::DEFAULT).expect("fits").seq;
            p.commit(seq, BLOCK).expect("its own length");
            p.free(seq).expect("live");
        }
        let mut fresh = 0u32;
        group.bench_function(BenchmarkId::from_parameter(blocks), |b| {
            b.iter(|| {
                fresh = fresh.wrapping_add(17);
                let block = tokens(0x8000_0000 | fresh >> 1, 16);
                let seq = p.alloc(&block, Namespace::DEFAULT).expect("evicts").seq;
                p.commit(seq, BLOCK).expect("its own length");
                p.free(seq)
            });
        });
    }
    group.finish();
}

criterion_group!(benches, allocate_free, append, tables, prefix_match, evict);
criterion_main!(benches);
