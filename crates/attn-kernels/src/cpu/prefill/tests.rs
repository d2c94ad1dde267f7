//! The prefill kernel against the f64 reference, on every vector level, for every option.
//!
//! Invariant: a case is judged by the project's error rule; storage that no row may see holds NaN in
//! every case, so that reading it shows.

use std::ops::Range;

use attn_core::{
    Arrangement, BlockSizes, Bytes, CacheLayout, DType, Dropout, Element, Engine, ErrorRule,
    F8E4M3, F8E5M2, Family, Inputs, KvStorage, KvView, Outputs, PageOrder, Plan, Problem,
    ProblemSpec, Split, Strided, TensorView, TensorViewMut, Tile, ValueStorage, View, ViewMut,
};
use attn_reference::compare::judge;
use attn_reference::random::Random;
use attn_reference::{materialised, naive};
use half::{bf16, f16};

use super::super::simd::{Level, Simd};
use super::super::workers::Workers;
use super::super::workspace::Workspace;

/// Storage of one element type.
#[derive(Debug, Clone)]
enum Data {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
    F8E4M3(Vec<F8E4M3>),
    F8E5M2(Vec<F8E5M2>),
}

impl Data {
    fn new(dtype: DType, values: &[f32]) -> Self {
        fn cast<E: Element>(values: &[f32]) -> Vec<E> {
            values.iter().map(|&x| E::from_f32(x)).collect()
        }
        match dtype {
            DType::F32 => Self::F32(cast(values)),
            DType::F16 => Self::F16(cast(values)),
            DType::BF16 => Self::BF16(cast(values)),
            DType::F8E4M3 => Self::F8E4M3(cast(values)),
            DType::F8E5M2 => Self::F8E5M2(cast(values)),
        }
    }

    fn view(&self, layout: Strided) -> TensorView<'_> {
        match self {
            Self::F32(x) => TensorView::F32(View::new("x", x, layout).unwrap()),
            Self::F16(x) => TensorView::F16(View::new("x", x, layout).unwrap()),
            Self::BF16(x) => TensorView::BF16(View::new("x", x, layout).unwrap()),
            Self::F8E4M3(x) => TensorView::F8E4M3(View::new("x", x, layout).unwrap()),
            Self::F8E5M2(x) => TensorView::F8E5M2(View::new("x", x, layout).unwrap()),
        }
    }

    fn view_mut(&mut self, layout: Strided) -> TensorViewMut<'_> {
        match self {
            Self::F32(x) => TensorViewMut::F32(ViewMut::new("o", x, layout).unwrap()),
            Self::F16(x) => TensorViewMut::F16(ViewMut::new("o", x, layout).unwrap()),
            Self::BF16(x) => TensorViewMut::BF16(ViewMut::new("o", x, layout).unwrap()),
            _ => unreachable!("outputs are never fp8"),
        }
    }

    fn values(&self) -> Vec<f64> {
        fn widen<E: Element>(x: &[E]) -> Vec<f64> {
            x.iter().map(|x| f64::from(x.to_f32())).collect()
        }
        match self {
            Self::F32(x) => widen(x),
            Self::F16(x) => widen(x),
            Self::BF16(x) => widen(x),
            Self::F8E4M3(x) => widen(x),
            Self::F8E5M2(x) => widen(x),
        }
    }
}

/// A call with its storage.
struct Case {
    problem: Problem,
    q: Data,
    k: Data,
    v: Data,
    table: Vec<i32>,
    table_width: usize,
    pages: usize,
    mask: Vec<u8>,
    block_mask: Vec<u8>,
    bias: Vec<f32>,
    slopes: Vec<f32>,
    sinks: Vec<f32>,
    q_scale: Vec<f32>,
    k_scale: Vec<f32>,
    v_scale: Vec<f32>,
    dropout: [u64; 2],
}

