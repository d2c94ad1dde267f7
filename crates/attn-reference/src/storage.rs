//! Owned test tensors: flat storage that is poison wherever a tensor does not lie, and ways to lie in it.
//!
//! The invariant: an element that no index addresses is NaN in an input and a canary in an output, so that
//! a read of it shows in a result and a write to it shows in the storage. Engines get borrowed views;
//! only test data is owned, which is why this is here and not in the vocabulary.

use std::sync::Arc;

use attn_core::{
    DType, Element, Error, F8E4M3, F8E5M2, Strided, TensorView, TensorViewMut, View, ViewMut,
};
use half::{bf16, f16};

use crate::elements::for_each_index;

/// What lies between the elements of an output: exact in every type, and no result of a test.
pub(crate) const CANARY: f32 = -1536.0;

/// How a tensor `[rows..., heads, dim]` lies in its storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Dense, row-major.
    Contiguous,
    /// A start offset of 5 and 3 unused elements after each head's row: nothing is aligned.
    Gaps,
    /// A start offset of 16 and 16 unused elements after each head's row: rows that started on 16 bytes still do.
    AlignedGaps,
    /// Heads outermost: `[heads, rows..., dim]`.
    HeadsFirst,
    /// Rows stored last to first: a negative stride.
    Reversed,
    /// Innermost stride 2. Engines may refuse it.
    InnermostTwo,
    /// All heads are one: stride 0. Inputs only.
    SharedHeads,
    /// Each key row followed by its value row in one storage; queries and outputs are contiguous then.
    InterleavedKv,
}

impl Placement {
    /// Strides for a shape, and the elements of storage that they need.
    ///
    /// `gap` is the room left after each row of the last axis, beside what the placement itself leaves.
    pub(crate) fn strided(
        self,
        field: &'static str,
        shape: &[usize],
        gap: usize,
    ) -> Result<(Strided, usize), Error> {
        let overflow = || Error::Overflow { what: field, detail: format!("shape {shape:?}") };
        let signed = |x: usize| i64::try_from(x).map_err(|_| overflow());
        let rank = shape.len();
        let inner = if self == Self::InnermostTwo { 2 } else { 1 };
        let (offset, gap) = match self {
            Self::Gaps => (5, gap + 3),
            Self::AlignedGaps => (16, gap + 16),
            _ => (0, gap),
        };
        let mut axes: Vec<usize> = (0..rank.saturating_sub(1)).rev().collect();
        if self == Self::HeadsFirst && rank >= 2 {
            axes.remove(0);
            axes.push(rank - 2);
        }
        let mut strides = vec![0; rank];
        let mut step = inner;
        if let Some(last) = strides.last_mut() {
            *last = signed(inner)?;
            step = shape[rank - 1].checked_mul(inner).ok_or_else(overflow)? + gap;
        }
        for axis in axes {
            if self == Self::SharedHeads && axis + 2 == rank {
                continue;
            }
            strides[axis] = signed(step)?;
            step = step.checked_mul(shape[axis].max(1)).ok_or_else(overflow)?;
        }
        let mut start = offset;
        if self == Self::Reversed && rank >= 3 {
            let axis = rank - 3;
            let stride = usize::try_from(strides[axis]).map_err(|_| overflow())?;
            start += shape[axis].saturating_sub(1) * stride;
            strides[axis] = -strides[axis];
        }
        Ok((Strided::new(field, shape, &strides, start)?, offset + step + gap))
    }
}

/// Elements of one type.
#[derive(Debug, Clone)]
pub(crate) enum Storage {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
    F8E4M3(Vec<F8E4M3>),
    F8E5M2(Vec<F8E5M2>),
}

impl Storage {
    pub(crate) fn filled(dtype: DType, len: usize, value: f32) -> Self {
        match dtype {
            DType::F32 => Self::F32(vec![value; len]),
            DType::F16 => Self::F16(vec![f16::from_f32(value); len]),
            DType::BF16 => Self::BF16(vec![bf16::from_f32(value); len]),
            DType::F8E4M3 => Self::F8E4M3(vec![F8E4M3::from_f32(value); len]),
            DType::F8E5M2 => Self::F8E5M2(vec![F8E5M2::from_f32(value); len]),
        }
    }

