//! Calls that must be refused before anything is launched.

use attn_core::{
    CacheLayout, DType, Engine, Family, KvStorage, PageOrder, Plan, Problem, ProblemSpec, Split,
    Strided, ValueStorage,
};
use attn_kernels::Error;
use attn_kernels::cuda::{
    DeviceBuffer, DeviceTensor, DeviceTensorMut, DeviceView, Inputs, KvTensors, Outputs, Workspace,
};

use crate::{engine, plan};

#[test]
fn forward_refuses_shapes_types_and_storage_by_name() {
    let Some(engine) = engine("forward_refuses_shapes_types_and_storage_by_name") else {
        return;
    };
    let stream = engine.new_stream().expect("a stream");
    let problem = Problem::new(ProblemSpec::new(DType::BF16, 2, 1, 64, &[4], &[9])).expect("valid");
    let plan = plan(&engine, "cuda_naive", &problem, Split::Whole);
    let buffer = DeviceBuffer::zeroed(&stream, 1 << 16).expect("memory");
    let run = |q: &[usize], dtype, kv: &[usize], o: &[usize]| {
        let mut out = engine.alloc(1 << 16).expect("memory");
        let inputs = Inputs::dense(
            DeviceTensor::contiguous("q", &buffer, dtype, q).expect("fits"),
            DeviceTensor::contiguous("k", &buffer, DType::BF16, kv).expect("fits"),
            DeviceTensor::contiguous("v", &buffer, DType::BF16, kv).expect("fits"),
        );
        let o = DeviceTensorMut::contiguous("o", &mut out, DType::BF16, o).expect("fits");
        let mut outputs = Outputs { o, lse: None };
        engine.forward(&plan, &inputs, &mut outputs, &mut Workspace::new(), &stream)
    };
    let (q, kv) = ([4, 2, 64], [9, 1, 64]);
    run(&q, DType::BF16, &kv, &q).expect("a run");
    for (field, refused) in [
        ("layout of q", run(&[5, 2, 64], DType::BF16, &kv, &q)),
        ("layout of q", run(&q, DType::F16, &kv, &q)),
        ("layout of k", run(&q, DType::BF16, &[8, 1, 64], &q)),
        ("layout of o", run(&q, DType::BF16, &kv, &[4, 2, 32])),
    ] {
        let refused = refused.expect_err(field).to_string();
        assert!(refused.contains(field), "{refused}");
    }
    let outside = DeviceTensor::contiguous("q", &buffer, DType::BF16, &[1 << 15, 2]);
    assert!(matches!(outside, Err(Error::Call(_))));
    let odd = Strided::new("q", &[4, 64], &[64, 1], 1).expect("same rank");
    assert!(DeviceTensor::new("q", &buffer, DType::BF16, odd.clone()).is_ok());
    let twice = Strided::new("o", &[4, 64], &[0, 1], 0).expect("same rank");
    let mut out = engine.alloc(1 << 10).expect("memory");
    assert!(DeviceTensorMut::new("o", &mut out, DType::BF16, twice).is_err());
}

#[test]
fn forward_refuses_plans_that_its_kernels_do_not_take() {
    let Some(engine) = engine("forward_refuses_plans_that_its_kernels_do_not_take") else {
        return;
    };
    let stream = engine.new_stream().expect("a stream");
    let of = |dtype, rows| {
        let spec = ProblemSpec::new(dtype, 1, 1, 64, &[rows], &[9]);
        Problem::new(spec).expect("valid")
    };
    let good = plan(&engine, "cuda_decode", &of(DType::BF16, 16), Split::Whole);
    let prepare = |plan: &Plan| engine.prepare(plan, &mut Workspace::new(), &stream);
    prepare(&good).expect("a plan that is taken");
    for bad in [
        Plan { problem: of(DType::BF16, 17), ..good.clone() },
        Plan { problem: of(DType::F32, 1), ..good.clone() },
        Plan { engine: Engine::Cpu, ..good.clone() },
        Plan { family: Family::Prefill, ..good.clone() },
        Plan { kernel: "nonsense", ..good.clone() },
    ] {
        let refused = prepare(&bad).expect_err("not taken");
        assert!(matches!(refused, Error::Plan { .. }), "{refused}");
    }
}

