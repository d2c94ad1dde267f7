//! Which kernel takes which call, by name: every accept and every refusal, on catalogues and machines
//! that do not exist.

use attn_core::{
    Arrangement, BlockSizes, Bytes, CacheLayout, CudaCaps, DType, DeviceCaps, DimRule, Engine,
    Family, Feature, Features, HostCaps, KernelDesc, KvStorage, PageOrder, PageStrides, Pass,
    Phase, Plan, Problem, ProblemSpec, Refusal, Split, Tile, ValueStorage,
};
use proptest::prelude::*;

use crate::{Error, PlanCache, choose, explain};

const FLOATS: &[DType] = &[DType::F32, DType::F16, DType::BF16];
const QUERIES: &[DType] = &[DType::F32, DType::F16, DType::BF16, DType::F8E4M3];
const HALVES: &[DType] = &[DType::F16, DType::BF16];

fn one_tile_a_thread(_: &Problem, host: &HostCaps, tile: Tile, _: Split) -> Bytes {
    Bytes::of(host.threads * tile.q * tile.kv, 4)
}

const TILES: &[Tile] = &[
    Tile { q: 128, kv: 128 },
    Tile { q: 128, kv: 64 },
    Tile { q: 64, kv: 32 },
    Tile { q: 32, kv: 32 },
    Tile { q: 16, kv: 16 },
];

/// A tile of queries and two of keys and values.
fn two_stages(problem: &Problem, tile: Tile) -> Bytes {
    let (dim, value_dim) = (problem.head_dim(), problem.value_dim());
    Bytes::of(tile.q * dim + 2 * tile.kv * (dim + value_dim), 2)
}

const fn kernel(name: &'static str, engine: Engine, family: Family) -> KernelDesc {
    let gradients = Features::NONE.with(Feature::SinksGradient).with(Feature::BiasGradient);
    let features = match family {
        Family::Prefill | Family::Decode | Family::General => Features::ALL.minus(gradients),
        Family::Backward => Features::ALL.without(Feature::Paged).without(Feature::Fp8Cache),
    };
    KernelDesc {
        name,
        engine,
        family,
        q_dtypes: match family {
            Family::Prefill | Family::Decode | Family::General => QUERIES,
            Family::Backward => FLOATS,
        },
        kv_dtypes: &DType::ALL,
        head_dims: DimRule::ANY,
        value_dims: DimRule::ANY,
        max_query_rows: match family {
            Family::Decode => Some(16),
            Family::Prefill | Family::General | Family::Backward => None,
        },
        most_units: None,
        divides_keys: false,
        features,
        requires: Features::NONE,
        min_compute: None,
        max_compute: None,
        tiles: |_| &[],
        shared_memory: |_, _| Bytes::ZERO,
        workspace: one_tile_a_thread,
    }
}

const fn device_kernel(name: &'static str, family: Family, compute: (u32, u32)) -> KernelDesc {
    let mut kernel = kernel(name, Engine::Cuda, family);
    kernel.q_dtypes = HALVES;
    kernel.kv_dtypes = HALVES;
    kernel.head_dims = DimRule { min: 8, max: 256, multiple_of: 8 };
    kernel.value_dims = DimRule { min: 8, max: 128, multiple_of: 8 };
    kernel.features = kernel.features.without(Feature::Bias).without(Feature::Deterministic);
    kernel.min_compute = Some(compute);
    // As kernels of one architecture's instructions are: the made-up decode.
    kernel.max_compute = if compute.0 == 9 { Some(compute) } else { None };
    kernel.tiles = |_| TILES;
    kernel.shared_memory = two_stages;
    kernel
}

const CATALOGUE: [KernelDesc; 6] = [
    device_kernel("device_decode", Family::Decode, (9, 0)),
    device_kernel("device_prefill", Family::Prefill, (8, 0)),
    device_kernel("device_backward", Family::Backward, (8, 0)),
    kernel("host_decode", Engine::Cpu, Family::Decode),
    kernel("host_prefill", Engine::Cpu, Family::Prefill),
    kernel("host_backward", Engine::Cpu, Family::Backward),
];

fn host() -> DeviceCaps {
    DeviceCaps { host: HostCaps { threads: 2, l2: Bytes(2 << 20) }, cuda: None }
}

fn machine(compute: (u32, u32), smem: u64) -> DeviceCaps {
    let device = CudaCaps {
        name: "made up".to_owned(),
        compute,
        sm_count: 100,
        smem_per_block: Bytes(smem),
        memory: Bytes(16 << 30),
    };
    DeviceCaps { cuda: Some(device), ..host() }
}

