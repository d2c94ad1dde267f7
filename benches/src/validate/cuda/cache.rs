//! Appending to a cache and copying its pages, against loops on the host.
//!
//! The invariant: every element of the cache is looked at afterwards: those that were to be written, and that all others
//! kept their bits. Slots and pairs hold ids that are to be passed over, negative and past the cache.

use attn_core::{CacheLayout, DType, PageOrder, Strided, ValueStorage};
use attn_kernels::cuda::{
    AppendKv, CacheMut, DeviceBuffer, DeviceTensor, DeviceTensorMut, DeviceView, Rotary as Turn,
};
use attn_reference::random::Random;

use super::super::record::Tallies;
use super::Judge;
use super::model::{Rotary, Values, Written};

/// Pages of a cache, and sequences whose tokens come in.
const PAGES: usize = 7;
const SEQUENCES: usize = 3;
/// Positions that angles are there for.
const POSITIONS: usize = 64;

/// A cache, and what is appended to it.
#[derive(Debug, Clone, Copy)]
struct Config {
    dtype: DType,
    cache: DType,
    order: PageOrder,
    page_size: usize,
    heads: usize,
    dim: usize,
    value: ValueStorage,
    rotary: Rotary,
    /// Scales of an 8-bit cache: none, one, or one for each sequence and head.
    scales: Option<bool>,
    tokens: usize,
}

impl Config {
    fn layout(&self) -> Result<CacheLayout, attn_core::Error> {
        let &Self { cache, order, page_size, heads, dim, value, .. } = self;
        CacheLayout::contiguous(cache, order, page_size, heads, dim, value)
    }

    fn name(&self) -> String {
        let &Self { dtype, cache, order, page_size, heads, dim, value, rotary, scales, tokens } =
            self;
        let value = match value {
            ValueStorage::Separate(dim) => format!("{dim}"),
            ValueStorage::PrefixOfKey(dim) => format!("prefix{dim}"),
        };
        let rotary = match rotary {
            Rotary::None => "plain".to_owned(),
            Rotary::Halves(dim) => format!("halves{dim}"),
            Rotary::Pairs(dim) => format!("pairs{dim}"),
        };
        let scales = match scales {
            None => "unscaled",
            Some(false) => "scalar",
            Some(true) => "per_head",
        };
        format!(
            "{dtype}_{cache}_{order}{page_size}_h{heads}_{dim}-{value}_{rotary}_{scales}_t{tokens}"
        )
    }

    /// The shape of a cache tensor.
    fn shape(&self, dim: usize) -> [usize; 4] {
        match self.order {
            PageOrder::Nhd => [PAGES, self.page_size, self.heads, dim],
            PageOrder::Hnd => [PAGES, self.heads, self.page_size, dim],
        }
    }
}

/// The caches that are appended to.
fn configs(is_small: bool) -> Vec<Config> {
    let base = Config {
        dtype: DType::BF16,
        cache: DType::BF16,
        order: PageOrder::Nhd,
        page_size: 16,
        heads: 2,
        dim: 64,
        value: ValueStorage::Separate(64),
        rotary: Rotary::None,
        scales: None,
        tokens: 33,
    };
    let mut configs = vec![
        base,
        Config { rotary: Rotary::Halves(64), order: PageOrder::Hnd, ..base },
        Config { cache: DType::F8E4M3, rotary: Rotary::Pairs(64), scales: Some(true), ..base },
    ];
    if is_small {
        return configs;
    }
    let types = [
        (DType::BF16, DType::BF16),
        (DType::F16, DType::F16),
        (DType::F32, DType::F32),
        (DType::BF16, DType::F8E4M3),
        (DType::F16, DType::F8E5M2),
        (DType::F32, DType::F8E4M3),
        (DType::BF16, DType::F8E5M2),
    ];
    for (n, (dtype, cache)) in types.into_iter().enumerate() {
        for order in [PageOrder::Nhd, PageOrder::Hnd] {
            for (m, page_size) in [1, 5, 16, 64].into_iter().enumerate() {
                let rotary =
                    [Rotary::None, Rotary::Halves(64), Rotary::Pairs(64), Rotary::Halves(32)];
                let rotary = rotary[(n + m) % 4];
                let scales = [None, Some(false), Some(true)][(n + m) % 3];
                let scales = scales.filter(|_| cache.is_fp8());
                let tokens = [33, 1, 64, 7][m].min(PAGES * page_size);
                let pages =
                    Config { dtype, cache, order, page_size, rotary, scales, tokens, ..base };
                configs.push(pages);
            }
        }
    }
    for (dim, value) in [
        (128, ValueStorage::Separate(128)),
        (192, ValueStorage::Separate(128)),
        (256, ValueStorage::Separate(256)),
        (40, ValueStorage::Separate(24)),
        (9, ValueStorage::Separate(7)),
        (576, ValueStorage::PrefixOfKey(512)),
    ] {
        let rotary = if dim == 9 { Rotary::Pairs(6) } else { Rotary::Halves(dim / 2 / 2 * 2) };
        configs.push(Config { dim, value, heads: 1, rotary, ..base });
        configs.push(Config { dim, value, heads: 8, ..base });
    }
    configs.push(Config { tokens: 0, heads: 3, ..base });
    configs.dedup_by_key(|config| config.name());
    configs
}

