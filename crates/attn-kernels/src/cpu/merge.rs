//! Joins two finished attention states over disjoint key sets.
//!
//! Invariant: `(0, -inf)` is neutral to the bit, whatever its output holds, and the order of the two
//! does not matter to the bit. The arithmetic is f64 and the result is rounded to the output's type
//! once; a chain of f32 merges would lose a little of the LSE at every link.

use attn_core::{Error, TensorView, TensorViewMut, View, ViewMut};

/// Writes the state of the union of two key sets.
///
/// Shapes: outputs `[rows, heads, value_dim]`, LSEs `[rows, heads]`, natural logarithms.
/// Invariants: every shape and type is checked before the first write.
///
/// # Errors
/// [`Error::Layout`] when shapes or types differ.
pub(crate) fn merge_states(
    a: (&TensorView<'_>, &View<'_, f32>),
    b: (&TensorView<'_>, &View<'_, f32>),
    o: &mut TensorViewMut<'_>,
    lse: &mut ViewMut<'_, f32>,
) -> Result<(), Error> {
    let shape: [usize; 3] = o.layout().shape().try_into().map_err(|_| {
        Error::layout("o", "rank 3: [rows, heads, value_dim]", format!("{:?}", o.layout().shape()))
    })?;
    for (field, view) in [("o_a", a.0), ("o_b", b.0)] {
        if view.dtype() != o.dtype() {
            return Err(Error::layout(field, o.dtype().name(), view.dtype()));
        }
        check_shape(field, view.shape(), &shape)?;
    }
    for (field, got) in [("lse_a", a.1.shape()), ("lse_b", b.1.shape()), ("lse", lse.shape())] {
        check_shape(field, got, &shape[..2])?;
    }
    let [rows, heads, dim] = shape;
    for row in 0..rows {
        for head in 0..heads {
            let of = |view: &View<'_, f32>| view.get(&[row, head]).unwrap_or(f32::NEG_INFINITY);
            let joined = Weights::new(of(a.1), of(b.1));
            for d in 0..dim {
                let at = [row, head, d];
                // A side without weight is not read: its output is unspecified by contract.
                let term = |view: &TensorView<'_>, weight: f64| match weight {
                    0.0 => 0.0,
                    _ => view.get(&at).map_or(0.0, f64::from) * weight,
                };
                #[expect(
                    clippy::cast_possible_truncation,
                    reason = "the rounding to f32 is meant"
                )]
                o.set(&at, (term(a.0, joined.a) + term(b.0, joined.b)) as f32);
            }
            lse.set(&[row, head], joined.lse);
        }
    }
    Ok(())
}

/// Shares of two states in their union.
struct Weights {
    a: f64,
    b: f64,
    lse: f32,
}

impl Weights {
    fn new(a: f32, b: f32) -> Self {
        // NaN compares false, and must not look like an empty side.
        if a == f32::NEG_INFINITY {
            let b_share = if b == f32::NEG_INFINITY { 0.0 } else { 1.0 };
            return Self { a: 0.0, b: b_share, lse: b };
        }
        if b == f32::NEG_INFINITY {
            return Self { a: 1.0, b: 0.0, lse: a };
        }
        let (a, b) = (f64::from(a), f64::from(b));
        let top = a.max(b);
        let (of_a, of_b) = ((a - top).exp(), (b - top).exp());
        let total = of_a + of_b;
        #[expect(clippy::cast_possible_truncation, reason = "the rounding to f32 is meant")]
        let lse = (top + total.ln()) as f32;
        Self { a: of_a / total, b: of_b / total, lse }
    }
}

fn check_shape(field: &'static str, got: &[usize], expected: &[usize]) -> Result<(), Error> {
    if got == expected {
        return Ok(());
    }
    Err(Error::layout(field, format!("shape {expected:?}"), format!("{got:?}")))
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    const LOW: f32 = f32::NEG_INFINITY;

    /// Merges single rows of two elements.
    fn merge(a: ([f32; 2], f32), b: ([f32; 2], f32)) -> ([f32; 2], f32) {
        let (mut o, mut lse) = ([f32::NAN; 2], [f32::NAN; 1]);
        let view = |x| TensorView::F32(View::contiguous("o", x, &[1, 1, 2]).expect("fits"));
        let (la, lb) = ([a.1], [b.1]);
        let of = |x| View::contiguous("lse", x, &[1, 1]).expect("fits");
        merge_states(
            (&view(&a.0), &of(&la)),
            (&view(&b.0), &of(&lb)),
            &mut TensorViewMut::F32(ViewMut::contiguous("o", &mut o, &[1, 1, 2]).expect("fits")),
            &mut ViewMut::contiguous("lse", &mut lse, &[1, 1]).expect("fits"),
        )
        .expect("shapes agree");
        (o, lse[0])
    }

    #[test]
    fn merge_keeps_a_state_joined_with_nothing_to_the_bit() {
        let state = ([0.1f32, -3.7], -1.0e5f32);
        assert_eq!(merge(state, ([f32::NAN; 2], LOW)), state);
        assert_eq!(merge(([f32::NAN; 2], LOW), state), state);
        assert_eq!(merge(([5.0; 2], LOW), ([f32::NAN; 2], LOW)), ([0.0; 2], LOW));
    }

    #[test]
    fn merge_is_commutative_to_the_bit() {
        let (a, b) = (([0.3f32, 7.0], 1.25f32), ([-0.7f32, 0.1], 0.5f32));
        assert_eq!(merge(a, b), merge(b, a));
        let (o, lse) = merge(a, b);
        let (wa, wb) = (1.25f64.exp(), 0.5f64.exp());
        let want = (wa * 0.3 + wb * -0.7) / (wa + wb);
        assert!((f64::from(o[0]) - want).abs() < 1e-7);
        assert!((f64::from(lse) - (wa + wb).ln()).abs() < 1e-7);
    }

    #[test]
    fn merge_of_far_apart_states_keeps_the_larger() {
        assert_eq!(merge(([2.0, 3.0], 1e5), ([9.0, 9.0], -1e5)), ([2.0, 3.0], 1e5));
        assert!(merge(([1.0, 1.0], f32::NAN), ([1.0, 1.0], 0.0)).0[0].is_nan());
    }

    #[test]
    fn merge_rejects_shapes_and_types_that_differ() {
        let (x, l) = ([0f32; 4], [0f32; 2]);
        let h = [bf16::ONE; 4];
        let f32s = TensorView::F32(View::contiguous("o", &x, &[2, 1, 2]).expect("fits"));
        let bf16s = TensorView::BF16(View::contiguous("o", &h, &[2, 1, 2]).expect("fits"));
        let lses = View::contiguous("lse", &l, &[2, 1]).expect("fits");
        let turned = View::contiguous("lse", &l, &[1, 2]).expect("fits");
        let run = |b: (&TensorView<'_>, &View<'_, f32>)| {
            let (mut o, mut lse) = ([7f32; 4], [7f32; 2]);
            let result = merge_states(
                (&f32s, &lses),
                b,
                &mut TensorViewMut::F32(
                    ViewMut::contiguous("o", &mut o, &[2, 1, 2]).expect("fits"),
                ),
                &mut ViewMut::contiguous("lse", &mut lse, &[2, 1]).expect("fits"),
            );
            assert!(result.is_ok() || (o == [7.0; 4] && lse == [7.0; 2]));
            result
        };
        assert!(run((&bf16s, &lses)).is_err());
        assert!(run((&f32s, &turned)).is_err());
        assert!(run((&f32s, &lses)).is_ok());
    }
}
