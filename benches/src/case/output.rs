//! `out.safetensors`: outputs as the engine left them.
//!
//! The invariant: an output starts as NaN, or as the storage that the case gives for it, so that an element
//! that the engine forgets shows, and so does one that it may not touch. What lies between the elements of
//! a strided output is written back as it was found.

use std::path::Path;

use attn_core::{DType, Strided, TensorView, TensorViewMut, View, ViewMut};
use half::{bf16, f16};
use safetensors::Dtype;
use safetensors::tensor::TensorView as FileTensor;

use super::description::{Placement, counts};
use super::failure::{Failure, Kind};
use super::input::Inputs;
use super::operand::reserve;
use super::report::OUTPUT_FILE;

#[derive(Debug)]
enum Elements {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
}

/// An output: storage of its own, and where the tensor lies in it.
#[derive(Debug)]
pub(crate) struct Output {
    field: &'static str,
    elements: Elements,
    layout: Strided,
    /// Shape of the tensor in the file: flat storage when the case places it by strides.
    stored: Vec<usize>,
    /// Indices along the first axis to write, if not all.
    keep: Option<Vec<usize>>,
}

impl Output {
    /// An output of a shape, placed and kept as the case says.
    ///
    /// # Errors
    /// `invalid_argument` for storage or kept indices that do not fit; `out_of_memory`.
    pub(crate) fn new(
        inputs: &mut Inputs<'_>,
        placement: &Placement,
        field: &'static str,
        dtype: DType,
        shape: &[usize],
    ) -> Result<Self, Failure> {
        match dtype {
            DType::F32 => {
                Self::typed(inputs, placement, (field, dtype), shape, f32::NAN, Elements::F32)
            }
            DType::F16 => {
                Self::typed(inputs, placement, (field, dtype), shape, f16::NAN, Elements::F16)
            }
            DType::BF16 => {
                Self::typed(inputs, placement, (field, dtype), shape, bf16::NAN, Elements::BF16)
            }
            DType::F8E4M3 | DType::F8E5M2 => {
                Err(Failure::invalid(format!("{field}: expected an output type, got {dtype}")))
            }
        }
    }

    fn typed<T: bytemuck::Pod>(
        inputs: &mut Inputs<'_>,
        placement: &Placement,
        (field, dtype): (&'static str, DType),
        shape: &[usize],
        unwritten: T,
        wrap: impl Fn(Vec<T>) -> Elements,
    ) -> Result<Self, Failure> {
        if let Some((data, layout)) = inputs.take_storage(field, dtype)? {
            let stored = vec![data.len()];
            return Ok(Self { field, elements: wrap(data), layout, stored, keep: None });
        }
        let keep = match placement.keep.get(field) {
            None => None,
            Some(indices) => Some(kept(field, indices, shape)?),
        };
        let layout = Strided::contiguous(field, shape).map_err(|e| Failure::of_data(&e))?;
        let mut data = reserve(field, layout.len())?;
        data.resize(layout.len(), unwritten);
        Ok(Self { field, elements: wrap(data), layout, stored: shape.to_vec(), keep })
    }

    /// # Errors
    /// `layout_mismatch` for an output whose elements overlap.
    pub(crate) fn view_mut(&mut self) -> Result<TensorViewMut<'_>, Failure> {
        let (field, layout) = (self.field, self.layout.clone());
        Ok(match &mut self.elements {
            Elements::F32(data) => TensorViewMut::F32(ViewMut::new(field, data, layout)?),
            Elements::F16(data) => TensorViewMut::F16(ViewMut::new(field, data, layout)?),
            Elements::BF16(data) => TensorViewMut::BF16(ViewMut::new(field, data, layout)?),
        })
    }

