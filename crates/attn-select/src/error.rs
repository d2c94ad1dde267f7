//! Why no plan was made.
//!
//! The invariant: a refusal by one kernel is not an error, only the refusal by all of them is, and
//! then the error holds every reason. A caller that wants one error type for the whole call turns
//! it into core's.

use std::fmt;

use attn_core::Reject;

/// Why [`crate::choose`] returned no plan.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Every kernel of the catalogue refused: expected one that takes the problem, got these reasons.
    #[error("no kernel takes this call: {}", Listed(rejects))]
    Unsupported {
        /// Every kernel with its reason, in catalogue order.
        rejects: Vec<Reject>,
    },
}

impl From<Error> for attn_core::Error {
    fn from(error: Error) -> Self {
        let Error::Unsupported { rejects } = error;
        Self::unsupported("this call", Listed(&rejects).to_string())
    }
}

/// Rejects on one line.
struct Listed<'a>(&'a [Reject]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("the catalogue is empty");
        }
        for (n, reject) in self.0.iter().enumerate() {
            if n > 0 {
                f.write_str("; ")?;
            }
            write!(f, "{reject}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use attn_core::{Feature, Refusal};

    use super::*;

    #[test]
    fn error_lists_every_reject() {
        let error = Error::Unsupported {
            rejects: vec![
                Reject { kernel: "a", why: Refusal::Disabled },
                Reject { kernel: "b", why: Refusal::Feature(Feature::Sinks) },
            ],
        };
        let text = "no kernel takes this call: a: switched off by the caller; b: cannot do: sinks";
        assert_eq!(error.to_string(), text);
        let core = attn_core::Error::from(error);
        assert!(
            matches!(&core, attn_core::Error::Unsupported { reason, .. } if reason.contains("b: cannot do: sinks"))
        );
        let empty = Error::Unsupported { rejects: vec![] };
        assert!(empty.to_string().contains("the catalogue is empty"));
    }
}
