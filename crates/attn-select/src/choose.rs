//! The entry: a problem, a machine and a catalogue become a plan.
//!
//! The invariant: the answer depends on the arguments alone, and names every kernel of the catalogue
//! once, as the one taken or with the reason why not. Stopping at the first kernel that accepts
//! would be cheaper, but would leave the reader of a plan guessing about the rest.

use attn_core::{DeviceCaps, KernelDesc, Plan, Problem, Refusal, Reject};

use crate::candidate::{Call, Fit, Standard};
use crate::error::Error;

/// Picks the kernel that runs `problem` on a machine, with its tile, split and workspace.
///
/// Kernels are asked in catalogue order and the first that accepts wins, so a catalogue runs from the most
/// special to the most general. A kernel that could run the problem but is expected to be slower than a later
/// one steps aside; it is taken after all when no other is left.
///
/// A plan does not depend on strides, pointers or contents, which [`Problem`] does not hold either.
///
/// # Errors
/// [`Error::Unsupported`] when every kernel refuses, with all their reasons.
///
/// # Example
/// See the crate's root.
pub fn choose(
    problem: &Problem,
    caps: &DeviceCaps,
    catalogue: &[KernelDesc],
) -> Result<Plan, Error> {
    let call = Call::new(problem, caps, catalogue);
    pick(&call, catalogue, Standard::Fastest)
        .or_else(|_| pick(&call, catalogue, Standard::Possible))
        .map_err(|rejects| Error::Unsupported { rejects })
}

/// The plan of the first kernel that meets the standard, or every refusal.
fn pick(
    call: &Call<'_>,
    catalogue: &[KernelDesc],
    standard: Standard,
) -> Result<Plan, Vec<Reject>> {
    let mut taken: Option<(&KernelDesc, Fit)> = None;
    let mut rejects = Vec::with_capacity(catalogue.len());
    for kernel in catalogue {
        let why = match (call.judge(kernel, standard), &taken) {
            (Err(why), _) => why,
            (Ok(_), Some((winner, _))) => Refusal::Outranked { by: winner.name },
            (Ok(fit), None) => {
                taken = Some((kernel, fit));
                continue;
            }
        };
        rejects.push(Reject { kernel: kernel.name, why });
    }
    let Some((kernel, fit)) = taken else {
        return Err(rejects);
    };
    Ok(Plan {
        problem: call.problem.clone(),
        kernel: kernel.name,
        engine: kernel.engine,
        family: kernel.family,
        tile: fit.tile,
        split: fit.split,
        workspace: (kernel.workspace)(call.problem, &call.caps.host, fit.tile, fit.split),
        shared_memory: fit.shared_memory,
        reason: fit.reason,
        rejects,
    })
}