pub(super) fn judge_append(judge: &mut Judge<'_>, tallies: &mut Tallies) {
    for config in configs(judge.is_small) {
        let name = format!("append/{}", config.name());
        judge.check(tallies, "append", &name, |judge| append(judge, &config));
    }
}

/// Tokens that are appended, on the host.
struct Tokens {
    k: Values,
    v: Option<Values>,
    slots: Vec<i64>,
    positions: Vec<i32>,
    sequences: Vec<i32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
    k_scale: Vec<f32>,
    v_scale: Vec<f32>,
}

impl Tokens {
    fn new(config: &Config, random: &mut Random) -> Self {
        let &Config { dtype, page_size, heads, dim, value, rotary, tokens, .. } = config;
        let small = |n: usize| i32::try_from(n).unwrap_or(i32::MAX);
        let mut places: Vec<i64> = (0..).take(PAGES * page_size).collect();
        random.shuffle(&mut places);
        let mut slots: Vec<i64> = places.into_iter().take(tokens).collect();
        // Tokens that are not stored: padding of a batch, and ids that are simply wrong.
        for (at, slot) in [(3, -1), (5, i64::MAX), (6, i64::MIN)] {
            if let Some(place) = slots.get_mut(at) {
                *place = slot;
            }
        }
        if let Some(place) = slots.get_mut(8) {
            *place = i64::try_from(PAGES * page_size).unwrap_or(i64::MAX);
        }
        let half = rotary.dim() / 2;
        let angles: Vec<f32> = (0..POSITIONS * half).map(|_| 3.0 * random.normal()).collect();
        let scale = |random: &mut Random| 0.03 + 0.2 * random.normal().abs();
        let scales = match config.scales {
            None => 0,
            Some(false) => 1,
            Some(true) => SEQUENCES * heads,
        };
        let v = match value {
            ValueStorage::Separate(dim) => {
                Some(Values::normal(dtype, tokens * heads * dim, random))
            }
            ValueStorage::PrefixOfKey(_) => None,
        };
        Self {
            k: Values::normal(dtype, tokens * heads * dim, random),
            v,
            slots,
            positions: (0..tokens).map(|_| small(random.below(POSITIONS))).collect(),
            sequences: (0..tokens).map(|_| small(random.below(SEQUENCES))).collect(),
            cos: angles.iter().map(|x| x.cos()).collect(),
            sin: angles.iter().map(|x| x.sin()).collect(),
            k_scale: (0..scales).map(|_| scale(random)).collect(),
            v_scale: (0..scales).map(|_| scale(random)).collect(),
        }
    }

