//! Whether a batch whose sequences share prefixes runs as a cascade, and how.
//!
//! The invariant: pure, like [`crate::choose`], whose plans the two calls get. Whether it pays is one function of plain
//! numbers, [`cascade_pays`], and its constants stand beside their reasons; nothing else decides.
//!
//! Source: Juravsky et al., "Hydragen", arXiv:2402.05099; Ye et al., `FlashInfer`, arXiv:2501.01005.

use std::fmt;

use attn_core::{
    Bytes, Cascade, CascadePlan, DeviceCaps, Engine, Family, KernelDesc, Plan, Problem,
    ProblemSpec, SharedPrefix, Split, ValueStorage,
};

use crate::choose::choose;
use crate::error::Error;
use crate::explain::explain;
use crate::heuristics;

/// Bytes of keys and values that a device must be spared the reading of.
///
/// A second attention and a merge take some 10 us of a step, each of them being a launch that reads little. On an H200 two
/// sequences on a prefix of 8k tokens, which saves 32 MiB, took 19.1 us and 17.0 without, four, which saves 96, 21.2 and 22.4
/// (`benches/record/nvidia-h200/cascade-2026-11-30.jsonl`).
pub const DEVICE_LEAST: Bytes = Bytes(64 << 20);

/// The same of a host, where what is added are two passes over the outputs. Not measured.
pub const HOST_LEAST: Bytes = Bytes(1 << 20);

/// Bytes of shared keys and values up to which a device finds them in its second-level cache when the next sequence of a
/// group reads them: half of an H200's 50 MB, for each half of that cache keeps a copy of what its side reads.
pub const CACHED_MOST: Bytes = Bytes(24 << 20);

/// How much less the reading of a byte that is found in the cache costs than one of memory: on a prefix of 1k tokens, 4 MiB, 32
/// sequences, which saves 120 MiB, still lost a tenth, and 64 won a third (the same record).
pub const CACHED_RATE: u64 = 2;

/// Most parts of rows that share nothing: each is a row of the prefix call's block table, as long as the longest prefix, and a unit
/// of no work.
const MOST_ALONE: usize = 256;

/// Query rows, times the heads of a group, of the largest tile that a decode kernel reads keys once for.
const TILE_ROWS: usize = 128;

/// What a batch reads of its shared prefixes, for one step of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PrefixReads {
    /// Bytes of all shared keys and values, once.
    pub once: Bytes,
    /// Bytes that the sequences read one by one.
    pub plain: Bytes,
    /// Bytes that the prefix call reads.
    pub cascade: Bytes,
}

/// Bytes that must be saved, and whether they are: the crossover of a cascade.
///
/// A cascade pays where the reading that it saves takes longer than what it adds, a call and a merge, whose time does not
/// depend on the lengths. Reading is weighed as of memory, or, where all shared prefixes stay in the device's cache between two
/// sequences, at [`CACHED_RATE`] of it. Products are not counted: there are as many either way, and a tile of many rows
/// makes them no slower.
#[must_use]
pub fn cascade_pays(reads: PrefixReads, engine: Engine) -> (Bytes, bool) {
    let saved = reads.plain.0.saturating_sub(reads.cascade.0);
    let least = match engine {
        Engine::Cuda if reads.once <= CACHED_MOST => DEVICE_LEAST.0 * CACHED_RATE,
        Engine::Cuda => DEVICE_LEAST.0,
        Engine::Cpu => HOST_LEAST.0,
    };
    (Bytes(least), saved >= least)
}

/// How a batch with shared prefixes runs.
#[derive(Debug, Clone, PartialEq)]
pub enum CascadeChoice {
    /// As a call over the prefixes, a call over the rest, and a merge.
    Cascade {
        /// Both calls.
        plan: CascadePlan,
        /// What it was weighed by.
        reads: PrefixReads,
        /// Bytes that had to be saved.
        least: Bytes,
    },
    /// As one call, with the reason.
    Plain {
        /// The call.
        plan: Plan,
        /// Why it is no cascade.
        why: NoCascade,
    },
}

