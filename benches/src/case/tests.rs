//! Cases as folders, through the verb: what is written, what is refused, what is left alone.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Value, json};

use super::{Args, BackendName, Error, run};

/// A folder that is removed with the test.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("attn-bench-case-{}-{n}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn with(case: &Value, tensors: &[Tensor]) -> Self {
        let folder = Self::new();
        fs::write(folder.0.join("case.json"), case.to_string()).unwrap();
        let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
            (*name, TensorView::new(*dtype, shape.clone(), bytes).unwrap())
        });
        safetensors::serialize_to_file(views, None, &folder.0.join("in.safetensors")).unwrap();
        folder
    }

    fn outputs(&self) -> Vec<u8> {
        fs::read(self.0.join("out.safetensors")).unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

type Tensor = (&'static str, Dtype, Vec<usize>, Vec<u8>);

fn f32s(name: &'static str, shape: &[usize], values: &[f32]) -> Tensor {
    (name, Dtype::F32, shape.to_vec(), bytemuck::cast_slice(values).to_vec())
}

fn i32s(name: &'static str, shape: &[usize], values: &[i32]) -> Tensor {
    (name, Dtype::I32, shape.to_vec(), bytemuck::cast_slice(values).to_vec())
}

fn values(file: &[u8], name: &str) -> Vec<f32> {
    let file = SafeTensors::deserialize(file).unwrap();
    let bytes = file.tensor(name).unwrap().data().chunks_exact(4);
    bytes.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}

fn result(dir: &Path) -> Value {
    serde_json::from_slice(&fs::read(dir.join("result.json")).unwrap()).unwrap()
}

fn answer_of(backend: BackendName, folder: &Folder) -> Value {
    run(&Args { backend, dirs: vec![folder.0.clone()] }).expect("not misuse");
    let result = result(&folder.0);
    assert_eq!(result["backend"], backend.name());
    result
}

fn answer(folder: &Folder) -> Value {
    answer_of(BackendName::Reference, folder)
}

#[track_caller]
fn assert_kind(result: &Value, kind: &str, part: &str) {
    assert_eq!(result["status"], "error", "{result}");
    assert_eq!(result["error"]["kind"], kind, "{result}");
    assert!(result["error"]["message"].as_str().unwrap().contains(part), "{result}");
}

/// One row over three keys with equal scores; values 1, 2 and 6.
fn mean() -> (Value, Vec<Tensor>) {
    let case = json!({
        "schema": 1, "id": "mean", "op": "forward", "dtype": "f32", "q_heads": 1, "kv_heads": 1,
        "head_dim": 1, "value_dim": 1, "q_lens": [1], "kv_lens": [3], "layout": "packed",
    });
    let tensors = vec![
        f32s("q", &[1, 1, 1], &[1.0]),
        f32s("k", &[3, 1, 1], &[0.0; 3]),
        f32s("v", &[3, 1, 1], &[1.0, 2.0, 6.0]),
    ];
    (case, tensors)
}

#[test]
fn forward_writes_output_and_lse() {
    let (case, tensors) = mean();
    for backend in [BackendName::Reference, BackendName::Cpu] {
        let folder = Folder::with(&case, &tensors);
        let result = answer_of(backend, &folder);
        assert_eq!(result["status"], "ok", "{result}");
        assert!(result["kernel"].is_string() && result["plan"].is_string());
        let file = folder.outputs();
        assert!((values(&file, "o")[0] - 3.0).abs() < 1e-5);
        assert!((values(&file, "lse")[0] - 3f32.ln()).abs() < 1e-5);
    }
}

#[test]
fn verb_refuses_what_is_not_a_case() {
    let (case, tensors) = mean();
    let good = Folder::with(&case, &tensors);
    for text in [None, Some("{"), Some("[]"), Some("{}"), Some(r#"{"schema": 2, "op": "forward"}"#)]
    {
        let bad = Folder::new();
        if let Some(text) = text {
            fs::write(bad.0.join("case.json"), text).unwrap();
        }
        let dirs = vec![good.0.clone(), bad.0.clone()];
        let error = run(&Args { backend: BackendName::Reference, dirs }).expect_err("misuse");
        assert!(matches!(error, Error::Misuse { .. }), "{error}");
        assert!(!good.0.join("result.json").exists(), "nothing runs after misuse");
    }
}

#[test]
fn case_refuses_unknown_fields_and_ops() {
    let (mut case, tensors) = mean();
    case["windw_left"] = json!(3);
    assert_kind(&answer(&Folder::with(&case, &tensors)), "invalid_argument", "windw_left");
    let (mut case, tensors) = mean();
    case["options"] = json!({"num_split": 3});
    assert_kind(&answer(&Folder::with(&case, &tensors)), "invalid_argument", "num_split");
    let (mut case, tensors) = mean();
    case["op"] = json!("forwards");
    assert_kind(&answer(&Folder::with(&case, &tensors)), "invalid_argument", "forwards");
}

#[test]
fn case_refuses_bad_counts_by_name() {
    for (field, value, part) in [
        ("q_lens", json!([-1]), "q_lens[0]"),
        ("q_heads", json!(-4), "q_heads"),
        ("head_dim", json!(0), "head_dim"),
        ("window_left", json!(-2), "window_left"),
        ("kv_heads", json!(0), "kv_heads"),
        ("kv_lens", json!([1, 2]), "kv_lens"),
        ("scale", json!(1e300), "scale"),
        ("softcap", json!(-1.0), "softcap"),
        ("options", json!({"num_splits": 0}), "num_splits"),
    ] {
        let (mut case, tensors) = mean();
        case[field] = value;
        assert_kind(&answer(&Folder::with(&case, &tensors)), "invalid_argument", part);
    }
}

#[test]
fn case_refuses_tensors_that_do_not_fit() {
    let (case, mut tensors) = mean();
    tensors[0] = f32s("q", &[2, 1, 1], &[1.0, 1.0]);
    assert_kind(&answer(&Folder::with(&case, &tensors)), "invalid_argument", "layout of q");
    let (case, mut tensors) = mean();
    tensors[1] = f32s("k", &[2, 1, 1], &[0.0; 2]);
    assert_kind(&answer(&Folder::with(&case, &tensors)), "layout_mismatch", "layout of k");
    let (case, mut tensors) = mean();
    tensors[2] = i32s("v", &[3, 1, 1], &[0; 3]);
    assert_kind(&answer(&Folder::with(&case, &tensors)), "layout_mismatch", "v: expected F32");
    let (case, mut tensors) = mean();
    tensors.pop();
    assert_kind(
        &answer(&Folder::with(&case, &tensors)),
        "invalid_argument",
        "v: expected the tensor",
    );
}

#[test]
fn case_refuses_what_it_does_not_use() {
    let (case, mut tensors) = mean();
    tensors.push(f32s("bias", &[1, 3], &[0.0; 3]));
    assert_kind(&answer(&Folder::with(&case, &tensors)), "invalid_argument", "got bias");
    for (place, value) in [("offsets", json!({"q": 1})), ("shapes", json!({"q": [1, 1, 1]}))] {
        let (mut case, tensors) = mean();
        case[place] = value;
        assert_kind(
            &answer(&Folder::with(&case, &tensors)),
            "invalid_argument",
            "q: expected strides",
        );
    }
    let (mut case, tensors) = mean();
    case["keep"] = json!({"dq": [0]});
    assert_kind(&answer(&Folder::with(&case, &tensors)), "invalid_argument", "got dq");
    let (mut case, tensors) = mean();
    case["want"] = json!(["dsinks"]);
    assert_kind(&answer(&Folder::with(&case, &tensors)), "invalid_argument", "want");
}

#[test]
fn case_removes_results_of_an_earlier_run() {
    let (case, tensors) = mean();
    let folder = Folder::with(&case, &tensors);
    assert_eq!(answer(&folder)["status"], "ok");
    fs::remove_file(folder.0.join("in.safetensors")).unwrap();
    assert_kind(&answer(&folder), "invalid_argument", "in.safetensors");
    assert!(!folder.0.join("out.safetensors").exists());
}

#[test]
fn strided_output_keeps_what_lies_between() {
    let (mut case, mut tensors) = mean();
    case["strides"] = json!({"o": [4, 2, 1], "v": [0, 1, 1]});
    case["shapes"] = json!({"o": [1, 1, 1], "v": [3, 1, 1]});
    case["offsets"] = json!({"o": 2, "v": 1});
    tensors[2] = f32s("v", &[3], &[f32::NAN, 5.0, f32::NAN]);
    tensors.push(f32s("o", &[4], &[7.0, 8.0, 9.0, 10.0]));
    let folder = Folder::with(&case, &tensors);
    assert_eq!(answer(&folder)["status"], "ok");
    assert_eq!(values(&folder.outputs(), "o"), [7.0, 8.0, 5.0, 10.0]);
}

#[test]
fn strided_tensor_is_refused_outside_its_storage() {
    let (mut case, mut tensors) = mean();
    case["strides"] = json!({"v": [2, 1, 1]});
    case["shapes"] = json!({"v": [3, 1, 1]});
    tensors[2] = f32s("v", &[4], &[0.0; 4]);
    assert_kind(&answer(&Folder::with(&case, &tensors)), "invalid_argument", "within storage of 4");
}

#[test]
fn strided_output_is_refused_where_it_overlaps() {
    let (mut case, mut tensors) = mean();
    case["q_lens"] = json!([2]);
    case["strides"] = json!({"o": [0, 1, 1]});
    case["shapes"] = json!({"o": [2, 1, 1]});
    tensors[0] = f32s("q", &[2, 1, 1], &[1.0; 2]);
    tensors.push(f32s("o", &[1], &[0.0]));
    assert_kind(&answer(&Folder::with(&case, &tensors)), "layout_mismatch", "overlap");
}

#[test]
fn filled_tensors_and_kept_rows_meet() {
    // 5 rows and 4 keys; all values are 2 but those of key 1, which are 6. Causal: row i sees keys up to i - 1.
    let case = json!({
        "schema": 1, "id": "fill", "op": "forward", "dtype": "f32", "q_heads": 1, "kv_heads": 1,
        "head_dim": 2, "value_dim": 1, "q_lens": [5], "kv_lens": [4], "layout": "packed",
        "causal": true,
        "fill": {
            "q": {"shape": [5, 1, 2], "value": 0.0},
            "k": {"shape": [4, 1, 2], "value": 1.0},
            "v": {"shape": [4, 1, 1], "value": 2.0, "rows": [1]},
        },
        "keep": {"o": [4, 0, 1], "lse": []},
    });
    let folder = Folder::with(&case, &[f32s("v", &[1, 1, 1], &[6.0])]);
    let result = answer(&folder);
    assert_eq!(result["status"], "ok", "{result}");
    let file = folder.outputs();
    assert_eq!(values(&file, "o"), [3.0, 0.0, 2.0]);
    assert_eq!(SafeTensors::deserialize(&file).unwrap().tensor("lse").unwrap().shape(), [0, 1]);
}

#[test]
fn fill_and_keep_refuse_rows_out_of_range() {
    let (mut case, tensors) = mean();
    case["keep"] = json!({"o": [1]});
    assert_kind(&answer(&Folder::with(&case, &tensors)), "invalid_argument", "keep.o");
    let (mut case, tensors) = mean();
    case["fill"] = json!({"v": {"shape": [2, 1, 1], "value": 0.0, "rows": [0, 1, 2]}});
    assert_kind(&answer(&Folder::with(&case, &tensors)), "invalid_argument", "fill.v.rows");
}

#[test]
fn huge_fill_is_an_error_value() {
    let (mut case, tensors) = mean();
    let huge = i64::MAX / 16;
    case["fill"] = json!({"v": {"shape": [huge, 1, 1], "value": 0.0, "rows": [0, 1, 2]}});
    assert_kind(&answer(&Folder::with(&case, &tensors)), "out_of_memory", "v");
}

#[test]
fn paged_forward_reads_through_the_table() {
    for (order, shape) in [("nhd", [3, 2, 1, 1]), ("hnd", [3, 1, 2, 1])] {
        let (mut case, _) = mean();
        case["kv_cache"] = json!({"page_size": 2, "order": order, "dtype": "same"});
        let nan = f32::NAN;
        let tensors = [
            f32s("q", &[1, 1, 1], &[1.0]),
            f32s("k_cache", &shape, &[0.0, nan, nan, nan, 0.0, 0.0]),
            f32s("v_cache", &shape, &[6.0, nan, nan, nan, 1.0, 2.0]),
            i32s("block_table", &[1, 3], &[2, 0, -1]),
        ];
        let folder = Folder::with(&case, &tensors);
        assert_eq!(answer(&folder)["status"], "ok");
        assert_eq!(values(&folder.outputs(), "o"), [3.0]);

        let mut tensors = tensors;
        tensors[3] = i32s("block_table", &[1, 3], &[2, 3, -1]);
        assert_kind(
            &answer(&Folder::with(&case, &tensors)),
            "invalid_argument",
            "page ids below 3",
        );
    }
}

#[test]
fn backward_writes_every_gradient() {
    let (mut case, mut tensors) = mean();
    case["op"] = json!("backward");
    case["has"] = json!({"bias": true, "sinks": true});
    case["want"] = json!(["dsinks", "dbias"]);
    tensors.push(f32s("do", &[1, 1, 1], &[1.0]));
    tensors.push(f32s("bias", &[1, 3], &[0.0; 3]));
    tensors.push(f32s("sinks", &[1], &[0.0]));
    for backend in [BackendName::Reference, BackendName::Cpu] {
        let folder = Folder::with(&case, &tensors);
        let result = answer_of(backend, &folder);
        assert_eq!(result["status"], "ok", "{result}");
        let file = folder.outputs();
        // Four equal weights of 1/4, one of them the sink's; o = 9/4.
        for dv in values(&file, "dv") {
            assert!((dv - 0.25).abs() < 1e-6);
        }
        assert!((values(&file, "dsinks")[0] + 9.0 / 16.0).abs() < 1e-6);
        let dbias: f32 = values(&file, "dbias").iter().sum();
        assert!((dbias - 9.0 / 16.0).abs() < 1e-6);
        assert_eq!((values(&file, "dq").len(), values(&file, "dk").len()), (1, 3));
    }
}

#[test]
fn disabled_kernels_are_not_used() {
    let (mut case, tensors) = mean();
    case["options"] = json!({"disable_kernels": ["reference_naive", "cpu_decode", "cpu_prefill"]});
    for backend in [BackendName::Reference, BackendName::Cpu] {
        let result = answer_of(backend, &Folder::with(&case, &tensors));
        assert_kind(&result, "unsupported", "");
    }
}

#[test]
fn merge_takes_an_empty_state_as_neutral() {
    let case = json!({
        "schema": 1, "id": "m", "op": "merge", "dtype": "f32", "q_heads": 1, "value_dim": 2, "q_lens": [2],
    });
    let tensors = [
        f32s("o_a", &[2, 1, 2], &[0.0, 0.0, 1.0, 1.0]),
        f32s("lse_a", &[2, 1], &[f32::NEG_INFINITY, 0.0]),
        f32s("o_b", &[2, 1, 2], &[3.0, 4.0, 3.0, 5.0]),
        f32s("lse_b", &[2, 1], &[1.5, 0.0]),
    ];
    for backend in [BackendName::Reference, BackendName::Cpu] {
        let folder = Folder::with(&case, &tensors);
        let result = answer_of(backend, &folder);
        assert_eq!(result["status"], "ok", "{result}");
        let file = folder.outputs();
        let close = |got: Vec<f32>, want: &[f32]| {
            assert!(got.iter().zip(want).all(|(a, b)| (a - b).abs() < 1e-6), "{got:?}");
        };
        close(values(&file, "o"), &[3.0, 4.0, 2.0, 3.0]);
        close(values(&file, "lse"), &[1.5, 2f32.ln()]);
    }
    let mut wrong = tensors;
    wrong[1] = f32s("lse_a", &[1, 2], &[0.0; 2]);
    assert_kind(&answer(&Folder::with(&case, &wrong)), "invalid_argument", "lse_a: expected shape");
}

#[test]
fn cuda_computes_or_says_what_it_tried() {
    let (case, tensors) = mean();
    let folder = Folder::with(&case, &tensors);
    let result = answer_of(BackendName::Cuda, &folder);
    if result["status"] == "ok" {
        assert_eq!(result["kernel"], "cuda_naive", "f32 is the naive kernel's alone");
        assert_eq!(values(&folder.outputs(), "o"), [3.0]);
    } else {
        assert_kind(&result, "device", "tried");
    }
}

#[test]
fn select_answers_alike_for_every_backend() {
    let case = json!({
        "schema": 1, "id": "s", "op": "select", "dtype": "bf16", "q_heads": 8, "kv_heads": 2,
        "head_dim": 128, "value_dim": 128, "q_lens": [1], "kv_lens": [4096], "layout": "packed",
        "pass": "decode",
        "device": {
            "name": "made up", "compute": [8, 6], "smem_per_block": 101_376, "sm_count": 48,
            "memory_bytes": 1_000_000_000,
        },
    });
    let results = [BackendName::Reference, BackendName::Cpu, BackendName::Cuda].map(|backend| {
        let mut result = answer_of(backend, &Folder::with(&case, &[]));
        result["backend"] = Value::Null;
        result
    });
    assert_eq!(results[0]["kernel"], "cuda_decode");
    let smem = results[0]["smem_bytes"].as_u64().unwrap();
    assert!(smem > 0 && smem <= 101_376, "{smem}");
    assert!(results[0]["workspace_bytes"].as_u64().unwrap() > 0);
    assert!(results.iter().all(|result| *result == results[0]));
}

#[test]
fn paged_ops_observe_each_step() {
    let case = json!({
        "schema": 1, "id": "p", "op": "paged_ops", "num_blocks": 4, "block_size": 2,
        "prefix_cache": true, "table_width": 3,
        "ops": [
            {"op": "alloc", "seq": "a", "tokens": [1, 2, 3]},
            {"op": "fork", "seq": "a", "dst": "b"},
            {"op": "append", "seq": "b", "tokens": [4]},
            {"op": "append", "seq": "b", "tokens": [5, 6, 7]},
            {"op": "commit", "seq": "a", "n": 2},
            {"op": "match", "tokens": [1, 2, 9]},
            {"op": "match", "tokens": [1, 2, 9], "ns": {"adapter": "x"}},
            {"op": "can_alloc", "tokens": [1, 2, 3, 4, 5, 6]},
            {"op": "alloc", "seq": "a", "tokens": []},
            {"op": "truncate", "seq": "a", "n": -1},
            {"op": "free", "seq": "c"},
            {"op": "free", "seq": "b"},
        ],
    });
    let result = answer(&Folder::with(&case, &[]));
    assert_eq!(result["status"], "ok", "{result}");
    let steps = result["observations"].as_array().unwrap();
    let of = |n: usize, field: &str| steps[n][field].clone();
    assert_eq!(of(0, "hit"), 0);
    assert_eq!(of(0, "seqs")["a"]["row"].as_array().unwrap()[2], -1);
    assert_eq!(of(1, "seqs")["b"]["refs"], json!([2, 2]));
    assert_eq!(of(2, "copies").as_array().unwrap().len(), 1);
    assert_eq!(of(3, "error"), "invalid_argument"); // four blocks in a table of three
    assert_eq!((of(5, "hit"), of(6, "hit")), (json!(2), json!(0)));
    assert_eq!(of(7, "can"), json!(false));
    assert_eq!(of(8, "error"), "already_exists");
    assert_eq!(of(9, "error"), "invalid_argument");
    assert_eq!(of(10, "error"), "not_found");
    assert_eq!((of(11, "ok"), of(11, "free")), (json!(true), json!(2)));
}

#[test]
fn paged_ops_refuse_a_pool_that_cannot_be() {
    for (blocks, size) in [(-1, 4), (4, 0), (1i64 << 40, 4)] {
        let case = json!({
            "schema": 1, "id": "p", "op": "paged_ops", "num_blocks": blocks, "block_size": size, "ops": [],
        });
        assert_kind(&answer(&Folder::with(&case, &[])), "invalid_argument", "block");
    }
}

#[test]
fn case_refuses_lengths_past_its_tensors_before_allocating() {
    let (mut case, tensors) = mean();
    case["q_lens"] = json!([1i64 << 40]);
    assert_kind(&answer(&Folder::with(&case, &tensors)), "invalid_argument", "layout of q");
}
