//! Ways to execute that must not change a bit: streams, graphs, repetition, batch mates; and tables gone wrong.
//!
//! The invariant: whatever is compared here is compared bit by bit, since the same work in another place or at another
//! time is the same sums in the same order.

use std::fmt;
use std::sync::Arc;

use attn_core::DType::{BF16, F8E4M3, F16};
use attn_core::PageOrder::{Hnd, Nhd};
use attn_core::{
    ErrorRule, Family, Feature, Features, Inputs, KernelDesc, KvView, Outputs, Plan, Problem,
    Strided, TensorView, View,
};
use attn_kernels::cuda::{CudaStream, Workspace};
use attn_reference::case::{Hiding, Scales};
use attn_reference::{Case, CaseData, OutputBuffers, compare, judge_rows, naive};

use super::super::corpus::{forward_share, share};
use super::super::record::Tallies;
use super::Judge;
use super::forward::{Selection, family_of};
use super::long::shared;
use super::model::all_rows;
use crate::device::{DeviceInputs, DeviceOutputs, Gpu};

/// The bits of both outputs, with what lay between them.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Bits {
    o: Vec<u8>,
    lse: Vec<u8>,
}

impl Bits {
    fn of(gpu: &Gpu, outputs: &DeviceOutputs) -> Result<Self, attn_kernels::Error> {
        let lse = outputs.lse.as_ref().map(|lse| lse.storage(&gpu.stream)).transpose()?;
        Ok(Self { o: outputs.o.storage(&gpu.stream)?, lse: lse.unwrap_or_default() })
    }

    fn same(&self, other: &Self, what: &str) -> Result<(), String> {
        for (tensor, a, b) in [("o", &self.o, &other.o), ("lse", &self.lse, &other.lse)] {
            if let Some(at) = (0..a.len().max(b.len())).find(|&at| a.get(at) != b.get(at)) {
                return Err(format!("{what}: byte {at} of {tensor} differs"));
            }
        }
        Ok(())
    }
}

/// How a call is run: by one kernel, whatever selection prefers, and with its keys in so many parts.
#[derive(Debug, Clone, Copy)]
struct Way {
    kernel: &'static KernelDesc,
    splits: Option<usize>,
}

impl Way {
    /// By each kernel of a family that the device has, for any storage, and that divides keys where these are split.
    fn all(selection: &Selection, family: Family, splits: Option<usize>) -> Vec<Self> {
        let divides =
            |kernel: &&KernelDesc| kernel.family != Family::Prefill || kernel.divides_keys;
        let kernels = selection
            .kernels(family)
            .filter(|kernel| kernel.requires == Features::NONE)
            .filter(|kernel| splits.is_none() || divides(kernel));
        kernels.map(|kernel| Self { kernel, splits }).collect()
    }

    /// By each kernel of latent caches that the device has.
    fn latent(selection: &Selection, splits: Option<usize>) -> Vec<Self> {
        let kernels = selection.kernels(Family::Decode);
        let own = kernels.filter(|kernel| kernel.requires.contains(Feature::LatentCache));
        own.map(|kernel| Self { kernel, splits }).collect()
    }

    /// By each kernel of the case's storage.
    fn of(selection: &Selection, case: &Case, family: Family, splits: Option<usize>) -> Vec<Self> {
        match case.recipe.pages {
            Some(pages) if pages.latent => Self::latent(selection, splits),
            _ => Self::all(selection, family, splits),
        }
    }

    fn is_latent(self) -> bool {
        self.kernel.requires.contains(Feature::LatentCache)
    }

    fn plan(self, selection: &Selection, problem: &Problem) -> Result<Plan, String> {
        let plan = selection.only(problem, self.kernel, self.splits);
        plan.ok_or_else(|| "refused by selection".to_owned())
    }

    fn is_decode(self) -> bool {
        self.kernel.family == Family::Decode
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(family_of(self.kernel.name))?;
        self.splits.map_or(Ok(()), |splits| write!(f, " in {splits}"))
    }
}

