//! The loop sees faults, and does everything that it is there for.

use attn_kernels::cpu::CpuEngine;

use super::*;

/// What an engine could forget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// The copy of a shared page before it is written.
    Copy,
    /// The pages that come back.
    Return,
    /// The last new row of a step.
    Row,
}

struct Faulty<'e> {
    pages: HostPages<'e>,
    fault: Fault,
    copied: usize,
    moved: usize,
}

impl Pages for Faulty<'_> {
    fn append(&mut self, slots: &[i64], k: &[bf16], v: &[bf16]) -> Result<(), String> {
        let count = slots.len() - usize::from(self.fault == Fault::Row);
        self.pages.append(&slots[..count], k, v)
    }

    fn copy(&mut self, copies: &[BlockCopy]) -> Result<(), String> {
        self.copied += copies.len();
        if self.fault == Fault::Copy { Ok(()) } else { self.pages.copy(copies) }
    }

    fn move_out(&mut self, copies: &[BlockCopy]) -> Result<(), String> {
        self.pages.move_out(copies)
    }

    fn move_in(&mut self, copies: &[BlockCopy]) -> Result<(), String> {
        self.moved += copies.len();
        if self.fault == Fault::Return { Ok(()) } else { self.pages.move_in(copies) }
    }

    fn attend(
        &mut self,
        problem: &Problem,
        q: &[bf16],
        table: &[i32],
        o: &mut [bf16],
        lse: &mut [f32],
    ) -> Result<(), String> {
        self.pages.attend(problem, q, table, o, lse)
    }
}

/// Steps of the first setting until one fails; the steps that passed.
fn run(fault: Fault, steps: usize, look: impl FnOnce(&Loop<'_>)) -> (usize, usize, usize) {
    let engine = CpuEngine::new().expect("a processor");
    let setting = SETTINGS[0];
    let pages = HostPages::new(setting, &engine).expect("valid");
    let mut faulty = Faulty { pages, fault, copied: 0, moved: 0 };
    let mut serving = Loop::new(setting, &mut faulty).expect("valid");
    let passed = (0..steps).take_while(|_| serving.step().is_ok()).count();
    look(&serving);
    (passed, faulty.copied, faulty.moved)
}

#[test]
fn loop_copies_shares_evicts_and_swaps() {
    let (passed, copied, moved) = run(Fault::None, 300, |serving| {
        let stats = serving.allocator.stats();
        assert!(stats.evictions > 10 && stats.hit_rate() > 0.05, "{stats:?}");
    });
    assert_eq!(passed, 300);
    assert!(copied > 10 && moved > 10, "{copied} pages copied, {moved} came back");
}

#[test]
fn loop_fails_where_pages_do() {
    for fault in [Fault::Copy, Fault::Return, Fault::Row] {
        let (passed, ..) = run(fault, 100, |_| ());
        assert!(passed < 100, "{fault:?} went unseen");
    }
}
