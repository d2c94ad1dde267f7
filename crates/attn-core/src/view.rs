//! Borrowed host tensors: a slice, a first element, a shape and strides, checked once.
//!
//! The invariant: every index inside the shape addresses an element inside the slice. A view is
//! refused at construction otherwise, so engines never meet a stride that leaves its buffer, and
//! element access needs no unsafe code. Strides are `i64` elements and the bound is computed in
//! 128 bits: no extent times stride can wrap.

use half::{bf16, f16};
use smallvec::SmallVec;

use crate::dtype::{DType, Element, F8E4M3, F8E5M2};
use crate::error::Error;

/// Shape, strides and first element of a tensor inside flat storage, all in elements.
///
/// This is the part of a view that does not depend on where the storage is, so host and device
/// tensors share it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Strided {
    shape: SmallVec<[usize; 4]>,
    strides: SmallVec<[i64; 4]>,
    offset: usize,
}

impl Strided {
    /// A dense row-major tensor that starts at element 0.
    ///
    /// # Errors
    /// [`Error::Overflow`] when the element count does not fit.
    pub fn contiguous(field: &'static str, shape: &[usize]) -> Result<Self, Error> {
        let mut strides: SmallVec<[i64; 4]> = SmallVec::from_elem(1, shape.len());
        let overflow = || Error::Overflow { what: field, detail: format!("shape {shape:?}") };
        let mut step: usize = 1;
        for axis in (0..shape.len()).rev() {
            strides[axis] = i64::try_from(step).map_err(|_| overflow())?;
            step = step.checked_mul(shape[axis].max(1)).ok_or_else(overflow)?;
        }
        Ok(Self { shape: shape.into(), strides, offset: 0 })
    }

    /// A tensor with explicit strides and first element.
    ///
    /// # Errors
    /// [`Error::Layout`] when shape and strides differ in rank.
    pub fn new(
        field: &'static str,
        shape: &[usize],
        strides: &[i64],
        offset: usize,
    ) -> Result<Self, Error> {
        if shape.len() != strides.len() {
            let expected = format!("{} strides for shape {shape:?}", shape.len());
            return Err(Error::layout(field, expected, format!("{strides:?}")));
        }
        Ok(Self { shape: shape.into(), strides: strides.into(), offset })
    }

    /// Extents.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Distances between neighbours along each axis, in elements.
    #[must_use]
    pub fn strides(&self) -> &[i64] {
        &self.strides
    }

    /// The storage index of the first element.
    #[must_use]
    pub const fn offset(&self) -> usize {
        self.offset
    }

    /// Whether there is no element.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// The number of elements, saturating: broadcast axes can name more than there is memory.
    #[must_use]
    pub fn len(&self) -> usize {
        if self.is_empty() {
            return 0;
        }
        self.shape.iter().fold(1, |n: usize, &extent| n.saturating_mul(extent))
    }

    /// Whether neighbours along the last axis are adjacent (or there are none).
    #[must_use]
    pub fn is_row_contiguous(&self) -> bool {
        match (self.shape.last(), self.strides.last()) {
            (Some(&extent), Some(&stride)) => extent <= 1 || stride == 1,
            _ => true,
        }
    }

    /// The lowest and highest storage index that the shape addresses; `None` when empty.
    #[must_use]
    pub fn span(&self) -> Option<(i128, i128)> {
        if self.is_empty() {
            return None;
        }
        let (mut low, mut high) = (self.offset as i128, self.offset as i128);
        for (&extent, &stride) in self.shape.iter().zip(&self.strides) {
            let reach = (extent as i128 - 1) * i128::from(stride);
            if reach < 0 {
                low = low.saturating_add(reach);
            } else {
                high = high.saturating_add(reach);
            }
        }
        Some((low, high))
    }

    /// Checks that every element lies in storage of `len` elements.
    ///
    /// # Errors
    /// [`Error::Layout`] naming the reach and the length.
    pub fn check_bounds(&self, field: &'static str, len: usize) -> Result<(), Error> {
        match self.span() {
            Some((low, high)) if low < 0 || high >= len as i128 => Err(Error::layout(
                field,
                format!("elements within storage of {len}"),
                format!(
                    "{low}..={high} (shape {:?}, strides {:?}, offset {})",
                    self.shape, self.strides, self.offset
                ),
            )),
            _ => Ok(()),
        }
    }

