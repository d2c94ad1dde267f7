//! The constants behind a case's kind, as the peers have them.
//!
//! The invariant: every contestant meets the same lengths and the same visible blocks. The block table is that
//! of PyTorch's generator at seed 5, bit for bit, hence the generator here.

/// Documents packed into one row of 16384 tokens.
pub(super) const DOC_LENS: [usize; 24] = [
    390, 837, 673, 94, 111, 244, 221, 779, 1692, 261, 70, 124, 944, 665, 191, 1146, 237, 522, 4495,
    173, 907, 1162, 299, 147,
];

/// Keys that a query of a window case sees before itself.
pub(super) const WINDOW_LEFT: usize = 4095;

/// Soft-cap of the soft-cap case.
pub(super) const SOFTCAP: f32 = 50.0;

/// Block rows and columns of the block-sparse case.
pub(super) const BLOCKS: usize = 128;

/// Rows, and keys, of its blocks.
pub(super) const BLOCK: usize = 128;

/// Key blocks that each query block sees.
pub(super) const VISIBLE_BLOCKS: i64 = 32;

/// Contexts of the uneven decode case.
pub(super) fn uneven_contexts() -> Vec<usize> {
    (0..64).map(|n| 512 + n * 7919 % 16384).collect()
}

/// `[BLOCKS, BLOCKS]`, 1 where the query block sees the key block.
pub(super) fn block_table() -> Vec<u8> {
    let mut random = MersenneTwister::new(5);
    (0..BLOCKS)
        .flat_map(|_| random.permutation(BLOCKS))
        .map(|place| u8::from(place < VISIBLE_BLOCKS))
        .collect()
}

/// The generator behind PyTorch's CPU permutations.
///
/// Source: Matsumoto and Nishimura, "Mersenne Twister: a 623-dimensionally equidistributed uniform
/// pseudo-random number generator", ACM TOMACS 8(1), 1998; the seeding of its 2002 revision.
struct MersenneTwister {
    state: [u32; Self::LEN],
    next: usize,
}

impl MersenneTwister {
    const LEN: usize = 624;
    const SHIFT: usize = 397;

    fn new(seed: u32) -> Self {
        let mut state = [seed; Self::LEN];
        for (n, place) in (1..).zip(1..Self::LEN) {
            let last = state[place - 1];
            state[place] = (last ^ (last >> 30)).wrapping_mul(1_812_433_253).wrapping_add(n);
        }
        Self { state, next: Self::LEN }
    }

    fn twist(&mut self) {
        for n in 0..Self::LEN {
            let following = self.state[(n + 1) % Self::LEN];
            let joined = (self.state[n] & 0x8000_0000) | (following & 0x7FFF_FFFF);
            let odd = if joined & 1 == 1 { 0x9908_B0DF } else { 0 };
            self.state[n] = self.state[(n + Self::SHIFT) % Self::LEN] ^ (joined >> 1) ^ odd;
        }
        self.next = 0;
    }

    fn draw(&mut self) -> u32 {
        if self.next == Self::LEN {
            self.twist();
        }
        let mut x = self.state[self.next];
        self.next += 1;
        x ^= x >> 11;
        x ^= (x << 7) & 0x9D2C_5680;
        x ^= (x << 15) & 0xEFC6_0000;
        x ^ (x >> 18)
    }

    /// A permutation of `0..len`, drawn as `torch.randperm` draws it.
    fn permutation(&mut self, len: usize) -> Vec<i64> {
        let mut items: Vec<i64> = (0..).take(len).collect();
        for n in 0..len.saturating_sub(1) {
            let offset = u64::from(self.draw()) % (len - n) as u64;
            items.swap(n, n + usize::try_from(offset).unwrap_or(0));
        }
        items
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permutation_is_that_of_torch() {
        // torch.manual_seed(0); torch.randperm(10)
        assert_eq!(MersenneTwister::new(0).permutation(10), [4, 1, 7, 5, 3, 9, 0, 8, 6, 2]);
    }

    #[test]
    fn generator_gives_the_published_stream() {
        let mut random = MersenneTwister::new(5489);
        let last = (0..10_000).map(|_| random.draw()).last();
        assert_eq!(last, Some(4_123_659_995), "the 10000th draw, as the C++ standard states it");
    }

    #[test]
    fn block_table_shows_as_many_blocks_to_each() {
        let table = block_table();
        let seen = |row: &[u8]| row.iter().map(|&x| i64::from(x)).sum::<i64>();
        assert!(table.chunks(BLOCKS).all(|row| seen(row) == VISIBLE_BLOCKS));
    }

    #[test]
    fn documents_fill_the_row() {
        assert_eq!(DOC_LENS.iter().sum::<usize>(), 16384);
        assert_eq!(uneven_contexts().iter().max(), Some(&16625));
    }
}
