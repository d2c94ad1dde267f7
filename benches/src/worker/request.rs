//! What the parent of a worker sends: one JSON line a message, a section and its cases.
//!
//! The invariant: a case carries the fields of the protocol and no defaults of ours, so that a field which a
//! section needs and a case lacks is an error of that case, not another problem than the peers were given.

use serde::Deserialize;

/// One line from the parent.
#[derive(Debug, Clone, Deserialize)]
pub(super) struct Request {
    pub(super) section: String,
    pub(super) cases: Vec<Case>,
    /// Whether more cases of the section follow, so that buffers are worth keeping.
    #[serde(default)]
    pub(super) keep: bool,
    /// When the answer must be complete, Unix seconds.
    pub(super) deadline: Option<f64>,
}

/// One case of a section.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct Case {
    #[serde(rename = "id")]
    pub(super) id: String,
    #[serde(rename = "kind")]
    pub(super) kind: Option<String>,
    #[serde(rename = "bwd", default)]
    pub(super) backward: bool,
    #[serde(rename = "causal")]
    pub(super) causal: Option<bool>,
    #[serde(rename = "flops")]
    pub(super) flops: Option<f64>,
    #[serde(rename = "bytes")]
    pub(super) bytes: Option<f64>,
    b: Option<usize>,
    s: Option<usize>,
    sq: Option<usize>,
    sk: Option<usize>,
    #[serde(rename = "ctx")]
    context: Option<usize>,
    hq: Option<usize>,
    hkv: Option<usize>,
    d: Option<usize>,
}

/// Query heads, KV heads and head dim of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Heads {
    pub(super) q: usize,
    pub(super) kv: usize,
    pub(super) dim: usize,
}

impl Case {
    pub(super) fn batch(&self) -> Result<usize, String> {
        need("B", self.b)
    }

    /// Tokens of a sequence.
    pub(super) fn tokens(&self) -> Result<usize, String> {
        need("S", self.s)
    }

    /// New tokens, and all of the context that they end.
    pub(super) fn chunk(&self) -> Result<(usize, usize), String> {
        Ok((need("Sq", self.sq)?, need("Sk", self.sk)?))
    }

    /// Cached tokens of a sequence.
    pub(super) fn context(&self) -> Result<usize, String> {
        need("ctx", self.context)
    }

    pub(super) fn heads(&self) -> Result<Heads, String> {
        Ok(Heads { q: need("Hq", self.hq)?, kv: need("Hkv", self.hkv)?, dim: need("D", self.d)? })
    }

    pub(super) fn is_causal(&self) -> Result<bool, String> {
        need("causal", self.causal)
    }
}

fn need<T>(field: &str, value: Option<T>) -> Result<T, String> {
    value.ok_or_else(|| format!("{field}: expected a value in the case, got none"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_reads_the_parents_message() {
        let line = r#"{"section": "decode", "keep": true, "deadline": 1.5e9, "cases": [{"section": "decode",
            "id": "decode/32.8.128/B8/ctx1024", "B": 8, "ctx": 1024, "Hq": 32, "Hkv": 8, "D": 128,
            "bytes": 33554432, "flops": 134217728}]}"#;
        let request: Request = serde_json::from_str(line).unwrap();
        let case = &request.cases[0];
        assert_eq!(case.heads(), Ok(Heads { q: 32, kv: 8, dim: 128 }));
        assert_eq!((case.batch(), case.context(), case.backward), (Ok(8), Ok(1024), false));
        assert!(request.keep && case.tokens().unwrap_err().starts_with("S: expected"));
    }

    #[test]
    fn request_needs_no_more_than_a_section_and_cases() {
        let request: Request = serde_json::from_str(r#"{"section": "mask", "cases": []}"#).unwrap();
        assert!(!request.keep && request.deadline.is_none());
    }
}
