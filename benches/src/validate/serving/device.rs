//! Pages on a device, and the CUDA engine: what is written, copied and attended never leaves it.

use attn_core::{CacheLayout, DType, Family, Plan, Problem};
use attn_kernels::Error;
use attn_kernels::cuda::{
    AppendKv, CacheMut, DeviceBuffer, DeviceTensor, DeviceTensorMut, DeviceView, DeviceViewMut,
    Inputs, KvTensors, Outputs, Pages as StepPages, Workspace,
};
use attn_paged::BlockCopy;
use half::bf16;

use super::{DIM, KV_HEADS, Pages, Q_HEADS, Setting, text};
use crate::device::Gpu;

/// Pages of a device, and those that went to the host.
#[derive(Debug)]
pub(in crate::validate) struct DevicePages<'g> {
    setting: Setting,
    layout: CacheLayout,
    gpu: &'g Gpu,
    workspace: Workspace,
    /// Keys and values.
    cache: [DeviceBuffer; 2],
    away: [Vec<bf16>; 2],
}

impl<'g> DevicePages<'g> {
    /// Pages of NaN.
    pub(in crate::validate) fn new(setting: Setting, gpu: &'g Gpu) -> Result<Self, Error> {
        let blank = vec![bf16::NAN; setting.pages * setting.page()];
        let buffer = || DeviceBuffer::from_host(&gpu.stream, &blank);
        Ok(Self {
            setting,
            layout: setting.layout()?,
            gpu,
            workspace: Workspace::new(),
            cache: [buffer()?, buffer()?],
            away: [blank.clone(), blank.clone()],
        })
    }

    fn plan(&self, problem: &Problem) -> Result<Plan, String> {
        attn_select::choose(problem, &self.gpu.engine.caps(), Gpu::catalogue()).map_err(text)
    }

    fn store(&mut self, slots: &[i64], k: &[bf16], v: &[bf16]) -> Result<(), Error> {
        let stream = &self.gpu.stream;
        let (k, v) = (DeviceBuffer::from_host(stream, k)?, DeviceBuffer::from_host(stream, v)?);
        let list = DeviceBuffer::from_host(stream, slots)?;
        let shape = [slots.len(), KV_HEADS, DIM];
        let append = AppendKv {
            k: DeviceTensor::contiguous("k", &k, DType::BF16, &shape)?,
            v: Some(DeviceTensor::contiguous("v", &v, DType::BF16, &shape)?),
            slots: DeviceView::contiguous("slots", &list, &[slots.len()])?,
            rotary: None,
            k_scale: None,
            v_scale: None,
            sequences: None,
        };
        let Self { setting, layout, cache, gpu, .. } = self;
        gpu.engine.append_kv(layout, &append, &mut tensors(setting, layout, cache)?, stream)
    }

    fn copy_pages(&mut self, copies: &[BlockCopy]) -> Result<(), Error> {
        let pairs: Vec<u32> = copies.iter().flat_map(|copy| [copy.from, copy.to]).collect();
        let Self { setting, layout, cache, gpu, .. } = self;
        let list = DeviceBuffer::from_host(&gpu.stream, &pairs)?;
        let pairs = DeviceView::contiguous("pairs", &list, &[copies.len(), 2])?;
        let cache = &mut tensors(setting, layout, cache)?;
        gpu.engine.copy_blocks(layout, cache, &pairs, &gpu.stream)
    }

