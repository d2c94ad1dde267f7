//! Gradients on the device: what is launched, over which tiles, with which memory in between.
//!
//! The invariant: three launches (prepare, main, finish) share their parameters and their workspace, whose rows are
//! padded to whole tiles; a main kernel finds everything it needs there, so that there may be several of them.

pub(crate) mod params;
