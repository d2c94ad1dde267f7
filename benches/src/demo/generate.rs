//! Greedy generation for a batch of prompts.
//!
//! The invariant: every sequence computes the same attention as it would alone, though not to the bit: the
//! kernel may depend on the batch. The first prompt is
//! prefilled and committed before the others are admitted, so that a shared prefix is computed once and
//! found by the rest; from then on all sequences step together.

use std::time::{Duration, Instant};

use attn_paged::SeqId;

use super::DemoError;
use super::serving::Serving;
use crate::model::{Llama, Scratch, Tokenizer, argmax};

/// What came out.
#[derive(Debug)]
pub(crate) struct Generation {
    /// Generated tokens of each sequence; an end marker is not among them.
    pub(crate) tokens: Vec<Vec<u32>>,
    /// Wall time of the steps after the prefill.
    pub(crate) decode_time: Duration,
    /// Time in projections, all steps.
    pub(crate) projections: Duration,
}

/// One running sequence.
#[derive(Debug)]
struct Sequence {
    seq: SeqId,
    len: usize,
    last: u32,
    tokens: Vec<u32>,
    done: bool,
}

/// Continues each prompt by up to `count` tokens.
pub(crate) fn generate(
    llama: &Llama,
    tokenizer: &Tokenizer,
    serving: &mut Serving,
    prompts: &[Vec<u32>],
    count: usize,
    mut on_token: impl FnMut(usize, u32),
) -> Result<Generation, DemoError> {
    let mut scratch = Scratch::default();
    let mut running: Vec<Sequence> = Vec::new();
    for part in [prompts.get(..1), prompts.get(1..)].into_iter().flatten() {
        prefill(llama, serving, part, &mut scratch, &mut running)?;
    }
    serving.end_phase("prefill");

    let start = Instant::now();
    for step in 0..count {
        for (n, s) in running.iter_mut().enumerate().filter(|(_, s)| !s.done) {
            s.done = tokenizer.is_end(s.last);
            if !s.done {
                s.tokens.push(s.last);
                on_token(n, s.last);
            }
        }
        if step + 1 == count || running.iter().all(|s| s.done) {
            break;
        }
        // The first and the last decode step are checked against the reference.
        decode(llama, serving, &mut running, step == 0 || step + 2 == count, &mut scratch)?;
    }
    let decode_time = start.elapsed();
    serving.end_phase("decode");
    Ok(Generation {
        tokens: running.into_iter().map(|s| s.tokens).collect(),
        decode_time,
        projections: scratch.take_account().time,
    })
}

fn prefill(
    llama: &Llama,
    serving: &mut Serving,
    prompts: &[Vec<u32>],
    scratch: &mut Scratch,
    running: &mut Vec<Sequence>,
) -> Result<(), DemoError> {
    if prompts.is_empty() {
        return Ok(());
    }
    let (mut batch, mut tokens, mut positions, mut ends) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for prompt in prompts {
        if prompt.is_empty() {
            return Err(DemoError::EmptyPrompt);
        }
        let (seq, hit) = serving.admit(prompt)?;
        batch.push((seq, hit));
        tokens.extend_from_slice(&prompt[hit..]);
        for position in hit..prompt.len() {
            positions.push(position_of(position)?);
        }
        ends.push(tokens.len() - 1);
    }
    serving.begin("prefill", &batch, true)?;
    let logits = llama.forward(&tokens, &positions, &ends, serving, scratch)?;
    let vocab = logits.len() / ends.len();
    for ((&(seq, _), prompt), row) in batch.iter().zip(prompts).zip(logits.chunks_exact(vocab)) {
        serving.commit(seq)?;
        let (len, tokens) = (prompt.len(), Vec::new());
        running.push(Sequence { seq, len, last: best(row)?, tokens, done: false });
    }
    Ok(())
}

fn decode(
    llama: &Llama,
    serving: &mut Serving,
    running: &mut [Sequence],
    sampled: bool,
    scratch: &mut Scratch,
) -> Result<(), DemoError> {
    let (mut batch, mut tokens, mut positions) = (Vec::new(), Vec::new(), Vec::new());
    for s in running.iter_mut().filter(|s| !s.done) {
        serving.append(s.seq, s.last)?;
        batch.push((s.seq, s.len));
        tokens.push(s.last);
        positions.push(position_of(s.len)?);
        s.len += 1;
    }
    serving.begin("decode", &batch, sampled)?;
    let rows: Vec<usize> = (0..tokens.len()).collect();
    let logits = llama.forward(&tokens, &positions, &rows, serving, scratch)?;
    let vocab = logits.len() / rows.len();
    let active = running.iter_mut().filter(|s| !s.done);
    for (s, row) in active.zip(logits.chunks_exact(vocab)) {
        serving.commit(s.seq)?;
        s.last = best(row)?;
    }
    Ok(())
}

fn position_of(position: usize) -> Result<u32, DemoError> {
    let context = usize::try_from(u32::MAX).unwrap_or(usize::MAX);
    u32::try_from(position).map_err(|_| DemoError::Context { context, got: position })
}

fn best(logits: &[f32]) -> Result<u32, DemoError> {
    let token = argmax(logits).and_then(|token| u32::try_from(token).ok());
    token.ok_or(DemoError::NoLogit)
}
