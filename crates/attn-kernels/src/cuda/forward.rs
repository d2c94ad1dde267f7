//! The parameters of a forward launch from a problem and its tensors.
//!
//! The invariant: a kernel is told nothing that was not checked. What depends on the plan alone is made once, in
//! [`template`]; a call adds addresses and strides, without an allocation. Broadcast axes become stride 0 and
//! absent tensors null, so that kernels have one form of each.

use attn_core::{Arrangement, Dropout, KvStorage, Operand, PageStrides, Problem, Split, Strided};
use bytemuck::Pod;

use super::call::{Inputs, KvTensors, Outputs};
use super::lengths::MAX_LEN;
use super::params::{
    BlockTable, Divisor, ForwardParams, KV_PADDED, PAGED, Pairs, PerHead, Q_PADDED, Rows,
};
use super::tensor::{DeviceTensor, DeviceView};
use crate::error::Error;

/// A window or a split that is wider than any sequence means the same at this width, which leaves sums with a
/// position inside 31 bits.
const OPEN: i32 = 1 << 30;

/// Everything but addresses and strides.
pub(crate) fn template(problem: &Problem, pack: u32, split: Split) -> ForwardParams {
    let padded = problem.q_arrangement() == Arrangement::Padded;
    let mut flags = if padded { Q_PADDED } else { 0 };
    let mut page_size = 1;
    match problem.kv() {
        KvStorage::Dense(Arrangement::Packed) => {}
        KvStorage::Dense(Arrangement::Padded) => flags |= KV_PADDED,
        KvStorage::Paged(layout) => {
            flags |= PAGED;
            page_size = bounded(layout.page_size());
        }
    }
    let (split_keys, split_parts) = match split {
        Split::Whole => (0, 1),
        Split::Chunks(keys) => (bounded(keys.max(1)), OPEN),
        Split::Parts(parts) => (0, bounded(parts.max(1))),
        Split::Between { parts, keys } => (bounded(keys), bounded(parts.max(1))),
    };
    let band = problem.band();
    let side = |side: Option<usize>| side.map_or(-1, bounded);
    let blocks = problem.block_mask();
    let block = |size: Option<usize>| Divisor::new(size.map_or(1, bounded).unsigned_abs());
    let none = Rows::default();
    ForwardParams {
        q: none,
        o: none,
        lse: none,
        k: none,
        v: none,
        table: BlockTable {
            data: 0,
            sequence: 0,
            column: 0,
            pages: 0,
            page_size: Divisor::new(page_size.unsigned_abs()),
        },
        mask: Pairs::default(),
        bias: Pairs::default(),
        block_mask: Pairs::default(),
        alibi: PerHead::default(),
        sinks: PerHead::default(),
        q_scale: PerHead::default(),
        k_scale: PerHead::default(),
        v_scale: PerHead::default(),
        q_starts: 0,
        kv_starts: 0,
        unit_starts: 0,
        partial_starts: 0,
        partial_o: 0,
        partial_lse: 0,
        batch: bounded(problem.lengths().batch()),
        // A problem's heads and dimensions are at most `Problem::MAX_DIM`.
        q_heads: bounded(problem.q_heads()),
        head_dim: bounded(problem.head_dim()),
        value_dim: bounded(problem.value_dim()),
        group: Divisor::new(bounded(problem.group()).unsigned_abs()),
        pack: Divisor::new(pack),
        padded_rows: if padded { bounded(problem.lengths().longest_q()) } else { -1 },
        flags,
        left: side(band.left),
        right: side(band.right),
        scale: problem.scale(),
        softcap: problem.softcap().unwrap_or(0.0),
        split_keys,
        split_parts,
        block_q: block(blocks.map(|sizes| sizes.q)),
        block_kv: block(blocks.map(|sizes| sizes.kv)),
        uniform_units: Divisor::NONE,
        uniform_q: 0,
        uniform_kv: 0,
        counter: 0,
        order: 0,
        work: 0,
        section: 1,
        most_visits: 0,
        reserved: 0,
        sequences: 0,
        k_new: none,
        v_new: none,
        seed: 0,
        offset: 0,
        drop_below: problem.dropout().map_or(0, Dropout::threshold),
        keep_factor: problem.dropout().map_or(1.0, Dropout::factor),
    }
}

fn bounded(n: usize) -> i32 {
    i32::try_from(n).unwrap_or(OPEN).min(OPEN)
}

