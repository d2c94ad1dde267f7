//! Root-mean-square normalisation.
//!
//! Invariant: the sum of squares of a row is taken in f64. In f32 it would do too, but then the
//! order of the sum would show in the last bits of every activation; this way the result is the
//! same however the loop is vectorised.
//!
//! Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", equation 4,
//! arXiv:1910.07467.

/// Writes `x / rms(x) * weight` for each row, with `rms(x) = sqrt(mean(x^2) + eps)`.
///
/// Shapes: x and out `[rows, width]`, weight `[width]`.
///
/// # Panics
/// When `x` and `out` differ in length, or are no whole number of rows.
pub(crate) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let width = weight.len();
    assert_eq!(x.len(), out.len(), "input and output of a norm");
    assert!(x.len().is_multiple_of(width), "{} is no multiple of the width {width}", x.len());
    for (row, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
        let squares: f64 = row.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
        #[expect(clippy::cast_precision_loss, reason = "a width is far below 2^53")]
        let mean = squares / width as f64;
        #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is the point")]
        let scale = (1.0 / (mean + f64::from(eps)).sqrt()) as f32;
        for ((out, &v), &w) in out.iter_mut().zip(row).zip(weight) {
            *out = v * scale * w;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rms_norm_matches_values_by_hand() {
        // Row 1: mean square (9 + 16) / 2 = 12.5, plus 3.5 is 16, so the divisor is 4.
        let mut out = [0.0; 4];
        rms_norm(&[3.0, -4.0, 0.0, 0.0], &[1.0, 2.0], 3.5, &mut out);
        assert_eq!(out, [0.75, -2.0, 0.0, 0.0]);
    }

    #[test]
    fn rms_norm_leaves_unit_mean_square() {
        let x: Vec<f32> = (0..64u8).map(|i| f32::from(i) * 1e3 - 7e3).collect();
        let mut out = [0.0; 64];
        rms_norm(&x, &[1.0; 64], 1e-5, &mut out);
        let mean: f32 = out.iter().map(|v| v * v).sum::<f32>() / 64.0;
        assert!((mean - 1.0).abs() < 1e-5, "{mean}");
    }

    #[test]
    fn rms_norm_takes_no_rows() {
        rms_norm(&[], &[1.0; 8], 1e-5, &mut []);
    }
}
