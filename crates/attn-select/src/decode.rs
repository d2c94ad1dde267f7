//! Forward kernels that divide the work by keys and merge.
//!
//! The invariant: this family is taken where rows are few and keys many, where the caller asks for
//! it, or where nothing else is left; the plan says which of the three it was.

use attn_core::{Bytes, Engine, Features, KernelDesc, Phase, Refusal, Tile};

use crate::candidate::{Call, Fit, Standard};
use crate::heuristics;

pub(crate) fn fit(
    call: &Call<'_>,
    kernel: &KernelDesc,
    standard: Standard,
) -> Result<Fit, Refusal> {
    let (problem, host) = (call.problem, &call.caps.host);
    let is_forced = call.options().phase == Some(Phase::Decode);
    // A kernel for few rows is not there for every batch that a sequence may be part of, and the one
    // that runs instead rounds differently. Whoever forces the phase accepts a refusal in its place.
    if call.options().batch_invariant && kernel.max_query_rows.is_some() && !is_forced {
        return Err(Refusal::NotInEveryBatch);
    }
    let is_natural = match (kernel.engine, &call.caps.cuda) {
        (Engine::Cuda, Some(device)) => heuristics::is_device_decode_shaped(problem, device),
        _ => heuristics::is_decode_shaped(problem, host),
    };
    // A kernel of one kind of storage has no rival that divides rows.
    let is_special = kernel.requires != Features::NONE;
    // Many rows share their keys better in a tile of query rows; few keys leave nothing to divide.
    if standard == Standard::Fastest && !is_forced && !is_natural && !is_special {
        let why = "a tile of query rows reads these keys once for all rows; dividing the keys gains nothing";
        return Err(Refusal::Slower(why));
    }
    // 128 rows of a group meet each key 128 times, more than instructions of single warps multiply while it is read: eight
    // rows under 16 heads took 1.7 to 2.6 times as long as one, on an H200 (benches/notes/cuda-decode.md).
    if standard == Standard::Fastest
        && !is_forced
        && !is_special
        && kernel.engine == Engine::Cuda
        && call.has_row_tiles_beside(kernel)
    {
        let why =
            "a group's rows fill a tile of query rows, of a kernel that divides the keys, too";
        return Err(Refusal::Slower(why));
    }
    let reason = match (is_forced, is_natural) {
        (true, _) => "the caller asked for a decode kernel",
        (false, _) if is_special => {
            "made for this cache, of whose rows each is read once, as key and as value"
        }
        (false, true) => {
            "few query rows meet many keys, which are divided among threads or blocks and merged"
        }
        (false, false) => "no other kernel is left, and a sequence's rows fit this one",
    };
    match (kernel.engine, &call.caps.cuda) {
        (Engine::Cuda, Some(device)) => {
            let (tile, shared_memory) = heuristics::device_tile(kernel, problem, device)?;
            if let (Some(most), Standard::Fastest) = (kernel.most_units, standard) {
                check_room(call, tile, most.saturating_mul(device.sm_count as usize))?;
            }
            let split =
                heuristics::device_decode_split(kernel, problem, tile, shared_memory, device);
            Ok(Fit { tile, split, shared_memory, reason })
        }
        _ => {
            let tile = heuristics::decode_tile(problem);
            let split = heuristics::host_decode_split(problem, host);
            Ok(Fit { tile, split, shared_memory: Bytes::ZERO, reason })
        }
    }
}

/// Refuses what a kernel of whole multiprocessors, of which it has room for so many at one time, is slower with than smaller
/// blocks.
fn check_room(call: &Call<'_>, tile: Tile, room: usize) -> Result<(), Refusal> {
    let problem = call.problem;
    // How many units a batch has is no business of a sequence whose bits must not depend on it.
    if call.options().batch_invariant {
        if problem.kv_heads() > heuristics::FEW_HEADS {
            let why = "parts that no batch mate changes are many, and of several KV heads smaller blocks share them better";
            return Err(Refusal::Slower(why));
        }
        return Ok(());
    }
    let units = heuristics::units(problem);
    let tiles = heuristics::flat_rows(problem).div_ceil(tile.q.max(1));
    // Two waves of blocks that take a multiprocessor each, of few keys: a tenth slower than one of smaller ones, 32 sequences
    // of 1k keys, 8 KV heads, on an H200; of 8k keys 1 % faster (benches/notes/cuda-decode.md).
    if units > room && !heuristics::has_long_keys(problem) {
        let why = "more sequences and heads than it has room for at one time; smaller blocks leave less of the device waiting";
        return Err(Refusal::Slower(why));
    }
    // Each tile of rows reads the keys again: from the second-level cache where all run at one time, else from memory, and
    // bytes are what a decode step is made of.
    if tiles > 1 && units.saturating_mul(tiles) > room {
        let why = "a group's rows do not fit one tile, and each tile would read the keys again";
        return Err(Refusal::Slower(why));
    }
    Ok(())
}