    /// Checks that no two indices address one element, as an output must.
    ///
    /// Axes sorted by stride must each step over the span of the smaller ones; exotic layouts that
    /// interleave without overlap fail this too, and are refused.
    ///
    /// # Errors
    /// [`Error::Layout`] with shape and strides.
    pub fn check_disjoint(&self, field: &'static str) -> Result<(), Error> {
        if self.is_empty() {
            return Ok(());
        }
        let mut axes: SmallVec<[(u64, usize); 4]> = self
            .strides
            .iter()
            .zip(&self.shape)
            .filter(|&(_, &extent)| extent > 1)
            .map(|(&stride, &extent)| (stride.unsigned_abs(), extent))
            .collect();
        axes.sort_unstable();
        let mut span: u128 = 1;
        for (stride, extent) in axes {
            if u128::from(stride) < span {
                return Err(Error::layout(
                    field,
                    "an output whose elements do not overlap",
                    format!("shape {:?}, strides {:?}", self.shape, self.strides),
                ));
            }
            span += u128::from(stride) * (extent as u128 - 1);
        }
        Ok(())
    }

    /// The storage index of an element; `None` outside the shape or for a wrong rank.
    #[must_use]
    pub fn index(&self, at: &[usize]) -> Option<usize> {
        if at.len() != self.shape.len() {
            return None;
        }
        let mut index = i64::try_from(self.offset).ok()?;
        for ((&i, &extent), &stride) in at.iter().zip(&self.shape).zip(&self.strides) {
            if i >= extent {
                return None;
            }
            index = index.checked_add(i64::try_from(i).ok()?.checked_mul(stride)?)?;
        }
        usize::try_from(index).ok()
    }

    /// The same tensor with `axis` cut down to `range`; `None` outside the shape.
    #[must_use]
    pub fn narrow(&self, axis: usize, range: std::ops::Range<usize>) -> Option<Self> {
        let (&extent, &stride) = (self.shape.get(axis)?, self.strides.get(axis)?);
        if range.start > range.end || range.end > extent {
            return None;
        }
        let mut out = self.clone();
        out.shape[axis] = range.end - range.start;
        // An empty tensor addresses nothing, so its first element need not exist.
        if !out.is_empty() {
            let step = i64::try_from(range.start).ok()?.checked_mul(stride)?;
            let offset = i64::try_from(self.offset).ok()?.checked_add(step)?;
            out.offset = usize::try_from(offset).ok()?;
        }
        Some(out)
    }

    /// The same tensor seen at a larger shape: axes are aligned from the right, and extents of 1 (and
    /// missing leading axes) repeat, with stride 0. `None` where an extent is neither 1 nor the asked one.
    #[must_use]
    pub fn broadcast_to(&self, shape: &[usize]) -> Option<Self> {
        let missing = shape.len().checked_sub(self.shape.len())?;
        let mut strides: SmallVec<[i64; 4]> = SmallVec::from_elem(0, shape.len());
        for (axis, (&have, &stride)) in self.shape.iter().zip(&self.strides).enumerate() {
            if have == shape[missing + axis] {
                strides[missing + axis] = stride;
            } else if have != 1 {
                return None;
            }
        }
        Some(Self { shape: shape.into(), strides, offset: self.offset })
    }

    /// The sub-tensor at `at` along the leading axis; `None` past its extent or for rank 0.
    #[must_use]
    pub fn at(&self, i: usize) -> Option<Self> {
        let (&extent, &stride) = (self.shape.first()?, self.strides.first()?);
        if i >= extent {
            return None;
        }
        let step = i64::try_from(i).ok()?.checked_mul(stride)?;
        let offset = i64::try_from(self.offset).ok()?.checked_add(step)?;
        Some(Self {
            shape: self.shape[1..].into(),
            strides: self.strides[1..].into(),
            offset: usize::try_from(offset).ok()?,
        })
    }
}

