//! `case.json` as types.
//!
//! The invariant: a field that is not known is an error and not a field without effect, and an error names
//! its field. So top-level fields are taken one by one, where a derived reader would say no more than
//! "expected i64"; and counts are read as signed numbers and narrowed by name.

use std::collections::BTreeMap;

use attn_core::DType;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::failure::Failure;

/// The fields of a case that are not taken yet.
#[derive(Debug)]
pub(crate) struct Fields(Map<String, Value>);

impl Fields {
    pub(crate) const fn new(fields: Map<String, Value>) -> Self {
        Self(fields)
    }

    /// Takes a field that must be there.
    ///
    /// # Errors
    /// `invalid_argument` when it is missing or of another type.
    pub(crate) fn required<T: DeserializeOwned>(&mut self, name: &str) -> Result<T, Failure> {
        match self.0.remove(name) {
            Some(value) => parse(name, value),
            None => Err(Failure::invalid(format!("{name}: expected the field, got none"))),
        }
    }

    /// Takes a field that may be there.
    ///
    /// # Errors
    /// `invalid_argument` when it is of another type.
    pub(crate) fn optional<T: DeserializeOwned + Default>(
        &mut self,
        name: &str,
    ) -> Result<T, Failure> {
        self.0.remove(name).map_or_else(|| Ok(T::default()), |value| parse(name, value))
    }

    /// Takes what is about storage.
    ///
    /// # Errors
    /// As [`Fields::optional`].
    pub(crate) fn placement(&mut self) -> Result<Placement, Failure> {
        Ok(Placement {
            strides: self.optional("strides")?,
            shapes: self.optional("shapes")?,
            offsets: self.optional("offsets")?,
            fill: self.optional("fill")?,
            keep: self.optional("keep")?,
        })
    }

    /// Checks that every field was taken.
    ///
    /// # Errors
    /// `invalid_argument` for one that was not.
    pub(crate) fn finish(self) -> Result<(), Failure> {
        match self.0.keys().next() {
            None => Ok(()),
            Some(name) => {
                Err(Failure::invalid(format!("expected fields of the operation, got {name}")))
            }
        }
    }
}

fn parse<T: DeserializeOwned>(name: &str, value: Value) -> Result<T, Failure> {
    serde_json::from_value(value).map_err(|error| Failure::invalid(format!("{name}: {error}")))
}

/// Element types of queries and outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum QueryType {
    F32,
    F16,
    Bf16,
}

impl QueryType {
    pub(crate) const fn dtype(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
        }
    }
}

