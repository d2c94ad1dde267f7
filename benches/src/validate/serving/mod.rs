//! Serving steps at random: the allocator's books and an engine's pages in one loop.
//!
//! The invariant: keys and values of a token follow from every token before it, so that a row of another sequence, another
//! place or an earlier owner of a page gives another output; and what an output must be is computed from the
//! tokens as they follow one another, without a page.

mod device;
mod host;
mod story;
#[cfg(test)]
mod tests;

use attn_core::{
    CacheLayout, DType, Inputs, KvStorage, PageOrder, Problem, ProblemSpec, TensorView,
    ValueStorage, View,
};
use attn_paged::{
    Allocator, BlockCopy, BlockPool, Config, ErrorKind, Namespace, SeqId, SwappedGroup,
};
use attn_reference::ExpectedRows;
use attn_reference::random::Random;
use half::bf16;

use super::corpus::forward_share;
use super::record::Tallies;
use story::Story;

pub(super) use device::DevicePages;
pub(super) use host::HostPages;

const Q_HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 64;

/// Most sequences at a time, and most tokens of one.
const MOST_SEQUENCES: usize = 6;
const MOST_TOKENS: usize = 150;

/// How pages are, and what steps there are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Setting {
    name: &'static str,
    order: PageOrder,
    page_size: usize,
    /// Pages of the cache: fewer than the sequences may want, so that some must go.
    pages: usize,
    window: Option<usize>,
    steps: usize,
}

/// Loops that are run.
pub(super) const SETTINGS: [Setting; 3] = [
    Setting {
        name: "nhd16",
        order: PageOrder::Nhd,
        page_size: 16,
        pages: 36,
        window: None,
        steps: 1000,
    },
    Setting {
        name: "hnd4",
        order: PageOrder::Hnd,
        page_size: 4,
        pages: 120,
        window: None,
        steps: 600,
    },
    Setting {
        name: "window",
        order: PageOrder::Hnd,
        page_size: 8,
        pages: 64,
        window: Some(40),
        steps: 400,
    },
];

impl Setting {
    /// What its steps' names start with.
    pub(super) fn title(&self) -> String {
        format!("serving/{}", self.name)
    }

    fn layout(&self) -> Result<CacheLayout, attn_core::Error> {
        let value = ValueStorage::Separate(DIM);
        let (order, size) = (self.order, self.page_size);
        CacheLayout::contiguous(DType::BF16, order, size, KV_HEADS, DIM, value)
    }

    /// The shape of keys or values of `pages` pages.
    const fn shape(&self, pages: usize) -> [usize; 4] {
        match self.order {
            PageOrder::Nhd => [pages, self.page_size, KV_HEADS, DIM],
            PageOrder::Hnd => [pages, KV_HEADS, self.page_size, DIM],
        }
    }

    /// Elements of the keys of a page, which lie together.
    const fn page(&self) -> usize {
        self.page_size * KV_HEADS * DIM
    }
}

/// The pages of a cache and who attends over them.
pub(super) trait Pages {
    /// Writes rows `[tokens, kv_heads, dim]` to slots.
    fn append(&mut self, slots: &[i64], k: &[bf16], v: &[bf16]) -> Result<(), String>;
    /// Copies pages of the cache.
    fn copy(&mut self, copies: &[BlockCopy]) -> Result<(), String>;
    /// Copies pages of the cache to pages of the host.
    fn move_out(&mut self, copies: &[BlockCopy]) -> Result<(), String>;
    /// Copies pages of the host to pages of the cache.
    fn move_in(&mut self, copies: &[BlockCopy]) -> Result<(), String>;
    /// Attends through a block table `[sequences, width]`; `o` and `lse` hold the problem's rows.
    fn attend(
        &mut self,
        problem: &Problem,
        q: &[bf16],
        table: &[i32],
        o: &mut [bf16],
        lse: &mut [f32],
    ) -> Result<(), String>;
    /// As [`Pages::attend`] with the new rows written first, by one launch where there is one that does; the answer is whether.
    fn append_and_attend(
        &mut self,
        _problem: &Problem,
        _new: &[Vec<bf16>; 2],
        _q: &[bf16],
        _table: &[i32],
        _o: &mut [bf16],
        _lse: &mut [f32],
    ) -> Result<bool, String> {
        Ok(false)
    }
}

/// A sequence that is served.
#[derive(Debug)]
struct Live {
    seq: SeqId,
    story: Story,
    /// Tokens whose keys and values are in the cache.
    stored: usize,
}

/// Everything of a loop.
struct Loop<'p> {
    setting: Setting,
    pages: &'p mut dyn Pages,
    allocator: Allocator,
    host: BlockPool,
    live: Vec<Live>,
    away: Vec<(SwappedGroup, Live)>,
    random: Random,
    /// Blocks ran out: something must go.
    is_full: bool,
    /// Every other step stores its rows by the launch that attends.
    is_turn: bool,
}

