//! Block tables in the forms that kernels read, written into buffers of the caller.
//!
//! Invariant: nothing is written unless everything fits, and every element of a padded table is written,
//! so that no row of an earlier batch shows through. Buffers are the caller's, since they are pinned
//! or captured in a graph; nothing here allocates. Tables hold `u32` indices below 2^31, so a row is
//! copied bit by bit.

use crate::allocator::Allocator;
use crate::error::Error;
use crate::table::SeqId;

/// The entry of a padded table past a sequence's last page.
pub const NO_PAGE: i32 = -1;

/// Buffers for the tables of a batch in compressed rows.
///
/// Shapes: `indptr` `[batch + 1]`, `indices` `[pages of the batch]`, `last_page_len` `[batch]`; longer
/// buffers are left alone past that.
/// Units: `indptr` counts pages; `last_page_len` tokens, from 1 to the page size, and 0 for a sequence
/// without tokens.
#[derive(Debug)]
pub struct CsrBuffers<'a> {
    /// Where the pages of each sequence start in `indices`, and where the last ones end.
    pub indptr: &'a mut [i32],
    /// The pages of all sequences, one sequence after the other.
    pub indices: &'a mut [i32],
    /// How many slots of its last page each sequence fills.
    pub last_page_len: &'a mut [i32],
}

impl Allocator {
    /// Writes one row of `width` pages per sequence, padded with [`NO_PAGE`].
    ///
    /// Shapes: `table` `[batch, width]`; rows past the batch, as of a captured graph that runs with
    /// fewer sequences than it was made for, are filled with [`NO_PAGE`] too.
    ///
    /// # Errors
    /// A stale or foreign handle; [`Error::TableWidth`] for a sequence with more pages than columns;
    /// [`Error::BufferTooSmall`]. The buffer is then as it was.
    pub fn write_padded_table(
        &self,
        seqs: &[SeqId],
        width: usize,
        table: &mut [i32],
    ) -> Result<(), Error> {
        for &seq in seqs {
            let got = self.blocks(seq)?.len();
            if got > width {
                return Err(Error::TableWidth { expected: width, got });
            }
        }
        check_room("block table", seqs.len().saturating_mul(width), table.len())?;
        let (rows, rest) = table.split_at_mut(seqs.len() * width);
        rest.fill(NO_PAGE);
        if width == 0 {
            return Ok(());
        }
        for (&seq, row) in seqs.iter().zip(rows.chunks_exact_mut(width)) {
            let blocks = self.blocks(seq)?;
            let (used, padding) = row.split_at_mut(blocks.len());
            write_pages(used, blocks);
            padding.fill(NO_PAGE);
        }
        Ok(())
    }

    /// The pages that [`Self::write_csr_table`] writes for a batch.
    ///
    /// # Errors
    /// A stale or foreign handle.
    pub fn page_count(&self, seqs: &[SeqId]) -> Result<usize, Error> {
        seqs.iter().map(|&seq| self.blocks(seq).map(<[u32]>::len)).sum()
    }

    /// Writes the tables of a batch in compressed rows and says how many pages there are.
    ///
    /// # Errors
    /// A stale or foreign handle; [`Error::BufferTooSmall`]; [`Error::Overflow`] where the pages of the
    /// batch or the page size pass `i32`. The buffers are then as they were.
    pub fn write_csr_table(&self, seqs: &[SeqId], buffers: CsrBuffers<'_>) -> Result<usize, Error> {
        let CsrBuffers { indptr, indices, last_page_len } = buffers;
        let size = self.config.block_size();
        let pages = self.page_count(seqs)?;
        narrow("pages of the batch", pages)?;
        narrow("page size", size)?;
        check_room("indptr", seqs.len() + 1, indptr.len())?;
        check_room("indices", pages, indices.len())?;
        check_room("last_page_len", seqs.len(), last_page_len.len())?;
        let mut end = 0;
        indptr[0] = 0;
        for ((&seq, next), last) in seqs.iter().zip(&mut indptr[1..]).zip(last_page_len) {
            let sequence = self.sequences.get(seq)?;
            let start = end;
            end += sequence.blocks.len();
            write_pages(&mut indices[start..end], &sequence.blocks);
            *next = narrow("pages of the batch", end)?;
            *last = match sequence.len {
                0 => 0,
                len => narrow("page size", (len - 1) % size + 1)?,
            };
        }
        Ok(pages)
    }

    /// Writes the length of each sequence; lengths past the batch are 0.
    ///
    /// # Errors
    /// A stale or foreign handle; [`Error::BufferTooSmall`]; [`Error::Overflow`] for a length past
    /// `i32`. The buffer is then as it was.
    pub fn write_lengths(&self, seqs: &[SeqId], lengths: &mut [i32]) -> Result<(), Error> {
        for &seq in seqs {
            narrow("length", self.len(seq)?)?;
        }
        check_room("lengths", seqs.len(), lengths.len())?;
        let (used, rest) = lengths.split_at_mut(seqs.len());
        rest.fill(0);
        for (&seq, length) in seqs.iter().zip(used) {
            *length = narrow("length", self.len(seq)?)?;
        }
        Ok(())
    }

    /// Writes where the tokens from `first` on belong: `page * page_size + slot` of each, which is where
    /// the engine stores keys and values that it has just computed.
    ///
    /// Returns how many were written: all tokens from `first` to the end of the sequence.
    ///
    /// # Errors
    /// A stale or foreign handle; [`Error::PastLength`]; [`Error::BufferTooSmall`];
    /// [`Error::Overflow`] where slots of the pool pass `i64`. The buffer is then as it was.
    pub fn write_slots(&self, seq: SeqId, first: usize, slots: &mut [i64]) -> Result<usize, Error> {
        let sequence = self.sequences.get(seq)?;
        let size = self.config.block_size();
        let count = sequence.len.checked_sub(first).ok_or(Error::PastLength {
            operation: "write_slots",
            expected: sequence.len,
            got: first,
        })?;
        check_room("slots", count, slots.len())?;
        let all = self.config.blocks().saturating_mul(size);
        if i64::try_from(all).is_err() {
            let expected = i64::MAX.cast_unsigned();
            return Err(Error::Overflow { what: "slots", expected, got: all as u64 });
        }
        for (token, slot) in (first..sequence.len).zip(slots) {
            *slot = (sequence.blocks[token / size] as usize * size + token % size) as i64;
        }
        Ok(count)
    }
}

/// Copies page numbers; both slices have one length.
fn write_pages(table: &mut [i32], blocks: &[u32]) {
    for (entry, &block) in table.iter_mut().zip(blocks) {
        *entry = block.cast_signed();
    }
}

fn check_room(buffer: &'static str, expected: usize, got: usize) -> Result<(), Error> {
    if got < expected {
        return Err(Error::BufferTooSmall { buffer, expected, got });
    }
    Ok(())
}

fn narrow(what: &'static str, count: usize) -> Result<i32, Error> {
    i32::try_from(count).map_err(|_| Error::Overflow {
        what,
        expected: i32::MAX.unsigned_abs().into(),
        got: count as u64,
    })
}