fn spec(q: &[usize], kv: &[usize]) -> ProblemSpec {
    ProblemSpec::new(DType::F16, 8, 2, 128, q, kv)
}

fn plan(spec: &ProblemSpec, caps: &DeviceCaps) -> Result<Plan, Error> {
    choose(&Problem::new(spec.clone()).expect("a valid problem"), caps, &CATALOGUE)
}

#[track_caller]
fn assert_takes(spec: &ProblemSpec, caps: &DeviceCaps, kernel: &str) {
    let plan = plan(spec, caps).expect("some kernel takes it");
    assert_eq!(plan.kernel, kernel, "{}", explain(&plan));
}

/// The reason why a kernel was not taken.
#[track_caller]
fn refusal(spec: &ProblemSpec, caps: &DeviceCaps, kernel: &str) -> Refusal {
    let rejects = match plan(spec, caps) {
        Ok(plan) => plan.rejects,
        Err(Error::Unsupported { rejects }) => rejects,
    };
    let found = rejects.into_iter().find(|reject| reject.kernel == kernel);
    found.unwrap_or_else(|| panic!("{kernel} was taken")).why
}

#[test]
fn decode_accepts_one_row_over_a_cache() {
    assert_takes(&spec(&[1, 1], &[4096, 17]), &host(), "host_decode");
    assert_takes(&spec(&[1], &[1]), &host(), "host_decode");
    let reason = plan(&spec(&[1], &[4096]), &host()).expect("taken").reason;
    assert_eq!(
        reason,
        "few query rows meet many keys, which are divided among threads or blocks and merged"
    );
}

#[test]
fn decode_accepts_a_few_rows_over_many_keys() {
    assert_takes(&spec(&[4, 1, 3], &[3000, 40, 1500]), &host(), "host_decode");
}

#[test]
fn decode_steps_aside_for_few_keys() {
    let spec = spec(&[4], &[40]);
    assert_takes(&spec, &host(), "host_prefill");
    assert!(matches!(refusal(&spec, &host(), "host_decode"), Refusal::Slower(_)));
}

#[test]
fn decode_steps_aside_for_a_window_of_few_keys() {
    let mut spec = spec(&[8], &[100_000]);
    assert_takes(&spec, &host(), "host_decode");
    spec.window_left = Some(32);
    assert_takes(&spec, &host(), "host_prefill");
}

#[test]
fn decode_steps_aside_for_full_tiles_on_every_thread() {
    // 16 rows of 4 heads fill a tile for each of 2 KV heads: as many tiles as threads.
    let few = spec(&[16], &[4096]);
    assert_takes(&few, &host(), "host_prefill");
    let mut many_threads = host();
    many_threads.host.threads = 16;
    assert_takes(&few, &many_threads, "host_decode");
}

#[test]
fn decode_rejects_more_rows_than_it_holds() {
    let spec = spec(&[1, 17], &[9000, 9000]);
    assert_takes(&spec, &host(), "host_prefill");
    assert_eq!(refusal(&spec, &host(), "host_decode"), Refusal::QueryRows { most: 16, got: 17 });
}

#[test]
fn decode_rejects_batch_invariance_unless_forced() {
    let mut spec = spec(&[1], &[4096]);
    spec.options.batch_invariant = true;
    assert_takes(&spec, &host(), "host_prefill");
    let why = refusal(&spec, &host(), "host_decode");
    assert_eq!(why, Refusal::NotInEveryBatch);
    spec.options.phase = Some(Phase::Decode);
    assert_takes(&spec, &host(), "host_decode");
}

#[test]
fn decode_accepts_when_forced_on_few_keys() {
    let mut spec = spec(&[4], &[5]);
    spec.options.phase = Some(Phase::Decode);
    assert_takes(&spec, &host(), "host_decode");
    let plan = plan(&spec, &host()).expect("taken");
    assert_eq!(plan.reason, "the caller asked for a decode kernel");
    let why = refusal(&spec, &host(), "host_prefill");
    assert_eq!(why, Refusal::Phase(Phase::Decode));
}

#[test]
fn decode_accepts_when_nothing_else_is_left() {
    let mut spec = spec(&[4], &[5]);
    spec.options.disabled_kernels = vec!["host_prefill".to_owned()];
    assert_takes(&spec, &host(), "host_decode");
    assert_eq!(refusal(&spec, &host(), "host_prefill"), Refusal::Disabled);
    let reason = plan(&spec, &host()).expect("taken").reason;
    assert!(reason.starts_with("no other kernel is left"), "{reason}");
}

