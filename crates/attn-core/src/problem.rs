//! All of an attention call but its data, validated once, by construction.
//!
//! The invariant: a [`Problem`] that exists is one that the reference can compute. Fields are written
//! in a [`ProblemSpec`], whose combinations are checked by [`Problem::new`], and are read-only from
//! there on: no engine and no selector checks them again, and none can meet a combination that was
//! never thought of. Masks, biases and sinks appear here as "present"; their shapes belong to
//! the data and are checked with it ([`crate::Inputs::check`]).

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use crate::dropout::{self, Dropout};
use crate::dtype::DType;
use crate::error::Error;
use crate::layout::CacheLayout;
use crate::mask::Band;
use crate::shape::{Arrangement, Lengths};

/// Which way through the network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pass {
    /// Output and LSE from query, key and value.
    Forward,
    /// Gradients of query, key and value from the forward's results and the output's gradient.
    Backward,
}

/// Which kind of forward kernel; they differ in how the work is divided, not in the result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Many query rows share each key tile: work is divided by query blocks.
    Prefill,
    /// Few query rows meet a long cache: work is divided by keys and merged.
    Decode,
}

impl Phase {
    /// The name used in plans and case files.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

/// Where keys and values are.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum KvStorage {
    /// Rows in logical order.
    Dense(Arrangement),
    /// Pages of a cache, found through a block table.
    Paged(CacheLayout),
}

/// Sizes of the blocks of a block mask.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockSizes {
    /// Query rows of a block.
    pub q: usize,
    /// Keys of a block.
    pub kv: usize,
}

/// Requirements on how a call is computed; none changes the result beyond rounding.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Options {
    /// Split each sequence's keys this many ways where the kernel splits.
    pub num_splits: Option<usize>,
    /// Equal calls give equal bits.
    pub deterministic: bool,
    /// A sequence's bits do not depend on its batch mates.
    pub batch_invariant: bool,
    /// Use a kernel of this kind or none.
    pub phase: Option<Phase>,
    /// Kernels not to use, by name.
    pub disabled_kernels: Vec<String>,
}

/// The fields of a [`Problem`], to be filled in and checked.
///
/// Shapes: q `[rows, q_heads, head_dim]`, k `[rows, kv_heads, head_dim]`, v `[rows, kv_heads, value_dim]`.
/// Units: lengths and windows in tokens.
#[derive(Debug, Clone)]
pub struct ProblemSpec {
    /// Forward or backward.
    pub pass: Pass,
    /// Stored type of queries, fp8 E4M3 in a forward alone, and of every output but the LSE; of fp8 queries the
    /// output is bf16.
    pub q_dtype: DType,
    /// Stored type of keys and values: that of queries, or, unless these are fp8, an fp8 type.
    pub kv_dtype: DType,
    /// Query heads; a multiple of `kv_heads`, 0 allowed.
    pub q_heads: usize,
    /// Key/value heads, at least 1.
    pub kv_heads: usize,
    /// Elements of a query and of a key row, at least 1.
    pub head_dim: usize,
    /// Elements of a value row, at least 1.
    pub value_dim: usize,
    /// Query rows of each sequence.
    pub q_lens: Vec<usize>,
    /// Keys of each sequence.
    pub kv_lens: Vec<usize>,
    /// Arrangement of q, o, lse and their gradients.
    pub q_arrangement: Arrangement,
    /// Where k and v are, and of dk and dv when dense.
    pub kv: KvStorage,
    /// Factor of every score; `None` is `1/sqrt(head_dim)`.
    pub scale: Option<f32>,
    /// Soft-cap `c`: scores become `c * tanh(s / c)`.
    pub softcap: Option<f32>,
    /// Causal, aligned to the last row and the last key.
    pub causal: bool,
    /// Keys visible to the left of a row's position; `None` is all.
    pub window_left: Option<usize>,
    /// Keys visible to the right of a row's position; `None` is all.
    pub window_right: Option<usize>,
    /// A boolean mask is given; non-zero keeps.
    pub mask: bool,
    /// A block mask of these block sizes is given; non-zero keeps.
    pub block_mask: Option<BlockSizes>,
    /// An additive bias is given.
    pub bias: bool,
    /// ALiBi slopes are given.
    pub alibi: bool,
    /// Attention sinks are given: one score per query head that joins the denominator.
    pub sinks: bool,
    /// Weights are dropped after the softmax; which, seed and offset say ([`crate::Inputs::dropout`]).
    pub dropout: Option<Dropout>,
    /// Backward: the sinks' gradient is wanted.
    pub want_dsinks: bool,
    /// Backward: the bias' gradient is wanted.
    pub want_dbias: bool,
    /// How to compute.
    pub options: Options,
}

