//! `in.safetensors`: storage as the file has it, and the tensors that a case says lie in it.
//!
//! The invariant: a tensor is a view of the bytes that were read, wherever it starts and however it is
//! strided; nothing is copied to make an engine's life easier. Only a filled tensor is made here, as one
//! row that repeats, or in full where some of its rows differ. Every tensor of the file and every placement
//! must be of use, so that no part of a case is dropped without a word.
//!
//! The file is read and not mapped: a mapping is only as sound as every other process' manners.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use attn_core::{DType, Strided};
use bytemuck::Pod;
use safetensors::SafeTensors;

use super::description::{Fill, Placement, count, counts};
use super::failure::Failure;
use super::operand::{Elements, Operand, StoredType, cast, reserve};

/// The bytes of a file, aligned for every element type.
#[derive(Debug)]
pub(crate) struct InputFile {
    words: Vec<u64>,
    len: usize,
}

impl InputFile {
    /// Reads the file of a case.
    ///
    /// # Errors
    /// `invalid_argument` when it cannot be read; `out_of_memory`.
    pub(crate) fn read(dir: &Path) -> Result<Self, Failure> {
        let unreadable = |error| Failure::invalid(format!("in.safetensors: {error}"));
        let mut file = File::open(dir.join("in.safetensors")).map_err(unreadable)?;
        let len = file.metadata().map_err(unreadable)?.len();
        let too_large = |_| Failure::out_of_memory("in.safetensors", usize::MAX);
        let len = usize::try_from(len).map_err(too_large)?;
        let count = len.div_ceil(size_of::<u64>());
        let mut words = reserve("in.safetensors", count)?;
        words.resize(count, 0u64);
        file.read_exact(&mut bytemuck::cast_slice_mut(&mut words)[..len]).map_err(unreadable)?;
        Ok(Self { words, len })
    }

    /// The tensors in it.
    ///
    /// # Errors
    /// `invalid_argument` for a file that is not safetensors.
    pub(crate) fn tensors(&self) -> Result<SafeTensors<'_>, Failure> {
        let bytes = &bytemuck::cast_slice(&self.words)[..self.len];
        SafeTensors::deserialize(bytes)
            .map_err(|error| Failure::invalid(format!("in.safetensors: {error}")))
    }
}

/// The tensors of a case's file, taken one by one.
#[derive(Debug)]
pub(crate) struct Inputs<'a> {
    file: &'a SafeTensors<'a>,
    placement: &'a Placement,
    taken: BTreeSet<&'static str>,
}

impl<'a> Inputs<'a> {
    pub(crate) const fn new(file: &'a SafeTensors<'a>, placement: &'a Placement) -> Self {
        Self { file, placement, taken: BTreeSet::new() }
    }