#[test]
fn prefill_accepts_a_prompt() {
    let spec = spec(&[512, 3], &[512, 3]);
    assert_takes(&spec, &host(), "host_prefill");
    assert_eq!(refusal(&spec, &host(), "host_backward"), Refusal::Pass(Pass::Backward));
}

#[test]
fn prefill_accepts_a_forced_single_row() {
    let mut spec = spec(&[1], &[4096]);
    spec.options.phase = Some(Phase::Prefill);
    assert_takes(&spec, &host(), "host_prefill");
    let why = refusal(&spec, &host(), "host_decode");
    assert_eq!(why, Refusal::Phase(Phase::Prefill));
}

#[test]
fn prefill_is_outranked_by_decode() {
    let why = refusal(&spec(&[1], &[4096]), &host(), "host_prefill");
    assert_eq!(why, Refusal::Outranked { by: "host_decode" });
}

/// A device whose kernel of row tiles divides keys, too.
fn with_parts() -> Vec<KernelDesc> {
    let tiles: attn_core::Tiles = |_| &[Tile { q: 128, kv: 128 }];
    let divides =
        KernelDesc { divides_keys: true, tiles, ..device_kernel("parts", Family::Prefill, (9, 0)) };
    let mut catalogue = CATALOGUE.to_vec();
    catalogue.insert(1, divides);
    catalogue
}

#[test]
fn few_rows_take_the_tiles_that_their_group_fills() {
    let h = machine((9, 0), 227 << 10);
    let catalogue = with_parts();
    for (heads, rows, keys, expected) in [
        // Flat rows: 16 to 56 leave more than half of a tile empty.
        ((16, 1), 1, 8192, "device_decode"),
        ((8, 2), 15, 8192, "device_decode"),
        ((8, 8), 16, 8192, "device_decode"),
        ((8, 2), 16, 8192, "parts"),
        ((16, 1), 4, 8192, "parts"),
        ((16, 1), 8, 300, "parts"),
        ((128, 1), 1, 8192, "parts"),
        // No tile of 128 has whole positions of such a group.
        ((12, 1), 8, 8192, "device_decode"),
        ((8, 2), 17, 8192, "parts"),
        ((8, 2), 200, 8192, "parts"),
    ] {
        let mut spec = spec(&[rows; 2], &[keys; 2]);
        (spec.q_heads, spec.kv_heads) = heads;
        let problem = Problem::new(spec.clone()).expect("valid");
        let plan = choose(&problem, &h, &catalogue).expect("taken");
        assert_eq!(plan.kernel, expected, "{heads:?} {rows}: {}", explain(&plan));
        if expected == "parts" {
            assert_eq!(plan.split != Split::Whole, keys > 1000, "{}", explain(&plan));
        }
        // Where the kernel of row tiles cannot run the call, it is no reason to step aside.
        for without in [true, false] {
            let mut spec = spec.clone();
            if without {
                spec.options.disabled_kernels = vec!["parts".to_owned()];
            } else {
                spec.options.phase = Some(Phase::Decode);
            }
            let problem = Problem::new(spec).expect("valid");
            if rows <= 16 && keys > 1000 {
                let plan = choose(&problem, &h, &catalogue).expect("taken");
                assert_eq!(plan.kernel, "device_decode", "{}", explain(&plan));
            }
        }
    }
}

#[test]
fn plan_of_few_rows_says_why_its_keys_are_divided() {
    let mut spec = spec(&[8], &[8192]);
    (spec.q_heads, spec.kv_heads) = (16, 1);
    let h = machine((9, 0), 227 << 10);
    let text = |spec: &ProblemSpec| {
        let problem = Problem::new(spec.clone()).expect("valid");
        explain(&choose(&problem, &h, &with_parts()).expect("taken")).to_string()
    };
    let own = text(&spec);
    assert!(own.starts_with("parts (cuda, prefill): tiles of query rows that are fewer"), "{own}");
    assert!(own.contains("keys chunks of 128 keys"), "{own}");
    assert!(own.contains("device_decode: a group's rows fill a tile of query rows"), "{own}");
    spec.options.num_splits = Some(3);
    assert!(text(&spec).contains("keys 3 parts"));
    spec.options.batch_invariant = true;
    assert!(text(&spec).contains("keys 3 parts"));
    spec.options.num_splits = None;
    let invariant = text(&spec);
    assert!(invariant.starts_with("parts (cuda, prefill): takes any number"), "{invariant}");
    assert!(invariant.contains("keys whole"), "{invariant}");
}

