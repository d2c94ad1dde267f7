//! What a kernel accepts, as data that a selector can read without the kernel.
//!
//! The invariant: a kernel states each limit once, here, and a call outside the statement is refused
//! before it reaches the kernel. What a description cannot say, a kernel may not silently lack.

use std::fmt;

use crate::caps::HostCaps;
use crate::dtype::DType;
use crate::plan::{Split, Tile};
use crate::problem::{Pass, Problem};
use crate::units::Bytes;

/// Which engine runs a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Engine {
    /// Worker threads of the host.
    Cpu,
    /// A CUDA device.
    Cuda,
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        })
    }
}

/// How a kernel divides its work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    /// Forward, divided by query blocks.
    Prefill,
    /// Forward, divided by keys and merged.
    Decode,
    /// Forward, one row at a time: the last resort of both.
    General,
    /// Gradients by recomputation.
    Backward,
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::General => "general",
            Self::Backward => "backward",
        })
    }
}

/// One thing that a problem may ask of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Feature {
    /// Causal bound.
    Causal,
    /// Window bounds other than causal.
    Window,
    /// Boolean mask.
    BooleanMask,
    /// Block mask.
    BlockMask,
    /// Additive bias.
    Bias,
    /// ALiBi slopes.
    Alibi,
    /// Soft-cap of scores.
    Softcap,
    /// Attention sinks.
    Sinks,
    /// Query heads share KV heads.
    GroupedHeads,
    /// Values of another dimension than keys.
    ValueDim,
    /// Keys and values in pages.
    Paged,
    /// Padded query side.
    PaddedQueries,
    /// Padded key side.
    PaddedKeys,
    /// Keys and values in fp8 under queries of a wider type.
    Fp8Cache,
    /// Queries in fp8, with keys and values in the same format.
    Fp8Queries,
    /// Equal bits for equal calls.
    Deterministic,
    /// Bits of a sequence independent of its batch mates.
    BatchInvariant,
    /// Gradient of the sinks.
    SinksGradient,
    /// Gradient of the bias.
    BiasGradient,
    /// Pages whose key or value rows do not all start on 16 bytes.
    UnalignedPages,
    /// Pages whose size is no multiple of 8 tokens.
    OddPages,
    /// Queries in fp8 with a head or value dimension that is no multiple of 16: rows of no whole 16 bytes.
    OddFp8Rows,
    /// Values that are the first elements of each key row.
    LatentCache,
}

impl Feature {
    /// Every feature.
    pub const ALL: [Self; 23] = [
        Self::Causal,
        Self::Window,
        Self::BooleanMask,
        Self::BlockMask,
        Self::Bias,
        Self::Alibi,
        Self::Softcap,
        Self::Sinks,
        Self::GroupedHeads,
        Self::ValueDim,
        Self::Paged,
        Self::PaddedQueries,
        Self::PaddedKeys,
        Self::Fp8Cache,
        Self::Fp8Queries,
        Self::Deterministic,
        Self::BatchInvariant,
        Self::SinksGradient,
        Self::BiasGradient,
        Self::UnalignedPages,
        Self::OddPages,
        Self::OddFp8Rows,
        Self::LatentCache,
    ];

    /// The words used in plans and in the support table.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Causal => "causal",
            Self::Window => "window",
            Self::BooleanMask => "boolean mask",
            Self::BlockMask => "block mask",
            Self::Bias => "bias",
            Self::Alibi => "ALiBi",
            Self::Softcap => "soft-cap",
            Self::Sinks => "sinks",
            Self::GroupedHeads => "grouped heads",
            Self::ValueDim => "value dim != head dim",
            Self::Paged => "paged cache",
            Self::PaddedQueries => "padded queries",
            Self::PaddedKeys => "padded keys",
            Self::Fp8Cache => "fp8 cache",
            Self::Fp8Queries => "fp8 queries",
            Self::Deterministic => "deterministic",
            Self::BatchInvariant => "batch invariant",
            Self::SinksGradient => "gradient of sinks",
            Self::BiasGradient => "gradient of bias",
            Self::UnalignedPages => "pages off 16 bytes",
            Self::OddPages => "pages of no multiple of 8 tokens",
            Self::OddFp8Rows => "fp8 queries of dims of no multiple of 16",
            Self::LatentCache => "latent cache",
        }
    }
}

impl fmt::Display for Feature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A set of [`Feature`]s.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Features(u32);

impl Features {
    /// No feature.
    pub const NONE: Self = Self(0);
    /// Every feature.
    pub const ALL: Self = Self((1 << Feature::ALL.len()) - 1);

    /// The set with `feature` added.
    #[must_use]
    pub const fn with(self, feature: Feature) -> Self {
        Self(self.0 | 1 << feature as u8)
    }

