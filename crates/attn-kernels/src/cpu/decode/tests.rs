//! The decode kernel against the f64 reference, and its promises about bits.
//!
//! Invariant: every case of the reference's corpus is run on every vector level there is, in one
//! part, in few and in many, with scratch that holds NaN beforehand and storage that holds NaN
//! wherever no row may look.

use attn_core::{
    Bytes, DType, Engine, Family, Inputs, KvView, Outputs, PageOrder, Plan, Problem, ProblemSpec,
    Split, TensorView, Tile, View,
};
use attn_reference::paged::gather;
use attn_reference::{
    Case, CaseData, Failure, OutputBuffers, Placement, Reference, corpus, judge_forward,
};

use super::{Keys, forward, workspace};
use crate::cpu::simd::{Level, Simd};
use crate::cpu::workers::Workers;
use crate::cpu::workspace::Workspace;

/// How one run divides its work.
#[derive(Debug, Clone, Copy)]
struct Run {
    level: Level,
    threads: usize,
    split: Split,
    keys: usize,
}

impl Run {
    fn new(split: Split) -> Self {
        Self { level: Level::detect(), threads: 2, split, keys: 16 }
    }

    fn pool(self) -> rayon::ThreadPool {
        rayon::ThreadPoolBuilder::new().num_threads(self.threads).build().expect("threads start")
    }

    fn forward(
        self,
        pool: &rayon::ThreadPool,
        problem: &Problem,
        inputs: &Inputs<'_>,
        outputs: &mut Outputs<'_>,
    ) -> Result<(), attn_core::Error> {
        inputs.check(problem)?;
        outputs.check(problem)?;
        let plan = Plan {
            problem: problem.clone(),
            kernel: "cpu_decode",
            engine: Engine::Cpu,
            family: Family::Decode,
            tile: Tile { q: 1, kv: self.keys },
            split: self.split,
            workspace: Bytes::ZERO,
            shared_memory: Bytes::ZERO,
            reason: "test",
            rejects: vec![],
        };
        let workers = Workers { simd: Simd::with_level(self.level).expect("available"), pool };
        let len = workspace(problem, plan.tile, self.split, self.threads);
        let mut scratch = Workspace::new();
        let scratch = scratch.reserve(len).expect("fits");
        scratch.fill(f32::from_bits(u32::MAX));
        forward(&workers, &plan, inputs, outputs, scratch)
    }

    /// The results of a call on inputs that are not a corpus case's own.
    fn results(self, problem: &Problem, inputs: &Inputs<'_>) -> Reference {
        let mut buffers = OutputBuffers::new(problem, Placement::Contiguous).expect("fits");
        self.forward(&self.pool(), problem, inputs, &mut buffers.outputs().expect("fits"))
            .expect("a checked call runs");
        buffers.values()
    }
}

fn judge(data: &CaseData, run: Run, pool: &rayon::ThreadPool) {
    let verdict = judge_forward(data, |problem, inputs, mut outputs| {
        run.forward(pool, problem, inputs, &mut outputs)
    });
    match verdict {
        Ok(_) => {}
        Err(Failure::Engine { case, source }) => panic!("{case}, {run:?}: refused: {source}"),
        Err(other) => panic!("{run:?}: {other}"),
    }
}

fn levels() -> impl Iterator<Item = Level> {
    Level::ALL.into_iter().filter(|level| level.is_available())
}

fn bits(values: &Reference) -> (Vec<u64>, Vec<u64>) {
    let bits = |x: &[f64]| x.iter().map(|x| x.to_bits()).collect();
    (bits(&values.o), bits(&values.lse))
}

#[test]
fn decode_agrees_with_the_reference_on_every_case_and_level() {
    let pool = Run::new(Split::Whole).pool();
    for case in corpus() {
        let data = case.build().expect("a corpus case builds");
        for level in levels() {
            for split in [Split::Whole, Split::Parts(3), Split::Chunks(5)] {
                judge(&data, Run { level, ..Run::new(split) }, &pool);
            }
        }
    }
}

#[test]
fn decode_agrees_with_the_reference_for_every_split() {
    let pool = Run::new(Split::Whole).pool();
    for case in corpus() {
        let data = case.build().expect("a corpus case builds");
        for split in (1..=16).map(Split::Parts).chain([1, 3, 7, 17, 33].map(Split::Chunks)) {
            judge(&data, Run::new(split), &pool);
        }
        for keys in [1, 32, 64, 1000] {
            judge(&data, Run { keys, ..Run::new(Split::Whole) }, &pool);
        }
    }
}

