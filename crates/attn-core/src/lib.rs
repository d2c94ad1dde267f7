#![doc = include_str!("../README.md")]

pub mod call;
pub mod caps;
pub mod cascade;
pub mod dropout;
pub mod dtype;
pub mod error;
pub mod inputs;
pub mod kernel;
pub mod layout;
pub mod mask;
pub mod online;
pub mod philox;
pub mod plan;
pub mod problem;
pub mod rows;
pub mod shape;
pub mod tolerance;
pub mod units;
pub mod view;

pub use crate::call::{
    CallLayout, GradientsLayout, KvLayout, Operand, OutputLayout, ResultsLayout,
};
pub use crate::caps::{CudaCaps, DeviceCaps, HostCaps};
pub use crate::cascade::{Cascade, CascadePlan, PrefixPart, SharedPrefix};
pub use crate::dropout::{Dropout, DropoutMask};
pub use crate::dtype::{DType, Element, F8E4M3, F8E5M2};
pub use crate::error::Error;
pub use crate::inputs::{ForwardResults, Gradients, Inputs, KvView, Outputs};
pub use crate::kernel::{
    DimRule, Engine, Family, Feature, Features, KernelDesc, SharedMemorySize, Tiles, WorkspaceSize,
};
pub use crate::layout::{CacheLayout, LayoutId, PageOrder, PageStrides, ValueStorage};
pub use crate::mask::{Band, BlockMask, Mask, TileClass};
pub use crate::online::{OnlineSoftmax, Real};
pub use crate::plan::{Plan, Refusal, Reject, Split, Tile};
pub use crate::problem::{BlockSizes, KvStorage, Options, Pass, Phase, Problem, ProblemSpec};
pub use crate::rows::{PagedRows, Rows};
pub use crate::shape::{Arrangement, Lengths};
pub use crate::tolerance::ErrorRule;
pub use crate::units::Bytes;
pub use crate::view::{Strided, TensorView, TensorViewMut, View, ViewMut};
