//! Random calls: what must hold whatever the options.
//!
//! The invariant: lengths are drawn around tile edges and at 0, and every mask and transform can meet every
//! other, which a list of cases cannot do.

use attn_core::{BlockSizes, DType, ProblemSpec};
use attn_reference::tiled::{self, Tiling};
use attn_reference::{Case, Pattern, compare, judge_forward, naive};
use proptest::prelude::*;

fn length() -> impl Strategy<Value = usize> {
    prop_oneof![1 => Just(0), 4 => 1usize..20, 1 => prop::sample::select(vec![16, 17, 31, 33])]
}

fn window() -> impl Strategy<Value = Option<usize>> {
    prop_oneof![3 => Just(None), 2 => (0usize..12).prop_map(Some), 1 => Just(Some(usize::MAX))]
}

prop_compose! {
    fn spec()(
        lens in prop::collection::vec((length(), length()), 0..4),
        (group, kv_heads) in (1usize..4, 1usize..3),
        (head_dim, value_dim) in (1usize..10, 1usize..10),
        (left, right, causal) in (window(), window(), any::<bool>()),
        (mask, bias, alibi, sinks) in any::<(bool, bool, bool, bool)>(),
        blocks in prop::option::of((1usize..9, 1usize..9)),
        softcap in prop::option::of(0.2f32..4.0),
        dtype in prop::sample::select(vec![DType::F32, DType::F16, DType::BF16, DType::F8E4M3]),
    ) -> ProblemSpec {
        let (q_lens, kv_lens): (Vec<_>, Vec<_>) = lens.into_iter().unzip();
        let mut s = ProblemSpec::new(dtype, group * kv_heads, kv_heads, head_dim, &q_lens, &kv_lens);
        s.value_dim = value_dim;
        (s.window_left, s.window_right, s.causal) = (left, right, causal);
        (s.mask, s.bias, s.alibi, s.sinks, s.softcap) = (mask, bias, alibi, sinks, softcap);
        s.block_mask = blocks.map(|(q, kv)| BlockSizes { q, kv });
        s
    }
}

fn pattern() -> impl Strategy<Value = Pattern> {
    prop::sample::select(Pattern::ALL.to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn tiled_matches_naive(
        spec in spec(),
        pattern in pattern(),
        (rows, keys, splits) in (1usize..20, 1usize..20, 1usize..5),
    ) {
        let data = Case::from_spec("random", spec).pattern(pattern).build().unwrap();
        let inputs = data.inputs().unwrap();
        let want = naive::forward_f64(data.problem(), &inputs).unwrap();
        let tiling = Tiling { rows, keys, splits };
        let got = tiled::forward_f64(data.problem(), &inputs, tiling).unwrap();
        for (got, want) in [(&got.o, &want.o), (&got.lse, &want.lse)] {
            let c = compare(got, want, 1e-8);
            prop_assert!(c.is_within(), "{}", c);
        }
    }

    #[test]
    fn tiled_f32_is_within_the_error_rule(spec in spec(), pattern in pattern()) {
        let data = Case::from_spec("random", spec).pattern(pattern).build().unwrap();
        let tiling = Tiling { rows: 8, keys: 8, splits: 2 };
        let verdict = judge_forward(&data, |p, i, o| tiled::forward(p, i, tiling, o));
        prop_assert!(verdict.is_ok(), "{}", verdict.unwrap_err());
    }

    #[test]
    fn sequence_gives_the_same_bits_in_any_batch(spec in spec(), pattern in pattern()) {
        // Pair tensors are drawn for the whole batch, so only the rest can be cut apart.
        let spec = ProblemSpec { mask: false, bias: false, block_mask: None, ..spec };
        let whole = Case::from_spec("random", spec.clone()).pattern(pattern).build().unwrap();
        let whole = &whole.expected().unwrap().reference;
        let width = spec.q_heads * spec.value_dim;
        let mut at = 0;
        for sequence in 0..spec.q_lens.len() {
            // The sequence keeps its index: its mates become empty.
            let keep = |lens: &[usize]| -> Vec<usize> {
                lens.iter().enumerate().map(|(n, &len)| if n == sequence { len } else { 0 }).collect()
            };
            let (q_lens, kv_lens) = (keep(&spec.q_lens), keep(&spec.kv_lens));
            let alone = ProblemSpec { q_lens, kv_lens, ..spec.clone() };
            let alone = Case::from_spec("random", alone).pattern(pattern).build().unwrap();
            let rows = spec.q_lens[sequence];
            prop_assert_eq!(
                &alone.expected().unwrap().reference.o,
                &whole.o[at * width..(at + rows) * width]
            );
            at += rows;
        }
    }
}
