//! A case: a problem and a recipe for its data, small enough to be written down in one line.
//!
//! The invariant: a case is values only, and [`Case::build`] gives the same data everywhere and always. Data
//! is recipes, not files, because a hundred cases of tensors would neither fit a package nor be read by
//! anyone; a recipe says what is special about a case in the words of the field.

use std::num::NonZero;

use attn_core::{
    Arrangement, BlockSizes, CacheLayout, DType, Dropout, Error, KvStorage, PageOrder, Problem,
    ProblemSpec, ValueStorage,
};

use crate::adversarial::Pattern;
use crate::case_data::CaseData;
use crate::storage::Placement;

/// What a case is there for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Theme {
    /// Head dims, types and lengths around tile edges.
    Shapes,
    /// Causal and window bounds.
    Causal,
    /// Query heads that share KV heads.
    Gqa,
    /// Boolean and block masks.
    Masks,
    /// Bias, ALiBi, soft-cap, sinks.
    Scores,
    /// Dropout of weights.
    Dropout,
    /// Paged and fp8 caches.
    Paged,
    /// Queries, keys and values in fp8.
    Fp8,
    /// Strides.
    Layouts,
    /// Nothing to do, or nothing to see.
    Empty,
    /// Adversarial values.
    Extreme,
    /// Faults that attention libraries have had.
    Regression,
}

/// What a boolean mask, a block mask or a bias hides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Hiding {
    /// Nothing.
    None,
    /// Each pair (or block) with a probability of 3/10.
    Some,
    /// The first 70 keys (or the first key block) of every row: an engine's first tile is all hidden.
    FirstTile,
    /// Everything in even rows (or even row blocks), 3/10 elsewhere.
    EvenRows,
    /// Everything.
    All,
}

/// A tensor over pairs of rows and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PairTensor {
    /// Extents from the right, one letter each: `b`, `h`, `q`, `k`, or `1` for a broadcast axis.
    pub axes: &'static str,
    /// What it hides.
    pub hiding: Hiding,
}

/// fp8 scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scales {
    /// None given: 1.
    None,
    /// One per tensor, of rank 0.
    Scalar,
    /// One per tensor, of shape `[1]`.
    One,
    /// One per sequence and KV head.
    PerHead,
}

/// Pages to put keys and values in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pages {
    /// Order of axes.
    pub order: PageOrder,
    /// Tokens of a page.
    pub size: usize,
    /// Values are the first elements of each key row.
    pub latent: bool,
    /// The first pages of every sequence but the first are those of the first sequence (of its `sharers`), as far as
    /// both fill them: their keys and values are then the first sequence's.
    pub shared: usize,
    /// So many neighbours share their first pages among themselves alone, where not the whole batch does.
    pub sharers: Option<NonZero<usize>>,
}

/// How the data of a case is made.
#[derive(Debug, Clone, PartialEq)]
pub struct Recipe {
    /// Seed of every random draw.
    pub seed: u64,
    /// What the scores look like.
    pub pattern: Pattern,
    /// Where queries lie.
    pub q: Placement,
    /// Where dense keys and values lie.
    pub kv: Placement,
    /// Where outputs and gradients lie.
    pub outputs: Placement,
    /// Boolean mask.
    pub mask: Option<PairTensor>,
    /// Block mask.
    pub block_mask: Option<PairTensor>,
    /// Additive bias; what it hides is -inf.
    pub bias: Option<PairTensor>,
    /// Unused elements between the rows of masks and biases.
    pub pair_gap: usize,
    /// Value of every sink; `None` draws them.
    pub sink: Option<f32>,
    /// fp8 scales of keys and values.
    pub scales: Scales,
    /// Scales of fp8 queries; of no meaning to others.
    pub q_scales: Scales,
    /// Pages, for a paged cache.
    pub pages: Option<Pages>,
}