/// Calls whose bits are compared: some of each family, split ones among them.
fn calls() -> [(Case, Family, Option<usize>); 11] {
    let prompt =
        || Case::new("modes/prompt", BF16, (4, 2), 128, &[130, 40], &[300, 40]).causal().sinks();
    let step = || {
        let case = Case::new("modes/step", F16, (8, 2), 64, &[1, 3, 1], &[700, 65, 2000]);
        case.causal().paged(Nhd, 16)
    };
    let masked = Case::new("modes/masked", BF16, (4, 2), 64, &[70], &[200]);
    let cached = Case::new("modes/cached", BF16, (4, 1), 128, &[2, 1], &[513, 129]);
    let wide = |q: [usize; 2], k: [usize; 2]| {
        let name = format!("modes/wide_{}", q[1]);
        Case::new(name, BF16, (16, 1), 128, &q, &k).causal().sinks().paged(Nhd, 16)
    };
    let latent = || {
        let case = Case::new("modes/latent", BF16, (71, 1), 576, &[2, 1, 1], &[700, 65, 1000]);
        case.value_dim(512).causal().paged(Nhd, 16).latent()
    };
    [
        (prompt(), Family::Prefill, None),
        (masked.mask("hqk", Hiding::Some).softcap(10.0).alibi(), Family::Prefill, None),
        (step(), Family::Decode, Some(1)),
        (step(), Family::Decode, Some(7)),
        // Equal sequences in parts, unequal ones, and more parts than a warp joins at once.
        (wide([8, 8], [900, 900]), Family::Prefill, Some(3)),
        (wide([8, 3], [1500, 77]), Family::Prefill, Some(3)),
        (wide([8, 3], [1500, 77]), Family::Prefill, Some(40)),
        (cached.fp8(F8E4M3, Scales::PerHead).paged(Hnd, 16), Family::Decode, Some(4)),
        (prompt(), Family::General, None),
        (latent(), Family::Decode, Some(1)),
        (latent(), Family::Decode, Some(5)),
    ]
}

pub(super) fn judge(judge: &mut Judge<'_>, tallies: &mut Tallies) {
    // Under a sanitizer two calls, captured, and tables gone wrong: the rest launches the same.
    let (calls, modes) = (calls(), &MODES[..]);
    let (calls, modes) =
        if judge.is_small { (&calls[2..4], &modes[3..]) } else { (&calls[..], modes) };
    for (case, family, splits) in calls {
        for way in Way::of(&judge.selection, case, *family, *splits) {
            let mut prepared = None;
            for (mode, check) in modes {
                let name = format!("{}: {mode} by {way}", case.name);
                judge.check(tallies, "modes", &name, |judge| {
                    if prepared.is_none() {
                        prepared = Some(Prepared::new(&judge.selection, &judge.gpu, case, way)?);
                    }
                    prepared.as_ref().map_or(Ok(0.0), |call| check(&judge.gpu, call).map(|()| 0.0))
                });
            }
        }
    }
    let paged = [
        (Family::Prefill, None),
        (Family::Prefill, Some(5)),
        (Family::Decode, Some(1)),
        (Family::Decode, Some(5)),
        (Family::General, None),
    ];
    let paged = paged
        .into_iter()
        .flat_map(|(family, splits)| Way::all(&judge.selection, family, splits))
        .chain([Some(1), Some(5)].into_iter().flat_map(|n| Way::latent(&judge.selection, n)));
    for way in paged.collect::<Vec<_>>() {
        let name = format!("modes/wrong_pages: by {way}");
        judge.check(tallies, "modes", &name, |judge| wrong_pages(judge, way));
    }
    if judge.is_small {
        return;
    }
    // Parts that a caller states are by a sequence's own length.
    for (family, splits) in
        [(Family::Prefill, None), (Family::Prefill, Some(3)), (Family::Decode, None)]
    {
        for way in Way::all(&judge.selection, family, splits) {
            let is_invariant = way.kernel.features.contains(Feature::BatchInvariant);
            for mates in Mates::ALL.into_iter().filter(|_| is_invariant) {
                let name = format!("modes/batch_invariance: {mates} by {way}");
                judge.check(tallies, "modes", &name, |judge| batch_invariance(judge, way, mates));
            }
            let name = format!("modes/broadcast_batch: by {way}");
            judge.check(tallies, "modes", &name, |judge| broadcast_batch(judge, way));
        }
    }
    for way in Way::latent(&judge.selection, None) {
        for mates in Mates::ALL.into_iter().filter(|mates| mates.is_paged) {
            let name = format!("modes/batch_invariance: {mates} by {way}");
            judge.check(tallies, "modes", &name, |judge| batch_invariance(judge, way, mates));
        }
    }
}

/// A plan with its inputs on the device, and the bits that it gives.
struct Prepared {
    plan: Plan,
    inputs: DeviceInputs,
    data: CaseData,
    bits: Bits,
}