/// A borrowed tensor of one element type.
///
/// ```
/// use attn_core::View;
///
/// let data = [0f32, 1.0, 2.0, 3.0, 4.0, 5.0];
/// // The transpose of a 2 x 3 matrix, without moving anything.
/// let view = View::strided("x", &data, &[3, 2], &[1, 3], 0)?;
/// assert_eq!(view.get(&[2, 1]), Some(5.0));
/// assert_eq!(view.get(&[3, 0]), None);
/// assert!(View::strided("x", &data, &[3, 2], &[2, 3], 0).is_err()); // leaves the buffer
/// # Ok::<(), attn_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct View<'a, T> {
    data: &'a [T],
    layout: Strided,
}

impl<'a, T: Copy> View<'a, T> {
    /// A dense row-major view of all of `data`.
    ///
    /// # Errors
    /// [`Error::Layout`] when the shape does not have exactly `data.len()` elements.
    pub fn contiguous(field: &'static str, data: &'a [T], shape: &[usize]) -> Result<Self, Error> {
        let layout = Strided::contiguous(field, shape)?;
        if layout.len() != data.len() {
            let expected = format!("{} elements for shape {shape:?}", layout.len());
            return Err(Error::layout(field, expected, data.len()));
        }
        Ok(Self { data, layout })
    }

    /// A view with explicit strides and first element.
    ///
    /// # Errors
    /// [`Error::Layout`] when it reaches outside `data` or ranks differ.
    pub fn strided(
        field: &'static str,
        data: &'a [T],
        shape: &[usize],
        strides: &[i64],
        offset: usize,
    ) -> Result<Self, Error> {
        Self::new(field, data, Strided::new(field, shape, strides, offset)?)
    }

    /// A view of `data` with a layout made elsewhere.
    ///
    /// # Errors
    /// [`Error::Layout`] when it reaches outside `data`.
    pub fn new(field: &'static str, data: &'a [T], layout: Strided) -> Result<Self, Error> {
        layout.check_bounds(field, data.len())?;
        Ok(Self { data, layout })
    }

    /// The storage.
    #[must_use]
    pub const fn data(&self) -> &'a [T] {
        self.data
    }

    /// Shape, strides and first element.
    #[must_use]
    pub const fn layout(&self) -> &Strided {
        &self.layout
    }

    /// Extents.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        self.layout.shape()
    }

    /// An element; `None` outside the shape.
    #[must_use]
    pub fn get(&self, at: &[usize]) -> Option<T> {
        self.layout.index(at).map(|i| self.data[i])
    }

    /// The sub-view at `i` along the leading axis.
    #[must_use]
    pub fn at(&self, i: usize) -> Option<View<'a, T>> {
        Some(View { data: self.data, layout: self.layout.at(i)? })
    }

    /// The same view with `axis` cut down to `range`; `None` outside the shape.
    #[must_use]
    pub fn narrow(&self, axis: usize, range: std::ops::Range<usize>) -> Option<View<'a, T>> {
        Some(View { data: self.data, layout: self.layout.narrow(axis, range)? })
    }

    /// The same view at a larger shape; see [`Strided::broadcast_to`].
    #[must_use]
    pub fn broadcast_to(&self, shape: &[usize]) -> Option<View<'a, T>> {
        // Stride 0 adds no reach, but a view without elements may not gain any.
        if self.layout.is_empty() && !shape.contains(&0) {
            return None;
        }
        Some(View { data: self.data, layout: self.layout.broadcast_to(shape)? })
    }

    /// The elements along the last axis at a leading index, when they are adjacent in storage.
    ///
    /// `None` outside the shape, and for rows that are not contiguous.
    #[must_use]
    pub fn row(&self, leading: &[usize]) -> Option<&'a [T]> {
        let extent = *self.layout.shape.last()?;
        if !self.layout.is_row_contiguous() {
            return None;
        }
        let start = self.row_start(leading)?;
        self.data.get(start..start + extent)
    }

    /// The storage index of the first element of a row.
    #[must_use]
    pub fn row_start(&self, leading: &[usize]) -> Option<usize> {
        let rank = self.layout.shape.len();
        if leading.len() + 1 != rank || self.layout.shape[rank - 1] == 0 {
            return None;
        }
        let mut at: SmallVec<[usize; 4]> = leading.into();
        at.push(0);
        self.layout.index(&at)
    }
}