    /// What the two caches should hold, by element.
    fn wanted(&self, config: &Config, layout: &CacheLayout) -> (Wanted, Wanted) {
        let &Config { page_size, heads, dim, rotary, .. } = config;
        let value_dim = layout.value().dim();
        let mut keys = vec![None; PAGES * page_size * heads * dim];
        let mut values = vec![None; PAGES * page_size * heads * value_dim];
        let half = rotary.dim() / 2;
        for (token, &slot) in self.slots.iter().enumerate() {
            let Some(slot) = usize::try_from(slot).ok().filter(|&slot| slot < PAGES * page_size)
            else {
                continue;
            };
            let (page, slot) = (slot / page_size, slot % page_size);
            for head in 0..heads {
                let scale = |scales: &[f32]| match scales {
                    [] => 1.0,
                    [one] => f64::from(*one),
                    all => {
                        let sequence = usize::try_from(self.sequences[token]).unwrap_or(0);
                        f64::from(all[sequence * heads + head])
                    }
                };
                let row = (token * heads + head) * dim;
                let mut key: Vec<f64> = (0..dim).map(|d| f64::from(self.k.get(row + d))).collect();
                let angles = usize::try_from(self.positions[token]).unwrap_or(0) * half;
                let angles = angles..angles + half;
                rotary.apply(&mut key, &self.cos[angles.clone()], &self.sin[angles]);
                let to = usize::try_from(layout.key_offset(page, slot, head)).unwrap_or(0);
                for (d, x) in key.into_iter().enumerate() {
                    keys[to + d] = Some(x / scale(&self.k_scale));
                }
                let Some(v) = &self.v else { continue };
                let row = (token * heads + head) * value_dim;
                let to = usize::try_from(layout.value_offset(page, slot, head)).unwrap_or(0);
                for d in 0..value_dim {
                    values[to + d] = Some(f64::from(v.get(row + d)) / scale(&self.v_scale));
                }
            }
        }
        (keys, values)
    }
}

/// By element, what should be there, where something was written.
type Wanted = Vec<Option<f64>>;