    /// A tensor that must be there.
    ///
    /// # Errors
    /// `invalid_argument` when it is missing, or its placement is inconsistent; as
    /// [`StoredType::check`]; `out_of_memory`.
    pub(crate) fn take(
        &mut self,
        field: &'static str,
        stored: StoredType,
    ) -> Result<Operand<'a>, Failure> {
        self.take_if_present(field, stored)?.ok_or_else(|| missing(field, "the tensor"))
    }

    /// A tensor that may be there.
    ///
    /// # Errors
    /// As [`Inputs::take`].
    pub(crate) fn take_if_present(
        &mut self,
        field: &'static str,
        stored: StoredType,
    ) -> Result<Option<Operand<'a>>, Failure> {
        self.taken.insert(field);
        if let Some(fill) = self.placement.fill.get(field) {
            return self.fill(field, stored, fill).map(Some);
        }
        let Ok(tensor) = self.file.tensor(field) else {
            return Ok(None);
        };
        stored.check(field, tensor.dtype())?;
        let elements = Elements::borrow(field, stored, tensor.data())?;
        let layout = match self.strided(field, tensor.shape())? {
            Some(layout) => layout,
            None => contiguous(field, tensor.shape())?,
        };
        Ok(Some(Operand::new(field, elements, layout)))
    }

    /// The initial storage of an output and where the output lies in it, if the case gives them.
    ///
    /// # Errors
    /// As [`Inputs::take`].
    pub(crate) fn take_storage<T: Pod>(
        &mut self,
        field: &'static str,
        dtype: DType,
    ) -> Result<Option<(Vec<T>, Strided)>, Failure> {
        self.taken.insert(field);
        let tensor = match (self.file.tensor(field), self.placement.strides.contains_key(field)) {
            (Ok(tensor), true) => tensor,
            (Err(_), true) => return Err(missing(field, "the output's initial storage")),
            (Ok(_), false) => {
                let message =
                    format!("strides.{field}: expected strides for given storage, got none");
                return Err(Failure::invalid(message));
            }
            (Err(_), false) => return self.strided(field, &[]).map(|_| None),
        };
        StoredType::Float(dtype).check(field, tensor.dtype())?;
        let data: &[T] = cast(field, tensor.data())?;
        let layout = self.strided(field, tensor.shape())?;
        let mut storage = reserve(field, data.len())?;
        storage.extend_from_slice(data);
        Ok(layout.map(|layout| (storage, layout)))
    }

    /// Checks that every tensor of the file and every placement was taken.
    ///
    /// # Errors
    /// `invalid_argument` for one that was not.
    pub(crate) fn finish(&self) -> Result<(), Failure> {
        let Placement { strides, shapes, offsets, fill, keep: _ } = self.placement;
        let file = self.file.names().into_iter().map(|name| ("in.safetensors", name));
        let names = file
            .chain(strides.keys().map(|name| ("strides", name.as_str())))
            .chain(shapes.keys().map(|name| ("shapes", name.as_str())))
            .chain(offsets.keys().map(|name| ("offsets", name.as_str())))
            .chain(fill.keys().map(|name| ("fill", name.as_str())));
        for (place, name) in names {
            if !self.taken.contains(name) {
                let message = format!("{place}: expected tensors that the case uses, got {name}");
                return Err(Failure::invalid(message));
            }
        }
        Ok(())
    }

    /// The layout of a tensor that the case places by strides.
    fn strided(&self, field: &'static str, storage: &[usize]) -> Result<Option<Strided>, Failure> {
        let Placement { strides, shapes, offsets, .. } = self.placement;
        let (strides, shape) = match (strides.get(field), shapes.get(field)) {
            (Some(strides), Some(shape)) => (strides, counts(&format!("shapes.{field}"), shape)?),
            (None, None) if !offsets.contains_key(field) => return Ok(None),
            _ => {
                let message = format!("{field}: expected strides and a shape, got one of them");
                return Err(Failure::invalid(message));
            }
        };
        let offset = offsets.get(field).copied().unwrap_or(0);
        let offset = count(&format!("offsets.{field}"), offset)?;
        let &[len] = storage else {
            let message = format!("{field}: expected flat storage for strides, got {storage:?}");
            return Err(Failure::invalid(message));
        };
        let layout = Strided::new(field, &shape, strides, offset).map_err(Failure::invalid)?;
        layout.check_bounds(field, len).map_err(Failure::invalid)?;
        Ok(Some(layout))
    }

    fn fill(
        &self,
        field: &'static str,
        stored: StoredType,
        fill: &Fill,
    ) -> Result<Operand<'a>, Failure> {
        if self.placement.strides.contains_key(field) {
            let message = format!("{field}: expected a fill or strides, got both");
            return Err(Failure::invalid(message));
        }
        let shape = counts(&format!("fill.{field}.shape"), &fill.shape)?;
        let whole = contiguous(field, &shape)?;
        let Some(rows) = &fill.rows else {
            if self.file.tensor(field).is_ok() {
                let message = format!("fill.{field}.rows: expected rows for given data, got none");
                return Err(Failure::invalid(message));
            }
            // One row stands for all of them: the other axes have stride 0.
            let mut strides = vec![0; shape.len()];
            if let Some(last) = strides.last_mut() {
                *last = 1;
            }
            let row = shape.last().copied().unwrap_or(1);
            let elements = Elements::filled(field, stored, (fill.value, row), None)?;
            let layout = Strided::new(field, &shape, &strides, 0).map_err(Failure::invalid)?;
            return Ok(Operand::new(field, elements, layout));
        };
        let rows = counts(&format!("fill.{field}.rows"), rows)?;
        let &[extent, ref rest @ ..] = &shape[..] else {
            return Err(Failure::invalid(format!(
                "fill.{field}.shape: expected an axis, got none"
            )));
        };
        if let Some(row) = rows.iter().find(|&&row| row >= extent) {
            let message = format!("fill.{field}.rows: expected rows below {extent}, got {row}");
            return Err(Failure::invalid(message));
        }
        let tensor = self.file.tensor(field).map_err(|_| missing(field, "the rows of the fill"))?;
        stored.check(field, tensor.dtype())?;
        if tensor.shape().split_first() != Some((&rows.len(), rest)) {
            let message = format!(
                "{field}: expected {} rows of shape {rest:?}, got {:?}",
                rows.len(),
                tensor.shape()
            );
            return Err(Failure::invalid(message));
        }
        let row_len = whole.len().checked_div(extent).unwrap_or(0);
        let rows = Some((&rows[..], row_len, tensor.data()));
        let elements = Elements::filled(field, stored, (fill.value, whole.len()), rows)?;
        Ok(Operand::new(field, elements, whole))
    }
}

fn contiguous(field: &'static str, shape: &[usize]) -> Result<Strided, Failure> {
    Strided::contiguous(field, shape).map_err(Failure::invalid)
}

fn missing(field: &str, what: &str) -> Failure {
    Failure::invalid(format!("{field}: expected {what} in in.safetensors, got none"))
}
