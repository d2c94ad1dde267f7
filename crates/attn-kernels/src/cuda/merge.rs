//! The union of two attention states on the device.
//!
//! The invariant: shapes and types are checked as the CPU engine's merge checks them, before the launch.

use std::sync::Arc;

use attn_core::{Arrangement, Operand, Strided};
use cudarc::driver::CudaStream;

use super::capture::Captures;
use super::config;
use super::engine::{CudaEngine, warp_blocks};
use super::forward::row_heads;
use super::params::{MergeStatesParams, as_i32};
use super::tensor::{DeviceTensor, DeviceTensorMut, DeviceView, DeviceViewMut};
use crate::error::Error;
use crate::launch::Launch;

impl CudaEngine {
    /// Joins two attention states over disjoint key sets, in stream order: `(0, -inf)` is neutral.
    ///
    /// On Hopper and later it is launched as [`CudaEngine::forward`] is: it may begin while the launch before it ends.
    ///
    /// Source: the merge of [`attn_core::OnlineSoftmax`], on finished states.
    /// Shapes: outputs `[rows, heads, value_dim]`, LSEs `[rows, heads]`.
    ///
    /// # Errors
    /// [`Error::Call`] when shapes, types or contexts differ; nothing was launched then. [`Error::Driver`].
    pub fn merge_states(
        &self,
        a: (&DeviceTensor<'_>, &DeviceView<'_, f32>),
        b: (&DeviceTensor<'_>, &DeviceView<'_, f32>),
        o: &mut DeviceTensorMut<'_>,
        lse: &mut DeviceViewMut<'_, f32>,
        stream: &Arc<CudaStream>,
    ) -> Result<(), Error> {
        let output = (o.tensor(), lse.view());
        let [rows, heads, dim] = shape(output.0)?;
        for (field, state) in [("a", a), ("b", b), ("o", output)] {
            check_state(field, state, output.0.operand(), [rows, heads])?;
        }
        let memory = || {
            let tensors = [a.0.memory(), b.0.memory(), output.0.memory()];
            tensors.into_iter().chain([a.1.memory(), b.1.memory(), output.1.memory()])
        };
        super::call::check_memory(self.context(), memory())?;
        let blocks = warp_blocks(&[rows, heads]);
        let (heads, dim) = (as_i32("heads", heads)?, as_i32("value_dim", dim)?);
        let function = self.auxiliary(&config::merge_states_spec(output.0.dtype()), stream)?;
        if blocks == 0 || dim == 0 {
            return Ok(());
        }
        let rows_of = |data, layout: &Strided| row_heads(data, layout, Arrangement::Packed);
        let params = MergeStatesParams {
            a: rows_of(a.0.address(), a.0.layout()),
            a_lse: rows_of(a.1.address(), a.1.layout()),
            b: rows_of(b.0.address(), b.0.layout()),
            b_lse: rows_of(b.1.address(), b.1.layout()),
            o: rows_of(output.0.address(), output.0.layout()),
            lse: rows_of(output.1.address(), output.1.layout()),
            rows: rows as i64,
            heads,
            dim,
        };
        Captures::shared().hold([&function].into_iter(), [].into_iter(), memory());
        let overlaps = self.overlaps()?;
        let launch = Launch::new(&function, blocks, config::HELPER_THREADS);
        Launch { overlaps, ..launch }.run(stream, &params, &[])
    }
}

fn shape(o: &DeviceTensor<'_>) -> Result<[usize; 3], Error> {
    let got = o.layout().shape();
    let fits: Result<[usize; 3], _> = got.try_into();
    fits.map_err(|_| {
        let got = format!("shape {got:?}");
        attn_core::Error::layout("o", "shape [rows, heads, value_dim]", got).into()
    })
}

fn check_state(
    field: &'static str,
    (o, lse): (&DeviceTensor<'_>, &DeviceView<'_, f32>),
    wanted: Operand<'_>,
    rows: [usize; 2],
) -> Result<(), Error> {
    if o.dtype() != wanted.dtype || o.dtype().is_fp8() {
        let expected = format!("{}, no fp8 type", wanted.dtype);
        return Err(attn_core::Error::layout(field, expected, o.dtype()).into());
    }
    let (shape, lse_shape) = (o.layout().shape(), lse.layout().shape());
    if shape != wanted.layout.shape() || lse_shape != rows {
        let expected = format!("output {:?} and LSE {rows:?}", wanted.layout.shape());
        let got = format!("output {shape:?} and LSE {lse_shape:?}");
        return Err(attn_core::Error::layout(field, expected, got).into());
    }
    if !o.layout().is_row_contiguous() {
        let got = format!("strides {:?}", o.layout().strides());
        return Err(attn_core::Error::layout(field, "innermost stride 1", got).into());
    }
    Ok(())
}
