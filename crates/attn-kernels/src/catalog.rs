//! What exists, as data.
//!
//! The invariant: a kernel's description is what its tests run, and an option that a kernel lacks is
//! missing here, so that a selector refuses it before the kernel could drop it. Order is from the most
//! special to the most general: a selector takes the first that accepts.
//!
//! | kernel | engine | family | q | k, v | head and value dims | rows a sequence | not |
//! |---|---|---|---|---|---|---|---|
//! | `cuda_latent_sm90a` | cuda | decode | f16 bf16 | as q, latent rows | 576 and 512 | any | dense keys, an fp8 cache |
//! | `cuda_decode_sm90a` | cuda | decode | f16 bf16 | as q, or fp8 | multiples of 8 to 128 | at most 16 | batch invariance |
//! | `cuda_decode` | cuda | decode | f16 bf16 | as q, or fp8 | multiples of 8 to 256 | at most 16 | |
//! | `cuda_prefill_sm90a` | cuda | prefill | f16 bf16 e4m3 | as q | multiples of 8 to 256, e4m3 of 16 | any | an fp8 cache of wider queries, pages of no multiple of 8 rows |
//! | `cuda_prefill` | cuda | prefill | f16 bf16 | as q, or fp8 | multiples of 8 to 256 | any | |
//! | `cuda_naive` | cuda | general | f32 f16 bf16 e4m3 | as q, or fp8 | any | any | |
//! | `cpu_decode` | cpu | decode | f32 f16 bf16 e4m3 | as q, or fp8 | any | at most 16 | |
//! | `cpu_prefill` | cpu | prefill | f32 f16 bf16 e4m3 | as q, or fp8 | any | any | |
//! | `cpu_backward` | cpu | backward | f32 f16 bf16 | as q | any | any | paged or fp8 cache |
//!
//! Decode kernels divide the keys of a sequence, and so does `cuda_prefill_sm90a` where rows alone leave the device idle.
//!
//! The output has the type of the queries, bf16 where these are e4m3.
//!
//! Every kernel gives equal bits for equal calls, whatever the number of threads. The tiled CUDA kernels want rows
//! that start on 16 bytes. Those of pages are known to a plan; those of dense tensors are not, and the engine refuses
//! others than it can load; `cuda_prefill_sm90a` also wants strides of q, k and v that are not negative.

#[cfg(any(feature = "cpu", feature = "cuda"))]
use attn_core::{DType, DimRule, Family, Feature, Features};
use attn_core::{Engine, KernelDesc};

/// Every kernel of this build, from the most special to the most general.
///
/// ```
/// let names: Vec<_> = attn_kernels::catalog().iter().map(|kernel| kernel.name).collect();
/// assert_eq!(
///     names,
///     [
///         "cuda_latent_sm90a", "cuda_decode_sm90a", "cuda_decode", "cuda_prefill_sm90a", "cuda_prefill", "cuda_naive",
///         "cpu_decode", "cpu_prefill", "cpu_backward",
///     ]
/// );
/// ```
#[must_use]
pub const fn catalog() -> &'static [KernelDesc] {
    CATALOG
}

/// The kernels of one engine, in the order of [`catalog`].
///
/// A caller whose tensors are on a device chooses from these: a plan for the host would be of no use to it.
#[must_use]
pub fn catalog_of(engine: Engine) -> &'static [KernelDesc] {
    let first = CATALOG.iter().position(|kernel| kernel.engine == engine).unwrap_or(CATALOG.len());
    let own = CATALOG[first..].iter().take_while(|kernel| kernel.engine == engine).count();
    &CATALOG[first..first + own]
}

/// Types of a backward.
#[cfg(feature = "cpu")]
const FLOATS: &[DType] = &[DType::F32, DType::F16, DType::BF16];

/// Every type that queries may have.
#[cfg(any(feature = "cpu", feature = "cuda"))]
const QUERIES: &[DType] = &[DType::F32, DType::F16, DType::BF16, DType::F8E4M3];

