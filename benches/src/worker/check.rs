//! A case's output against the naive kernel's, before it is timed.
//!
//! The invariant: nothing is timed that computes something else. Comparing every row would take longer than
//! measuring, so some rows of some sequences are computed again as calls of their own: what a row sees depends on
//! its sequence alone, and under a causal bound on no later key.

use attn_core::Problem;
use attn_kernels::cuda::{DeviceTensorMut, Outputs, Workspace};
use half::bf16;

use super::setup::{Part, Planner, Pool, Setup};
use super::workload::BLOCK;
use crate::device::Gpu;

/// The largest relative error of a bf16 kernel that is timed. Rounding weights and outputs leaves a fifth of it or less;
/// a tile that was skipped leaves more.
pub(crate) const LIMIT: f64 = 2e-2;

/// `|got - want| / |want|` over all elements that were looked at.
#[derive(Debug, Default)]
pub(crate) struct RelativeError {
    difference: f64,
    size: f64,
}

impl RelativeError {
    pub(crate) fn add(&mut self, got: f64, want: f64) {
        self.difference += (got - want).powi(2);
        self.size += want.powi(2);
    }

    /// Adds as many elements as both have, in order.
    pub(crate) fn add_all<T: Copy + Into<f64>>(&mut self, got: &[T], want: &[T]) {
        got.iter().zip(want).for_each(|(&got, &want)| self.add(got.into(), want.into()));
    }

    pub(crate) fn value(&self) -> f64 {
        (self.difference / self.size).sqrt()
    }

    /// The error, if it is one of a kernel that may be timed; NaN is not.
    ///
    /// # Errors
    /// One past the limit, with both.
    pub(super) fn within(&self, limit: f64) -> Result<f64, String> {
        let error = self.value();
        if error <= limit {
            return Ok(error);
        }
        Err(format!(
            "relative error: expected at most {limit}, got {error:.3e}; a wrong kernel is not timed"
        ))
    }
}

/// The same of the kernel that a problem's type asks for.
///
/// Weights rounded to fp8 err by up to a unit roundoff each, by 0.41 of one in the mean of squares; so do their sums with
/// independent values, however many. The unit itself leaves more than twice that, and less than a skipped tile of 128
/// among 16384 keys, which is an error of 1/11.
fn limit(problem: &Problem) -> f64 {
    let dtype = problem.q_dtype();
    if dtype.is_fp8() { dtype.unit_roundoff() } else { LIMIT }
}

/// Rows of one sample.
const ROWS: usize = 16;

/// The relative error of the rows that were looked at.
///
/// # Errors
/// A device that fails, or an error past [`limit`].
pub(super) fn check(
    gpu: &Gpu,
    planner: &Planner,
    pool: Option<&Pool>,
    setup: &Setup,
) -> Result<f64, String> {
    let text = |error: attn_kernels::Error| error.to_string();
    let problem = &setup.plan.problem;
    let row = problem.q_heads() * problem.value_dim();
    let mut error = RelativeError::default();
    for part in samples(problem) {
        let (spec, inputs) = setup.part(pool, part)?;
        let plan = planner.oracle(spec)?;
        let mut buffer = gpu.engine.alloc(part.rows * row * size_of::<bf16>()).map_err(text)?;
        let shape = [part.rows, problem.q_heads(), problem.value_dim()];
        let o = DeviceTensorMut::contiguous("o", &mut buffer, problem.out_dtype(), &shape);
        let mut outputs = Outputs { o: o.map_err(text)?, lse: None };
        let workspace = &mut Workspace::new();
        gpu.engine.forward(&plan, &inputs, &mut outputs, workspace, &gpu.stream).map_err(text)?;
        let want: Vec<bf16> = buffer.to_host(&gpu.stream, part.rows * row).map_err(text)?;
        let start = (problem.lengths().q_rows(part.sequence).start + part.row) * row;
        let got: Vec<bf16> = setup.o.to_host_at(&gpu.stream, start, want.len()).map_err(text)?;
        for (got, want) in got.iter().zip(&want) {
            error.add(f64::from(*got), f64::from(*want));
        }
    }
    error.within(limit(problem))
}

/// The middle and the end of the first, the middle and the last sequence.
fn samples(problem: &Problem) -> Vec<Part> {
    let l = problem.lengths();
    let mut sequences = vec![0, l.batch() / 2, l.batch().saturating_sub(1)];
    sequences.dedup();
    let mut parts = Vec::new();
    for sequence in sequences.into_iter().filter(|&sequence| sequence < l.batch()) {
        let (q_len, kv_len) = (l.q(sequence), l.kv(sequence));
        // Blocks of a block mask count from the first row of a sequence.
        let whole = |row: usize| row / BLOCK * BLOCK;
        let mut starts = vec![whole(q_len / 2), whole(q_len.saturating_sub(ROWS))];
        if problem.block_mask().is_none() {
            starts = vec![q_len / 2, q_len.saturating_sub(ROWS)];
        }
        starts.dedup();
        for row in starts {
            let rows = ROWS.min(q_len - row);
            let keys = if problem.band().right == Some(0) {
                (row + rows + kv_len).saturating_sub(q_len)
            } else {
                kv_len
            };
            parts.push(Part { sequence, row, rows, keys });
        }
    }
    parts
}

#[cfg(test)]
mod tests {
    use attn_core::{BlockSizes, DType, ProblemSpec};

    use super::*;

    fn parts(q: &[usize], kv: &[usize], edit: impl FnOnce(&mut ProblemSpec)) -> Vec<Part> {
        let mut spec = ProblemSpec::new(DType::BF16, 4, 2, 64, q, kv);
        edit(&mut spec);
        samples(&Problem::new(spec).unwrap())
    }

    #[test]
    fn samples_of_a_causal_chunk_end_where_their_last_row_does() {
        let got = parts(&[512], &[8192], |spec| spec.causal = true);
        let at = |row, keys| Part { sequence: 0, row, rows: 16, keys };
        assert_eq!(got, [at(256, 7680 + 272), at(496, 8192)]);
    }

    #[test]
    fn samples_of_an_open_call_see_every_key() {
        let got = parts(&[1; 8], &[100; 8], |_| ());
        let at = |sequence| Part { sequence, row: 0, rows: 1, keys: 100 };
        assert_eq!(got, [at(0), at(4), at(7)]);
    }

    #[test]
    fn samples_under_a_block_mask_start_on_a_block() {
        let sizes = BlockSizes { q: BLOCK, kv: BLOCK };
        let got = parts(&[1000], &[1000], |spec| spec.block_mask = Some(sizes));
        assert!(got.iter().all(|part| part.row % BLOCK == 0 && part.keys == 1000), "{got:?}");
    }
}
