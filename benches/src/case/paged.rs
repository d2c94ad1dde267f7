//! The operation `paged_ops`: a program for the page allocator, one observation per step.
//!
//! The invariant: names of sequences are kept here and everything else is asked of the pool after each
//! step, so that the observations show its books and not a copy of them.

use std::collections::BTreeMap;

use attn_paged::{Allocator, BlockCopy, Config, Error, Namespace, PrefixHash, SeqId};
use serde::Serialize;

use super::description::{Fields, Hash, Names, Op, count};
use super::failure::{Failure, Kind};
use super::report::Answer;

/// # Errors
/// `invalid_argument` for a pool that cannot be made. Errors of operations are observations.
pub(crate) fn run(mut fields: Fields) -> Result<Answer, Failure> {
    let ops: Vec<Op> = fields.required("ops")?;
    let mut pool = Pool::new(&mut fields)?;
    fields.finish()?;
    let mut observations = Vec::with_capacity(ops.len());
    for op in &ops {
        let outcome = pool.step(op);
        observations.push(serde_json::to_value(pool.observe(outcome)?)?);
    }
    let config = pool.allocator.config();
    Ok(Answer {
        kernel: "attn-paged".to_owned(),
        plan: format!(
            "a pool of {} blocks of {} tokens, prefix cache {}",
            config.blocks(),
            config.block_size(),
            if config.has_prefix_cache() { "on" } else { "off" }
        ),
        observations: Some(observations),
        ..Answer::default()
    })
}

/// What an operation returned.
#[derive(Debug, Default)]
struct Outcome {
    hit: Option<usize>,
    can: Option<bool>,
    copies: Vec<(u32, u32)>,
}

#[derive(Debug, Serialize)]
struct Observation {
    ok: bool,
    error: Option<Kind>,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<String>,
    free: usize,
    hit: Option<usize>,
    can: Option<bool>,
    copies: Vec<(u32, u32)>,
    seqs: BTreeMap<String, Sequence>,
}

#[derive(Debug, Serialize)]
struct Sequence {
    blocks: Vec<u32>,
    refs: Vec<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    row: Option<Vec<i32>>,
}

struct Pool {
    allocator: Allocator,
    names: BTreeMap<String, SeqId>,
    width: Option<usize>,
}

/// The widest table whose rows are written out.
const MOST_COLUMNS: usize = 1 << 20;

impl Pool {
    fn new(fields: &mut Fields) -> Result<Self, Failure> {
        let hash = match fields.optional("hash")? {
            Hash::Default => PrefixHash::Default,
            Hash::Constant => PrefixHash::Constant,
        };
        let blocks = count("num_blocks", fields.required("num_blocks")?)?;
        let size = count("block_size", fields.required("block_size")?)?;
        let prefix_cache: Option<bool> = fields.optional("prefix_cache")?;
        let width: Option<i64> = fields.optional("table_width")?;
        let width = width.map(|width| count("table_width", width)).transpose()?;
        // Each observation holds a row of this width for each sequence.
        if let Some(width) = width.filter(|&width| width > MOST_COLUMNS) {
            let message = format!("table_width: expected at most {MOST_COLUMNS}, got {width}");
            return Err(Failure::new(Kind::OutOfMemory, message));
        }
        let mut config = Config::new(blocks, size).hash(hash);
        if let Some(on) = prefix_cache {
            config = config.prefix_cache(on);
        }
        if let Some(width) = width {
            config = config.table_width(width);
        }
        Ok(Self { allocator: Allocator::new(config)?, names: BTreeMap::new(), width })
    }

