//! Gradients on the device: what is launched, over which tiles, with which memory in between.
//!
//! The invariant: the launches of a backward share their parameters and their workspace, whose rows are padded to whole
//! tiles; a main kernel finds everything it needs there, so that there may be several of them. What depends on the plan
//! alone is made once; a call adds addresses and strides.

pub(crate) mod config;
mod gradients;
pub(crate) mod hopper;
mod launches;
pub(crate) mod params;
mod space;
mod tensors;
mod tiles;

pub(crate) use self::launches::{Launches, Site, check_alignment, launch};
pub(crate) use self::space::{naive_workspace, workspace};
pub use self::tensors::{ForwardResults, Gradients};