impl Prepared {
    fn new(selection: &Selection, gpu: &Gpu, case: &Case, way: Way) -> Result<Self, String> {
        let data = case.build().map_err(text)?;
        let plan = way.plan(selection, data.problem())?;
        let inputs = data.inputs().map_err(text)?;
        let inputs = DeviceInputs::upload(&gpu.stream, &inputs).map_err(text)?;
        let mut call = Self { plan, inputs, data, bits: Bits { o: Vec::new(), lse: Vec::new() } };
        call.bits = call.run(gpu)?;
        Ok(call)
    }

    fn outputs(&self, gpu: &Gpu) -> Result<DeviceOutputs, String> {
        let mut buffers = self.data.output_buffers().map_err(text)?;
        DeviceOutputs::upload(&gpu.stream, &buffers.outputs().map_err(text)?).map_err(text)
    }

    /// One run on a stream, with a workspace of its own.
    fn run(&self, gpu: &Gpu) -> Result<Bits, String> {
        let mut outputs = self.outputs(gpu)?;
        self.launch(gpu, &mut outputs, &mut Workspace::new()).map_err(text)?;
        Bits::of(gpu, &outputs).map_err(text)
    }

    fn launch(
        &self,
        gpu: &Gpu,
        outputs: &mut DeviceOutputs,
        workspace: &mut Workspace,
    ) -> Result<(), attn_kernels::Error> {
        let inputs = self.inputs.inputs()?;
        gpu.engine.forward(&self.plan, &inputs, &mut outputs.outputs()?, workspace, &gpu.stream)
    }
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

type Mode = (&'static str, fn(&Gpu, &Prepared) -> Result<(), String>);

const MODES: [Mode; 4] = [
    ("repetition", |gpu, call| {
        let mut workspace = Workspace::new();
        for _ in 0..3 {
            let mut outputs = call.outputs(gpu)?;
            call.launch(gpu, &mut outputs, &mut workspace).map_err(text)?;
            let bits = Bits::of(gpu, &outputs).map_err(text)?;
            bits.same(&call.bits, "a repetition")?;
        }
        Ok(())
    }),
    ("default_stream", |gpu, call| {
        let other = on_stream(gpu, gpu.engine.default_stream());
        call.run(&other)?.same(&call.bits, "the default stream")
    }),
    ("two_streams", two_streams),
    ("graph", graph),
];

/// The same engine on another stream.
fn on_stream(gpu: &Gpu, stream: Arc<CudaStream>) -> Gpu {
    Gpu { engine: Arc::clone(&gpu.engine), stream }
}

/// Two streams, each with its workspace, work at the same time again and again.
fn two_streams(gpu: &Gpu, call: &Prepared) -> Result<(), String> {
    let second = on_stream(gpu, gpu.engine.new_stream().map_err(text)?);
    let (mut here, mut there) = (Workspace::new(), Workspace::new());
    let (mut ours, mut theirs) = (call.outputs(gpu)?, call.outputs(&second)?);
    for _ in 0..20 {
        call.launch(gpu, &mut ours, &mut here).map_err(text)?;
        call.launch(&second, &mut theirs, &mut there).map_err(text)?;
    }
    Bits::of(gpu, &ours).map_err(text)?.same(&call.bits, "the first of two streams")?;
    Bits::of(&second, &theirs).map_err(text)?.same(&call.bits, "the second of two streams")
}

/// A captured call writes nothing until it is replayed, and then the same every time.
fn graph(gpu: &Gpu, call: &Prepared) -> Result<(), String> {
    let mut workspace = Workspace::new();
    gpu.engine.prepare(&call.plan, &mut workspace, &gpu.stream).map_err(text)?;
    let mut outputs = call.outputs(gpu)?;
    let untouched = Bits::of(gpu, &outputs).map_err(text)?;
    let captured =
        gpu.engine.capture(&gpu.stream, || call.launch(gpu, &mut outputs, &mut workspace));
    let captured = captured.map_err(text)?;
    Bits::of(gpu, &outputs).map_err(text)?.same(&untouched, "after a capture")?;
    for _ in 0..3 {
        workspace.fill(&gpu.stream, 0xFF).map_err(text)?;
        captured.launch(&gpu.stream).map_err(text)?;
        Bits::of(gpu, &outputs).map_err(text)?.same(&call.bits, "a replay")?;
    }
    Ok(())
}

/// A batch of which one sequence is looked at.
#[derive(Debug, Clone, Copy)]
struct Mates {
    is_paged: bool,
    is_capped: bool,
}

impl Mates {
    const ALL: [Self; 4] = [
        Self { is_paged: false, is_capped: false },
        Self { is_paged: true, is_capped: false },
        Self { is_paged: false, is_capped: true },
        Self { is_paged: true, is_capped: true },
    ];

    fn case(self, q_lens: &[usize], kv_lens: &[usize]) -> Case {
        // Equal names give equal seeds, and a sequence's values depend on its own index and lengths alone.
        let mut case = Case::new("modes/mates", BF16, (8, 2), 64, q_lens, kv_lens).causal();
        case.spec.options.batch_invariant = true;
        let case = if self.is_capped { case.softcap(10.0) } else { case };
        if self.is_paged { case.paged(Nhd, 16) } else { case }
    }

    /// The same over a latent cache.
    fn latent(self, q_lens: &[usize], kv_lens: &[usize]) -> Case {
        let mut case = self.case(q_lens, kv_lens).value_dim(512);
        (case.spec.kv_heads, case.spec.head_dim) = (1, 576);
        case.latent()
    }
}

impl fmt::Display for Mates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_paged { "paged" } else { "dense" })?;
        f.write_str(if self.is_capped { ", capped" } else { "" })
    }
}