#[test]
fn prefill_accepts_empty_batches() {
    for (q, kv) in [(&[][..], &[][..]), (&[0, 0], &[4, 4]), (&[0], &[0])] {
        assert_takes(&spec(q, kv), &host(), "host_prefill");
    }
}

#[test]
fn backward_accepts_with_either_phase() {
    let mut spec = spec(&[64], &[64]);
    spec.pass = Pass::Backward;
    for phase in [None, Some(Phase::Prefill), Some(Phase::Decode)] {
        spec.options.phase = phase;
        assert_takes(&spec, &host(), "host_backward");
        assert_eq!(refusal(&spec, &host(), "host_decode"), Refusal::Pass(Pass::Forward));
    }
}

#[test]
fn backward_accepts_gradients_that_forwards_reject() {
    let mut spec = spec(&[64], &[64]);
    spec.pass = Pass::Backward;
    spec.bias = true;
    spec.want_dbias = true;
    assert_takes(&spec, &machine((9, 0), 227 << 10), "host_backward");
    let why = refusal(&spec, &machine((9, 0), 227 << 10), "device_backward");
    assert_eq!(why, Refusal::Feature(Feature::Bias));
}

#[test]
fn device_rejects_a_machine_without_one() {
    for name in ["device_decode", "device_prefill"] {
        let why = refusal(&spec(&[64], &[64]), &host(), name);
        assert_eq!(why, Refusal::NoDevice(Engine::Cuda), "{name}");
    }
}

#[test]
fn device_accepts_on_its_machine() {
    let h = machine((9, 0), 227 << 10);
    assert_takes(&spec(&[1], &[4096]), &h, "device_decode");
    assert_takes(&spec(&[512], &[512]), &h, "device_prefill");
    let plan = plan(&spec(&[512], &[512]), &h).expect("taken");
    assert!(plan.shared_memory > Bytes::ZERO && plan.shared_memory <= Bytes(227 << 10));
}

#[test]
fn device_rejects_an_old_machine() {
    let old = machine((8, 6), 99 << 10);
    assert_takes(&spec(&[1], &[4096]), &old, "device_prefill");
    let why = refusal(&spec(&[1], &[4096]), &old, "device_decode");
    assert_eq!(why, Refusal::Compute { needs: (9, 0), has: (8, 6) });
}

#[test]
fn device_rejects_a_machine_past_its_architecture() {
    let new = machine((10, 0), 227 << 10);
    assert_takes(&spec(&[1], &[4096]), &new, "device_prefill");
    let why = refusal(&spec(&[1], &[4096]), &new, "device_decode");
    assert_eq!(why, Refusal::ComputePast { takes: (9, 0), has: (10, 0) });
    assert_eq!(why.to_string(), "made for compute capability 9.0, the device has 10.0");
}

#[test]
fn device_rejects_too_little_shared_memory() {
    let small = machine((9, 0), 4 << 10);
    assert_takes(&spec(&[512], &[512]), &small, "host_prefill");
    let plan = plan(&spec(&[512], &[512]), &small).expect("taken");
    assert_eq!(plan.shared_memory, Bytes::ZERO);
    for (name, q) in [("device_prefill", 512), ("device_decode", 1)] {
        let why = refusal(&spec(&[q], &[4096]), &small, name);
        assert!(matches!(why, Refusal::SharedMemory { has: Bytes(4096), .. }), "{name}: {why}");
    }
}

#[test]
fn device_rejects_types_and_dims_it_was_not_made_for() {
    let h = machine((9, 0), 227 << 10);
    let mut f32 = spec(&[512], &[512]);
    (f32.q_dtype, f32.kv_dtype) = (DType::F32, DType::F32);
    assert_takes(&f32, &h, "host_prefill");
    let dtype = |operand, got| Refusal::DType { operand, got };
    assert_eq!(refusal(&f32, &h, "device_prefill"), dtype("q", DType::F32));

    let mut fp8 = spec(&[512], &[512]);
    fp8.kv_dtype = DType::F8E4M3;
    assert_takes(&fp8, &h, "host_prefill");
    assert_eq!(refusal(&fp8, &h, "device_prefill"), dtype("kv", DType::F8E4M3));

    fp8.q_dtype = DType::F8E4M3;
    assert_takes(&fp8, &h, "host_prefill");
    assert_eq!(refusal(&fp8, &h, "device_prefill"), dtype("q", DType::F8E4M3));

    let mut dim = spec(&[512], &[512]);
    dim.head_dim = 100;
    let takes = DimRule { min: 8, max: 256, multiple_of: 8 };
    let why = Refusal::Dim { field: "head_dim", takes, got: 100 };
    assert_eq!(refusal(&dim, &h, "device_prefill"), why);
    (dim.head_dim, dim.value_dim) = (192, 192);
    let takes = DimRule { min: 8, max: 128, multiple_of: 8 };
    let why = Refusal::Dim { field: "value_dim", takes, got: 192 };
    assert_eq!(refusal(&dim, &h, "device_prefill"), why);
}

