//! What runs need on the device beyond their tensors: the lengths of each plan, and partial results.
//!
//! The invariant: a run of a prepared plan neither allocates nor copies, and preparing one leaves everything
//! as it was when it fails. Lengths of several plans are kept, for a model's layers alternate between a few; the
//! memory of the least recently used serves the next that needs some, since freeing it would wait for the device. It does
//! so only where no graph holds it: a graph's lengths must stay those it was captured with, since its tensors do.

use std::sync::Arc;

use attn_core::{Family, Plan, Problem, Split, Tile};
use cudarc::driver::{CudaContext, CudaStream};

use super::backward::Launches;
use super::maps;
use super::params::ForwardParams;
use crate::error::Error;
use crate::launch::{Allocation, check_context};
use crate::module::Function;

/// Plans that a workspace is prepared for at the same time.
const MAX_PLANS: usize = 8;

/// Scratch memory of one stream, explicit and reused from call to call.
///
/// It belongs to the stream that it was first prepared on and is refused on any other: two streams that shared
/// it would overwrite each other's partial results. It grows and never shrinks; drop it to give the memory back.
///
/// ```
/// assert_eq!(attn_kernels::cuda::Workspace::new().bytes(), 0);
/// ```
#[derive(Debug, Default)]
pub struct Workspace {
    stream: Option<Arc<CudaStream>>,
    partials: Option<Arc<Allocation>>,
    /// What blocks take units by, or count ended parts by: 0 between launches, of which one stream runs one at a time.
    counters: Option<Arc<Allocation>>,
    plans: Vec<Prepared>,
    /// Memory for lengths, of plans that made room for others.
    spare: Vec<Arc<Allocation>>,
    /// Of all plans, since a cache's pages stay where they are from one batch's lengths to the next.
    maps: maps::Caches,
    clock: u64,
}

/// What a launch of a prepared plan uses.
#[derive(Debug)]
pub(crate) struct Ready<'w> {
    pub(crate) prepared: &'w Prepared,
    /// Memory for partial results.
    pub(crate) partials: Option<&'w Arc<Allocation>>,
    /// Where blocks take units as they go, or count the parts that have ended.
    pub(crate) counters: Option<&'w Arc<Allocation>>,
    pub(crate) maps: &'w mut maps::Caches,
}

/// All of a plan's launches but their tensors.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) key: Key,
    /// The lengths, as [`super::lengths::Lengths`] or a backward's tiles lay them out, and the order of units; nothing for
    /// equal sequences.
    pub(crate) lengths: Arc<Allocation>,
    pub(crate) work: Work,
    pub(crate) used: u64,
}

/// The launches of one pass.
#[derive(Debug)]
pub(crate) enum Work {
    /// One.
    Forward(Box<ForwardLaunch>),
    /// Several.
    Backward(Box<Launches>),
}

/// The launch of a forward but its tensors.
#[derive(Debug)]
pub(crate) struct ForwardLaunch {
    pub(crate) function: Arc<Function>,
    pub(crate) threads: u32,
    pub(crate) blocks: u32,
    /// Blocks of a cluster; 1 is no cluster.
    pub(crate) cluster: u32,
    pub(crate) dynamic_smem: u32,
    /// Whether the launch may begin while the one before it in the stream ends.
    pub(crate) overlaps: bool,
    /// The launch that joins parts, where this one leaves them to another.
    pub(crate) join: Option<Join>,
    /// The tile that tensor maps are made for, where the kernel takes maps.
    pub(crate) map_tile: Option<Tile>,
    pub(crate) params: ForwardParams,
    /// Bytes of partial outputs, which come before the partial LSEs.
    pub(crate) partial_outputs: u64,
}

/// A launch behind that of a plan's kernel, with the same parameters.
#[derive(Debug)]
pub(crate) struct Join {
    pub(crate) function: Arc<Function>,
    pub(crate) threads: u32,
    pub(crate) blocks: u32,
}

