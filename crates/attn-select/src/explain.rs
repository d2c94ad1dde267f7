//! A plan in words.
//!
//! The invariant: every kernel of the catalogue appears, with the very reason that decided; nothing is
//! worked out again here, so that the words cannot part from the choice.

use std::fmt;

use attn_core::{Bytes, Pass, Plan};

/// A plan, its reason, and every kernel that was not taken, on several lines.
///
/// # Example
/// See the crate's root.
#[must_use]
pub fn explain(plan: &Plan) -> Explanation<'_> {
    Explanation { plan }
}

/// The text of [`explain`].
#[derive(Debug, Clone, Copy)]
pub struct Explanation<'a> {
    plan: &'a Plan,
}

impl fmt::Display for Explanation<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Plan { problem, kernel, engine, family, tile, split, reason, .. } = self.plan;
        let (workspace, shared) = (self.plan.workspace, self.plan.shared_memory);
        let pass = match problem.pass() {
            Pass::Forward => "forward",
            Pass::Backward => "backward",
        };
        let lengths = problem.lengths();
        writeln!(f, "{kernel} ({engine}, {family}): {reason}")?;
        writeln!(
            f,
            "  call: {pass}, q {}, kv {}, o {}, heads {}:{}, dim {}:{}, {} sequences, rows up to {}, keys up to {}",
            problem.q_dtype(),
            problem.kv_dtype(),
            problem.out_dtype(),
            problem.q_heads(),
            problem.kv_heads(),
            problem.head_dim(),
            problem.value_dim(),
            lengths.batch(),
            lengths.longest_q(),
            lengths.longest_kv(),
        )?;
        write!(f, "  how: tile {}x{}, keys {split}, workspace {workspace}", tile.q, tile.kv)?;
        if shared > Bytes::ZERO {
            write!(f, ", shared memory {shared} a block")?;
        }
        if self.plan.rejects.is_empty() {
            return Ok(());
        }
        write!(f, "\n  not taken:")?;
        for reject in &self.plan.rejects {
            write!(f, "\n    {reject}")?;
        }
        Ok(())
    }
}