impl ProblemSpec {
    /// A dense, packed, unmasked forward call; the rest is set by field.
    #[must_use]
    pub fn new(
        dtype: DType,
        q_heads: usize,
        kv_heads: usize,
        head_dim: usize,
        q_lens: &[usize],
        kv_lens: &[usize],
    ) -> Self {
        Self {
            pass: Pass::Forward,
            q_dtype: dtype,
            kv_dtype: dtype,
            q_heads,
            kv_heads,
            head_dim,
            value_dim: head_dim,
            q_lens: q_lens.to_vec(),
            kv_lens: kv_lens.to_vec(),
            q_arrangement: Arrangement::Packed,
            kv: KvStorage::Dense(Arrangement::Packed),
            scale: None,
            softcap: None,
            causal: false,
            window_left: None,
            window_right: None,
            mask: false,
            block_mask: None,
            bias: false,
            alibi: false,
            sinks: false,
            dropout: None,
            want_dsinks: false,
            want_dbias: false,
            options: Options::default(),
        }
    }
}

/// A validated call description. Cheap to clone.
///
/// Semantics, for row `i` of a sequence with `Sq` rows and `Sk` keys, at position `p = i + Sk - Sq`; query head
/// `h` reads KV head `h / (q_heads / kv_heads)`:
/// `s = scale * q.k`, then soft-cap, then `+ bias[i, j] - alibi[h] * |p - j|`, then masks.
/// `lse = ln(sum of exp(s) over visible keys + exp(sink[h]))`, `o = sum of z exp(s - lse) v`, where `z` is 1 without
/// dropout, and with it 0 for dropped pairs and `1 / (1 - p)` for the others ([`crate::dropout`]).
/// A row without a visible key has `o = 0`, zero gradients and `lse = -inf` (the sink's score with a sink).
///
/// ```
/// use attn_core::{DType, Problem, ProblemSpec};
///
/// let mut spec = ProblemSpec::new(DType::BF16, 32, 8, 128, &[1, 7], &[4096, 7]);
/// spec.causal = true;
/// let problem = Problem::new(spec)?;
/// assert_eq!(problem.group(), 4);
///
/// let err = Problem::new(ProblemSpec::new(DType::F32, 6, 4, 64, &[1], &[1])).unwrap_err();
/// assert_eq!(err.to_string(), "q_heads: expected a multiple of kv_heads 4, got 6");
/// # Ok::<(), attn_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Problem {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    spec: ProblemSpec,
    lengths: Lengths,
    scale: f32,
    fingerprint: u64,
}

impl Problem {
    /// The largest head count and head dimension: far above any model, and small enough that the sizes
    /// of tiles and scratch cannot overflow.
    pub const MAX_DIM: usize = 1 << 20;

    /// Checks a specification.
    ///
    /// # Errors
    /// [`Error::Invalid`] names the field, what was expected and what was got; [`Error::Unsupported`] is
    /// for combinations that make sense but that nothing here computes; [`Error::Overflow`] for sizes
    /// past 63 bits.
    pub fn new(spec: ProblemSpec) -> Result<Self, Error> {
        let lengths = Lengths::new(&spec.q_lens, &spec.kv_lens)?;
        check_heads(&spec, &lengths)?;
        check_dtypes(&spec)?;
        check_storage(&spec)?;
        check_scores(&spec)?;
        check_gradients(&spec)?;
        dropout::check(&spec)?;
        let scale = match spec.scale {
            Some(scale) => scale,
            #[expect(clippy::cast_possible_truncation, reason = "the rounding to f32 is meant")]
            None => (1.0 / (spec.head_dim as f64).sqrt()) as f32,
        };
        let mut hasher = DefaultHasher::new();
        hash_spec(&spec, scale, &mut hasher);
        lengths.hash(&mut hasher);
        let fingerprint = hasher.finish();
        Ok(Self { inner: Arc::new(Inner { spec, lengths, scale, fingerprint }) })
    }

