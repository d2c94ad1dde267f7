//! The launches of a prepared backward: parameters, grids, order.
//!
//! The invariant: all are checked and loaded before the first one starts, and each finds what the one before it wrote,
//! for they are in one stream. A launch of no block is left out.

use std::sync::Arc;

use attn_core::{Arrangement, KvStorage, Problem, Strided};
use cudarc::driver::CudaStream;

use super::config::{self, Config, Main};
use super::hopper;
use super::params::{
    BIAS_LAST, BackwardParams, DETERMINISTIC, NATURAL, ROW_SUMS, SUMS_IN_FOURS, TURN_ROWS,
};
use super::space::Space;
use super::tensors::{ForwardResults, Gradients};
use super::tiles::{Table, Tiles};
use crate::cuda::call::{Inputs, KvTensors};
use crate::cuda::forward;
use crate::cuda::maps;
use crate::cuda::params::{Address, Divisor, Pairs, PerHead, Rows, as_i32};
use crate::cuda::tensor::{DeviceTensor, DeviceViewMut};
use crate::error::Error;
use crate::launch::Launch;
use crate::module::Function;

/// What `backward_naive` does in a launch: `Phase` in `cuda/kernel/backward_naive.cu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Rows = 0,
    Keys = 1,
    Bias = 2,
    Sinks = 3,
}

/// Kernels around the main one.
#[derive(Debug, Clone)]
pub(crate) struct Around {
    pub(crate) prepare: Arc<Function>,
    pub(crate) finish: Arc<Function>,
    /// The pass that sums the gradient of the bias in order.
    pub(crate) bias: Option<Arc<Function>>,
}

/// The launches of a prepared plan, but for their tensors.
#[derive(Debug)]
pub(crate) struct Launches {
    pub(crate) main: Arc<Function>,
    /// None around the naive kernel.
    pub(crate) around: Option<Around>,
    config: Config,
    tiles: Tiles,
    space: Space,
    params: BackwardParams,
    overlaps: bool,
}

impl Launches {
    /// The launches of a problem; `load` finds a kernel.
    ///
    /// # Errors
    /// [`Error::Call`] for a problem too large for 31-bit grids; what `load` answers.
    pub(crate) fn new(
        problem: &Problem,
        config: Config,
        overlaps: bool,
        load: impl Fn(&crate::spec::KernelSpec, u32) -> Result<Arc<Function>, Error>,
    ) -> Result<Self, Error> {
        let tiles = Tiles::new(problem, &config)?;
        let space = Space::of(problem, &config, tiles.row_tiles);
        let main = load(&config.spec, config.dynamic_smem)?;
        let dtype = problem.q_dtype();
        let around = match config.main {
            Main::Naive => None,
            Main::Tiled => Some(Around {
                prepare: load(&config::prepare_spec(dtype), 0)?,
                finish: load(&config::finish_spec(dtype), 0)?,
                bias: config::has_bias_pass(problem)
                    .then(|| load(&config::naive_spec(dtype), 0))
                    .transpose()?,
            }),
        };
        let params = template(problem, &config, &tiles)?;
        Ok(Self { main, around, config, tiles, space, params, overlaps })
    }

    /// What is uploaded once a plan.
    pub(crate) fn upload(&self) -> &[u8] {
        bytemuck::cast_slice(self.tiles.upload())
    }

    /// Bytes of the workspace between the launches.
    pub(crate) const fn bytes(&self) -> usize {
        self.space.bytes
    }

    /// Every kernel that is launched.
    pub(crate) fn functions(&self) -> impl Iterator<Item = &Arc<Function>> {
        let around = self.around.iter();
        let around = around.flat_map(|a| [&a.prepare, &a.finish].into_iter().chain(&a.bias));
        [&self.main].into_iter().chain(around)
    }
}

