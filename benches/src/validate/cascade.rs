//! Cascades over shared prefixes: batches, ways to run them, and the host's engine on them.
//!
//! The invariant: what an output must be is the whole call's f64 reference over every sequence's own tokens, which knows of no
//! cascade; sequences of different groups hold different pages, so that a wrong row of a table shows.

use attn_core::{
    Cascade, CascadePlan, DType, DeviceCaps, Inputs, KernelDesc, KvView, Outputs, PageOrder, Phase,
    Problem, SharedPrefix, View,
};
use attn_kernels::cpu::{CascadeTables, CascadeWorkspace, CpuEngine};
use attn_reference::case::Scales;
use attn_reference::{Case, CaseData, Pattern, judge_forward};

use super::corpus::forward_share;
use super::record::Tallies;

/// Tokens of a prefix of every page size.
const PREFIX: usize = 192;

/// A batch and what its sequences share.
#[derive(Debug, Clone)]
pub(super) struct Batch {
    pub(super) case: Case,
    pub(super) prefixes: Vec<SharedPrefix>,
}

/// How a batch runs: options of its problem, and how its prefix rows are cut.
#[derive(Debug, Clone, Copy)]
pub(super) struct Way {
    pub(super) label: &'static str,
    most_rows: Option<usize>,
    phase: Option<Phase>,
    splits: Option<usize>,
    /// The one kernel that is not switched off.
    only: Option<&'static str>,
}

impl Way {
    const CHOSEN: Self =
        Self { label: "chosen", most_rows: None, phase: None, splits: None, only: None };

    /// Every way; those of kernels that an engine does not have are refused by selection.
    pub(super) const ALL: [Self; 7] = [
        Self::CHOSEN,
        Self { label: "chosen in parts of 16", most_rows: Some(16), ..Self::CHOSEN },
        Self { label: "chosen in parts of 3", most_rows: Some(3), ..Self::CHOSEN },
        Self { label: "prefill", phase: Some(Phase::Prefill), ..Self::CHOSEN },
        Self {
            label: "decode in parts of 16",
            most_rows: Some(16),
            phase: Some(Phase::Decode),
            ..Self::CHOSEN
        },
        Self {
            label: "decode in parts of 5, keys in 3",
            most_rows: Some(5),
            phase: Some(Phase::Decode),
            splits: Some(3),
            only: None,
        },
        Self { label: "naive", only: Some("cuda_naive"), ..Self::CHOSEN },
    ];

    /// The plans of a batch's two calls, or `None` where selection refuses one of them.
    ///
    /// # Errors
    /// A batch that is no cascade.
    pub(super) fn plan(
        &self,
        problem: &Problem,
        prefixes: &[SharedPrefix],
        caps: &DeviceCaps,
        catalogue: &[KernelDesc],
    ) -> Result<Option<CascadePlan>, attn_core::Error> {
        let mut spec = problem.spec().clone();
        (spec.options.phase, spec.options.num_splits) = (self.phase, self.splits);
        if let Some(only) = self.only {
            let others = catalogue.iter().map(|kernel| kernel.name).filter(|&name| name != only);
            spec.options.disabled_kernels = others.map(str::to_owned).collect();
        }
        let cascade = Cascade::new(&Problem::new(spec)?, prefixes, self.most_rows)?;
        let choose = |problem| attn_select::choose(problem, caps, catalogue).ok();
        let plans = choose(cascade.prefix()).zip(choose(cascade.suffix()));
        plans.map(|(prefix, suffix)| CascadePlan::new(cascade, prefix, suffix)).transpose()
    }
}

/// The tables of a cascade's two calls, on the host.
#[derive(Debug)]
pub(super) struct HostTables {
    pub(super) prefix: Vec<i32>,
    pub(super) suffix: Vec<i32>,
}

impl HostTables {
    /// From the block table of the whole call.
    ///
    /// # Errors
    /// A table that does not fit.
    pub(super) fn new(cascade: &Cascade, inputs: &Inputs<'_>) -> Result<Self, attn_core::Error> {
        let KvView::Paged { block_table, .. } = &inputs.kv else {
            return Err(attn_core::Error::invalid("kv", "a paged cache", "dense keys and values"));
        };
        // What is not written would be followed.
        let mut prefix = vec![i32::MAX; cascade.parts().len() * cascade.prefix_width()];
        let batch = cascade.problem().lengths().batch();
        let mut suffix = vec![i32::MAX; batch * cascade.suffix_width()];
        cascade.write_tables(block_table, &mut prefix, &mut suffix)?;
        Ok(Self { prefix, suffix })
    }