    fn step(&mut self, op: &Op) -> Result<Outcome, Failure> {
        let pool = &mut self.allocator;
        match op {
            Op::Alloc { seq, tokens, ns } => {
                check_new(&self.names, seq)?;
                let allocation = pool.alloc(&ids(tokens)?, Namespace::new(&name(ns)?))?;
                self.names.insert(seq.clone(), allocation.seq);
                Ok(Outcome { hit: Some(allocation.hit), ..Outcome::default() })
            }
            Op::CanAlloc { tokens, ns } => {
                let can = pool.can_alloc(&ids(tokens)?, Namespace::new(&name(ns)?));
                Ok(Outcome { can: Some(can), ..Outcome::default() })
            }
            Op::Match { tokens, ns } => {
                let hit = pool.match_prefix(&ids(tokens)?, Namespace::new(&name(ns)?));
                Ok(Outcome { hit: Some(hit), ..Outcome::default() })
            }
            Op::Append { seq, tokens } => {
                let copy = pool.append(find(&self.names, seq)?, &ids(tokens)?)?;
                let copies = copy.iter().map(|&BlockCopy { from, to }| (from, to)).collect();
                Ok(Outcome { copies, ..Outcome::default() })
            }
            Op::Commit { seq, n } => {
                pool.commit(find(&self.names, seq)?, count("n", *n)?)?;
                Ok(Outcome::default())
            }
            Op::Fork { seq, dst } => {
                let source = find(&self.names, seq)?;
                check_new(&self.names, dst)?;
                let fork = pool.fork(source)?;
                self.names.insert(dst.clone(), fork);
                Ok(Outcome::default())
            }
            Op::Truncate { seq, n } => {
                pool.truncate(find(&self.names, seq)?, count("n", *n)?)?;
                Ok(Outcome::default())
            }
            Op::Free { seq } => {
                pool.free(find(&self.names, seq)?)?;
                self.names.remove(seq);
                Ok(Outcome::default())
            }
        }
    }

    fn observe(&self, outcome: Result<Outcome, Failure>) -> Result<Observation, Failure> {
        let pool = &self.allocator;
        let sequence = |&seq: &SeqId| -> Result<Sequence, Error> {
            let row = match self.width {
                None => None,
                Some(width) => {
                    let mut row = vec![0; width];
                    pool.write_padded_table(&[seq], width, &mut row)?;
                    Some(row)
                }
            };
            let blocks = pool.blocks(seq)?.to_vec();
            Ok(Sequence { blocks, refs: pool.holders(seq)?.collect(), row })
        };
        let seqs = self
            .names
            .iter()
            .map(|(name, seq)| Ok((name.clone(), sequence(seq)?)))
            .collect::<Result<_, Error>>()?;
        let (ok, outcome, failure) = match outcome {
            Ok(outcome) => (true, outcome, None),
            Err(failure) => (false, Outcome::default(), Some(failure)),
        };
        let Outcome { hit, can, copies } = outcome;
        Ok(Observation {
            ok,
            error: failure.as_ref().map(|failure| failure.kind),
            message: failure.map(|failure| failure.message),
            free: pool.free_blocks(),
            hit,
            can,
            copies,
            seqs,
        })
    }
}

fn find(names: &BTreeMap<String, SeqId>, seq: &str) -> Result<SeqId, Failure> {
    let missing =
        || Failure::new(Kind::NotFound, format!("seq: expected a live sequence, got {seq}"));
    names.get(seq).copied().ok_or_else(missing)
}

fn check_new(names: &BTreeMap<String, SeqId>, seq: &str) -> Result<(), Failure> {
    if names.contains_key(seq) {
        let message = format!("seq: expected a new name, got {seq}, which is live");
        return Err(Failure::new(Kind::AlreadyExists, message));
    }
    Ok(())
}

fn ids(tokens: &[i64]) -> Result<Vec<u32>, Failure> {
    let id = |&token: &i64| {
        u32::try_from(token)
            .map_err(|_| Failure::invalid(format!("tokens: expected ids of 32 bits, got {token}")))
    };
    tokens.iter().map(id).collect()
}

/// The bytes that tell namespaces apart; none for the default one.
fn name(ns: &Names) -> Result<Vec<u8>, Failure> {
    // Keys are sorted, so equal maps have equal bytes.
    if ns.is_empty() { Ok(Vec::new()) } else { Ok(serde_json::to_vec(ns)?) }
}
