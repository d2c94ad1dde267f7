//! The tokens of a sequence, and the rows that a model would make of them.
//!
//! The invariant: the rows of a token are a function of it and of all before it, and of nothing else.

use std::ops::Range;

use attn_reference::random::Random;
use half::bf16;

use super::{DIM, KV_HEADS, Q_HEADS};

/// Tokens and what they come to.
#[derive(Debug, Clone)]
pub(super) struct Story {
    tokens: Vec<u32>,
    /// After each token, a hash of it and of all before it.
    marks: Vec<u64>,
}

impl Story {
    /// A sequence of a few tokens to a few pages, that starts as one of three others do.
    pub(super) fn begin(random: &mut Random) -> Self {
        let mut story = Self { tokens: Vec::new(), marks: Vec::new() };
        let (opening, shared) = (below(random, 3) * 1000, below(random, 50));
        for token in opening..opening + shared {
            story.push(token);
        }
        story.extend(1 + random.below(20), random);
        story
    }

    /// Adds tokens.
    pub(super) fn extend(&mut self, count: usize, random: &mut Random) {
        for _ in 0..count {
            self.push(below(random, 5));
        }
    }

    fn push(&mut self, token: u32) {
        let before = self.marks.last().copied().unwrap_or(1);
        self.tokens.push(token);
        self.marks.push(Random::new(before ^ (u64::from(token) << 32)).next_u64());
    }

    pub(super) fn truncate(&mut self, len: usize) {
        self.tokens.truncate(len);
        self.marks.truncate(len);
    }

    pub(super) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    pub(super) const fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Appends the queries of some tokens, `[tokens, q_heads, dim]`.
    pub(super) fn queries(&self, tokens: Range<usize>, to: &mut Vec<bf16>) {
        for &mark in &self.marks[tokens] {
            normals(!mark, Q_HEADS * DIM, to);
        }
    }

    /// Appends the keys and the values of some tokens, `[tokens, kv_heads, dim]`.
    pub(super) fn keys_and_values(&self, tokens: Range<usize>, to: &mut [Vec<bf16>; 2]) {
        for &mark in &self.marks[tokens] {
            for (n, to) in (0..).zip(to.iter_mut()) {
                normals(mark.rotate_left(n), KV_HEADS * DIM, to);
            }
        }
    }
}

/// Uniform below a bound.
fn below(random: &mut Random, bound: u8) -> u32 {
    u32::try_from(random.below(usize::from(bound))).unwrap_or(0)
}

fn normals(seed: u64, count: usize, to: &mut Vec<bf16>) {
    let mut random = Random::new(seed);
    to.extend((0..count).map(|_| bf16::from_f32(random.normal())));
}