/// A sequence alone and among others: its rows have the same bits.
fn batch_invariance(judge: &mut Judge<'_>, way: Way, mates: Mates) -> Result<f64, String> {
    let (rows, beside) = if way.is_decode() { (3, [1, 16]) } else { (70, [9, 200]) };
    let run = |judge: &mut Judge<'_>, q: [usize; 3], k: [usize; 3]| -> Result<Vec<f64>, String> {
        let case = if way.is_latent() { mates.latent(&q, &k) } else { mates.case(&q, &k) };
        let data = case.build().map_err(text)?;
        let plan = way.plan(&judge.selection, data.problem())?;
        let inputs = data.inputs().map_err(text)?;
        let inputs = DeviceInputs::upload(&judge.gpu.stream, &inputs).map_err(text)?;
        let mut buffers = data.output_buffers().map_err(text)?;
        let mut outputs = buffers.outputs().map_err(text)?;
        judge.forward(&plan, &inputs, &mut outputs).map_err(text)?;
        let values = buffers.values();
        let (start, end) = (q[0], q[0] + q[1]);
        let (o, lse) = (8 * data.problem().value_dim(), 8);
        let mut own = values.o[start * o..end * o].to_vec();
        own.extend_from_slice(&values.lse[start * lse..end * lse]);
        Ok(own)
    };
    let alone = run(judge, [0, rows, 0], [0, 777, 0])?;
    let among = run(judge, [beside[0], rows, beside[1]], [40, 777, 3000])?;
    // f64 of the stored bits: equal values, no NaN among them.
    match alone.iter().zip(&among).position(|(a, b)| a != b) {
        None => Ok(0.0),
        Some(at) => Err(format!("element {at}: {} alone, {} among others", alone[at], among[at])),
    }
}

/// A page id outside the cache: NaN for its sequence, the others as they were, and no fault.
fn wrong_pages(judge: &mut Judge<'_>, way: Way) -> Result<f64, String> {
    let case = Case::new("modes/wrong_pages", BF16, (4, 2), 64, &[2, 3, 1], &[90, 200, 33]);
    let mut case = case.paged(Nhd, 16);
    if way.is_latent() {
        (case.spec.kv_heads, case.spec.head_dim, case.spec.value_dim) = (1, 576, 512);
        case = case.latent();
    }
    let data = case.build().map_err(text)?;
    let plan = way.plan(&judge.selection, data.problem())?;
    let good = data.inputs().map_err(text)?;
    let KvView::Paged { block_table, k_cache, .. } = &good.kv else {
        return Err("a case without pages".to_owned());
    };
    let (width, pages) = (block_table.shape()[1], k_cache.shape()[0]);
    let mut run = |inputs: &Inputs<'_>| {
        let inputs = DeviceInputs::upload(&judge.gpu.stream, inputs).map_err(text)?;
        let mut buffers = data.output_buffers().map_err(text)?;
        let mut outputs = buffers.outputs().map_err(text)?;
        judge.forward(&plan, &inputs, &mut outputs).map_err(text)?;
        Ok::<_, String>(buffers.values().o)
    };
    let want = run(&good)?;
    let past = i32::try_from(pages).unwrap_or(i32::MAX);
    for wrong in [past, i32::MAX, -1, i32::MIN] {
        let mut ids = block_table.data().to_vec();
        ids[width + 5] = wrong;
        let mut inputs = good.clone();
        if let KvView::Paged { block_table, .. } = &mut inputs.kv {
            *block_table = View::contiguous("block_table", &ids, &[3, width]).map_err(text)?;
        }
        let got = run(&inputs)?;
        let row = 4 * data.problem().value_dim();
        for (at, (got, want)) in got.iter().zip(&want).enumerate() {
            let is_its = (2..5).contains(&(at / row));
            let fits = if is_its { got.is_nan() } else { got == want };
            if !fits {
                return Err(format!("page {wrong}: element {at}: got {got}, without it {want}"));
            }
        }
    }
    Ok(0.0)
}

