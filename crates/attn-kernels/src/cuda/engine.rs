//! The engine: a context, its kernels, and the launches of a plan.
//!
//! The invariant: every check happens before the first launch, and a call that fails has launched nothing. The engine
//! never picks a kernel: a plan that is not for it is an error, because running something else would make the
//! plan's reason a lie. A stream is always the caller's, since only the caller knows what its work is ordered with.

use std::sync::Arc;

use attn_core::{
    Bytes, CudaCaps, DeviceCaps, Engine, Family, Features, HostCaps, KernelDesc, Pass, Plan,
    Problem, Split,
};
use cudarc::driver::sys::CUdevice_attribute as Attribute;
use cudarc::driver::{CudaContext, CudaStream};

use super::backward::{self, Launches};
use super::call::{Inputs, Outputs, check_memory};
use super::capture::Captures;
use super::event::Event;
use super::lengths::{Division, Lengths, Table};
use super::maps;
use super::order::{COUNTER_BYTES, Cut, Order};
use super::params::{self, Divisor};
use super::step::{self, NewRows, Pages};
use super::workspace::{ForwardLaunch, Join, Key, Prepared, Ready, Work, Workspace};
use super::{cluster, config, forward, lengths};
use crate::catalog::catalog;
use crate::error::Error;
use crate::launch::{self, Allocation, DeviceBuffer, Graph, Launch, check_context, failed};
use crate::module::{Function, Modules};
use crate::spec::{Arch, Entry, KernelSpec};
use crate::store::KernelStore;

/// Warps of a block of the kernels that move data around attention: merging, appending, copying.
const WARPS: usize = config::HELPER_THREADS as usize / 32;

/// A CUDA device and the kernels loaded on it.
///
/// ```no_run
/// use attn_kernels::cuda::CudaEngine;
///
/// let engine = CudaEngine::new(0)?;
/// let device = engine.caps().cuda.expect("a device was found");
/// assert!(device.compute >= (8, 0));
/// # Ok::<(), attn_kernels::Error>(())
/// ```
#[derive(Debug)]
pub struct CudaEngine {
    context: Arc<CudaContext>,
    modules: Modules,
    caps: DeviceCaps,
}

impl CudaEngine {
    /// An engine on a device, in its primary context, with kernels from the user's disk cache or compiled.
    ///
    /// # Errors
    /// [`Error::DriverMissing`] where there is no driver, with what was tried; [`Error::Driver`] where it
    /// refuses the device; [`Error::Arch`] for a device that is too old.
    pub fn new(ordinal: usize) -> Result<Self, Error> {
        launch::load_driver()?;
        cudarc::driver::result::init().map_err(|error| failed("cuInit", "the driver", error))?;
        let context = CudaContext::new(ordinal).map_err(|error| {
            failed("cuDevicePrimaryCtxRetain", format_args!("device {ordinal}"), error)
        })?;
        launch::disable_event_tracking(&context);
        Self::with_context(context, KernelStore::new())
    }

    /// An engine in a context that exists, beside its other users.
    ///
    /// # Errors
    /// As [`CudaEngine::new`].
    pub fn with_context(context: Arc<CudaContext>, store: KernelStore) -> Result<Self, Error> {
        launch::load_driver()?;
        let caps = device_caps(&context)?;
        let arch = Arch::from_compute(caps.compute)?;
        let modules = Modules::new(Arc::clone(&context), arch, store);
        let caps = DeviceCaps { host: HostCaps::default(), cuda: Some(caps) };
        Ok(Self { context, modules, caps })
    }

    /// The same engine with its kernels from another store, a bundle for example.
    #[must_use]
    pub fn with_store(self, store: KernelStore) -> Self {
        let modules = Modules::new(Arc::clone(&self.context), *self.modules.arch(), store);
        Self { modules, ..self }
    }

    /// What this engine offers to a selector: its device, and a host that was not looked at.
    #[must_use]
    pub fn caps(&self) -> DeviceCaps {
        self.caps.clone()
    }

    /// The context that buffers and streams must belong to.
    #[must_use]
    pub const fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    /// What the device's kernels are compiled for.
    #[must_use]
    pub const fn arch(&self) -> &Arch {
        self.modules.arch()
    }

