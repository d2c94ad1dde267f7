//! Every engine of this crate on every case.
//!
//! The invariant: all failures are collected and printed together: the pattern among them is the finding.

use std::collections::HashSet;
use std::sync::LazyLock;

use attn_core::{KvView, PageOrder};
use attn_reference::case::Scales;
use attn_reference::tiled::{self, Tiling};
use attn_reference::{
    CaseData, Failure, Theme, corpus, judge_backward, judge_forward, naive, paged,
};

/// Built once: the expected results are kept in the data and shared by all tests.
static BUILT: LazyLock<Vec<CaseData>> =
    LazyLock::new(|| corpus().iter().map(|case| case.build().unwrap()).collect());

/// Panics with every failure.
fn all<V, E: std::fmt::Display>(judge: impl Fn(&CaseData) -> Result<V, Failure<E>>) {
    let failures: Vec<String> =
        BUILT.iter().filter_map(|case| judge(case).err()).map(|e| e.to_string()).collect();
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn corpus_has_unique_names_and_every_theme() {
    let cases = corpus();
    let names: HashSet<&str> = cases.iter().map(|case| case.name.as_str()).collect();
    assert_eq!(names.len(), cases.len());
    let themes: HashSet<Theme> = cases.iter().map(|case| case.theme).collect();
    assert_eq!(themes.len(), 12);
}

#[test]
fn corpus_covers_what_engines_specialise_on() {
    let cases = corpus();
    let some = |what: &dyn Fn(&attn_reference::Case) -> bool| cases.iter().any(what);
    for dim in [1, 8, 32, 40, 64, 72, 80, 96, 128, 192, 256] {
        assert!(some(&|c| c.spec.head_dim == dim), "head dim {dim}");
    }
    for group in [1, 2, 3, 4, 7, 8, 16] {
        assert!(some(&|c| c.spec.kv_heads > 1 && c.spec.q_heads == group * c.spec.kv_heads));
    }
    for size in [1, 8, 16, 64] {
        for order in [PageOrder::Nhd, PageOrder::Hnd] {
            assert!(some(&|c| c.recipe.pages.is_some_and(|p| p.size == size && p.order == order)));
        }
    }
    for len in [1, 15, 16, 17, 63, 64, 65, 127, 128, 129] {
        assert!(some(&|c| c.spec.q_lens.contains(&len)), "q {len}");
        assert!(some(&|c| c.spec.kv_lens.contains(&len)), "kv {len}");
    }
    for scales in [Scales::None, Scales::Scalar, Scales::One, Scales::PerHead] {
        assert!(some(&|c| c.recipe.scales == scales && c.spec.kv_dtype.is_fp8()));
        assert!(some(&|c| c.recipe.q_scales == scales && c.spec.q_dtype.is_fp8()));
    }
}

#[test]
fn paged_cases_are_full_of_nan() {
    let data = BUILT.iter().find(|d| d.name() == "paged/decode_nhd_16").unwrap();
    let KvView::Paged { k_cache, .. } = data.inputs().unwrap().kv else { panic!("paged") };
    let values = attn_reference::elements::read(&k_cache);
    let nan = values.iter().filter(|x| x.is_nan()).count();
    // 16 + 33 + 130 tokens in 1 + 3 + 9 pages, and three pages that no table names.
    assert_eq!(nan, ((1 + 3 + 9 + 3) * 16 - (16 + 33 + 130)) * 2 * 64);
}

#[test]
fn naive_passes_the_corpus() {
    all(|case| judge_forward(case, naive::forward));
}

#[test]
fn naive_backward_passes_the_corpus() {
    let dense: Vec<_> = BUILT.iter().filter(|case| case.backward_problem().is_some()).collect();
    assert!(dense.len() > 150, "{}", dense.len());
    for case in dense {
        judge_backward(case, naive::backward).unwrap_or_else(|e| panic!("{e}"));
    }
}

#[test]
fn gathered_passes_the_corpus() {
    all(|case| judge_forward(case, paged::forward));
}

#[test]
fn gathering_keeps_every_bit_of_the_result() {
    for case in BUILT.iter().filter(|case| case.problem().cache_layout().is_some()) {
        let inputs = case.inputs().unwrap();
        let gathered = paged::gather(case.problem(), &inputs).unwrap();
        let dense = gathered.inputs(&inputs).unwrap();
        let got = naive::forward_f64(gathered.problem(), &dense).unwrap();
        assert_eq!(got, case.expected().unwrap().reference, "{}", case.name());
    }
}

#[test]
fn tiled_f32_passes_the_corpus() {
    for (rows, keys, splits) in [(16, 16, 1), (64, 48, 1), (1, 32, 4), (7, 5, 3)] {
        let tiling = Tiling { rows, keys, splits };
        all(|case| judge_forward(case, |p, i, o| tiled::forward(p, i, tiling, o)));
    }
}
