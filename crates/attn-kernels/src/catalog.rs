//! What exists, as data.
//!
//! The invariant: a kernel's description is what its tests run, and an option that a kernel lacks is
//! missing here, so that a selector refuses it before the kernel could drop it. Order is from the most
//! special to the most general: a selector takes the first that accepts.
//!
//! | kernel | engine | family | q, o | k, v | rows a sequence | not |
//! |---|---|---|---|---|---|---|
//! | `cpu_decode` | cpu | decode | f32 f16 bf16 | as q, or fp8 | at most 16 | |
//! | `cpu_prefill` | cpu | prefill | f32 f16 bf16 | as q, or fp8 | any | |
//! | `cpu_backward` | cpu | backward | f32 f16 bf16 | as q | any | paged or fp8 cache |
//!
//! Every kernel takes any head and value dimension, and gives equal bits for equal calls whatever the
//! number of threads.

use attn_core::KernelDesc;
#[cfg(feature = "cpu")]
use attn_core::{DType, DimRule, Engine, Family, Feature, Features};

/// Every kernel of this build, from the most special to the most general.
///
/// ```
/// let names: Vec<_> = attn_kernels::catalog().iter().map(|kernel| kernel.name).collect();
/// assert_eq!(names, ["cpu_decode", "cpu_prefill", "cpu_backward"]);
/// ```
#[must_use]
pub const fn catalog() -> &'static [KernelDesc] {
    CATALOG
}

#[cfg(feature = "cpu")]
/// Types with arithmetic; fp8 is a storage type of caches.
const FLOATS: &[DType] = &[DType::F32, DType::F16, DType::BF16];

#[cfg(feature = "cpu")]
const GRADIENTS: Features = Features::NONE.with(Feature::SinksGradient).with(Feature::BiasGradient);

#[cfg(not(feature = "cpu"))]
const CATALOG: &[KernelDesc] = &[];

#[cfg(feature = "cpu")]
const CATALOG: &[KernelDesc] = &[
    KernelDesc {
        name: "cpu_decode",
        family: Family::Decode,
        // All rows of a sequence are answered in one pass over a chunk of keys, and their partial
        // results are merged: worth it as long as they are few.
        max_query_rows: Some(16),
        workspace: crate::cpu::cost::decode,
        ..FORWARD
    },
    FORWARD,
    KernelDesc {
        name: "cpu_backward",
        family: Family::Backward,
        kv_dtypes: FLOATS,
        // Gradients of a cache are not defined: several sequences may share a page.
        features: Features::ALL.without(Feature::Paged).without(Feature::Fp8Cache),
        workspace: crate::cpu::cost::backward,
        ..FORWARD
    },
];

#[cfg(feature = "cpu")]
const FORWARD: KernelDesc = KernelDesc {
    name: "cpu_prefill",
    engine: Engine::Cpu,
    family: Family::Prefill,
    q_dtypes: FLOATS,
    kv_dtypes: &DType::ALL,
    head_dims: DimRule::ANY,
    value_dims: DimRule::ANY,
    max_query_rows: None,
    features: Features::ALL.minus(GRADIENTS),
    min_compute: None,
    workspace: crate::cpu::cost::prefill,
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn catalogue_names_are_unique() {
        for (n, kernel) in catalog().iter().enumerate() {
            assert!(catalog()[n + 1..].iter().all(|other| other.name != kernel.name));
        }
    }

    #[test]
    #[cfg(feature = "cpu")]
    fn catalogue_runs_from_special_to_general() {
        let rows: Vec<_> = catalog().iter().map(|kernel| kernel.max_query_rows).collect();
        assert_eq!(rows, [Some(16), None, None]);
    }
}
