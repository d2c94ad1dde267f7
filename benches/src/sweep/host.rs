//! A point on the CPU engine: planned, checked, then timed.
//!
//! The invariant: [`Host::measure`] times nothing whose sampled rows have not agreed with the f64 reference. Calls rotate
//! through sets of inputs that together fill more than a last-level cache, as the layers of a model do.

use std::time::{Duration, Instant};

use attn_core::{Outputs, Plan, Problem};
use attn_kernels::cpu::{CpuEngine, Workspace};
use attn_reference::{CaseData, OutputBuffers};

use super::SweepError;
use super::point::Point;
use super::row::{Ceilings, Measured, Times};

/// Bytes of all sets of inputs together, and the most sets.
const ROTATED_BYTES: u64 = 128 << 20;
const MOST_SETS: u64 = 8;
/// Calls that are timed: enough for a median, and no more than the 99th percentile needs.
const CALLS: std::ops::RangeInclusive<usize> = 5..=400;

/// The CPU engine and how long it is to be timed.
#[derive(Debug)]
pub(crate) struct Host<'e> {
    pub(crate) engine: &'e CpuEngine,
    /// Timed seconds of a point.
    pub(crate) seconds: f64,
}

impl Host<'_> {
    /// What a point's calls take.
    ///
    /// # Errors
    /// A problem that is refused, an engine that fails, an output that is not the reference's.
    pub(crate) fn measure(
        &self,
        point: &Point,
        ceilings: Ceilings,
    ) -> Result<Measured, SweepError> {
        let problem = point.case(0).problem()?;
        let bytes = point.bytes(&problem);
        let sets = ROTATED_BYTES.div_ceil(bytes.max(1)).clamp(1, MOST_SETS);
        let data: Vec<CaseData> =
            (0..sets).map(|set| point.case(set).build()).collect::<Result<_, _>>()?;
        let started = Instant::now();
        let plan = attn_select::choose(&problem, &self.engine.caps(), attn_kernels::catalog())?;
        let select = started.elapsed();

        let workspace = &mut Workspace::new();
        let mut buffers = data[0].output_buffers()?;
        self.call(&plan, &data[0], buffers.outputs()?, workspace)?;
        let error = check(&data[0], point, &problem, &buffers)?;
        // The first call has made the workspace; this one says how many there is time for.
        let once = self.call(&plan, &data[0], buffers.outputs()?, workspace)?;
        let times = self.times(&plan, &data, buffers.outputs()?, workspace, once)?;
        let seconds = times.p50_us / 1e6;
        let tflops = problem.flops() as f64 / seconds / 1e12;
        let gbps = bytes as f64 / seconds / 1e9;
        Ok(Measured {
            kernel: plan.kernel.to_owned(),
            reason: plan.reason.to_owned(),
            tile: format!("{}x{}", plan.tile.q, plan.tile.kv),
            split: plan.split.to_string(),
            times,
            tflops,
            matmul_share: tflops / ceilings.matmul_tflops,
            gbps,
            read_share: gbps / ceilings.read_gbps,
            temp_bytes: plan.workspace.0,
            select_us: select.as_secs_f64() * 1e6,
            max_error: error,
        })
    }

    fn call(
        &self,
        plan: &Plan,
        data: &CaseData,
        mut outputs: Outputs<'_>,
        workspace: &mut Workspace,
    ) -> Result<Duration, SweepError> {
        let inputs = data.inputs()?;
        let start = Instant::now();
        self.engine.forward(plan, &inputs, &mut outputs, workspace)?;
        Ok(start.elapsed())
    }

    fn times(
        &self,
        plan: &Plan,
        data: &[CaseData],
        mut outputs: Outputs<'_>,
        workspace: &mut Workspace,
        once: Duration,
    ) -> Result<Times, SweepError> {
        let inputs = data.iter().map(CaseData::inputs).collect::<Result<Vec<_>, _>>()?;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped")]
        let calls = (self.seconds / once.as_secs_f64().max(1e-9)) as usize;
        let calls = calls.clamp(*CALLS.start(), *CALLS.end());
        let mut us = Vec::with_capacity(calls);
        for n in 0..calls {
            let start = Instant::now();
            self.engine.forward(plan, &inputs[n % inputs.len()], &mut outputs, workspace)?;
            us.push(start.elapsed().as_secs_f64() * 1e6);
        }
        Ok(Times::of(us))
    }
}

/// The largest error of sampled rows, of the first and the last sequence.
fn check(
    data: &CaseData,
    point: &Point,
    problem: &Problem,
    buffers: &OutputBuffers,
) -> Result<f64, SweepError> {
    let last = point.q_len.saturating_sub(1);
    let mut rows = vec![(0, 0), (0, last / 2), (point.batch - 1, last)];
    rows.sort_unstable();
    rows.dedup();
    let want = attn_reference::naive::forward_rows(problem, &data.inputs()?, &rows)?;
    let got = buffers.values();
    // The rounding of the output, and f32 accumulation over thousands of keys.
    let unit = 1e-5 + 2.0 * problem.out_dtype().unit_roundoff();
    let row_elements = problem.q_heads() * problem.value_dim();
    let mut worst = 0f64;
    for (&(sequence, row), want) in rows.iter().zip(want.o.chunks_exact(row_elements)) {
        let at = (sequence * point.q_len + row) * row_elements;
        for (&got, &want) in got.o[at..at + row_elements].iter().zip(want) {
            let error = (got - want).abs();
            let limit = unit * want.abs().max(1.0);
            if error.is_nan() || error > limit {
                return Err(SweepError::Wrong { id: point.id(), got, want, limit });
            }
            worst = worst.max(error);
        }
    }
    Ok(worst)
}
