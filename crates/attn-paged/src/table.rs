//! Sequences: which blocks each one has, in order, behind handles that go stale.
//!
//! Invariant: a handle reaches the sequence it was made for or nothing. A slot's generation rises when
//! its sequence ends, so that a handle kept too long is refused instead of reaching the slot's next
//! tenant, and a handle carries the number of its allocator. Slots keep the memory of their table: a
//! server in steady state allocates and frees sequences without touching the heap.

use std::fmt;

use crate::error::Error;

/// A live sequence of one [`crate::Allocator`].
///
/// Invariants: names at most one sequence, until the generation of a slot wraps after 2^32 uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SeqId {
    allocator: u32,
    slot: u32,
    generation: u32,
}

impl fmt::Display for SeqId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { allocator, slot, generation } = self;
        write!(f, "sequence {slot} of generation {generation} of allocator {allocator}")
    }
}

/// What a sequence has.
#[derive(Debug, Default)]
#[cfg_attr(test, derive(Clone, PartialEq))]
pub(crate) struct Sequence {
    /// `ceil(len / block_size)` blocks.
    pub(crate) blocks: Vec<u32>,
    /// Tokens.
    pub(crate) len: usize,
    /// Leading blocks known to be in the prefix cache; further ones may be, through a fork.
    pub(crate) committed: usize,
    pub(crate) namespace: u32,
}

#[derive(Debug)]
#[cfg_attr(test, derive(Clone, PartialEq))]
struct Slot {
    generation: u32,
    live: bool,
    sequence: Sequence,
}

/// All sequences of an allocator.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone, PartialEq))]
pub(crate) struct Sequences {
    allocator: u32,
    slots: Vec<Slot>,
    vacant: Vec<u32>,
}

impl Sequences {
    pub(crate) const fn new(allocator: u32) -> Self {
        Self { allocator, slots: Vec::new(), vacant: Vec::new() }
    }

    fn find(&self, id: SeqId) -> Result<usize, Error> {
        if id.allocator != self.allocator {
            return Err(Error::ForeignSequence { expected: self.allocator, got: id });
        }
        match self.slots.get(id.slot as usize) {
            Some(slot) if slot.live && slot.generation == id.generation => Ok(id.slot as usize),
            slot => {
                let expected = slot.map_or(0, |slot| slot.generation);
                Err(Error::StaleSequence { expected, got: id })
            }
        }
    }

    pub(crate) fn get(&self, id: SeqId) -> Result<&Sequence, Error> {
        self.find(id).map(|slot| &self.slots[slot].sequence)
    }

    pub(crate) fn get_mut(&mut self, id: SeqId) -> Result<&mut Sequence, Error> {
        self.find(id).map(|slot| &mut self.slots[slot].sequence)
    }

    /// Checks that `count` more sequences find slots.
    pub(crate) fn check_room(&self, count: usize) -> Result<(), Error> {
        let unused = u32::MAX as usize - self.slots.len();
        if count <= self.vacant.len() + unused {
            Ok(())
        } else {
            Err(Error::TooManySequences { expected: u32::MAX })
        }
    }

    /// Makes a sequence that takes over `blocks`, and leaves the slot's former storage in its place.
    pub(crate) fn open(&mut self, blocks: &mut Vec<u32>) -> (SeqId, &mut Sequence) {
        let at = self.vacant.pop().unwrap_or_else(|| {
            self.slots.push(Slot { generation: 0, live: false, sequence: Sequence::default() });
            u32::try_from(self.slots.len() - 1).expect("the caller checked that there is room")
        });
        let slot = &mut self.slots[at as usize];
        slot.live = true;
        std::mem::swap(&mut slot.sequence.blocks, blocks);
        let id = SeqId { allocator: self.allocator, slot: at, generation: slot.generation };
        (id, &mut slot.sequence)
    }

    /// Ends a sequence whose blocks were given back.
    pub(crate) fn close(&mut self, id: SeqId) {
        let slot = &mut self.slots[id.slot as usize];
        slot.live = false;
        slot.generation = slot.generation.wrapping_add(1);
        slot.sequence.blocks.clear();
        self.vacant.push(id.slot);
    }

    /// The live sequences, in no order of meaning.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (SeqId, &Sequence)> {
        (0u32..).zip(&self.slots).filter(|(_, slot)| slot.live).map(|(at, slot)| {
            let id = SeqId { allocator: self.allocator, slot: at, generation: slot.generation };
            (id, &slot.sequence)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sequences_refuse_stale_and_foreign_handles() {
        let mut sequences = Sequences::new(7);
        let (first, _) = sequences.open(&mut Vec::new());
        sequences.close(first);
        assert_eq!(
            sequences.get(first).unwrap_err(),
            Error::StaleSequence { expected: 1, got: first }
        );
        let (second, _) = sequences.open(&mut Vec::new());
        assert_ne!(first, second);
        assert!(sequences.get(first).is_err() && sequences.get(second).is_ok());
        let other = Sequences::new(8);
        let foreign = Error::ForeignSequence { expected: 8, got: second };
        assert_eq!(other.get(second).unwrap_err(), foreign);
    }

    #[test]
    fn sequences_reuse_the_storage_of_a_closed_table() {
        let mut sequences = Sequences::new(0);
        let (id, _) = sequences.open(&mut Vec::with_capacity(64));
        sequences.close(id);
        let mut spare = vec![3];
        let (id, sequence) = sequences.open(&mut spare);
        assert_eq!(sequence.blocks, [3]);
        assert_eq!((spare.len(), spare.capacity()), (0, 64));
        assert_eq!(sequences.iter().map(|(id, _)| id).collect::<Vec<_>>(), [id]);
    }
}
