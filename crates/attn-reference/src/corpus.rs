//! The cases that every engine and every strategy runs, by theme.
//!
//! The invariant: names are unique, and no case is ever weakened or removed to let an engine pass. The cases
//! are Rust values and not TOML files because a recipe is checked by the compiler, a published crate
//! carries it without a file lookup at run time, and a parser would be this crate's largest dependency.
//! Each is small: the whole corpus is computed, by the f64 reference and by an engine, in seconds.

mod causal;
mod dropout;
mod empty;
mod extreme;
mod fp8;
mod gqa;
mod layouts;
mod masks;
mod paged;
mod regression;
mod scores;
mod shapes;

use crate::case::{Case, Theme};

/// Every case.
///
/// ```
/// use attn_reference::corpus;
///
/// assert!(corpus().iter().any(|case| case.name == "empty/no_sequences"));
/// ```
#[must_use]
pub fn corpus() -> Vec<Case> {
    let themes = [
        (Theme::Shapes, "shapes", shapes::cases()),
        (Theme::Causal, "causal", causal::cases()),
        (Theme::Gqa, "gqa", gqa::cases()),
        (Theme::Masks, "masks", masks::cases()),
        (Theme::Scores, "scores", scores::cases()),
        (Theme::Dropout, "dropout", dropout::cases()),
        (Theme::Paged, "paged", paged::cases()),
        (Theme::Fp8, "fp8", fp8::cases()),
        (Theme::Layouts, "layouts", layouts::cases()),
        (Theme::Empty, "empty", empty::cases()),
        (Theme::Extreme, "extreme", extreme::cases()),
        (Theme::Regression, "regression", regression::cases()),
    ];
    let mut all = Vec::new();
    for (theme, prefix, cases) in themes {
        all.extend(cases.into_iter().map(|mut case| {
            case.name = format!("{prefix}/{}", case.name);
            case.theme(theme)
        }));
    }
    all
}
