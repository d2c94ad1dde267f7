//! One shape of a sweep, its name, and what it counts.
//!
//! The invariant: a name says everything that a point is, so that two points of one name are one. Rates are of what a call
//! must do: the products of the pairs that causal and window bounds leave, and each byte of q, k, v and o once.

use std::fmt;

use attn_core::{DType, PageOrder, Problem};
use attn_reference::Case;
use attn_reference::case::Hiding;
use serde::{Deserialize, Serialize};

/// What a call is part of; prefill and decode are never mixed in one table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Phase {
    /// Many query rows a sequence.
    Prefill,
    /// A step of one or a few.
    Decode,
}

/// Elements of q, k, v and o.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Element {
    F32,
    F16,
    Bf16,
}

/// What sums are kept in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Accumulation {
    F32,
    F16,
}

/// Which pairs are seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) enum Masking {
    /// All.
    Full,
    /// Keys up to the row's own.
    Causal,
    /// The row's own key and so many before it.
    Window(usize),
    /// A boolean mask that hides three pairs in ten.
    Arbitrary,
    /// A block mask of so many rows and keys that hides three blocks in ten.
    Blocks(usize),
}

/// One shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Point {
    pub(crate) phase: Phase,
    /// Sequences.
    pub(crate) batch: usize,
    /// Query rows of each.
    pub(crate) q_len: usize,
    /// Keys of each.
    pub(crate) kv_len: usize,
    pub(crate) q_heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) dtype: Element,
    pub(crate) mask: Masking,
    /// Tokens of a page; `None`: contiguous.
    pub(crate) page_size: Option<usize>,
    pub(crate) accumulation: Accumulation,
}

impl Point {
    /// Its name, of which no other point of a suite is.
    pub(crate) fn id(&self) -> String {
        let Self { batch, q_len, kv_len, q_heads, kv_heads, head_dim, mask, .. } = self;
        let phase = match self.phase {
            Phase::Prefill => "prefill",
            Phase::Decode => "decode",
        };
        let dtype = self.dtype.of();
        let pages = self.page_size.map_or_else(|| "dense".to_owned(), |size| format!("page{size}"));
        let sums = match self.accumulation {
            Accumulation::F32 => "",
            Accumulation::F16 => "/acc-f16",
        };
        format!(
            "{phase}/b{batch}/q{q_len}/kv{kv_len}/{q_heads}.{kv_heads}.{head_dim}/{dtype}/{mask}/{pages}{sums}"
        )
    }

    /// Why no engine runs it, where none does.
    pub(crate) const fn refusal(&self) -> Option<&'static str> {
        match self.accumulation {
            Accumulation::F32 => None,
            Accumulation::F16 => Some(
                "sums are f32: over a thousand keys f16 loses the last keys' weights, and past 65504 all of them",
            ),
        }
    }

    /// The call and the recipe of its data.
    pub(crate) fn case(&self, seed: u64) -> Case {
        let (q, kv) = (vec![self.q_len; self.batch], vec![self.kv_len; self.batch]);
        let heads = (self.q_heads, self.kv_heads);
        let case = Case::new(self.id(), self.dtype.of(), heads, self.head_dim, &q, &kv);
        let mut case = match self.mask {
            Masking::Full => case,
            Masking::Causal => case.causal(),
            Masking::Window(before) => case.window(Some(before), Some(0)),
            Masking::Arbitrary => case.mask("qk", Hiding::Some),
            Masking::Blocks(size) => case.blocks((size, size), "qk", Hiding::Some),
        };
        if let Some(size) = self.page_size {
            case = case.paged(PageOrder::Nhd, size);
        }
        case.recipe.seed = case.recipe.seed.wrapping_add(seed);
        case
    }

    /// Bytes of q, k, v and o, each once.
    pub(crate) fn bytes(&self, problem: &Problem) -> u64 {
        let rows = (self.batch * self.q_len * self.q_heads) as u64;
        let keys = (self.batch * self.kv_len * self.kv_heads) as u64;
        let row = (problem.head_dim() + problem.value_dim()) as u64;
        (rows + keys) * row * self.dtype.of().size() as u64
    }
}

impl Element {
    pub(crate) const fn of(self) -> DType {
        match self {
            Self::F32 => DType::F32,
            Self::F16 => DType::F16,
            Self::Bf16 => DType::BF16,
        }
    }
}

impl fmt::Display for Masking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("full"),
            Self::Causal => f.write_str("causal"),
            Self::Window(before) => write!(f, "window{before}"),
            Self::Arbitrary => f.write_str("arbitrary"),
            Self::Blocks(size) => write!(f, "blocks{size}"),
        }
    }
}

impl From<Masking> for String {
    fn from(mask: Masking) -> Self {
        mask.to_string()
    }
}

impl TryFrom<String> for Masking {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let number = |prefix: &str| text.strip_prefix(prefix)?.parse().ok().filter(|&n| n > 0);
        match text.as_str() {
            "full" => Ok(Self::Full),
            "causal" => Ok(Self::Causal),
            "arbitrary" => Ok(Self::Arbitrary),
            _ => number("window")
                .map(Self::Window)
                .or_else(|| number("blocks").map(Self::Blocks))
                .ok_or_else(|| {
                    format!(
                        "mask: expected full, causal, windowN, arbitrary or blocksN with N above 0, got {text:?}"
                    )
                }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mask_reads_what_it_writes() {
        let all = [
            Masking::Full,
            Masking::Causal,
            Masking::Window(255),
            Masking::Arbitrary,
            Masking::Blocks(64),
        ];
        for mask in all {
            assert_eq!(Masking::try_from(mask.to_string()), Ok(mask));
        }
        for wrong in ["", "window", "window0", "blocks-1", "Full"] {
            assert!(Masking::try_from(wrong.to_owned()).is_err(), "{wrong}");
        }
    }

    #[test]
    fn bytes_count_each_tensor_once() {
        let point = Point {
            phase: Phase::Decode,
            batch: 2,
            q_len: 1,
            kv_len: 10,
            q_heads: 8,
            kv_heads: 2,
            head_dim: 64,
            dtype: Element::Bf16,
            mask: Masking::Full,
            page_size: Some(16),
            accumulation: Accumulation::F32,
        };
        let problem = point.case(0).problem().expect("a problem");
        // q and o: 2 x 8 rows; k and v: 20 x 2; of 64 elements of 2 bytes.
        assert_eq!(point.bytes(&problem), 2 * (16 + 40) * 128);
        assert_eq!(problem.flops(), 4 * 2 * 8 * 10 * 64);
    }
}