/// Fills in the tensors of a call that was checked against the problem.
pub(crate) fn fill(
    params: &mut ForwardParams,
    problem: &Problem,
    inputs: &Inputs<'_>,
    outputs: &Outputs<'_>,
) -> Result<(), Error> {
    fill_inputs(params, problem, inputs)?;
    let at = problem.q_arrangement();
    let o = outputs.o.tensor();
    params.o = rows("o", o.address(), o.layout(), at)?;
    if let Some(lse) = &outputs.lse {
        params.lse = row_heads(lse.view().address(), lse.view().layout(), at);
    }
    Ok(())
}

/// Fills in what a call reads.
pub(crate) fn fill_inputs(
    params: &mut ForwardParams,
    problem: &Problem,
    inputs: &Inputs<'_>,
) -> Result<(), Error> {
    let at = problem.q_arrangement();
    params.q = rows("q", inputs.q.address(), inputs.q.layout(), at)?;
    match (&inputs.kv, problem.kv()) {
        (KvTensors::Dense { k, v }, KvStorage::Dense(at)) => {
            params.k = rows("k", k.address(), k.layout(), *at)?;
            params.v = rows("v", v.address(), v.layout(), *at)?;
        }
        (KvTensors::Paged { k_cache, v_cache, block_table, .. }, KvStorage::Paged(layout)) => {
            params.k = pages(k_cache, layout.key_strides());
            params.v = pages(v_cache, layout.value_strides());
            let strides = block_table.layout().strides();
            params.table.data = block_table.address();
            (params.table.sequence, params.table.column) = (strides[0], strides[1]);
            params.table.pages = k_cache.layout().shape()[0] as i64;
        }
        // The check of the call has refused these.
        (KvTensors::Dense { .. }, KvStorage::Paged(_))
        | (KvTensors::Paged { .. }, KvStorage::Dense(_)) => {
            let expected = "keys stored as the problem states";
            return Err(attn_core::Error::invalid("kv", expected, "other storage").into());
        }
    }
    let lengths = problem.lengths();
    let (batch, heads) = (lengths.batch(), problem.q_heads());
    let shape = [batch, heads, lengths.longest_q(), lengths.longest_kv()];
    params.mask = pairs("mask", inputs.mask.as_ref(), &shape)?;
    params.bias = pairs("bias", inputs.bias.as_ref(), &shape)?;
    if let Some(sizes) = problem.block_mask() {
        let [.., q, kv] = shape;
        let shape = [batch, heads, q.div_ceil(sizes.q), kv.div_ceil(sizes.kv)];
        params.block_mask = pairs("block_mask", inputs.block_mask.as_ref(), &shape)?;
    }
    params.alibi = per_head(inputs.alibi.as_ref());
    params.sinks = per_head(inputs.sinks.as_ref());
    params.q_scale = scale(inputs.q_scale.as_ref());
    params.k_scale = scale(inputs.k_scale.as_ref());
    params.v_scale = scale(inputs.v_scale.as_ref());
    if let Some(stream) = &inputs.dropout {
        params.seed = stream.address();
        params.offset = stream.address().wrapping_add_signed(stream.layout().strides()[0] * 8);
    }
    Ok(())
}

/// Checks what the tiled kernels load and store by: rows of 16-byte pieces.
pub(crate) fn check_alignment(inputs: &Inputs<'_>, outputs: &Outputs<'_>) -> Result<(), Error> {
    let (k, v) = match &inputs.kv {
        KvTensors::Dense { k, v } => (k, v),
        KvTensors::Paged { k_cache, v_cache, .. } => (k_cache, v_cache),
    };
    check_rows([("q", &inputs.q), ("k", k), ("v", v), ("o", outputs.o.tensor())], "cuda_naive")
}

/// Checks that rows of tensors start on 16 bytes; `other` is the kernel that takes any.
pub(crate) fn check_rows<'a, const N: usize>(
    tensors: [(&'static str, &DeviceTensor<'a>); N],
    other: &'static str,
) -> Result<(), Error> {
    for (field, tensor) in tensors {
        if !is_aligned(tensor.address(), tensor.operand()) {
            let expected = format!(
                "rows that start on 16 bytes; {other} takes any, with the other kernels disabled"
            );
            let layout = tensor.layout();
            let got = format!(
                "shape {:?}, strides {:?} of {}, address {:#x}",
                layout.shape(),
                layout.strides(),
                tensor.dtype(),
                tensor.address()
            );
            return Err(attn_core::Error::layout(field, expected, got).into());
        }
    }
    Ok(())
}