    /// Forward or backward.
    #[must_use]
    pub fn pass(&self) -> Pass {
        self.inner.spec.pass
    }

    /// Stored type of queries.
    #[must_use]
    pub fn q_dtype(&self) -> DType {
        self.inner.spec.q_dtype
    }

    /// Stored type of the output, and of the gradients of q, k and v: [`DType::output`] of the queries' type.
    #[must_use]
    pub fn out_dtype(&self) -> DType {
        self.q_dtype().output()
    }

    /// Stored type of keys and values.
    #[must_use]
    pub fn kv_dtype(&self) -> DType {
        self.inner.spec.kv_dtype
    }

    /// Query heads.
    #[must_use]
    pub fn q_heads(&self) -> usize {
        self.inner.spec.q_heads
    }

    /// Key/value heads.
    #[must_use]
    pub fn kv_heads(&self) -> usize {
        self.inner.spec.kv_heads
    }

    /// Query heads that share one KV head; 0 when there are no query heads.
    #[must_use]
    pub fn group(&self) -> usize {
        self.q_heads() / self.kv_heads()
    }

    /// Elements of a query and of a key row.
    #[must_use]
    pub fn head_dim(&self) -> usize {
        self.inner.spec.head_dim
    }

    /// Elements of a value row.
    #[must_use]
    pub fn value_dim(&self) -> usize {
        self.inner.spec.value_dim
    }

    /// The batch's lengths.
    #[must_use]
    pub fn lengths(&self) -> &Lengths {
        &self.inner.lengths
    }

    /// Arrangement of query-side tensors.
    #[must_use]
    pub fn q_arrangement(&self) -> Arrangement {
        self.inner.spec.q_arrangement
    }

    /// Where keys and values are.
    #[must_use]
    pub fn kv(&self) -> &KvStorage {
        &self.inner.spec.kv
    }

    /// The cache layout, when keys and values are paged.
    #[must_use]
    pub fn cache_layout(&self) -> Option<&CacheLayout> {
        match &self.inner.spec.kv {
            KvStorage::Dense(_) => None,
            KvStorage::Paged(layout) => Some(layout),
        }
    }

    /// Factor of every score.
    #[must_use]
    pub fn scale(&self) -> f32 {
        self.inner.scale
    }

    /// Soft-cap, if any.
    #[must_use]
    pub fn softcap(&self) -> Option<f32> {
        self.inner.spec.softcap
    }

    /// Causal and window bounds.
    #[must_use]
    pub fn band(&self) -> Band {
        let spec = &self.inner.spec;
        Band::new(spec.causal, spec.window_left, spec.window_right)
    }

    /// Whether a boolean mask is given.
    #[must_use]
    pub fn has_mask(&self) -> bool {
        self.inner.spec.mask
    }

    /// Block sizes of the block mask, if one is given.
    #[must_use]
    pub fn block_mask(&self) -> Option<BlockSizes> {
        self.inner.spec.block_mask
    }

    /// Whether an additive bias is given.
    #[must_use]
    pub fn has_bias(&self) -> bool {
        self.inner.spec.bias
    }

    /// Whether ALiBi slopes are given.
    #[must_use]
    pub fn has_alibi(&self) -> bool {
        self.inner.spec.alibi
    }

    /// Whether attention sinks are given.
    #[must_use]
    pub fn has_sinks(&self) -> bool {
        self.inner.spec.sinks
    }

    /// Dropout of weights, if any; a rate of 0 is none.
    #[must_use]
    pub fn dropout(&self) -> Option<Dropout> {
        rate(&self.inner.spec)
    }

    /// Whether the sinks' gradient is wanted.
    #[must_use]
    pub fn wants_dsinks(&self) -> bool {
        self.inner.spec.want_dsinks
    }

    /// Whether the bias' gradient is wanted.
    #[must_use]
    pub fn wants_dbias(&self) -> bool {
        self.inner.spec.want_dbias
    }

    /// How to compute.
    #[must_use]
    pub fn options(&self) -> &Options {
        &self.inner.spec.options
    }

    /// The checked specification, to derive another problem from.
    #[must_use]
    pub fn spec(&self) -> &ProblemSpec {
        &self.inner.spec
    }

