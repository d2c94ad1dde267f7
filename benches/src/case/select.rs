//! The operation `select`: which kernel would run a call on a device that need not exist.
//!
//! The invariant: no tensor, no device and no backend take part; the answer is the selector's.

use std::num::NonZero;
use std::thread;

use attn_core::{Bytes, CudaCaps, DeviceCaps, HostCaps, Pass, Phase, Problem};
use attn_select::{choose, explain};

use super::description::{Attention, DeviceFields, Fields, SelectPass};
use super::failure::{Failure, Kind};
use super::problem::{self, CacheStrides};
use super::report::Answer;

/// # Errors
/// `unsupported` when no kernel takes the call; otherwise whatever the case deserves.
pub(crate) fn run(mut fields: Fields) -> Result<Answer, Failure> {
    let pass: SelectPass = fields.required("pass")?;
    let device: Option<DeviceFields> = fields.optional("device")?;
    let mut case = Attention::take(&mut fields)?;
    case.want = fields.optional("want")?;
    fields.finish()?;
    let core_pass = match pass {
        SelectPass::Forward | SelectPass::Decode => Pass::Forward,
        SelectPass::Backward => Pass::Backward,
    };
    let mut spec = problem::spec(&case, core_pass, CacheStrides::default())?;
    if pass == SelectPass::Decode {
        if spec.options.phase == Some(Phase::Prefill) {
            let message = "pass decode with the phase prefill forced: no kernel is both";
            return Err(Failure::new(Kind::Unsupported, message));
        }
        spec.options.phase = Some(Phase::Decode);
    }
    let problem = Problem::new(spec)?;
    let caps = DeviceCaps { host: host(), cuda: device.map(caps_of) };
    let plan = choose(&problem, &caps, attn_kernels::catalog())?;
    Ok(Answer {
        kernel: plan.kernel.to_owned(),
        plan: explain(&plan).to_string(),
        smem_bytes: Some(plan.shared_memory.0),
        workspace_bytes: Some(plan.workspace.0),
        ..Answer::default()
    })
}

/// The host as far as it is known without an engine.
fn host() -> HostCaps {
    let threads = thread::available_parallelism().map_or(1, NonZero::get);
    HostCaps { threads, ..HostCaps::default() }
}

fn caps_of(device: DeviceFields) -> CudaCaps {
    CudaCaps {
        name: device.name,
        compute: device.compute,
        sm_count: device.sm_count,
        smem_per_block: Bytes(device.smem_per_block),
        memory: Bytes(device.memory_bytes),
    }
}