/// A mutably borrowed tensor of one element type; no two indices share an element.
#[derive(Debug)]
pub struct ViewMut<'a, T> {
    data: &'a mut [T],
    layout: Strided,
}

impl<'a, T: Copy> ViewMut<'a, T> {
    /// A dense row-major view of all of `data`.
    ///
    /// # Errors
    /// [`Error::Layout`] when the shape does not have exactly `data.len()` elements.
    pub fn contiguous(
        field: &'static str,
        data: &'a mut [T],
        shape: &[usize],
    ) -> Result<Self, Error> {
        let layout = Strided::contiguous(field, shape)?;
        if layout.len() != data.len() {
            let expected = format!("{} elements for shape {shape:?}", layout.len());
            return Err(Error::layout(field, expected, data.len()));
        }
        Ok(Self { data, layout })
    }

    /// A view of `data` with an explicit layout.
    ///
    /// # Errors
    /// [`Error::Layout`] when it reaches outside `data` or two indices share an element.
    pub fn new(field: &'static str, data: &'a mut [T], layout: Strided) -> Result<Self, Error> {
        layout.check_bounds(field, data.len())?;
        layout.check_disjoint(field)?;
        Ok(Self { data, layout })
    }

    /// Shape, strides and first element.
    #[must_use]
    pub const fn layout(&self) -> &Strided {
        &self.layout
    }

    /// The storage, what lies between the elements included.
    pub const fn data_mut(&mut self) -> &mut [T] {
        self.data
    }

    /// Extents.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        self.layout.shape()
    }

    /// An element; `None` outside the shape.
    #[must_use]
    pub fn get(&self, at: &[usize]) -> Option<T> {
        self.layout.index(at).map(|i| self.data[i])
    }

    /// Writes an element. Returns whether the index was inside the shape.
    pub fn set(&mut self, at: &[usize], value: T) -> bool {
        match self.layout.index(at) {
            Some(i) => {
                self.data[i] = value;
                true
            }
            None => false,
        }
    }

    /// The elements along the last axis at a leading index, when they are adjacent in storage.
    pub fn row_mut(&mut self, leading: &[usize]) -> Option<&mut [T]> {
        let extent = *self.layout.shape.last()?;
        if !self.layout.is_row_contiguous() {
            return None;
        }
        let start = View { data: &*self.data, layout: self.layout.clone() }.row_start(leading)?;
        self.data.get_mut(start..start + extent)
    }

    /// Writes `value` to every element of the view, and to nothing between them.
    pub fn fill(&mut self, value: T) {
        let shape: SmallVec<[usize; 4]> = self.layout.shape.clone();
        if self.layout.is_empty() {
            return;
        }
        let mut at: SmallVec<[usize; 4]> = SmallVec::from_elem(0, shape.len());
        loop {
            self.set(&at, value);
            // Odometer: the last axis turns fastest.
            let mut axis = shape.len();
            loop {
                if axis == 0 {
                    return;
                }
                axis -= 1;
                at[axis] += 1;
                if at[axis] < shape[axis] {
                    break;
                }
                at[axis] = 0;
            }
        }
    }

    /// A shared view of the same elements.
    #[must_use]
    pub fn as_view(&self) -> View<'_, T> {
        View { data: self.data, layout: self.layout.clone() }
    }

    /// A shorter borrow of the part of the view with `axis` cut down to `range`.
    pub fn narrow_mut(
        &mut self,
        axis: usize,
        range: std::ops::Range<usize>,
    ) -> Option<ViewMut<'_, T>> {
        let layout = self.layout.narrow(axis, range)?;
        Some(ViewMut { data: self.data, layout })
    }

    /// The same view with `axis` cut down to `range`; `None` outside the shape.
    #[must_use]
    pub fn into_narrow(self, axis: usize, range: std::ops::Range<usize>) -> Option<Self> {
        let layout = self.layout.narrow(axis, range)?;
        Some(Self { data: self.data, layout })
    }

    /// A shorter borrow of the sub-view at `i` along the leading axis.
    pub fn at_mut(&mut self, i: usize) -> Option<ViewMut<'_, T>> {
        let layout = self.layout.at(i)?;
        Some(ViewMut { data: self.data, layout })
    }

    /// A shorter borrow of the same view.
    #[must_use]
    pub fn reborrow(&mut self) -> ViewMut<'_, T> {
        ViewMut { data: self.data, layout: self.layout.clone() }
    }
}