    /// Where kernels come from.
    #[must_use]
    pub const fn store(&self) -> &KernelStore {
        self.modules.store()
    }

    /// The version of CUDA that the driver is for, major and minor.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn driver_version(&self) -> Result<(u32, u32), Error> {
        launch::driver_version()
    }

    /// The device's second-level cache, in bytes.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn l2_bytes(&self) -> Result<u64, Error> {
        attribute(&self.context, Attribute::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE).map(u64::from)
    }

    /// A new stream, ordered with no other.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn new_stream(&self) -> Result<Arc<CudaStream>, Error> {
        self.context.new_stream().map_err(|error| failed("cuStreamCreate", "a stream", error))
    }

    /// The context's default stream. It cannot be captured.
    #[must_use]
    pub fn default_stream(&self) -> Arc<CudaStream> {
        self.context.default_stream()
    }

    /// Waits until a stream has done what was asked of it, and reports what failed on the way.
    ///
    /// # Errors
    /// [`Error::Driver`], for a kernel that failed too.
    pub fn synchronize(&self, stream: &CudaStream) -> Result<(), Error> {
        check_context(&self.context, stream.context())?;
        launch::synchronize(stream)
    }

    /// Uninitialised device memory.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] when there is not enough.
    pub fn alloc(&self, bytes: usize) -> Result<DeviceBuffer, Error> {
        DeviceBuffer::alloc(&self.context, bytes)
    }

    /// An event, to time work by.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn event(&self) -> Result<Event, Error> {
        Event::new(&self.context)
    }

    /// Compiles, loads and allocates what a plan needs, so that its runs on this workspace and stream do none
    /// of it. A run of a plan that is not prepared prepares it; only a capture needs it done before.
    ///
    /// # Errors
    /// [`Error::Plan`] for a plan of another engine, or one that its kernel does not take; [`Error::Call`] for
    /// a problem too large for the kernel; the store's errors; [`Error::DeviceMemory`]; [`Error::Workspace`] on
    /// another stream than the workspace's, or during a capture. The workspace is as it was then.
    pub fn prepare(
        &self,
        plan: &Plan,
        workspace: &mut Workspace,
        stream: &Arc<CudaStream>,
    ) -> Result<(), Error> {
        check_context(&self.context, stream.context())?;
        self.prepared(plan, workspace, stream).map(|_| ())
    }

    /// Prepares a plan unless it is, and answers where it is in the workspace.
    pub(crate) fn prepared(
        &self,
        plan: &Plan,
        workspace: &mut Workspace,
        stream: &Arc<CudaStream>,
    ) -> Result<usize, Error> {
        workspace.check_stream(stream)?;
        if let Some(at) = workspace.find(plan) {
            workspace.touch(at);
            return Ok(at);
        }
        self.check_new(plan, workspace, stream)?;
        let Built { prepared, partials, counters, tables, .. } = match plan.problem.pass() {
            Pass::Forward => self.build(plan, workspace, stream, false)?,
            Pass::Backward => self.build_backward(plan, workspace)?,
        };
        let memory = Arc::clone(&prepared.lengths);
        // The last step that can fail, for it may write over the lengths of the plan that makes room.
        if let Err(error) = memory.upload(stream, &tables) {
            workspace.forget(&memory);
            return Err(error);
        }
        Ok(workspace.insert(stream, prepared, partials, counters))
    }

    /// Checks that a plan can be prepared on a stream now.
    pub(crate) fn check_new(
        &self,
        plan: &Plan,
        workspace: &Workspace,
        stream: &CudaStream,
    ) -> Result<(), Error> {
        check_context(&self.context, stream.context())?;
        workspace.check_stream(stream)?;
        check_plan(plan, &self.caps, plan.problem.pass())?;
        if launch::is_capturing(stream)? {
            let expected = "a plan that was prepared before the capture (`CudaEngine::prepare`)";
            let got = format!("{} for a new problem", plan.kernel);
            return Err(Error::Workspace { expected, got });
        }
        Ok(())
    }

    /// Checks the tensors of a forward call, and answers whether there is nothing to write.
    pub(crate) fn check_call(
        &self,
        plan: &Plan,
        inputs: &Inputs<'_>,
        new: Option<&NewRows<'_>>,
        outputs: &Outputs<'_>,
        stream: &CudaStream,
    ) -> Result<bool, Error> {
        check_context(&self.context, stream.context())?;
        inputs.layout().check(&plan.problem)?;
        outputs.layout().check(&plan.problem)?;
        let memory = inputs.memory().chain(outputs.memory());
        check_memory(&self.context, memory.chain(new.into_iter().flat_map(NewRows::memory)))?;
        let is_empty = outputs.layout().o.layout.is_empty();
        // The naive kernel reads element by element; the tiled ones in chunks.
        if !is_empty && plan.family != Family::General {
            forward::check_alignment(inputs, outputs)?;
        }
        Ok(is_empty)
    }

    /// The launch of a plan, with the memory that it takes; nothing is uploaded yet. `is_growing`: lengths may change.
    pub(crate) fn build(
        &self,
        plan: &Plan,
        workspace: &Workspace,
        stream: &CudaStream,
        is_growing: bool,
    ) -> Result<Built, Error> {
        let config = config::forward(plan)?;
        let (tile, pack) = (config.tile.q, config.pack as usize);
        let (division, split) = match config.spec.entry() {
            // A block of these walks all keys of its rows, so that any split comes to the same.
            Entry::Naive => (Division::Rows, Split::Whole),
            Entry::PrefillSm90a => {
                let split = plan.split;
                (Division::Ordered { tile, pack, split }, split)
            }
            Entry::Prefill => (Division::Tiles { tile, pack, split: Split::Whole }, Split::Whole),
            _ if is_growing => {
                let parts = plan.split.parts(plan.problem.lengths().longest_kv());
                (Division::Growing { tile, pack, parts }, Split::Parts(parts))
            }
            _ => (Division::Tiles { tile, pack, split: plan.split }, plan.split),
        };
        let problem = &plan.problem;
        let lengths = Lengths::new(problem, division)?;
        let partial_bytes = lengths.partial_bytes(problem.value_dim())?;
        let function = self.modules.function(&config.spec, config.dynamic_smem)?;
        let is_persistent = config.spec.entry() == Entry::PrefillSm90a;
        let order = is_persistent.then(|| Order::new(problem, &lengths, Cut { tile, pack, split }));
        let has_join = is_persistent && lengths.partial_rows > 0;
        let join = has_join.then(|| self.join(problem, split)).transpose()?;
        let entries = order.as_ref().map_or(&[][..], |order| &order.entries);
        let prefixes = lengths.upload();
        let prefixes: &[u8] = bytemuck::cast_slice(&prefixes);
        let tables = [prefixes, bytemuck::cast_slice(entries)].concat();
        let partials = workspace.partials(&self.context, partial_bytes)?;
        let memory = if is_growing {
            Allocation::new(&self.context, tables.len())?
        } else {
            workspace.lengths(&self.context, tables.len())?
        };
        let counted = if is_persistent { COUNTER_BYTES } else { lengths.count_bytes()? };
        let counters = workspace.counters(stream, counted)?;

        let table = |table| lengths.offset(table).map_or(0, |at| memory.address() + at);
        let mut params = forward::template(problem, config.pack, split);
        if is_growing {
            params.flags |= params::FIXED_PARTS;
        }
        params.q_starts = table(Table::Queries);
        params.kv_starts = table(Table::Keys);
        params.unit_starts = table(Table::Units);
        params.sequences = table(Table::Sequences);
        params.partial_starts = table(Table::Partials);
        if let Some(order) = &order {
            params.work = params::as_i32("units of work", lengths.blocks as usize)?;
            params.section = order.section;
            let visits = config::hopper::visits(problem, config.tile);
            params.most_visits = params::as_i32("visits", visits)?;
            if !order.entries.is_empty() {
                params.order = memory.address() + prefixes.len() as u64;
            }
        }
        if let Some(uniform) = lengths.uniform {
            params.uniform_units = Divisor::new(uniform.units);
            (params.uniform_q, params.uniform_kv) = (uniform.q_len, uniform.kv_len);
        }
        let cluster = match config.spec.entry() {
            Entry::DecodeSm90a => {
                let launch = Launch {
                    dynamic_smem: config.dynamic_smem,
                    ..Launch::new(&function, lengths.blocks, config.threads)
                };
                cluster::blocks(problem, &lengths, split, |blocks| {
                    Launch { cluster: blocks, ..launch }.most_clusters()
                })?
            }
            _ => 1,
        };
        let outputs = lengths.partial_rows.unsigned_abs() * problem.value_dim() as u64 * 4;
        let launch = ForwardLaunch {
            function,
            threads: config.threads,
            blocks: if is_persistent {
                // Each block takes units until none is left.
                lengths.blocks.min(self.caps.cuda.as_ref().map_or(1, |device| device.sm_count))
            } else {
                lengths.blocks
            },
            cluster,
            dynamic_smem: config.dynamic_smem,
            overlaps: config.spec.entry() != Entry::Naive && self.overlaps()?,
            join,
            map_tile: is_persistent.then_some(config.tile),
            params,
            partial_outputs: outputs,
        };
        let prepared = Prepared {
            key: Key::of(plan),
            lengths: Arc::clone(&memory),
            work: Work::Forward(Box::new(launch)),
            used: 0,
        };
        Ok(Built { prepared, partials, counters, tables, keys: lengths.offset(Table::Keys) })
    }

    /// The launches of a backward plan, with the memory that they take; nothing is uploaded yet.
    fn build_backward(&self, plan: &Plan, workspace: &Workspace) -> Result<Built, Error> {
        let config = backward::config::main(plan)?;
        let launches = Launches::new(&plan.problem, config, self.overlaps()?, |spec, smem| {
            self.modules.function(spec, smem)
        })?;
        let tables = launches.upload().to_vec();
        let partials = workspace.partials(&self.context, launches.bytes())?;
        let memory = workspace.lengths(&self.context, tables.len())?;
        let prepared = Prepared {
            key: Key::of(plan),
            lengths: memory,
            work: Work::Backward(Box::new(launches)),
            used: 0,
        };
        Ok(Built { prepared, partials, counters: None, tables, keys: None })
    }

    /// The launch that joins the parts of a problem's keys: a block for each row and head.
    fn join(&self, problem: &Problem, split: Split) -> Result<Join, Error> {
        let batch = 0..problem.lengths().batch();
        let parts = batch.clone().map(|sequence| lengths::parts(problem, split, sequence)).max();
        let rows = batch.map(|sequence| lengths::written_rows(problem, sequence)).sum::<usize>();
        let blocks = params::as_i32("rows and heads", rows.saturating_mul(problem.q_heads()))?;
        let function = self.modules.function(&config::merge_parts_spec(problem.out_dtype()), 0)?;
        let threads = config::merge_parts_threads(parts.unwrap_or(0));
        Ok(Join { function, threads, blocks: blocks.unsigned_abs() })
    }

    /// Whether device and driver let launches overlap, in captured graphs too.
    pub(crate) fn overlaps(&self) -> Result<bool, Error> {
        let is_new = self.caps.cuda.as_ref().is_some_and(|device| device.compute >= (9, 0));
        Ok(is_new && launch::driver_version()? >= (12, 3))
    }

    /// Runs a forward plan in stream order. Padding rows are written too: 0, and -inf for the LSE.
    ///
    /// On Hopper and later the launch is one that may begin while the one before it in the stream ends, and waits for it
    /// (programmatic stream serialization); a kernel of others that was launched so before it must wait in each of its
    /// blocks, too. Before it waits it may read the block table, for nothing but what to ask for: the table must be
    /// there, and may still be written to.
    ///
    /// # Errors
    /// As [`CudaEngine::prepare`]; [`Error::Call`] for tensors that do not fit the plan's problem, lie in another
    /// context, or have rows that the kernel cannot load. Nothing was launched then. [`Error::Driver`] for a launch that
    /// failed, or for earlier work that did.
    pub fn forward(
        &self,
        plan: &Plan,
        inputs: &Inputs<'_>,
        outputs: &mut Outputs<'_>,
        workspace: &mut Workspace,
        stream: &Arc<CudaStream>,
    ) -> Result<(), Error> {
        self.run(plan, inputs, None, outputs, workspace, stream)
    }

    /// Writes the last keys and values of each sequence to their pages and runs a decode plan over all of them, in one launch.
    ///
    /// `call` is as for [`CudaEngine::forward`], but its keys and values are the new rows alone, one for each query row: row `i`
    /// of a sequence is its key `kv_len - q_len + i`, whose place `pages` says. A key whose page is outside the cache is not
    /// written, as [`CudaEngine::append_kv`] does not, and its sequence answers NaN. The new rows must not lie in the cache.
    ///
    /// Keys are written as they are: one that has a rotary embedding has been turned before.
    ///
    /// # Errors
    /// As [`CudaEngine::forward`] and [`CudaEngine::append_kv`]; [`Error::Plan`] for a kernel other than `cuda_decode` and
    /// `cuda_decode_sm90a`; [`Error::Call`] for fp8 or padded rows, a sequence with more rows than keys, and no query heads.
    pub fn forward_append(
        &self,
        plan: &Plan,
        call: &Inputs<'_>,
        pages: &mut Pages<'_>,
        outputs: &mut Outputs<'_>,
        workspace: &mut Workspace,
        stream: &Arc<CudaStream>,
    ) -> Result<(), Error> {
        let (new, inputs) = step::split(plan, call, pages)?;
        self.run(plan, &inputs, Some(&new), outputs, workspace, stream)
    }

    /// Runs a forward plan, whose last keys are written first where there are new rows.
    fn run(
        &self,
        plan: &Plan,
        inputs: &Inputs<'_>,
        new: Option<&NewRows<'_>>,
        outputs: &Outputs<'_>,
        workspace: &mut Workspace,
        stream: &Arc<CudaStream>,
    ) -> Result<(), Error> {
        if self.check_call(plan, inputs, new, outputs, stream)? {
            return check_plan(plan, &self.caps, Pass::Forward);
        }
        let at = self.prepared(plan, workspace, stream)?;
        launch_forward(&plan.problem, inputs, outputs, new, workspace.ready(at), stream)
    }

    /// Captures what `work` launches on `stream`, without running it.
    ///
    /// Plans must be prepared before; `work` may neither allocate, free, wait, nor read back. However it ends, the
    /// capture has ended and the stream can be used.
    ///
    /// # Errors
    /// What `work` answers; [`Error::Driver`] for a stream that cannot be captured (the default stream, or one that is being
    /// captured) and for work that cannot be.
    pub fn capture(
        &self,
        stream: &Arc<CudaStream>,
        work: impl FnOnce() -> Result<(), Error>,
    ) -> Result<Graph, Error> {
        check_context(&self.context, stream.context())?;
        let id = Captures::shared().begin();
        let ended = std::cell::Cell::new(false);
        let outcome = launch::capture(stream, work, || {
            ended.set(true);
            Captures::shared().end(id)
        });
        if !ended.get() {
            // The capture did not begin.
            Captures::shared().end(id);
        }
        outcome
    }

    /// A kernel beside attention, loaded if it is not yet, which a capture does not allow.
    pub(crate) fn auxiliary(
        &self,
        spec: &KernelSpec,
        stream: &CudaStream,
    ) -> Result<Arc<Function>, Error> {
        check_context(&self.context, stream.context())?;
        if let Some(function) = self.modules.loaded(spec) {
            return Ok(function);
        }
        if launch::is_capturing(stream)? {
            let expected = "a kernel that ran before the capture";
            return Err(Error::Workspace { expected, got: spec.to_string() });
        }
        self.modules.function(spec, 0)
    }
}