    /// A hash of every field, made once; equal problems have equal fingerprints.
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        self.inner.fingerprint
    }

    /// Floating-point operations of the two forward matrix products over visible-by-band pairs
    /// (five products in a backward).
    #[must_use]
    pub fn flops(&self) -> u64 {
        let pairs =
            (0..self.lengths().batch()).map(|b| self.band_pairs(b)).fold(0, u64::saturating_add);
        let dims = (self.head_dim() as u64).saturating_add(self.value_dim() as u64);
        let per_pair = dims.saturating_mul(2).saturating_mul(self.q_heads() as u64);
        match self.pass() {
            Pass::Forward => pairs.saturating_mul(per_pair),
            Pass::Backward => (pairs.saturating_mul(per_pair) / 2).saturating_mul(5),
        }
    }

    /// (row, key) pairs of one sequence that causal and window bounds leave visible.
    #[must_use]
    pub fn band_pairs(&self, sequence: usize) -> u64 {
        let (q_len, kv_len) = (self.lengths().q(sequence), self.lengths().kv(sequence));
        self.band().pairs(q_len, kv_len)
    }
}

impl PartialEq for Problem {
    fn eq(&self, other: &Self) -> bool {
        if Arc::ptr_eq(&self.inner, &other.inner) {
            return true;
        }
        let (a, b) = (&*self.inner, &*other.inner);
        a.fingerprint == b.fingerprint
            && a.lengths == b.lengths
            && key(&a.spec, a.scale) == key(&b.spec, b.scale)
            && a.spec.kv == b.spec.kv
            && a.spec.options == b.spec.options
    }
}

impl Eq for Problem {}

impl Hash for Problem {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.inner.fingerprint);
    }
}

/// The plain fields that make two problems equal, floats by their bits.
///
/// Taken apart without `..`, so that a new field cannot be left out: a plan cache would return the plan
/// of another problem.
fn key(spec: &ProblemSpec, scale: f32) -> impl Hash + PartialEq + use<> {
    let &ProblemSpec {
        pass,
        q_dtype,
        kv_dtype,
        q_heads,
        kv_heads,
        head_dim,
        value_dim,
        // Compared as `Lengths`.
        q_lens: _,
        kv_lens: _,
        q_arrangement,
        // Compared beside this key, for they are not `Copy`.
        kv: _,
        options: _,
        // Its resolved value counts.
        scale: _,
        softcap,
        causal,
        window_left,
        window_right,
        mask,
        block_mask,
        bias,
        alibi,
        sinks,
        // Its resolved value counts.
        dropout: _,
        want_dsinks,
        want_dbias,
    } = spec;
    (
        (pass, q_dtype, kv_dtype, q_arrangement),
        (q_heads, kv_heads, head_dim, value_dim),
        (scale.to_bits(), softcap.map(f32::to_bits), rate(spec).map(|dropout| dropout.p.to_bits())),
        (causal, window_left, window_right, mask, block_mask),
        (bias, alibi, sinks, want_dsinks, want_dbias),
    )
}

/// The dropout that there is.
fn rate(spec: &ProblemSpec) -> Option<Dropout> {
    spec.dropout.filter(|dropout| dropout.p != 0.0)
}

fn hash_spec(spec: &ProblemSpec, scale: f32, state: &mut impl Hasher) {
    key(spec, scale).hash(state);
    spec.kv.hash(state);
    spec.options.hash(state);
}