/// Why a batch with shared prefixes runs as one call.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum NoCascade {
    /// Two calls and a merge do not compute the problem.
    Unsupported(attn_core::Error),
    /// No two sequences share anything.
    NothingShared,
    /// A part of a prefix has no more rows than a sequence.
    NothingSaved {
        /// Query rows of a part.
        rows: usize,
    },
    /// Query rows that share nothing, which the prefix call has in parts without keys, are too many.
    MostlyAlone {
        /// These rows.
        rows: usize,
    },
    /// The two calls are planned for two engines.
    TwoEngines,
    /// Too little reading is saved.
    Slower {
        /// What it was weighed by.
        reads: PrefixReads,
        /// Bytes that would have to be saved.
        least: Bytes,
    },
    /// No kernel takes one of the two calls.
    NoKernel(Error),
}

impl fmt::Display for NoCascade {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unsupported(error) => write!(f, "{error}"),
            Self::NothingShared => f.write_str("no two sequences share whole pages"),
            Self::MostlyAlone { rows } => {
                write!(f, "{rows} query rows share nothing, and a prefix call has a place for each")
            }
            Self::TwoEngines => f.write_str("no one engine takes both calls"),
            Self::NothingSaved { rows } => write!(
                f,
                "the prefixes would be read in parts of {rows} query rows, as often as there are sequences"
            ),
            Self::Slower { reads, least } => write!(
                f,
                "the shared prefixes are {} in place of {} to read, and a second call and a merge pay from {least} saved",
                reads.cascade, reads.plain
            ),
            Self::NoKernel(error) => write!(f, "{error}"),
        }
    }
}

/// Decides whether a batch runs as a cascade over shared prefixes, and plans it either way.
///
/// `prefixes` are groups of neighbours as [`Cascade::new`] takes them. Groups that save nothing are left out: those of one
/// sequence, and those with no more sequences than the prefix call has parts for them. Rows of a prefix are
/// one sequence of a prefill kernel where they fill the device, and else parts of few enough rows for a decode kernel,
/// which divides the keys among blocks.
///
/// # Errors
/// [`attn_core::Error::Invalid`] for prefixes that [`Cascade::new`] finds invalid; [`attn_core::Error::Unsupported`] when no
/// kernel takes the whole call, with all their reasons.
pub fn choose_cascade(
    problem: &Problem,
    prefixes: &[SharedPrefix],
    caps: &DeviceCaps,
    catalogue: &[KernelDesc],
) -> Result<CascadeChoice, attn_core::Error> {
    let plain = |why| {
        let plan = choose(problem, caps, catalogue)?;
        Ok(CascadeChoice::Plain { plan, why })
    };
    // What was given is looked at, groups that save nothing too.
    if !prefixes.is_empty()
        && let Err(error @ attn_core::Error::Invalid { .. }) = Cascade::new(problem, prefixes, None)
    {
        return Err(error);
    }
    let shared: Vec<SharedPrefix> =
        prefixes.iter().filter(|prefix| prefix.sequences.len() > 1).cloned().collect();
    if shared.is_empty() {
        return plain(NoCascade::NothingShared);
    }
    let (plan, reads) = match plan_cascade(problem, &shared, caps, catalogue) {
        Ok(Ok(planned)) => planned,
        Ok(Err(why)) => return plain(why),
        Err(error @ attn_core::Error::Unsupported { .. }) => {
            return plain(NoCascade::Unsupported(error));
        }
        Err(error) => return Err(error),
    };
    let (least, pays) = cascade_pays(reads, plan.prefix().engine);
    if !pays {
        return plain(NoCascade::Slower { reads, least });
    }
    Ok(CascadeChoice::Cascade { plan, reads, least })
}