/// A launch that is not in a workspace yet.
pub(crate) struct Built {
    pub(crate) prepared: Prepared,
    pub(crate) partials: Option<Arc<Allocation>>,
    pub(crate) counters: Option<Arc<Allocation>>,
    /// What is to be uploaded.
    pub(crate) tables: Vec<u8>,
    /// Where in it the prefix sums of the keys are.
    pub(crate) keys: Option<u64>,
}

/// Launches a prepared plan of a problem that the tensors were checked against.
pub(crate) fn launch_forward(
    problem: &Problem,
    inputs: &Inputs<'_>,
    outputs: &Outputs<'_>,
    new: Option<&NewRows<'_>>,
    ready: Ready<'_>,
    stream: &CudaStream,
) -> Result<(), Error> {
    let Ready { prepared, partials, counters, maps: caches } = ready;
    let Work::Forward(launch) = &prepared.work else {
        let got = "a backward plan".to_owned();
        return Err(Error::Plan { expected: FORWARD, got });
    };
    let mut params = launch.params;
    forward::fill(&mut params, problem, inputs, outputs)?;
    if let Some(partials) = partials {
        params.partial_o = partials.address();
        params.partial_lse = partials.address() + launch.partial_outputs;
    }
    params.counter = counters.map_or(0, |counters| counters.address());
    let own = [Some(&prepared.lengths), counters, partials];
    if let Some(new) = new {
        (params.k_new, params.v_new) = new.rows();
    }
    let appended = new.into_iter().flat_map(NewRows::memory);
    let memory = || inputs.memory().chain(outputs.memory()).chain(appended.clone());
    let join = launch.join.as_ref();
    let functions = [&launch.function].into_iter().chain(join.map(|join| &join.function));
    Captures::shared().hold(functions, own.into_iter().flatten(), memory());
    let forward = Launch {
        cluster: launch.cluster,
        dynamic_smem: launch.dynamic_smem,
        overlaps: launch.overlaps,
        ..Launch::new(&launch.function, launch.blocks, launch.threads)
    };
    match launch.map_tile {
        None => forward.run(stream, &params, &[]),
        Some(tile) => forward.run(stream, &params, &maps::forward(caches, problem, inputs, tile)?),
    }
    .map_err(|error| with_shape(error, problem))?;
    let Some(join) = join else {
        return Ok(());
    };
    let of_parts = Launch::new(&join.function, join.blocks, join.threads);
    Launch { overlaps: launch.overlaps, ..of_parts }
        .run(stream, &params, &[])
        .map_err(|error| with_shape(error, problem))
}

