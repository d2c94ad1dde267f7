//! Every element of a strided tensor in logical row-major order, and back.
//!
//! The invariant: a value is rounded once, straight from f64 to the stored type. Going through f32
//! would round twice, and "the reference, rounded" must mean the nearest value of the output's type.

use attn_core::{Element, TensorView, TensorViewMut, View, ViewMut, dispatch_view};
use half::{bf16, f16};

/// The exact values of a tensor, in logical row-major order.
///
/// ```
/// use attn_core::{TensorView, View};
/// use attn_reference::elements::read;
///
/// let data = [1f32, 2.0, 3.0, 4.0];
/// let transposed = TensorView::F32(View::strided("x", &data, &[2, 2], &[1, 2], 0)?);
/// assert_eq!(read(&transposed), [1.0, 3.0, 2.0, 4.0]);
/// # Ok::<(), attn_core::Error>(())
/// ```
#[must_use]
pub fn read(tensor: &TensorView<'_>) -> Vec<f64> {
    dispatch_view!(tensor, view => read_view(view))
}

/// The exact values of a view, in logical row-major order.
#[must_use]
pub fn read_view<T: Element>(view: &View<'_, T>) -> Vec<f64> {
    let mut out = Vec::with_capacity(view.layout().len());
    for_each_index(view.shape(), |at| {
        out.extend(view.get(at).map(|x| f64::from(x.to_f32())));
    });
    out
}

/// Writes row-major values, each rounded once to the tensor's type. Values past the tensor are left.
pub(crate) fn write(tensor: &mut TensorViewMut<'_>, values: &[f64]) {
    match tensor {
        TensorViewMut::F32(view) => write_with(view, values, to_f32),
        TensorViewMut::F16(view) => write_with(view, values, |x| f16::from_f32(to_odd_f32(x))),
        TensorViewMut::BF16(view) => write_with(view, values, |x| bf16::from_f32(to_odd_f32(x))),
    }
}

/// Writes row-major values to an f32 view, each rounded once.
pub(crate) fn write_view(view: &mut ViewMut<'_, f32>, values: &[f64]) {
    write_with(view, values, to_f32);
}

/// The nearest f32.
#[expect(clippy::cast_possible_truncation, reason = "the rounding to f32 is meant")]
pub(crate) const fn to_f32(x: f64) -> f32 {
    x as f32
}

/// The f32 towards zero of an f64, its last bit set when anything was lost.
///
/// Rounding the result to fewer bits gives the same as rounding the f64: a sticky bit keeps what would
/// otherwise look like a tie from being one. `half` converts by way of the nearest f32, which loses it.
///
/// Source: Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using
/// rounding to odd", IEEE Transactions on Computers 57(4), 2008.
fn to_odd_f32(x: f64) -> f32 {
    let nearest = to_f32(x);
    if f64::from(nearest) == x || x.is_nan() {
        return nearest;
    }
    let away = f64::from(nearest).abs() > x.abs();
    f32::from_bits((nearest.to_bits() - u32::from(away)) | 1)
}

fn write_with<T: Copy>(view: &mut ViewMut<'_, T>, values: &[f64], round: impl Fn(f64) -> T) {
    let shape = view.shape().to_vec();
    let mut values = values.iter();
    for_each_index(&shape, |at| {
        if let Some(&value) = values.next() {
            view.set(at, round(value));
        }
    });
}

/// Visits every index of a shape, the last axis fastest.
pub(crate) fn for_each_index(shape: &[usize], mut visit: impl FnMut(&[usize])) {
    if shape.contains(&0) {
        return;
    }
    let mut at = vec![0; shape.len()];
    loop {
        visit(&at);
        let Some(axis) = (0..shape.len()).rev().find(|&axis| at[axis] + 1 < shape[axis]) else {
            return;
        };
        at[axis] += 1;
        at[axis + 1..].fill(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_cover_a_shape_in_row_major_order() {
        let mut seen = Vec::new();
        for_each_index(&[2, 1, 2], |at| seen.push(at.to_vec()));
        assert_eq!(seen, [[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1]]);
        let mut visits = 0;
        for_each_index(&[], |_| visits += 1);
        for_each_index(&[3, 0], |_| visits += 10);
        assert_eq!(visits, 1, "rank 0 has one element, an extent of 0 has none");
    }

    #[test]
    fn write_rounds_once() {
        // Just above the midpoint of 1 and the next f16: through f32 it would become the midpoint
        // itself and then, ties to even, 1.
        let (tie, next) = (1.0 + 2f64.powi(-11), 1.0 + 2f64.powi(-10));
        let below_next_tie = next + 2f64.powi(-11) - 2f64.powi(-40);
        let given =
            [tie + 2f64.powi(-40), tie, -tie - 2f64.powi(-40), below_next_tie, 1e300, 1e-300];
        let mut data = [f16::ZERO; 6];
        let view = ViewMut::contiguous("x", &mut data, &[6]).unwrap();
        write(&mut TensorViewMut::F16(view), &given);
        let got: Vec<f64> = data.iter().map(|x| f64::from(x.to_f32())).collect();
        assert_eq!(got, [next, 1.0, -next, next, f64::INFINITY, 0.0]);
    }
}
