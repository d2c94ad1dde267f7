//! The walk of one task over its keys, tile by tile.
//!
//! Invariant: tiles are counted from the first key of the part and each row meets its tiles in
//! order, so a part's bits depend on its keys alone. A tile is two passes, over the K rows of all heads and
//! over their V rows, each in storage order and each fetching what the next one reads; the order by
//! heads, in which a head's K and V rows follow one another, reads a page in as many pieces as there
//! are heads and ran a quarter slower.

use std::ops::Range;

use attn_core::Error;

use super::parts::{PartLayout, PartState};
use super::store::Store;
use super::{Call, RULE_ROWS, Sizes, Task, rule_keys};
use crate::cpu::prefill::unchecked;
use crate::cpu::rows::StoredRows;
use crate::cpu::scores::{ScoreRules, tile_width};
use crate::cpu::simd::{
    Pass, RowStarts, RowState, Scattered, Widen, packed_len, transpose, widened_len,
};
use crate::cpu::workspace::carve;

/// The scratch of a worker.
struct Scratch<'s> {
    /// Packed queries of each KV head.
    queries: &'s mut [f32],
    /// Scores `[kv_heads, rows, keys]`.
    scores: &'s mut [f32],
    /// A few K rows of one head, widened.
    block: &'s mut [f32],
    /// One query.
    query: &'s mut [f32],
    /// K rows of one head that are not contiguous in storage.
    keys: &'s mut [f32],
    /// V rows of one head that are not contiguous in storage.
    values: &'s mut [f32],
    /// Scores transposed for the rules `[keys, RULE_ROWS]`.
    tile: &'s mut [f32],
    /// For the rules.
    rest: &'s mut [f32],
}

/// What a task knows of its sequence.
struct Sequence<'a, E> {
    k: Store<'a, E>,
    v: Store<'a, E>,
    /// One for each KV head.
    rules: Vec<ScoreRules<'a>>,
    /// Keys that every row sees by causal and window bounds.
    common: Range<usize>,
    /// Query rows of a KV head.
    rows: usize,
}

impl<'a, E: Widen> Call<'_, 'a, E> {
    /// Computes one part and leaves its state in the task's result.
    pub(super) fn run_task(&self, task: Task<'_>, own: &mut [f32]) -> Result<(), Error> {
        let Task { sequence, keys, result } = task;
        let mut state = PartLayout::new(self.problem, sequence).state(result);
        state.o.fill(0.0);
        state.max.fill(f32::NEG_INFINITY);
        state.sum.fill(0.0);
        if keys.is_empty() || state.max.is_empty() {
            return Ok(());
        }
        let of = self.sequence(sequence)?;
        let sizes = self.sizes;
        let mut rest = own;
        let mut scratch = Scratch {
            queries: carve(&mut rest, sizes.queries_len(of.rows)),
            scores: carve(&mut rest, sizes.scores_len(of.rows)),
            block: carve(&mut rest, widened_len(sizes.head_dim)),
            query: carve(&mut rest, sizes.head_dim),
            keys: carve(&mut rest, sizes.keys * sizes.head_dim),
            values: carve(&mut rest, sizes.keys * sizes.value_dim),
            tile: carve(&mut rest, rule_keys(sizes.keys) * RULE_ROWS),
            rest,
        };
        self.load_queries(sequence, &of, &mut scratch).ok_or_else(unchecked)?;
        self.walk(&of, keys, &mut state, &mut scratch).ok_or_else(unchecked)
    }

    fn sequence(&self, sequence: usize) -> Result<Sequence<'a, E>, Error> {
        let (problem, inputs) = (self.problem, self.inputs);
        let store = |view| {
            let rows = problem.cached_rows(view, self.cache.table, sequence)?;
            Store::new(rows)
        };
        let rules = (0..problem.kv_heads())
            .map(|head| ScoreRules::new(self.simd, problem, inputs, sequence, head))
            .collect::<Result<Vec<_>, _>>()?;
        let (q_len, kv_len) = (problem.lengths().q(sequence), problem.lengths().kv(sequence));
        let row = |row| problem.band().row(row, q_len, kv_len);
        Ok(Sequence {
            k: store(self.cache.k).ok_or_else(unchecked)?,
            v: store(self.cache.v).ok_or_else(unchecked)?,
            rules,
            common: row(q_len.saturating_sub(1)).start..row(0).end,
            rows: q_len * problem.group(),
        })
    }

    /// Reads the queries of all heads; the scale of fp8 keys is theirs to carry.
    fn load_queries(
        &self,
        sequence: usize,
        of: &Sequence<'a, E>,
        s: &mut Scratch<'_>,
    ) -> Option<()> {
        let dim = self.sizes.head_dim;
        let queries = StoredRows::queries(self.problem, &self.inputs.q, sequence)?;
        s.queries.fill(0.0);
        let packed = s.queries.chunks_exact_mut(packed_len(of.rows, dim));
        for (kv_head, (rules, packed)) in of.rules.iter().zip(packed).enumerate() {
            let factor = rules.query_factor() * self.inputs.k_scale_of(sequence, kv_head);
            let group = rules.group();
            for row in 0..of.rows {
                let (token, head) = (row / group, kv_head * group + row % group);
                queries.widen(self.simd, head, token..token + 1, factor, s.query, dim)?;
                self.simd.pack_query(row, s.query, packed);
            }
        }
        Some(())
    }

    fn walk(
        &self,
        of: &Sequence<'a, E>,
        keys: Range<usize>,
        state: &mut PartState<'_>,
        s: &mut Scratch<'_>,
    ) -> Option<()> {
        let tile_after = |start: usize| start..(start + self.sizes.keys).min(keys.end);
        let in_place = of.k.is_row_contiguous() && of.v.is_row_contiguous();
        let mut tile = tile_after(keys.start);
        let mut k_starts = of.k.locate(tile.clone())?;
        while !tile.is_empty() {
            let next_tile = tile_after(tile.end);
            let (v_starts, next) = (of.v.locate(tile.clone())?, of.k.locate(next_tile.clone())?);
            let step = Step { call: self, of, tile };
            if in_place {
                let (k, v) = (of.k.tile(&k_starts)?, of.v.tile(&v_starts)?);
                step.run(&Tiles { k, v, next: of.k.tile(&next) }, state, s);
            } else {
                step.run_gathered(state, s)?;
            }
            (tile, k_starts) = (next_tile, next);
        }
        Some(())
    }
}