/// A problem and the recipe of its data.
///
/// ```
/// use attn_core::DType;
/// use attn_reference::{Case, judge_forward, naive};
///
/// let case = Case::new("causal over a cache", DType::BF16, (4, 2), 64, &[3], &[70]).causal().sinks();
/// let verdict = judge_forward(&case.build()?, naive::forward)?;
/// assert!(verdict.o.is_within());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
pub struct Case {
    /// What is special about it, unique in the corpus.
    pub name: String,
    /// What it is there for.
    pub theme: Theme,
    /// The call as it is for dense keys; [`Case::problem`] puts them in pages where the recipe says so.
    pub spec: ProblemSpec,
    /// How its data is made.
    pub recipe: Recipe,
}

impl Case {
    /// An unmasked case on packed, contiguous, standard normal data; the rest is set by method.
    ///
    /// `heads` are query heads and KV heads.
    #[must_use]
    pub fn new(
        name: impl Into<String>,
        dtype: DType,
        heads: (usize, usize),
        head_dim: usize,
        q_lens: &[usize],
        kv_lens: &[usize],
    ) -> Self {
        let spec = ProblemSpec::new(dtype, heads.0, heads.1, head_dim, q_lens, kv_lens);
        Self::from_spec(name, spec)
    }

    /// A case on a specification for dense keys: tensors that it states as given have every axis and hide some.
    #[must_use]
    pub fn from_spec(name: impl Into<String>, spec: ProblemSpec) -> Self {
        let name = name.into();
        // FNV-1a: equal names give equal data in every build, which the standard hasher does not promise.
        let seed = name.bytes().fold(0xCBF2_9CE4_8422_2325, |h: u64, b| {
            (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01B3)
        });
        let full = |given: bool| given.then_some(PairTensor { axes: "bhqk", hiding: Hiding::Some });
        let recipe = Recipe {
            seed,
            pattern: Pattern::Normal,
            q: Placement::Contiguous,
            kv: Placement::Contiguous,
            outputs: Placement::Contiguous,
            mask: full(spec.mask),
            block_mask: full(spec.block_mask.is_some()),
            bias: full(spec.bias),
            pair_gap: 0,
            sink: None,
            scales: Scales::None,
            q_scales: Scales::None,
            pages: None,
        };
        Self { name, theme: Theme::Shapes, spec, recipe }
    }

    /// The validated forward problem.
    ///
    /// # Errors
    /// As [`Problem::new`] and [`CacheLayout::contiguous`].
    pub fn problem(&self) -> Result<Problem, Error> {
        let mut spec = self.spec.clone();
        if let Some(pages) = self.recipe.pages {
            let value = if pages.latent {
                ValueStorage::PrefixOfKey(spec.value_dim)
            } else {
                ValueStorage::Separate(spec.value_dim)
            };
            spec.kv = KvStorage::Paged(CacheLayout::contiguous(
                spec.kv_dtype,
                pages.order,
                pages.size,
                spec.kv_heads,
                spec.head_dim,
                value,
            )?);
        }
        Problem::new(spec)
    }

    /// Makes the data.
    ///
    /// # Errors
    /// As [`Case::problem`], and [`Error::Invalid`] for axes that are not of a pair tensor.
    pub fn build(&self) -> Result<CaseData, Error> {
        CaseData::new(self)
    }

    /// The same case under a theme.
    #[must_use]
    pub fn theme(mut self, theme: Theme) -> Self {
        self.theme = theme;
        self
    }

    /// Causal.
    #[must_use]
    pub fn causal(mut self) -> Self {
        self.spec.causal = true;
        self
    }

    /// Window bounds.
    #[must_use]
    pub fn window(mut self, left: Option<usize>, right: Option<usize>) -> Self {
        (self.spec.window_left, self.spec.window_right) = (left, right);
        self
    }

    /// A head dim of values of its own.
    #[must_use]
    pub fn value_dim(mut self, dim: usize) -> Self {
        self.spec.value_dim = dim;
        self
    }

    /// An explicit scale.
    #[must_use]
    pub fn scale(mut self, scale: f32) -> Self {
        self.spec.scale = Some(scale);
        self
    }

    /// A soft-cap.
    #[must_use]
    pub fn softcap(mut self, cap: f32) -> Self {
        self.spec.softcap = Some(cap);
        self
    }

    /// ALiBi slopes.
    #[must_use]
    pub fn alibi(mut self) -> Self {
        self.spec.alibi = true;
        self
    }

