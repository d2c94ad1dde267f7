//! Plans by problem, so that a decode loop does not choose the same kernel at every step.
//!
//! The invariant: a plan from the cache equals the one [`choose`] would make. A cache belongs to one machine
//! and one catalogue for its whole life, so both are part of every key without being compared at every
//! look-up, and the rest of the key is the whole problem, compared field by field and not by its hash. Strides are no
//! part of it: plans do not depend on them, and engines read them from the data.
//!
//! Memory is bounded by two generations: when the young one is full it becomes the old one, and what
//! the old one held and nobody asked for since is dropped. A list in order of use would keep a few more
//! plans alive at the price of writing to it at every hit.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use attn_core::{DeviceCaps, KernelDesc, Plan, Problem};
use parking_lot::Mutex;

use crate::choose::choose;
use crate::error::Error;

/// A bounded cache of plans for one machine and one catalogue, shared by threads.
///
/// ```
/// use attn_core::{DType, DeviceCaps, HostCaps, Problem, ProblemSpec};
/// use attn_select::PlanCache;
///
/// let caps = DeviceCaps { host: HostCaps::default(), cuda: None };
/// let plans = PlanCache::new(caps, &[][..], 64);
/// let problem = Problem::new(ProblemSpec::new(DType::F32, 1, 1, 64, &[1], &[9]))?;
/// assert!(plans.choose(&problem).is_err()); // the catalogue is empty
/// assert_eq!(plans.len(), 0);
/// # Ok::<(), attn_core::Error>(())
/// ```
#[derive(Debug)]
pub struct PlanCache {
    caps: DeviceCaps,
    catalogue: Cow<'static, [KernelDesc]>,
    half: usize,
    generations: Mutex<Generations>,
}

#[derive(Debug, Default)]
struct Generations {
    young: HashMap<Problem, Arc<Plan>>,
    old: HashMap<Problem, Arc<Plan>>,
}

impl PlanCache {
    /// A cache of at most `capacity` plans, and at least 2.
    #[must_use]
    pub fn new(
        caps: DeviceCaps,
        catalogue: impl Into<Cow<'static, [KernelDesc]>>,
        capacity: usize,
    ) -> Self {
        let half = (capacity / 2).max(1);
        Self { caps, catalogue: catalogue.into(), half, generations: Mutex::default() }
    }

    /// The plan of a problem, from the cache or made and kept.
    ///
    /// # Errors
    /// As [`choose`]; refusals are not kept.
    pub fn choose(&self, problem: &Problem) -> Result<Arc<Plan>, Error> {
        if let Some(plan) = self.generations.lock().get(problem, self.half) {
            return Ok(plan);
        }
        // Made outside the lock: two threads may make the same plan, and either is right.
        let plan = Arc::new(choose(problem, &self.caps, &self.catalogue)?);
        self.generations.lock().insert(problem.clone(), Arc::clone(&plan), self.half);
        Ok(plan)
    }

    /// The machine that plans are made for.
    #[must_use]
    pub const fn caps(&self) -> &DeviceCaps {
        &self.caps
    }

    /// The kernels that are chosen from.
    #[must_use]
    pub fn catalogue(&self) -> &[KernelDesc] {
        &self.catalogue
    }

    /// Plans held.
    #[must_use]
    pub fn len(&self) -> usize {
        let generations = self.generations.lock();
        generations.young.len() + generations.old.len()
    }

    /// Whether no plan is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl Generations {
    fn get(&mut self, problem: &Problem, half: usize) -> Option<Arc<Plan>> {
        if let Some(plan) = self.young.get(problem) {
            return Some(Arc::clone(plan));
        }
        // Asked for again, so it is young again.
        let (problem, plan) = self.old.remove_entry(problem)?;
        self.insert(problem, Arc::clone(&plan), half);
        Some(plan)
    }

    fn insert(&mut self, problem: Problem, plan: Arc<Plan>, half: usize) {
        if self.young.len() >= half {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(problem, plan);
    }
}