/// Runs a setting's steps, each of which counts as one call; stops at the first that fails, for later ones would build on
/// what it left.
pub(super) fn judge(
    setting: Setting,
    pages: &mut dyn Pages,
    tallies: &mut Tallies,
    is_late: impl Fn() -> bool,
) {
    let mut serving = match Loop::new(setting, pages) {
        Ok(serving) => serving,
        Err(error) => return tallies.enter("serving", setting.name, Err(error)),
    };
    for step in 0..setting.steps {
        if is_late() {
            tallies.unfinished += setting.steps - step;
            return;
        }
        let name = format!("{}_step{step}", setting.title());
        let outcome = serving.step().map_err(|failure| format!("{name}: {failure}"));
        let is_over = outcome.is_err();
        tallies.enter("serving", &name, outcome);
        if is_over {
            tallies.unfinished += setting.steps - step - 1;
            return;
        }
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

impl<'p> Loop<'p> {
    fn new(setting: Setting, pages: &'p mut dyn Pages) -> Result<Self, String> {
        let config = Config::new(setting.pages, setting.page_size).prefix_cache(true);
        Ok(Self {
            setting,
            pages,
            allocator: Allocator::new(config).map_err(text)?,
            host: BlockPool::new(setting.pages / 2).map_err(text)?,
            live: Vec::new(),
            away: Vec::new(),
            random: Random::new(setting.page_size as u64),
            is_full: false,
            is_turn: false,
        })
    }

    /// One step; the answer is how close the worst output came to its limit.
    fn step(&mut self) -> Result<f64, String> {
        self.change()?;
        self.extend()?;
        self.allocator.audit().map_err(text)?;
        self.attend()
    }

    /// Changes which sequences there are, or cuts one.
    fn change(&mut self) -> Result<(), String> {
        let choice = self.random.below(10);
        if self.live.is_empty() {
            return if self.away.is_empty() { self.admit() } else { self.swap_in() };
        }
        let at = self.random.below(self.live.len());
        let is_long = self.live[at].story.len() > MOST_TOKENS;
        match choice {
            _ if self.is_full || is_long => {
                self.is_full = false;
                if choice < 5 { self.free(at) } else { self.swap_out(at) }
            }
            0..=3 if self.live.len() < MOST_SEQUENCES => self.admit(),
            4 if self.live.len() < MOST_SEQUENCES => self.fork(at),
            5 => self.truncate(at),
            6 => self.swap_out(at),
            7 | 8 if !self.away.is_empty() => self.swap_in(),
            9 => self.free(at),
            _ => Ok(()),
        }
    }

    /// Admits a sequence that may start as another did.
    fn admit(&mut self) -> Result<(), String> {
        let story = Story::begin(&mut self.random);
        let allocation = match self.allocator.alloc(story.tokens(), Namespace::DEFAULT) {
            Ok(allocation) => allocation,
            Err(error) => return self.note_full(&error),
        };
        self.live.push(Live { seq: allocation.seq, story, stored: allocation.hit });
        Ok(())
    }

    fn fork(&mut self, at: usize) -> Result<(), String> {
        let Live { seq, story, stored } = &self.live[at];
        let fork = self.allocator.fork(*seq).map_err(text)?;
        let fork = Live { seq: fork, story: story.clone(), stored: *stored };
        self.live.push(fork);
        Ok(())
    }

    fn truncate(&mut self, at: usize) -> Result<(), String> {
        let live = &mut self.live[at];
        let len = 1 + self.random.below(live.story.len());
        self.allocator.truncate(live.seq, len).map_err(text)?;
        live.story.truncate(len);
        live.stored = live.stored.min(len);
        Ok(())
    }

    fn free(&mut self, at: usize) -> Result<(), String> {
        let live = self.live.swap_remove(at);
        self.allocator.free(live.seq).map_err(text)
    }

    fn swap_out(&mut self, at: usize) -> Result<(), String> {
        let seq = self.live[at].seq;
        let plan = match self.allocator.swap_out(&[seq], &mut self.host) {
            Ok(plan) => plan,
            // The host has no room: the sequence goes for good.
            Err(error) if error.kind() == ErrorKind::OutOfBlocks => return self.free(at),
            Err(error) => return Err(text(error)),
        };
        self.pages.move_out(&plan.copies)?;
        let live = self.live.swap_remove(at);
        self.away.push((plan.group, live));
        Ok(())
    }

    fn swap_in(&mut self) -> Result<(), String> {
        let at = self.random.below(self.away.len());
        let plan = match self.allocator.swap_in(&self.away[at].0, &mut self.host) {
            Ok(plan) => plan,
            Err(error) => return self.note_full(&error),
        };
        self.pages.move_in(&plan.copies)?;
        let (_, mut live) = self.away.swap_remove(at);
        let [returned] = plan.sequences[..] else {
            return Err(format!("one sequence went, {} came back", plan.sequences.len()));
        };
        self.allocator.commit(returned.seq, returned.committed).map_err(text)?;
        live.seq = returned.seq;
        self.live.push(live);
        Ok(())
    }

    /// Takes a lack of blocks for what it is.
    fn note_full(&mut self, error: &attn_paged::Error) -> Result<(), String> {
        if error.kind() != ErrorKind::OutOfBlocks {
            return Err(text(error));
        }
        self.is_full = true;
        Ok(())
    }

    /// Gives most sequences a few more tokens.
    fn extend(&mut self) -> Result<(), String> {
        for at in 0..self.live.len() {
            let count = self.random.below(4);
            let live = &mut self.live[at];
            let mut longer = live.story.clone();
            longer.extend(count, &mut self.random);
            let tokens = &longer.tokens()[live.story.len()..];
            match self.allocator.append(live.seq, tokens) {
                Ok(copy) => {
                    live.story = longer;
                    // Before anything is written to the page that replaces a shared one.
                    self.pages.copy(copy.as_slice())?;
                }
                Err(error) => self.note_full(&error)?,
            }
        }
        Ok(())
    }

    /// Stores the new tokens of all sequences and judges their outputs.
    fn attend(&mut self) -> Result<f64, String> {
        let (mut seqs, mut q_lens, mut kv_lens) = (Vec::new(), Vec::new(), Vec::new());
        let (mut slots, mut q, mut new) = (Vec::new(), Vec::new(), [Vec::new(), Vec::new()]);
        let mut all = [Vec::new(), Vec::new()];
        for Live { seq, story, stored } in &self.live {
            let len = story.len();
            if *stored == len {
                continue;
            }
            let from = slots.len();
            slots.resize(from + len - stored, 0);
            self.allocator.write_slots(*seq, *stored, &mut slots[from..]).map_err(text)?;
            story.queries(*stored..len, &mut q);
            story.keys_and_values(*stored..len, &mut new);
            story.keys_and_values(0..len, &mut all);
            seqs.push(*seq);
            q_lens.push(len - stored);
            kv_lens.push(len);
        }
        if seqs.is_empty() {
            return Ok(0.0);
        }
        let mut spec = ProblemSpec::new(DType::BF16, Q_HEADS, KV_HEADS, DIM, &q_lens, &kv_lens);
        (spec.causal, spec.window_left) = (true, self.setting.window);
        let dense = Problem::new(spec.clone()).map_err(text)?;
        spec.kv = KvStorage::Paged(self.setting.layout().map_err(text)?);
        spec.options.num_splits = [None, None, Some(2), Some(5)][self.random.below(4)];
        let paged = Problem::new(spec).map_err(text)?;

        let pages = seqs.iter().map(|&seq| self.allocator.blocks(seq).map(<[u32]>::len));
        let width = pages.collect::<Result<Vec<_>, _>>().map_err(text)?;
        let width = width.into_iter().max().unwrap_or(0) + self.random.below(3);
        let mut table = vec![0; seqs.len() * width];
        self.allocator.write_padded_table(&seqs, width, &mut table).map_err(text)?;
        let rows = dense.lengths().total_q();
        let mut o = vec![bf16::NAN; rows * Q_HEADS * DIM];
        let mut lse = vec![f32::NAN; rows * Q_HEADS];
        let (o_out, lse_out) = (&mut o, &mut lse);
        self.is_turn = !self.is_turn;
        let is_stored = self.is_turn
            && self.pages.append_and_attend(&paged, &new, &q, &table, o_out, lse_out)?;
        if !is_stored {
            self.pages.append(&slots, &new[0], &new[1])?;
            self.pages.attend(&paged, &q, &table, &mut o, &mut lse)?;
        }
        for live in &mut self.live {
            live.stored = live.story.len();
            self.allocator.commit(live.seq, live.stored).map_err(text)?;
        }
        share(&dense, &q, &all, &o, &lse)
    }
}

/// How close outputs come to their limits, the reference being computed over keys and values one after the other.
fn share(
    dense: &Problem,
    q: &[bf16],
    [k, v]: &[Vec<bf16>; 2],
    o: &[bf16],
    lse: &[f32],
) -> Result<f64, String> {
    let lengths = dense.lengths();
    let (rows, keys) = (lengths.total_q(), lengths.total_kv());
    let view = |field, data, shape: &[usize]| {
        View::contiguous(field, data, shape).map(TensorView::BF16).map_err(text)
    };
    let inputs = Inputs::dense(
        view("q", q, &[rows, Q_HEADS, DIM])?,
        view("k", k, &[keys, KV_HEADS, DIM])?,
        view("v", v, &[keys, KV_HEADS, DIM])?,
    );
    let every: Vec<_> = (0..lengths.batch())
        .flat_map(|sequence| (0..lengths.q(sequence)).map(move |row| (sequence, row)))
        .collect();
    let expected = ExpectedRows::new(dense, &inputs, &every).map_err(text)?;
    let o = view("o", o, &[rows, Q_HEADS, DIM])?;
    let lse = View::contiguous("lse", lse, &[rows, Q_HEADS]).map_err(text)?;
    let verdict = expected.judge(&o, &lse).map_err(text)?;
    if verdict.o.is_within() && verdict.lse.is_within() {
        Ok(forward_share(&verdict))
    } else {
        Err(verdict.to_string())
    }
}