/// Everything but addresses and strides.
fn template(problem: &Problem, config: &Config, tiles: &Tiles) -> Result<BackwardParams, Error> {
    let mut call = forward::template(problem, 1, attn_core::Split::Whole);
    let mut uniform_tiles = Divisor::NONE;
    if let Some((rows, keys)) = tiles.uniform {
        let lengths = problem.lengths();
        call.uniform_units = Divisor::new(narrow(keys));
        call.uniform_q = as_i32("q_lens", lengths.longest_q())?;
        call.uniform_kv = as_i32("kv_lens", lengths.longest_kv())?;
        uniform_tiles = Divisor::new(narrow(rows));
    }
    let padded_rows = tiles.padded_rows()?;
    let has_rows = tiles.row_tiles > 0 && problem.q_heads() > 0;
    let mut flags = 0;
    // Without rows nothing is added to, and nothing makes the counter 0.
    if has_rows && config::is_ordered(problem) {
        flags |= DETERMINISTIC;
    }
    if config::has_bias_pass(problem) {
        flags |= BIAS_LAST;
    }
    if config.has_maps {
        flags |= SUMS_IN_FOURS;
        call.section = as_i32("heads of a section", hopper::section(problem, config, tiles))?;
    }
    if config.main == Main::Tiled && config::is_general(problem) {
        flags |= NATURAL;
    }
    if config.main == Main::Tiled && problem.softcap().is_none() {
        flags |= ROW_SUMS;
    }
    let written_keys = match problem.kv() {
        KvStorage::Dense(Arrangement::Padded) => as_i32("kv_lens", problem.lengths().longest_kv())?,
        _ => -1,
    };
    let none = Rows::default();
    Ok(BackwardParams {
        call,
        d_o: none,
        dq: none,
        dk: none,
        dv: none,
        dbias: Pairs::default(),
        dsinks: PerHead::default(),
        lse2: 0,
        delta: 0,
        dq_sum: 0,
        row_sums: 0,
        factor: 0,
        turns: 0,
        tile_starts: 0,
        padded_rows,
        turn_stride: padded_rows / TURN_ROWS as i64,
        uniform_tiles,
        dq_dim: as_i32("head_dim", config.dq_dim)?,
        row_tiles: as_i32("tiles of rows", tiles.row_tiles)?,
        key_tiles: as_i32("tiles of keys", tiles.key_tiles)?,
        written_keys,
        kv_heads: as_i32("kv_heads", problem.kv_heads())?,
        flags,
        phase: 0,
        bias_extents: [1; 4],
        reserved: 0,
    })
}

/// A count that was checked to fit.
fn narrow(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

/// Checks what the tiled kernels load and store by: rows of 16-byte pieces.
pub(crate) fn check_alignment(
    inputs: &Inputs<'_>,
    results: &ForwardResults<'_>,
    gradients: &Gradients<'_>,
) -> Result<(), Error> {
    let KvTensors::Dense { k, v } = &inputs.kv else { return Err(paged()) };
    let (dk, dv) = (gradients.dk.tensor(), gradients.dv.tensor());
    forward::check_rows(
        [("q", &inputs.q), ("k", k), ("v", v), ("do", &results.d_o), ("dk", dk), ("dv", dv)],
        "cuda_backward_naive",
    )
}

fn paged() -> Error {
    attn_core::Error::invalid("kv", "dense keys and values", "a paged cache").into()
}

/// Fills in the tensors of a call that was checked against the problem.
fn fill(
    params: &mut BackwardParams,
    problem: &Problem,
    inputs: &Inputs<'_>,
    results: &ForwardResults<'_>,
    gradients: &Gradients<'_>,
) -> Result<(), Error> {
    let at = problem.q_arrangement();
    let KvStorage::Dense(kv_at) = problem.kv() else { return Err(paged()) };
    let row = |field, tensor: &DeviceTensor<'_>, at| {
        forward::rows(field, tensor.address(), tensor.layout(), at)
    };
    forward::fill_inputs(&mut params.call, problem, inputs)?;
    params.call.o = row("o", &results.o, at)?;
    params.call.lse = forward::row_heads(results.lse.address(), results.lse.layout(), at);
    params.d_o = row("do", &results.d_o, at)?;
    params.dq = row("dq", gradients.dq.tensor(), at)?;
    params.dk = row("dk", gradients.dk.tensor(), *kv_at)?;
    params.dv = row("dv", gradients.dv.tensor(), *kv_at)?;
    if let Some(dsinks) = &gradients.dsinks {
        let view = dsinks.view();
        let head = view.layout().strides().first().copied().unwrap_or(0);
        params.dsinks = PerHead { data: view.address(), sequence: 0, head };
    }
    if let Some(dbias) = &gradients.dbias {
        (params.dbias, params.bias_extents) = cells(dbias)?;
    }
    Ok(())
}

/// The cells of a bias' gradient: strides, 0 along axes of one extent, and extents, of four axes.
fn cells(dbias: &DeviceViewMut<'_, f32>) -> Result<(Pairs, [i32; 4]), Error> {
    let layout: &Strided = dbias.view().layout();
    let (mut strides, mut extents) = ([0i64; 4], [1i32; 4]);
    let missing = 4 - layout.shape().len().min(4);
    for (axis, (&extent, &stride)) in layout.shape().iter().zip(layout.strides()).enumerate() {
        extents[missing + axis] = as_i32("dbias", extent)?;
        strides[missing + axis] = if extent == 1 { 0 } else { stride };
    }
    let [sequence, head, row, key] = strides;
    Ok((Pairs { data: dbias.view().address(), sequence, head, row, key }, extents))
}