impl Case {
    fn new(spec: ProblemSpec, seed: u64) -> Self {
        let problem = Problem::new(spec).unwrap();
        let mut random = Random::new(seed);
        let l = problem.lengths().clone();
        let (batch, heads, kv_heads) = (l.batch(), problem.q_heads(), problem.kv_heads());
        let q_shape = l.q_shape(problem.q_arrangement(), &[heads, problem.head_dim()]);
        let q: Vec<f32> = (0..q_shape.iter().product()).map(|_| random.normal()).collect();
        let (mut table, mut table_width, mut pages) = (Vec::new(), 0, 0);
        if let Some(layout) = problem.cache_layout() {
            table_width = layout.pages_for(l.longest_kv()) + 1;
            pages = (0..batch).map(|b| layout.pages_for(l.kv(b))).sum::<usize>() + 1;
            let mut ids: Vec<i32> = (0..i32::try_from(pages).unwrap()).collect();
            random.shuffle(&mut ids);
            table = vec![-1; batch * table_width];
            for b in 0..batch {
                for block in 0..layout.pages_for(l.kv(b)) {
                    table[b * table_width + block] = ids.pop().unwrap();
                }
            }
        }
        let mut case = Self {
            q: Data::new(problem.q_dtype(), &q),
            k: Data::F32(Vec::new()),
            v: Data::F32(Vec::new()),
            table,
            table_width,
            pages,
            mask: Vec::new(),
            block_mask: Vec::new(),
            bias: Vec::new(),
            slopes: (0..heads).map(|h| 0.5 / (1 + h) as f32).collect(),
            sinks: (0..heads).map(|_| random.normal() * 2.0).collect(),
            q_scale: (0..batch * kv_heads).map(|_| 0.5 + random.normal().abs()).collect(),
            k_scale: (0..batch * kv_heads).map(|_| 0.5 + random.normal().abs()).collect(),
            v_scale: (0..batch * kv_heads).map(|_| 0.5 + random.normal().abs()).collect(),
            dropout: [seed, seed << 40],
            problem,
        };
        case.k = case.keys(&mut random, case.problem.head_dim());
        case.v = case.keys(&mut random, case.problem.value_dim());
        let pairs = batch * heads * l.longest_q() * l.longest_kv();
        case.mask = (0..pairs).map(|_| u8::from(random.below(3) > 0)).collect();
        case.bias = (0..pairs)
            .map(|_| if random.below(9) == 0 { f32::NEG_INFINITY } else { random.normal() })
            .collect();
        if let Some(sizes) = case.problem.block_mask() {
            let [rows, cols] = case.block_shape(sizes);
            case.block_mask =
                (0..batch * heads * rows * cols).map(|_| u8::from(random.below(2) > 0)).collect();
        }
        case
    }

    fn block_shape(&self, sizes: BlockSizes) -> [usize; 2] {
        let l = self.problem.lengths();
        [l.longest_q().div_ceil(sizes.q), l.longest_kv().div_ceil(sizes.kv)]
    }

    /// Storage of K or V: numbers where some row of the sequence may look, NaN elsewhere.
    fn keys(&self, random: &mut Random, dim: usize) -> Data {
        let (problem, l) = (&self.problem, self.problem.lengths());
        let heads = problem.kv_heads();
        let mut storage = vec![f32::NAN; self.key_layout(dim).len()];
        for b in 0..l.batch() {
            let seen: Range<usize> = problem.band().rows(0..l.q(b), l.q(b), l.kv(b));
            for token in seen {
                for head in 0..heads {
                    let at = match problem.kv() {
                        KvStorage::Dense(Arrangement::Packed) => {
                            (l.kv_rows(b).start + token) * heads + head
                        }
                        KvStorage::Dense(Arrangement::Padded) => {
                            (b * l.longest_kv() + token) * heads + head
                        }
                        KvStorage::Paged(layout) => {
                            let (block, slot) = layout.locate(token);
                            let page = self.table[b * self.table_width + block];
                            let page = usize::try_from(page).unwrap();
                            match layout.order() {
                                PageOrder::Nhd => (page * layout.page_size() + slot) * heads + head,
                                PageOrder::Hnd => (page * heads + head) * layout.page_size() + slot,
                            }
                        }
                    };
                    for x in &mut storage[at * dim..(at + 1) * dim] {
                        *x = random.normal();
                    }
                }
            }
        }
        Data::new(problem.kv_dtype(), &storage)
    }