/// What a forward can be asked for.
#[cfg(any(feature = "cpu", feature = "cuda"))]
const FORWARD: Features =
    Features::ALL.without(Feature::SinksGradient).without(Feature::BiasGradient);

/// The same of the kernels whose products are of 16-bit types: they widen the keys of a cache, and no queries.
#[cfg(feature = "cuda")]
const TILED: Features = FORWARD.without(Feature::Fp8Queries).without(Feature::OddFp8Rows);

const CATALOG: &[KernelDesc] = &[
    #[cfg(feature = "cuda")]
    KernelDesc {
        name: "cuda_latent_sm90a",
        family: Family::Decode,
        kv_dtypes: &[DType::F16, DType::BF16],
        head_dims: DimRule::only(crate::cuda::config::latent::HEAD_DIM),
        value_dims: DimRule::only(crate::cuda::config::latent::VALUE_DIM),
        // No kernel of prompts has such rows.
        max_query_rows: None,
        features: TILED
            .without(Feature::UnalignedPages)
            .without(Feature::Fp8Cache)
            .without(Feature::PaddedKeys),
        // A row of the cache is read once, as key and as value.
        requires: Features::NONE.with(Feature::LatentCache),
        min_compute: Some((9, 0)),
        max_compute: Some((9, 0)),
        tiles: crate::cuda::config::latent::tiles,
        shared_memory: crate::cuda::config::latent::smem,
        workspace: crate::cuda::cost::tiles,
        ..CUDA_PREFILL
    },
    #[cfg(feature = "cuda")]
    KernelDesc {
        name: "cuda_decode_sm90a",
        family: Family::Decode,
        // Shared memory of eight teams, for rows of up to so many columns.
        head_dims: DimRule { max: 128, ..TILED_DIMS },
        value_dims: DimRule { max: 128, ..TILED_DIMS },
        max_query_rows: Some(16),
        // A block takes a multiprocessor.
        most_units: Some(1),
        // Parts and clusters are as many as fill the device.
        features: TILED.without(Feature::UnalignedPages).without(Feature::BatchInvariant),
        min_compute: Some((9, 0)),
        max_compute: Some((9, 0)),
        tiles: crate::cuda::config::decode_sm90a_tiles,
        shared_memory: crate::cuda::config::decode_sm90a_smem,
        workspace: crate::cuda::cost::tiles,
        ..CUDA_PREFILL
    },
    #[cfg(feature = "cuda")]
    KernelDesc {
        name: "cuda_decode",
        family: Family::Decode,
        // As many rows as are worth a part of the keys of their own; all of a group's heads share a tile.
        max_query_rows: Some(16),
        tiles: crate::cuda::config::decode_tiles,
        shared_memory: crate::cuda::config::decode_smem,
        workspace: crate::cuda::cost::tiles,
        ..CUDA_PREFILL
    },
    #[cfg(feature = "cuda")]
    KernelDesc {
        name: "cuda_prefill_sm90a",
        q_dtypes: &[DType::F16, DType::BF16, DType::F8E4M3],
        kv_dtypes: &[DType::F16, DType::BF16, DType::F8E4M3],
        divides_keys: true,
        // Instructions of Hopper alone.
        min_compute: Some((9, 0)),
        max_compute: Some((9, 0)),
        features: FORWARD
            .without(Feature::Fp8Cache)
            .without(Feature::UnalignedPages)
            .without(Feature::OddPages)
            .without(Feature::OddFp8Rows),
        tiles: crate::cuda::config::hopper::tiles,
        shared_memory: crate::cuda::config::hopper::smem,
        workspace: crate::cuda::cost::ordered,
        ..CUDA_PREFILL
    },
    #[cfg(feature = "cuda")]
    CUDA_PREFILL,
    #[cfg(feature = "cuda")]
    KernelDesc {
        name: "cuda_naive",
        family: Family::General,
        features: FORWARD,
        q_dtypes: QUERIES,
        kv_dtypes: &DType::ALL,
        head_dims: DimRule::ANY,
        value_dims: DimRule::ANY,
        tiles: crate::cuda::config::naive_tiles,
        shared_memory: crate::cuda::config::naive_smem,
        workspace: crate::cuda::cost::rows,
        ..CUDA_PREFILL
    },
    #[cfg(feature = "cpu")]
    KernelDesc {
        name: "cpu_decode",
        family: Family::Decode,
        // All rows of a sequence are answered in one pass over a chunk of keys, and their partial
        // results are merged: worth it as long as they are few.
        max_query_rows: Some(16),
        workspace: crate::cpu::cost::decode,
        ..CPU_PREFILL
    },
    #[cfg(feature = "cpu")]
    CPU_PREFILL,
    #[cfg(feature = "cpu")]
    KernelDesc {
        name: "cpu_backward",
        family: Family::Backward,
        q_dtypes: FLOATS,
        kv_dtypes: FLOATS,
        // Gradients of a cache are not defined: several sequences may share a page.
        features: Features::ALL
            .without(Feature::Paged)
            .without(Feature::LatentCache)
            .without(Feature::Fp8Cache)
            .without(Feature::Fp8Queries)
            .without(Feature::OddFp8Rows),
        workspace: crate::cpu::cost::backward,
        ..CPU_PREFILL
    },
];