/// The plans of a cascade, whether it pays or not, and what it is weighed by; or why there is none.
///
/// As [`choose_cascade`] makes them, for callers that measure.
///
/// # Errors
/// As [`Cascade::new`].
pub fn plan_cascade(
    problem: &Problem,
    prefixes: &[SharedPrefix],
    caps: &DeviceCaps,
    catalogue: &[KernelDesc],
) -> Result<Result<(CascadePlan, PrefixReads), NoCascade>, attn_core::Error> {
    let whole = Cascade::new(problem, prefixes, None)?;
    let rows = part_rows(&whole, caps, catalogue);
    let members = |prefix: &SharedPrefix| rows_of(problem, prefix).0;
    let parts = |prefix: &SharedPrefix| {
        rows.map_or(1, |most| rows_of(problem, prefix).1.div_ceil(most.max(1)))
    };
    let shared: Vec<SharedPrefix> =
        prefixes.iter().filter(|prefix| members(prefix) > parts(prefix)).cloned().collect();
    if shared.is_empty() {
        let why = |rows| NoCascade::NothingSaved { rows };
        return Ok(Err(rows.map_or(NoCascade::NothingShared, why)));
    }
    let together: usize = shared.iter().map(|prefix| rows_of(problem, prefix).1).sum();
    let alone = problem.lengths().total_q() - together;
    if rows.is_some_and(|most| alone / most.max(1) > MOST_ALONE) {
        return Ok(Err(NoCascade::MostlyAlone { rows: alone }));
    }
    let cascade = Cascade::new(problem, &shared, rows)?;
    let count = |times: &dyn Fn(&SharedPrefix) -> usize| {
        let tokens = shared.iter().map(|prefix| prefix.tokens.saturating_mul(times(prefix)));
        let tokens = tokens.fold(0, usize::saturating_add);
        Bytes::of(tokens, token_bytes(problem))
    };
    let reads = PrefixReads { once: count(&|_| 1), plain: count(&members), cascade: count(&parts) };
    let planned = choose(cascade.prefix(), caps, catalogue)
        .and_then(|prefix| Ok((prefix, choose(cascade.suffix(), caps, catalogue)?)));
    match planned {
        Err(error) => Ok(Err(NoCascade::NoKernel(error))),
        Ok((prefix, suffix)) if prefix.engine != suffix.engine => Ok(Err(NoCascade::TwoEngines)),
        Ok((prefix, suffix)) => {
            let plan = CascadePlan::new(cascade, prefix, suffix)?;
            Ok(Ok((plan, reads)))
        }
    }
}

/// Most query rows of a part of a prefix: none where a prefill kernel's tiles of the prefixes fill the machine, else as
/// many as a decode kernel takes and one of its tiles holds.
fn part_rows(whole: &Cascade, caps: &DeviceCaps, catalogue: &[KernelDesc]) -> Option<usize> {
    // Rows that share nothing are in parts without keys, and no work.
    let shared = whole.parts().iter().filter(|part| part.tokens > 0);
    let (q_lens, kv_lens) = shared.map(|part| (part.rows.len(), part.tokens)).unzip();
    let spec = ProblemSpec { q_lens, kv_lens, ..whole.prefix().spec().clone() };
    let problem = &Problem::new(spec).ok()?;
    let engine = catalogue.first().map_or(Engine::Cpu, |kernel| kernel.engine);
    // A kernel that divides the keys of any number of rows needs no parts.
    if choose(problem, caps, catalogue).is_ok_and(|plan| divides_any_rows(&plan, catalogue)) {
        return None;
    }
    let is_decode = match (engine, &caps.cuda) {
        (Engine::Cuda, Some(device)) => heuristics::is_device_decode_shaped(problem, device),
        _ => heuristics::is_decode_shaped(problem, &caps.host),
    };
    if !is_decode {
        return None;
    }
    let decodes = catalogue.iter().filter(|kernel| kernel.family == Family::Decode);
    let most = decodes.filter_map(|kernel| kernel.max_query_rows).max()?;
    Some((TILE_ROWS / problem.group().max(1)).clamp(1, most.max(1)))
}

fn divides_any_rows(plan: &Plan, catalogue: &[KernelDesc]) -> bool {
    if plan.family == Family::Prefill {
        return plan.split != Split::Whole;
    }
    let kernel = catalogue.iter().find(|kernel| kernel.name == plan.kernel);
    kernel.is_some_and(|kernel| kernel.family == Family::Decode && kernel.max_query_rows.is_none())
}