    /// Rounds a value into an element; indices past the storage are ignored.
    pub(crate) fn set(&mut self, index: usize, value: f32) {
        fn put<T: Element>(data: &mut [T], index: usize, value: f32) {
            if let Some(x) = data.get_mut(index) {
                *x = T::from_f32(value);
            }
        }
        match self {
            Self::F32(data) => put(data, index, value),
            Self::F16(data) => put(data, index, value),
            Self::BF16(data) => put(data, index, value),
            Self::F8E4M3(data) => put(data, index, value),
            Self::F8E5M2(data) => put(data, index, value),
        }
    }

    fn values(&self) -> Vec<f32> {
        match self {
            Self::F32(data) => data.clone(),
            Self::F16(data) => data.iter().map(|x| x.to_f32()).collect(),
            Self::BF16(data) => data.iter().map(|x| x.to_f32()).collect(),
            Self::F8E4M3(data) => data.iter().map(|x| x.to_f32()).collect(),
            Self::F8E5M2(data) => data.iter().map(|x| x.to_f32()).collect(),
        }
    }
}

/// An input tensor; two of them may lie in one storage.
#[derive(Debug, Clone)]
pub(crate) struct InputTensor {
    pub(crate) storage: Arc<Storage>,
    pub(crate) layout: Strided,
}

impl InputTensor {
    /// A tensor with the value that `value` gives for each index; everything else is NaN.
    pub(crate) fn new(
        field: &'static str,
        dtype: DType,
        shape: &[usize],
        placement: Placement,
        value: impl FnMut(&[usize]) -> f32,
    ) -> Result<Self, Error> {
        let (layout, len) = placement.strided(field, shape, 0)?;
        let mut storage = Storage::filled(dtype, len, f32::NAN);
        write_elements(&mut storage, &layout, value);
        Ok(Self { storage: Arc::new(storage), layout })
    }

    pub(crate) fn view(&self, field: &'static str) -> Result<TensorView<'_>, Error> {
        let layout = self.layout.clone();
        Ok(match &*self.storage {
            Storage::F32(data) => TensorView::F32(View::new(field, data, layout)?),
            Storage::F16(data) => TensorView::F16(View::new(field, data, layout)?),
            Storage::BF16(data) => TensorView::BF16(View::new(field, data, layout)?),
            Storage::F8E4M3(data) => TensorView::F8E4M3(View::new(field, data, layout)?),
            Storage::F8E5M2(data) => TensorView::F8E5M2(View::new(field, data, layout)?),
        })
    }
}

/// Writes the value of each index where the layout puts it.
pub(crate) fn write_elements(
    storage: &mut Storage,
    layout: &Strided,
    mut value: impl FnMut(&[usize]) -> f32,
) {
    for_each_index(layout.shape(), |at| {
        if let Some(index) = layout.index(at) {
            storage.set(index, value(at));
        }
    });
}

/// An output tensor: NaN where it lies, a canary elsewhere.
#[derive(Debug, Clone)]
pub(crate) struct OutputTensor {
    storage: Storage,
    layout: Strided,
}

impl OutputTensor {
    pub(crate) fn new(
        field: &'static str,
        dtype: DType,
        shape: &[usize],
        placement: Placement,
    ) -> Result<Self, Error> {
        let (layout, len) = placement.strided(field, shape, 0)?;
        let mut storage = Storage::filled(dtype, len, CANARY);
        write_elements(&mut storage, &layout, |_| f32::NAN);
        Ok(Self { storage, layout })
    }

    /// An f32 tensor `[rows..., heads]`, placed as one of head dim 1.
    pub(crate) fn per_head(
        field: &'static str,
        shape: &[usize],
        placement: Placement,
    ) -> Result<Self, Error> {
        let mut tensor = Self::new(field, DType::F32, &[shape, &[1]].concat(), placement)?;
        let (strides, offset) = (tensor.layout.strides(), tensor.layout.offset());
        tensor.layout = Strided::new(field, shape, &strides[..shape.len()], offset)?;
        Ok(tensor)
    }

