//! Shapes and strides: a view never reaches outside its storage, nor does any view made from it, and
//! what is called disjoint is.

use std::collections::HashSet;

use arbitrary::Arbitrary;
use attn_core::{Strided, View};

use super::size::Size;

/// Elements up to which a view is walked.
const WALKED: u128 = 512;

/// A shape with strides over some storage, and what to do with the view.
#[derive(Debug, Arbitrary)]
pub struct Input {
    #[arbitrary(with = crate::lists::few)]
    axes: Vec<(Size, Size, bool)>,
    contiguous: bool,
    offset: Size,
    storage: u8,
    #[arbitrary(with = crate::lists::few)]
    at: Vec<Size>,
    axis: u8,
    range: (u8, u8),
    #[arbitrary(with = crate::lists::few)]
    broadcast: Vec<Size>,
}

pub(super) fn check(input: &Input) {
    let shape: Vec<_> = input.axes.iter().map(|(extent, _, _)| extent.get()).collect();
    let strides: Vec<_> = input.axes.iter().map(|(_, stride, back)| stride.stride(*back)).collect();
    let layout = if input.contiguous {
        Strided::contiguous("x", &shape)
    } else {
        Strided::new("x", &shape, &strides, input.offset.get())
    };
    let Ok(layout) = layout else { return };

    // A layout alone promises no storage, but answers without panicking.
    let at: Vec<_> = input.at.iter().map(|i| i.get()).collect();
    let _ = (layout.index(&at), layout.span(), layout.is_row_contiguous());
    let disjoint = layout.check_disjoint("x").is_ok();

    let data: Vec<u8> = (0..input.storage).collect();
    let Ok(view) = View::new("x", &data, layout) else { return };
    walk(&view, disjoint);

    let _ = view.get(&at);
    let _ = view.row(&at);
    let range = usize::from(input.range.0)..usize::from(input.range.1);
    let broadcast: Vec<_> = input.broadcast.iter().map(|i| i.get()).collect();
    let derived = [
        view.narrow(usize::from(input.axis % 6), range),
        view.at(at.first().copied().unwrap_or(0)),
        view.broadcast_to(&broadcast),
    ];
    for view in derived.into_iter().flatten() {
        walk(&view, false);
    }
}

/// Every element of a small view is there; a disjoint one meets no element twice.
fn walk(view: &View<'_, u8>, disjoint: bool) {
    let shape = view.shape().to_vec();
    let count = shape.iter().try_fold(1_u128, |n, extent| n.checked_mul(*extent as u128));
    let Some(count) = count.filter(|n| *n <= WALKED) else { return };
    let mut met = HashSet::new();
    for flat in 0..usize::try_from(count).expect("at most WALKED") {
        let mut rest = flat;
        let mut at = vec![0; shape.len()];
        for axis in (0..shape.len()).rev() {
            at[axis] = rest % shape[axis];
            rest /= shape[axis];
        }
        let element = view.get(&at);
        assert!(element.is_some(), "{at:?} of {:?} is missing", view.layout());
        let fresh = met.insert(view.layout().index(&at));
        assert!(fresh || !disjoint, "{at:?} of {:?} is met twice", view.layout());
    }
    if let [leading @ .., last] = shape.as_slice()
        && leading.iter().all(|extent| *extent > 0)
        && let Some(row) = view.row(&vec![0; leading.len()])
    {
        assert_eq!(row.len(), *last);
    }
}