#[cfg(feature = "cuda")]
const CUDA_PREFILL: KernelDesc = KernelDesc {
    name: "cuda_prefill",
    engine: Engine::Cuda,
    family: Family::Prefill,
    q_dtypes: &[DType::F16, DType::BF16],
    kv_dtypes: &[DType::F16, DType::BF16, DType::F8E4M3, DType::F8E5M2],
    head_dims: TILED_DIMS,
    value_dims: TILED_DIMS,
    max_query_rows: None,
    most_units: None,
    divides_keys: false,
    // Rows are copied in pieces of 16 bytes.
    features: TILED.without(Feature::UnalignedPages),
    requires: Features::NONE,
    min_compute: Some((8, 0)),
    max_compute: None,
    tiles: crate::cuda::config::prefill_tiles,
    shared_memory: crate::cuda::config::prefill_smem,
    workspace: crate::cuda::cost::whole_tiles,
};

/// A row is copied in chunks of 16 bytes, and its accumulator has to fit the registers.
#[cfg(feature = "cuda")]
const TILED_DIMS: DimRule = DimRule { min: 8, max: crate::cuda::config::MOST_DIM, multiple_of: 8 };

#[cfg(feature = "cpu")]
const CPU_PREFILL: KernelDesc = KernelDesc {
    name: "cpu_prefill",
    engine: Engine::Cpu,
    family: Family::Prefill,
    q_dtypes: QUERIES,
    kv_dtypes: &DType::ALL,
    head_dims: DimRule::ANY,
    value_dims: DimRule::ANY,
    max_query_rows: None,
    most_units: None,
    divides_keys: false,
    features: FORWARD,
    requires: Features::NONE,
    min_compute: None,
    max_compute: None,
    tiles: |_| &[],
    shared_memory: |_, _| attn_core::Bytes::ZERO,
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
    fn catalogue_states_fp8_queries_as_type_and_as_feature() {
        for kernel in catalog() {
            let is_taken = kernel.q_dtypes.contains(&DType::F8E4M3);
            assert_eq!(is_taken, kernel.features.contains(Feature::Fp8Queries), "{}", kernel.name);
        }
    }

    #[test]
    fn catalogue_runs_from_special_to_general() {
        for engine in [Engine::Cuda, Engine::Cpu] {
            // Those of one kind of storage come first.
            let general =
                catalog_of(engine).iter().skip_while(|kernel| kernel.requires != Features::NONE);
            assert!(general.clone().all(|kernel| kernel.requires == Features::NONE));
            let rows: Vec<_> = general.map(|kernel| kernel.max_query_rows).collect();
            let is_sorted = rows.is_sorted_by_key(|most| most.is_none());
            assert!(rows.is_empty() || rows[0] == Some(16) && is_sorted, "{engine}");
        }
        let parts = catalog_of(Engine::Cuda).len() + catalog_of(Engine::Cpu).len();
        assert_eq!(parts, catalog().len());
    }
}
