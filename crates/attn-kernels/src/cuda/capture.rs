//! What captures under way have to keep alive.
//!
//! The invariant: a graph owns every buffer, workspace and function that its launches use, so that safe code cannot
//! replay into freed memory. Which launches belong to a capture is not asked of the driver, which would
//! cost a call a launch: whatever any engine of the process launches while a capture is under way is held by it,
//! for engines may share a context and its streams.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use crate::launch::{Allocation, DeviceMemory, Held};
use crate::module::Function;

/// The captures that are under way.
static CAPTURES: Captures = Captures { active: AtomicUsize::new(0), held: Mutex::new(Vec::new()) };

/// A list of captures under way.
#[derive(Debug)]
pub(crate) struct Captures {
    /// Number of entries below: launches outside captures look at nothing else.
    active: AtomicUsize,
    held: Mutex<Vec<(u64, Held)>>,
}

impl Captures {
    /// Those of the process.
    pub(crate) fn shared() -> &'static Self {
        &CAPTURES
    }

    /// Begins to hold; the number names this capture.
    pub(crate) fn begin(&self) -> u64 {
        let mut held = self.held.lock();
        let id = held.iter().map(|(id, _)| id + 1).max().unwrap_or(0);
        held.push((id, Held::default()));
        self.active.store(held.len(), Ordering::Release);
        id
    }

    /// What was held since.
    pub(crate) fn end(&self, id: u64) -> Held {
        let mut held = self.held.lock();
        let at = held.iter().position(|(other, _)| *other == id);
        let (_, ended) = at.map(|at| held.swap_remove(at)).unwrap_or_default();
        self.active.store(held.len(), Ordering::Release);
        ended
    }

    /// Holds what a launch uses, if a capture is under way.
    pub(crate) fn hold<'a>(
        &self,
        functions: impl Iterator<Item = &'a Arc<Function>>,
        own: impl Iterator<Item = &'a Arc<Allocation>>,
        memory: impl Iterator<Item = DeviceMemory<'a>>,
    ) {
        if self.active.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut captures = self.held.lock();
        let functions: Vec<_> = functions.collect();
        let mut used: Vec<Arc<Allocation>> = own.cloned().collect();
        used.extend(memory.filter_map(|memory| memory.owner().cloned()));
        for (_, held) in captures.iter_mut() {
            for memory in &used {
                if !held.memory.iter().any(|other| Arc::ptr_eq(other, memory)) {
                    held.memory.push(Arc::clone(memory));
                }
            }
            for &function in &functions {
                if !held.functions.iter().any(|other| Arc::ptr_eq(other, function)) {
                    held.functions.push(Arc::clone(function));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn captures_are_told_apart() {
        let captures = Captures { active: AtomicUsize::new(0), held: Mutex::default() };
        let (a, b) = (captures.begin(), captures.begin());
        assert_ne!(a, b);
        assert!(captures.end(a).memory.is_empty());
        assert_eq!(captures.active.load(Ordering::Acquire), 1);
        let c = captures.begin();
        assert_ne!(b, c);
        captures.end(b);
        captures.end(c);
        assert_eq!(captures.active.load(Ordering::Acquire), 0);
    }
}