fn check_heads(spec: &ProblemSpec, lengths: &Lengths) -> Result<(), Error> {
    for (field, value) in
        [("kv_heads", spec.kv_heads), ("head_dim", spec.head_dim), ("value_dim", spec.value_dim)]
    {
        if value == 0 {
            return Err(Error::invalid(field, "at least 1", value));
        }
        if value > Problem::MAX_DIM {
            let expected = format!("at most {}", Problem::MAX_DIM);
            return Err(Error::invalid(field, expected, value));
        }
    }
    if spec.q_heads > Problem::MAX_DIM {
        let expected = format!("at most {}", Problem::MAX_DIM);
        return Err(Error::invalid("q_heads", expected, spec.q_heads));
    }
    if !spec.q_heads.is_multiple_of(spec.kv_heads) {
        let expected = format!("a multiple of kv_heads {}", spec.kv_heads);
        return Err(Error::invalid("q_heads", expected, spec.q_heads));
    }
    let dim = spec.head_dim.max(spec.value_dim);
    for (what, rows, longest, heads) in [
        ("query elements", lengths.total_q(), lengths.longest_q(), spec.q_heads),
        ("key elements", lengths.total_kv(), lengths.longest_kv(), spec.kv_heads),
    ] {
        let padded = longest.checked_mul(lengths.batch());
        let elements = padded
            .map(|padded| padded.max(rows))
            .and_then(|n| n.checked_mul(heads))
            .and_then(|n| n.checked_mul(dim));
        if elements.is_none_or(|n| i64::try_from(n).is_err()) {
            let detail = format!("{rows} rows * {heads} heads * {dim} elements");
            return Err(Error::Overflow { what, detail });
        }
    }
    Ok(())
}

fn check_dtypes(spec: &ProblemSpec) -> Result<(), Error> {
    let (q, kv) = (spec.q_dtype, spec.kv_dtype);
    if q == DType::F8E5M2 {
        return Err(Error::invalid("q_dtype", "f32, f16, bf16 or fp8_e4m3", q));
    }
    // Products of fp8 queries are made of fp8 keys, of the same format.
    if q.is_fp8() && kv != q {
        let expected = format!("{q}, as the queries");
        return Err(Error::invalid("kv_dtype", expected, kv));
    }
    if kv != q && !kv.is_fp8() {
        return Err(Error::invalid("kv_dtype", format!("{q} or an fp8 type"), kv));
    }
    Ok(())
}

fn check_storage(spec: &ProblemSpec) -> Result<(), Error> {
    let KvStorage::Paged(layout) = &spec.kv else {
        return Ok(());
    };
    if layout.dtype() != spec.kv_dtype {
        return Err(Error::invalid("cache dtype", spec.kv_dtype.name(), layout.dtype()));
    }
    for (field, expected, got) in [
        ("cache kv_heads", spec.kv_heads, layout.kv_heads()),
        ("cache key_dim", spec.head_dim, layout.key_dim()),
        ("cache value_dim", spec.value_dim, layout.value().dim()),
    ] {
        if expected != got {
            return Err(Error::invalid(field, expected.to_string(), got));
        }
    }
    Ok(())
}

fn check_scores(spec: &ProblemSpec) -> Result<(), Error> {
    if let Some(scale) = spec.scale
        && !scale.is_finite()
    {
        return Err(Error::invalid("scale", "a finite number", scale));
    }
    if let Some(cap) = spec.softcap
        && !(cap.is_finite() && cap > 0.0)
    {
        return Err(Error::invalid("softcap", "a positive finite number", cap));
    }
    if let Some(BlockSizes { q, kv }) = spec.block_mask
        && (q == 0 || kv == 0)
    {
        let got = format!("{q} x {kv}");
        return Err(Error::invalid("block_mask", "block sizes of at least 1", got));
    }
    if spec.options.num_splits == Some(0) {
        return Err(Error::invalid("num_splits", "at least 1", 0));
    }
    Ok(())
}

fn check_gradients(spec: &ProblemSpec) -> Result<(), Error> {
    for (field, wanted, given) in
        [("dsinks", spec.want_dsinks, spec.sinks), ("dbias", spec.want_dbias, spec.bias)]
    {
        if wanted && !given {
            return Err(Error::invalid(field, "the tensor it is the gradient of", "none"));
        }
        if wanted && spec.pass == Pass::Forward {
            return Err(Error::invalid(field, "pass = backward", "forward"));
        }
    }
    if spec.pass == Pass::Backward {
        if spec.q_dtype.is_fp8() {
            return Err(Error::invalid("q_dtype", "f32, f16 or bf16 in a backward", spec.q_dtype));
        }
        if matches!(spec.kv, KvStorage::Paged(_)) {
            let reason = "gradients are defined for dense keys; gather the pages first";
            return Err(Error::unsupported("backward over a paged cache", reason));
        }
        if spec.kv_dtype.is_fp8() {
            let reason = "an fp8 cache is for inference; keep keys and values in the query's type";
            return Err(Error::unsupported("backward over fp8 keys", reason));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
