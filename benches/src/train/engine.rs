//! Which engine computes the fused attention.
//!
//! The invariant: an engine is asked for by name and never stands in for another: without a device, CUDA is an error.

use attn_core::{DType, DeviceCaps, KernelDesc, Pass, Plan};
use attn_kernels::cpu::CpuEngine;

use super::TrainError;
use super::attention::{Attention, Shape};
use super::cuda::OnDevice;
use super::fused::Fused;
use crate::device::Gpu;

/// An engine by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Backend {
    /// The CPU engine, in f32.
    Cpu,
    /// The first CUDA device, in bf16: its tiled kernels take 16 bits.
    Cuda,
}

impl Backend {
    /// The type of the attention's tensors.
    pub(super) const fn dtype(self) -> DType {
        match self {
            Self::Cpu => DType::F32,
            Self::Cuda => DType::BF16,
        }
    }
}

/// An engine that was found.
#[derive(Debug)]
pub(super) enum Engine {
    Cpu(CpuEngine),
    Cuda(Gpu),
}

impl Engine {
    /// Looks for the engine.
    pub(super) fn open(backend: Backend) -> Result<Self, attn_kernels::Error> {
        Ok(match backend {
            Backend::Cpu => Self::Cpu(CpuEngine::new()?),
            Backend::Cuda => Self::Cuda(Gpu::open()?),
        })
    }

    /// What the report calls it.
    pub(super) fn describe(&self) -> String {
        match self {
            Self::Cpu(_) => "cpu".to_owned(),
            Self::Cuda(gpu) => {
                let device = gpu.engine.caps().cuda.map_or_else(String::new, |cuda| cuda.name);
                format!("cuda ({device})")
            }
        }
    }

    /// The attention of a shape by this engine.
    pub(super) fn attention(&self, shape: &Shape) -> Result<Box<dyn Attention + '_>, TrainError> {
        Ok(match self {
            Self::Cpu(engine) => Box::new(Fused::new(engine, shape)?),
            Self::Cuda(gpu) => Box::new(OnDevice::new(gpu, shape)?),
        })
    }
}

/// The plans of both passes.
pub(super) fn plans(
    shape: &Shape,
    caps: &DeviceCaps,
    kernels: &'static [KernelDesc],
) -> Result<[Plan; 2], TrainError> {
    let plan = |pass| -> Result<Plan, TrainError> {
        Ok(attn_select::choose(&shape.problem(pass)?, caps, kernels)?)
    };
    Ok([plan(Pass::Forward)?, plan(Pass::Backward)?])
}