    pub(crate) fn view_mut(&mut self, field: &'static str) -> Result<TensorViewMut<'_>, Error> {
        let layout = self.layout.clone();
        match &mut self.storage {
            Storage::F32(data) => Ok(TensorViewMut::F32(ViewMut::new(field, data, layout)?)),
            Storage::F16(data) => Ok(TensorViewMut::F16(ViewMut::new(field, data, layout)?)),
            Storage::BF16(data) => Ok(TensorViewMut::BF16(ViewMut::new(field, data, layout)?)),
            Storage::F8E4M3(_) | Storage::F8E5M2(_) => {
                Err(Error::layout(field, "an output type", "fp8"))
            }
        }
    }

    /// The view of an output that is f32 by definition.
    pub(crate) fn view_f32_mut(&mut self, field: &'static str) -> Result<ViewMut<'_, f32>, Error> {
        match self.view_mut(field)? {
            TensorViewMut::F32(view) => Ok(view),
            other => Err(Error::layout(field, "f32", other.dtype())),
        }
    }

    pub(crate) fn shape(&self) -> &[usize] {
        self.layout.shape()
    }

    /// The values in logical row-major order.
    pub(crate) fn values(&self) -> Vec<f64> {
        let stored = self.storage.values();
        let mut out = Vec::with_capacity(self.layout.len());
        for_each_index(self.layout.shape(), |at| {
            out.extend(self.layout.index(at).map(|i| f64::from(stored[i])));
        });
        out
    }

    /// The first storage index outside the tensor that was written, and what it holds.
    pub(crate) fn first_stray_write(&self) -> Option<(usize, f32)> {
        let stored = self.storage.values();
        let mut inside = vec![false; stored.len()];
        for_each_index(self.layout.shape(), |at| {
            if let Some(i) = self.layout.index(at) {
                inside[i] = true;
            }
        });
        let stray = |i: &usize| !inside[*i] && stored[*i].to_bits() != CANARY.to_bits();
        (0..stored.len()).find(stray).map(|i| (i, stored[i]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Placement; 7] = [
        Placement::Contiguous,
        Placement::Gaps,
        Placement::AlignedGaps,
        Placement::HeadsFirst,
        Placement::Reversed,
        Placement::InnermostTwo,
        Placement::InterleavedKv,
    ];

    #[test]
    fn placements_keep_every_element_apart() {
        for placement in ALL {
            for shape in [&[3, 2, 4][..], &[2, 3, 2, 4], &[0, 2, 4], &[3, 1, 1], &[5, 2]] {
                let mut next = 0.0;
                let tensor = InputTensor::new("x", DType::F32, shape, placement, |_| {
                    next += 1.0;
                    next
                })
                .unwrap();
                let values = crate::elements::read(&tensor.view("x").unwrap());
                let want: Vec<f64> = (1..=values.len()).map(|x| x as f64).collect();
                assert_eq!(values, want, "{placement:?} {shape:?}");
            }
        }
    }

    #[test]
    fn shared_heads_are_one() {
        let t = InputTensor::new("x", DType::F32, &[2, 3, 1], Placement::SharedHeads, |at| {
            f32::from(u8::try_from(at[0]).unwrap())
        })
        .unwrap();
        let values = crate::elements::read(&t.view("x").unwrap());
        assert_eq!(values, [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
    }

    #[test]
    fn output_tells_stray_writes_from_its_own() {
        let mut t = OutputTensor::new("o", DType::F16, &[2, 1, 2], Placement::Gaps).unwrap();
        assert!(t.values().iter().all(|x| x.is_nan()));
        t.view_mut("o").unwrap().fill(1.0);
        assert_eq!(t.first_stray_write(), None);
        t.storage.set(7, 2.0);
        assert_eq!(t.first_stray_write(), Some((7, 2.0)));
    }
}
