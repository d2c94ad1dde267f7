//! Suites: which shapes a sweep times, as data.
//!
//! The invariant: a suite is a list of sets, and a set is the product of its lists, in the order in which they are written
//! down; nothing is dropped on the way. What no engine does, f16 accumulation, is a point of its own that is refused with
//! its reason, for a report that leaves it out would look as if nobody had asked.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::point::{Accumulation, Element, Masking, Phase, Point};

/// Suites that the binary knows by name: the file's name, and its text.
const KNOWN: &[(&str, &str)] = &[
    ("cpu", include_str!("../../definitions/sweep-cpu.toml")),
    ("smoke", include_str!("../../definitions/sweep-smoke.toml")),
];

/// The sets of a file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    set: Vec<Set>,
}

/// Points that differ in what the lists say.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Set {
    phase: Phase,
    batch: Vec<usize>,
    /// Query rows of a sequence: of a prefill as many as keys where it is absent, of a decode step one.
    q_len: Option<Vec<usize>>,
    kv_len: Vec<usize>,
    /// Query heads and KV heads.
    heads: Vec<(usize, usize)>,
    head_dim: Vec<usize>,
    dtype: Vec<Element>,
    mask: Vec<Masking>,
    /// Tokens of a page; without it keys and values are contiguous.
    #[serde(default)]
    page_size: Vec<usize>,
    #[serde(default = "f32_alone")]
    accumulation: Vec<Accumulation>,
}

fn f32_alone() -> Vec<Accumulation> {
    vec![Accumulation::F32]
}

/// A suite that cannot be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SuiteError {
    /// Neither a known name nor a file.
    #[error("suite: expected one of {known:?} or a file, got {got:?}")]
    Unknown {
        /// Names that are known.
        known: Vec<&'static str>,
        /// The name.
        got: String,
        /// Why the file could not be read.
        source: std::io::Error,
    },
    /// Not the TOML of a suite.
    #[error("suite {name:?}: {source}")]
    Syntax {
        /// Name or path.
        name: String,
        /// Where and why.
        source: toml::de::Error,
    },
    /// A list without entries: its set would have no points, which nobody asks for.
    #[error("suite {name:?}: {list} of set {set}: expected at least one entry")]
    Empty {
        /// Name or path.
        name: String,
        /// Number of the set, from 1.
        set: usize,
        /// The list.
        list: &'static str,
    },
}

/// Points by name.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct Suite {
    /// Name or path.
    pub(crate) name: String,
    /// SHA-256 of its text: a record of another text is not resumed.
    pub(crate) sha256: String,
    #[serde(skip)]
    pub(crate) points: Vec<Point>,
}

impl Suite {
    /// A known suite, or that of a file.
    ///
    /// # Errors
    /// [`SuiteError`]: no such name or file, TOML that is no suite, an empty list.
    pub(crate) fn read(name: &str) -> Result<Self, SuiteError> {
        let known = KNOWN.iter().find(|(known, _)| *known == name);
        let text = match known {
            Some((_, text)) => (*text).to_owned(),
            None => std::fs::read_to_string(name).map_err(|source| SuiteError::Unknown {
                known: KNOWN.iter().map(|(known, _)| *known).collect(),
                got: name.to_owned(),
                source,
            })?,
        };
        Self::parse(name, &text)
    }

    fn parse(name: &str, text: &str) -> Result<Self, SuiteError> {
        let file: File = toml::from_str(text)
            .map_err(|source| SuiteError::Syntax { name: name.to_owned(), source })?;
        let mut points = Vec::new();
        for (n, set) in file.set.iter().enumerate() {
            if let Some(list) = set.empty_list() {
                return Err(SuiteError::Empty { name: name.to_owned(), set: n + 1, list });
            }
            set.points(&mut points);
        }
        let sha256 = Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Self { name: name.to_owned(), sha256, points })
    }
}

impl Set {
    fn empty_list(&self) -> Option<&'static str> {
        let lists = [
            ("batch", self.batch.is_empty()),
            ("q_len", self.q_len.as_ref().is_some_and(Vec::is_empty)),
            ("kv_len", self.kv_len.is_empty()),
            ("heads", self.heads.is_empty()),
            ("head_dim", self.head_dim.is_empty()),
            ("dtype", self.dtype.is_empty()),
            ("mask", self.mask.is_empty()),
            ("accumulation", self.accumulation.is_empty()),
        ];
        lists.into_iter().find_map(|(name, is_empty)| is_empty.then_some(name))
    }

    fn points(&self, to: &mut Vec<Point>) {
        let pages: Vec<Option<usize>> = if self.page_size.is_empty() {
            vec![None]
        } else {
            self.page_size.iter().copied().map(Some).collect()
        };
        for &batch in &self.batch {
            for &kv_len in &self.kv_len {
                let own = match self.phase {
                    Phase::Prefill => kv_len,
                    Phase::Decode => 1,
                };
                let q_lens = self.q_len.clone().unwrap_or_else(|| vec![own]);
                for q_len in q_lens {
                    self.kinds(&pages, to, |point| Point { batch, q_len, kv_len, ..point });
                }
            }
        }
    }

    /// Every point of one size, which `sized` gives it.
    fn kinds(&self, pages: &[Option<usize>], to: &mut Vec<Point>, sized: impl Fn(Point) -> Point) {
        for &(q_heads, kv_heads) in &self.heads {
            for &head_dim in &self.head_dim {
                for &dtype in &self.dtype {
                    for &mask in &self.mask {
                        for &page_size in pages {
                            for &accumulation in &self.accumulation {
                                to.push(sized(Point {
                                    phase: self.phase,
                                    batch: 0,
                                    q_len: 0,
                                    kv_len: 0,
                                    q_heads,
                                    kv_heads,
                                    head_dim,
                                    dtype,
                                    mask,
                                    page_size,
                                    accumulation,
                                }));
                            }
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SET: &str = r#"
        [[set]]
        phase = "decode"
        batch = [1, 8]
        kv_len = [1024]
        heads = [[32, 8]]
        head_dim = [128]
        dtype = ["bf16", "f32"]
        mask = ["full"]
        page_size = [16, 64]
        accumulation = ["f32", "f16"]
    "#;

    #[test]
    fn set_is_the_product_of_its_lists() {
        let suite = Suite::parse("test", SET).expect("a suite");
        assert_eq!(suite.points.len(), 2 * 2 * 2 * 2);
        let first = "decode/b1/q1/kv1024/32.8.128/bf16/full/page16";
        assert_eq!(suite.points[0].id(), first);
        assert_eq!(suite.points[1].id(), format!("{first}/acc-f16"));
    }

    #[test]
    fn known_suites_have_points_of_different_names() {
        for (name, _) in KNOWN {
            let suite = Suite::read(name).expect("a suite");
            let mut ids: Vec<_> = suite.points.iter().map(Point::id).collect();
            let count = ids.len();
            assert!(count > 0, "{name}");
            ids.sort();
            ids.dedup();
            assert_eq!(ids.len(), count, "{name}");
        }
    }

    #[test]
    fn suite_with_an_empty_list_or_an_unknown_key_is_refused() {
        let empty = SET.replace("batch = [1, 8]", "batch = []");
        let error = Suite::parse("test", &empty).expect_err("empty");
        assert!(matches!(error, SuiteError::Empty { set: 1, list: "batch", .. }), "{error}");
        let unknown = SET.replace("batch", "batches");
        assert!(matches!(Suite::parse("test", &unknown), Err(SuiteError::Syntax { .. })));
        assert!(matches!(Suite::read("no such file"), Err(SuiteError::Unknown { .. })));
    }
}
