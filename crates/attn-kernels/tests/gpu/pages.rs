//! Appending to a cache, copying its pages, merging states.

use std::sync::Arc;

use attn_core::{CacheLayout, DType, Element, F8E4M3, PageOrder, ValueStorage};
use attn_kernels::Error;
use attn_kernels::cuda::{
    AppendKv, CacheMut, CudaEngine, CudaStream, DeviceBuffer, DeviceTensor, DeviceTensorMut,
    DeviceView, DeviceViewMut, Rotary,
};
use half::bf16;

use crate::engine;

const PAGES: usize = 3;
const SLOTS: usize = 4;
const HEADS: usize = 2;
const DIM: usize = 8;

fn layout(order: PageOrder) -> CacheLayout {
    let value = ValueStorage::Separate(DIM);
    CacheLayout::contiguous(DType::F32, order, SLOTS, HEADS, DIM, value).expect("valid")
}

/// A cache of two buffers, all -1 before anything is written.
struct Cache {
    k: DeviceBuffer,
    v: DeviceBuffer,
    layout: CacheLayout,
}

impl Cache {
    fn new(stream: &CudaStream, order: PageOrder) -> Self {
        let blank = vec![-1f32; PAGES * SLOTS * HEADS * DIM];
        let buffer = || DeviceBuffer::from_host(stream, &blank).expect("memory");
        Self { k: buffer(), v: buffer(), layout: layout(order) }
    }

    fn tensors(&mut self) -> CacheMut<'_> {
        let shape = match self.layout.order() {
            PageOrder::Nhd => [PAGES, SLOTS, HEADS, DIM],
            PageOrder::Hnd => [PAGES, HEADS, SLOTS, DIM],
        };
        let of = |field, buffer| {
            DeviceTensorMut::contiguous(field, buffer, DType::F32, &shape).expect("fits")
        };
        CacheMut {
            k_cache: of("k_cache", &mut self.k),
            v_cache: Some(of("v_cache", &mut self.v)),
            stamp: self.layout.id(),
        }
    }

    fn host(&self, stream: &CudaStream) -> [Vec<f32>; 2] {
        let count = PAGES * SLOTS * HEADS * DIM;
        [&self.k, &self.v].map(|buffer| buffer.to_host(stream, count).expect("a copy"))
    }

    /// Appends three tokens, the second of which is not stored.
    fn append(&mut self, engine: &CudaEngine, stream: &Arc<CudaStream>) -> Result<(), Error> {
        let rows: Vec<f32> = (0..3 * HEADS * DIM).map(|i| i as f32).collect();
        let negative: Vec<f32> = rows.iter().map(|x| -100.0 - x).collect();
        let k = DeviceBuffer::from_host(stream, &rows)?;
        let v = DeviceBuffer::from_host(stream, &negative)?;
        let slots = DeviceBuffer::from_host(stream, &[5i64, -1, 11])?;
        let shape = [3, HEADS, DIM];
        let append = AppendKv {
            k: DeviceTensor::contiguous("k", &k, DType::F32, &shape)?,
            v: Some(DeviceTensor::contiguous("v", &v, DType::F32, &shape)?),
            slots: DeviceView::contiguous("slots", &slots, &[3])?,
            rotary: None,
            k_scale: None,
            v_scale: None,
            sequences: None,
        };
        let layout = self.layout.clone();
        engine.append_kv(&layout, &append, &mut self.tensors(), stream)
    }

    /// What the host would have written.
    fn expected(&self) -> [Vec<f32>; 2] {
        let mut k = vec![-1f32; PAGES * SLOTS * HEADS * DIM];
        let mut v = k.clone();
        for (token, slot) in [(0, 5), (2, 11)] {
            for head in 0..HEADS {
                let (page, slot) = (slot / SLOTS, slot % SLOTS);
                let at = usize::try_from(self.layout.key_offset(page, slot, head)).expect("small");
                for i in 0..DIM {
                    let value = ((token * HEADS + head) * DIM + i) as f32;
                    (k[at + i], v[at + i]) = (value, -100.0 - value);
                }
            }
        }
        [k, v]
    }
}

#[test]
fn append_writes_the_slots_and_nothing_else() {
    let Some(engine) = engine("append_writes_the_slots_and_nothing_else") else {
        return;
    };
    let stream = engine.new_stream().expect("a stream");
    for order in [PageOrder::Nhd, PageOrder::Hnd] {
        let mut cache = Cache::new(&stream, order);
        cache.append(&engine, &stream).expect("appended");
        assert_eq!(cache.host(&stream), cache.expected(), "{order}");
    }
    let mut cache = Cache::new(&stream, PageOrder::Nhd);
    cache.layout = layout(PageOrder::Hnd);
    let refused = {
        let (own, list) = (layout(PageOrder::Nhd), [0i32, 1]);
        let list = DeviceBuffer::from_host(&stream, &list).expect("memory");
        let pairs = DeviceView::contiguous("pairs", &list, &[1, 2]).expect("fits");
        engine.copy_blocks(&own, &mut cache.tensors(), &pairs, &stream)
    };
    let refused = refused.expect_err("a foreign stamp");
    assert!(matches!(refused, Error::Call(attn_core::Error::CacheLayout { .. })), "{refused}");
}