    /// Shapes of the two.
    pub(super) fn shapes(cascade: &Cascade) -> [[usize; 2]; 2] {
        let batch = cascade.problem().lengths().batch();
        [[cascade.parts().len(), cascade.prefix_width()], [batch, cascade.suffix_width()]]
    }
}

/// Whether the two calls can read views of the whole call's table.
pub(super) fn has_views(cascade: &Cascade, inputs: &Inputs<'_>) -> bool {
    match &inputs.kv {
        KvView::Paged { block_table, .. } => cascade.table_views(block_table.layout()).is_ok(),
        KvView::Dense { .. } => false,
    }
}

fn shared(sequences: std::ops::Range<usize>, tokens: usize) -> SharedPrefix {
    SharedPrefix { sequences, tokens }
}

/// Lengths and groups of a batch.
struct Shape {
    name: &'static str,
    q: Vec<usize>,
    kv: Vec<usize>,
    /// How many neighbours hold the same pages; 0 is all.
    sharers: usize,
    prefixes: Vec<SharedPrefix>,
}

impl Shape {
    /// One prefix of all, and suffixes of one token and more.
    fn one() -> Self {
        let kv = [1, 5, 64, 100, 33, 2].map(|n| PREFIX + n).to_vec();
        Self { name: "one", q: vec![1; 6], kv, sharers: 0, prefixes: vec![shared(0..6, PREFIX)] }
    }

    /// Several groups, one of them of one sequence, between sequences that share nothing; one to four rows each.
    fn groups(page: usize) -> Self {
        let kv = [30, 4, 7, 90, 1, 50, 65, 3, 40, 20, 4].map(|n| PREFIX + n);
        Self {
            name: "groups",
            q: vec![1, 4, 2, 3, 1, 1, 1, 1, 2, 1, 4],
            kv: kv.to_vec(),
            sharers: 4,
            prefixes: vec![
                shared(0..3, PREFIX),
                shared(4..5, 64),
                shared(5..8, 128),
                shared(9..11, page),
            ],
        }
    }

    /// A prefix of one page.
    fn page(page: usize) -> Self {
        let kv = [1, 2, 17, 64, 130].map(|n| page + n).to_vec();
        Self { name: "page", q: vec![1; 5], kv, sharers: 0, prefixes: vec![shared(0..5, page)] }
    }

    /// Suffixes of one token, in two groups of equal sizes: tables are views.
    fn last() -> Self {
        let prefixes = vec![shared(0..4, PREFIX), shared(4..8, PREFIX)];
        Self { name: "last", q: vec![1; 8], kv: vec![PREFIX + 1; 8], sharers: 4, prefixes }
    }

    /// Four rows a sequence, whose own keys are all of the first suffix.
    fn rows() -> Self {
        let kv = [4, 5, 40, 69].map(|n| PREFIX + n).to_vec();
        Self { name: "rows", q: vec![4; 4], kv, sharers: 0, prefixes: vec![shared(0..4, PREFIX)] }
    }

    fn all(page: usize) -> [Self; 5] {
        [Self::one(), Self::groups(page), Self::page(page), Self::last(), Self::rows()]
    }

    fn batch(&self, title: &str, dtype: DType, heads: (usize, usize), dim: usize) -> Batch {
        let name = format!("cascade/{title}_{}", self.name);
        let case = Case::new(name, dtype, heads, dim, &self.q, &self.kv).causal();
        Batch { case, prefixes: self.prefixes.clone() }
    }

    fn in_pages(&self, batch: Batch, order: PageOrder, size: usize) -> Batch {
        let pages = self.prefixes.iter().map(|prefix| prefix.tokens / size).max().unwrap_or(0);
        let case = batch.case.paged(order, size).shared_pages(pages).sharers(self.sharers);
        Batch { case, ..batch }
    }
}