/// Longer than the corpus' cases: several tiles a part, several rows, pages that tiles straddle.
#[test]
fn decode_agrees_with_the_reference_on_long_contexts() {
    let pool = Run::new(Split::Whole).pool();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (order, size) in [(PageOrder::Nhd, 16), (PageOrder::Hnd, 16), (PageOrder::Nhd, 5)] {
            let case = |q_lens: &[usize]| {
                Case::new("long", dtype, (6, 2), 40, q_lens, &[300, 1, 77]).paged(order, size)
            };
            for case in [
                case(&[1, 1, 1]),
                case(&[4, 1, 16]).causal(),
                case(&[2, 1, 3]).causal().window(Some(90), None).sinks(),
                case(&[2, 1, 3]).softcap(3.0).alibi(),
            ] {
                let data = case.build().expect("builds");
                for level in levels() {
                    for split in [Split::Whole, Split::Chunks(64), Split::Chunks(37)] {
                        judge(&data, Run { level, ..Run::new(split) }, &pool);
                    }
                }
            }
        }
    }
}

/// One sequence of a packed, paged f32 call as a call of its own.
fn alone<'a>(problem: &Problem, inputs: &Inputs<'a>, sequence: usize) -> (Problem, Inputs<'a>) {
    let mut spec = problem.spec().clone();
    spec.q_lens = vec![problem.lengths().q(sequence)];
    spec.kv_lens = vec![problem.lengths().kv(sequence)];
    let mut inputs = inputs.clone();
    let TensorView::F32(q) = &inputs.q else { panic!("an f32 case") };
    inputs.q = TensorView::F32(problem.q_rows(q, sequence).expect("fits"));
    let KvView::Paged { block_table, .. } = &mut inputs.kv else { panic!("a paged case") };
    *block_table = block_table.narrow(0, sequence..sequence + 1).expect("fits");
    (Problem::new(spec).expect("valid"), inputs)
}

#[test]
fn decode_gives_a_sequence_the_same_bits_alone_and_in_a_batch() {
    let case = Case::new("batch", DType::F32, (8, 2), 32, &[1, 3, 2], &[150, 40, 333])
        .causal()
        .sinks()
        .paged(PageOrder::Nhd, 16);
    let data = case.build().expect("builds");
    let (problem, inputs) = (data.problem(), data.inputs().expect("fits"));
    let row = problem.q_heads() * problem.value_dim();
    for split in [Split::Whole, Split::Parts(4), Split::Chunks(50)] {
        let batch = Run::new(split).results(problem, &inputs);
        for sequence in 0..3 {
            let (own, inputs) = alone(problem, &inputs, sequence);
            let got = Run::new(split).results(&own, &inputs);
            let rows = problem.lengths().q_rows(sequence);
            let of = Reference {
                o: batch.o[rows.start * row..rows.end * row].to_vec(),
                lse: batch.lse[rows.start * problem.q_heads()..rows.end * problem.q_heads()]
                    .to_vec(),
            };
            assert_eq!(bits(&got), bits(&of), "sequence {sequence}, {split}");
        }
    }
}

#[test]
fn decode_gives_the_same_bits_with_any_number_of_threads() {
    let case = Case::new("threads", DType::F32, (4, 2), 24, &[2, 1], &[200, 90])
        .causal()
        .paged(PageOrder::Hnd, 8);
    let data = case.build().expect("builds");
    let inputs = data.inputs().expect("fits");
    for split in [Split::Whole, Split::Parts(5)] {
        let one = Run { threads: 1, ..Run::new(split) }.results(data.problem(), &inputs);
        for threads in [2, 3, 7] {
            let many = Run { threads, ..Run::new(split) }.results(data.problem(), &inputs);
            assert_eq!(bits(&one), bits(&many), "{threads} threads, {split}");
        }
    }
}

#[test]
fn decode_gives_the_same_bits_from_pages_and_from_dense_rows() {
    for (order, size) in [(PageOrder::Nhd, 16), (PageOrder::Hnd, 16), (PageOrder::Nhd, 1)] {
        let case = Case::new("pages", DType::F32, (4, 2), 24, &[2, 1], &[200, 90]).causal();
        let data = case.paged(order, size).build().expect("builds");
        let inputs = data.inputs().expect("fits");
        let dense = gather(data.problem(), &inputs).expect("gathers");
        for split in [Split::Whole, Split::Chunks(48)] {
            let run = Run::new(split);
            let from_pages = run.results(data.problem(), &inputs);
            let from_rows = run.results(dense.problem(), &dense.inputs(&inputs).expect("fits"));
            assert_eq!(bits(&from_pages), bits(&from_rows), "{order}, pages of {size}, {split}");
        }
    }
}