fn append(judge: &mut Judge<'_>, config: &Config) -> Result<f64, String> {
    let core = |error: attn_core::Error| error.to_string();
    let error = |error: attn_kernels::Error| error.to_string();
    let layout = config.layout().map_err(core)?;
    let mut random = Random::new(0x00A9_9E4D ^ config.tokens as u64);
    let tokens = Tokens::new(config, &mut random);
    let &Config { dtype, cache, heads, dim, rotary, .. } = config;
    let value_dim = layout.value().dim();
    let cells = PAGES * config.page_size * heads;
    let k_before = Values::normal(cache, cells * dim, &mut random);
    let v_before = Values::normal(cache, cells * value_dim, &mut random);

    let (engine, stream) = (&judge.gpu.engine, &judge.gpu.stream);
    let up = |bytes: &[u8]| DeviceBuffer::from_host(stream, bytes).map_err(error);
    let k = up(tokens.k.bytes())?;
    let v = tokens.v.as_ref().map(|v| up(v.bytes())).transpose()?;
    let slots = up(bytemuck::cast_slice(&tokens.slots))?;
    let positions = up(bytemuck::cast_slice(&tokens.positions))?;
    let sequences = up(bytemuck::cast_slice(&tokens.sequences))?;
    let (cos, sin) =
        (up(bytemuck::cast_slice(&tokens.cos))?, up(bytemuck::cast_slice(&tokens.sin))?);
    let k_scale = up(bytemuck::cast_slice(&tokens.k_scale))?;
    let v_scale = up(bytemuck::cast_slice(&tokens.v_scale))?;
    let (mut k_cache, mut v_cache) = (up(k_before.bytes())?, up(v_before.bytes())?);

    let count = config.tokens;
    let tensor = |field, buffer, dim| {
        DeviceTensor::contiguous(field, buffer, dtype, &[count, heads, dim]).map_err(error)
    };
    let scale = |field, buffer, wanted: bool| {
        let shape: &[usize] = match config.scales {
            None => return Ok(None),
            Some(false) => &[1],
            Some(true) => &[SEQUENCES, heads],
        };
        let view = |shape| DeviceView::contiguous(field, buffer, shape).map_err(error);
        if wanted { view(shape).map(Some) } else { Ok(None) }
    };
    let list = |field, buffer| DeviceView::contiguous(field, buffer, &[count]).map_err(error);
    let turn = if rotary == Rotary::None {
        None
    } else {
        let shape = [POSITIONS, rotary.dim() / 2];
        let angles = |field, buffer| DeviceView::contiguous(field, buffer, &shape).map_err(error);
        Some(Turn {
            positions: list("positions", &positions)?,
            cos: angles("cos", &cos)?,
            sin: angles("sin", &sin)?,
            interleaved: matches!(rotary, Rotary::Pairs(_)),
        })
    };
    let append = AppendKv {
        k: tensor("k", &k, dim)?,
        v: v.as_ref().map(|v| tensor("v", v, value_dim)).transpose()?,
        slots: DeviceView::contiguous("slots", &slots, &[count]).map_err(error)?,
        rotary: turn,
        k_scale: scale("k_scale", &k_scale, true)?,
        v_scale: scale("v_scale", &v_scale, v.is_some())?,
        sequences: match config.scales {
            Some(true) => Some(list("sequences", &sequences)?),
            _ => None,
        },
    };
    let mut into = caches(config, &layout, &mut k_cache, v.is_some().then_some(&mut v_cache))?;
    engine.append_kv(&layout, &append, &mut into, stream).map_err(error)?;
    let (keys, values) = tokens.wanted(config, &layout);
    let after = |buffer: &DeviceBuffer| {
        let bytes = buffer.to_host(stream, buffer.bytes()).map_err(error)?;
        Ok::<_, String>(Values::from_bytes(cache, bytes))
    };
    let (k_after, v_after) = (after(&k_cache)?, after(&v_cache)?);
    let is_copy = dtype == cache;
    let judge = |before, after, wanted, exact| {
        Written { layout: &layout, before, after, wanted }.judge(exact)
    };
    let worst = judge(&k_before, &k_after, keys, is_copy && rotary == Rotary::None)
        .map_err(|failure| format!("keys: {failure}"))?;
    let of_values = judge(&v_before, &v_after, values, is_copy)
        .map_err(|failure| format!("values: {failure}"))?;
    Ok(worst.max(of_values))
}

fn caches<'a>(
    config: &Config,
    layout: &CacheLayout,
    k: &'a mut DeviceBuffer,
    v: Option<&'a mut DeviceBuffer>,
) -> Result<CacheMut<'a>, String> {
    let error = |error: attn_kernels::Error| error.to_string();
    let place = |field, buffer, dim| {
        DeviceTensorMut::contiguous(field, buffer, layout.dtype(), &config.shape(dim))
            .map_err(error)
    };
    Ok(CacheMut {
        k_cache: place("k_cache", k, layout.key_dim())?,
        v_cache: v.map(|v| place("v_cache", v, layout.value().dim())).transpose()?,
        stamp: layout.id(),
    })
}

pub(super) fn judge_copy(judge: &mut Judge<'_>, tallies: &mut Tallies) {
    let types = [DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::F8E5M2];
    let types = if judge.is_small { &types[2..3] } else { &types[..] };
    for &dtype in types {
        for order in [PageOrder::Nhd, PageOrder::Hnd] {
            for (page_size, dim, value_dim) in
                [(16, 64, 64), (1, 128, 128), (5, 40, 24), (64, 9, 7)]
            {
                for gap in [0, 3] {
                    let name =
                        format!("copy/{dtype}_{order}{page_size}_{dim}-{value_dim}_gap_{gap}");
                    judge.check(tallies, "copy", &name, |judge| {
                        copy(judge, dtype, order, (page_size, dim, value_dim), gap)
                    });
                }
            }
        }
    }
}

