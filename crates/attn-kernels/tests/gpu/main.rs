//! The engine on a real device: memory, launches, captures, and every kernel against the reference.
//!
//! The invariant: where no driver or device is found each test says so on one line and passes, unless
//! `ATTN_LIBCUDA` names the driver: a machine that was told where it is must not skip. The binary needs nothing but
//! itself, a driver, and NVRTC, so that it can be carried to a machine that has them.

#![cfg(feature = "cuda")]

mod backward;
mod capture;
mod cascade;
mod errors;
mod forward;
mod growing;
mod memory;
mod pages;
mod repeat;
mod step;
mod upload;

use std::env;
use std::io::Write as _;

use attn_core::{Bytes, Family, Plan, Problem, Split, Tile};
use attn_kernels::cuda::CudaEngine;
use attn_kernels::{Error, catalog};

/// An engine on the first device, or `None` after a line that says what was looked for.
fn engine(test: &str) -> Option<CudaEngine> {
    match CudaEngine::new(0) {
        Ok(engine) => Some(engine),
        Err(error @ Error::DriverMissing { .. }) if env::var_os("ATTN_LIBCUDA").is_none() => {
            let places = error.to_string().lines().count() - 1;
            // Past the capture of the test harness, which hides what a passing test prints.
            let _ = writeln!(
                std::io::stderr(),
                "{test}: skipped: libcuda.so.1 was not found in {places} places"
            );
            None
        }
        // A driver without a device, or the stand-in that toolkits bring to link against.
        Err(Error::Driver { name, .. })
            if ["CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_STUB_LIBRARY"].contains(&name.as_str()) =>
        {
            let _ = writeln!(std::io::stderr(), "{test}: skipped: the driver has no device");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// Whether the device runs Hopper's own instructions.
fn is_hopper(engine: &CudaEngine) -> bool {
    engine.caps().cuda.is_some_and(|device| device.compute == (9, 0))
}

/// A plan for a kernel by name, with its first tile that a block has the memory for, if any: a type that the kernel does not
/// take may fit none, and the engine refuses the plan.
fn plan(engine: &CudaEngine, kernel: &str, problem: &Problem, split: Split) -> Plan {
    let desc = catalog().iter().find(|desc| desc.name == kernel).expect("in the catalogue");
    let caps = engine.caps();
    let smem = caps.cuda.expect("a device").smem_per_block;
    let fits = |tile: &&Tile| (desc.shared_memory)(problem, **tile) <= smem;
    let tiles = (desc.tiles)(problem);
    let tile = *tiles.iter().find(fits).unwrap_or(&tiles[0]);
    Plan {
        problem: problem.clone(),
        kernel: desc.name,
        engine: desc.engine,
        family: desc.family,
        tile,
        split,
        workspace: Bytes::ZERO,
        shared_memory: (desc.shared_memory)(problem, tile),
        reason: "a test",
        rejects: Vec::new(),
    }
}

#[test]
fn catalogue_has_the_family_of_each_tested_kernel() {
    for (name, family) in [
        ("cuda_naive", Family::General),
        ("cuda_prefill", Family::Prefill),
        ("cuda_prefill_sm90a", Family::Prefill),
        ("cuda_decode", Family::Decode),
        ("cuda_decode_sm90a", Family::Decode),
        ("cuda_latent_sm90a", Family::Decode),
        ("cuda_backward", Family::Backward),
        ("cuda_backward_sm90a", Family::Backward),
        ("cuda_backward_naive", Family::Backward),
    ] {
        assert!(catalog().iter().any(|desc| desc.name == name && desc.family == family), "{name}");
    }
}