/// All sequences of a padded batch read the same keys, by a stride of 0.
fn broadcast_batch(judge: &mut Judge<'_>, way: Way) -> Result<f64, String> {
    let rows = if way.is_decode() { 2 } else { 40 };
    let case = Case::new("modes/broadcast", BF16, (4, 2), 64, &[rows; 3], &[150; 3]);
    let data = case.causal().padded().build().map_err(text)?;
    let problem = data.problem();
    let plan = way.plan(&judge.selection, problem)?;
    let mut inputs = data.inputs().map_err(text)?;
    if let KvView::Dense { k, v } = &mut inputs.kv {
        (*k, *v) = (of_first(k)?, of_first(v)?);
    }
    let on_device = DeviceInputs::upload(&judge.gpu.stream, &inputs).map_err(text)?;
    let mut buffers: OutputBuffers = data.output_buffers().map_err(text)?;
    let mut outputs = buffers.outputs().map_err(text)?;
    judge.forward(&plan, &on_device, &mut outputs).map_err(text)?;
    let Outputs { o, lse: Some(lse) } = &outputs else {
        return Err("the case wants no LSE".to_owned());
    };
    let rows = all_rows(problem);
    let verdict = judge_rows(problem, &inputs, &rows, &shared(o), &lse.as_view()).map_err(text)?;
    if !verdict.o.is_within() || !verdict.lse.is_within() {
        return Err(verdict.to_string());
    }
    // The reference on its own, to see that the view is what it is meant to be.
    let reference = naive::forward_f64(problem, &inputs).map_err(text)?;
    let rule = ErrorRule::new(problem.out_dtype());
    let whole = compare::judge(rule, &buffers.values().o, &reference.o, verdict.o.limit);
    if !whole.is_within() {
        return Err(whole.to_string());
    }
    Ok(forward_share(&verdict).max(share(&whole)))
}

/// The first sequence of a padded tensor in place of all.
fn of_first<'a>(tensor: &TensorView<'a>) -> Result<TensorView<'a>, String> {
    let TensorView::BF16(view) = tensor else {
        return Err(format!("expected bf16, got {}", tensor.dtype()));
    };
    let mut strides = view.layout().strides().to_vec();
    strides[0] = 0;
    let layout =
        Strided::new("kv", view.shape(), &strides, view.layout().offset()).map_err(text)?;
    Ok(TensorView::BF16(View::new("kv", view.data(), layout).map_err(text)?))
}

#[cfg(test)]
mod tests {
    use super::super::forward::tests::hopper;
    use super::*;

    #[test]
    fn modes_run_by_each_kernel_that_the_device_has() {
        let mut ampere = hopper();
        ampere.caps.cuda.as_mut().unwrap().compute = (8, 0);
        for (selection, prefills) in
            [(&ampere, &["prefill"][..]), (&hopper(), &["prefill_sm90a", "prefill"])]
        {
            let ways = Way::all(selection, Family::Prefill, None);
            assert_eq!(ways.iter().map(Way::to_string).collect::<Vec<_>>(), prefills);
            let in_parts = Way::all(selection, Family::Prefill, Some(3));
            let in_parts: Vec<_> = in_parts.iter().map(Way::to_string).collect();
            let expected = if prefills.len() == 1 { &[][..] } else { &["prefill_sm90a in 3"] };
            assert_eq!(in_parts, expected);
            let mates = Mates::ALL.map(|mates| mates.case(&[9, 70, 200], &[40, 777, 3000]));
            let prompts = mates.into_iter().map(|case| (case, Family::Prefill, None));
            for (case, family, splits) in calls().into_iter().chain(prompts) {
                let problem = case.problem().unwrap();
                let ways = Way::of(selection, &case, family, splits);
                // Latent caches have a kernel of their own on a Hopper alone.
                let is_latent = case.recipe.pages.is_some_and(|pages| pages.latent);
                // As keys in parts under row tiles have.
                let is_divided = family == Family::Prefill && splits.is_some();
                let may_lack = (is_latent || is_divided) && prefills.len() == 1;
                assert!(!ways.is_empty() || may_lack);
                for way in ways {
                    let plan = way.plan(selection, &problem).unwrap();
                    assert_eq!(plan.kernel, way.kernel.name, "{}", case.name);
                }
            }
        }
    }
}
