//! A llama-architecture language model in f32, whose attention is somebody else's: start here.
//!
//! Invariant: everything in this module is plain f32 arithmetic on weights dequantised once, and no
//! score, softmax or cache appears in it. Attention enters through the [`Attention`] trait alone,
//! so the demo's text is evidence about the engine behind the trait. A quantised matrix product
//! would be faster and would spoil that: it rounds the activations to eight bits, and greedy text
//! then differs from the f32 text after a couple of dozen tokens.
//!
//! | module | what it holds |
//! |---|---|
//! | [`gguf`] | the file: typed metadata, tensors of an expected shape |
//! | [`config`] | the sizes of the model, checked against one another |
//! | [`tokenizer`] | text to tokens and back |
//! | [`matmul`] | projections, and the account of their time |
//! | [`rope`], [`norm`] | rotary positions, RMS norm |
//! | [`llama`] | the decoder |

pub(crate) mod config;
pub(crate) mod error;
pub(crate) mod gguf;
pub(crate) mod llama;
pub(crate) mod matmul;
pub(crate) mod norm;
pub(crate) mod rope;
pub(crate) mod tokenizer;

#[cfg(test)]
mod tests;

use std::path::Path;

pub(crate) use error::{ForwardError, ModelError};
pub(crate) use llama::{Llama, Scratch, argmax};
pub(crate) use tokenizer::Tokenizer;

/// One layer's attention over new tokens of several sequences packed together.
///
/// The implementor owns the cache, and knows which packed token belongs to which sequence; the
/// decoder calls it once a layer, layers in ascending order.
///
/// Shapes: q and o `[tokens, q_heads, head_dim]`, k and v `[tokens, kv_heads, head_dim]`, all
/// packed, of the new tokens only, q and k after the rotary embedding.
///
/// Invariants: the scale is `1/sqrt(head_dim)` and the mask is causal; every element of o is
/// written, for its content before the call means nothing.
pub(crate) trait Attention {
    /// What can go wrong.
    type Error;

    /// Appends `k` and `v` to the cache of `layer` and writes the attention of `q` over that cache
    /// to `o`.
    ///
    /// # Errors
    /// The implementor's; [`Llama::forward`] passes it on with the layer and stops.
    fn attend(
        &mut self,
        layer: usize,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        o: &mut [f32],
    ) -> Result<(), Self::Error>;
}

/// Reads a model and its tokenizer from one GGUF file.
///
/// # Errors
/// [`ModelError`] when the file cannot be read, lacks something, holds something of an unexpected
/// shape, or asks for an option that this decoder does not have.
pub(crate) fn load(path: &Path) -> Result<(Llama, Tokenizer), ModelError> {
    let (mut metadata, mut tensors) = gguf::open(path)?;
    let config = config::Config::from_metadata(&metadata)?;
    let tokenizer = Tokenizer::from_metadata(&mut metadata, config.vocab)?;
    let llama = Llama::from_tensors(config, &mut tensors)?;
    tensors.finish()?;
    Ok((llama, tokenizer))
}
