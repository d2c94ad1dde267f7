//! The tables that kernels read: contents, padding, and buffers that do not fit.

use attn_paged::{Allocator, Config, CsrBuffers, Error, NO_PAGE, Namespace, SeqId};

fn batch() -> (Allocator, [SeqId; 3]) {
    let mut pool = Allocator::new(Config::new(16, 4)).expect("valid");
    let batch = [9, 0, 4]
        .map(|len| pool.alloc(&vec![len; len as usize], Namespace::DEFAULT).expect("valid").seq);
    (pool, batch)
}

#[test]
fn padded_table_writes_every_element() {
    let (pool, batch) = batch();
    // Room for a fourth row and a remainder, all with another batch's pages in them.
    let mut table = [77; 18];
    pool.write_padded_table(&batch, 4, &mut table).unwrap();
    let x = NO_PAGE;
    assert_eq!(table, [0, 1, 2, x, x, x, x, x, 3, x, x, x, x, x, x, x, x, x]);
    pool.write_padded_table(&[], 4, &mut table).unwrap();
    assert_eq!(table, [x; 18]);
    pool.write_padded_table(&batch[1..2], 0, &mut []).unwrap();
}

#[test]
fn padded_table_refuses_long_sequences_and_short_buffers() {
    let (mut pool, batch) = batch();
    let mut table = [77; 12];
    let err = pool.write_padded_table(&batch, 2, &mut table).unwrap_err();
    assert_eq!(err, Error::TableWidth { expected: 2, got: 3 });
    let err = pool.write_padded_table(&batch, 5, &mut table).unwrap_err();
    assert_eq!(err, Error::BufferTooSmall { buffer: "block table", expected: 15, got: 12 });
    let err = pool.write_padded_table(&batch, usize::MAX, &mut table).unwrap_err();
    assert!(matches!(err, Error::BufferTooSmall { got: 12, .. }));
    pool.free(batch[2]).unwrap();
    let err = pool.write_padded_table(&batch, 4, &mut table).unwrap_err();
    assert!(matches!(err, Error::StaleSequence { got, .. } if got == batch[2]));
    assert_eq!(table, [77; 12]);
}

#[test]
fn csr_table_lists_pages_in_order() {
    let (mut pool, batch) = batch();
    let fork = pool.fork(batch[0]).unwrap();
    let batch = [batch[0], batch[1], batch[2], fork];
    assert_eq!(pool.page_count(&batch), Ok(7));
    let (mut indptr, mut indices, mut last) = ([77; 6], [77; 8], [77; 5]);
    let buffers =
        CsrBuffers { indptr: &mut indptr, indices: &mut indices, last_page_len: &mut last };
    assert_eq!(pool.write_csr_table(&batch, buffers), Ok(7));
    assert_eq!(indptr, [0, 3, 3, 4, 7, 77]);
    assert_eq!(indices, [0, 1, 2, 3, 0, 1, 2, 77]);
    assert_eq!(last, [1, 0, 4, 1, 77]);
}

#[test]
fn csr_table_refuses_each_short_buffer_and_writes_none() {
    let (pool, batch) = batch();
    for (sizes, buffer, expected) in
        [([3, 4, 3], "indptr", 4), ([4, 3, 3], "indices", 4), ([4, 4, 2], "last_page_len", 3)]
    {
        let mut buffers = sizes.map(|size| vec![77; size]);
        let [indptr, indices, last_page_len] = &mut buffers;
        let err = pool
            .write_csr_table(&batch, CsrBuffers { indptr, indices, last_page_len })
            .unwrap_err();
        assert_eq!(err, Error::BufferTooSmall { buffer, expected, got: expected - 1 });
        assert!(buffers.iter().flatten().all(|&element| element == 77));
    }
}

#[test]
fn lengths_and_slots_follow_the_sequence() {
    let (mut pool, batch) = batch();
    let mut lengths = [77; 4];
    pool.write_lengths(&batch, &mut lengths).unwrap();
    assert_eq!(lengths, [9, 0, 4, 0]);
    let err = pool.write_lengths(&batch, &mut lengths[..2]).unwrap_err();
    assert_eq!(err, Error::BufferTooSmall { buffer: "lengths", expected: 3, got: 2 });
    assert_eq!(lengths, [9, 0, 4, 0]);
    // A decode step of the last sequence crosses into a new page.
    pool.append(batch[2], &[5, 6]).unwrap();
    let mut slots = [77; 4];
    assert_eq!(pool.write_slots(batch[2], 3, &mut slots), Ok(3));
    assert_eq!(slots, [3 * 4 + 3, 4 * 4, 4 * 4 + 1, 77]);
    let err = pool.write_slots(batch[2], 7, &mut slots).unwrap_err();
    assert_eq!(err, Error::PastLength { operation: "write_slots", expected: 6, got: 7 });
    let err = pool.write_slots(batch[2], 0, &mut slots).unwrap_err();
    assert_eq!(err, Error::BufferTooSmall { buffer: "slots", expected: 6, got: 4 });
    assert_eq!(slots[3], 77);
}
