//! Which weights an engine dropped, read off its output.
//!
//! The invariant: every weight is seen. All scores are 0 and the values of key j are row j of a unit matrix, so that element j of an
//! output row is the weight of its key j, and what is 0 was hidden or dropped. Each engine is held against the places' own words
//! (attn-core), so that engines which pass drop the same; and the share that is kept against the rate, within five
//! standard deviations.

use attn_core::{
    DType, Dropout, DropoutMask, Engine, Error, Inputs, Outputs, Phase, Problem, ProblemSpec,
    TensorView, TensorViewMut, View, ViewMut,
};
use attn_kernels::cpu::{CpuEngine, Workspace};
use half::bf16;

use super::record::Tallies;

/// The name under which these checks are asked for and recorded.
pub(super) const FAMILY: &str = "dropout";

/// A call whose outputs are its weights.
#[derive(Debug)]
pub(super) struct Weights {
    pub(super) name: String,
    pub(super) problem: Problem,
    q: Vec<bf16>,
    k: Vec<bf16>,
    v: Vec<bf16>,
    stream: [u64; 2],
}

impl Weights {
    fn new(name: &str, spec: ProblemSpec, stream: [u64; 2]) -> Result<Self, Error> {
        let problem = Problem::new(spec)?;
        let (l, heads) = (problem.lengths(), problem.kv_heads());
        let width = problem.value_dim();
        let mut v = vec![bf16::ZERO; l.total_kv() * heads * width];
        for sequence in 0..l.batch() {
            for (key, row) in l.kv_rows(sequence).enumerate() {
                for head in 0..heads {
                    v[(row * heads + head) * width + key] = bf16::ONE;
                }
            }
        }
        let zeros = |rows: usize, heads: usize| vec![bf16::ZERO; rows * heads * problem.head_dim()];
        let (q, k) = (zeros(l.total_q(), problem.q_heads()), zeros(l.total_kv(), heads));
        Ok(Self { name: format!("dropout/{name}"), q, k, v, stream, problem })
    }

    /// What the call reads.
    pub(super) fn inputs(&self) -> Result<Inputs<'_>, Error> {
        let p = &self.problem;
        let (rows, keys) = (p.lengths().total_q(), p.lengths().total_kv());
        let view = |field, values, shape: [usize; 3]| {
            View::contiguous(field, values, &shape).map(TensorView::BF16)
        };
        let mut inputs = Inputs::dense(
            view("q", &self.q, [rows, p.q_heads(), p.head_dim()])?,
            view("k", &self.k, [keys, p.kv_heads(), p.head_dim()])?,
            view("v", &self.v, [keys, p.kv_heads(), p.value_dim()])?,
        );
        inputs.dropout = Some(View::contiguous("dropout", &self.stream, &[2])?);
        Ok(inputs)
    }

    /// NaN for every element of the output.
    pub(super) fn buffer(&self) -> Vec<bf16> {
        let p = &self.problem;
        vec![bf16::NAN; p.lengths().total_q() * p.q_heads() * p.value_dim()]
    }

    /// The output in a buffer of its own.
    pub(super) fn outputs<'o>(&self, o: &'o mut [bf16]) -> Result<Outputs<'o>, Error> {
        let p = &self.problem;
        let shape = [p.lengths().total_q(), p.q_heads(), p.value_dim()];
        Ok(Outputs { o: TensorViewMut::BF16(ViewMut::contiguous("o", o, &shape)?), lse: None })
    }

    /// How far the kept share is from the rate, in five standard deviations.
    ///
    /// # Errors
    /// The first weight that is not what its place says, or a share that is too far off.
    pub(super) fn judge(&self, o: &[bf16]) -> Result<f64, String> {
        let p = &self.problem;
        let mask = self.inputs().map_err(|error| error.to_string())?.dropout_of(p);
        let Some(mask) = mask else { return Err("no dropout in the problem".to_owned()) };
        let (heads, width) = (p.q_heads(), p.value_dim());
        let (mut seen, mut kept) = (0u64, 0u64);
        for sequence in 0..p.lengths().batch() {
            let (q_len, kv_len) = (p.lengths().q(sequence), p.lengths().kv(sequence));
            for (row, at) in p.lengths().q_rows(sequence).enumerate() {
                let visible = p.band().row(row, q_len, kv_len);
                let even = mask.factor() / visible.len() as f32;
                for head in 0..heads {
                    let weights = &o[(at * heads + head) * width..][..width];
                    for (key, &got) in weights.iter().enumerate() {
                        let is_visible = visible.contains(&key);
                        let is_kept = is_visible && mask.keeps(sequence, head, row, key);
                        let (got, want) = (got.to_f32(), if is_kept { even } else { 0.0 });
                        seen += u64::from(is_visible);
                        kept += u64::from(is_kept);
                        // Two roundings of bf16. Written so that NaN fails.
                        let is_right = (got - want).abs() <= want * 0.01;
                        if !is_right {
                            return Err(format!(
                                "sequence {sequence}, head {head}, row {row}, key {key}: expected a weight of {want}, got {got}"
                            ));
                        }
                    }
                }
            }
        }
        share(&mask, p.dropout().map_or(0.0, |dropout| f64::from(dropout.p)), seen, kept)
    }
}

