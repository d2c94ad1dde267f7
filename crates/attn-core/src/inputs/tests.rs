//! Each inconsistent tensor is refused by name; sequences are found in every arrangement.

use super::*;
use crate::problem::{BlockSizes, ProblemSpec};
use crate::{DType, PageOrder, ValueStorage};

const Q: [f32; 5 * 4 * 2] = [0.0; 40];
const K: [f32; 6 * 2 * 2] = [0.0; 24];

fn spec() -> ProblemSpec {
    ProblemSpec::new(DType::F32, 4, 2, 2, &[2, 3], &[4, 2])
}

fn inputs<'a>() -> Inputs<'a> {
    let q = View::contiguous("q", &Q, &[5, 4, 2]).expect("fits");
    let k = View::contiguous("k", &K, &[6, 2, 2]).expect("fits");
    Inputs::dense(TensorView::F32(q), TensorView::F32(k.clone()), TensorView::F32(k))
}

fn verdict(spec: ProblemSpec, inputs: &Inputs<'_>) -> Result<(), Error> {
    inputs.check(&Problem::new(spec).expect("valid"))
}

#[test]
fn check_accepts_what_fits() {
    assert_eq!(verdict(spec(), &inputs()), Ok(()));
}

#[test]
fn check_refuses_shapes_and_types_by_name() {
    let mut s = spec();
    s.q_lens = vec![2, 2];
    let err = verdict(s, &inputs()).expect_err("a row too many").to_string();
    assert!(err.contains("layout of q") && err.contains("[4, 4, 2]"), "{err}");
    let mut s = spec();
    s.value_dim = 3;
    assert!(verdict(s, &inputs()).is_err());
    let mut s = spec();
    (s.q_dtype, s.kv_dtype) = (DType::F16, DType::F16);
    assert!(verdict(s, &inputs()).is_err());
}

#[test]
fn check_refuses_missing_and_unexpected_tensors() {
    let edits: [fn(&mut ProblemSpec); 5] = [
        |s| s.mask = true,
        |s| s.bias = true,
        |s| s.alibi = true,
        |s| s.sinks = true,
        |s| s.block_mask = Some(BlockSizes { q: 2, kv: 2 }),
    ];
    for edit in edits {
        let mut s = spec();
        edit(&mut s);
        assert!(verdict(s, &inputs()).is_err());
    }
    let slopes = [1f32; 4];
    let mut i = inputs();
    i.alibi = Some(View::contiguous("alibi", &slopes, &[4]).expect("fits"));
    assert!(verdict(spec(), &i).is_err());
}

#[test]
fn check_refuses_masks_that_do_not_broadcast() {
    let data = [1u8; 200];
    let mut s = spec();
    s.mask = true;
    let with = |shape: &[usize]| {
        let mut i = inputs();
        let n: usize = shape.iter().product();
        i.mask = Some(View::contiguous("mask", &data[..n], shape).expect("fits"));
        verdict(s.clone(), &i)
    };
    for good in
        [&[3, 4][..], &[1, 4], &[3, 1], &[4, 3, 4], &[1, 3, 4], &[2, 1, 3, 4], &[2, 4, 3, 4]]
    {
        assert_eq!(with(good), Ok(()), "{good:?}");
    }
    for bad in [&[4, 3][..], &[12], &[2, 4], &[3, 5], &[3, 3, 4], &[3, 1, 3, 4], &[1, 1, 1, 3, 4]] {
        assert!(with(bad).is_err(), "{bad:?}");
    }
}

fn paged(table: &[i32], width: usize, stamp_order: PageOrder) -> Result<(), Error> {
    let layout = |order| {
        CacheLayout::contiguous(DType::F32, order, 2, 2, 2, ValueStorage::Separate(2))
            .expect("valid")
    };
    let mut s = spec();
    s.kv = KvStorage::Paged(layout(PageOrder::Nhd));
    let cache = [0f32; 3 * 8];
    let k = View::contiguous("k_cache", &cache, &[3, 2, 2, 2]).expect("fits");
    let mut i = inputs();
    i.kv = KvView::Paged {
        k_cache: TensorView::F32(k.clone()),
        v_cache: TensorView::F32(k),
        block_table: View::contiguous("block_table", table, &[2, width]).expect("fits"),
        stamp: layout(stamp_order).id(),
    };
    verdict(s, &i)
}

#[test]
fn check_walks_the_needed_part_of_the_table() {
    // Sequence 0 needs two pages, sequence 1 one.
    assert_eq!(paged(&[2, 0, 1, 99], 2, PageOrder::Nhd), Ok(()));
    assert!(paged(&[2, -1, 1, -1], 2, PageOrder::Nhd).is_err());
    assert!(paged(&[2, 3, 1, -1], 2, PageOrder::Nhd).is_err());
    assert!(paged(&[2, 1], 1, PageOrder::Nhd).is_err());
}

#[test]
fn check_refuses_a_cache_of_another_layout() {
    let err = paged(&[2, 0, 1, -1], 2, PageOrder::Hnd).expect_err("stamp differs");
    assert!(matches!(err, Error::CacheLayout { .. }));
}