    /// The set with `feature` taken away.
    #[must_use]
    pub const fn without(self, feature: Feature) -> Self {
        Self(self.0 & !(1 << feature as u8))
    }

    /// Whether `feature` is in the set.
    #[must_use]
    pub const fn contains(self, feature: Feature) -> bool {
        self.0 & 1 << feature as u8 != 0
    }

    /// The features that `self` has and `other` lacks.
    #[must_use]
    pub const fn minus(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// The members, in declaration order.
    pub fn iter(self) -> impl Iterator<Item = Feature> {
        Feature::ALL.into_iter().filter(move |&f| self.contains(f))
    }

    /// What a problem asks for.
    #[must_use]
    pub fn required_by(problem: &Problem) -> Self {
        let spec = problem.spec();
        let band = problem.band();
        let padded = crate::shape::Arrangement::Padded;
        let has_odd_rows = [spec.head_dim, spec.value_dim].iter().any(|dim| dim % 16 != 0);
        let mut set = Self::NONE;
        for (needed, feature) in [
            (band.right == Some(0), Feature::Causal),
            (band.left.is_some() || band.right.is_some_and(|r| r > 0), Feature::Window),
            (spec.mask, Feature::BooleanMask),
            (spec.block_mask.is_some(), Feature::BlockMask),
            (spec.bias, Feature::Bias),
            (spec.alibi, Feature::Alibi),
            (spec.softcap.is_some(), Feature::Softcap),
            (spec.sinks, Feature::Sinks),
            (problem.group() > 1, Feature::GroupedHeads),
            (spec.value_dim != spec.head_dim, Feature::ValueDim),
            (problem.cache_layout().is_some(), Feature::Paged),
            (spec.q_arrangement == padded, Feature::PaddedQueries),
            (spec.kv == crate::problem::KvStorage::Dense(padded), Feature::PaddedKeys),
            // A kernel may multiply fp8 by fp8 and have no way to widen a cache.
            (spec.kv_dtype.is_fp8() && !spec.q_dtype.is_fp8(), Feature::Fp8Cache),
            (spec.q_dtype.is_fp8(), Feature::Fp8Queries),
            (spec.options.deterministic, Feature::Deterministic),
            (spec.options.batch_invariant, Feature::BatchInvariant),
            (spec.want_dsinks, Feature::SinksGradient),
            (spec.want_dbias, Feature::BiasGradient),
            (
                problem.cache_layout().is_some_and(|layout| !layout.has_rows_on(16)),
                Feature::UnalignedPages,
            ),
            (
                problem.cache_layout().is_some_and(|layout| !layout.page_size().is_multiple_of(8)),
                Feature::OddPages,
            ),
            (spec.q_dtype.is_fp8() && has_odd_rows, Feature::OddFp8Rows),
            (
                problem.cache_layout().is_some_and(|layout| {
                    matches!(layout.value(), crate::layout::ValueStorage::PrefixOfKey(_))
                }),
                Feature::LatentCache,
            ),
        ] {
            if needed {
                set = set.with(feature);
            }
        }
        set
    }
}

impl fmt::Debug for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.iter().map(Feature::name)).finish()
    }
}

/// The head dimensions a kernel takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DimRule {
    /// Smallest.
    pub min: usize,
    /// Largest.
    pub max: usize,
    /// Every dimension must be a multiple of this.
    pub multiple_of: usize,
}

impl DimRule {
    /// Any dimension.
    pub const ANY: Self = Self { min: 1, max: usize::MAX, multiple_of: 1 };

    /// One dimension.
    #[must_use]
    pub const fn only(dim: usize) -> Self {
        Self { min: dim, max: dim, multiple_of: 1 }
    }

    /// Whether `dim` is taken.
    #[must_use]
    pub const fn accepts(self, dim: usize) -> bool {
        self.min <= dim && dim <= self.max && dim.is_multiple_of(self.multiple_of)
    }
}

impl fmt::Display for DimRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.max, self.multiple_of) {
            (max, _) if max == self.min => write!(f, "{max}"),
            (usize::MAX, 1) => write!(f, "{} or more", self.min),
            (usize::MAX, m) => write!(f, "multiples of {m} from {}", self.min),
            (max, m) => write!(f, "multiples of {m} from {} to {max}", self.min),
        }
    }
}

/// Scratch that a call needs beyond inputs and outputs.
pub type WorkspaceSize = fn(&Problem, &HostCaps, Tile, Split) -> Bytes;

/// The tiles that a kernel has for a problem.
pub type Tiles = fn(&Problem) -> &'static [Tile];

/// Shared memory of a block that computes a problem in a tile.
pub type SharedMemorySize = fn(&Problem, Tile) -> Bytes;