pub(crate) fn is_aligned(address: u64, tensor: Operand<'_>) -> bool {
    let layout = tensor.layout;
    let Some((_, leading)) = layout.strides().split_last() else {
        return true;
    };
    let size = tensor.dtype.size() as i64;
    // A stride along an axis of extent 1 is never taken.
    let steps = leading.iter().zip(layout.shape()).filter(|&(_, &extent)| extent > 1);
    layout.is_empty()
        || address.is_multiple_of(16)
            && steps.map(|(&stride, _)| stride % 16 * size).all(|bytes| bytes % 16 == 0)
}

/// A tensor `[rows, heads, dim]` or `[sequences, rows, heads, dim]`.
pub(crate) fn rows(
    field: &'static str,
    data: u64,
    layout: &Strided,
    at: Arrangement,
) -> Result<Rows, Error> {
    if !layout.is_row_contiguous() {
        let got = format!("strides {:?}", layout.strides());
        return Err(attn_core::Error::layout(field, "innermost stride 1", got).into());
    }
    Ok(row_heads(data, layout, at))
}

/// The strides of sequence, row and head; a caller has checked the rank.
///
/// A stride along an axis of extent 1 may be any number, for it is never taken, and becomes 0: the tiled kernels
/// form addresses of rows past the last key, which must lie on 16 bytes even though nothing is read there.
pub(crate) fn row_heads(data: u64, layout: &Strided, at: Arrangement) -> Rows {
    let stride = |axis: usize| if layout.shape()[axis] > 1 { layout.strides()[axis] } else { 0 };
    match at {
        Arrangement::Packed => Rows { data, sequence: 0, row: stride(0), head: stride(1) },
        Arrangement::Padded => Rows { data, sequence: stride(0), row: stride(1), head: stride(2) },
    }
}

/// A cache: pages in place of sequences, slots in place of rows.
pub(crate) fn pages(cache: &DeviceTensor<'_>, strides: PageStrides) -> Rows {
    let PageStrides { page, slot, head } = strides;
    Rows { data: cache.address(), sequence: page, row: slot, head }
}

fn pairs<T: Pod>(
    field: &'static str,
    view: Option<&DeviceView<'_, T>>,
    shape: &[usize; 4],
) -> Result<Pairs, Error> {
    let Some(view) = view else {
        return Ok(Pairs::default());
    };
    let Some(wide) = view.layout().broadcast_to(shape) else {
        let got = format!("{:?}", view.layout().shape());
        return Err(
            attn_core::Error::layout(field, format!("extents of {shape:?} or 1"), got).into()
        );
    };
    let strides = wide.strides();
    let (sequence, head, row, key) = (strides[0], strides[1], strides[2], strides[3]);
    Ok(Pairs { data: view.address(), sequence, head, row, key })
}

fn per_head(view: Option<&DeviceView<'_, f32>>) -> PerHead {
    view.map_or_else(PerHead::default, |view| {
        let head = view.layout().strides().first().copied().unwrap_or(0);
        PerHead { data: view.address(), sequence: 0, head }
    })
}

/// A scale of rank 0, of shape `[1]`, or for each sequence and KV head.
pub(crate) fn scale(view: Option<&DeviceView<'_, f32>>) -> PerHead {
    view.map_or_else(PerHead::default, |view| {
        let (sequence, head) = match view.layout().strides() {
            [sequence, head] => (*sequence, *head),
            _ => (0, 0),
        };
        PerHead { data: view.address(), sequence, head }
    })
}

const _: () = assert!(MAX_LEN < OPEN as usize);

#[cfg(test)]
mod tests {
    use attn_core::{BlockSizes, CacheLayout, DType, PageOrder, ProblemSpec, ValueStorage};

    use super::*;

    fn problem(edit: impl FnOnce(&mut ProblemSpec)) -> Problem {
        let mut spec = ProblemSpec::new(DType::BF16, 8, 2, 64, &[3, 1], &[9, 4]);
        edit(&mut spec);
        Problem::new(spec).expect("valid")
    }