#[test]
fn check_refuses_scales_that_are_not_positive_and_finite() {
    let bits = [crate::F8E4M3(0); 24];
    let k = View::contiguous("k", &bits, &[6, 2, 2]).expect("fits");
    let mut s = spec();
    s.kv_dtype = DType::F8E4M3;
    let with = |scale: &[f32], shape: &[usize]| {
        let mut i = inputs();
        i.kv = KvView::Dense { k: TensorView::F8E4M3(k.clone()), v: TensorView::F8E4M3(k.clone()) };
        i.k_scale = Some(View::contiguous("k_scale", scale, shape).expect("fits"));
        verdict(s.clone(), &i)
    };
    assert_eq!(with(&[0.5], &[]), Ok(()));
    assert_eq!(with(&[0.5], &[1]), Ok(()));
    assert_eq!(with(&[0.5, 1.0, 2.0, 4.0], &[2, 2]), Ok(()));
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert!(with(&[bad], &[]).is_err());
        assert!(with(&[0.5, 1.0, bad, 4.0], &[2, 2]).is_err());
    }
    assert!(with(&[1.0, 1.0], &[2]).is_err());
    // A scale without fp8 storage would be an option accepted and ignored.
    let one = [1f32];
    let mut i = inputs();
    i.v_scale = Some(View::contiguous("v_scale", &one, &[]).expect("fits"));
    assert!(verdict(spec(), &i).is_err());
}

#[test]
fn check_takes_scales_of_queries_with_fp8_queries_alone() {
    let (q, kv) = ([crate::F8E4M3(0); 40], [crate::F8E4M3(0); 24]);
    let scale = [0.5f32, 2.0, 1.0, 4.0];
    let with = |q_dtype, scale: &[f32], shape: &[usize]| {
        let mut s = spec();
        (s.q_dtype, s.kv_dtype) = (q_dtype, DType::F8E4M3);
        let k = View::contiguous("k", &kv, &[6, 2, 2]).expect("fits");
        let mut i = inputs();
        i.kv = KvView::Dense { k: TensorView::F8E4M3(k.clone()), v: TensorView::F8E4M3(k) };
        if q_dtype.is_fp8() {
            i.q = TensorView::F8E4M3(View::contiguous("q", &q, &[5, 4, 2]).expect("fits"));
        }
        i.q_scale = Some(View::contiguous("q_scale", scale, shape).expect("fits"));
        assert_eq!(i.q_scale_of(1, 0).to_bits(), scale[shape.len() / 2 * 2].to_bits());
        verdict(s, &i)
    };
    for shape in [&[][..], &[1], &[2, 2]] {
        let scale = &scale[..shape.iter().product()];
        assert_eq!(with(DType::F8E4M3, scale, shape), Ok(()), "{shape:?}");
        let err = with(DType::F32, scale, shape).expect_err("f32 queries").to_string();
        assert_eq!(err, "q_scale: expected none with f32 queries, got a tensor");
    }
    // A scale for each query head would be an option half ignored.
    let err = with(DType::F8E4M3, &[1.0; 8], &[2, 4]).expect_err("query heads").to_string();
    assert!(err.starts_with("layout of q_scale: expected shape [], [1] or [2, 2]"), "{err}");
    assert!(with(DType::F8E4M3, &[0.0], &[1]).is_err());
    assert!(with(DType::F8E4M3, &[1.0, 1.0, f32::NAN, 1.0], &[2, 2]).is_err());
}

#[test]
fn outputs_of_fp8_queries_are_bf16() {
    let mut s = spec();
    (s.q_dtype, s.kv_dtype) = (DType::F8E4M3, DType::F8E4M3);
    let problem = Problem::new(s).expect("valid");
    let (mut half, mut wide) = ([half::bf16::ZERO; 40], [0f32; 40]);
    let shape = [5, 4, 2];
    let o = ViewMut::contiguous("o", &mut half, &shape).expect("fits");
    assert_eq!(Outputs { o: o.into(), lse: None }.check(&problem), Ok(()));
    let o = ViewMut::contiguous("o", &mut wide, &shape).expect("fits");
    let err = Outputs { o: o.into(), lse: None }.check(&problem).expect_err("f32").to_string();
    assert_eq!(err, "layout of o: expected bf16, got f32");
}

#[test]
fn sequences_are_found_in_every_arrangement() {
    let data: Vec<f32> = (0u8..60).map(f32::from).collect();
    let p = Problem::new(spec()).expect("valid");
    let packed = View::contiguous("q", &data[..40], &[5, 4, 2]).expect("fits");
    let rows = p.q_rows(&packed, 1).expect("fits");
    assert_eq!((rows.shape(), rows.get(&[0, 0, 0])), (&[3, 4, 2][..], Some(16.0)));
    let mut s = spec();
    s.q_arrangement = Arrangement::Padded;
    let p = Problem::new(s).expect("valid");
    let padded = View::contiguous("q", &data[..48], &[2, 3, 4, 2]).expect("fits");
    let rows = p.q_rows(&padded, 0).expect("fits");
    assert_eq!((rows.shape(), rows.get(&[1, 0, 0])), (&[2, 4, 2][..], Some(8.0)));
}

#[test]
fn bias_plane_repeats_broadcast_axes() {
    let bias: Vec<f32> = (0u8..12).map(f32::from).collect();
    let mut s = spec();
    s.bias = true;
    let p = Problem::new(s).expect("valid");
    let mut i = inputs();
    i.bias = Some(View::contiguous("bias", &bias, &[4, 3, 1]).expect("fits"));
    let plane = i.bias_of(&p, 1, 2).expect("checked").expect("present");
    assert_eq!(plane.shape(), [3, 4]);
    assert_eq!((plane.get(&[1, 0]), plane.get(&[1, 3])), (Some(7.0), Some(7.0)));
}
