//! The kernel instances that are shipped: chosen by frequency, some hundred, of which a
//! processor gets those of its own.
//!
//! The invariant: every instance here has a recorded register, spill and shared-memory figure for
//! every arch it is shipped for. Any other combination compiles on first use from the same sources.

use attn_core::{
    CacheLayout, DType, Dropout, KvStorage, PageOrder, Problem, ProblemSpec, Tile, ValueStorage,
};

use crate::cuda::backward::{config as backward, hopper};
use crate::cuda::config::{self, latent};
use crate::spec::{Arch, Entry, KernelSpec};

/// An instance and what a launch of it asks of a multiprocessor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    /// What to compile.
    pub spec: KernelSpec,
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory of a block.
    pub dynamic_smem: u32,
}

impl Instance {
    /// Whether devices of an arch are shipped this instance.
    ///
    /// The portable prefill over 16-bit pages is not for Hopper: `cuda_prefill_sm90a` takes such calls but those of pages
    /// that are no multiple of 8 tokens, which compile it at first use. It spills there at 128 columns.
    #[must_use]
    pub fn ships_for(&self, arch: &Arch) -> bool {
        let spec = &self.spec;
        let has_hopper_twin = spec.entry() == Entry::Prefill
            && spec.get("paged") == Some(1)
            && spec.get("kv_dtype") == spec.get("dtype");
        let is_hopper = Entry::PrefillSm90a.compiles_for(arch);
        // Of the portable kernels the block that ends last joins the parts.
        let is_wanted = spec.entry() != Entry::MergeParts || is_hopper;
        spec.entry().compiles_for(arch) && is_wanted && !(has_hopper_twin && is_hopper)
    }
}

/// The kind of call that a forward instance serves.
#[derive(Debug, Clone, Copy)]
struct Kind {
    entry: Entry,
    q_dtype: DType,
    kv_dtype: DType,
    dims: (usize, usize),
    is_paged: bool,
    is_general: bool,
    is_capped: bool,
    is_packed: bool,
    has_parts: bool,
    is_latent: bool,
    has_dropout: bool,
    tile: Tile,
}

const BF16: DType = DType::BF16;
const F16: DType = DType::F16;
const E4M3: DType = DType::F8E4M3;
const E5M2: DType = DType::F8E5M2;

/// The tiles that a device with 227 KiB of shared memory a block gets.
const ROWS_128: Tile = Tile { q: 128, kv: 64 };
const ROWS_128_LONG: Tile = Tile { q: 128, kv: 128 };
const ROWS_192: Tile = Tile { q: 192, kv: 128 };
const ROWS_192_FP8: Tile = Tile { q: 192, kv: 96 };
const ROWS_128_FP8: Tile = Tile { q: 128, kv: 96 };
const ROWS_64: Tile = Tile { q: 64, kv: 64 };
const ROWS_32: Tile = Tile { q: 32, kv: 16 };
const ROWS_16: Tile = Tile { q: 16, kv: 16 };
const ROWS_16_NARROW: Tile = Tile { q: 16, kv: 32 };
const ROWS_16_HOPPER: Tile = Tile { q: 16, kv: 128 };
const ROWS_16_HOPPER_NARROW: Tile = Tile { q: 16, kv: 256 };

impl Kind {
    const fn prefill(dtype: DType, dim: usize) -> Self {
        Self {
            entry: Entry::Prefill,
            q_dtype: dtype,
            kv_dtype: dtype,
            dims: (dim, dim),
            is_paged: false,
            is_general: false,
            is_capped: false,
            is_packed: false,
            has_parts: false,
            is_latent: false,
            has_dropout: false,
            tile: ROWS_128,
        }
    }

    const fn hopper(dtype: DType, dims: (usize, usize), tile: Tile) -> Self {
        Self { entry: Entry::PrefillSm90a, dims, tile, ..Self::prefill(dtype, dims.0) }
    }

    const fn decode(dtype: DType, dim: usize, tile: Tile) -> Self {
        Self { entry: Entry::Decode, tile, is_paged: true, ..Self::prefill(dtype, dim) }
    }

