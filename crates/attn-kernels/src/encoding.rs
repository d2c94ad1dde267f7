//! Compiled kernels as bytes, the same in the disk cache and in a bundle.
//!
//! The invariant: reading trusts nothing. Every length is checked against what is there, and a reader
//! answers `None` rather than panicking or allocating what a damaged length asks for. A general
//! serialisation crate would do the same for more than the dozen fields there are.

use sha2::{Digest, Sha256};

use crate::compile::Cubin;
use crate::resources::Resources;

/// SHA-256.
pub(crate) fn sha256(bytes: &[u8]) -> [u8; 32] {
    Sha256::digest(bytes).into()
}

/// Appends a string with its length before it.
pub(crate) fn put_text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend((text.len() as u64).to_le_bytes());
    bytes.extend(text.as_bytes());
}

/// Appends a kernel; it reaches to the end, so it can only be last.
pub(crate) fn put_cubin(bytes: &mut Vec<u8>, cubin: &Cubin) {
    let r = &cubin.resources;
    let figures =
        [r.registers, r.stack_bytes, r.spill_store_bytes, r.spill_load_bytes, r.static_smem_bytes];
    for figure in figures {
        bytes.extend(figure.to_le_bytes());
    }
    put_text(bytes, &cubin.warnings);
    bytes.extend(&cubin.image);
}

/// Reads a kernel that reaches to the end.
pub(crate) fn cubin(bytes: &[u8]) -> Option<Cubin> {
    let mut reader = Reader { left: bytes };
    let resources = Resources {
        registers: reader.u32()?,
        stack_bytes: reader.u32()?,
        spill_store_bytes: reader.u32()?,
        spill_load_bytes: reader.u32()?,
        static_smem_bytes: reader.u32()?,
    };
    let warnings = reader.text()?.to_owned();
    Some(Cubin { image: reader.left.to_vec(), resources, warnings })
}

/// Takes fields from the front of a slice.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    /// What has not been taken.
    pub(crate) left: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(crate) fn take(&mut self, length: u64) -> Option<&'a [u8]> {
        let (taken, left) = self.left.split_at_checked(usize::try_from(length).ok()?)?;
        self.left = left;
        Some(taken)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, left) = self.left.split_first_chunk()?;
        self.left = left;
        Some(*taken)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub(crate) fn text(&mut self) -> Option<&'a str> {
        let length = self.u64()?;
        str::from_utf8(self.take(length)?).ok()
    }
}

/// A kernel for tests: no driver would load it.
#[cfg(test)]
pub(crate) fn example(seed: u8) -> Cubin {
    let resources = Resources {
        registers: 100 + u32::from(seed),
        stack_bytes: 8,
        spill_store_bytes: 4,
        spill_load_bytes: 12,
        static_smem_bytes: 1024,
    };
    Cubin { image: vec![seed; 300], resources, warnings: "a warning".into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cubin_is_read_as_it_was_written() {
        let mut bytes = Vec::new();
        put_cubin(&mut bytes, &example(7));
        assert_eq!(cubin(&bytes), Some(example(7)));
    }

    #[test]
    fn reader_refuses_every_length_that_is_not_there() {
        let mut bytes = Vec::new();
        put_cubin(&mut bytes, &example(7));
        // The figures, the length of the warning, and the warning.
        for cut in 0..20 + 8 + 9 {
            assert_eq!(cubin(&bytes[..cut]), None, "{cut} bytes");
        }
        bytes[20..28].fill(0xff);
        assert_eq!(cubin(&bytes), None);
    }
}
