//! An allocator that several threads share.
//!
//! One mutex around the whole allocator. An operation takes tens of nanoseconds per block and moves
//! several structures together, so a finer lock would mostly add its own cost, and there are no lock-free
//! parts. The mutex does not poison: every operation happens whole or not at all, so a panic of the
//! closure between two operations leaves consistent books.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::allocator::Allocator;

/// A handle on an [`Allocator`] that can be cloned and sent to other threads.
///
/// ```
/// use attn_paged::{Allocator, Config, Namespace, SharedAllocator};
///
/// let pool = SharedAllocator::new(Allocator::new(Config::new(64, 16))?);
/// let worker = std::thread::spawn({
///     let pool = pool.clone();
///     move || pool.with(|pool| pool.alloc(&[1, 2, 3], Namespace::DEFAULT))
/// });
/// let seq = worker.join().expect("the worker does not panic")?.seq;
/// pool.with(|pool| pool.free(seq))?;
/// # Ok::<(), attn_paged::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct SharedAllocator {
    allocator: Arc<Mutex<Allocator>>,
}

impl SharedAllocator {
    /// Makes an allocator shareable.
    #[must_use]
    pub fn new(allocator: Allocator) -> Self {
        Self { allocator: Arc::new(Mutex::new(allocator)) }
    }

    /// Runs `work` with exclusive access.
    ///
    /// Operations that belong together, such as a question and the action that rests on its answer,
    /// go into one call: between two calls other threads may come in. `work` must not call `with` of
    /// the same allocator, which would wait for itself.
    pub fn with<R>(&self, work: impl FnOnce(&mut Allocator) -> R) -> R {
        work(&mut self.allocator.lock())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, Namespace};

    #[test]
    fn shared_allocator_keeps_books_under_contention() {
        let pool = SharedAllocator::new(Allocator::new(Config::new(40, 2)).unwrap());
        std::thread::scope(|scope| {
            for thread in 0..4u32 {
                let pool = pool.clone();
                scope.spawn(move || {
                    for round in 0..200 {
                        let prompt = [7, 7, round % 3, thread, round];
                        let Ok(made) = pool.with(|p| p.alloc(&prompt, Namespace::DEFAULT)) else {
                            continue;
                        };
                        pool.with(|p| p.commit(made.seq, prompt.len())).unwrap();
                        if let Ok(fork) = pool.with(|p| p.fork(made.seq)) {
                            let _ = pool.with(|p| p.append(fork, &[1, 2, 3]));
                            pool.with(|p| p.free(fork)).unwrap();
                        }
                        pool.with(|p| p.free(made.seq)).unwrap();
                    }
                });
            }
        });
        pool.with(|p| {
            p.audit().unwrap();
            assert_eq!(p.free_blocks(), 40);
            assert!(p.stats().hit_tokens > 0);
        });
    }

    #[test]
    fn shared_allocator_survives_panic_of_a_caller() {
        let pool = SharedAllocator::new(Allocator::new(Config::new(4, 2)).unwrap());
        let panicking = pool.clone();
        let thread = std::thread::spawn(move || {
            panicking.with(|p| {
                p.alloc(&[1, 2, 3], Namespace::DEFAULT).unwrap();
                std::panic::resume_unwind(Box::new("between two operations"));
            });
        });
        assert!(thread.join().is_err());
        pool.with(|p| {
            p.audit().unwrap();
            assert_eq!(p.free_blocks(), 2);
        });
    }
}
