//! The CPU engine: executes plans on worker threads.
//!
//! The invariant: every check of the data happens before a kernel starts, and a kernel that starts
//! finishes. The engine never picks a kernel: a plan that is not for it is an error, because running
//! something else would make the plan's reason a lie.

use std::num::NonZero;
use std::thread;

use attn_core::{
    Bytes, DeviceCaps, Engine, Family, ForwardResults, Gradients, HostCaps, Inputs, Outputs, Pass,
    Plan, TensorView, TensorViewMut, View, ViewMut,
};
use parking_lot::Mutex;

use super::simd::{Level, Simd};
use super::workers::Workers;
use super::workspace::Workspace;
use super::{backward, decode, merge, prefill};
use crate::catalog::catalog;
use crate::error::Error;

/// A pool of worker threads and the instruction set they use.
///
/// ```
/// use attn_kernels::cpu::{CpuEngine, Level};
///
/// let engine = CpuEngine::with(2, Level::Portable)?;
/// assert_eq!((engine.caps().host.threads, engine.level()), (2, Level::Portable));
/// # Ok::<(), attn_kernels::Error>(())
/// ```
#[derive(Debug)]
pub struct CpuEngine {
    simd: Simd,
    pool: rayon::ThreadPool,
    host: HostCaps,
}

impl CpuEngine {
    /// An engine with a thread for each available processor and the best instruction set here.
    ///
    /// # Errors
    /// [`Error::Threads`] when they cannot be started.
    pub fn new() -> Result<Self, Error> {
        let threads = thread::available_parallelism().map_or(1, NonZero::get);
        Self::with(threads.min(Self::MAX_THREADS), Level::detect())
    }

    /// The most threads of an engine: more than any processor has, and few enough to start.
    pub const MAX_THREADS: usize = 1024;

    /// An engine with a number of threads (0 counts as 1) and an instruction set.
    ///
    /// # Errors
    /// [`Error::TooManyThreads`] above [`CpuEngine::MAX_THREADS`]; [`Error::Level`] when this processor lacks it; [`Error::Threads`] when threads cannot be started.
    pub fn with(threads: usize, level: Level) -> Result<Self, Error> {
        if threads > Self::MAX_THREADS {
            return Err(Error::TooManyThreads { expected: Self::MAX_THREADS, got: threads });
        }
        let threads = threads.max(1);
        let simd = Simd::with_level(level).ok_or(Error::Level(level.name()))?;
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|n| format!("attn-{n}"))
            .build()
            .map_err(|source| Error::Threads { threads, source: Box::new(source) })?;
        Ok(Self { simd, pool, host: HostCaps { threads, l2: second_level_cache() } })
    }

    /// What this engine offers to a selector: its threads, no device.
    #[must_use]
    pub fn caps(&self) -> DeviceCaps {
        DeviceCaps { host: self.host.clone(), cuda: None }
    }

    /// The instruction set in use.
    #[must_use]
    pub fn level(&self) -> Level {
        self.simd.level()
    }

    /// Runs a forward plan. Padding rows are written too: 0, and -inf for the LSE.
    ///
    /// # Errors
    /// [`Error::Plan`] for a plan of another engine or pass; [`Error::Call`] for data that does not fit the
    /// plan's problem; [`Error::OutOfMemory`] when the workspace cannot grow. Nothing was written then.
    pub fn forward(
        &self,
        plan: &Plan,
        inputs: &Inputs<'_>,
        outputs: &mut Outputs<'_>,
        workspace: &mut Workspace,
    ) -> Result<(), Error> {
        check_plan(plan, Pass::Forward, "a forward plan of the CPU engine")?;
        let problem = &plan.problem;
        inputs.check(problem)?;
        outputs.check(problem)?;
        let (workers, threads) = (self.workers(), self.host.threads);
        match plan.family {
            Family::Prefill => {
                let elements = prefill::workspace(problem, plan.tile, threads);
                let scratch = workspace.reserve(elements)?;
                Ok(prefill::forward(&workers, plan, inputs, outputs, scratch)?)
            }
            Family::Decode => {
                let elements = decode::workspace(problem, plan.tile, plan.split, threads);
                let scratch = workspace.reserve(elements)?;
                Ok(decode::forward(&workers, plan, inputs, outputs, scratch)?)
            }
            Family::General | Family::Backward => {
                Err(unexpected("a forward plan of the CPU engine", plan))
            }
        }
    }

    /// Runs a backward plan on the results of a forward of the same problem.
    ///
    /// # Errors
    /// As [`CpuEngine::forward`].
    pub fn backward(
        &self,
        plan: &Plan,
        inputs: &Inputs<'_>,
        results: &ForwardResults<'_>,
        gradients: &mut Gradients<'_>,
        workspace: &mut Workspace,
    ) -> Result<(), Error> {
        let problem = &plan.problem;
        check_plan(plan, Pass::Backward, "a backward plan of the CPU engine")?;
        inputs.check(problem)?;
        results.check(problem)?;
        gradients.check(problem, inputs)?;
        let elements = backward::workspace(problem, plan.tile, self.host.threads);
        let scratch = workspace.reserve(elements)?;
        Ok(backward::gradients(&self.workers(), plan, inputs, results, gradients, scratch)?)
    }

    /// Joins two attention states over disjoint key sets: `(0, -inf)` is neutral.
    ///
    /// Source: the merge of [`attn_core::OnlineSoftmax`], on finished states.
    /// Shapes: outputs `[rows, heads, value_dim]`, LSEs `[rows, heads]`.
    ///
    /// # Errors
    /// [`Error::Call`] when shapes or types differ; nothing was written then.
    pub fn merge(
        &self,
        a: (&TensorView<'_>, &View<'_, f32>),
        b: (&TensorView<'_>, &View<'_, f32>),
        o: &mut TensorViewMut<'_>,
        lse: &mut ViewMut<'_, f32>,
    ) -> Result<(), Error> {
        Ok(merge::merge_states(a, b, o, lse)?)
    }

    /// Reads a buffer once with all threads and returns the sum of its elements: the read ceiling of the
    /// machine, which decode is measured against. `prefetch` adds explicit prefetches to the loads.
    #[must_use]
    pub fn read(&self, data: &[f32], prefetch: bool) -> f32 {
        let part = data.len().div_ceil(self.host.threads).max(1);
        let sums = Mutex::new(0.0);
        self.pool.scope(|scope| {
            for part in data.chunks(part) {
                let (sums, simd) = (&sums, self.simd);
                scope.spawn(move |_| *sums.lock() += simd.stream_sum(part, prefetch));
            }
        });
        sums.into_inner()
    }

    const fn workers(&self) -> Workers<'_> {
        Workers { simd: self.simd, pool: &self.pool }
    }
}

