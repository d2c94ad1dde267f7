//! What is divided how, what is refused, and the tables of both calls.

use super::*;
use crate::dtype::DType;
use crate::layout::{PageOrder, ValueStorage};
use crate::problem::KvStorage;

const PAGE: usize = 4;

fn problem(q: &[usize], kv: &[usize], edit: impl FnOnce(&mut ProblemSpec)) -> Problem {
    let mut spec = ProblemSpec::new(DType::BF16, 4, 2, 64, q, kv);
    let value = ValueStorage::Separate(64);
    let layout = CacheLayout::contiguous(DType::BF16, PageOrder::Nhd, PAGE, 2, 64, value);
    spec.kv = KvStorage::Paged(layout.expect("valid"));
    spec.causal = true;
    edit(&mut spec);
    Problem::new(spec).expect("valid")
}

fn shared(sequences: Range<usize>, tokens: usize) -> SharedPrefix {
    SharedPrefix { sequences, tokens }
}

fn rows_of(cascade: &Cascade) -> Vec<(Range<usize>, usize, usize)> {
    cascade.parts().iter().map(|part| (part.rows.clone(), part.source, part.tokens)).collect()
}

#[test]
fn cascade_holds_every_row_and_every_key_once() {
    let p = problem(&[1, 2, 1, 3, 1, 1], &[20, 30, 9, 14, 15, 5], |spec| spec.sinks = true);
    let cascade = Cascade::new(&p, &[shared(0..2, 16), shared(3..5, 8)], None).expect("valid");
    assert_eq!(rows_of(&cascade), [(0..3, 0, 16), (3..4, 2, 0), (4..8, 3, 8), (8..9, 5, 0)]);
    let kept: Vec<_> = (0..6).map(|s| cascade.suffix().lengths().kv(s)).collect();
    assert_eq!(kept, [4, 14, 9, 6, 7, 5]);
    assert_eq!(cascade.prefix().lengths().total_q(), 9);
    // Bounds and sinks belong to the suffix alone.
    assert_eq!(cascade.prefix().band().right, None);
    assert_eq!(cascade.suffix().band().right, Some(0));
    assert!(!cascade.prefix().has_sinks() && cascade.suffix().has_sinks());
}

#[test]
fn cascade_bounds_the_rows_of_a_part() {
    let p = problem(&[3; 5], &[20; 5], |_| ());
    let cascade = Cascade::new(&p, &[shared(1..5, 8)], Some(5)).expect("valid");
    let want = [(0..3, 0, 0), (3..7, 1, 8), (7..11, 2, 8), (11..15, 3, 8)];
    assert_eq!(rows_of(&cascade), want);
    // A bound of 0 counts as 1; sequences without rows are in no part.
    let p = problem(&[1, 0, 1], &[8; 3], |_| ());
    let cascade = Cascade::new(&p, &[shared(0..3, 4)], Some(0)).expect("valid");
    assert_eq!(rows_of(&cascade), [(0..1, 0, 4), (1..2, 2, 4)]);
}

#[test]
fn cascade_refuses_what_two_calls_do_not_compute() {
    type Edit = dyn Fn(&mut ProblemSpec);
    let q = [1, 1];
    let refuse = |edit: &Edit| {
        let p = problem(&q, &[20, 20], |spec| edit(spec));
        Cascade::new(&p, &[shared(0..2, 8)], None).expect_err("refused").to_string()
    };
    let cases: [(&Edit, &str); 8] = [
        (&|spec| spec.mask = true, "mask"),
        (&|spec| spec.block_mask = Some(crate::BlockSizes { q: 1, kv: 4 }), "mask"),
        (&|spec| spec.bias = true, "bias"),
        (&|spec| spec.alibi = true, "ALiBi"),
        (&|spec| spec.dropout = Some(crate::Dropout { p: 0.1 }), "dropout"),
        (&|spec| spec.window_left = Some(18), "a window of 18 keys"),
        (&|spec| spec.q_arrangement = Arrangement::Padded, "padded"),
        (&|spec| spec.options.batch_invariant = true, "batch-invariant"),
    ];
    for (edit, word) in cases {
        let text = refuse(edit);
        assert!(text.starts_with("a cascade is not supported") && text.contains(word), "{text}");
    }
    let dense = problem(&q, &[20, 20], |spec| spec.kv = KvStorage::Dense(Arrangement::Packed));
    assert!(Cascade::new(&dense, &[shared(0..2, 8)], None).is_err());
    // A window that hides nothing of the prefix is no obstacle, nor is one of a sequence that shares nothing.
    let p = problem(&[1; 3], &[20, 20, 90], |spec| spec.window_left = Some(19));
    assert!(Cascade::new(&p, &[shared(0..2, 8)], None).is_ok());
}

#[test]
fn cascade_refuses_prefixes_that_do_not_fit() {
    let p = problem(&[1, 1, 2], &[20, 9, 20], |_| ());
    for (prefixes, word) in [
        (vec![], "at least one"),
        (vec![shared(0..0, 8)], "neighbouring sequences from 0"),
        (vec![shared(0..4, 8)], "below 3"),
        (vec![shared(0..2, 8), shared(1..3, 8)], "from 2 on"),
        (vec![shared(0..2, 0)], "whole pages of 4"),
        (vec![shared(0..2, 6)], "whole pages of 4"),
        (vec![shared(0..2, 12)], "the 8 tokens before the rows of sequence 1"),
        (vec![shared(2..3, 20)], "the 18 tokens before the rows of sequence 2"),
    ] {
        let text = Cascade::new(&p, &prefixes, None).expect_err("refused").to_string();
        assert!(text.contains(word), "{text}");
    }
}