#[test]
fn decode_divides_the_visible_keys_of_a_window() {
    let mut case = Case::new("window", DType::F32, (1, 1), 8, &[1], &[100_000]);
    case = case.causal().window(Some(4095), None);
    let keys = Keys::new(&case.problem().expect("valid"), Split::Parts(4), 0);
    assert_eq!(keys.visible, 95_904..100_000);
    let parts: Vec<_> = (0..keys.parts).map(|part| keys.part(part)).collect();
    assert_eq!(parts.len(), 4);
    assert!(parts.iter().all(|part| part.len() == 1024));
    assert_eq!((parts[0].start, parts[3].end), (95_904, 100_000));
    let problem = case.problem().expect("valid");
    for keys in [usize::MAX, usize::MAX - 30] {
        for split in [Split::Chunks(keys), Split::Between { parts: 1, keys }] {
            assert_eq!(Keys::new(&problem, split, 0).part(0), 95_904..100_000, "{split}");
        }
    }
}

#[test]
fn decode_of_nothing_writes_the_empty_result() {
    let case = Case::new("empty", DType::F32, (2, 1), 8, &[2, 1, 0], &[0, 3, 5]).padded().sinks();
    let data = case.build().expect("builds");
    let got = Run::new(Split::Parts(2)).results(data.problem(), &data.inputs().expect("fits"));
    let inputs = data.inputs().expect("fits");
    let sinks: &View<'_, f32> = inputs.sinks.as_ref().expect("has sinks");
    for head in 0..2 {
        let sink = f64::from(sinks.get(&[head]).expect("a sink a head"));
        assert!((got.lse[head] - sink).abs() < 1e-6 * sink.abs().max(1.0));
        // The second sequence has one row, the third none; the rest is padding.
        assert_eq!(got.lse[3 * 2 + head], f64::NEG_INFINITY);
        assert_eq!(got.lse[4 * 2 + head], f64::NEG_INFINITY);
    }
    assert!(got.o[..2 * 2 * 8].iter().chain(&got.o[3 * 2 * 8..]).all(|&x| x == 0.0));
}

#[test]
fn decode_reads_no_row_that_a_mask_hides_from_all() {
    let mut spec = ProblemSpec::new(DType::F32, 2, 1, 4, &[1], &[40]);
    spec.mask = true;
    let problem = Problem::new(spec).expect("valid");
    let hidden = |key: usize| key.is_multiple_of(3) || key >= 32;
    let rows: Vec<f32> =
        (0..40).flat_map(|j| [if hidden(j) { f32::NAN } else { 1.0 }; 4]).collect();
    let mask: Vec<u8> = (0..40).map(|j| u8::from(!hidden(j))).collect();
    let q = [0.5f32; 8];
    let view = |x, shape: &[usize]| TensorView::F32(View::contiguous("x", x, shape).expect("fits"));
    let mut inputs =
        Inputs::dense(view(&q, &[1, 2, 4]), view(&rows, &[40, 1, 4]), view(&rows, &[40, 1, 4]));
    inputs.mask = Some(View::contiguous("mask", &mask, &[1, 40]).expect("fits"));
    for split in [Split::Whole, Split::Chunks(7)] {
        let got = Run::new(split).results(&problem, &inputs);
        // Equal keys and values: the output is the value, the LSE counts the keys.
        let lse = 1.0 + f64::from(mask.iter().map(|&x| u32::from(x)).sum::<u32>()).ln();
        assert!(got.o.iter().all(|o| (o - 1.0).abs() < 1e-6), "{:?}", got.o);
        assert!(got.lse.iter().all(|x| (x - lse).abs() < 1e-5), "{:?}", got.lse);
    }
}

/// A left-padding mask made of a large finite bias hides its keys and leaves the rest exact.
#[test]
fn decode_takes_biases_whose_last_place_is_worth_many_powers_of_two() {
    let mut spec = ProblemSpec::new(DType::F32, 1, 1, 4, &[1], &[128]);
    spec.bias = true;
    let problem = Problem::new(spec).expect("valid");
    let ones = vec![1f32; 128 * 4];
    let values: Vec<f32> = (0u8..128).flat_map(|j| [f32::from(j) + 1.0; 4]).collect();
    for low in [-1e8f32, -1.5e9, -1e10, -1e20, -1e38] {
        for (hidden, want) in [(64, 96.5), (128, 64.5), (0, 64.5)] {
            let bias: Vec<f32> = (0..128).map(|j| if j < hidden { low } else { 0.0 }).collect();
            let mut inputs = Inputs::dense(
                View::contiguous("q", &ones[..4], &[1, 1, 4]).expect("fits").into(),
                View::contiguous("k", &ones, &[128, 1, 4]).expect("fits").into(),
                View::contiguous("v", &values, &[128, 1, 4]).expect("fits").into(),
            );
            inputs.bias = Some(View::contiguous("bias", &bias, &[1, 128]).expect("fits"));
            for split in [Split::Whole, Split::Parts(3)] {
                let got = Run::new(split).results(&problem, &inputs);
                for got in got.o {
                    assert!((got - want).abs() < 1e-3, "bias {low} on {hidden}: {got}, not {want}");
                }
            }
        }
    }
}