/// Batches that are judged.
pub(super) fn batches(is_small: bool) -> Vec<Batch> {
    let mut batches = Vec::new();
    for dtype in [DType::BF16, DType::F16] {
        for (q, kv) in [(8, 2), (16, 1)] {
            // The other type differs in how it is rounded, not in where its pages are.
            let sizes = if dtype == DType::BF16 { &[1, 16, 64][..] } else { &[16] };
            for &size in sizes {
                let order = if q == 8 { PageOrder::Nhd } else { PageOrder::Hnd };
                for shape in Shape::all(size) {
                    let title = format!("{dtype}_{q}.{kv}.128_{order}{size}");
                    let batch = shape.batch(&title, dtype, (q, kv), 128);
                    batches.push(shape.in_pages(batch, order, size));
                }
            }
        }
    }
    if is_small {
        batches.retain(|batch| batch.case.name.contains("bf16_8.2.128_nhd16"));
        return batches;
    }
    let groups = Shape::groups(16);
    let mut more = |title: &str, dim: usize, edit: &dyn Fn(Case) -> Case| {
        let batch =
            groups.in_pages(groups.batch(title, DType::BF16, (8, 2), dim), PageOrder::Nhd, 16);
        batches.push(Batch { case: edit(batch.case), ..batch });
    };
    more("dim64", 64, &|case| case);
    more("dim80", 80, &|case| case);
    more("dim256", 256, &|case| case);
    more("value64", 128, &|case| case.value_dim(64));
    more("latent", 128, &|case| case.value_dim(64).latent());
    more("softcap", 128, &|case| case.softcap(20.0));
    more("sinks", 128, &|case| case.sinks());
    more("window", 128, &|case| case.window(Some(4000), None));
    more("scale", 128, &|case| case.scale(0.3));
    more("fp8", 128, &|case| case.fp8(DType::F8E4M3, Scales::Scalar));
    more("fp8_one", 128, &|case| case.fp8(DType::F8E5M2, Scales::One));
    for pattern in Pattern::ALL {
        more(&format!("{pattern:?}").to_lowercase(), 128, &|case| case.pattern(pattern));
    }
    // Rows of many sequences in several parts of the device's own choosing, beside sequences without a row.
    let many = Shape {
        name: "many",
        q: (0..40).map(|n| if n == 7 { 0 } else { 1 }).collect(),
        kv: (0..40).map(|n| 2048 + 1 + n * 7 % 90).collect(),
        sharers: 0,
        prefixes: vec![shared(0..38, 2048)],
    };
    let batch = many.batch("bf16_32.8.128_nhd16", DType::BF16, (32, 8), 128);
    batches.push(many.in_pages(batch, PageOrder::Nhd, 16));
    batches
}

/// Judges the CPU engine on every batch, in every way that it has.
pub(super) fn judge_cpu(engine: &CpuEngine, only: &str, tallies: &mut Tallies) {
    let mut workspace = CascadeWorkspace::new();
    let catalogue = attn_kernels::catalog_of(attn_core::Engine::Cpu);
    for Batch { case, prefixes } in batches(false) {
        if !case.name.contains(only) {
            continue;
        }
        let data = match case.build() {
            Ok(data) => data,
            Err(error) => {
                tallies.enter("cascade", &case.name, Err(format!("{}: {error}", case.name)));
                continue;
            }
        };
        for way in Way::ALL {
            let label = format!("{} by {}", case.name, way.label);
            match way.plan(data.problem(), &prefixes, &engine.caps(), catalogue) {
                Ok(Some(plan)) => {
                    for over_views in [false, true] {
                        let outcome = on_host(engine, &data, &plan, over_views, &mut workspace);
                        if let Some(outcome) = outcome.transpose() {
                            let outcome = outcome.map_err(|failure| format!("{label}: {failure}"));
                            tallies.enter("cascade", &label, outcome);
                        }
                    }
                }
                Ok(None) => tallies.skip("cascade"),
                Err(error) => tallies.enter("cascade", &label, Err(format!("{label}: {error}"))),
            }
        }
    }
}

