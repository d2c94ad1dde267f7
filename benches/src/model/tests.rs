//! The whole model against recorded tokens, with an attention too simple to be wrong.
//!
//! These tests need the model file: `ATTN_MODEL`, or the cache that a first run of the demo fills.
//! Without it they say so on one line and pass.

use std::convert::Infallible;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Instant;

use safetensors::SafeTensors;

use super::*;
use crate::download::{ModelStore, SMOLLM2};

const RECORD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/data/smollm2_qkv.safetensors");
const PROMPT: &str = "The lighthouse keeper climbed the stairs every evening to light the lamp. \
                      One night the storm was so strong that";

/// Causal attention of one sequence, one row at a time, over everything appended so far.
struct Naive {
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    /// For each layer, keys and values of all tokens.
    cache: Vec<(Vec<f32>, Vec<f32>)>,
    /// For each layer, the queries and outputs of all tokens.
    seen: Vec<(Vec<f32>, Vec<f32>)>,
}

impl Naive {
    fn new(llama: &Llama) -> Self {
        let config = llama.config();
        Self {
            q_heads: config.q_heads,
            kv_heads: config.kv_heads,
            head_dim: config.head_dim,
            cache: vec![Default::default(); config.layers],
            seen: vec![Default::default(); config.layers],
        }
    }
}

impl Attention for Naive {
    type Error = Infallible;

    fn attend(
        &mut self,
        layer: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        o: &mut [f32],
    ) -> Result<(), Infallible> {
        let d = self.head_dim;
        let (q_row, kv_row) = (self.q_heads * d, self.kv_heads * d);
        let (keys, values) = &mut self.cache[layer];
        let past = keys.len() / kv_row;
        keys.extend_from_slice(k);
        values.extend_from_slice(v);
        for (token, (q, o)) in q.chunks_exact(q_row).zip(o.chunks_exact_mut(q_row)).enumerate() {
            for (head, (q, o)) in q.chunks_exact(d).zip(o.chunks_exact_mut(d)).enumerate() {
                let at = |j: usize| j * kv_row + head / (self.q_heads / self.kv_heads) * d;
                let score = |j: usize| {
                    let dot: f32 = q.iter().zip(&keys[at(j)..][..d]).map(|(a, b)| a * b).sum();
                    dot / f32::from(u16::try_from(d).unwrap()).sqrt()
                };
                let scores: Vec<f32> = (0..=past + token).map(score).collect();
                let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                let weights: Vec<f32> = scores.iter().map(|s| (s - max).exp()).collect();
                let sum: f32 = weights.iter().sum();
                o.fill(0.0);
                for (j, weight) in weights.iter().enumerate() {
                    for (o, v) in o.iter_mut().zip(&values[at(j)..][..d]) {
                        *o += weight / sum * v;
                    }
                }
            }
        }
        self.seen[layer].0.extend_from_slice(q);
        self.seen[layer].1.extend_from_slice(o);
        Ok(())
    }
}

fn model() -> Option<&'static (Llama, Tokenizer)> {
    static MODEL: OnceLock<Option<(Llama, Tokenizer)>> = OnceLock::new();
    let load = || {
        let path = match env::var_os("ATTN_MODEL") {
            Some(path) => PathBuf::from(path),
            None => ModelStore::from_environment(SMOLLM2).cached().ok()?,
        };
        Some(load(&path).unwrap())
    };
    let model = MODEL.get_or_init(load).as_ref();
    if model.is_none() {
        println!("skipped: no {} in the cache and ATTN_MODEL is not set", SMOLLM2.file_name);
    }
    model
}

/// The four-byte elements of a recorded tensor.
fn recorded(name: &str) -> impl Iterator<Item = [u8; 4]> + use<> {
    let file = fs::read(Path::new(RECORD)).unwrap();
    let tensors = SafeTensors::deserialize(&file).unwrap();
    let data = tensors.tensor(name).unwrap().data().to_vec();
    (0..data.len() / 4).map(move |i| data[4 * i..][..4].try_into().unwrap())
}

fn recorded_tokens(name: &str) -> Vec<u32> {
    recorded(name).map(u32::from_le_bytes).collect()
}

fn recorded_floats(name: &str) -> Vec<f32> {
    recorded(name).map(f32::from_le_bytes).collect()
}

fn positions(range: std::ops::Range<usize>) -> Vec<u32> {
    range.map(|p| u32::try_from(p).unwrap()).collect()
}

/// Greedy continuation of one prompt.
fn greedy(llama: &Llama, prompt: &[u32], count: usize) -> Vec<u32> {
    let (mut attention, mut scratch) = (Naive::new(llama), Scratch::default());
    let mut input = prompt.to_vec();
    let (mut output, mut past) = (Vec::new(), 0);
    let start = Instant::now();
    for _ in 0..count {
        let at = positions(past..past + input.len());
        let logits = llama.forward(&input, &at, &[input.len() - 1], &mut attention, &mut scratch);
        let token = u32::try_from(argmax(logits.unwrap()).unwrap()).unwrap();
        past += input.len();
        input = vec![token];
        output.push(token);
        if output.len() == 1 {
            println!(
                "prompt: {past} tokens in {:.3?}, {:?}",
                start.elapsed(),
                scratch.take_account()
            );
        }
    }
    println!("all {count} tokens in {:.3?}, {:?}", start.elapsed(), scratch.take_account());
    output
}