/// The kernel instances that runs of a plan launch, for a store to have them ready
/// ([`KernelStore::prepare`]) before the plans that need them. Needs no device.
///
/// # Errors
/// [`Error::Plan`] for a plan of another engine.
pub fn instances(plan: &Plan) -> Result<Vec<KernelSpec>, Error> {
    if plan.problem.pass() == Pass::Backward {
        return backward::config::instances(plan);
    }
    let spec = config::forward(plan)?.spec;
    let join =
        (spec.get("parts") == Some(1)).then(|| config::merge_parts_spec(plan.problem.out_dtype()));
    Ok([spec].into_iter().chain(join).collect())
}

/// A failed launch with the shape that it was for.
pub(crate) fn with_shape(error: Error, problem: &Problem) -> Error {
    let Error::Driver { call, what, code, name, reason } = error else {
        return error;
    };
    let lengths = problem.lengths();
    let what = format!(
        "{what}, {} sequences of up to {} rows and {} keys, {} heads on {}, dimensions {} and {}",
        lengths.batch(),
        lengths.longest_q(),
        lengths.longest_kv(),
        problem.q_heads(),
        problem.kv_heads(),
        problem.head_dim(),
        problem.value_dim()
    );
    Error::Driver { call, what, code, name, reason }
}

/// Blocks that give each of a product of items a warp. Past the largest grid a warp takes several: these
/// kernels take any grid.
pub(crate) fn warp_blocks(items: &[usize]) -> u32 {
    let all = items.iter().fold(1usize, |all, &items| all.saturating_mul(items));
    let most = i32::MAX.unsigned_abs();
    u32::try_from(all.div_ceil(WARPS)).map_or(most, |blocks| blocks.min(most))
}

