//! Borrowed device tensors: memory, an element type, a shape and strides, checked once.
//!
//! The invariant: every index inside the shape addresses an element inside the memory, and elements lie on
//! multiples of their size, so that the engine may hand the address to a kernel that walks the shape. Views of host
//! memory hold the same ([`attn_core::View`]); the two are apart because no element here can be looked at.

use std::fmt;
use std::marker::PhantomData;

use attn_core::{DType, Operand, Strided};
use bytemuck::Pod;

use crate::error::Error;
use crate::launch::{DeviceMemory, DeviceMemoryMut};

/// A device tensor whose element type is known at run time: q, k, v, o.
#[derive(Debug, Clone)]
pub struct DeviceTensor<'a> {
    memory: DeviceMemory<'a>,
    dtype: DType,
    layout: Strided,
}

impl<'a> DeviceTensor<'a> {
    /// A tensor in memory.
    ///
    /// # Errors
    /// [`Error::Call`] when it reaches outside the memory, or the memory does not lie on an element's size.
    pub fn new(
        field: &'static str,
        memory: impl Into<DeviceMemory<'a>>,
        dtype: DType,
        layout: Strided,
    ) -> Result<Self, Error> {
        let memory = memory.into();
        check(field, &memory, dtype.size(), &layout)?;
        Ok(Self { memory, dtype, layout })
    }

    /// A dense row-major tensor at the start of the memory.
    ///
    /// # Errors
    /// As [`DeviceTensor::new`].
    pub fn contiguous(
        field: &'static str,
        memory: impl Into<DeviceMemory<'a>>,
        dtype: DType,
        shape: &[usize],
    ) -> Result<Self, Error> {
        Self::new(field, memory, dtype, Strided::contiguous(field, shape)?)
    }

    /// Shape, strides and first element.
    #[must_use]
    pub const fn layout(&self) -> &Strided {
        &self.layout
    }

    /// The element type.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// The memory it lies in.
    #[must_use]
    pub const fn memory(&self) -> DeviceMemory<'a> {
        self.memory
    }

    /// The address of the first element; 0 for a tensor without memory.
    pub(crate) fn address(&self) -> u64 {
        address(&self.memory, &self.layout, self.dtype.size())
    }

    pub(crate) const fn operand(&self) -> Operand<'_> {
        Operand { dtype: self.dtype, layout: &self.layout }
    }
}

/// A device tensor that is written: no two indices share an element.
#[derive(Debug)]
pub struct DeviceTensorMut<'a> {
    tensor: DeviceTensor<'a>,
    exclusive: PhantomData<DeviceMemoryMut<'a>>,
}

impl<'a> DeviceTensorMut<'a> {
    /// A tensor in memory.
    ///
    /// # Errors
    /// As [`DeviceTensor::new`], and [`Error::Call`] when two indices share an element.
    pub fn new(
        field: &'static str,
        memory: impl Into<DeviceMemoryMut<'a>>,
        dtype: DType,
        layout: Strided,
    ) -> Result<Self, Error> {
        layout.check_disjoint(field)?;
        let tensor = DeviceTensor::new(field, memory.into().as_shared(), dtype, layout)?;
        Ok(Self { tensor, exclusive: PhantomData })
    }

    /// A dense row-major tensor at the start of the memory.
    ///
    /// # Errors
    /// As [`DeviceTensor::new`].
    pub fn contiguous(
        field: &'static str,
        memory: impl Into<DeviceMemoryMut<'a>>,
        dtype: DType,
        shape: &[usize],
    ) -> Result<Self, Error> {
        Self::new(field, memory, dtype, Strided::contiguous(field, shape)?)
    }

    /// The same tensor, to be read.
    #[must_use]
    pub fn shared(&self) -> DeviceTensor<'_> {
        self.tensor.clone()
    }

    pub(crate) const fn tensor(&self) -> &DeviceTensor<'a> {
        &self.tensor
    }

    /// The same tensor, for a launch that is part of another call on it.
    pub(crate) fn reborrow(&mut self) -> DeviceTensorMut<'_> {
        DeviceTensorMut { tensor: self.tensor.clone(), exclusive: PhantomData }
    }
}