/// What a workspace has for a launch.
pub(crate) struct Site<'w> {
    /// Where the lengths are.
    pub(crate) tables: Address,
    /// Where the space between the launches is.
    pub(crate) space: Address,
    pub(crate) maps: &'w mut maps::Caches,
}

/// Launches a prepared plan of a problem that the tensors were checked against.
pub(crate) fn launch(
    launches: &Launches,
    problem: &Problem,
    inputs: &Inputs<'_>,
    results: &ForwardResults<'_>,
    gradients: &Gradients<'_>,
    Site { tables, space, maps: caches }: Site<'_>,
    stream: &CudaStream,
) -> Result<(), Error> {
    let Launches { config, tiles, .. } = launches;
    let mut params = launches.params;
    fill(&mut params, problem, inputs, results, gradients)?;
    let table = |table| tiles.offset(table).map_or(0, |at| tables + at);
    params.call.q_starts = table(Table::Queries);
    params.call.kv_starts = table(Table::Keys);
    params.call.unit_starts = table(Table::KeyTiles);
    params.call.sequences = table(Table::Sequences);
    params.tile_starts = table(Table::RowTiles);
    let at = |offset: usize| space + offset as u64;
    params.lse2 = at(launches.space.lse2);
    params.delta = at(launches.space.delta);
    let is_naive = config.main == Main::Naive;
    if is_naive {
        params.factor = at(launches.space.factor);
    } else {
        params.dq_sum = at(launches.space.dq_sum);
        params.row_sums = at(launches.space.row_sums);
        params.turns = at(launches.space.turns);
        params.call.counter = at(launches.space.counter);
    }

    let heads = problem.q_heads();
    let kv_heads = problem.kv_heads();
    let start = |launch: Launch<'_>, blocks: usize, params: &BackwardParams, maps: &[_]| {
        if blocks == 0 {
            return Ok(());
        }
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX).min(i32::MAX.unsigned_abs());
        Launch { blocks, ..launch }.run(stream, params, maps)
    };
    let run = |function, blocks, threads, dynamic_smem, maps: &[_]| {
        let overlaps = launches.overlaps && !is_naive;
        let launch = Launch { dynamic_smem, overlaps, ..Launch::new(function, 0, threads) };
        start(launch, blocks, &params, maps)
    };
    let naive = |function, phase: Phase, blocks| {
        let params = BackwardParams { phase: phase as i32, ..params };
        start(Launch::new(function, 0, config::NAIVE_THREADS), blocks, &params, &[])
    };
    let cells = params
        .bias_extents
        .iter()
        .fold(1usize, |cells, &extent| cells.saturating_mul(usize::try_from(extent).unwrap_or(0)));
    let bias_blocks =
        if problem.wants_dbias() { cells.div_ceil(config::NAIVE_THREADS as usize / 32) } else { 0 };
    let sinks = if problem.wants_dsinks() { heads } else { 0 };
    match &launches.around {
        None => {
            naive(&launches.main, Phase::Rows, tiles.written_rows.saturating_mul(heads))?;
            naive(&launches.main, Phase::Keys, tiles.written_keys.saturating_mul(kv_heads))?;
            naive(&launches.main, Phase::Bias, bias_blocks)?;
            naive(&launches.main, Phase::Sinks, sinks)
        }
        Some(around) => {
            let rows = tiles.row_tiles * heads;
            let keys = tiles.key_tiles * kv_heads;
            let (threads, smem) = (config.threads, config.dynamic_smem);
            // All that can fail before a launch has not begun by then.
            let maps = if config.has_maps && keys > 0 {
                Some(maps::backward(caches, inputs, &results.d_o, config.tile)?)
            } else {
                None
            };
            let maps = maps.as_ref().map_or(&[][..], |maps| maps);
            run(&around.prepare, rows, config::ROWS_THREADS, 0, &[])?;
            run(&launches.main, keys, threads, smem, maps)?;
            run(&around.finish, rows + sinks, config::ROWS_THREADS, 0, &[])?;
            match &around.bias {
                Some(bias) => naive(bias, Phase::Bias, bias_blocks),
                None => Ok(()),
            }
        }
    }
}
