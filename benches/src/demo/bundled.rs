//! The serving loop on recorded queries, keys and values, for machines without the model.
//!
//! The invariant: the recorded rows go through the same allocator, pages, selector and engine as a
//! model's would; only the projections are missing. Outputs are compared with the recorded f64
//! outputs too, which no code of this workspace has made.

use std::io::Write;

use safetensors::SafeTensors;

use super::DemoError;
use super::serving::{Backend, Serving, Shape};
use crate::model::Attention as _;

/// Recorded tensors of five layers; `benches/data/` says where they come from.
const TENSORS: &[u8] = include_bytes!("../../data/smollm2_qkv.safetensors");
const LAYERS: [usize; 5] = [0, 1, 10, 20, 29];

/// One recorded layer, token-major.
#[derive(Debug)]
pub(crate) struct Layer {
    pub(crate) q: Vec<f32>,
    pub(crate) k: Vec<f32>,
    pub(crate) v: Vec<f32>,
    pub(crate) o: Vec<f32>,
    /// `[tokens, q_heads]`.
    #[cfg(test)]
    pub(crate) lse: Vec<f32>,
}

/// All recorded layers.
#[derive(Debug)]
pub(crate) struct Recording {
    pub(crate) layers: Vec<Layer>,
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt_len: usize,
    pub(crate) shape: Shape,
}

impl Recording {
    /// Reads the bundled tensors.
    pub(crate) fn load() -> Result<Self, DemoError> {
        let file = SafeTensors::deserialize(TENSORS)
            .map_err(|error| DemoError::Bundled(error.to_string()))?;
        let shape = Shape { layers: LAYERS.len(), q_heads: 9, kv_heads: 3, head_dim: 64 };
        let tokens = integers(&file, "tokens")?;
        let n = tokens.len();
        let layers = LAYERS
            .iter()
            .map(|layer| {
                let take = |name: &str, heads: usize, dim: usize| {
                    let data = floats(&file, &format!("layer{layer}.{name}"))?;
                    token_major(&data, heads, n, dim)
                };
                let (q_heads, kv_heads, dim) = (shape.q_heads, shape.kv_heads, shape.head_dim);
                Ok(Layer {
                    q: take("q", q_heads, dim)?,
                    k: take("k", kv_heads, dim)?,
                    v: take("v", kv_heads, dim)?,
                    o: take("o", q_heads, dim)?,
                    #[cfg(test)]
                    lse: take("lse", q_heads, 1)?,
                })
            })
            .collect::<Result<_, DemoError>>()?;
        let prompt_len = integers(&file, "prompt_len")?.first().copied().unwrap_or(0) as usize;
        Ok(Self { layers, tokens, prompt_len, shape })
    }

    /// The recorded greedy continuation.
    #[cfg(test)]
    pub(crate) fn greedy(&self) -> &[u32] {
        &self.tokens[self.prompt_len..]
    }
}

/// Prefills the recorded prompt, then decodes the recorded tokens one by one.
pub(crate) fn run(backend: Backend, out: &mut impl Write) -> Result<(), DemoError> {
    let recording = Recording::load()?;
    let mut serving =
        Serving::new(recording.shape, recording.tokens.len() + super::serving::PAGE_SIZE, backend)?;
    let worst = replay(&recording, &mut serving)?;
    write!(out, "{}", serving.ledger().table())?;
    writeln!(out, "\nworst |o - recorded f64 output| over all rows and layers: {worst:.1e}")?;
    Ok(())
}

/// The loop itself; returns the worst distance from the recorded outputs.
pub(crate) fn replay(recording: &Recording, serving: &mut Serving) -> Result<f64, DemoError> {
    let Recording { tokens, prompt_len, .. } = recording;
    let (seq, _) = serving.admit(&tokens[..*prompt_len])?;
    serving.begin("prefill", &[(seq, 0)], true)?;
    let mut worst = attend(recording, serving, 0..*prompt_len)?;
    serving.commit(seq)?;
    serving.end_phase("prefill");
    for (at, &token) in tokens.iter().enumerate().skip(*prompt_len) {
        serving.append(seq, token)?;
        serving.begin("decode", &[(seq, at)], true)?;
        worst = worst.max(attend(recording, serving, at..at + 1)?);
        serving.commit(seq)?;
    }
    serving.end_phase("decode");
    Ok(worst)
}

fn attend(
    recording: &Recording,
    serving: &mut Serving,
    rows: std::ops::Range<usize>,
) -> Result<f64, DemoError> {
    let Shape { q_heads, kv_heads, head_dim, .. } = recording.shape;
    let (q_row, kv_row) = (q_heads * head_dim, kv_heads * head_dim);
    let (q, kv) = (rows.start * q_row..rows.end * q_row, rows.start * kv_row..rows.end * kv_row);
    let mut o = vec![f32::NAN; q.len()];
    let mut worst = 0f64;
    for (n, layer) in recording.layers.iter().enumerate() {
        let (k, v) = (&layer.k[kv.clone()], &layer.v[kv.clone()]);
        serving.attend(n, &layer.q[q.clone()], k, v, &mut o)?;
        for (&got, &want) in o.iter().zip(&layer.o[q.clone()]) {
            let error = (f64::from(got) - f64::from(want)).abs();
            worst = worst.max(if error.is_nan() { f64::INFINITY } else { error });
        }
    }
    Ok(worst)
}

/// `[heads, tokens, dim]` as stored to `[tokens, heads, dim]` as a model's projections leave it.
fn token_major(
    data: &[f32],
    heads: usize,
    tokens: usize,
    dim: usize,
) -> Result<Vec<f32>, DemoError> {
    if data.len() != heads * tokens * dim {
        let expected = heads * tokens * dim;
        return Err(DemoError::Bundled(format!(
            "expected {expected} elements, got {}",
            data.len()
        )));
    }
    let mut out = Vec::with_capacity(data.len());
    for token in 0..tokens {
        for head in 0..heads {
            let at = (head * tokens + token) * dim;
            out.extend_from_slice(&data[at..at + dim]);
        }
    }
    Ok(out)
}

fn bytes<'f>(file: &'f SafeTensors<'_>, name: &str) -> Result<&'f [u8], DemoError> {
    let tensor = file.tensor(name).map_err(|error| DemoError::Bundled(error.to_string()))?;
    Ok(tensor.data())
}

fn floats(file: &SafeTensors<'_>, name: &str) -> Result<Vec<f32>, DemoError> {
    let (words, _) = bytes(file, name)?.as_chunks::<4>();
    Ok(words.iter().map(|&word| f32::from_le_bytes(word)).collect())
}

fn integers(file: &SafeTensors<'_>, name: &str) -> Result<Vec<u32>, DemoError> {
    let (words, _) = bytes(file, name)?.as_chunks::<4>();
    Ok(words.iter().map(|&word| u32::from_le_bytes(word)).collect())
}