    const fn latent(dtype: DType) -> Self {
        Self {
            entry: Entry::LatentSm90a,
            dims: (latent::HEAD_DIM, latent::VALUE_DIM),
            is_latent: true,
            ..Self::decode(dtype, latent::HEAD_DIM, ROWS_64)
        }
    }

    /// The instance, through a problem that asks for it.
    fn instance(self) -> Option<Instance> {
        let (dim, value_dim) = self.dims;
        // A row of a group of two leaves most of a tile empty.
        let heads = if self.is_packed { 2 } else { 1 };
        let mut spec = ProblemSpec::new(self.q_dtype, heads, 1, dim, &[1], &[1]);
        spec.value_dim = value_dim;
        spec.kv_dtype = self.kv_dtype;
        spec.alibi = self.is_general;
        spec.dropout = self.has_dropout.then_some(Dropout { p: 0.5 });
        spec.softcap = self.is_capped.then_some(1.0);
        if self.is_paged {
            let value = if self.is_latent {
                ValueStorage::PrefixOfKey(value_dim)
            } else {
                ValueStorage::Separate(value_dim)
            };
            let order = PageOrder::Nhd;
            let layout = CacheLayout::contiguous(self.kv_dtype, order, 16, 1, dim, value);
            spec.kv = KvStorage::Paged(layout.ok()?);
        }
        let problem = Problem::new(spec).ok()?;
        Some(config::instance(self.entry, &problem, self.tile, self.has_parts))
    }
}

/// Forward instances, the most frequent first.
fn forward_kinds() -> Vec<Kind> {
    let mut kinds = Vec::new();
    for dtype in [BF16, F16] {
        for dim in [64, 96, 128, 192, 256] {
            kinds.push(Kind::prefill(dtype, dim));
        }
        for dim in [64, 128] {
            let tile = if dim == 64 { ROWS_192 } else { ROWS_128_LONG };
            kinds.push(Kind::hopper(dtype, (dim, dim), tile));
        }
        kinds.push(Kind { is_paged: true, ..Kind::hopper(dtype, (128, 128), ROWS_128_LONG) });
        // Key and value dimensions of latent attention's prompts.
        kinds.push(Kind { dims: (192, 128), ..Kind::prefill(dtype, 192) });
        for dim in [64, 128] {
            // Prompts after a cached prefix.
            kinds.push(Kind { is_paged: true, ..Kind::prefill(dtype, dim) });
            kinds.push(Kind { is_general: true, ..Kind::prefill(dtype, dim) });
            // Short prompts.
            kinds.push(Kind { tile: ROWS_64, ..Kind::prefill(dtype, dim) });
            let rows = if dim == 64 { ROWS_16_NARROW } else { ROWS_16 };
            kinds.push(Kind::decode(dtype, dim, rows));
            kinds.push(Kind { kv_dtype: E4M3, ..Kind::decode(dtype, dim, rows) });
            let rows = if dim == 64 { ROWS_16_HOPPER_NARROW } else { ROWS_16_HOPPER };
            let hopper = Kind { entry: Entry::DecodeSm90a, ..Kind::decode(dtype, dim, rows) };
            kinds.push(hopper);
            kinds.push(Kind { kv_dtype: E4M3, ..hopper });
        }
        kinds.push(Kind::decode(dtype, 256, ROWS_16));
        for tile in [ROWS_32, ROWS_64] {
            kinds.push(Kind::decode(dtype, 128, tile));
        }
        kinds.push(Kind { is_general: true, ..Kind::decode(dtype, 128, ROWS_16) });
        kinds.push(Kind { is_paged: false, ..Kind::decode(dtype, 128, ROWS_16) });
        kinds.push(Kind::latent(dtype));
    }
    // Models for Hopper come in bf16.
    for (dims, tile) in
        [((64, 64), ROWS_128_LONG), ((192, 128), ROWS_128_LONG), ((256, 256), ROWS_128)]
    {
        kinds.push(Kind::hopper(BF16, dims, tile));
    }
    for dim in [64, 128] {
        let hopper = Kind::hopper(BF16, (dim, dim), ROWS_128_LONG);
        kinds.push(Kind { is_capped: true, ..hopper });
    }
    kinds.push(Kind { is_paged: true, ..Kind::hopper(BF16, (64, 64), ROWS_128_LONG) });
    // Short prompts of grouped heads, and their few rows over long caches.
    for is_paged in [false, true] {
        for has_parts in [false, true] {
            let hopper = Kind::hopper(BF16, (128, 128), ROWS_128_LONG);
            kinds.push(Kind { is_packed: true, is_paged, has_parts, ..hopper });
        }
    }
    let hopper = Kind::hopper(F16, (128, 128), ROWS_128_LONG);
    kinds.push(Kind { is_packed: true, is_paged: true, has_parts: true, ..hopper });
    let hopper = Kind::hopper(BF16, (64, 64), ROWS_128_LONG);
    kinds.push(Kind { is_packed: true, is_paged: true, has_parts: true, ..hopper });
    kinds.push(Kind { is_packed: true, ..Kind::hopper(BF16, (64, 64), ROWS_128_LONG) });
    for (dim, tile) in [(64, ROWS_192), (128, ROWS_192_FP8), (256, ROWS_128_FP8)] {
        kinds.push(Kind::hopper(E4M3, (dim, dim), tile));
    }
    kinds
}

