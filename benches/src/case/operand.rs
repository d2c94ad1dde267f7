//! A tensor of a case: elements of a type known at run time, and where the tensor lies in them.
//!
//! The invariant: an operand's type was compared with the one the case states before anything read it, so
//! that a view of another type can only be asked for by mistake of this program.

use std::borrow::Cow;

use attn_core::{DType, Element, F8E4M3, F8E5M2, Strided, TensorView, View};
use bytemuck::Pod;
use half::{bf16, f16};
use safetensors::Dtype;

use super::failure::{Failure, Kind, is_key_side};

/// The stored type that a tensor must have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoredType {
    Float(DType),
    U8,
    I32,
}

impl StoredType {
    const fn in_file(self) -> Dtype {
        match self {
            Self::Float(DType::F32) => Dtype::F32,
            Self::Float(DType::F16) => Dtype::F16,
            Self::Float(DType::BF16) => Dtype::BF16,
            Self::Float(DType::F8E4M3) => Dtype::F8_E4M3,
            Self::Float(DType::F8E5M2) => Dtype::F8_E5M2,
            Self::U8 => Dtype::U8,
            Self::I32 => Dtype::I32,
        }
    }

    /// Compares with the type in the file.
    ///
    /// # Errors
    /// `layout_mismatch` for keys and values, `invalid_argument` for others.
    pub(crate) fn check(self, field: &str, got: Dtype) -> Result<(), Failure> {
        let expected = self.in_file();
        if got == expected {
            return Ok(());
        }
        let kind = if is_key_side(field) { Kind::LayoutMismatch } else { Kind::InvalidArgument };
        Err(Failure::new(kind, format!("{field}: expected {expected:?}, got {got:?}")))
    }
}

