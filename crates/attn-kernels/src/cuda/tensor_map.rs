//! Tensor maps: what the tensor memory accelerator of 9.0 and newer copies boxes by.
//!
//! The invariant: a map that exists is one that the driver accepted, of memory that is still borrowed. The
//! accelerator's conditions are checked here, because the driver answers every broken one with the same code.

use std::fmt;
use std::marker::PhantomData;

use attn_core::{DType, Strided};
use cudarc::driver::sys;

use super::tensor::DeviceTensor;
use crate::error::Error;
use crate::launch::{DeviceBuffer, DeviceMemory, encode_tiled};

/// How rows of a box lie in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Swizzle {
    /// One after the other.
    None,
    /// 16-byte pieces exchanged within 32 bytes.
    Bytes32,
    /// Within 64 bytes.
    Bytes64,
    /// Within 128 bytes.
    Bytes128,
}

impl Swizzle {
    /// Most bytes of the innermost extent of a box.
    const fn span(self) -> Option<usize> {
        match self {
            Self::None => None,
            Self::Bytes32 => Some(32),
            Self::Bytes64 => Some(64),
            Self::Bytes128 => Some(128),
        }
    }

    const fn raw(self) -> sys::CUtensorMapSwizzle {
        match self {
            Self::None => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
            Self::Bytes32 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_32B,
            Self::Bytes64 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
            Self::Bytes128 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        }
    }
}

/// The driver's description of a tensor, which the tensor memory accelerator (9.0 and newer) copies boxes
/// by. A kernel takes it by value.
#[derive(Clone, Copy)]
#[repr(C, align(128))]
pub struct TensorMap<'a> {
    map: sys::CUtensorMap,
    memory: PhantomData<&'a DeviceBuffer>,
}

impl<'a> TensorMap<'a> {
    /// Encodes a map of boxes of `extents`, axes in the order of the tensor's. Elements outside the tensor read as 0.
    ///
    /// Source: CUDA driver API, `cuTensorMapEncodeTiled`, whose conditions are checked here, for it answers
    /// every broken one alike.
    ///
    /// # Errors
    /// [`Error::Call`] naming the condition; [`Error::Driver`].
    pub fn tiled(
        field: &'static str,
        memory: DeviceMemory<'a>,
        dtype: DType,
        tensor: &Strided,
        extents: &[u32],
        swizzle: Swizzle,
    ) -> Result<Self, Error> {
        tensor.check_bounds(field, memory.bytes() / dtype.size())?;
        let tiled = TensorBox::new(field, dtype, tensor, extents, swizzle)?;
        let address = memory.address() + (tensor.offset() * dtype.size()) as u64;
        if !address.is_multiple_of(16) {
            let got = format!("{address:#x}");
            return Err(attn_core::Error::layout(field, "an address on 16 bytes", got).into());
        }
        let map = encode_tiled(field, address, &tiled, element(dtype), swizzle.raw())?;
        Ok(Self { map, memory: PhantomData })
    }

    /// A map that was encoded for a tensor at the address of this one, which is borrowed from here on.
    pub(crate) const fn again(map: sys::CUtensorMap, _: &DeviceTensor<'a>) -> Self {
        Self { map, memory: PhantomData }
    }

    pub(crate) const fn raw(&self) -> &sys::CUtensorMap {
        &self.map
    }
}

impl fmt::Debug for TensorMap<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorMap").finish_non_exhaustive()
    }
}

const fn element(dtype: DType) -> sys::CUtensorMapDataType {
    match dtype {
        DType::F32 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        DType::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        DType::BF16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        // The accelerator moves bytes; it has no fp8 of its own.
        DType::F8E4M3 | DType::F8E5M2 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }
}

/// A box and its tensor, innermost axis first, as the driver counts.
#[derive(Debug, PartialEq)]
pub(crate) struct TensorBox {
    pub(crate) rank: u32,
    pub(crate) dims: [u64; Self::MAX_RANK],
    /// In bytes, of every axis but the innermost.
    pub(crate) strides: [u64; Self::MAX_RANK],
    pub(crate) extents: [u32; Self::MAX_RANK],
}

impl TensorBox {
    /// Most axes.
    pub(crate) const MAX_RANK: usize = 5;