/// Every shipped instance.
#[must_use]
pub fn shipped() -> Vec<Instance> {
    let mut all: Vec<_> = forward_kinds().into_iter().filter_map(Kind::instance).collect();
    all.extend(backward_kinds().into_iter().filter_map(BackwardKind::instance));
    all.extend(helpers());
    all
}

/// The kind of call that a tiled backward instance serves.
#[derive(Debug, Clone, Copy)]
struct BackwardKind {
    dtype: DType,
    dims: (usize, usize),
    is_general: bool,
    /// On Hopper's own instructions.
    is_hopper: bool,
    is_capped: bool,
    is_ordered: bool,
}

impl BackwardKind {
    const fn plain(dtype: DType, dim: usize) -> Self {
        Self {
            dtype,
            dims: (dim, dim),
            is_general: false,
            is_hopper: false,
            is_capped: false,
            is_ordered: false,
        }
    }

    const fn hopper(dtype: DType, dim: usize) -> Self {
        Self { is_hopper: true, ..Self::plain(dtype, dim) }
    }

    /// The instance that a device with 227 KiB of shared memory a block gets.
    fn instance(self) -> Option<Instance> {
        let mut spec = ProblemSpec::new(self.dtype, 1, 1, self.dims.0, &[1], &[1]);
        (spec.value_dim, spec.alibi) = (self.dims.1, self.is_general);
        spec.softcap = self.is_capped.then_some(1.0);
        spec.options.deterministic = self.is_ordered;
        let problem = Problem::new(spec).ok()?;
        if self.is_hopper {
            let tile = *hopper::tiles(&problem).first()?;
            return Some(hopper::config(&problem, tile).into());
        }
        let tile = *backward::tiles(&problem).first()?;
        Some(backward::tiled(&problem, tile).into())
    }
}

/// Backward instances, the most frequent first.
fn backward_kinds() -> Vec<BackwardKind> {
    let plain = BackwardKind::plain;
    let mut kinds: Vec<_> = [64, 96, 128, 192, 256].map(|dim| plain(BF16, dim)).into();
    kinds.push(BackwardKind { dims: (192, 128), ..plain(BF16, 192) });
    kinds.extend([64, 128].map(|dim| plain(F16, dim)));
    kinds.extend([64, 128].map(|dim| BackwardKind { is_general: true, ..plain(BF16, dim) }));
    for dim in [64, 128, 256] {
        let own = BackwardKind::hopper(BF16, dim);
        kinds.extend([own, BackwardKind { is_ordered: true, ..own }]);
    }
    kinds.extend([64, 128].map(|dim| BackwardKind::hopper(F16, dim)));
    kinds.push(BackwardKind { is_capped: true, ..BackwardKind::hopper(BF16, 128) });
    kinds
}

