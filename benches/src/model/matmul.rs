//! Projections in f32, and the account of what they cost.
//!
//! Invariant: a weight is stored as the file has it, one row per output, and is never copied or
//! repacked by the caller; both paths below read it in that order. Several rows of activations go
//! through the `gemm` crate. A single row is bound by reading the weights and takes a loop of dot
//! products instead.
//!
//! PERF: on two cores with 576-wide weights out of memory, one token's projections took 53 ms by
//! the dot products and 67 ms by `gemm`; at four rows `gemm` led, 77 ms to 84 ms. Storing the
//! weights transposed for `gemm` gained nothing at 21 rows and lost a factor 1.8 in the 49,152-row
//! output head, whose columns then lie 192 KiB apart.

use std::time::{Duration, Instant};

use gemm::Parallelism;
use rayon::prelude::*;

/// Lanes of partial sums in a dot product: enough for the widest vector registers in use.
const LANES: usize = 16;
/// Outputs that one task computes: 64 rows of 576 floats are 144 KiB, some ten microseconds of
/// reading.
const TASK_OUTPUTS: usize = 64;

/// A linear map, `y = W x`.
///
/// Shapes: `values` is W, `[outputs, inputs]`, row-major.
#[derive(Debug, Clone)]
pub(crate) struct Matrix {
    outputs: usize,
    inputs: usize,
    values: Vec<f32>,
}

/// What the projections did since the account was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ProjectionAccount {
    /// Number of projections.
    pub(crate) calls: u64,
    /// Wall time in them.
    pub(crate) time: Duration,
    /// Floating-point operations, a multiply and an add counted as two.
    pub(crate) flops: u64,
    /// Bytes of weights, each projection counted as reading its weights once.
    pub(crate) weight_bytes: u64,
}

impl Matrix {
    /// A map from row-major values.
    ///
    /// # Panics
    /// When the number of values is not `outputs * inputs`, or `inputs` is zero.
    pub(crate) fn new(outputs: usize, inputs: usize, values: Vec<f32>) -> Self {
        assert!(inputs > 0, "a projection from nothing");
        assert_eq!(Some(values.len()), outputs.checked_mul(inputs), "{outputs} x {inputs}");
        Self { outputs, inputs, values }
    }

    /// One row of W.
    ///
    /// # Panics
    /// When there is no such row.
    pub(crate) fn row(&self, output: usize) -> &[f32] {
        &self.values[output * self.inputs..][..self.inputs]
    }
}

impl ProjectionAccount {
    /// Computes `y = W x` for each row of x, and enters it here.
    ///
    /// Shapes: x `[rows, inputs]`, y `[rows, outputs]`, packed; every element of y is written.
    ///
    /// # Panics
    /// When the lengths of `x` and `y` are not of one number of rows.
    pub(crate) fn project(&mut self, w: &Matrix, x: &[f32], y: &mut [f32]) {
        let start = Instant::now();
        project(w, x, y);
        let values = w.values.len() as u64;
        self.calls += 1;
        self.time += start.elapsed();
        self.flops += 2 * values * (x.len() / w.inputs) as u64;
        self.weight_bytes += values * size_of::<f32>() as u64;
    }
}

fn project(w: &Matrix, x: &[f32], y: &mut [f32]) {
    let rows = x.len() / w.inputs;
    assert_eq!(x.len(), rows * w.inputs, "activations are {rows} rows of {}", w.inputs);
    assert_eq!(y.len(), rows * w.outputs, "results are {rows} rows of {}", w.outputs);
    match rows {
        0 => {}
        1 => project_row(w, x, y),
        _ => project_rows(w, x, y, rows),
    }
}

fn project_row(w: &Matrix, x: &[f32], y: &mut [f32]) {
    let tasks = y.par_chunks_mut(TASK_OUTPUTS).zip(w.values.par_chunks(TASK_OUTPUTS * w.inputs));
    tasks.for_each(|(y, weights)| {
        for (y, weights) in y.iter_mut().zip(weights.chunks_exact(w.inputs)) {
            *y = dot(weights, x);
        }
    });
}

/// A dot product with `LANES` independent partial sums, which the compiler keeps in vector
/// registers.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let (a, b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let tail: f32 = a.remainder().iter().zip(b.remainder()).map(|(a, b)| a * b).sum();
    let mut sums = [0.0; LANES];
    for (a, b) in a.zip(b) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    sums.iter().sum::<f32>() + tail
}

fn project_rows(w: &Matrix, x: &[f32], y: &mut [f32], rows: usize) {
    let Matrix { outputs, inputs, ref values } = *w;
    let x = Factor { values: x, rows, cols: inputs, row_step: inputs, col_step: 1 };
    let w = Factor { values, rows: inputs, cols: outputs, row_step: 1, col_step: inputs };
    multiply(x, w, y, outputs, false);
}

/// A factor of a product: `[rows, cols]`, somewhere in `values`. Steps in elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Factor<'a> {
    /// Storage, from the first element on.
    pub(crate) values: &'a [f32],
    /// Extent of the first axis.
    pub(crate) rows: usize,
    /// Extent of the second axis.
    pub(crate) cols: usize,
    /// From a row to the next.
    pub(crate) row_step: usize,
    /// From a column to the next.
    pub(crate) col_step: usize,
}

impl<'a> Factor<'a> {
    /// Rows that lie one after the other.
    pub(crate) const fn rows(values: &'a [f32], rows: usize, cols: usize) -> Self {
        Self { values, rows, cols, row_step: cols, col_step: 1 }
    }