fn share(mask: &DropoutMask, rate: f64, seen: u64, kept: u64) -> Result<f64, String> {
    let (seen, kept) = (seen as f64, kept as f64);
    let allowed = 5.0 * (seen * rate * (1.0 - rate)).sqrt();
    let off = (kept - seen * (1.0 - rate)).abs() / allowed;
    if off <= 1.0 {
        return Ok(off);
    }
    Err(format!(
        "expected {} of {seen} kept (threshold {}), got {kept}",
        1.0 - rate,
        mask.threshold()
    ))
}

/// Every call that is judged.
pub(super) fn calls() -> Result<Vec<Weights>, Error> {
    let spec = |heads: (usize, usize), q: &[usize], kv: &[usize], width: usize, p: f32| {
        let mut spec = ProblemSpec::new(DType::BF16, heads.0, heads.1, 64, q, kv);
        (spec.value_dim, spec.dropout) = (width, Some(Dropout { p }));
        spec
    };
    let mut calls = Vec::new();
    for (n, p) in [0.01, 0.1, 0.5, 0.9].into_iter().enumerate() {
        // Both words of each number in use, and calls that differ in one of them alone.
        let stream = [(n as u64 % 2) << 33 | 77, (n as u64 / 2) << 40 | 5];
        let spec = spec((4, 2), &[70, 128, 3], &[128, 128, 100], 128, p);
        calls.push(Weights::new(&format!("rate_{p}"), spec, stream)?);
    }
    let mut causal = spec((4, 1), &[130, 9], &[201, 256], 256, 0.3);
    causal.causal = true;
    calls.push(Weights::new("causal", causal, [1, 2])?);
    // Tiles of keys that start off a multiple of four.
    for left in [32, 33, 34, 35] {
        let mut window = spec((2, 2), &[100], &[203], 256, 0.4);
        (window.window_left, window.window_right) = (Some(left), Some(0));
        calls.push(Weights::new(&format!("window_{left}"), window, [3, left as u64])?);
    }
    let decode = spec((8, 2), &[1, 3, 2], &[251, 77, 128], 256, 0.25);
    calls.push(Weights::new("decode", decode, [4, 4])?);
    Ok(calls)
}

/// Judges the CPU engine: as selection has it, by each phase, and in parts.
pub(super) fn judge_cpu(
    engine: &CpuEngine,
    only: &str,
    tallies: &mut Tallies,
) -> Result<(), Error> {
    let kernels = attn_kernels::catalog_of(Engine::Cpu);
    let mut workspace = Workspace::new();
    for call in calls()?.iter().filter(|call| call.name.contains(only)) {
        for (label, phase, splits) in [
            ("chosen", None, None),
            ("prefill", Some(Phase::Prefill), None),
            ("decode", Some(Phase::Decode), None),
            ("decode in 3", Some(Phase::Decode), Some(3)),
        ] {
            let mut spec = call.problem.spec().clone();
            (spec.options.phase, spec.options.num_splits) = (phase, splits);
            let problem = Problem::new(spec)?;
            let Ok(plan) = attn_select::choose(&problem, &engine.caps(), kernels) else {
                tallies.skip(FAMILY);
                continue;
            };
            let mut o = call.buffer();
            let run =
                engine.forward(&plan, &call.inputs()?, &mut call.outputs(&mut o)?, &mut workspace);
            let label = format!("{} by {label} ({})", call.name, engine.level().name());
            let outcome = run.map_err(|error| error.to_string()).and_then(|()| call.judge(&o));
            let outcome = outcome.map_err(|failure| format!("{label}: {failure}"));
            tallies.enter(FAMILY, &label, outcome);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use attn_kernels::cpu::Level;

    use super::*;

    #[test]
    fn every_level_drops_what_its_place_says() {
        let mut tallies = Tallies::default();
        for level in Level::ALL.into_iter().filter(|level| level.is_available()) {
            let engine = CpuEngine::with(2, level).unwrap();
            judge_cpu(&engine, "", &mut tallies).unwrap();
        }
        assert_eq!(tallies.failures, Vec::<String>::new());
        assert!(tallies.sum(|tally| tally.passed) >= 20);
    }

    #[test]
    fn another_set_or_weight_is_told() {
        let call = &calls().unwrap()[2];
        let mut o = call.buffer();
        assert!(call.judge(&o).unwrap_err().contains("got NaN"));
        let engine = CpuEngine::with(1, Level::Portable).unwrap();
        let plan = attn_select::choose(
            &call.problem,
            &engine.caps(),
            attn_kernels::catalog_of(Engine::Cpu),
        )
        .unwrap();
        let inputs = call.inputs().unwrap();
        let run = |inputs: &Inputs<'_>, o: &mut Vec<bf16>| {
            let mut outputs = call.outputs(o).unwrap();
            engine.forward(&plan, inputs, &mut outputs, &mut Workspace::new()).unwrap();
        };
        run(&inputs, &mut o);
        assert!(call.judge(&o).is_ok());
        let other = [call.stream[0], call.stream[1] + 1];
        let mut moved = inputs.clone();
        moved.dropout = Some(View::contiguous("dropout", &other, &[2]).unwrap());
        run(&moved, &mut o);
        assert!(call.judge(&o).unwrap_err().contains("expected a weight of"));
    }
}