/// What forward calls expect of a plan, and backward calls.
const FORWARD: &str = "a forward plan of the CUDA engine that its kernel takes";
pub(crate) const BACKWARD: &str = "a backward plan of the CUDA engine that its kernel takes";

/// Checks that a plan names a kernel of this engine that states it takes such a problem. A plan may be made by
/// hand, so that what a selector would have seen to is not taken for granted.
pub(crate) fn check_plan(plan: &Plan, caps: &DeviceCaps, pass: Pass) -> Result<(), Error> {
    let kernel = catalog().iter().find(|kernel| {
        kernel.engine == Engine::Cuda && kernel.name == plan.kernel && kernel.family == plan.family
    });
    let problem = &plan.problem;
    let compute = caps.cuda.as_ref().map(|device| device.compute);
    let fits = kernel.is_some_and(|kernel| {
        kernel.pass() == pass && takes(kernel, problem) && kernel.runs_on(compute)
    });
    if fits && plan.engine == Engine::Cuda && problem.pass() == pass {
        return Ok(());
    }
    let Plan { kernel: name, engine, family, .. } = plan;
    let (q, kv) = (problem.q_dtype(), problem.kv_dtype());
    let (dim, value_dim) = (problem.head_dim(), problem.value_dim());
    let rows = problem.lengths().longest_q();
    let lacks = kernel
        .map_or(Features::NONE, |kernel| Features::required_by(problem).minus(kernel.features));
    let got = format!(
        "{name} ({engine}, {family}) for {rows} query rows, {q} over {kv}, dimensions {dim} and \
         {value_dim}, lacking {lacks:?}"
    );
    let expected = match pass {
        Pass::Forward => FORWARD,
        Pass::Backward => BACKWARD,
    };
    Err(Error::Plan { expected, got })
}