/// Elements of one type: borrowed from the file or made.
#[derive(Debug)]
pub(crate) enum Elements<'a> {
    F32(Cow<'a, [f32]>),
    F16(Cow<'a, [f16]>),
    BF16(Cow<'a, [bf16]>),
    F8E4M3(Cow<'a, [F8E4M3]>),
    F8E5M2(Cow<'a, [F8E5M2]>),
    U8(Cow<'a, [u8]>),
    I32(Cow<'a, [i32]>),
}

/// Calls a generic body with the element type of a [`StoredType`], its variant of [`Elements`], and the
/// conversion of a value of `case.json`.
macro_rules! dispatch_stored {
    ($stored:expr, ($element:ident, $wrap:ident, $nearest:ident) => $body:expr) => {
        dispatch_stored!(@ $stored, ($element, $wrap, $nearest), $body,
            StoredType::Float(DType::F32), f32, F32, <f32 as Element>::from_f32;
            StoredType::Float(DType::F16), f16, F16, <f16 as Element>::from_f32;
            StoredType::Float(DType::BF16), bf16, BF16, <bf16 as Element>::from_f32;
            StoredType::Float(DType::F8E4M3), F8E4M3, F8E4M3, <F8E4M3 as Element>::from_f32;
            StoredType::Float(DType::F8E5M2), F8E5M2, F8E5M2, <F8E5M2 as Element>::from_f32;
            StoredType::U8, u8, U8, u8_of;
            StoredType::I32, i32, I32, i32_of;
        )
    };
    (@ $stored:expr, ($element:ident, $wrap:ident, $nearest:ident), $body:expr,
        $($pattern:pat, $type:ty, $variant:ident, $convert:expr;)*) => {
        match $stored {
            $($pattern => {
                type $element = $type;
                let ($wrap, $nearest) = (Elements::$variant, $convert);
                $body
            })*
        }
    };
}

impl<'a> Elements<'a> {
    /// The elements in bytes of the file, which were checked to be of that type.
    ///
    /// # Errors
    /// `invalid_argument` for bytes that are not aligned.
    pub(crate) fn borrow(
        field: &str,
        stored: StoredType,
        bytes: &'a [u8],
    ) -> Result<Self, Failure> {
        dispatch_stored!(stored, (T, wrap, _nearest) => {
            Ok(wrap(Cow::Borrowed(cast::<T>(field, bytes)?)))
        })
    }

    /// `len` times one value, but for rows of `row_len` elements at some places.
    ///
    /// # Errors
    /// `invalid_argument` for bytes that are not aligned; `out_of_memory`.
    pub(crate) fn filled(
        field: &str,
        stored: StoredType,
        (value, len): (f32, usize),
        rows: Option<(&[usize], usize, &[u8])>,
    ) -> Result<Self, Failure> {
        dispatch_stored!(stored, (T, wrap, nearest) => {
            let mut data: Vec<T> = reserve(field, len)?;
            data.resize(len, nearest(value));
            if let Some((places, row_len, bytes)) = rows {
                let given = cast::<T>(field, bytes)?;
                for (&place, row) in places.iter().zip(given.chunks_exact(row_len.max(1))) {
                    data[place * row_len..(place + 1) * row_len].copy_from_slice(row);
                }
            }
            Ok(wrap(Cow::Owned(data)))
        })
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "saturates")]
const fn u8_of(value: f32) -> u8 {
    value as u8
}

#[expect(clippy::cast_possible_truncation, reason = "saturates")]
const fn i32_of(value: f32) -> i32 {
    value as i32
}

/// A tensor of a case.
#[derive(Debug)]
pub(crate) struct Operand<'a> {
    field: &'static str,
    elements: Elements<'a>,
    layout: Strided,
}

impl<'a> Operand<'a> {
    pub(crate) const fn new(field: &'static str, elements: Elements<'a>, layout: Strided) -> Self {
        Self { field, elements, layout }
    }

    pub(crate) const fn layout(&self) -> &Strided {
        &self.layout
    }

    /// # Errors
    /// `invalid_argument` or `layout_mismatch` for a tensor that leaves its storage.
    pub(crate) fn view(&self) -> Result<TensorView<'_>, Failure> {
        Ok(match &self.elements {
            Elements::F32(data) => TensorView::F32(self.lay(data)?),
            Elements::F16(data) => TensorView::F16(self.lay(data)?),
            Elements::BF16(data) => TensorView::BF16(self.lay(data)?),
            Elements::F8E4M3(data) => TensorView::F8E4M3(self.lay(data)?),
            Elements::F8E5M2(data) => TensorView::F8E5M2(self.lay(data)?),
            Elements::U8(_) | Elements::I32(_) => return Err(self.of_other_type("floats")),
        })
    }

    /// # Errors
    /// As [`Operand::view`].
    pub(crate) fn f32_view(&self) -> Result<View<'_, f32>, Failure> {
        match &self.elements {
            Elements::F32(data) => self.lay(data),
            _ => Err(self.of_other_type("f32")),
        }
    }

    /// # Errors
    /// As [`Operand::view`].
    pub(crate) fn u8_view(&self) -> Result<View<'_, u8>, Failure> {
        match &self.elements {
            Elements::U8(data) => self.lay(data),
            _ => Err(self.of_other_type("u8")),
        }
    }

    /// # Errors
    /// As [`Operand::view`].
    pub(crate) fn i32_view(&self) -> Result<View<'_, i32>, Failure> {
        match &self.elements {
            Elements::I32(data) => self.lay(data),
            _ => Err(self.of_other_type("i32")),
        }
    }

    fn lay<'v, T: Copy>(&self, data: &'v [T]) -> Result<View<'v, T>, Failure> {
        View::new(self.field, data, self.layout.clone()).map_err(|error| Failure::of_data(&error))
    }

    fn of_other_type(&self, expected: &str) -> Failure {
        Failure::new(Kind::Internal, format!("{}: read as {expected}, which it is not", self.field))
    }
}

/// Bytes of the file as elements.
///
/// # Errors
/// `invalid_argument` for bytes that are not aligned.
pub(crate) fn cast<'a, T: Pod>(field: &str, bytes: &'a [u8]) -> Result<&'a [T], Failure> {
    // An empty slice may lie anywhere.
    if bytes.is_empty() {
        return Ok(&[]);
    }
    bytemuck::try_cast_slice(bytes).map_err(|error| {
        let expected = "tensors ordered by element size, so that each is aligned";
        Failure::invalid(format!("in.safetensors: expected {expected}, got {field}: {error}"))
    })
}

/// An empty vector with room.
///
/// # Errors
/// `out_of_memory`.
pub(crate) fn reserve<T>(what: &str, len: usize) -> Result<Vec<T>, Failure> {
    let mut data = Vec::new();
    let bytes = len.saturating_mul(size_of::<T>());
    data.try_reserve_exact(len).map_err(|_| Failure::out_of_memory(what, bytes))?;
    Ok(data)
}