/// What of a plan decides its launches.
#[derive(Debug, PartialEq)]
pub(crate) struct Key {
    problem: Problem,
    kernel: &'static str,
    family: Family,
    tile: Tile,
    split: Split,
}

impl Key {
    pub(crate) fn of(plan: &Plan) -> Self {
        let &Plan { ref problem, kernel, family, tile, split, .. } = plan;
        Self { problem: problem.clone(), kernel, family, tile, split }
    }

    /// Cheap parts first; problems compare by a hash before they compare by their lengths.
    fn is(&self, plan: &Plan) -> bool {
        self.kernel == plan.kernel
            && self.family == plan.family
            && self.tile == plan.tile
            && self.split == plan.split
            && self.problem == plan.problem
    }
}

impl Workspace {
    /// A workspace without memory.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Device memory in use, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let lengths = self.plans.iter().map(|plan| plan.lengths.bytes());
        let shared = self.partials.iter().chain(&self.counters).chain(&self.spare);
        lengths.chain(shared.map(|memory| memory.bytes())).map(|bytes| bytes as u64).sum()
    }

    /// Whether a run of the plan needs nothing more.
    #[must_use]
    pub fn is_prepared(&self, plan: &Plan) -> bool {
        self.find(plan).is_some()
    }

    /// Writes `byte` over the memory for partial results, and for what the launches of a backward leave each other, in
    /// stream order: what a run reads there it has written.
    ///
    /// # Errors
    /// [`Error::Workspace`] on another stream than the workspace's; [`Error::Driver`].
    pub fn fill(&mut self, stream: &CudaStream, byte: u8) -> Result<(), Error> {
        self.check_stream(stream)?;
        self.partials.as_ref().map_or(Ok(()), |partials| partials.fill(stream, byte))
    }

    /// Checks that a stream is the workspace's own, if it has one yet.
    pub(crate) fn check_stream(&self, stream: &CudaStream) -> Result<(), Error> {
        let Some(own) = &self.stream else {
            return Ok(());
        };
        check_context(own.context(), stream.context())?;
        if own.cu_stream() == stream.cu_stream() {
            return Ok(());
        }
        let got = "another stream: take a workspace for each".to_owned();
        Err(Error::Workspace { expected: "the stream it was prepared on", got })
    }

    /// Where a plan is, if it is prepared.
    pub(crate) fn find(&self, plan: &Plan) -> Option<usize> {
        self.plans.iter().position(|prepared| prepared.key.is(plan))
    }

    /// Counts the plan at `at` as used now, so that what is prepared next does not take its place.
    pub(crate) fn touch(&mut self, at: usize) {
        self.clock += 1;
        self.plans[at].used = self.clock;
    }

    /// The launches of the plan at `at`, which count as used now.
    pub(crate) fn ready(&mut self, at: usize) -> Ready<'_> {
        self.touch(at);
        Ready {
            prepared: &self.plans[at],
            partials: self.partials.as_ref(),
            counters: self.counters.as_ref(),
            maps: &mut self.maps,
        }
    }

    /// What a launch that the workspace does not keep uses of it: so many bytes of partial results and of counters.
    pub(crate) fn ready_for<'w>(
        &'w mut self,
        prepared: &'w Prepared,
        needs: [usize; 2],
    ) -> Result<Ready<'w>, Error> {
        for (memory, needs) in [&self.partials, &self.counters].into_iter().zip(needs) {
            let has = memory.as_ref().map_or(0, |memory| memory.bytes());
            if has < needs {
                let expected = "the workspace that the plan was made with";
                return Err(Error::Workspace {
                    expected,
                    got: format!("one with {has} of {needs} bytes"),
                });
            }
        }
        Ok(Ready {
            prepared,
            partials: self.partials.as_ref(),
            counters: self.counters.as_ref(),
            maps: &mut self.maps,
        })
    }

    /// Memory for the lengths of one more plan: what a plan left, or that of the least recently used one, where it is
    /// large enough and nothing else uses it.
    pub(crate) fn lengths(
        &self,
        context: &Arc<CudaContext>,
        bytes: usize,
    ) -> Result<Arc<Allocation>, Error> {
        if bytes == 0 {
            return Allocation::new(context, 0);
        }
        let oldest = if self.plans.len() >= MAX_PLANS { self.oldest() } else { None };
        let oldest = oldest.map(|oldest| &self.plans[oldest].lengths);
        let fits =
            |memory: &&Arc<Allocation>| memory.bytes() >= bytes && Arc::strong_count(memory) == 1;
        if let Some(memory) = self.spare.iter().chain(oldest).find(fits) {
            return Ok(Arc::clone(memory));
        }
        // Rounded up, so that a batch that grows by a sequence now and then finds room.
        Allocation::new(context, bytes.next_power_of_two().max(1 << 12))
    }

    /// So many bytes of counters, made to be 0 when they are first used; what there is where that is enough.
    pub(crate) fn counters(
        &self,
        stream: &CudaStream,
        bytes: usize,
    ) -> Result<Option<Arc<Allocation>>, Error> {
        match &self.counters {
            _ if bytes == 0 => Ok(None),
            Some(counters) if counters.bytes() >= bytes => Ok(Some(Arc::clone(counters))),
            _ => {
                // A quarter more, as of the partial results, in whole counters.
                let bytes = bytes.saturating_add(bytes / 16 * 4);
                let counters = Allocation::new(stream.context(), bytes)?;
                counters.fill(stream, 0)?;
                Ok(Some(counters))
            }
        }
    }

    /// Memory for partial results; what there is where that is enough.
    pub(crate) fn partials(
        &self,
        context: &Arc<CudaContext>,
        bytes: usize,
    ) -> Result<Option<Arc<Allocation>>, Error> {
        match &self.partials {
            Some(partials) if partials.bytes() >= bytes => Ok(Some(Arc::clone(partials))),
            _ if bytes == 0 => Ok(None),
            // A quarter more, so that a cache that grows by a token a step does not grow this at every step.
            _ => Allocation::new(context, bytes.saturating_add(bytes / 4)).map(Some),
        }
    }

    /// Takes in memory that a launch needs.
    pub(crate) fn take(
        &mut self,
        stream: &Arc<CudaStream>,
        partials: Option<Arc<Allocation>>,
        counters: Option<Arc<Allocation>>,
    ) {
        self.stream.get_or_insert_with(|| Arc::clone(stream));
        if partials.is_some() {
            self.partials = partials;
        }
        if counters.is_some() {
            self.counters = counters;
        }
    }

    /// Takes in a plan whose lengths are on their way, and answers where it is. Nothing here can fail.
    pub(crate) fn insert(
        &mut self,
        stream: &Arc<CudaStream>,
        mut prepared: Prepared,
        partials: Option<Arc<Allocation>>,
        counters: Option<Arc<Allocation>>,
    ) -> usize {
        self.take(stream, partials, counters);
        self.clock += 1;
        prepared.used = self.clock;
        self.spare.retain(|memory| !Arc::ptr_eq(memory, &prepared.lengths));
        if self.plans.len() >= MAX_PLANS
            && let Some(oldest) = self.oldest()
        {
            let left = std::mem::replace(&mut self.plans[oldest], prepared).lengths;
            let is_free = Arc::strong_count(&left) == 1 && left.bytes() > 0;
            if is_free && self.spare.len() < MAX_PLANS {
                self.spare.push(left);
            }
            oldest
        } else {
            self.plans.push(prepared);
            self.plans.len() - 1
        }
    }

    /// Gives up the plan whose lengths are in `memory`: they may have been written over.
    pub(crate) fn forget(&mut self, memory: &Arc<Allocation>) {
        self.plans.retain(|prepared| !Arc::ptr_eq(&prepared.lengths, memory));
    }

    fn oldest(&self) -> Option<usize> {
        (0..self.plans.len()).min_by_key(|&at| self.plans[at].used)
    }
}
