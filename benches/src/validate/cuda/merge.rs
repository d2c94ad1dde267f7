//! Merging attention states on the device, against the merge of core's online softmax in f64.
//!
//! The invariant: neutral states, states far apart and states of no key at all are among the rows of every call, for
//! that is where a merge divides by zero.

use attn_core::{DType, ErrorRule, OnlineSoftmax, Strided};
use attn_kernels::cuda::{DeviceBuffer, DeviceTensor, DeviceTensorMut, DeviceView, DeviceViewMut};
use attn_reference::compare;
use attn_reference::random::Random;

use super::super::corpus::share;
use super::super::record::Tallies;
use super::Judge;
use super::model::Values;

/// Rows of a call; the first ones are special.
const ROWS: usize = 37;
const HEADS: usize = 3;

pub(super) fn judge(judge: &mut Judge<'_>, tallies: &mut Tallies) {
    let dims: &[usize] =
        if judge.is_small { &[64] } else { &[1, 8, 32, 33, 64, 96, 128, 192, 256, 576] };
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for &dim in dims {
            for gap in [0, 5] {
                let name = format!("merge/{dtype}_{dim}_gap_{gap}");
                judge.check(tallies, "merge", &name, |judge| one(judge, dtype, dim, gap));
            }
        }
    }
}

/// A state on the host: outputs with `gap` unused elements after each row, and LSEs.
struct State {
    o: Values,
    lse: Vec<f32>,
}

impl State {
    fn new(dtype: DType, layout: &Strided, len: usize, random: &mut Random, side: usize) -> Self {
        let dim = layout.shape()[2];
        let mut values = vec![f32::NAN; len];
        let mut lse = Vec::new();
        for row in 0..ROWS {
            for head in 0..HEADS {
                let l = special(row, side).unwrap_or_else(|| 4.0 * random.normal());
                lse.push(l);
                for d in 0..dim {
                    // A state of no key has an output of zeros.
                    let value = if l == f32::NEG_INFINITY { 0.0 } else { random.normal() };
                    if let Some(at) = layout.index(&[row, head, d]) {
                        values[at] = value;
                    }
                }
            }
        }
        Self { o: Values::from_fn(dtype, len, |n| values[n]), lse }
    }

    fn softmax(&self, layout: &Strided, row: usize, head: usize) -> OnlineSoftmax<f64> {
        let value = |d| layout.index(&[row, head, d]).map_or(f32::NAN, |at| self.o.get(at));
        let output: Vec<f64> = (0..layout.shape()[2]).map(|d| f64::from(value(d))).collect();
        OnlineSoftmax::from_finished(&output, f64::from(self.lse[row * HEADS + head]))
    }
}

/// The LSE of a row that is there for a reason.
const fn special(row: usize, side: usize) -> Option<f32> {
    match (row, side) {
        // No key on either side, or on one.
        (0, _) | (1, 0) | (2, 1) => Some(f32::NEG_INFINITY),
        // One side outweighs the other past the range of an exponential.
        (3, 0) | (4, 1) => Some(1e4),
        (3, 1) | (4, 0) => Some(-1e4),
        // Both far from zero, and equal.
        (5, _) => Some(1e5),
        (6, _) => Some(-1e5),
        (7, _) => Some(0.0),
        _ => None,
    }
}

fn one(judge: &mut Judge<'_>, dtype: DType, dim: usize, gap: usize) -> Result<f64, String> {
    let (wide, text) = (dim + gap, |error: attn_core::Error| error.to_string());
    let strides = [HEADS * wide, wide].map(|stride| i64::try_from(stride).unwrap_or(i64::MAX));
    let shape = [ROWS, HEADS, dim];
    let layout = Strided::new("o", &shape, &[strides[0], strides[1], 1], gap).map_err(text)?;
    let len = gap + ROWS * HEADS * wide;
    let mut random = Random::new(dim as u64);
    let [a, b] = [0, 1].map(|side| State::new(dtype, &layout, len, &mut random, side));

    let stream = &judge.gpu.stream;
    let error = |error: attn_kernels::Error| error.to_string();
    let up = |bytes: &[u8]| DeviceBuffer::from_host(stream, bytes).map_err(error);
    let (a_o, b_o) = (up(a.o.bytes())?, up(b.o.bytes())?);
    let (a_lse, b_lse) = (up(bytemuck::cast_slice(&a.lse))?, up(bytemuck::cast_slice(&b.lse))?);
    let mut o = up(&vec![0xFF; len * dtype.size()])?;
    let mut lse = up(&vec![0xFF; ROWS * HEADS * 4])?;
    let tensor = |buffer| DeviceTensor::new("state", buffer, dtype, layout.clone()).map_err(error);
    let view = |buffer| DeviceView::contiguous("lse", buffer, &[ROWS, HEADS]).map_err(error);
    let (a_side, b_side) = ((tensor(&a_o)?, view(&a_lse)?), (tensor(&b_o)?, view(&b_lse)?));
    let mut to = DeviceTensorMut::new("o", &mut o, dtype, layout.clone()).map_err(error)?;
    let mut to_lse = DeviceViewMut::contiguous("lse", &mut lse, &[ROWS, HEADS]).map_err(error)?;
    let (a_side, b_side) = ((&a_side.0, &a_side.1), (&b_side.0, &b_side.1));
    let engine = &judge.gpu.engine;
    engine.merge_states(a_side, b_side, &mut to, &mut to_lse, stream).map_err(error)?;
    let bytes = o.to_host::<u8>(stream, len * dtype.size()).map_err(error)?;
    let got_lse: Vec<f32> = lse.to_host(stream, ROWS * HEADS).map_err(error)?;
    let got = Values::from_bytes(dtype, bytes);

    let (mut got_o, mut want_o, mut want_lse) = (Vec::new(), Vec::new(), Vec::new());
    let mut written = vec![false; len];
    for row in 0..ROWS {
        for head in 0..HEADS {
            let mut merged = a.softmax(&layout, row, head);
            merged.merge(&b.softmax(&layout, row, head));
            let (values, total) = merged.finish();
            want_o.extend(values);
            want_lse.push(total);
            for d in 0..dim {
                let at = layout.index(&[row, head, d]).ok_or("an index outside the output")?;
                got_o.push(f64::from(got.get(at)));
                written[at] = true;
            }
        }
    }
    if let Some(at) = (0..len).find(|&at| !written[at] && got.bits(at).iter().any(|&b| b != 0xFF)) {
        return Err(format!("element {at} lies outside the output and was written"));
    }
    let got_lse: Vec<f64> = got_lse.into_iter().map(f64::from).collect();
    // The weights are f32, and so is their sum: a few roundings of that type come before the output's own.
    let few = 4.0 * DType::F32.unit_roundoff();
    let magnitude = compare::magnitude(&want_o);
    let o = compare::judge(ErrorRule::new(dtype), &got_o, &want_o, few * magnitude);
    let lse_rule = ErrorRule::new(DType::F32);
    let l = compare::judge(lse_rule, &got_lse, &want_lse, few);
    let (o, l) = (o.with_shape(&shape), l.with_shape(&shape[..2]));
    if o.is_within() && l.is_within() {
        return Ok(share(&o).max(share(&l)));
    }
    Err(format!("o: {o}; lse: {l}"))
}