    fn key_layout(&self, dim: usize) -> Strided {
        let heads = self.problem.kv_heads();
        let shape = match self.problem.kv() {
            KvStorage::Dense(at) => self.problem.lengths().kv_shape(*at, &[heads, dim]).to_vec(),
            KvStorage::Paged(layout) => match layout.order() {
                PageOrder::Nhd => vec![self.pages, layout.page_size(), heads, dim],
                PageOrder::Hnd => vec![self.pages, heads, layout.page_size(), dim],
            },
        };
        Strided::contiguous("k", &shape).unwrap()
    }

    fn inputs(&self) -> Inputs<'_> {
        let p = &self.problem;
        let l = p.lengths();
        let (batch, heads) = (l.batch(), p.q_heads());
        let q_shape = l.q_shape(p.q_arrangement(), &[heads, p.head_dim()]);
        let k = self.k.view(self.key_layout(p.head_dim()));
        let v = self.v.view(self.key_layout(p.value_dim()));
        let kv = match p.cache_layout() {
            None => KvView::Dense { k, v },
            Some(layout) => KvView::Paged {
                k_cache: k,
                v_cache: v,
                block_table: View::contiguous("t", &self.table, &[batch, self.table_width])
                    .unwrap(),
                stamp: layout.id(),
            },
        };
        let pairs = [batch, heads, l.longest_q(), l.longest_kv()];
        let per_head = [batch, p.kv_heads()];
        Inputs {
            q: self.q.view(Strided::contiguous("q", &q_shape).unwrap()),
            kv,
            mask: p.has_mask().then(|| View::contiguous("m", &self.mask, &pairs).unwrap()),
            block_mask: p.block_mask().map(|sizes| {
                let [rows, cols] = self.block_shape(sizes);
                View::contiguous("b", &self.block_mask, &[batch, heads, rows, cols]).unwrap()
            }),
            bias: p.has_bias().then(|| View::contiguous("b", &self.bias, &pairs).unwrap()),
            alibi: p.has_alibi().then(|| View::contiguous("a", &self.slopes, &[heads]).unwrap()),
            sinks: p.has_sinks().then(|| View::contiguous("s", &self.sinks, &[heads]).unwrap()),
            q_scale: p
                .q_dtype()
                .is_fp8()
                .then(|| View::contiguous("q", &self.q_scale, &per_head).unwrap()),
            k_scale: p
                .kv_dtype()
                .is_fp8()
                .then(|| View::contiguous("k", &self.k_scale, &per_head).unwrap()),
            v_scale: p
                .kv_dtype()
                .is_fp8()
                .then(|| View::contiguous("v", &self.v_scale, &per_head).unwrap()),
            dropout: p.dropout().map(|_| View::contiguous("d", &self.dropout, &[2]).unwrap()),
        }
    }

    /// The kernel's output and LSE.
    fn run(&self, level: Level, threads: usize, tile: Tile) -> (Data, Vec<f32>) {
        let p = &self.problem;
        let (heads, at) = (p.q_heads(), p.q_arrangement());
        let o_shape = p.lengths().q_shape(at, &[heads, p.value_dim()]);
        let lse_shape = p.lengths().q_shape(at, &[heads]);
        let layout = Strided::contiguous("o", &o_shape).unwrap();
        let mut o = Data::new(p.out_dtype(), &vec![f32::NAN; layout.len()]);
        let mut lse = vec![f32::NAN; lse_shape.iter().product()];
        let mut outputs = Outputs {
            o: o.view_mut(layout),
            lse: Some(ViewMut::contiguous("lse", &mut lse, &lse_shape).unwrap()),
        };
        forward(p, level, threads, tile, &self.inputs(), &mut outputs);
        (o, lse)
    }

    /// Judges the kernel on every level of this processor.
    fn check(&self, what: &str) {
        let (inputs, dtype) = (self.inputs(), self.problem.out_dtype());
        inputs.check(&self.problem).unwrap();
        let reference = naive::forward_f64(&self.problem, &inputs).unwrap();
        let base = materialised::forward_error(&self.problem, &inputs, &reference).unwrap();
        for level in Level::ALL.into_iter().filter(|level| level.is_available()) {
            for tile in [Tile { q: 1, kv: 1 }, Tile { q: 96, kv: 48 }] {
                let (o, lse) = self.run(level, 2, tile);
                let lse: Vec<f64> = lse.into_iter().map(f64::from).collect();
                let o = judge(ErrorRule::new(dtype), &o.values(), &reference.o, base.o);
                assert!(o.is_within(), "{what} {level:?} {tile:?} o: {o:?}");
                let lse = judge(ErrorRule::new(DType::F32), &lse, &reference.lse, base.lse);
                assert!(lse.is_within(), "{what} {level:?} {tile:?} lse: {lse:?}");
            }
        }
    }
}

