//! Pages in the host's memory, and the CPU engine.

use attn_core::{
    CacheLayout, Inputs, KvView, Outputs, Problem, TensorView, TensorViewMut, View, ViewMut,
};
use attn_kernels::cpu::{CpuEngine, Workspace};
use attn_paged::BlockCopy;
use half::bf16;

use super::{DIM, KV_HEADS, Pages, Q_HEADS, Setting, text};

/// Pages, those that went included.
#[derive(Debug)]
pub(in crate::validate) struct HostPages<'e> {
    setting: Setting,
    layout: CacheLayout,
    engine: &'e CpuEngine,
    workspace: Workspace,
    /// Keys and values.
    cache: [Vec<bf16>; 2],
    away: [Vec<bf16>; 2],
}

impl<'e> HostPages<'e> {
    /// Pages of NaN.
    pub(in crate::validate) fn new(
        setting: Setting,
        engine: &'e CpuEngine,
    ) -> Result<Self, attn_core::Error> {
        let blank = || vec![bf16::NAN; setting.pages * setting.page()];
        Ok(Self {
            setting,
            layout: setting.layout()?,
            engine,
            workspace: Workspace::new(),
            cache: [blank(), blank()],
            away: [blank(), blank()],
        })
    }
}

/// Copies pages of `page` elements from one store to another.
fn move_pages(from: &[Vec<bf16>; 2], to: &mut [Vec<bf16>; 2], copies: &[BlockCopy], page: usize) {
    for (from, to) in from.iter().zip(to) {
        for copy in copies {
            let (source, target) = (copy.from as usize * page, copy.to as usize * page);
            to[target..target + page].copy_from_slice(&from[source..source + page]);
        }
    }
}

impl Pages for HostPages<'_> {
    fn append(&mut self, slots: &[i64], k: &[bf16], v: &[bf16]) -> Result<(), String> {
        let size = self.setting.page_size;
        for (token, &slot) in slots.iter().enumerate() {
            let slot = usize::try_from(slot).map_err(text)?;
            for head in 0..KV_HEADS {
                let at = self.layout.key_offset(slot / size, slot % size, head);
                let at = usize::try_from(at).map_err(text)?;
                let row = (token * KV_HEADS + head) * DIM;
                for (cache, rows) in self.cache.iter_mut().zip([k, v]) {
                    cache[at..at + DIM].copy_from_slice(&rows[row..row + DIM]);
                }
            }
        }
        Ok(())
    }

    fn copy(&mut self, copies: &[BlockCopy]) -> Result<(), String> {
        let page = self.setting.page();
        for cache in &mut self.cache {
            for copy in copies {
                let source = copy.from as usize * page;
                cache.copy_within(source..source + page, copy.to as usize * page);
            }
        }
        Ok(())
    }

    fn move_out(&mut self, copies: &[BlockCopy]) -> Result<(), String> {
        move_pages(&self.cache, &mut self.away, copies, self.setting.page());
        Ok(())
    }

    fn move_in(&mut self, copies: &[BlockCopy]) -> Result<(), String> {
        move_pages(&self.away, &mut self.cache, copies, self.setting.page());
        Ok(())
    }

    fn attend(
        &mut self,
        problem: &Problem,
        q: &[bf16],
        table: &[i32],
        o: &mut [bf16],
        lse: &mut [f32],
    ) -> Result<(), String> {
        let lengths = problem.lengths();
        let (rows, batch) = (lengths.total_q(), lengths.batch());
        let plan = attn_select::choose(problem, &self.engine.caps(), attn_kernels::catalog())
            .map_err(text)?;
        let shape = self.setting.shape(self.setting.pages);
        let view = |field, data, shape: &[usize]| {
            View::contiguous(field, data, shape).map(TensorView::BF16).map_err(text)
        };
        let table = View::contiguous("block_table", table, &[batch, table.len() / batch.max(1)]);
        let kv = KvView::Paged {
            k_cache: view("k_cache", &self.cache[0], &shape)?,
            v_cache: view("v_cache", &self.cache[1], &shape)?,
            block_table: table.map_err(text)?,
            stamp: self.layout.id(),
        };
        let inputs = Inputs::new(view("q", q, &[rows, Q_HEADS, DIM])?, kv);
        let o = ViewMut::contiguous("o", o, &[rows, Q_HEADS, DIM]).map_err(text)?;
        let lse = ViewMut::contiguous("lse", lse, &[rows, Q_HEADS]).map_err(text)?;
        let mut outputs = Outputs { o: TensorViewMut::BF16(o), lse: Some(lse) };
        self.engine.forward(&plan, &inputs, &mut outputs, &mut self.workspace).map_err(text)
    }
}
