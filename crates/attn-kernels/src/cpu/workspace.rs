//! Scratch memory of the engine: one buffer, owned by the caller, reused from call to call.
//!
//! The invariant: after a call of some size, no call of that size or a smaller one allocates; growing
//! either succeeds or leaves the workspace as it was. Thread-local scratch would need no argument, but
//! would outlive the calls in every thread of a pool, and nobody could say how much there is.

use attn_core::Bytes;

use crate::error::Error;

/// Elements of a cache line: parts start on one, so that no vector load spans two.
const LINE: usize = 16;

/// Scratch of the CPU engine. Holds no results: dropping it between calls changes no bits.
///
/// ```
/// let workspace = attn_kernels::cpu::Workspace::new();
/// assert_eq!(workspace.bytes().0, 0);
/// ```
#[derive(Debug, Default)]
pub struct Workspace {
    buffer: Vec<f32>,
}

impl Workspace {
    /// A workspace without memory; it grows to what the calls need.
    #[must_use]
    pub const fn new() -> Self {
        Self { buffer: Vec::new() }
    }

    /// Bytes held.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        Bytes::of(self.buffer.capacity(), size_of::<f32>())
    }

    /// `elements` f32 of unspecified content, starting on a cache line.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when the buffer cannot grow; it is as it was then.
    pub(crate) fn reserve(&mut self, elements: usize) -> Result<&mut [f32], Error> {
        let needed = elements.saturating_add(LINE);
        if self.buffer.len() < needed {
            let bytes = Bytes::of(needed, size_of::<f32>()).0;
            let mut grown = Vec::new();
            grown.try_reserve_exact(needed).map_err(|_| Error::OutOfMemory { needed: bytes })?;
            // The old content is of no use and is not carried over.
            grown.resize(needed, 0.0);
            self.buffer = grown;
        }
        // `align_offset` may decline to answer; then the slice is merely not aligned.
        let to_line = self.buffer.as_ptr().align_offset(LINE * size_of::<f32>());
        let start = if to_line < LINE { to_line } else { 0 };
        Ok(&mut self.buffer[start..start + elements])
    }
}

/// Bytes that a workspace holds for `elements` f32: a line more, to start on one.
pub(crate) fn held(elements: usize) -> Bytes {
    Bytes::of(elements.saturating_add(LINE), size_of::<f32>())
}

/// Cuts the first `len` elements, rounded up to whole cache lines, off a scratch slice.
///
/// # Panics
/// When the slice is shorter: an error of the engine, whose sizes come from one function.
pub(crate) fn carve<'s>(scratch: &mut &'s mut [f32], len: usize) -> &'s mut [f32] {
    let (head, tail) = std::mem::take(scratch).split_at_mut(lines(len));
    *scratch = tail;
    &mut head[..len]
}

/// `len` rounded up to whole cache lines: what [`carve`] takes.
pub(crate) const fn lines(len: usize) -> usize {
    len.next_multiple_of(LINE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workspace_grows_once_for_a_size() {
        let mut workspace = Workspace::new();
        assert_eq!(workspace.reserve(1000).expect("small").len(), 1000);
        let held = workspace.bytes();
        assert_eq!(workspace.reserve(10).expect("smaller").len(), 10);
        assert_eq!(workspace.bytes(), held);
    }

    #[test]
    fn workspace_survives_a_size_that_cannot_be_had() {
        let mut workspace = Workspace::new();
        workspace.reserve(1000).expect("small");
        let held = workspace.bytes();
        assert!(workspace.reserve(usize::MAX).is_err());
        assert_eq!(workspace.bytes(), held);
    }

    #[test]
    fn parts_start_on_a_cache_line() {
        let mut workspace = Workspace::new();
        let mut rest = workspace.reserve(lines(5) + lines(17)).expect("small");
        for len in [5, 17] {
            let part = carve(&mut rest, len);
            assert_eq!(part.len(), len);
            assert_eq!(part.as_ptr().align_offset(LINE * size_of::<f32>()), 0);
        }
        assert!(rest.is_empty());
    }
}