#[test]
fn copy_moves_whole_pages_and_leaves_bad_pairs() {
    let Some(engine) = engine("copy_moves_whole_pages_and_leaves_bad_pairs") else {
        return;
    };
    let stream = engine.new_stream().expect("a stream");
    let mut cache = Cache::new(&stream, PageOrder::Nhd);
    cache.append(&engine, &stream).expect("appended");
    let list = DeviceBuffer::from_host(&stream, &[1i32, 0, 7, 1, -1, 2]).expect("memory");
    let pairs = DeviceView::contiguous("pairs", &list, &[3, 2]).expect("fits");
    let layout = cache.layout.clone();
    engine.copy_blocks(&layout, &mut cache.tensors(), &pairs, &stream).expect("copied");
    let mut want = cache.expected();
    let page = SLOTS * HEADS * DIM;
    for side in &mut want {
        side.copy_within(page..2 * page, 0);
    }
    assert_eq!(cache.host(&stream), want);
}

#[test]
fn merge_of_a_state_with_nothing_is_the_state() {
    let Some(engine) = engine("merge_of_a_state_with_nothing_is_the_state") else {
        return;
    };
    let stream = engine.new_stream().expect("a stream");
    let (rows, shape, lse_shape) = (5, [5, HEADS, DIM], [5, HEADS]);
    let values: Vec<f32> = (0..rows * HEADS * DIM).map(|i| i as f32 * 0.25).collect();
    let lses: Vec<f32> = (0..rows * HEADS).map(|i| i as f32 - 3.0).collect();
    let upload = |data: &[f32]| DeviceBuffer::from_host(&stream, data).expect("memory");
    let (a, a_lse) = (upload(&values), upload(&lses));
    let (b, b_lse) =
        (upload(&vec![0.0; values.len()]), upload(&vec![f32::NEG_INFINITY; lses.len()]));
    let (mut o, mut lse) = (upload(&vec![f32::NAN; values.len()]), upload(&vec![9.0; lses.len()]));
    let tensor = |buffer| DeviceTensor::contiguous("a", buffer, DType::F32, &shape).expect("fits");
    let view = |buffer| DeviceView::contiguous("lse", buffer, &lse_shape).expect("fits");
    let (mine, other) = ((tensor(&a), view(&a_lse)), (tensor(&b), view(&b_lse)));
    {
        let mut out = DeviceTensorMut::contiguous("o", &mut o, DType::F32, &shape).expect("fits");
        let mut out_lse = DeviceViewMut::contiguous("lse", &mut lse, &lse_shape).expect("fits");
        let (a, b) = ((&mine.0, &mine.1), (&other.0, &other.1));
        engine.merge_states(a, b, &mut out, &mut out_lse, &stream).expect("merged");
        let short = DeviceView::contiguous("lse", &a_lse, &[4, HEADS]).expect("fits");
        let refused = engine.merge_states((&mine.0, &short), b, &mut out, &mut out_lse, &stream);
        assert!(refused.expect_err("a row less").to_string().contains("layout of a"));
    }
    assert_eq!(o.to_host::<f32>(&stream, values.len()).expect("a copy"), values);
    assert_eq!(lse.to_host::<f32>(&stream, lses.len()).expect("a copy"), lses);
}