fn forward(
    problem: &Problem,
    level: Level,
    threads: usize,
    tile: Tile,
    inputs: &Inputs<'_>,
    outputs: &mut Outputs<'_>,
) {
    let plan = Plan {
        problem: problem.clone(),
        kernel: "cpu_prefill",
        engine: Engine::Cpu,
        family: Family::Prefill,
        tile,
        split: Split::Whole,
        workspace: Bytes::ZERO,
        shared_memory: Bytes::ZERO,
        reason: "a test",
        rejects: Vec::new(),
    };
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    let workers = Workers { simd: Simd::with_level(level).unwrap(), pool: &pool };
    let mut workspace = Workspace::new();
    let scratch = workspace.reserve(super::workspace(problem, tile, threads)).unwrap();
    // Stale scratch must not matter.
    scratch.fill(f32::NAN);
    super::forward(&workers, &plan, inputs, outputs, scratch).unwrap();
}

fn check(what: &str, dtype: DType, edit: impl Fn(&mut ProblemSpec)) {
    // Lengths around tile edges, more keys than rows and fewer, empty sides, grouped heads, a head
    // dimension that is no multiple of a vector.
    for (seed, dims) in [(1, (8, 8)), (2, (5, 19)), (3, (64, 33))] {
        let mut spec =
            ProblemSpec::new(dtype, 4, 2, dims.0, &[1, 17, 0, 26, 60], &[50, 17, 9, 0, 51]);
        spec.value_dim = dims.1;
        edit(&mut spec);
        Case::new(spec, seed).check(what);
    }
}

#[test]
fn prefill_matches_reference_for_each_mask() {
    check("none", DType::F32, |_| {});
    check("causal", DType::F32, |s| s.causal = true);
    check("left window", DType::F32, |s| s.window_left = Some(5));
    check("causal window", DType::F32, |s| {
        s.causal = true;
        s.window_left = Some(11);
    });
    check("both windows", DType::F32, |s| {
        s.window_left = Some(3);
        s.window_right = Some(7);
    });
    check("boolean mask", DType::F32, |s| s.mask = true);
    for (q, kv) in [(1, 3), (16, 16), (20, 7)] {
        check("block mask", DType::F32, |s| s.block_mask = Some(BlockSizes { q, kv }));
    }
    check("all masks", DType::F32, |s| {
        s.causal = true;
        s.mask = true;
        s.block_mask = Some(BlockSizes { q: 8, kv: 16 });
    });
}

#[test]
fn prefill_matches_reference_for_each_score_transform() {
    check("scale", DType::F32, |s| s.scale = Some(0.3));
    check("negative scale", DType::F32, |s| s.scale = Some(-0.3));
    check("no scale", DType::F32, |s| {
        s.scale = Some(0.0);
        s.causal = true;
    });
    check("soft-cap", DType::F32, |s| {
        s.softcap = Some(1.5);
        s.scale = Some(-0.7);
    });
    check("bias", DType::F32, |s| s.bias = true);
    check("ALiBi", DType::F32, |s| s.alibi = true);
    check("sinks", DType::F32, |s| s.sinks = true);
    check("everything", DType::F32, |s| {
        s.softcap = Some(3.0);
        s.bias = true;
        s.alibi = true;
        s.sinks = true;
        s.mask = true;
        s.causal = true;
        s.window_left = Some(30);
    });
}