#[test]
fn llama_reproduces_recorded_greedy_tokens() {
    let Some((llama, tokenizer)) = model() else { return };
    let tokens = recorded_tokens("tokens");
    let expected = recorded_tokens("greedy_tokens");
    let prompt = tokenizer.encode(PROMPT).unwrap();
    assert_eq!(prompt, tokens[..21]);
    let got = greedy(llama, &prompt, 40);
    assert_eq!(got, expected, "{}", tokenizer.decode(&got));
    assert!(tokenizer.decode(&got).starts_with(" the keeper had to climb the stairs"));
}

#[test]
fn llama_matches_recorded_layers_and_logits() {
    let Some((llama, _)) = model() else { return };
    let tokens = recorded_tokens("tokens");
    let (mut attention, mut scratch) = (Naive::new(llama), Scratch::default());
    let last = tokens.len() - 1;
    let at = positions(0..tokens.len());
    let logits = llama.forward(&tokens, &at, &[last], &mut attention, &mut scratch).unwrap();
    let mut top = logits.to_vec();
    top.sort_by(|a, b| b.total_cmp(a));
    for (got, expected) in top.iter().zip(recorded_floats("last_logits_top")) {
        assert!((got - expected).abs() < 2e-3, "logit {got}, recorded {expected}");
    }
    for layer in [0, 1, 10, 20, 29] {
        let (q, o) = &attention.seen[layer];
        let (k, v) = &attention.cache[layer];
        for (name, got, heads) in [("q", q, 9), ("k", k, 3), ("v", v, 3), ("o", o, 9)] {
            // The record is head-major, [heads, tokens, 64].
            let recorded = recorded_floats(&format!("layer{layer}.{name}"));
            let largest = recorded.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            for (i, expected) in recorded.iter().enumerate() {
                let (head, token, dim) = (i / 64 / tokens.len(), i / 64 % tokens.len(), i % 64);
                let got = got[(token * heads + head) * 64 + dim];
                assert!(
                    (got - expected).abs() <= 1e-4 * largest,
                    "layer {layer} {name}[{head}, {token}, {dim}]: {got}, recorded {expected}"
                );
            }
        }
    }
}

#[test]
fn llama_returns_wanted_rows_in_order_and_again() {
    let Some((llama, _)) = model() else { return };
    let tokens = [504, 33059, 40061];
    let run = |rows: &[usize]| {
        let (mut attention, mut scratch) = (Naive::new(llama), Scratch::default());
        let logits = llama.forward(&tokens, &[0, 1, 2], rows, &mut attention, &mut scratch);
        logits.unwrap().to_vec()
    };
    let vocab = llama.config().vocab;
    let all = run(&[0, 1, 2]);
    let some = run(&[2, 0, 2, 2, 1]);
    for (row, wanted) in some.chunks_exact(vocab).zip([2, 0, 2, 2, 1]) {
        let expected = &all[wanted * vocab..][..vocab];
        assert!(row.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-3), "row {wanted}");
    }
    assert_eq!(run(&[]), [0.0; 0]);
}

#[test]
fn llama_refuses_bad_calls() {
    let Some((llama, _)) = model() else { return };
    let (mut attention, mut scratch) = (Naive::new(llama), Scratch::default());
    let mut refused = |tokens: &[u32], positions: &[u32], rows: &[usize]| {
        llama.forward(tokens, positions, rows, &mut attention, &mut scratch).unwrap_err()
    };
    assert!(matches!(
        refused(&[1, 2], &[0], &[]),
        ForwardError::Positions { tokens: 2, positions: 1 }
    ));
    assert!(matches!(refused(&[49152], &[0], &[]), ForwardError::Token { row: 0, got: 49152, .. }));
    assert!(matches!(refused(&[1], &[8192], &[]), ForwardError::Position { context: 8192, .. }));
    assert!(matches!(refused(&[1], &[0], &[1]), ForwardError::Row { tokens: 1, got: 1 }));
    assert!(attention.cache[0].0.is_empty(), "a refused call reaches no cache");
    let logits = llama.forward(&[], &[], &[], &mut attention, &mut scratch).unwrap();
    assert_eq!(logits, [0.0; 0]);
}

#[test]
fn tokenizer_round_trips_with_the_real_vocabulary() {
    let Some((_, tokenizer)) = model() else { return };
    for text in
        ["2024 tokens, 3.14159", "naïve — 日本語 ñ", "fn main() {\n\tlet x = 1;\n}\n", "   "]
    {
        let tokens = tokenizer.encode(text).unwrap();
        assert_eq!(tokenizer.decode(&tokens), text);
    }
    let digits = tokenizer.encode("2024").unwrap();
    assert_eq!(digits.len(), 4, "every digit is a token of its own");
    let turn = tokenizer.encode("<|im_start|>user\nhi<|im_end|>").unwrap();
    assert_eq!((turn[0], turn.last()), (1, Some(&2)));
    assert!(tokenizer.is_end(2) && tokenizer.is_end(0) && !tokenizer.is_end(1));
}