    /// Sinks of random value.
    #[must_use]
    pub fn sinks(mut self) -> Self {
        self.spec.sinks = true;
        self
    }

    /// Sinks of one value.
    #[must_use]
    pub fn sinks_of(mut self, value: f32) -> Self {
        self.recipe.sink = Some(value);
        self.sinks()
    }

    /// Dropout at this rate; the recipe's seed gives seed and offset.
    #[must_use]
    pub fn dropout(mut self, p: f32) -> Self {
        self.spec.dropout = Some(Dropout { p });
        self
    }

    /// A boolean mask over these axes.
    #[must_use]
    pub fn mask(mut self, axes: &'static str, hiding: Hiding) -> Self {
        self.spec.mask = true;
        self.recipe.mask = Some(PairTensor { axes, hiding });
        self
    }

    /// A block mask of `(q, kv)` block sizes over these axes.
    #[must_use]
    pub fn blocks(mut self, sizes: (usize, usize), axes: &'static str, hiding: Hiding) -> Self {
        self.spec.block_mask = Some(BlockSizes { q: sizes.0, kv: sizes.1 });
        self.recipe.block_mask = Some(PairTensor { axes, hiding });
        self
    }

    /// An additive bias over these axes.
    #[must_use]
    pub fn bias(mut self, axes: &'static str, hiding: Hiding) -> Self {
        self.spec.bias = true;
        self.recipe.bias = Some(PairTensor { axes, hiding });
        self
    }

    /// Unused elements between the rows of masks and biases.
    #[must_use]
    pub fn pair_gap(mut self, gap: usize) -> Self {
        self.recipe.pair_gap = gap;
        self
    }

    /// Padded instead of packed, on both sides.
    #[must_use]
    pub fn padded(mut self) -> Self {
        self.spec.q_arrangement = Arrangement::Padded;
        self.spec.kv = KvStorage::Dense(Arrangement::Padded);
        self
    }

    /// Scales of queries, keys and values of a case made with fp8 queries.
    #[must_use]
    pub fn scales(mut self, queries: Scales, keys: Scales) -> Self {
        (self.recipe.q_scales, self.recipe.scales) = (queries, keys);
        self
    }

    /// Keys and values in fp8.
    #[must_use]
    pub fn fp8(mut self, dtype: DType, scales: Scales) -> Self {
        self.spec.kv_dtype = dtype;
        self.recipe.scales = scales;
        self
    }

    /// Keys and values in pages.
    #[must_use]
    pub fn paged(mut self, order: PageOrder, size: usize) -> Self {
        self.recipe.pages = Some(Pages { order, size, latent: false, shared: 0, sharers: None });
        self
    }

    /// Values are a prefix of the (paged) key rows.
    #[must_use]
    pub fn latent(mut self) -> Self {
        self.recipe.pages = self.recipe.pages.map(|pages| Pages { latent: true, ..pages });
        self
    }

    /// The first pages are the same for every sequence of a paged case.
    #[must_use]
    pub fn shared_pages(mut self, shared: usize) -> Self {
        self.recipe.pages = self.recipe.pages.map(|pages| Pages { shared, ..pages });
        self
    }

    /// So many neighbours share their first pages, and no others.
    #[must_use]
    pub fn sharers(mut self, sharers: usize) -> Self {
        let sharers = NonZero::new(sharers);
        self.recipe.pages = self.recipe.pages.map(|pages| Pages { sharers, ..pages });
        self
    }

    /// Adversarial values.
    #[must_use]
    pub fn pattern(mut self, pattern: Pattern) -> Self {
        self.recipe.pattern = pattern;
        self
    }

    /// Where queries lie.
    #[must_use]
    pub fn q_at(mut self, placement: Placement) -> Self {
        self.recipe.q = placement;
        self
    }

    /// Where dense keys and values lie.
    #[must_use]
    pub fn kv_at(mut self, placement: Placement) -> Self {
        self.recipe.kv = placement;
        self
    }

    /// Where outputs and gradients lie.
    #[must_use]
    pub fn outputs_at(mut self, placement: Placement) -> Self {
        self.recipe.outputs = placement;
        self
    }
}