#[test]
fn prefill_matches_reference_under_dropout() {
    let dropout = |p| Some(Dropout { p });
    for p in [0.1, 0.5, 0.99] {
        check("dropout", DType::F32, |s| s.dropout = dropout(p));
    }
    check("dropout and masks", DType::F32, |s| {
        (s.causal, s.window_left, s.mask, s.sinks) = (true, Some(9), true, true);
        s.dropout = dropout(0.3);
    });
    check("dropout over a cache", DType::F16, |s| {
        (s.kv_dtype, s.dropout) = (DType::F8E4M3, dropout(0.3));
    });
    check("dropout of fp8 weights", DType::F8E4M3, |s| s.dropout = dropout(0.3));
}

#[test]
fn prefill_matches_reference_for_each_storage() {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        check("packed", dtype, |s| s.causal = true);
        check("padded", dtype, |s| {
            s.q_arrangement = Arrangement::Padded;
            s.kv = KvStorage::Dense(Arrangement::Padded);
            s.causal = true;
            s.window_left = Some(8);
        });
        for order in [PageOrder::Nhd, PageOrder::Hnd] {
            for kv_dtype in [dtype, DType::F8E4M3, DType::F8E5M2] {
                check("paged", dtype, |s| {
                    s.kv_dtype = kv_dtype;
                    s.causal = true;
                    let value = ValueStorage::Separate(s.value_dim);
                    let layout =
                        CacheLayout::contiguous(kv_dtype, order, 4, s.kv_heads, s.head_dim, value);
                    s.kv = KvStorage::Paged(layout.unwrap());
                });
            }
        }
    }
    check("dense fp8", DType::F16, |s| s.kv_dtype = DType::F8E4M3);
    check("fp8 queries", DType::F8E4M3, |_| {});
    check("fp8 queries, negative scale", DType::F8E4M3, |s| s.scale = Some(-0.3));
    check("fp8 queries, options", DType::F8E4M3, |s| {
        (s.causal, s.bias, s.alibi, s.sinks, s.softcap) = (true, true, true, true, Some(3.0));
    });
}

#[test]
fn prefill_answers_empty_problems() {
    for (q, kv) in [(&[][..], &[][..]), (&[0, 0], &[3, 0]), (&[4], &[0])] {
        Case::new(ProblemSpec::new(DType::F32, 2, 1, 8, q, kv), 1).check("empty");
    }
    Case::new(ProblemSpec::new(DType::F32, 0, 1, 8, &[4], &[4]), 1).check("no heads");
}

#[test]
fn prefill_survives_adversarial_scores() {
    let mut spec = ProblemSpec::new(DType::F32, 2, 2, 4, &[70], &[90]);
    spec.scale = Some(1.0);
    for kind in 0..5u8 {
        let mut case = Case::new(spec.clone(), 9);
        let (Data::F32(q), Data::F32(k)) = (&mut case.q, &mut case.k) else {
            unreachable!("an f32 case")
        };
        q.fill(1.0);
        for (token, key) in k.chunks_mut(8).enumerate() {
            key.fill(match kind {
                0 => token as f32,
                1 => -1e4 - token as f32,
                2 => 0.25,
                3 if token == 0 => 1e30,
                3 => 0.0,
                _ if token < 60 => f32::NEG_INFINITY,
                _ => 0.5,
            });
        }
        case.check(&format!("adversarial {kind}"));
    }
}