/// Sequences of a group that have query rows, and these rows.
fn rows_of(problem: &Problem, prefix: &SharedPrefix) -> (usize, usize) {
    let lengths = problem.lengths();
    let rows =
        prefix.sequences.clone().map(|sequence| lengths.q(sequence)).filter(|&rows| rows > 0);
    rows.fold((0, 0), |(sequences, sum), rows| (sequences + 1, sum + rows))
}

/// Bytes of a token's keys and values, of all heads.
fn token_bytes(problem: &Problem) -> usize {
    let values = match problem.cache_layout().map(attn_core::CacheLayout::value) {
        // Values are read as part of the keys.
        Some(ValueStorage::PrefixOfKey(_)) => 0,
        _ => problem.value_dim(),
    };
    let elements = problem.head_dim().saturating_add(values).saturating_mul(problem.kv_heads());
    elements.saturating_mul(problem.kv_dtype().size())
}

/// A choice in words: what was weighed, and the plan of each call with every kernel that was not taken.
#[must_use]
pub const fn explain_cascade(choice: &CascadeChoice) -> CascadeExplanation<'_> {
    CascadeExplanation { choice }
}

/// The text of [`explain_cascade`].
#[derive(Debug, Clone, Copy)]
pub struct CascadeExplanation<'a> {
    choice: &'a CascadeChoice,
}