/// Every feature of the forward pass, as the field that asks for it.
fn asking_for(feature: Feature) -> Option<ProblemSpec> {
    let mut s = ProblemSpec::new(DType::F16, 2, 2, 64, &[32], &[64]);
    match feature {
        Feature::Causal => s.causal = true,
        Feature::Window => s.window_left = Some(3),
        Feature::BooleanMask => s.mask = true,
        Feature::BlockMask => s.block_mask = Some(BlockSizes { q: 16, kv: 16 }),
        Feature::Bias => s.bias = true,
        Feature::Alibi => s.alibi = true,
        Feature::Softcap => s.softcap = Some(5.0),
        Feature::Sinks => s.sinks = true,
        Feature::GroupedHeads => s.kv_heads = 1,
        Feature::ValueDim => s.value_dim = 32,
        Feature::Paged => {
            let value = ValueStorage::Separate(64);
            let layout = CacheLayout::contiguous(DType::F16, PageOrder::Nhd, 16, 2, 64, value);
            s.kv = KvStorage::Paged(layout.expect("valid"));
        }
        Feature::PaddedQueries => s.q_arrangement = Arrangement::Padded,
        Feature::PaddedKeys => s.kv = KvStorage::Dense(Arrangement::Padded),
        Feature::Fp8Cache => s.kv_dtype = DType::F8E5M2,
        Feature::Fp8Queries => (s.q_dtype, s.kv_dtype) = (DType::F8E4M3, DType::F8E4M3),
        Feature::OddFp8Rows => {
            s = ProblemSpec::new(DType::F8E4M3, 2, 2, 72, &[32], &[64]);
        }
        Feature::Deterministic => s.options.deterministic = true,
        Feature::BatchInvariant => s.options.batch_invariant = true,
        Feature::OddPages => {
            let value = ValueStorage::Separate(64);
            let layout = CacheLayout::contiguous(DType::F16, PageOrder::Nhd, 12, 2, 64, value);
            s.kv = KvStorage::Paged(layout.expect("valid"));
        }
        Feature::UnalignedPages => {
            let value = ValueStorage::Separate(64);
            let layout = CacheLayout::strided(
                DType::F16,
                PageOrder::Nhd,
                16,
                2,
                64,
                value,
                PageStrides { page: 4000, slot: 140, head: 68 },
                PageStrides { page: 4000, slot: 140, head: 68 },
            );
            s.kv = KvStorage::Paged(layout.expect("valid"));
        }
        Feature::LatentCache => {
            s.value_dim = 48;
            let value = ValueStorage::PrefixOfKey(48);
            let layout = CacheLayout::contiguous(DType::F16, PageOrder::Nhd, 16, 2, 64, value);
            s.kv = KvStorage::Paged(layout.expect("valid"));
        }
        Feature::SinksGradient | Feature::BiasGradient => return None,
    }
    Some(s)
}