/// Checks that a plan names a kernel of this engine that states it takes such rows. A plan may be made by
/// hand, so that what a selector would have seen to is not taken for granted.
fn check_plan(plan: &Plan, pass: Pass, expected: &'static str) -> Result<(), Error> {
    let kernel = catalog().iter().find(|kernel| {
        kernel.engine == Engine::Cpu && kernel.name == plan.kernel && kernel.family == plan.family
    });
    let longest = plan.problem.lengths().longest_q();
    let fits = kernel.is_some_and(|kernel| {
        kernel.pass() == pass && kernel.max_query_rows.is_none_or(|most| longest <= most)
    });
    if fits && plan.engine == Engine::Cpu && plan.problem.pass() == pass {
        Ok(())
    } else {
        Err(unexpected(expected, plan))
    }
}

fn unexpected(expected: &'static str, plan: &Plan) -> Error {
    let Plan { kernel, engine, family, problem, .. } = plan;
    let rows = problem.lengths().longest_q();
    Error::Plan { expected, got: format!("{kernel} ({engine}, {family}) for {rows} query rows") }
}

/// The second-level cache of one core, where the system says; otherwise 1 MiB, which every current
/// server core has.
fn second_level_cache() -> Bytes {
    let stated = std::fs::read_to_string("/sys/devices/system/cpu/cpu0/cache/index2/size");
    let bytes = stated.ok().and_then(|text| {
        let text = text.trim();
        let (digits, shift) = match text.strip_suffix('K') {
            Some(digits) => (digits, 10),
            None => (text.strip_suffix('M')?, 20),
        };
        digits.parse::<u64>().ok()?.checked_shl(shift)
    });
    bytes.map_or(HostCaps::default().l2, Bytes)
}

#[cfg(test)]
mod tests {
    use attn_core::{DType, Problem, ProblemSpec, Split, Tile};

    use super::*;

    fn plan(kernel: &'static str, family: Family, rows: usize) -> Plan {
        let spec = ProblemSpec::new(DType::F32, 1, 1, 4, &[rows], &[3]);
        Plan {
            problem: Problem::new(spec).expect("valid"),
            kernel,
            engine: Engine::Cpu,
            family,
            tile: Tile { q: 48, kv: 64 },
            split: Split::Whole,
            workspace: Bytes::ZERO,
            shared_memory: Bytes::ZERO,
            reason: "a test",
            rejects: Vec::new(),
        }
    }

    fn run(plan: &Plan) -> Result<(), Error> {
        let rows = plan.problem.lengths().total_q();
        let (x, mut o) = (vec![0f32; rows.max(3) * 4], vec![0f32; rows * 4]);
        let view = |rows: usize| {
            TensorView::from(View::contiguous("x", &x[..rows * 4], &[rows, 1, 4]).expect("fits"))
        };
        let o = ViewMut::contiguous("o", &mut o, &[rows, 1, 4]).expect("fits");
        CpuEngine::with(1, Level::Portable)?.forward(
            plan,
            &Inputs::dense(view(rows), view(3), view(3)),
            &mut Outputs { o: o.into(), lse: None },
            &mut Workspace::new(),
        )
    }

    #[test]
    fn engine_refuses_plans_that_its_kernels_do_not_take() {
        assert!(run(&plan("cpu_prefill", Family::Prefill, 40)).is_ok());
        assert!(run(&plan("cpu_decode", Family::Decode, 16)).is_ok());
        for bad in [
            plan("cpu_decode", Family::Decode, 17),
            plan("cpu_decode", Family::Prefill, 1),
            plan("cpu_prefill", Family::Decode, 1),
            plan("cpu_backward", Family::Backward, 1),
            plan("nonsense", Family::Prefill, 1),
            Plan { engine: Engine::Cuda, ..plan("cpu_prefill", Family::Prefill, 1) },
        ] {
            let refusal = run(&bad).expect_err(bad.kernel);
            assert!(matches!(refusal, Error::Plan { .. }), "{refusal}");
        }
    }

    #[test]
    fn engine_runs_silly_tiles_and_splits() {
        for tile in [Tile { q: 0, kv: 0 }, Tile { q: usize::MAX, kv: usize::MAX }] {
            for split in [Split::Chunks(0), Split::Parts(0), Split::Parts(usize::MAX)] {
                for (kernel, family) in
                    [("cpu_prefill", Family::Prefill), ("cpu_decode", Family::Decode)]
                {
                    let plan = Plan { tile, split, ..plan(kernel, family, 5) };
                    assert!(run(&plan).is_ok(), "{kernel} {tile:?} {split:?}");
                }
            }
        }
    }
}