#[test]
fn prefill_bits_do_not_depend_on_threads_tasks_or_batch_mates() {
    let spec = |q: &[usize], kv: &[usize]| {
        let mut spec = ProblemSpec::new(DType::F32, 4, 2, 16, q, kv);
        spec.causal = true;
        spec.window_left = Some(150);
        spec
    };
    let tile = |q| Tile { q, kv: 32 };
    let case = Case::new(spec(&[301], &[333]), 4);
    for level in Level::ALL.into_iter().filter(|level| level.is_available()) {
        let bits = |(o, lse): (Data, Vec<f32>)| {
            let o: Vec<u64> = o.values().iter().map(|x| x.to_bits()).collect();
            let lse: Vec<u32> = lse.iter().map(|x| x.to_bits()).collect();
            (o, lse)
        };
        let alone = bits(case.run(level, 1, tile(480)));
        assert_eq!(alone, bits(case.run(level, 1, tile(480))));
        assert_eq!(alone, bits(case.run(level, 3, tile(48))));
        assert_eq!(alone, bits(case.run(level, 2, tile(96))));
        // The same sequence after a longer one.
        let mut both = Case::new(spec(&[500, 301], &[600, 333]), 5);
        for (whole, part, width) in
            [(&mut both.q, &case.q, 64), (&mut both.k, &case.k, 32), (&mut both.v, &case.v, 32)]
        {
            let (Data::F32(whole), Data::F32(part)) = (whole, part) else {
                unreachable!("f32 cases")
            };
            assert_eq!(part.len() % width, 0);
            let start = whole.len() - part.len();
            whole[start..].copy_from_slice(part);
        }
        let (o, lse) = bits(both.run(level, 2, tile(480)));
        assert!(o.ends_with(&alone.0) && lse.ends_with(&alone.1), "{level:?}");
    }
}

#[test]
fn prefill_reads_and_writes_through_any_strides() {
    let case = Case::new(ProblemSpec::new(DType::F32, 2, 1, 5, &[21], &[30]), 6);
    let (dense, dense_lse) = case.run(Level::Portable, 1, Tile { q: 48, kv: 32 });
    let (Data::F32(q), Data::F32(k), Data::F32(v)) = (&case.q, &case.k, &case.v) else {
        unreachable!("an f32 case")
    };
    // Queries with the dimension outermost, keys backwards, values as they are.
    let columns: Vec<f32> = (0..q.len()).map(|i| q[i % 42 * 5 + i / 42]).collect();
    let backwards: Vec<f32> = k.chunks(5).rev().flatten().copied().collect();
    let q_layout = Strided::new("q", &[21, 2, 5], &[2, 1, 42], 0).unwrap();
    let k_layout = Strided::new("k", &[30, 1, 5], &[-5, 7, 1], 29 * 5).unwrap();
    let inputs = Inputs::dense(
        TensorView::F32(View::new("q", &columns, q_layout).unwrap()),
        TensorView::F32(View::new("k", &backwards, k_layout).unwrap()),
        TensorView::F32(View::contiguous("v", v, &[30, 1, 5]).unwrap()),
    );
    // Outputs: rows of 5 with a gap of 2; then with the dimension outermost.
    for (strides, storage) in [([14, 7, 1], 21 * 14), ([2, 1, 42], 210)] {
        let (mut o, mut lse) = (vec![7.5f32; storage], vec![7.5f32; 2 * 64]);
        let o_layout = Strided::new("o", &[21, 2, 5], &strides, 0).unwrap();
        let lse_layout = Strided::new("lse", &[21, 2], &[3, 64], 1).unwrap();
        let mut outputs = Outputs {
            o: TensorViewMut::F32(ViewMut::new("o", &mut o, o_layout.clone()).unwrap()),
            lse: Some(ViewMut::new("lse", &mut lse, lse_layout.clone()).unwrap()),
        };
        let tile = Tile { q: 48, kv: 32 };
        forward(&case.problem, Level::Portable, 1, tile, &inputs, &mut outputs);
        let mut written = 0;
        for row in 0..21 {
            for head in 0..2 {
                let got = lse[lse_layout.index(&[row, head]).unwrap()];
                assert_eq!(got, dense_lse[row * 2 + head]);
                for d in 0..5 {
                    let got = o[o_layout.index(&[row, head, d]).unwrap()];
                    assert_eq!(f64::from(got), dense.values()[(row * 2 + head) * 5 + d]);
                    written += 1;
                }
            }
        }
        let untouched = o.iter().filter(|&&x| x == 7.5).count();
        assert_eq!(untouched, o.len() - written);
    }
}