#[test]
fn latent_kernel_takes_its_caches_alone_and_any_number_of_rows() {
    let mut latent = device_kernel("device_latent", Family::Decode, (9, 0));
    latent.requires = Features::NONE.with(Feature::LatentCache);
    latent.max_query_rows = None;
    let (mut general, h) =
        (kernel("general", Engine::Cuda, Family::General), machine((9, 0), 227 << 10));
    general.q_dtypes = HALVES;
    general.tiles = |_| TILES;
    let choose_of = |spec: ProblemSpec| {
        let problem = Problem::new(spec).expect("valid");
        choose(&problem, &h, &[latent.clone(), general.clone()]).expect("some kernel takes it")
    };
    let mut spec = asking_for(Feature::LatentCache).expect("a field asks for it");
    for (q_heads, rows, batch) in [(2, 1, 1), (128, 1, 3), (128, 4, 200), (16, 300, 1)] {
        (spec.q_heads, spec.q_lens, spec.kv_lens) = (q_heads, vec![rows; batch], vec![900; batch]);
        let plan = choose_of(spec.clone());
        assert_eq!(plan.kernel, "device_latent", "{}", explain(&plan));
        assert!(plan.reason.contains("read once"), "{}", plan.reason);
    }
    spec.options.batch_invariant = true;
    assert_eq!(choose_of(spec.clone()).split, Split::Between { parts: 16, keys: 256 });
    let plan = choose_of(asking_for(Feature::Paged).expect("a field asks for it"));
    assert_eq!(plan.kernel, "general");
    let why = Refusal::Requires(Feature::LatentCache);
    assert_eq!(why.to_string(), "made for calls with: latent cache");
    assert_eq!(plan.rejects[0].why, why);
    spec.softcap = Some(5.0);
    latent.features = latent.features.without(Feature::Softcap);
    let plan = choose(&Problem::new(spec).expect("valid"), &h, &[latent, general]).expect("taken");
    assert_eq!(plan.rejects[0].why, Refusal::Feature(Feature::Softcap));
}

#[test]
fn prefill_rejects_each_feature_it_lacks() {
    let full = kernel("full", Engine::Cpu, Family::Prefill);
    for (feature, spec) in Feature::ALL.into_iter().filter_map(|f| Some((f, asking_for(f)?))) {
        let mut lacking = full.clone();
        (lacking.name, lacking.features) = ("lacking", full.features.without(feature));
        let problem = Problem::new(spec).expect("valid");
        let plan = choose(&problem, &host(), &[lacking.clone(), full.clone()]).expect("taken");
        assert_eq!((plan.kernel, plan.rejects.len()), ("full", 1), "{feature}");
        assert_eq!(plan.rejects[0].why, Refusal::Feature(feature));
        let error = choose(&problem, &host(), &[lacking]).expect_err("nothing is left");
        assert!(error.to_string().contains(feature.name()), "{error}");
    }
}

#[test]
fn choice_survives_each_kernel_being_disabled() {
    let h = machine((9, 0), 227 << 10);
    let mut spec = spec(&[1], &[4096]);
    for expected in ["device_decode", "device_prefill", "host_decode", "host_prefill"] {
        assert_takes(&spec, &h, expected);
        spec.options.disabled_kernels.push(expected.to_owned());
    }
    let Err(Error::Unsupported { rejects }) = plan(&spec, &h) else {
        panic!("every forward kernel is disabled");
    };
    let names: Vec<_> = rejects.iter().map(|reject| reject.kernel).collect();
    assert_eq!(names, CATALOGUE.map(|kernel| kernel.name));
    assert_eq!(rejects[0].why, Refusal::Disabled);
}

#[test]
fn choice_rejects_a_forced_phase_that_is_disabled() {
    let mut spec = spec(&[1], &[4096]);
    spec.options.phase = Some(Phase::Decode);
    spec.options.disabled_kernels = vec!["host_decode".to_owned()];
    assert!(plan(&spec, &host()).is_err());
}

#[test]
fn choice_ignores_disabled_names_of_no_kernel() {
    let mut spec = spec(&[1], &[4096]);
    spec.options.disabled_kernels = vec!["host_decod".to_owned()];
    assert_takes(&spec, &host(), "host_decode");
}

#[test]
fn split_follows_the_caller() {
    let mut spec = spec(&[1], &[4096]);
    assert_eq!(plan(&spec, &host()).expect("taken").split, Split::Chunks(2048));
    spec.options.num_splits = Some(7);
    assert_eq!(plan(&spec, &host()).expect("taken").split, Split::Parts(7));
    spec.options.num_splits = Some(usize::MAX);
    let plan = plan(&spec, &host()).expect("taken");
    assert_eq!(plan.split.parts(4096), 4096);
}

#[test]
fn explanation_names_every_kernel() {
    let plan = plan(&spec(&[1], &[4096]), &host()).expect("taken");
    let text = explain(&plan).to_string();
    for kernel in &CATALOGUE {
        assert!(text.contains(kernel.name), "{text}");
    }
    assert!(text.starts_with("host_decode (cpu, decode): few query rows"), "{text}");
    assert!(text.contains("    device_decode: no cuda device"), "{text}");
    assert!(text.contains("keys chunks of 2048 keys"), "{text}");
}