    /// The same elements with the axes exchanged.
    pub(crate) const fn transposed(self) -> Self {
        Self {
            values: self.values,
            rows: self.cols,
            cols: self.rows,
            row_step: self.col_step,
            col_step: self.row_step,
        }
    }

    /// Elements up to the last one.
    const fn span(&self) -> usize {
        span(self.rows, self.cols, self.row_step, self.col_step)
    }
}

/// Elements up to the last of `[rows, cols]`; saturates.
const fn span(rows: usize, cols: usize, row_step: usize, col_step: usize) -> usize {
    if rows == 0 || cols == 0 {
        return 0;
    }
    let last =
        (rows - 1).saturating_mul(row_step).saturating_add((cols - 1).saturating_mul(col_step));
    last.saturating_add(1)
}

/// Computes `y = a b`, or `y += a b` where `adds`.
///
/// Shapes: a `[rows, inner]`, b `[inner, cols]`, y `[rows, cols]` with rows `y_step` apart.
///
/// # Panics
/// When the extents do not agree, or an operand is shorter than its extents and steps say.
#[expect(
    unsafe_code,
    reason = "the gemm crate takes pointers and strides, and has no slice interface"
)]
pub(crate) fn multiply(a: Factor<'_>, b: Factor<'_>, y: &mut [f32], y_step: usize, adds: bool) {
    let (rows, inner, cols) = (a.rows, a.cols, b.cols);
    assert_eq!(b.rows, inner, "inner extents of a product");
    assert!(
        a.span() <= a.values.len() && b.span() <= b.values.len(),
        "factors cover their extents"
    );
    assert!(rows <= 1 || y_step >= cols, "rows of a product do not overlap");
    assert!(span(rows, cols, y_step, 1) <= y.len(), "a product covers its extents");
    if rows == 0 || cols == 0 {
        return;
    }
    // A slice holds at most isize::MAX bytes, so that a step that is taken cannot wrap here.
    let stride = usize::cast_signed;
    // SAFETY: every element that extents and steps of a, b and y reach was just compared with the length of
    // its slice. y is borrowed uniquely, its rows do not overlap, and it is read only where `adds`.
    unsafe {
        gemm::gemm(
            rows,
            cols,
            inner,
            y.as_mut_ptr(),
            1,
            stride(y_step),
            adds,
            a.values.as_ptr(),
            stride(a.col_step),
            stride(a.row_step),
            b.values.as_ptr(),
            stride(b.col_step),
            stride(b.row_step),
            if adds { 1.0 } else { 0.0 },
            1.0,
            false,
            false,
            false,
            Parallelism::Rayon(0),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small integers, so that f32 sums are exact in any order and results can be compared for
    /// equality.
    fn integers(len: usize, factor: usize) -> Vec<f32> {
        (0..len).map(|i| f32::from(u8::try_from(i * factor % 17).unwrap()) - 8.0).collect()
    }

    fn naive(w: &Matrix, x: &[f32]) -> Vec<f32> {
        let rows = x.chunks_exact(w.inputs);
        let outputs =
            |x| (0..w.outputs).map(move |o| w.row(o).iter().zip(x).map(|(a, b)| a * b).sum());
        rows.flat_map(outputs).collect()
    }

    #[test]
    fn project_matches_naive_at_every_small_row_count() {
        for (outputs, inputs) in [(1, 1), (3, 5), (64, 16), (65, 17), (130, 33), (200, 576)] {
            let w = Matrix::new(outputs, inputs, integers(outputs * inputs, 5));
            for rows in [0, 1, 2, 3, 4, 8, 21] {
                let x = integers(rows * inputs, 3);
                let mut y = vec![f32::NAN; rows * outputs];
                project(&w, &x, &mut y);
                assert_eq!(y, naive(&w, &x), "{outputs} x {inputs}, {rows} rows");
            }
        }
    }

    #[test]
    fn product_takes_any_steps_and_adds_where_asked() {
        // a [2, 3] by columns, b [3, 2] by rows that are 4 apart, y by rows that are 3 apart.
        let (a, b) = (integers(6, 5), integers(12, 3));
        let a = Factor::rows(&a, 3, 2).transposed();
        let b = Factor { values: &b, rows: 3, cols: 2, row_step: 4, col_step: 1 };
        let at = |f: Factor<'_>, i: usize, j: usize| f.values[i * f.row_step + j * f.col_step];
        let mut y = vec![7.0; 5];
        multiply(a, b, &mut y, 3, false);
        let want = |i, j| (0..3).map(|k| at(a, i, k) * at(b, k, j)).sum::<f32>();
        assert_eq!(y, [want(0, 0), want(0, 1), 7.0, want(1, 0), want(1, 1)]);
        multiply(a, b, &mut y, 3, true);
        assert_eq!(y[4], 2.0 * want(1, 1));
    }

    #[test]
    fn account_counts_calls_operations_and_bytes() {
        let w = Matrix::new(3, 5, integers(15, 1));
        let mut account = ProjectionAccount::default();
        account.project(&w, &integers(10, 1), &mut [0.0; 6]);
        account.project(&w, &integers(5, 1), &mut [0.0; 3]);
        assert_eq!((account.calls, account.flops, account.weight_bytes), (2, 90, 120));
        assert!(account.time > Duration::ZERO);
    }
}
