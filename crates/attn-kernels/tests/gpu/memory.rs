//! Buffers, tensor maps, events.

use attn_core::{DType, Strided};
use attn_kernels::Error;
use attn_kernels::cuda::{DeviceBuffer, DeviceMemory, DeviceMemoryMut, Swizzle, TensorMap};

use crate::engine;

#[test]
fn buffer_returns_what_it_was_given() {
    let Some(engine) = engine("buffer_returns_what_it_was_given") else {
        return;
    };
    let stream = engine.new_stream().expect("a stream");
    let data: Vec<u32> = (0..100_000).collect();
    let mut buffer = DeviceBuffer::from_host(&stream, &data).expect("memory");
    assert_eq!(buffer.to_host::<u32>(&stream, data.len()).expect("a copy"), data);
    buffer.copy_from_host(&stream, &[7u32, 8]).expect("a copy");
    assert_eq!(buffer.to_host::<u32>(&stream, 3).expect("a copy"), [7, 8, 2]);
    buffer.fill(&stream, 0xAB).expect("a fill");
    assert_eq!(buffer.to_host::<u8>(&stream, 400_000).expect("a copy"), vec![0xAB; 400_000]);
    assert!(buffer.to_host::<u32>(&stream, data.len() + 1).is_err());
    assert!(buffer.copy_from_host(&stream, &vec![0u8; 400_001]).is_err());
    let zeros = DeviceBuffer::zeroed(&stream, 12).expect("memory");
    assert_eq!(zeros.to_host::<f32>(&stream, 3).expect("a copy"), [0.0; 3]);
    let none = DeviceBuffer::from_host::<f32>(&stream, &[]).expect("nothing");
    assert_eq!(none.to_host::<f32>(&stream, 0).expect("nothing"), []);
}

#[test]
fn buffer_larger_than_the_device_is_an_error() {
    let Some(engine) = engine("buffer_larger_than_the_device_is_an_error") else {
        return;
    };
    let refused = engine.alloc(1 << 46).expect_err("64 TiB");
    assert!(
        matches!(refused, Error::DeviceMemory { needed, .. } if needed == 1 << 46),
        "{refused}"
    );
    engine.alloc(1 << 20).expect("memory after a failure");
}

#[test]
fn memory_splits_at_a_byte() {
    let Some(engine) = engine("memory_splits_at_a_byte") else {
        return;
    };
    let mut buffer = engine.alloc(100).expect("memory");
    let start = DeviceMemory::from(&buffer).address();
    let (a, b) = DeviceMemoryMut::from(&mut buffer).split_at(64).expect("inside");
    assert_eq!((a.shared().bytes(), b.shared().bytes()), (64, 36));
    assert_eq!(b.shared().address(), start + 64);
    assert!(DeviceMemoryMut::from(&mut buffer).split_at(101).is_none());
}

#[test]
fn event_times_work_between_two_points() {
    let Some(engine) = engine("event_times_work_between_two_points") else {
        return;
    };
    let stream = engine.new_stream().expect("a stream");
    let mut buffer = engine.alloc(1 << 26).expect("memory");
    let (start, end) = (engine.event().expect("an event"), engine.event().expect("an event"));
    assert!(start.elapsed_ms(&end).is_err(), "neither was recorded");
    start.record(&stream).expect("recorded");
    buffer.fill(&stream, 1).expect("a fill");
    end.record(&stream).expect("recorded");
    let ms = start.elapsed_ms(&end).expect("a time");
    assert!(ms > 0.0 && ms < 1000.0, "{ms} ms for 64 MiB");
}

#[test]
fn tensor_map_is_encoded_or_refused_as_a_value() {
    let Some(engine) = engine("tensor_map_is_encoded_or_refused_as_a_value") else {
        return;
    };
    if engine.caps().cuda.expect("a device").compute < (9, 0) {
        return;
    }
    let buffer = engine.alloc(2 * 128 * 64).expect("memory");
    let encode = |shape: &[usize], extents: &[u32], swizzle| {
        let tensor = Strided::contiguous("k", shape).expect("small");
        let memory = DeviceMemory::from(&buffer);
        TensorMap::tiled("k", memory, DType::BF16, &tensor, extents, swizzle).map(|_| ())
    };
    encode(&[128, 64], &[64, 64], Swizzle::Bytes128).expect("a valid map");
    encode(&[2, 64, 64], &[1, 64, 32], Swizzle::Bytes64).expect("a valid map");
    encode(&[16, 512], &[16, 8], Swizzle::None).expect("a valid map");
    assert!(encode(&[128, 64], &[64, 128], Swizzle::Bytes128).is_err(), "past the swizzle");
    assert!(encode(&[129, 64], &[64, 64], Swizzle::Bytes128).is_err(), "past the memory");
}