fn takes(kernel: &KernelDesc, problem: &Problem) -> bool {
    kernel.q_dtypes.contains(&problem.q_dtype())
        && kernel.kv_dtypes.contains(&problem.kv_dtype())
        && kernel.head_dims.accepts(problem.head_dim())
        && kernel.value_dims.accepts(problem.value_dim())
        && kernel.max_query_rows.is_none_or(|most| problem.lengths().longest_q() <= most)
        && Features::required_by(problem).minus(kernel.features) == Features::NONE
        && kernel.requires.minus(Features::required_by(problem)) == Features::NONE
}

fn attribute(context: &CudaContext, attribute: Attribute) -> Result<u32, Error> {
    let value = context
        .attribute(attribute)
        .map_err(|error| failed("cuDeviceGetAttribute", format_args!("{attribute:?}"), error))?;
    Ok(u32::try_from(value).unwrap_or(0))
}

fn device_caps(context: &CudaContext) -> Result<CudaCaps, Error> {
    let name = context.name().map_err(|e| failed("cuDeviceGetName", "the device", e))?;
    let memory = context.total_mem().map_err(|e| failed("cuDeviceTotalMem", "the device", e))?;
    let get = |which| attribute(context, which);
    let smem = get(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
    Ok(CudaCaps {
        name,
        compute: (
            get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            get(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        sm_count: get(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        smem_per_block: Bytes(u64::from(smem)),
        memory: Bytes(memory as u64),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engine_without_a_driver_says_what_it_tried() {
        match CudaEngine::new(usize::MAX) {
            Err(Error::DriverMissing { tried, .. }) => assert!(!tried.is_empty()),
            // A driver is there: no device has this number.
            Err(Error::Driver { .. }) => {}
            other => panic!("expected an error, got {other:?}"),
        }
    }

    #[test]
    fn failed_launch_names_its_shape() {
        let spec = attn_core::ProblemSpec::new(attn_core::DType::BF16, 8, 2, 64, &[3], &[77]);
        let problem = Problem::new(spec).expect("valid");
        let error = Error::Driver {
            call: "cuLaunchKernelEx",
            what: "decode[...] for sm_90a".to_owned(),
            code: 701,
            name: "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES".to_owned(),
            reason: "too many resources requested for launch".to_owned(),
        };
        let text = with_shape(error, &problem).to_string();
        for part in ["cuLaunchKernelEx", "decode[...]", "3 rows and 77 keys", "8 heads on 2", "701"]
        {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn every_item_gets_a_warp_up_to_the_largest_grid() {
        assert_eq!(warp_blocks(&[0, 8]), 0);
        assert_eq!(warp_blocks(&[1, 5]), 2);
        assert_eq!(warp_blocks(&[usize::MAX, 2]), i32::MAX.unsigned_abs());
        assert_eq!(warp_blocks(&[1 << 33, 1]), i32::MAX.unsigned_abs());
    }
}