/// How close one run came to its limit; `None` where there are no views.
fn on_host(
    engine: &CpuEngine,
    data: &CaseData,
    plan: &CascadePlan,
    over_views: bool,
    workspace: &mut CascadeWorkspace,
) -> Result<Option<f64>, String> {
    let inputs = data.inputs().map_err(|error| error.to_string())?;
    if over_views && !has_views(plan.cascade(), &inputs) {
        return Ok(None);
    }
    let mut run = |inputs: &Inputs<'_>, mut outputs: Outputs<'_>| {
        if over_views {
            return engine.cascade(plan, inputs, None, &mut outputs, workspace);
        }
        let host = HostTables::new(plan.cascade(), inputs)?;
        let [prefix, suffix] = HostTables::shapes(plan.cascade());
        let tables = CascadeTables {
            prefix: View::contiguous("prefix table", &host.prefix, &prefix)?,
            suffix: View::contiguous("suffix table", &host.suffix, &suffix)?,
        };
        engine.cascade(plan, inputs, Some(&tables), &mut outputs, workspace)
    };
    let verdict = judge_forward(data, |_, inputs, outputs| run(inputs, outputs));
    verdict.map(|verdict| Some(forward_share(&verdict))).map_err(|failure| failure.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_batch_is_a_cascade_that_several_ways_run() {
        let engine = CpuEngine::with(1, attn_kernels::cpu::Level::Portable).unwrap();
        let catalogue = attn_kernels::catalog_of(attn_core::Engine::Cpu);
        let all = batches(false);
        assert!(all.len() > 50 && !batches(true).is_empty());
        let (mut planned, mut views) = (0, 0);
        for Batch { case, prefixes } in all {
            let problem = case.problem().unwrap();
            for way in Way::ALL {
                let plan = way.plan(&problem, &prefixes, &engine.caps(), catalogue).unwrap();
                planned += usize::from(plan.is_some());
            }
            views += usize::from(case.name.ends_with("last") || case.name.ends_with("one"));
        }
        assert!(planned > 350 && views > 12, "{planned} {views}");
    }

    /// From the allocator's books to the tables of both calls.
    #[test]
    fn allocators_groups_are_a_cascade_of_their_batch() {
        use attn_core::{CacheLayout, KvStorage, ProblemSpec, ValueStorage};
        use attn_paged::{Allocator, Config, Namespace};

        let mut pool = Allocator::new(Config::new(64, 4)).unwrap();
        let mut batch = Vec::new();
        for (tokens, copies) in [(7, 3), (9, 1), (8, 2)] {
            for n in 0..copies {
                let mut prompt = vec![tokens; 13];
                prompt.extend([n; 3]);
                let seq = pool.alloc(&prompt, Namespace::DEFAULT).unwrap().seq;
                pool.commit(seq, prompt.len()).unwrap();
                batch.push(seq);
            }
        }
        let fork = pool.fork(batch[5]).unwrap();
        pool.append(fork, &[1, 2]).unwrap();
        batch.push(fork);
        let q_lens = [1, 1, 2, 1, 1, 1, 1];
        let prefixes = pool.shared_prefixes(&batch, &q_lens).unwrap();
        assert_eq!(prefixes, [shared(0..3, 12), shared(4..7, 12)]);

        let kv_lens: Vec<_> = batch.iter().map(|&seq| pool.len(seq).unwrap()).collect();
        let mut spec = ProblemSpec::new(DType::BF16, 4, 2, 64, &q_lens, &kv_lens);
        let value = ValueStorage::Separate(64);
        let layout = CacheLayout::contiguous(DType::BF16, PageOrder::Nhd, 4, 2, 64, value).unwrap();
        (spec.causal, spec.kv) = (true, KvStorage::Paged(layout));
        let cascade = Cascade::new(&Problem::new(spec).unwrap(), &prefixes, None).unwrap();
        let mut whole = [0; 7 * 5];
        pool.write_padded_table(&batch, 5, &mut whole).unwrap();
        let view = View::contiguous("block_table", &whole, &[7, 5]).unwrap();
        let [(parts, wide), (rows, narrow)] =
            HostTables::shapes(&cascade).map(|[rows, width]| (rows, width));
        let (mut prefix, mut suffix) = (vec![0; parts * wide], vec![0; rows * narrow]);
        cascade.write_tables(&view, &mut prefix, &mut suffix).unwrap();
        let blocks = |n: usize| pool.blocks(batch[n]).unwrap();
        let same = |table: &[i32], blocks: &[u32]| {
            table.iter().zip(blocks).all(|(&entry, &block)| u32::try_from(entry) == Ok(block))
        };
        // Three sequences, one that shares nothing, three more.
        assert_eq!((parts, wide, narrow), (3, 3, 4));
        assert!(same(&prefix[..3], &blocks(2)[..3]) && same(&prefix[6..], &blocks(6)[..3]));
        assert!(same(&suffix[2 * 4..], &blocks(2)[3..]) && same(&suffix[3 * 4..4 * 4], blocks(3)));
        assert!(same(&suffix[6 * 4..], &blocks(6)[3..]));
    }

    #[test]
    fn host_cascade_meets_the_rule_on_a_few_batches() {
        let engine = CpuEngine::new().unwrap();
        let mut tallies = Tallies::default();
        judge_cpu(&engine, "bf16_8.2.128_nhd16_", &mut tallies);
        assert_eq!(
            (tallies.sum(|t| t.failed), tallies.unfinished),
            (0, 0),
            "{:?}",
            tallies.failures
        );
        assert!(tallies.sum(|t| t.passed) > 25);
    }
}