    /// # Errors
    /// As [`Output::view_mut`].
    pub(crate) fn f32_view_mut(&mut self) -> Result<ViewMut<'_, f32>, Failure> {
        let field = self.field;
        match self.view_mut()? {
            TensorViewMut::F32(view) => Ok(view),
            other => Err(other_type(field, other.dtype())),
        }
    }

    /// # Errors
    /// As [`Output::view_mut`].
    pub(crate) fn view(&self) -> Result<TensorView<'_>, Failure> {
        let (field, layout) = (self.field, self.layout.clone());
        Ok(match &self.elements {
            Elements::F32(data) => TensorView::F32(View::new(field, data, layout)?),
            Elements::F16(data) => TensorView::F16(View::new(field, data, layout)?),
            Elements::BF16(data) => TensorView::BF16(View::new(field, data, layout)?),
        })
    }

    /// # Errors
    /// As [`Output::view_mut`].
    pub(crate) fn f32_view(&self) -> Result<View<'_, f32>, Failure> {
        match self.view()? {
            TensorView::F32(view) => Ok(view),
            other => Err(other_type(self.field, other.dtype())),
        }
    }

    fn bytes(&self) -> (Dtype, &[u8]) {
        match &self.elements {
            Elements::F32(data) => (Dtype::F32, bytemuck::cast_slice(data)),
            Elements::F16(data) => (Dtype::F16, bytemuck::cast_slice(data)),
            Elements::BF16(data) => (Dtype::BF16, bytemuck::cast_slice(data)),
        }
    }

    /// Type, shape and bytes to write; the kept rows are gathered into `room`.
    fn in_file<'a>(&'a self, room: &'a mut Vec<u8>) -> Result<FileTensor<'a>, Failure> {
        let (dtype, bytes) = self.bytes();
        let mut shape = self.stored.clone();
        let data = match (&self.keep, shape.first_mut()) {
            (Some(keep), Some(extent)) => {
                let row = bytes.len().checked_div(*extent).unwrap_or(0);
                *room = reserve(self.field, keep.len().saturating_mul(row))?;
                for &index in keep {
                    room.extend_from_slice(&bytes[index * row..(index + 1) * row]);
                }
                *extent = keep.len();
                &room[..]
            }
            _ => bytes,
        };
        FileTensor::new(dtype, shape, data)
            .map_err(|error| Failure::new(Kind::Internal, format!("{}: {error}", self.field)))
    }
}

/// Writes the outputs of a case.
///
/// # Errors
/// `internal` when the file cannot be written.
pub(crate) fn write(dir: &Path, outputs: &[&Output]) -> Result<(), Failure> {
    let mut rooms: Vec<Vec<u8>> = outputs.iter().map(|_| Vec::new()).collect();
    let tensors = outputs
        .iter()
        .zip(&mut rooms)
        .map(|(output, room)| Ok((output.field, output.in_file(room)?)))
        .collect::<Result<Vec<_>, Failure>>()?;
    safetensors::serialize_to_file(tensors, None, &dir.join(OUTPUT_FILE))
        .map_err(|error| Failure::new(Kind::Internal, format!("{OUTPUT_FILE}: {error}")))
}

/// Checks that kept tensors are outputs.
///
/// # Errors
/// `invalid_argument` naming one that is not.
pub(crate) fn check_kept(placement: &Placement, fields: &[&str]) -> Result<(), Failure> {
    match placement.keep.keys().find(|name| !fields.contains(&name.as_str())) {
        None => Ok(()),
        Some(other) => {
            Err(Failure::invalid(format!("keep: expected outputs of {fields:?}, got {other}")))
        }
    }
}

fn kept(field: &str, indices: &[i64], shape: &[usize]) -> Result<Vec<usize>, Failure> {
    let indices = counts(&format!("keep.{field}"), indices)?;
    let extent = shape.first().copied().unwrap_or(0);
    match indices.iter().find(|&&index| index >= extent) {
        None => Ok(indices),
        Some(index) => Err(Failure::invalid(format!(
            "keep.{field}: expected indices below {extent}, got {index}"
        ))),
    }
}

fn other_type(field: &str, got: DType) -> Failure {
    Failure::new(Kind::Internal, format!("{field}: expected f32, got {got}"))
}