#[test]
fn tiled_kernels_refuse_rows_off_16_bytes_by_name() {
    let Some(engine) = engine("tiled_kernels_refuse_rows_off_16_bytes_by_name") else {
        return;
    };
    let stream = engine.new_stream().expect("a stream");
    let problem = Problem::new(ProblemSpec::new(DType::BF16, 1, 1, 64, &[4], &[4])).expect("valid");
    let plan = plan(&engine, "cuda_prefill", &problem, Split::Whole);
    let buffer = DeviceBuffer::zeroed(&stream, 1 << 12).expect("memory");
    let mut out = engine.alloc(1 << 12).expect("memory");
    let layout = Strided::new("k", &[4, 1, 64], &[68, 64, 1], 0).expect("same rank");
    let tensor = DeviceTensor::contiguous("q", &buffer, DType::BF16, &[4, 1, 64]).expect("fits");
    let k = DeviceTensor::new("k", &buffer, DType::BF16, layout).expect("fits");
    let inputs = Inputs::dense(tensor.clone(), k, tensor);
    let o = DeviceTensorMut::contiguous("o", &mut out, DType::BF16, &[4, 1, 64]).expect("fits");
    let mut outputs = Outputs { o, lse: None };
    let refused = engine.forward(&plan, &inputs, &mut outputs, &mut Workspace::new(), &stream);
    let refused = refused.expect_err("rows of 136 bytes").to_string();
    assert!(refused.contains("layout of k") && refused.contains("cuda_naive"), "{refused}");
}

#[test]
fn forward_refuses_a_cache_of_another_layout() {
    let Some(engine) = engine("forward_refuses_a_cache_of_another_layout") else {
        return;
    };
    let stream = engine.new_stream().expect("a stream");
    let layout = |order| {
        let value = ValueStorage::Separate(8);
        CacheLayout::contiguous(DType::F32, order, 2, 1, 8, value).expect("valid")
    };
    let mut spec = ProblemSpec::new(DType::F32, 1, 1, 8, &[1], &[3]);
    spec.kv = KvStorage::Paged(layout(PageOrder::Nhd));
    let problem = Problem::new(spec).expect("valid");
    let plan = plan(&engine, "cuda_naive", &problem, Split::Whole);
    let cache = DeviceBuffer::zeroed(&stream, 2 * 2 * 8 * 4).expect("memory");
    let run = |stamp, table: &[i32]| {
        let mut out = engine.alloc(8 * 4).expect("memory");
        let table = DeviceBuffer::from_host(&stream, table).expect("memory");
        let tensor = || DeviceTensor::contiguous("k_cache", &cache, DType::F32, &[2, 2, 1, 8]);
        let q = DeviceTensor::contiguous("q", &cache, DType::F32, &[1, 1, 8]).expect("fits");
        let kv = KvTensors::Paged {
            k_cache: tensor().expect("fits"),
            v_cache: tensor().expect("fits"),
            block_table: DeviceView::contiguous("block_table", &table, &[1, 2]).expect("fits"),
            stamp,
        };
        let o = DeviceTensorMut::contiguous("o", &mut out, DType::F32, &[1, 1, 8]).expect("fits");
        let mut outputs = Outputs { o, lse: None };
        let inputs = Inputs::new(q, kv);
        engine.forward(&plan, &inputs, &mut outputs, &mut Workspace::new(), &stream)?;
        out.to_host::<f32>(&stream, 8)
    };
    assert_eq!(run(layout(PageOrder::Nhd).id(), &[1, 0]).expect("a run"), [0.0; 8]);
    let refused = run(layout(PageOrder::Hnd).id(), &[1, 0]).expect_err("a foreign stamp");
    assert!(matches!(refused, Error::Call(attn_core::Error::CacheLayout { .. })), "{refused}");
    // A page id that the host cannot see is answered by the kernel, and not followed.
    let poisoned = run(layout(PageOrder::Nhd).id(), &[1, 7]).expect("a run");
    assert!(poisoned.iter().all(|x| x.is_nan()), "{poisoned:?}");
}

#[test]
fn empty_calls_launch_nothing_and_succeed() {
    let Some(engine) = engine("empty_calls_launch_nothing_and_succeed") else {
        return;
    };
    let stream = engine.new_stream().expect("a stream");
    let none = engine.alloc(0).expect("nothing");
    for (heads, q_lens, kv_lens) in [(2, &[][..], &[][..]), (2, &[0, 0], &[0, 0]), (0, &[3], &[0])]
    {
        let spec = ProblemSpec::new(DType::BF16, heads, 1, 64, q_lens, kv_lens);
        let problem = Problem::new(spec).expect("valid");
        let rows = problem.lengths().total_q();
        for kernel in ["cuda_naive", "cuda_prefill", "cuda_decode"] {
            let mut out = engine.alloc(0).expect("nothing");
            let tensor = |shape: &[usize]| {
                DeviceTensor::contiguous("x", &none, DType::BF16, shape).expect("empty")
            };
            let kv = tensor(&[0, 1, 64]);
            let inputs = Inputs::dense(tensor(&[rows, heads, 64]), kv.clone(), kv);
            let shape = [rows, heads, 64];
            let o = DeviceTensorMut::contiguous("o", &mut out, DType::BF16, &shape).expect("empty");
            let mut outputs = Outputs { o, lse: None };
            let mut workspace = Workspace::new();
            let plan = plan(&engine, kernel, &problem, Split::Whole);
            engine
                .forward(&plan, &inputs, &mut outputs, &mut workspace, &stream)
                .expect("nothing to do");
            assert_eq!(workspace.bytes(), 0);
        }
    }
}
