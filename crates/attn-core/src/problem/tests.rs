//! Every refused combination names its field; equality follows every field.

use super::*;
use crate::layout::{PageOrder, ValueStorage};

fn spec() -> ProblemSpec {
    ProblemSpec::new(DType::F16, 8, 2, 64, &[3, 0], &[5, 2])
}

fn refusal(edit: impl FnOnce(&mut ProblemSpec)) -> String {
    let mut s = spec();
    edit(&mut s);
    Problem::new(s).expect_err("must be refused").to_string()
}

#[test]
fn problem_refuses_each_bad_field_by_name() {
    for (got, field) in [
        (refusal(|s| s.kv_heads = 0), "kv_heads"),
        (refusal(|s| s.q_heads = 7), "q_heads"),
        (refusal(|s| s.head_dim = 0), "head_dim"),
        (refusal(|s| s.value_dim = 0), "value_dim"),
        (refusal(|s| s.head_dim = 1 << 21), "head_dim"),
        (refusal(|s| s.q_heads = 1 << 21), "q_heads"),
        (refusal(|s| s.kv_lens = vec![5]), "kv_lens"),
        (refusal(|s| s.kv_dtype = DType::F32), "kv_dtype"),
        (refusal(|s| s.scale = Some(f32::NAN)), "scale"),
        (refusal(|s| s.softcap = Some(0.0)), "softcap"),
        (refusal(|s| s.softcap = Some(f32::INFINITY)), "softcap"),
        (refusal(|s| s.block_mask = Some(BlockSizes { q: 0, kv: 1 })), "block_mask"),
        (refusal(|s| s.options.num_splits = Some(0)), "num_splits"),
        (refusal(|s| s.want_dsinks = true), "dsinks"),
        (refusal(|s| s.want_dbias = true), "dbias"),
        (refusal(|s| (s.want_dbias, s.bias) = (true, true)), "dbias"),
        (refusal(|s| s.q_lens = vec![usize::MAX, 1]), "q_lens"),
        (refusal(|s| s.kv_lens = vec![1 << 62, 1]), "key elements"),
        (refusal(|s| (s.q_dtype, s.kv_dtype) = (DType::F8E5M2, DType::F8E5M2)), "q_dtype"),
    ] {
        assert!(got.contains(field), "{got:?} does not name {field}");
    }
}

#[test]
fn fp8_queries_want_e4m3_keys_and_give_bf16() {
    let of = |q, kv| {
        let mut s = spec();
        (s.q_dtype, s.kv_dtype) = (q, kv);
        Problem::new(s)
    };
    let e4m3 = DType::F8E4M3;
    let p = Problem::new(ProblemSpec::new(e4m3, 8, 2, 64, &[3], &[5])).expect("valid");
    assert_eq!((p.q_dtype(), p.kv_dtype(), p.out_dtype()), (e4m3, e4m3, DType::BF16));
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        assert_eq!(of(dtype, dtype).expect("valid").out_dtype(), dtype);
        assert_eq!(of(dtype, e4m3).expect("valid").out_dtype(), dtype);
        let got = of(e4m3, dtype).expect_err("mixed").to_string();
        assert_eq!(got, format!("kv_dtype: expected fp8_e4m3, as the queries, got {dtype}"));
    }
    let got = of(e4m3, DType::F8E5M2).expect_err("mixed").to_string();
    assert_eq!(got, "kv_dtype: expected fp8_e4m3, as the queries, got fp8_e5m2");
    let got = of(DType::F8E5M2, e4m3).expect_err("e5m2 queries").to_string();
    assert_eq!(got, "q_dtype: expected f32, f16, bf16 or fp8_e4m3, got fp8_e5m2");
}