/// Calls a generic body with the view inside a [`TensorView`], whatever its element type.
///
/// ```
/// use attn_core::{dispatch_view, Element, TensorView, View};
///
/// let data = [1f32, 2.0];
/// let t = TensorView::F32(View::contiguous("x", &data, &[2])?);
/// let sum: f32 = dispatch_view!(t, v => v.data().iter().map(|x| x.to_f32()).sum());
/// assert_eq!(sum, 3.0);
/// # Ok::<(), attn_core::Error>(())
/// ```
#[macro_export]
macro_rules! dispatch_view {
    ($tensor:expr, $view:ident => $body:expr) => {
        match $tensor {
            $crate::TensorView::F32($view) => $body,
            $crate::TensorView::F16($view) => $body,
            $crate::TensorView::BF16($view) => $body,
            $crate::TensorView::F8E4M3($view) => $body,
            $crate::TensorView::F8E5M2($view) => $body,
        }
    };
}

/// A borrowed tensor whose element type is known at run time.
#[derive(Debug, Clone)]
pub enum TensorView<'a> {
    /// binary32.
    F32(View<'a, f32>),
    /// binary16.
    F16(View<'a, f16>),
    /// bfloat16.
    BF16(View<'a, bf16>),
    /// fp8 E4M3.
    F8E4M3(View<'a, F8E4M3>),
    /// fp8 E5M2.
    F8E5M2(View<'a, F8E5M2>),
}

macro_rules! impl_from_view {
    ($($element:ty => $variant:ident),*) => {
        $(impl<'a> From<View<'a, $element>> for TensorView<'a> {
            fn from(view: View<'a, $element>) -> Self {
                Self::$variant(view)
            }
        })*
    };
}

impl_from_view!(f32 => F32, f16 => F16, bf16 => BF16, F8E4M3 => F8E4M3, F8E5M2 => F8E5M2);

impl TensorView<'_> {
    /// The element type.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::F16(_) => DType::F16,
            Self::BF16(_) => DType::BF16,
            Self::F8E4M3(_) => DType::F8E4M3,
            Self::F8E5M2(_) => DType::F8E5M2,
        }
    }

    /// Shape, strides and first element.
    #[must_use]
    pub const fn layout(&self) -> &Strided {
        dispatch_view!(self, v => v.layout())
    }

    /// Extents.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        self.layout().shape()
    }

    /// An element's exact value; `None` outside the shape.
    #[must_use]
    pub fn get(&self, at: &[usize]) -> Option<f32> {
        dispatch_view!(self, v => v.get(at).map(Element::to_f32))
    }
}

/// Calls a generic body with the view inside a [`TensorViewMut`].
#[macro_export]
macro_rules! dispatch_view_mut {
    ($tensor:expr, $view:ident => $body:expr) => {
        match $tensor {
            $crate::TensorViewMut::F32($view) => $body,
            $crate::TensorViewMut::F16($view) => $body,
            $crate::TensorViewMut::BF16($view) => $body,
        }
    };
}