#[test]
fn append_turns_keys_in_both_conventions() {
    let Some(engine) = engine("append_turns_keys_in_both_conventions") else {
        return;
    };
    let stream = engine.new_stream().expect("a stream");
    let upload = |data: &[f32]| DeviceBuffer::from_host(&stream, data).expect("memory");
    // Four of eight elements are turned, by two angles a position.
    let (angles, positions) = ([[0.3f32, 1.1], [0.7, -2.0], [1.9, 0.1]], [2i32, 0]);
    let cos: Vec<f32> = angles.iter().flatten().map(|x| x.cos()).collect();
    let sin: Vec<f32> = angles.iter().flatten().map(|x| x.sin()).collect();
    let keys: Vec<f32> = (0..2 * HEADS * DIM).map(|i| (i as f32 * 0.9).cos()).collect();
    let (cos_buffer, sin_buffer, k) = (upload(&cos), upload(&sin), upload(&keys));
    let slots = DeviceBuffer::from_host(&stream, &[0i64, 1]).expect("memory");
    let at = DeviceBuffer::from_host(&stream, &positions).expect("memory");
    for interleaved in [false, true] {
        let mut cache = Cache::new(&stream, PageOrder::Nhd);
        let tensor = |field| {
            DeviceTensor::contiguous(field, &k, DType::F32, &[2, HEADS, DIM]).expect("fits")
        };
        let append = AppendKv {
            k: tensor("k"),
            v: Some(tensor("v")),
            slots: DeviceView::contiguous("slots", &slots, &[2]).expect("fits"),
            rotary: Some(Rotary {
                positions: DeviceView::contiguous("positions", &at, &[2]).expect("fits"),
                cos: DeviceView::contiguous("cos", &cos_buffer, &[3, 2]).expect("fits"),
                sin: DeviceView::contiguous("sin", &sin_buffer, &[3, 2]).expect("fits"),
                interleaved,
            }),
            k_scale: None,
            v_scale: None,
            sequences: None,
        };
        let layout = cache.layout.clone();
        engine.append_kv(&layout, &append, &mut cache.tensors(), &stream).expect("appended");
        let [got, values] = cache.host(&stream);
        assert_eq!(values[..keys.len()], keys, "values are not turned");
        let mut want = keys.clone();
        for (row, key) in want.chunks_mut(DIM).enumerate() {
            let [a, b] = angles[usize::try_from(positions[row / HEADS]).expect("small")];
            for (i, angle) in [(0, a), (1, b)] {
                let (x, y) = if interleaved { (2 * i, 2 * i + 1) } else { (i, i + 2) };
                let (kx, ky) = (key[x], key[y]);
                key[x] = kx * angle.cos() - ky * angle.sin();
                key[y] = kx * angle.sin() + ky * angle.cos();
            }
        }
        for (n, (got, want)) in got.iter().zip(&want).enumerate() {
            assert!((got - want).abs() < 1e-6, "{n}: {got}, wanted {want} ({interleaved})");
        }
    }
}

#[test]
fn append_quantises_by_the_scale_of_each_sequence() {
    let Some(engine) = engine("append_quantises_by_the_scale_of_each_sequence") else {
        return;
    };
    let stream = engine.new_stream().expect("a stream");
    let value = ValueStorage::PrefixOfKey(DIM);
    let order = PageOrder::Nhd;
    let layout = CacheLayout::contiguous(DType::F8E4M3, order, SLOTS, HEADS, DIM, value);
    let layout = layout.expect("valid");
    let keys: Vec<bf16> =
        (0..2 * HEADS * DIM).map(|i| bf16::from_f32(i as f32 * 0.75 - 9.0)).collect();
    let scales = [0.5f32, 1.0, 2.0, 0.25, 4.0, 8.0];
    let k = DeviceBuffer::from_host(&stream, &keys).expect("memory");
    let slots = DeviceBuffer::from_host(&stream, &[1i64, 0]).expect("memory");
    let sequences = DeviceBuffer::from_host(&stream, &[2i32, 0]).expect("memory");
    let scale = DeviceBuffer::from_host(&stream, &scales).expect("memory");
    let mut buffer = DeviceBuffer::zeroed(&stream, SLOTS * HEADS * DIM).expect("memory");
    let shape = [1, SLOTS, HEADS, DIM];
    let mut cache = CacheMut {
        k_cache: DeviceTensorMut::contiguous("k_cache", &mut buffer, DType::F8E4M3, &shape)
            .expect("fits"),
        v_cache: None,
        stamp: layout.id(),
    };
    let mut append = AppendKv {
        k: DeviceTensor::contiguous("k", &k, DType::BF16, &[2, HEADS, DIM]).expect("fits"),
        v: None,
        slots: DeviceView::contiguous("slots", &slots, &[2]).expect("fits"),
        rotary: None,
        k_scale: Some(DeviceView::contiguous("k_scale", &scale, &[3, HEADS]).expect("fits")),
        v_scale: None,
        sequences: None,
    };
    let refused = engine.append_kv(&layout, &append, &mut cache, &stream);
    assert!(refused.expect_err("no sequences").to_string().starts_with("sequences"));
    append.sequences = Some(DeviceView::contiguous("sequences", &sequences, &[2]).expect("fits"));
    engine.append_kv(&layout, &append, &mut cache, &stream).expect("appended");
    let got = buffer.to_host::<F8E4M3>(&stream, 2 * HEADS * DIM).expect("a copy");
    for (token, (slot, sequence)) in [(1, 2), (0, 0)].into_iter().enumerate() {
        for head in 0..HEADS {
            for i in 0..DIM {
                let key = keys[(token * HEADS + head) * DIM + i].to_f32();
                let want = F8E4M3::from_f32(key / scales[sequence * HEADS + head]);
                let got = got[(slot * HEADS + head) * DIM + i];
                assert_eq!(got.to_f32(), want.to_f32(), "token {token}, head {head}, element {i}");
            }
        }
    }
}