#[test]
fn problem_refuses_a_cache_of_another_shape() {
    let paged = |dtype, heads, key, value| {
        let value = ValueStorage::Separate(value);
        let layout = CacheLayout::contiguous(dtype, PageOrder::Nhd, 16, heads, key, value);
        let mut s = spec();
        s.kv = KvStorage::Paged(layout.expect("valid alone"));
        Problem::new(s)
    };
    assert!(paged(DType::F16, 2, 64, 64).is_ok());
    assert!(paged(DType::BF16, 2, 64, 64).is_err());
    assert!(paged(DType::F16, 4, 64, 64).is_err());
    assert!(paged(DType::F16, 2, 128, 64).is_err());
    assert!(paged(DType::F16, 2, 64, 128).is_err());
}

#[test]
fn backward_refuses_caches() {
    let got = refusal(|s| (s.pass, s.kv_dtype) = (Pass::Backward, DType::F8E5M2));
    assert!(got.contains("fp8"), "{got}");
}

#[test]
fn backward_refuses_fp8_queries() {
    let got = refusal(|s| {
        (s.pass, s.q_dtype, s.kv_dtype) = (Pass::Backward, DType::F8E4M3, DType::F8E4M3);
    });
    assert_eq!(got, "q_dtype: expected f32, f16 or bf16 in a backward, got fp8_e4m3");
}

#[test]
fn empty_problems_are_problems() {
    for (q, kv) in [(vec![], vec![]), (vec![0, 0], vec![4, 4]), (vec![4], vec![0])] {
        let p = Problem::new(ProblemSpec::new(DType::F32, 4, 2, 64, &q, &kv)).expect("empty");
        assert_eq!(p.flops(), 0);
    }
    let p = Problem::new(ProblemSpec::new(DType::F32, 0, 2, 64, &[1], &[1])).expect("no heads");
    assert_eq!(p.group(), 0);
}

#[test]
fn equality_follows_every_field() {
    let base = Problem::new(spec()).expect("valid");
    assert_eq!(base, Problem::new(spec()).expect("valid"));
    let edits: [fn(&mut ProblemSpec); 27] = [
        |s| s.q_dtype = DType::F16,
        |s| s.causal = true,
        |s| s.window_left = Some(3),
        |s| s.softcap = Some(30.0),
        |s| s.scale = Some(0.5),
        |s| s.q_lens = vec![2, 1],
        |s| s.q_arrangement = Arrangement::Padded,
        |s| s.kv = KvStorage::Dense(Arrangement::Padded),
        |s| s.sinks = true,
        |s| s.options.num_splits = Some(2),
        |s| s.options.disabled_kernels = vec!["x".to_owned()],
        |s| s.kv_dtype = DType::F8E4M3,
        |s| (s.q_dtype, s.kv_dtype) = (DType::F8E4M3, DType::F8E4M3),
        |s| s.pass = Pass::Backward,
        |s| s.q_heads = 4,
        |s| s.kv_heads = 4,
        |s| s.head_dim = 65,
        |s| s.value_dim = 65,
        |s| s.window_right = Some(3),
        |s| s.mask = true,
        |s| s.block_mask = Some(BlockSizes { q: 1, kv: 2 }),
        |s| s.bias = true,
        |s| s.alibi = true,
        |s| s.options.deterministic = true,
        |s| s.options.batch_invariant = true,
        |s| s.options.phase = Some(Phase::Decode),
        |s| s.dropout = Some(Dropout { p: 0.1 }),
    ];
    for (n, edit) in edits.iter().enumerate() {
        let mut s = spec();
        edit(&mut s);
        let other = Problem::new(s).expect("valid");
        assert_eq!(other == base, n == 0, "edit {n}");
        assert_eq!(other.fingerprint() == base.fingerprint(), n == 0, "edit {n}");
    }
}

#[test]
fn flops_count_visible_pairs() {
    let mut s = ProblemSpec::new(DType::F32, 2, 1, 8, &[4], &[6]);
    let full = Problem::new(s.clone()).expect("valid");
    assert_eq!(full.flops(), 4 * 6 * 2 * 16 * 2);
    s.causal = true;
    let causal = Problem::new(s).expect("valid");
    // Rows see 3, 4, 5 and 6 keys.
    assert_eq!(causal.flops(), 18 * 2 * 16 * 2);
}