#[test]
fn cache_returns_the_same_plan_and_forgets_in_bounds() {
    let plans = PlanCache::new(host(), CATALOGUE.to_vec(), 8);
    let problem = |kv: usize| Problem::new(spec(&[1], &[kv])).expect("valid");
    let first = plans.choose(&problem(100)).expect("taken");
    for kv in 0..100 {
        let plan = plans.choose(&problem(1000 + kv)).expect("taken");
        assert_eq!(
            *plan,
            choose(&problem(1000 + kv), plans.caps(), plans.catalogue()).expect("taken")
        );
        assert!(plans.len() <= 8);
        // A problem in use is never the one that is forgotten.
        let again = plans.choose(&problem(100)).expect("taken");
        assert!(std::sync::Arc::ptr_eq(&first, &again), "{kv}");
    }
}

#[test]
fn cache_tells_options_apart() {
    let plans = PlanCache::new(host(), CATALOGUE.to_vec(), 8);
    let mut spec = spec(&[1], &[4096]);
    let kernel = |spec: &ProblemSpec| {
        plans.choose(&Problem::new(spec.clone()).expect("valid")).map(|plan| plan.kernel)
    };
    assert_eq!(kernel(&spec), Ok("host_decode"));
    spec.options.phase = Some(Phase::Prefill);
    assert_eq!(kernel(&spec), Ok("host_prefill"));
    spec.options.disabled_kernels = vec!["host_prefill".to_owned()];
    assert!(kernel(&spec).is_err());
    spec.options = attn_core::Options::default();
    assert_eq!(kernel(&spec), Ok("host_decode"));
}

fn any_spec() -> impl Strategy<Value = ProblemSpec> {
    let lens = proptest::collection::vec((0usize..40, 0usize..5000), 0..5);
    let shape = (0usize..4, 1usize..4, 1usize..300, 1usize..300, 0usize..3, any::<bool>());
    let bits = any::<u16>();
    let options = (
        proptest::option::of(1usize..9),
        proptest::option::of(proptest::bool::ANY),
        proptest::sample::subsequence(CATALOGUE.map(|k| k.name).to_vec(), 0..=6),
    );
    (lens, shape, bits, options).prop_map(|(lens, shape, bits, options)| {
        let (group, kv_heads, head_dim, value_dim, dtype, is_backward) = shape;
        let (q, kv): (Vec<_>, Vec<_>) = lens.into_iter().unzip();
        let mut s = ProblemSpec::new(FLOATS[dtype], group * kv_heads, kv_heads, head_dim, &q, &kv);
        let bit = |n: u32| bits >> n & 1 == 1;
        s.value_dim = value_dim;
        s.pass = if is_backward { Pass::Backward } else { Pass::Forward };
        (s.causal, s.mask, s.bias, s.alibi, s.sinks) = (bit(0), bit(1), bit(2), bit(3), bit(4));
        s.window_left = bit(5).then_some(7);
        s.want_dbias = is_backward && s.bias && bit(6);
        s.want_dsinks = is_backward && s.sinks && bit(7);
        s.options.deterministic = bit(8);
        s.options.batch_invariant = bit(9);
        if bit(10) && !is_backward {
            s.kv_dtype = DType::F8E4M3;
            // Fp8 by fp8, or a cache under wider queries.
            if bit(12) {
                s.q_dtype = DType::F8E4M3;
            }
        }
        if bit(11) {
            s.q_arrangement = Arrangement::Padded;
        }
        s.options.num_splits = options.0;
        s.options.phase = options.1.map(|p| if p { Phase::Prefill } else { Phase::Decode });
        s.options.disabled_kernels = options.2.into_iter().map(str::to_owned).collect();
        s
    })
}

fn any_caps() -> impl Strategy<Value = DeviceCaps> {
    let device = proptest::option::of((7u32..11, 0u32..8, 0u64..(300 << 10)));
    (1usize..9, 0u64..(8 << 20), device).prop_map(|(threads, l2, device)| {
        let mut caps =
            device.map_or_else(host, |(major, minor, smem)| machine((major, minor), smem));
        caps.host = HostCaps { threads, l2: Bytes(l2) };
        caps
    })
}