/// K and V of a tile, and K of the next one, to be fetched.
struct Tiles<'t, E> {
    k: Scattered<'t, E>,
    v: Scattered<'t, E>,
    next: Option<Scattered<'t, E>>,
}

/// One tile of keys of a task.
struct Step<'s, 'c, 'a, E> {
    call: &'s Call<'c, 'a, E>,
    of: &'s Sequence<'a, E>,
    tile: Range<usize>,
}

impl<E: Widen> Step<'_, '_, '_, E> {
    fn run(&self, tiles: &Tiles<'_, E>, state: &mut PartState<'_>, s: &mut Scratch<'_>) {
        if self.is_plain() {
            self.heads(0..self.of.rules.len(), tiles, state, s);
            return;
        }
        for head in 0..self.of.rules.len() {
            if self.sees_something(head) {
                self.heads(head..head + 1, tiles, state, s);
            }
        }
    }

    /// The same for rows that are not contiguous in storage and are copied first.
    fn run_gathered(&self, state: &mut PartState<'_>, s: &mut Scratch<'_>) -> Option<()> {
        let Sizes { head_dim, value_dim, .. } = self.call.sizes;
        let dense = |dim: usize| {
            let mut starts = RowStarts::NONE;
            (0..self.tile.len()).try_for_each(|i| starts.push(i * dim)).map(|()| starts)
        };
        let (k_starts, v_starts) = (dense(head_dim)?, dense(value_dim)?);
        let (keys, values) = (std::mem::take(&mut s.keys), std::mem::take(&mut s.values));
        for head in 0..self.of.rules.len() {
            if !self.sees_something(head) {
                continue;
            }
            self.of.k.gather(head, self.tile.clone(), keys)?;
            self.of.v.gather(head, self.tile.clone(), values)?;
            let of = |data, starts, dim| Scattered::<f32> {
                data,
                starts,
                head_step: 0,
                dim,
                head_major: true,
            };
            let (k, v) = (of(&*keys, &k_starts, head_dim), of(&*values, &v_starts, value_dim));
            self.heads(head..head + 1, &Tiles { k, v, next: None }, state, s);
        }
        (s.keys, s.values) = (keys, values);
        Some(())
    }

    /// Whether products are scores: no option applies and no row's bounds cut the tile.
    fn is_plain(&self) -> bool {
        let common = &self.of.common;
        self.of.rules.iter().all(ScoreRules::is_plain)
            && common.start <= self.tile.start
            && self.tile.end <= common.end
    }

    /// Whether masks leave some row of the head's group a key of the tile.
    fn sees_something(&self, head: usize) -> bool {
        self.of.rules[head].visit(0..self.of.rows, self.tile.clone()).is_some()
    }

    /// Scores, softmax and weighted values of some heads.
    fn heads<T: Widen>(
        &self,
        heads: Range<usize>,
        tiles: &Tiles<'_, T>,
        state: &mut PartState<'_>,
        s: &mut Scratch<'_>,
    ) {
        let Sizes { keys: width, value_dim, .. } = self.call.sizes;
        let (rows, simd, all_heads) = (self.of.rows, self.call.simd, self.of.rules.len());
        let Tiles { k, v, next } = *tiles;
        let pass = Pass { tile: k, all_heads, heads: heads.clone(), ahead: Some(v) };
        simd.score_rows(s.queries, rows, &pass, s.block, s.scores, width);
        let of_heads = heads.start * rows..heads.end * rows;
        let scores = of_heads.start * width..of_heads.end * width;
        let mut seen = None;
        if !self.is_plain() {
            self.apply_rules(heads.start, s);
            seen = visible_starts(&s.scores[scores.clone()], width, v.starts);
            if seen.is_none() {
                return;
            }
        }
        let softmax = RowState {
            max: &mut state.max[of_heads.clone()],
            sum: &mut state.sum[of_heads.clone()],
            o: &mut state.o[of_heads.start * value_dim..of_heads.end * value_dim],
        };
        let exponent = self.of.rules[heads.start].exponent();
        simd.softmax_rows(&mut s.scores[scores.clone()], width, exponent, softmax);
        if self.of.rules[heads.start].drops() {
            for (n, weights) in s.scores[scores].chunks_exact_mut(width).enumerate() {
                let rules = &self.of.rules[heads.start + n / rows];
                rules.drop_row(&mut weights[..self.tile.len()], n % rows, self.tile.start);
            }
        }
        let v = Scattered { starts: seen.as_ref().unwrap_or(v.starts), ..v };
        let pass = Pass { tile: v, all_heads, heads, ahead: next };
        simd.weigh_rows(s.scores, width, &pass, rows, state.o);
    }

    /// Turns one head's products into scores whose hidden pairs are -inf.
    ///
    /// The rules work on transposed tiles; turning a few rows costs less than a second set of rules
    /// could be wrong.
    fn apply_rules(&self, head: usize, s: &mut Scratch<'_>) {
        let (rules, stride) = (&self.of.rules[head], self.call.sizes.keys);
        let count = self.tile.len();
        for first in (0..self.of.rows).step_by(RULE_ROWS) {
            let rows = first..(first + RULE_ROWS).min(self.of.rows);
            let above = head * self.of.rows;
            let scores = &mut s.scores[(above + rows.start) * stride..(above + rows.end) * stride];
            let Some(visit) = rules.visit(rows.clone(), self.tile.clone()) else {
                scores.fill(f32::NEG_INFINITY);
                continue;
            };
            // The visit may start before this tile; those keys are another part's, or nobody's.
            let start = visit.keys.start.max(self.tile.start);
            let (skipped, seen) = (start - visit.keys.start, visit.keys.end - start);
            let width = tile_width(rows.len());
            let tile = &mut s.tile[..visit.keys.len() * width];
            tile.fill(0.0);
            let at = start - self.tile.start;
            let lines = &mut tile[skipped * width..];
            transpose(&scores[at..], stride, (rows.len(), seen), lines, width);
            rules.apply(tile, width, rows.clone(), &visit, s.rest);
            let lines = &tile[skipped * width..];
            transpose(lines, width, (seen, rows.len()), &mut scores[at..], stride);
            for row in scores.chunks_exact_mut(stride) {
                row[..at].fill(f32::NEG_INFINITY);
                row[at + seen..count].fill(f32::NEG_INFINITY);
            }
        }
    }
}

/// Value rows with those that no row weighs replaced by one that is weighed, so that what a mask hides
/// from all rows is not read; `None` when nothing is weighed.
fn visible_starts(scores: &[f32], width: usize, starts: &RowStarts) -> Option<RowStarts> {
    let is_seen = |key: usize| scores.chunks_exact(width).any(|row| row[key] != f32::NEG_INFINITY);
    let starts = starts.as_slice();
    let stand_in = starts[(0..starts.len()).find(|&key| is_seen(key))?];
    let mut seen = RowStarts::NONE;
    for (key, &start) in starts.iter().enumerate() {
        seen.push(if is_seen(key) { start } else { stand_in })?;
    }
    Some(seen)
}