/// A device tensor of one element type: masks (u8), tables and positions (i32), slots (i64), biases, slopes,
/// scales and LSEs (f32).
#[derive(Clone)]
pub struct DeviceView<'a, T> {
    memory: DeviceMemory<'a>,
    layout: Strided,
    element: PhantomData<T>,
}

impl<'a, T: Pod> DeviceView<'a, T> {
    /// A tensor in memory.
    ///
    /// # Errors
    /// As [`DeviceTensor::new`].
    pub fn new(
        field: &'static str,
        memory: impl Into<DeviceMemory<'a>>,
        layout: Strided,
    ) -> Result<Self, Error> {
        const { assert!(size_of::<T>() > 0, "an element has a size") };
        let memory = memory.into();
        check(field, &memory, size_of::<T>(), &layout)?;
        Ok(Self { memory, layout, element: PhantomData })
    }

    /// A dense row-major tensor at the start of the memory.
    ///
    /// # Errors
    /// As [`DeviceTensor::new`].
    pub fn contiguous(
        field: &'static str,
        memory: impl Into<DeviceMemory<'a>>,
        shape: &[usize],
    ) -> Result<Self, Error> {
        Self::new(field, memory, Strided::contiguous(field, shape)?)
    }

    /// Shape, strides and first element.
    #[must_use]
    pub const fn layout(&self) -> &Strided {
        &self.layout
    }

    /// The memory it lies in.
    #[must_use]
    pub const fn memory(&self) -> DeviceMemory<'a> {
        self.memory
    }

    /// The address of the first element; 0 for a tensor without memory.
    pub(crate) fn address(&self) -> u64 {
        address(&self.memory, &self.layout, size_of::<T>())
    }
}

impl<T> fmt::Debug for DeviceView<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { memory, layout, element: _ } = self;
        f.debug_struct("DeviceView").field("memory", memory).field("layout", layout).finish()
    }
}

/// A device tensor of one element type that is written.
#[derive(Debug)]
pub struct DeviceViewMut<'a, T> {
    view: DeviceView<'a, T>,
    exclusive: PhantomData<DeviceMemoryMut<'a>>,
}

impl<'a, T: Pod> DeviceViewMut<'a, T> {
    /// A tensor in memory.
    ///
    /// # Errors
    /// As [`DeviceTensorMut::new`].
    pub fn new(
        field: &'static str,
        memory: impl Into<DeviceMemoryMut<'a>>,
        layout: Strided,
    ) -> Result<Self, Error> {
        layout.check_disjoint(field)?;
        let view = DeviceView::new(field, memory.into().as_shared(), layout)?;
        Ok(Self { view, exclusive: PhantomData })
    }

    /// A dense row-major tensor at the start of the memory.
    ///
    /// # Errors
    /// As [`DeviceTensor::new`].
    pub fn contiguous(
        field: &'static str,
        memory: impl Into<DeviceMemoryMut<'a>>,
        shape: &[usize],
    ) -> Result<Self, Error> {
        Self::new(field, memory, Strided::contiguous(field, shape)?)
    }

    /// The same tensor, to be read.
    #[must_use]
    pub fn shared(&self) -> DeviceView<'_, T> {
        self.view.clone()
    }

    pub(crate) const fn view(&self) -> &DeviceView<'a, T> {
        &self.view
    }

    /// The same tensor, for a launch that is part of another call on it.
    pub(crate) fn reborrow(&mut self) -> DeviceViewMut<'_, T> {
        DeviceViewMut { view: self.view.clone(), exclusive: PhantomData }
    }
}

fn check(
    field: &'static str,
    memory: &DeviceMemory<'_>,
    size: usize,
    layout: &Strided,
) -> Result<(), Error> {
    layout.check_bounds(field, memory.bytes() / size)?;
    if !memory.address().is_multiple_of(size as u64) {
        let expected = format!("memory on a multiple of {size} bytes");
        let got = format!("{:#x}", memory.address());
        return Err(attn_core::Error::layout(field, expected, got).into());
    }
    Ok(())
}

/// The first element's address. A tensor without elements is never read, and its first element need not
/// exist, so it is sent to the start of its memory.
fn address(memory: &DeviceMemory<'_>, layout: &Strided, size: usize) -> u64 {
    if layout.is_empty() {
        return memory.address();
    }
    // The offset was checked to lie inside the memory.
    memory.address() + layout.offset() as u64 * size as u64
}