proptest! {
    #[test]
    fn choice_is_always_within_the_description(spec in any_spec(), caps in any_caps()) {
        let problem = Problem::new(spec).expect("valid");
        let (plan, rejects) = match choose(&problem, &caps, &CATALOGUE) {
            Ok(plan) => (Some(plan.clone()), plan.rejects),
            Err(Error::Unsupported { rejects }) => (None, rejects),
        };
        // Each kernel is named once.
        let taken = plan.as_ref().map(|plan| plan.kernel);
        for kernel in &CATALOGUE {
            let count = rejects.iter().filter(|r| r.kernel == kernel.name).count();
            prop_assert_eq!(count + usize::from(taken == Some(kernel.name)), 1);
        }
        prop_assert!(rejects.len() <= CATALOGUE.len());
        let Some(plan) = plan else { return Ok(()) };
        let desc = CATALOGUE.iter().find(|k| k.name == plan.kernel).expect("from the catalogue");
        prop_assert!(!problem.options().disabled_kernels.iter().any(|n| n == plan.kernel));
        prop_assert_eq!(desc.pass(), problem.pass());
        prop_assert!(desc.q_dtypes.contains(&problem.q_dtype()));
        prop_assert!(desc.kv_dtypes.contains(&problem.kv_dtype()));
        prop_assert!(desc.head_dims.accepts(problem.head_dim()));
        prop_assert!(desc.value_dims.accepts(problem.value_dim()));
        prop_assert!(desc.max_query_rows.is_none_or(|most| problem.lengths().longest_q() <= most));
        prop_assert_eq!(Features::required_by(&problem).minus(desc.features), Features::NONE);
        prop_assert_eq!((plan.engine, plan.family), (desc.engine, desc.family));
        match (plan.engine, &caps.cuda) {
            (Engine::Cpu, _) => prop_assert_eq!(plan.shared_memory, Bytes::ZERO),
            (Engine::Cuda, device) => {
                let device = device.as_ref().expect("a device kernel needs a device");
                prop_assert!(plan.shared_memory <= device.smem_per_block);
                prop_assert!(desc.min_compute.is_none_or(|needs| device.compute >= needs));
            }
        }
        match (problem.options().phase, plan.family) {
            (Some(phase), Family::Prefill) => prop_assert_eq!(phase, Phase::Prefill),
            (Some(phase), Family::Decode) => prop_assert_eq!(phase, Phase::Decode),
            _ => {}
        }
        match plan.family {
            Family::Decode => prop_assert_ne!(plan.split, Split::Whole),
            Family::Prefill | Family::General | Family::Backward => {
                prop_assert_eq!(plan.split, Split::Whole);
            }
        }
        prop_assert!(plan.tile.q > 0 && plan.tile.kv > 0);
    }

    #[test]
    fn choice_never_fails_where_a_kernel_could_run(spec in any_spec(), caps in any_caps()) {
        // The host kernels take everything but disabled names, forced phases and rows past 16.
        let problem = Problem::new(spec).expect("valid");
        let off = |name: &str| problem.options().disabled_kernels.iter().any(|n| n == name);
        let phase = problem.options().phase;
        let could = match problem.pass() {
            Pass::Backward => !off("host_backward"),
            Pass::Forward => {
                let few = problem.lengths().longest_q() <= 16;
                let invariant = problem.options().batch_invariant && phase != Some(Phase::Decode);
                let prefill = !off("host_prefill") && phase != Some(Phase::Decode);
                let decode = !off("host_decode") && few && phase != Some(Phase::Prefill) && !invariant;
                prefill || decode
            }
        };
        prop_assert!(!could || choose(&problem, &caps, &CATALOGUE).is_ok());
    }

    #[test]
    fn batch_invariant_plans_agree_alone_and_together(
        q in 1usize..60, kv in 1usize..9000, mates in proptest::collection::vec((0usize..60, 0usize..9000), 0..4),
        forced in any::<bool>(), caps in any_caps(),
    ) {
        let with = |lens: &[(usize, usize)]| {
            let (q, kv): (Vec<_>, Vec<_>) = lens.iter().copied().unzip();
            let mut spec = spec(&q, &kv);
            spec.options.batch_invariant = true;
            spec.options.phase = forced.then_some(Phase::Decode);
            plan(&spec, &caps)
        };
        let alone = with(&[(q, kv)]);
        let together = with(&[&[(q, kv)], &mates[..]].concat());
        if let (Ok(alone), Ok(together)) = (alone, together) {
            prop_assert_eq!(alone.kernel, together.kernel);
            prop_assert_eq!(alone.split, together.split);
            // A tile may only be cut where it would end after the last key of the longest sequence.
            let cut = alone.tile.kv.min(together.tile.kv);
            prop_assert!(alone.tile.kv == together.tile.kv || cut >= kv);
        }
    }
}
