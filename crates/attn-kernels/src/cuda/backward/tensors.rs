//! What a backward reads and writes beside its inputs, in the shapes of [`attn_core::ForwardResults`] and
//! [`attn_core::Gradients`].
//!
//! The invariant: checked by the same code as host tensors ([`attn_core::ResultsLayout`],
//! [`attn_core::GradientsLayout`]), so that the two engines refuse the same calls in the same words.

use attn_core::{GradientsLayout, ResultsLayout};

use crate::cuda::tensor::{DeviceTensor, DeviceTensorMut, DeviceView, DeviceViewMut};
use crate::launch::DeviceMemory;

/// What a backward reads besides [`crate::cuda::Inputs`]; shapes as [`attn_core::ForwardResults`].
#[derive(Debug, Clone)]
pub struct ForwardResults<'a> {
    /// The forward's output.
    pub o: DeviceTensor<'a>,
    /// The forward's LSE, a natural log.
    pub lse: DeviceView<'a, f32>,
    /// Gradient of the output.
    pub d_o: DeviceTensor<'a>,
}

/// What a backward writes; rows of padding too, as 0. Shapes as [`attn_core::Gradients`].
#[derive(Debug)]
pub struct Gradients<'a> {
    /// Gradient of q.
    pub dq: DeviceTensorMut<'a>,
    /// Gradient of k, summed over the query heads of a group.
    pub dk: DeviceTensorMut<'a>,
    /// Gradient of v, summed over the query heads of a group.
    pub dv: DeviceTensorMut<'a>,
    /// Gradient of the sinks `[q_heads]`.
    pub dsinks: Option<DeviceViewMut<'a, f32>>,
    /// Gradient of the bias, in its shape, summed over its broadcast extents.
    pub dbias: Option<DeviceViewMut<'a, f32>>,
}

impl<'a> ForwardResults<'a> {
    /// What the tensors are, without what they hold.
    #[must_use]
    pub fn layout(&self) -> ResultsLayout<'_> {
        let (o, d_o) = (self.o.operand(), self.d_o.operand());
        ResultsLayout { o, lse: self.lse.layout(), d_o }
    }

    /// Every piece of memory that a launch is given.
    pub(crate) fn memory(&self) -> impl Iterator<Item = DeviceMemory<'a>> + '_ {
        [self.o.memory(), self.lse.memory(), self.d_o.memory()].into_iter()
    }
}

impl<'a> Gradients<'a> {
    /// What the tensors are, without what they hold.
    #[must_use]
    pub fn layout(&self) -> GradientsLayout<'_> {
        GradientsLayout {
            dq: self.dq.tensor().operand(),
            dk: self.dk.tensor().operand(),
            dv: self.dv.tensor().operand(),
            dsinks: self.dsinks.as_ref().map(|view| view.view().layout()),
            dbias: self.dbias.as_ref().map(|view| view.view().layout()),
        }
    }

    /// Every piece of memory that a launch is given.
    pub(crate) fn memory(&self) -> impl Iterator<Item = DeviceMemory<'a>> + '_ {
        let tensors = [&self.dq, &self.dk, &self.dv].into_iter();
        let views = [&self.dsinks, &self.dbias].into_iter().flatten();
        tensors.map(|t| t.tensor().memory()).chain(views.map(|view| view.view().memory()))
    }
}