/// One kernel of a catalogue.
#[derive(Debug, Clone)]
pub struct KernelDesc {
    /// Unique name, as plans, records and `disabled_kernels` use it.
    pub name: &'static str,
    /// Who runs it.
    pub engine: Engine,
    /// How it divides its work.
    pub family: Family,
    /// Query types it takes; [`Problem::out_dtype`] is then the output's.
    pub q_dtypes: &'static [DType],
    /// Key and value types it takes.
    pub kv_dtypes: &'static [DType],
    /// Head dimensions it takes.
    pub head_dims: DimRule,
    /// Value dimensions it takes.
    pub value_dims: DimRule,
    /// Most query rows of a sequence; `None` is any number.
    pub max_query_rows: Option<usize>,
    /// Most pairs of a sequence and a KV head, and tiles of their rows, for each multiprocessor, which it is worth a block of
    /// its own; with more of them, of few keys, a kernel after it is faster. `None` is no limit.
    pub most_units: Option<usize>,
    /// Whether a kernel of tiles of query rows divides the keys of a sequence, too, where rows alone would leave a device idle
    /// and where [`Options::num_splits`](crate::Options::num_splits) says so. Kernels of [`Family::Decode`] always do.
    pub divides_keys: bool,
    /// What it can be asked for.
    pub features: Features,
    /// What it must be asked for: a kernel of such calls alone.
    pub requires: Features,
    /// Lowest CUDA compute capability; `None` off CUDA.
    pub min_compute: Option<(u32, u32)>,
    /// Highest CUDA compute capability, for code that a newer device does not run; `None` is any.
    pub max_compute: Option<(u32, u32)>,
    /// The tiles it has for a problem, the one that reads each key for most rows first; empty where any will do.
    pub tiles: Tiles,
    /// The kernel's own count of the shared memory of a block; zero off a device. Pure.
    pub shared_memory: SharedMemorySize,
    /// The kernel's own sizing of its scratch, so that a plan promises what the engine takes. Pure.
    pub workspace: WorkspaceSize,
}

impl KernelDesc {
    /// The pass that the kernel's family belongs to.
    #[must_use]
    pub const fn pass(&self) -> Pass {
        match self.family {
            Family::Prefill | Family::Decode | Family::General => Pass::Forward,
            Family::Backward => Pass::Backward,
        }
    }

    /// Whether a device of this CUDA compute capability runs it; `None` is no device.
    #[must_use]
    pub fn runs_on(&self, compute: Option<(u32, u32)>) -> bool {
        self.min_compute.is_none_or(|least| compute.is_some_and(|has| has >= least))
            && self.max_compute.is_none_or(|most| compute.is_some_and(|has| has <= most))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::ProblemSpec;

    #[test]
    fn features_are_a_set() {
        let set = Features::NONE.with(Feature::Causal).with(Feature::BiasGradient);
        assert!(set.contains(Feature::Causal) && !set.contains(Feature::Window));
        assert_eq!(Features::ALL.minus(set).iter().count(), Feature::ALL.len() - 2);
        assert_eq!(
            set.without(Feature::Causal).iter().collect::<Vec<_>>(),
            [Feature::BiasGradient]
        );
    }

    #[test]
    fn problem_requires_what_its_fields_say() {
        let mut spec = ProblemSpec::new(DType::BF16, 8, 2, 64, &[1], &[9]);
        let required =
            |spec: &ProblemSpec| Features::required_by(&Problem::new(spec.clone()).expect("valid"));
        assert_eq!(required(&spec), Features::NONE.with(Feature::GroupedHeads));
        spec.causal = true;
        spec.kv_dtype = DType::F8E4M3;
        spec.window_left = Some(5);
        spec.options.deterministic = true;
        let got = required(&spec);
        for feature in [Feature::Causal, Feature::Window, Feature::Fp8Cache, Feature::Deterministic]
        {
            assert!(got.contains(feature), "{feature}");
        }
        assert!(!got.contains(Feature::Fp8Queries));
        spec.q_dtype = DType::F8E4M3;
        let got = required(&spec);
        assert!(got.contains(Feature::Fp8Queries) && !got.contains(Feature::Fp8Cache));
    }

    #[test]
    fn dim_rule_checks_bounds_and_multiple() {
        let rule = DimRule { min: 8, max: 256, multiple_of: 8 };
        assert!(rule.accepts(72) && !rule.accepts(0) && !rule.accepts(129) && !rule.accepts(264));
        assert!(DimRule::ANY.accepts(1));
        let one = DimRule::only(576);
        assert!(one.accepts(576) && !one.accepts(575) && one.to_string() == "576");
    }
}