/// Instances without tiles.
fn helpers() -> impl Iterator<Item = Instance> {
    let naive = [(DType::F32, DType::F32), (F16, F16), (BF16, BF16), (BF16, E4M3)];
    let appends = [(BF16, BF16), (F16, F16), (BF16, E4M3), (BF16, E5M2), (F16, E4M3)];
    let naive = naive.map(|(q, kv)| (config::naive_spec(q, kv), config::NAIVE_THREADS));
    let appends =
        appends.map(|(q, cache)| (config::append_kv_spec(q, cache), config::HELPER_THREADS));
    let parts = [F16, BF16].map(config::merge_parts_spec);
    let states = [DType::F32, F16, BF16].map(config::merge_states_spec);
    let others = parts.into_iter().chain(states).chain([config::copy_blocks_spec()]);
    let others = others.map(|spec| (spec, config::HELPER_THREADS));
    let rows = [BF16, F16].into_iter().flat_map(|dtype| {
        [backward::prepare_spec(dtype), backward::finish_spec(dtype)]
            .map(|spec| (spec, backward::ROWS_THREADS))
    });
    let gradients = [DType::F32, BF16].map(backward::naive_spec);
    let gradients = gradients.map(|spec| (spec, backward::NAIVE_THREADS));
    let others = others.chain(rows).chain(gradients);
    let all = naive.into_iter().chain(appends).chain(others);
    all.map(|(spec, threads)| Instance { spec, threads, dynamic_smem: 0 })
}

/// One instance a family, for checks that must be quick.
#[must_use]
pub fn representatives() -> Vec<Instance> {
    let kinds = [
        Kind::prefill(BF16, 128),
        Kind { is_paged: true, is_general: true, ..Kind::prefill(F16, 64) },
        Kind::hopper(BF16, (128, 128), ROWS_128_LONG),
        Kind { has_parts: true, ..Kind::hopper(BF16, (128, 128), ROWS_128_LONG) },
        Kind::hopper(E4M3, (128, 128), ROWS_192_FP8),
        Kind { kv_dtype: E4M3, ..Kind::decode(BF16, 128, ROWS_16) },
        Kind { entry: Entry::DecodeSm90a, ..Kind::decode(BF16, 128, ROWS_16_HOPPER) },
        Kind::latent(BF16),
        Kind { has_dropout: true, ..Kind::prefill(BF16, 128) },
        Kind { has_dropout: true, is_general: true, ..Kind::decode(BF16, 64, ROWS_16_NARROW) },
    ];
    let mut all: Vec<_> = kinds.into_iter().filter_map(Kind::instance).collect();
    let gradients = [BackwardKind::plain(BF16, 128), BackwardKind::hopper(BF16, 128)];
    all.extend(gradients.into_iter().filter_map(BackwardKind::instance));
    let mut seen = Vec::new();
    all.extend(helpers().filter(|instance| {
        let entry = instance.spec.entry();
        let is_new = !seen.contains(&entry);
        seen.push(entry);
        is_new
    }));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shipped_instances_are_few_and_distinct() {
        let all = shipped();
        assert!((50..=130).contains(&all.len()), "{}", all.len());
        for (n, instance) in all.iter().enumerate() {
            assert!(all[n + 1..].iter().all(|other| other.spec != instance.spec));
        }
    }

    #[test]
    fn hopper_is_shipped_no_portable_prefill_over_pages() {
        let shipped = |arch: &str, part: &str| {
            let arch = arch.parse().expect("an arch");
            let has = |instance: &Instance| {
                let name = instance.spec.to_string();
                instance.ships_for(&arch) && name.starts_with(part) && name.contains("paged=1")
            };
            shipped().iter().filter(|instance| has(instance)).count()
        };
        assert_eq!((shipped("sm_80", "prefill["), shipped("sm_90a", "prefill[")), (4, 0));
        assert_eq!(shipped("sm_80", "prefill_sm90a["), 0);
        assert!(shipped("sm_90a", "prefill_sm90a[") > 0);
        assert_eq!(shipped("sm_80", "decode["), shipped("sm_90a", "decode["));
    }

    #[test]
    fn representatives_cover_every_entry() {
        let all = representatives();
        for entry in Entry::ALL {
            assert!(all.iter().any(|instance| instance.spec.entry() == entry), "{entry}");
        }
    }
}