    #[test]
    fn template_states_bounds_and_storage() {
        let p = template(
            &problem(|s| {
                (s.causal, s.window_left) = (true, Some(usize::MAX));
                s.q_arrangement = Arrangement::Padded;
                s.kv = KvStorage::Dense(Arrangement::Padded);
                s.block_mask = Some(BlockSizes { q: 16, kv: usize::MAX });
                s.softcap = Some(30.0);
            }),
            4,
            Split::Chunks(256),
        );
        assert_eq!((p.left, p.right, p.padded_rows), (OPEN, 0, 3));
        assert_eq!(p.flags, Q_PADDED | KV_PADDED);
        assert_eq!((p.batch, p.q_heads, p.group.value, p.pack.value), (2, 8, 4, 4));
        assert_eq!((p.split_keys, p.split_parts), (256, OPEN));
        assert_eq!((p.block_q.value, p.block_kv.value), (16, OPEN.unsigned_abs()));
        assert_eq!((p.scale, p.softcap), (0.125, 30.0));
        let open = template(&problem(|_| ()), 1, Split::Parts(0));
        assert_eq!((open.left, open.right, open.padded_rows, open.flags), (-1, -1, -1, 0));
        assert_eq!((open.split_keys, open.split_parts, open.softcap), (0, 1, 0.0));
    }

    #[test]
    fn template_states_the_dropout() {
        let p = template(&problem(|s| s.dropout = Some(Dropout { p: 0.5 })), 1, Split::Whole);
        assert_eq!((p.drop_below, p.keep_factor, p.seed), (1 << 31, 2.0, 0));
        let none = template(&problem(|s| s.dropout = Some(Dropout { p: 0.0 })), 1, Split::Whole);
        assert_eq!((none.drop_below, none.keep_factor), (0, 1.0));
    }

    #[test]
    fn template_divides_by_the_page_size() {
        let kv = CacheLayout::contiguous(
            DType::BF16,
            PageOrder::Hnd,
            12,
            2,
            64,
            ValueStorage::Separate(64),
        );
        let layout = kv.expect("valid");
        let p = template(&problem(|s| s.kv = KvStorage::Paged(layout)), 1, Split::Whole);
        assert_eq!((p.flags, p.table.page_size.value), (PAGED, 12));
    }

    #[test]
    fn strides_of_rows_follow_the_arrangement() {
        let packed = Strided::new("q", &[4, 8, 64], &[600, 70, 1], 3).expect("same rank");
        let got = rows("q", 1024, &packed, Arrangement::Packed).expect("contiguous rows");
        assert_eq!(got, Rows { data: 1024, sequence: 0, row: 600, head: 70 });
        let padded = Strided::contiguous("lse", &[2, 3, 8]).expect("small");
        let got = row_heads(64, &padded, Arrangement::Padded);
        assert_eq!(got, Rows { data: 64, sequence: 24, row: 8, head: 1 });
        let single = Strided::new("k", &[1, 8, 64], &[3, 64, 1], 0).expect("same rank");
        let got = row_heads(64, &single, Arrangement::Packed);
        assert_eq!(got, Rows { data: 64, sequence: 0, row: 0, head: 64 });
        let apart = Strided::new("q", &[4, 8, 64], &[2000, 128, 2], 0).expect("same rank");
        let error = rows("q", 0, &apart, Arrangement::Packed).expect_err("elements apart");
        assert!(error.to_string().contains("innermost stride 1"), "{error}");
    }

    #[test]
    fn alignment_looks_at_every_step_that_is_taken() {
        let aligned = |dtype, address, shape: &[usize], strides: &[i64]| {
            let layout = Strided::new("q", shape, strides, 0).expect("same rank");
            is_aligned(address, Operand { dtype, layout: &layout })
        };
        assert!(aligned(DType::BF16, 256, &[4, 8, 64], &[512, 64, 1]));
        assert!(!aligned(DType::BF16, 258, &[4, 8, 64], &[512, 64, 1]));
        assert!(!aligned(DType::BF16, 256, &[4, 8, 64], &[516, 64, 1]));
        assert!(!aligned(DType::BF16, 256, &[4, 8, 60], &[480, 60, 1]));
        assert!(aligned(DType::BF16, 256, &[4, 1, 60], &[480, 60, 1]));
        assert!(aligned(DType::BF16, 256, &[4, 8, 64], &[-512, 64, 1]));
        assert!(!aligned(DType::F8E4M3, 256, &[4, 8, 72], &[576, 72, 1]));
        assert!(aligned(DType::F8E4M3, 256, &[4, 8, 80], &[i64::MIN, 80, 1]));
        assert!(aligned(DType::BF16, 2, &[0, 8, 60], &[1, 1, 1]));
    }
}