#[test]
fn cascade_writes_the_tables_of_both_calls() {
    let p = problem(&[1; 4], &[13, 10, 3, 9], |_| ());
    let cascade = Cascade::new(&p, &[shared(0..2, 8), shared(3..4, 4)], None).expect("valid");
    assert_eq!((cascade.prefix_width(), cascade.suffix_width()), (2, 2));
    let table = [1, 2, 3, 4, 1, 2, 5, -1, 6, -1, -1, -1, 7, 8, 9, -1];
    let view = View::contiguous("block_table", &table, &[4, 4]).expect("fits");
    let (mut prefix, mut suffix) = ([77; 7], [77; 9]);
    cascade.write_tables(&view, &mut prefix, &mut suffix).expect("they fit");
    assert_eq!(prefix, [1, 2, -1, -1, 7, -1, 77]);
    assert_eq!(suffix, [3, 4, 5, -1, 6, -1, 8, 9, 77]);
    let short = cascade.write_tables(&view, &mut prefix[..5], &mut suffix);
    assert_eq!(short.expect_err("short").to_string(), "prefix table: expected 6 entries, got 5");
    let narrow = View::contiguous("block_table", &table[..12], &[4, 3]).expect("fits");
    assert!(cascade.write_tables(&narrow, &mut prefix, &mut suffix).is_err());
}

/// What the views name, by the table that holds its own indices.
fn named(view: &Strided) -> Vec<Vec<usize>> {
    let &[rows, width] = view.shape() else { panic!("rank 2") };
    let row = |r| (0..width).map(|c| view.index(&[r, c]).expect("inside")).collect();
    (0..rows).map(row).collect()
}

#[test]
fn cascade_views_one_table_where_distances_are_even() {
    let table = Strided::contiguous("block_table", &[4, 3]).expect("small");
    let views = |q: &[usize], prefixes: &[SharedPrefix], most| {
        let p = problem(q, &[12; 4], |_| ());
        let cascade = Cascade::new(&p, prefixes, most).expect("valid");
        let (prefix, suffix) = cascade.table_views(&table)?;
        Ok::<_, Error>((named(&prefix), named(&suffix)))
    };
    let suffix = vec![vec![1, 2], vec![4, 5], vec![7, 8], vec![10, 11]];
    let one = views(&[1; 4], &[shared(0..4, 4)], None).expect("one part");
    assert_eq!(one, (vec![vec![0, 1, 2]], suffix.clone()));
    // Several parts of one group may all take the same row.
    let cut = views(&[1; 4], &[shared(0..4, 4)], Some(2)).expect("two parts");
    assert_eq!(cut.0, [vec![0, 1, 2], vec![0, 1, 2]]);
    let two = views(&[1; 4], &[shared(0..2, 4), shared(2..4, 4)], None).expect("even groups");
    assert_eq!(two, (vec![vec![0, 1, 2], vec![6, 7, 8]], suffix));
    let apart = views(&[1; 4], &[shared(0..2, 4)], None).expect_err("some skip nothing");
    assert!(apart.to_string().contains("skip 1 and 0 pages"), "{apart}");
    let uneven = views(&[1; 4], &[shared(0..1, 4), shared(1..2, 4), shared(2..4, 4)], None);
    assert_eq!(uneven.expect("0, 1 and 2").0[2], [6, 7, 8]);
    let uneven =
        views(&[1, 2, 2, 1], &[shared(0..1, 4), shared(1..3, 4), shared(3..4, 4)], Some(2));
    assert_eq!(uneven.expect("a part a sequence").0[3], [9, 10, 11]);
    let uneven = views(&[1; 4], &[shared(0..1, 4), shared(1..3, 4), shared(3..4, 4)], None);
    assert!(uneven.expect_err("0, 1 or 2, 3").to_string().contains("no even distance"));
}

#[test]
fn cascade_plan_takes_the_plans_of_its_calls() {
    use crate::kernel::{Engine, Family};
    use crate::plan::{Split, Tile};
    use crate::units::Bytes;

    let p = problem(&[1; 2], &[12; 2], |_| ());
    let cascade = Cascade::new(&p, &[shared(0..2, 8)], None).expect("valid");
    let plan = |problem: &Problem, engine| Plan {
        problem: problem.clone(),
        kernel: "made_up",
        engine,
        family: Family::Decode,
        tile: Tile { q: 16, kv: 16 },
        split: Split::Whole,
        workspace: Bytes::ZERO,
        shared_memory: Bytes::ZERO,
        reason: "a test",
        rejects: Vec::new(),
    };
    let (prefix, suffix) = (cascade.prefix().clone(), cascade.suffix().clone());
    let join = |a, b| CascadePlan::new(cascade.clone(), a, b);
    let cpu = Engine::Cpu;
    assert!(join(plan(&prefix, cpu), plan(&suffix, cpu)).is_ok());
    let turned = join(plan(&suffix, cpu), plan(&prefix, cpu)).expect_err("turned");
    assert!(turned.to_string().starts_with("prefix plan: expected"), "{turned}");
    assert!(join(plan(&prefix, cpu), plan(&suffix, Engine::Cuda)).is_err());
}
