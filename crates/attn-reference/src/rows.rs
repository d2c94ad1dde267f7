//! One head's rows of one sequence, gathered from whatever storage into logical order.
//!
//! The invariant: what comes out are the stored values, exactly, and nothing outside the sequence is
//! touched. Everything that computes in this crate starts from these copies, so that strides, pages
//! and padding are dealt with here and the computations read like their definitions.

use attn_core::{
    Arrangement, Element, Error, Inputs, KvStorage, KvView, Problem, Rows, TensorView, View,
    dispatch_view,
};

/// The `[q_len, dim]` values of one query head of a query-side tensor.
pub(crate) fn query_rows(
    problem: &Problem,
    field: &'static str,
    tensor: &TensorView<'_>,
    sequence: usize,
    head: usize,
) -> Result<Vec<f32>, Error> {
    let rows = dispatch_view!(tensor, view => {
        problem.q_rows(view, sequence).and_then(|rows| collect(&Rows::Dense(rows), head))
    });
    rows.ok_or_else(|| outside(field, tensor))
}

/// The stored `[kv_len, head_dim]` keys of one KV head, fp8 scales not applied.
pub(crate) fn key_rows(
    problem: &Problem,
    inputs: &Inputs<'_>,
    sequence: usize,
    kv_head: usize,
) -> Result<Vec<f32>, Error> {
    match &inputs.kv {
        KvView::Dense { k, .. } => stored(problem, "k", k, None, sequence, kv_head),
        KvView::Paged { k_cache, block_table, .. } => {
            stored(problem, "k_cache", k_cache, Some(block_table), sequence, kv_head)
        }
    }
}

/// The stored `[kv_len, value_dim]` values of one KV head, fp8 scales not applied.
pub(crate) fn value_rows(
    problem: &Problem,
    inputs: &Inputs<'_>,
    sequence: usize,
    kv_head: usize,
) -> Result<Vec<f32>, Error> {
    match &inputs.kv {
        KvView::Dense { v, .. } => stored(problem, "v", v, None, sequence, kv_head),
        KvView::Paged { v_cache, block_table, .. } => {
            stored(problem, "v_cache", v_cache, Some(block_table), sequence, kv_head)
        }
    }
}

/// The row of a row-major query-side result that holds a sequence's row.
pub(crate) fn q_place(problem: &Problem, sequence: usize, row: usize) -> usize {
    let l = problem.lengths();
    match problem.q_arrangement() {
        Arrangement::Packed => l.q_rows(sequence).start + row,
        Arrangement::Padded => sequence * l.longest_q() + row,
    }
}

/// Rows of a row-major query-side result, padding included.
pub(crate) fn q_places(problem: &Problem) -> usize {
    let l = problem.lengths();
    match problem.q_arrangement() {
        Arrangement::Packed => l.total_q(),
        Arrangement::Padded => l.batch() * l.longest_q(),
    }
}

/// The row of a row-major key-side result that holds a sequence's key; paged calls place as packed.
pub(crate) fn kv_place(problem: &Problem, sequence: usize, key: usize) -> usize {
    let l = problem.lengths();
    match problem.kv() {
        KvStorage::Dense(Arrangement::Padded) => sequence * l.longest_kv() + key,
        KvStorage::Dense(Arrangement::Packed) | KvStorage::Paged(_) => {
            l.kv_rows(sequence).start + key
        }
    }
}

/// Rows of a row-major key-side result, padding included.
pub(crate) fn kv_places(problem: &Problem) -> usize {
    let l = problem.lengths();
    match problem.kv() {
        KvStorage::Dense(Arrangement::Padded) => l.batch() * l.longest_kv(),
        KvStorage::Dense(Arrangement::Packed) | KvStorage::Paged(_) => l.total_kv(),
    }
}

fn stored(
    problem: &Problem,
    field: &'static str,
    tensor: &TensorView<'_>,
    table: Option<&View<'_, i32>>,
    sequence: usize,
    head: usize,
) -> Result<Vec<f32>, Error> {
    let rows = dispatch_view!(tensor, view => {
        problem.cached_rows(view, table, sequence).and_then(|rows| collect(&rows, head))
    });
    rows.ok_or_else(|| outside(field, tensor))
}

fn collect<T: Element>(rows: &Rows<'_, T>, head: usize) -> Option<Vec<f32>> {
    let dim = match rows {
        Rows::Dense(view) => *view.shape().last()?,
        Rows::Paged(pages) => *pages.cache().shape().last()?,
    };
    let mut out = Vec::with_capacity(rows.tokens() * dim);
    for token in 0..rows.tokens() {
        if let Some(row) = rows.row(token, head) {
            out.extend(row.iter().map(|x| x.to_f32()));
            continue;
        }
        for d in 0..dim {
            out.push(rows.get(token, head, d)?.to_f32());
        }
    }
    Some(out)
}

fn outside(field: &'static str, tensor: &TensorView<'_>) -> Error {
    Error::layout(field, "the rows of the problem", format!("shape {:?}", tensor.shape()))
}
