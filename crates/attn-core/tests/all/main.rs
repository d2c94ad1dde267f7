//! Constructors on drawn input: whatever they are given, they answer, and what they accept is sound.
//!
//! The invariant: no constructor panics, in a build that checks arithmetic; and an accepted view has no index
//! outside its storage.

use attn_core::{
    Arrangement, BlockSizes, CacheLayout, DType, Inputs, KvStorage, KvView, PageOrder, PageStrides,
    Pass, Problem, ProblemSpec, Strided, TensorView, ValueStorage, View, ViewMut,
};
use proptest::prelude::*;

/// Small numbers mostly, and the ends of the range.
fn size() -> impl Strategy<Value = usize> {
    prop_oneof![
        12 => 0usize..9,
        1 => Just(usize::MAX),
        1 => Just(1usize << 62),
        1 => Just(1usize << 31),
    ]
}

fn stride() -> impl Strategy<Value = i64> {
    prop_oneof![12 => -9i64..40, 1 => Just(i64::MAX), 1 => Just(i64::MIN), 1 => Just(1i64 << 40)]
}

fn dtype() -> impl Strategy<Value = DType> {
    proptest::sample::select(DType::ALL.to_vec())
}

fn float() -> impl Strategy<Value = Option<f32>> {
    prop_oneof![
        Just(None),
        any::<f32>().prop_map(Some),
        Just(Some(f32::NAN)),
        Just(Some(f32::INFINITY)),
    ]
}

proptest! {
    #[test]
    fn view_accepts_only_what_stays_inside(
        shape in proptest::collection::vec(size(), 0..5),
        strides in proptest::collection::vec(stride(), 0..5),
        offset in size(),
        len in 0usize..60,
        at in proptest::collection::vec(size(), 0..5),
    ) {
        let data = vec![0u8; len];
        if let Ok(view) = View::strided("x", &data, &shape, &strides, offset) {
            // An index inside the shape is inside the storage, or this would panic.
            let inside = at.len() == shape.len() && at.iter().zip(&shape).all(|(i, n)| i < n);
            prop_assert_eq!(view.get(&at).is_some(), inside);
            let _ = (view.layout().len(), view.row(&at), view.at(0), view.narrow(0, 0..1));
            let _ = view.broadcast_to(&[2, 3, 4, 5]);
        }
        let mut data = vec![0u8; len];
        if let Ok(layout) = Strided::new("o", &shape, &strides, offset)
            && let Ok(mut view) = ViewMut::new("o", &mut data, layout.clone())
        {
            view.fill(1);
            let written = data.iter().filter(|&&x| x == 1).count();
            prop_assert_eq!(written, layout.len(), "every element once");
        }
    }

    #[test]
    fn cache_layout_answers_any_description(
        dtype in dtype(), order in any::<bool>(), sizes in [size(), size(), size(), size()],
        prefix in any::<bool>(), ks in [stride(), stride(), stride()], vs in [stride(), stride(), stride()],
        at in [size(), size(), size()],
    ) {
        let order = if order { PageOrder::Nhd } else { PageOrder::Hnd };
        let value =
            if prefix { ValueStorage::PrefixOfKey(sizes[3]) } else { ValueStorage::Separate(sizes[3]) };
        let strides = |s: [i64; 3]| PageStrides { page: s[0], slot: s[1], head: s[2] };
        let made = [
            CacheLayout::contiguous(dtype, order, sizes[0], sizes[1], sizes[2], value),
            CacheLayout::strided(
                dtype, order, sizes[0], sizes[1], sizes[2], value, strides(ks), strides(vs),
            ),
        ];
        for layout in made.into_iter().flatten() {
            prop_assert!(layout.check(&layout.id()).is_ok());
            let _ = (layout.key_offset(at[0], at[1], at[2]), layout.value_offset(at[0], at[1], at[2]));
            let _ = (layout.page_bytes(), layout.pages_for(at[0]), layout.locate(at[1]));
            let _ = (layout.check_writable(), layout.id().to_string());
        }
    }

    #[test]
    fn problem_answers_any_specification(
        types in (dtype(), dtype()), heads in (size(), size()), dims in (size(), size()),
        q_lens in proptest::collection::vec(size(), 0..4),
        kv_lens in proptest::collection::vec(size(), 0..4),
        floats in (float(), float()), windows in (proptest::option::of(size()), proptest::option::of(size())),
        flags in proptest::collection::vec(any::<bool>(), 9), blocks in proptest::option::of((size(), size())),
        splits in proptest::option::of(size()),
    ) {
        let mut spec = ProblemSpec::new(types.0, heads.0, heads.1, dims.0, &q_lens, &kv_lens);
        spec.kv_dtype = types.1;
        spec.value_dim = dims.1;
        (spec.scale, spec.softcap) = floats;
        (spec.window_left, spec.window_right) = windows;
        spec.block_mask = blocks.map(|(q, kv)| BlockSizes { q, kv });
        spec.options.num_splits = splits;
        (spec.causal, spec.mask, spec.bias) = (flags[0], flags[1], flags[2]);
        (spec.alibi, spec.sinks) = (flags[3], flags[4]);
        (spec.want_dsinks, spec.want_dbias) = (flags[5], flags[6]);
        if flags[7] {
            spec.pass = Pass::Backward;
        }
        if flags[8] {
            spec.q_arrangement = Arrangement::Padded;
            spec.kv = KvStorage::Dense(Arrangement::Padded);
        }
        match Problem::new(spec) {
            Ok(problem) => {
                prop_assert!(problem.scale().is_finite());
                prop_assert_eq!(problem.group() * problem.kv_heads(), problem.q_heads());
                let _ = (problem.flops(), problem.fingerprint());
            }
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }

    #[test]
    fn inputs_answer_any_tensors(
        q in proptest::collection::vec(0usize..5, 0..5),
        k in proptest::collection::vec(0usize..5, 0..5),
        table in proptest::collection::vec(-2i32..5, 6), width in 0usize..4, paged in any::<bool>(),
    ) {
        let mut spec = ProblemSpec::new(DType::F32, 2, 1, 3, &[2, 1], &[3, 4]);
        let layout = CacheLayout::contiguous(
            DType::F32, PageOrder::Nhd, 2, 1, 3, ValueStorage::Separate(3)).expect("valid");
        if paged {
            spec.kv = KvStorage::Paged(layout.clone());
        }
        let problem = Problem::new(spec).expect("valid");
        let data = [0f32; 5 * 5 * 5 * 5];
        let view = |shape: &[usize]| {
            let len: usize = shape.iter().product();
            TensorView::from(View::contiguous("x", &data[..len], shape).expect("small"))
        };
        let (batch, width) = (6 / 3, width.min(3));
        let kv = if paged {
            KvView::Paged {
                k_cache: view(&k),
                v_cache: view(&k),
                block_table: View::contiguous("block_table", &table[..batch * width], &[batch, width])
                    .expect("small"),
                stamp: layout.id(),
            }
        } else {
            KvView::Dense { k: view(&k), v: view(&k) }
        };
        let inputs = Inputs::new(view(&q), kv);
        if inputs.check(&problem).is_ok() {
            prop_assert_eq!(&q, &[3, 2, 3]);
            // Three keys need two pages and four need two: all ids were in range.
            if paged {
                let pages = i32::try_from(k[0]).expect("small");
                prop_assert!(width >= 2);
                for row in table[..batch * width].chunks(width) {
                    prop_assert!(row[..2].iter().all(|id| (0..pages).contains(id)));
                }
            }
        }
    }
}