    fn run(
        &mut self,
        plan: &Plan,
        new: Option<&[Vec<bf16>; 2]>,
        q: &[bf16],
        table: &[i32],
        o: &mut [bf16],
        lse: &mut [f32],
    ) -> Result<(), Error> {
        let Self { setting, layout, gpu: Gpu { engine, stream }, workspace, cache, .. } = self;
        let (rows, batch) = (plan.problem.lengths().total_q(), plan.problem.lengths().batch());
        let q = DeviceBuffer::from_host(stream, q)?;
        let list = DeviceBuffer::from_host(stream, table)?;
        let mut o_there = DeviceBuffer::from_host(stream, o)?;
        let mut lse_there = DeviceBuffer::from_host(stream, lse)?;
        let width = table.len() / batch.max(1);
        let block_table = DeviceView::contiguous("block_table", &list, &[batch, width])?;
        let shape = [rows, Q_HEADS, DIM];
        let q = DeviceTensor::contiguous("q", &q, DType::BF16, &shape)?;
        let mut outputs = Outputs {
            o: DeviceTensorMut::contiguous("o", &mut o_there, DType::BF16, &shape)?,
            lse: Some(DeviceViewMut::contiguous("lse", &mut lse_there, &[rows, Q_HEADS])?),
        };
        if let Some([k, v]) = new {
            let (k, v) = (DeviceBuffer::from_host(stream, k)?, DeviceBuffer::from_host(stream, v)?);
            let shape = [rows, KV_HEADS, DIM];
            let of = |field, buffer| DeviceTensor::contiguous(field, buffer, DType::BF16, &shape);
            let call = Inputs::dense(q, of("k", &k)?, of("v", &v)?);
            let mut pages = StepPages { cache: tensors(setting, layout, cache)?, block_table };
            engine.forward_append(plan, &call, &mut pages, &mut outputs, workspace, stream)?;
        } else {
            let shape = setting.shape(setting.pages);
            let of = |field, buffer| DeviceTensor::contiguous(field, buffer, DType::BF16, &shape);
            let kv = KvTensors::Paged {
                k_cache: of("k_cache", &cache[0])?,
                v_cache: of("v_cache", &cache[1])?,
                block_table,
                stamp: layout.id(),
            };
            engine.forward(plan, &Inputs::new(q, kv), &mut outputs, workspace, stream)?;
        }
        o.copy_from_slice(&o_there.to_host(stream, o.len())?);
        lse.copy_from_slice(&lse_there.to_host(stream, lse.len())?);
        Ok(())
    }
}

fn tensors<'c>(
    setting: &Setting,
    layout: &CacheLayout,
    [k, v]: &'c mut [DeviceBuffer; 2],
) -> Result<CacheMut<'c>, Error> {
    let shape = setting.shape(setting.pages);
    Ok(CacheMut {
        k_cache: DeviceTensorMut::contiguous("k_cache", k, DType::BF16, &shape)?,
        v_cache: Some(DeviceTensorMut::contiguous("v_cache", v, DType::BF16, &shape)?),
        stamp: layout.id(),
    })
}

impl Pages for DevicePages<'_> {
    fn append(&mut self, slots: &[i64], k: &[bf16], v: &[bf16]) -> Result<(), String> {
        self.store(slots, k, v).map_err(text)
    }

    fn copy(&mut self, copies: &[BlockCopy]) -> Result<(), String> {
        if copies.is_empty() { Ok(()) } else { self.copy_pages(copies).map_err(text) }
    }

    fn move_out(&mut self, copies: &[BlockCopy]) -> Result<(), String> {
        let page = self.setting.page();
        for (cache, away) in self.cache.iter().zip(&mut self.away) {
            for copy in copies {
                let rows = cache.to_host_at(&self.gpu.stream, copy.from as usize * page, page);
                let to = copy.to as usize * page;
                away[to..to + page].copy_from_slice(&rows.map_err(text)?);
            }
        }
        Ok(())
    }

    fn move_in(&mut self, copies: &[BlockCopy]) -> Result<(), String> {
        let page = self.setting.page();
        for (cache, away) in self.cache.iter_mut().zip(&self.away) {
            for copy in copies {
                let from = copy.from as usize * page;
                let rows = &away[from..from + page];
                let to = copy.to as usize * page;
                cache.copy_from_host_at(&self.gpu.stream, to, rows).map_err(text)?;
            }
        }
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
        let plan = self.plan(problem)?;
        self.run(&plan, None, q, table, o, lse).map_err(text)
    }

    fn append_and_attend(
        &mut self,
        problem: &Problem,
        new: &[Vec<bf16>; 2],
        q: &[bf16],
        table: &[i32],
        o: &mut [bf16],
        lse: &mut [f32],
    ) -> Result<bool, String> {
        let plan = self.plan(problem)?;
        // Kernels for many rows do not append.
        if plan.family != Family::Decode {
            return Ok(false);
        }
        self.run(&plan, Some(new), q, table, o, lse).map_err(text)?;
        Ok(true)
    }
}