/// A mutably borrowed tensor whose element type is known at run time. Outputs are never fp8.
#[derive(Debug)]
pub enum TensorViewMut<'a> {
    /// binary32.
    F32(ViewMut<'a, f32>),
    /// binary16.
    F16(ViewMut<'a, f16>),
    /// bfloat16.
    BF16(ViewMut<'a, bf16>),
}

macro_rules! impl_from_view_mut {
    ($($element:ty => $variant:ident),*) => {
        $(impl<'a> From<ViewMut<'a, $element>> for TensorViewMut<'a> {
            fn from(view: ViewMut<'a, $element>) -> Self {
                Self::$variant(view)
            }
        })*
    };
}

impl_from_view_mut!(f32 => F32, f16 => F16, bf16 => BF16);

impl TensorViewMut<'_> {
    /// The element type.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::F16(_) => DType::F16,
            Self::BF16(_) => DType::BF16,
        }
    }

    /// Shape, strides and first element.
    #[must_use]
    pub const fn layout(&self) -> &Strided {
        dispatch_view_mut!(self, v => v.layout())
    }

    /// Extents.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        self.layout().shape()
    }

    /// Writes the nearest value of the element type. Returns whether the index was inside the shape.
    pub fn set(&mut self, at: &[usize], value: f32) -> bool {
        dispatch_view_mut!(self, v => v.set(at, Element::from_f32(value)))
    }

    /// Writes `value` to every element of the view.
    pub fn fill(&mut self, value: f32) {
        dispatch_view_mut!(self, v => v.fill(Element::from_f32(value)));
    }

    /// A shorter borrow of the same view.
    #[must_use]
    pub fn reborrow(&mut self) -> TensorViewMut<'_> {
        match self {
            Self::F32(v) => TensorViewMut::F32(v.reborrow()),
            Self::F16(v) => TensorViewMut::F16(v.reborrow()),
            Self::BF16(v) => TensorViewMut::BF16(v.reborrow()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn view_rejects_reach_outside_storage() {
        let data = [0u8; 10];
        assert!(View::strided("x", &data, &[2, 5], &[5, 1], 0).is_ok());
        assert!(View::strided("x", &data, &[2, 5], &[5, 1], 1).is_err());
        assert!(View::strided("x", &data, &[2, 5], &[-5, 1], 0).is_err());
        assert!(View::strided("x", &data, &[2, 5], &[-5, 1], 5).is_ok());
        assert!(View::strided("x", &data, &[2, 5], &[i64::MAX, 1], 0).is_err());
        assert!(View::strided("x", &data, &[usize::MAX, 2], &[i64::MAX, 1], 0).is_err());
        assert!(View::strided("x", &data, &[2], &[5, 1], 0).is_err());
    }

    #[test]
    fn empty_view_needs_no_storage() {
        let data: [f32; 0] = [];
        let v = View::strided("x", &data, &[0, 4], &[4, 1], 99).expect("nothing is addressed");
        assert_eq!(v.get(&[0, 0]), None);
        assert!(v.layout().is_empty());
    }

    #[test]
    fn output_rejects_shared_elements() {
        let make = |shape: &[usize], strides: &[i64]| {
            ViewMut::new(
                "o",
                &mut [0f32; 12],
                Strided::new("o", shape, strides, 0).expect("same rank"),
            )
            .map(|_| ())
        };
        assert!(make(&[3, 4], &[4, 1]).is_ok());
        assert!(make(&[3, 4], &[1, 3]).is_ok());
        assert!(make(&[3, 4], &[0, 1]).is_err());
        assert!(make(&[3, 4], &[3, 1]).is_err());
        assert!(make(&[1, 4], &[0, 1]).is_ok());
        assert!(make(&[3, 0], &[0, 0]).is_ok());
    }

    #[test]
    fn fill_leaves_the_gaps() {
        let mut data = [7f32; 8];
        let layout = Strided::new("o", &[2, 2], &[4, 2], 1).expect("same rank");
        ViewMut::new("o", &mut data, layout).expect("fits").fill(0.0);
        assert_eq!(data, [7.0, 0.0, 7.0, 0.0, 7.0, 0.0, 7.0, 0.0]);
    }

    #[test]
    fn row_is_a_slice_only_when_contiguous() {
        let data: Vec<f32> = (0u8..12).map(f32::from).collect();
        let v = View::contiguous("x", &data, &[3, 4]).expect("fits");
        assert_eq!(v.row(&[1]), Some(&data[4..8]));
        assert_eq!(v.at(2).and_then(|r| r.get(&[3])), Some(11.0));
        assert_eq!(v.row(&[3]), None);
        let t = View::strided("x", &data, &[4, 3], &[1, 4], 0).expect("fits");
        assert_eq!(t.row(&[1]), None);
    }
}