/// Element types of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub(crate) enum KeyType {
    #[serde(rename = "same")]
    Same,
    #[serde(rename = "fp8_e4m3")]
    E4M3,
    #[serde(rename = "fp8_e5m2")]
    E5M2,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Layout {
    Packed,
    Padded,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Order {
    #[default]
    Nhd,
    Hnd,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum PhaseName {
    Prefill,
    Decode,
}

/// Extra outputs of a backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Want {
    Dsinks,
    Dbias,
}

/// Which optional tensors are present.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Has {
    pub(crate) mask: bool,
    pub(crate) bias: bool,
    pub(crate) alibi: bool,
    pub(crate) sinks: bool,
    pub(crate) block_mask: bool,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BlockMaskSizes {
    pub(crate) block_q: i64,
    pub(crate) block_kv: i64,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct KvCache {
    #[serde(default)]
    pub(crate) page_size: Option<i64>,
    #[serde(default)]
    pub(crate) order: Order,
    pub(crate) dtype: KeyType,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct OptionFields {
    pub(crate) num_splits: Option<i64>,
    pub(crate) deterministic: bool,
    pub(crate) batch_invariant: bool,
    pub(crate) phase: Option<PhaseName>,
    pub(crate) disable_kernels: Vec<String>,
}

/// A contiguous tensor full of one value, but for some rows.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Fill {
    pub(crate) shape: Vec<i64>,
    pub(crate) value: f32,
    #[serde(default)]
    pub(crate) rows: Option<Vec<i64>>,
}

/// Where tensors lie in their storage, and how large ones are given and kept.
#[derive(Debug, Clone, Default)]
pub(crate) struct Placement {
    pub(crate) strides: BTreeMap<String, Vec<i64>>,
    pub(crate) shapes: BTreeMap<String, Vec<i64>>,
    pub(crate) offsets: BTreeMap<String, i64>,
    pub(crate) fill: BTreeMap<String, Fill>,
    pub(crate) keep: BTreeMap<String, Vec<i64>>,
}

/// What forward, backward and select have in common.
#[derive(Debug, Clone)]
pub(crate) struct Attention {
    pub(crate) dtype: QueryType,
    pub(crate) q_heads: i64,
    pub(crate) kv_heads: i64,
    pub(crate) head_dim: i64,
    pub(crate) value_dim: i64,
    pub(crate) q_lens: Vec<i64>,
    pub(crate) kv_lens: Vec<i64>,
    pub(crate) layout: Layout,
    pub(crate) scale: Option<f64>,
    pub(crate) softcap: Option<f64>,
    pub(crate) causal: bool,
    pub(crate) window_left: Option<i64>,
    pub(crate) window_right: Option<i64>,
    pub(crate) has: Has,
    pub(crate) block_mask: Option<BlockMaskSizes>,
    pub(crate) kv_cache: Option<KvCache>,
    pub(crate) options: OptionFields,
    /// Backward only.
    pub(crate) want: Vec<Want>,
}

impl Attention {
    /// # Errors
    /// `invalid_argument` for a field that is missing or of another type.
    pub(crate) fn take(fields: &mut Fields) -> Result<Self, Failure> {
        Ok(Self {
            dtype: fields.required("dtype")?,
            q_heads: fields.required("q_heads")?,
            kv_heads: fields.required("kv_heads")?,
            head_dim: fields.required("head_dim")?,
            value_dim: fields.required("value_dim")?,
            q_lens: fields.required("q_lens")?,
            kv_lens: fields.required("kv_lens")?,
            layout: fields.required("layout")?,
            scale: fields.optional("scale")?,
            softcap: fields.optional("softcap")?,
            causal: fields.optional("causal")?,
            window_left: fields.optional("window_left")?,
            window_right: fields.optional("window_right")?,
            has: fields.optional("has")?,
            block_mask: fields.optional("block_mask")?,
            kv_cache: fields.optional("kv_cache")?,
            options: fields.optional("options")?,
            want: Vec::new(),
        })
    }
}

/// The passes that a selection may be for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SelectPass {
    Forward,
    Backward,
    Decode,
}

/// A device that need not exist.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DeviceFields {
    pub(crate) name: String,
    pub(crate) compute: (u32, u32),
    pub(crate) smem_per_block: u64,
    pub(crate) sm_count: u32,
    pub(crate) memory_bytes: u64,
}

/// How prefixes are hashed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Hash {
    #[default]
    Default,
    Constant,
}

/// Tokens within a namespace.
pub(crate) type Names = BTreeMap<String, String>;

/// One operation of a program.
#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub(crate) enum Op {
    Alloc {
        seq: String,
        tokens: Vec<i64>,
        #[serde(default)]
        ns: Names,
    },
    CanAlloc {
        tokens: Vec<i64>,
        #[serde(default)]
        ns: Names,
    },
    Match {
        tokens: Vec<i64>,
        #[serde(default)]
        ns: Names,
    },
    Append {
        seq: String,
        tokens: Vec<i64>,
    },
    Commit {
        seq: String,
        n: i64,
    },
    Fork {
        seq: String,
        dst: String,
    },
    Truncate {
        seq: String,
        n: i64,
    },
    Free {
        seq: String,
    },
}

/// A count by name.
///
/// # Errors
/// `invalid_argument` for a negative one.
pub(crate) fn count(field: &str, value: i64) -> Result<usize, Failure> {
    usize::try_from(value)
        .map_err(|_| Failure::invalid(format!("{field}: expected at least 0, got {value}")))
}

/// Counts by name and place.
///
/// # Errors
/// `invalid_argument` for a negative one.
pub(crate) fn counts(field: &str, values: &[i64]) -> Result<Vec<usize>, Failure> {
    let one = |(at, &value)| count(&format!("{field}[{at}]"), value);
    values.iter().enumerate().map(one).collect()
}