impl fmt::Display for CascadeExplanation<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.choice {
            CascadeChoice::Plain { plan, why } => {
                write!(f, "no cascade: {why}\n{}", explain(plan))
            }
            CascadeChoice::Cascade { plan, reads, least } => {
                let cascade = plan.cascade();
                let sequences: usize =
                    cascade.prefixes().iter().map(|prefix| prefix.sequences.len()).sum();
                writeln!(
                    f,
                    "cascade: {} prefixes of up to {} tokens, shared by {sequences} of {} sequences, in {} parts of up \
                     to {} rows; {} to read in place of {}, which pays from {least} saved",
                    cascade.prefixes().len(),
                    cascade.prefix().lengths().longest_kv(),
                    cascade.problem().lengths().batch(),
                    cascade.parts().iter().filter(|part| part.tokens > 0).count(),
                    cascade.prefix().lengths().longest_q(),
                    reads.cascade,
                    reads.plain,
                )?;
                writeln!(f, "prefix: {}", explain(plan.prefix()))?;
                write!(f, "suffix: {}", explain(plan.suffix()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use attn_core::{
        CacheLayout, CudaCaps, DType, DimRule, Features, HostCaps, KvStorage, PageOrder, Split,
        Tile,
    };

    use super::*;

    const fn kernel(name: &'static str, family: Family, rows: Option<usize>) -> KernelDesc {
        KernelDesc {
            name,
            engine: Engine::Cuda,
            family,
            q_dtypes: &DType::ALL,
            kv_dtypes: &DType::ALL,
            head_dims: DimRule::ANY,
            value_dims: DimRule::ANY,
            max_query_rows: rows,
            most_units: None,
            divides_keys: false,
            features: Features::ALL,
            requires: Features::NONE,
            min_compute: None,
            max_compute: None,
            tiles: |_| &[Tile { q: 16, kv: 64 }],
            shared_memory: |_, _| Bytes(1 << 10),
            workspace: |_, _, _, _| Bytes::ZERO,
        }
    }

    const CATALOGUE: [KernelDesc; 2] =
        [kernel("few", Family::Decode, Some(16)), kernel("many", Family::Prefill, None)];

    fn caps() -> DeviceCaps {
        let device = CudaCaps {
            name: String::new(),
            compute: (9, 0),
            sm_count: 132,
            smem_per_block: Bytes(227 << 10),
            memory: Bytes(1 << 37),
        };
        DeviceCaps { host: HostCaps::default(), cuda: Some(device) }
    }

    /// One row a sequence, 8 KV heads of 128 in bf16: 4 KiB a token.
    fn problem(kv: &[usize], group: usize, edit: impl FnOnce(&mut ProblemSpec)) -> Problem {
        let mut spec = ProblemSpec::new(DType::BF16, 8 * group, 8, 128, &vec![1; kv.len()], kv);
        let value = ValueStorage::Separate(128);
        let layout = CacheLayout::contiguous(DType::BF16, PageOrder::Nhd, 16, 8, 128, value);
        (spec.causal, spec.kv) = (true, KvStorage::Paged(layout.expect("valid")));
        edit(&mut spec);
        Problem::new(spec).expect("valid")
    }

    fn choice(problem: &Problem, prefixes: &[(usize, usize, usize)]) -> CascadeChoice {
        let prefixes: Vec<_> = prefixes
            .iter()
            .map(|&(start, end, tokens)| SharedPrefix { sequences: start..end, tokens })
            .collect();
        choose_cascade(problem, &prefixes, &caps(), &CATALOGUE).expect("planned")
    }

    #[test]
    fn prefix_rows_stay_whole_under_a_kernel_that_divides_their_keys() {
        let [few, many] = CATALOGUE;
        let tiles: attn_core::Tiles = |_| &[Tile { q: 128, kv: 128 }];
        let catalogue = [few, KernelDesc { divides_keys: true, tiles, ..many }];
        let sixteen = problem(&[8200; 16], 4, |_| ());
        let prefixes = [SharedPrefix { sequences: 0..16, tokens: 8192 }];
        let choice = choose_cascade(&sixteen, &prefixes, &caps(), &catalogue).expect("planned");
        let CascadeChoice::Cascade { plan, .. } = choice else {
            panic!("it saves 15 readings of 32 MiB");
        };
        assert_eq!((plan.prefix().kernel, plan.cascade().parts().len()), ("many", 1));
        assert_eq!(plan.prefix().split, Split::Chunks(512));
    }

    #[test]
    fn cascade_pays_from_the_bytes_of_its_overhead_on() {
        let mib = |n: u64| Bytes(n << 20);
        let reads = |once, plain, cascade| PrefixReads {
            once: mib(once),
            plain: mib(plain),
            cascade: mib(cascade),
        };
        let pays = |reads| cascade_pays(reads, Engine::Cuda);
        // Past the device's cache by its rate of memory, inside it by that of the cache.
        assert_eq!(pays(reads(32, 96, 32)), (mib(64), true));
        assert_eq!(pays(reads(32, 95, 32)), (mib(64), false));
        assert_eq!(pays(reads(4, 128, 4)), (mib(128), false));
        assert_eq!(pays(reads(4, 132, 4)), (mib(128), true));
        assert_eq!(cascade_pays(reads(1, 2, 1), Engine::Cpu), (mib(1), true));
    }

    #[test]
    fn groups_are_checked_before_any_is_left_out() {
        let four = problem(&[40_000; 4], 4, |_| ());
        for wrong in [(1, 2, 16), (3, 4, 7), (90, 91, 16), (2, 3, 16)] {
            let prefixes = [(0, 3, 32_768), wrong]
                .map(|(start, end, tokens)| SharedPrefix { sequences: start..end, tokens });
            let error = choose_cascade(&four, &prefixes, &caps(), &CATALOGUE).expect_err("wrong");
            assert!(matches!(error, attn_core::Error::Invalid { .. }), "{wrong:?}: {error}");
        }
    }

    #[test]
    fn a_long_prompt_beside_a_group_makes_no_parts_of_its_own() {
        let mut lens = vec![40_000; 8];
        lens.push(100_000);
        let p = problem(&lens, 4, |spec| {
            spec.q_lens = vec![1; 8];
            spec.q_lens.push(100_000);
        });
        let plain = choice(&p, &[(0, 8, 32_768)]);
        assert!(
            matches!(plain, CascadeChoice::Plain { why: NoCascade::MostlyAlone { .. }, .. }),
            "{plain:?}"
        );
    }

    #[test]
    fn cascade_is_chosen_where_many_share_much() {
        let many = problem(&[8200; 16], 4, |_| ());
        let CascadeChoice::Cascade { plan, reads, .. } = choice(&many, &[(0, 16, 8192)]) else {
            panic!("it saves 15 readings of 32 MiB");
        };
        assert_eq!(
            (reads.once, reads.plain, reads.cascade),
            (Bytes(32 << 20), Bytes(512 << 20), Bytes(32 << 20))
        );
        assert_eq!((plan.prefix().kernel, plan.suffix().kernel), ("few", "few"));
        let few = problem(&[1040; 2], 4, |_| ());
        let plain = choice(&few, &[(0, 2, 1024)]);
        assert!(
            matches!(plain, CascadeChoice::Plain { why: NoCascade::Slower { .. }, .. }),
            "{plain:?}"
        );
    }

    #[test]
    fn prefix_rows_are_cut_where_they_leave_the_device_idle() {
        let parts = |batch: usize, group| {
            let p = problem(&vec![8200; batch], group, |_| ());
            match choice(&p, &[(0, batch, 8192)]) {
                CascadeChoice::Cascade { plan, .. } => {
                    (plan.cascade().parts().len(), plan.prefix().kernel)
                }
                CascadeChoice::Plain { why, .. } => panic!("{why}"),
            }
        };
        assert_eq!(parts(64, 4), (4, "few"));
        assert_eq!(parts(64, 16), (8, "few"));
        // Whoever shares nothing has no say in it.
        let p = problem(&[8200; 616], 4, |_| ());
        let CascadeChoice::Cascade { plan, .. } = choice(&p, &[(300, 316, 8192)]) else {
            panic!("it saves 15 readings of 32 MiB");
        };
        assert_eq!(plan.prefix().kernel, "few");
        // 4096 rows of tiles fill it.
        assert_eq!(parts(1024, 4), (1, "many"));
    }

    #[test]
    fn groups_that_save_nothing_are_left_out() {
        let p = problem(&[40_000; 4], 4, |_| ());
        let CascadeChoice::Cascade { plan, .. } = choice(&p, &[(0, 3, 32_768), (3, 4, 16)]) else {
            panic!("it saves two readings of 128 MiB");
        };
        assert_eq!(plan.cascade().prefixes().len(), 1);
        let alone = choice(&p, &[(1, 2, 16)]);
        assert!(matches!(alone, CascadeChoice::Plain { why: NoCascade::NothingShared, .. }));
        let nothing = choice(&p, &[]);
        assert!(matches!(nothing, CascadeChoice::Plain { why: NoCascade::NothingShared, .. }));
        for wrong in [&[(1, 9)][..], &[(0, 2), (1, 3)], &[(7, 8)]] {
            let shared = |&(start, end)| SharedPrefix { sequences: start..end, tokens: 16 };
            let prefixes: Vec<_> = wrong.iter().map(shared).collect();
            let error = choose_cascade(&p, &prefixes, &caps(), &CATALOGUE).expect_err("invalid");
            assert!(matches!(error, attn_core::Error::Invalid { .. }), "{error}");
        }
    }

    #[test]
    fn choice_says_why() {
        let p = problem(&[40_000; 4], 4, |spec| spec.alibi = true);
        let text = explain_cascade(&choice(&p, &[(0, 4, 32_768)])).to_string();
        assert!(text.starts_with("no cascade: a cascade is not supported: ALiBi"), "{text}");
        assert!(text.contains("few (cuda, decode)"), "{text}");
        let p = problem(&[40_000; 4], 4, |_| ());
        let text = explain_cascade(&choice(&p, &[(0, 4, 32_768)])).to_string();
        assert!(
            text.starts_with("cascade: 1 prefixes of up to 32768 tokens, shared by 4 of 4"),
            "{text}"
        );
        assert!(text.contains("\nprefix: few (cuda") && text.contains("\nsuffix: "), "{text}");
        let p = problem(&[40; 4], 4, |_| ());
        let text = explain_cascade(&choice(&p, &[(0, 4, 16)])).to_string();
        assert!(text.contains("pay from 128.0 MiB saved"), "{text}");
    }
}