    fn new(
        field: &'static str,
        dtype: DType,
        tensor: &Strided,
        extents: &[u32],
        swizzle: Swizzle,
    ) -> Result<Self, Error> {
        let refuse = |expected: &str, got: String| -> Error {
            attn_core::Error::layout(field, expected, got).into()
        };
        let (shape, size) = (tensor.shape(), dtype.size() as u64);
        let rank = shape.len();
        if rank == 0 || rank > Self::MAX_RANK || extents.len() != rank {
            let got = format!("shape {shape:?}, box {extents:?}");
            return Err(refuse("1 to 5 axes, and a box of as many", got));
        }
        if tensor.strides()[rank - 1] != 1 {
            return Err(refuse("innermost stride 1", format!("{:?}", tensor.strides())));
        }
        let mut out = Self {
            rank: u32::try_from(rank).unwrap_or(0),
            dims: [1; Self::MAX_RANK],
            strides: [16; Self::MAX_RANK],
            extents: [1; Self::MAX_RANK],
        };
        for axis in 0..rank {
            let at = rank - 1 - axis;
            let extent = shape[axis] as u64;
            if extent == 0 || extent > 1 << 32 {
                return Err(refuse("extents of 1 to 2^32", format!("shape {shape:?}")));
            }
            if extents[axis] == 0 || extents[axis] > 256 {
                return Err(refuse("a box of extents 1 to 256", format!("{extents:?}")));
            }
            (out.dims[at], out.extents[at]) = (extent, extents[axis]);
            if at > 0 {
                let bytes =
                    u64::try_from(tensor.strides()[axis]).ok().and_then(|s| s.checked_mul(size));
                let fits = |bytes: &u64| bytes.is_multiple_of(16) && *bytes < 1 << 40;
                let Some(bytes) = bytes.filter(fits) else {
                    let got = format!("{:?} elements of {size}", tensor.strides());
                    return Err(refuse("strides that are multiples of 16 bytes below 2^40", got));
                };
                out.strides[at - 1] = bytes;
            }
        }
        let inner = extents[rank - 1] as usize * dtype.size();
        if !inner.is_multiple_of(16) || swizzle.span().is_some_and(|span| inner > span) {
            let got = format!("{inner} bytes under {swizzle:?}");
            return Err(refuse(
                "an innermost box extent on 16 bytes within the swizzle's span",
                got,
            ));
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensor_box_counts_axes_from_the_innermost() {
        let rows = Strided::contiguous("k", &[100, 8, 128]).expect("small");
        let got = TensorBox::new("k", DType::BF16, &rows, &[64, 1, 64], Swizzle::Bytes128);
        let got = got.expect("valid");
        assert_eq!((got.rank, &got.dims[..3]), (3, &[128, 8, 100][..]));
        assert_eq!(&got.strides[..2], &[256, 2048]);
        assert_eq!(&got.extents[..3], &[64, 1, 64]);
    }

    #[test]
    fn tensor_box_refuses_what_the_accelerator_cannot_do() {
        let check = |shape: &[usize], strides: &[i64], extents: &[u32], swizzle| {
            let tensor = Strided::new("k", shape, strides, 0).expect("same rank");
            TensorBox::new("k", DType::BF16, &tensor, extents, swizzle).map(|_| ())
        };
        assert!(check(&[64, 64], &[64, 1], &[64, 64], Swizzle::Bytes128).is_ok());
        for (shape, strides, extents, swizzle) in [
            (&[64, 64][..], &[64, 2][..], &[64, 64][..], Swizzle::Bytes128),
            (&[64, 64], &[63, 1], &[64, 64], Swizzle::Bytes128),
            (&[64, 64], &[-64, 1], &[64, 64], Swizzle::Bytes128),
            (&[64, 64], &[1 << 39, 1], &[64, 64], Swizzle::Bytes128),
            (&[64, 64], &[64, 1], &[257, 64], Swizzle::Bytes128),
            (&[64, 64], &[64, 1], &[0, 64], Swizzle::Bytes128),
            (&[64, 64], &[64, 1], &[64, 128], Swizzle::Bytes128),
            (&[64, 64], &[64, 1], &[64, 4], Swizzle::None),
            (&[64, 64], &[64, 1], &[64], Swizzle::None),
            (&[0, 64], &[64, 1], &[64, 64], Swizzle::None),
            (&[1; 6], &[8, 8, 8, 8, 8, 1], &[8; 6], Swizzle::None),
        ] {
            assert!(
                check(shape, strides, extents, swizzle).is_err(),
                "{shape:?} {strides:?} {extents:?}"
            );
        }
    }
}