/// Copies pages of a cache whose rows have `gap` unused elements after them, which must stay as they are.
fn copy(
    judge: &mut Judge<'_>,
    dtype: DType,
    order: PageOrder,
    (page_size, dim, value_dim): (usize, usize, usize),
    gap: usize,
) -> Result<f64, String> {
    const HEADS: usize = 3;
    let core = |error: attn_core::Error| error.to_string();
    let error = |error: attn_kernels::Error| error.to_string();
    let wide = |dim| {
        let value = ValueStorage::Separate(dim);
        CacheLayout::contiguous(dtype, order, page_size, HEADS, dim, value).map_err(core)
    };
    // The strides of a cache of wider rows.
    let (k_wide, v_wide) = (wide(dim + gap)?, wide(value_dim + gap)?);
    let value = ValueStorage::Separate(value_dim);
    let (k_strides, v_strides) = (k_wide.key_strides(), v_wide.value_strides());
    let layout =
        CacheLayout::strided(dtype, order, page_size, HEADS, dim, value, k_strides, v_strides)
            .map_err(core)?;
    let cells = PAGES * page_size * HEADS;
    let mut random = Random::new(dim as u64);
    let k_before = Values::normal(dtype, cells * (dim + gap), &mut random);
    let v_before = Values::normal(dtype, cells * (value_dim + gap), &mut random);
    // Two copies of one page, a swap-like pair of others, and pairs that are to be passed over.
    let pairs: [[i32; 2]; 6] = [[0, 4], [0, 5], [6, 1], [-1, 2], [3, 7], [i32::MAX, i32::MIN]];

    let (engine, stream) = (&judge.gpu.engine, &judge.gpu.stream);
    let up = |bytes: &[u8]| DeviceBuffer::from_host(stream, bytes).map_err(error);
    let (mut k, mut v) = (up(k_before.bytes())?, up(v_before.bytes())?);
    let list = up(bytemuck::cast_slice(&pairs))?;
    let list = DeviceView::contiguous("pairs", &list, &[pairs.len(), 2]).map_err(error)?;
    let strided = |field, dim, wide: usize| {
        let shape = |dim| match order {
            PageOrder::Nhd => [PAGES, page_size, HEADS, dim],
            PageOrder::Hnd => [PAGES, HEADS, page_size, dim],
        };
        let dense = Strided::contiguous(field, &shape(wide)).map_err(core)?;
        Strided::new(field, &shape(dim), dense.strides(), 0).map_err(core)
    };
    let k_at = strided("k_cache", dim, dim + gap)?;
    let v_at = strided("v_cache", value_dim, value_dim + gap)?;
    let mut cache = CacheMut {
        k_cache: DeviceTensorMut::new("k_cache", &mut k, dtype, k_at).map_err(error)?,
        v_cache: Some(DeviceTensorMut::new("v_cache", &mut v, dtype, v_at).map_err(error)?),
        stamp: layout.id(),
    };
    engine.copy_blocks(&layout, &mut cache, &list, stream).map_err(error)?;
    let offset_of = |is_key: bool, page, slot, head| {
        let offset = if is_key {
            layout.key_offset(page, slot, head)
        } else {
            layout.value_offset(page, slot, head)
        };
        usize::try_from(offset).unwrap_or(usize::MAX)
    };
    for (is_key, before, buffer, dim) in
        [(true, &k_before, &k, dim), (false, &v_before, &v, value_dim)]
    {
        let mut want = before.bytes().to_vec();
        for [from, to] in [[0, 4], [0, 5], [6, 1]] {
            for (slot, head) in (0..page_size).flat_map(|s| (0..HEADS).map(move |h| (s, h))) {
                let (from, to) =
                    (offset_of(is_key, from, slot, head), offset_of(is_key, to, slot, head));
                for d in 0..dim {
                    let size = dtype.size();
                    want[(to + d) * size..(to + d + 1) * size]
                        .copy_from_slice(before.bits(from + d));
                }
            }
        }
        let got: Vec<u8> = buffer.to_host(stream, buffer.bytes()).map_err(error)?;
        if let Some(at) = (0..want.len()).find(|&at| got[at] != want[at]) {
            let which = if is_key { "keys" } else { "values" };
            let element = at / dtype.size();
            return Err(format!(
                "{which}: element {element}: expected {}, got {}",
                want[at], got[at]
            ));
        }
    }
    Ok(0.0)
}
