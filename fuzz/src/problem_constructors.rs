//! Constructors on arbitrary values: each gives an error value or something that keeps its promises,
//! and none panics, overflows or reaches outside its storage.
//!
//! One target for the four of them, since they share what makes a value interesting: sizes near 0,
//! near powers of two and near the ends of their type ([`size::Size`]).

use arbitrary::Arbitrary;

mod call;
mod layout;
mod size;
mod spec;
mod strided;

/// What to construct.
#[derive(Debug, Arbitrary)]
pub enum Input {
    /// A problem from its specification.
    Spec(spec::Input),
    /// Shapes, strides and views of storage.
    Strided(strided::Input),
    /// A layout of a paged cache.
    Layout(layout::Input),
    /// A small problem with data that fits it, or nearly.
    Call(call::Input),
}

/// Constructs it and checks the result.
pub fn check(input: &Input) {
    match input {
        Input::Spec(input) => spec::check(input),
        Input::Strided(input) => strided::check(input),
        Input::Layout(input) => layout::check(input),
        Input::Call(input) => call::check(input),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn problem_constructors_hold_on_seeded_inputs() {
        crate::seeded::run(100_000, super::check);
    }
}
