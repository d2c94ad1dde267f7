//! What can go wrong with a model file, with a text, and with a call of the decoder.
//!
//! Invariant: each variant carries what was expected and what was got. Three enums and not one,
//! since loading, encoding and running happen at different times to different callers.

use std::error::Error;
use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// A model file that cannot be used.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum ModelError {
    /// The file cannot be opened.
    #[error("cannot open {}", path.display())]
    Open {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// The file is not a readable GGUF file.
    #[error("cannot read {} as GGUF", path.display())]
    Header {
        /// The file.
        path: PathBuf,
        /// The reader's answer.
        source: candle_core::Error,
    },
    /// A metadata key is absent.
    #[error("metadata key {key} is missing")]
    MissingKey {
        /// The key.
        key: String,
    },
    /// A metadata value has another type.
    #[error("metadata key {key}: expected {expected}, got {got}")]
    KeyType {
        /// The key.
        key: String,
        /// The type wanted.
        expected: &'static str,
        /// The type found.
        got: String,
    },
    /// A metadata value is none that this decoder can honour.
    #[error("metadata key {key}: expected {expected}, got {got}")]
    KeyValue {
        /// The key.
        key: String,
        /// The values that would do.
        expected: String,
        /// The value found.
        got: String,
    },
    /// A tensor is absent.
    #[error("tensor {name} is missing")]
    MissingTensor {
        /// The tensor.
        name: String,
    },
    /// A tensor that this decoder would not use.
    #[error("tensor {name} is not part of the architecture")]
    UnexpectedTensor {
        /// The tensor, the first in alphabetical order.
        name: String,
    },
    /// A tensor's shape contradicts the metadata.
    #[error("tensor {name}: expected shape {expected:?}, got {got:?}")]
    Shape {
        /// The tensor.
        name: String,
        /// Outermost dimension first.
        expected: Vec<usize>,
        /// Outermost dimension first.
        got: Vec<usize>,
    },
    /// A tensor's data cannot be read or dequantised.
    #[error("cannot dequantise tensor {name}")]
    Tensor {
        /// The tensor.
        name: String,
        /// The reader's answer.
        source: candle_core::Error,
    },
    /// A merge rule is not two tokens with a space between.
    #[error("merge rule {index}: expected two tokens and a space, got {got:?}")]
    Merge {
        /// Place in the list.
        index: usize,
        /// The rule.
        got: String,
    },
    /// A token contains a character that stands for no byte.
    #[error("token {id}: expected characters of the byte-level alphabet, got {got:?}")]
    TokenText {
        /// The token.
        id: u32,
        /// Its text.
        got: String,
    },
    /// The tokenizer cannot be built from the vocabulary and merges.
    #[error("cannot build the tokenizer")]
    Tokenizer(#[source] Box<dyn Error + Send + Sync>),
}

/// A text that cannot be turned into tokens.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum EncodeError {
    /// The vocabulary has no token for a byte of the text.
    ///
    /// An error, because the BPE model would drop the byte in silence.
    #[error("byte {byte:#04x} at offset {offset} is in no token of the vocabulary")]
    Byte {
        /// The byte.
        byte: u8,
        /// Its place in the UTF-8 text.
        offset: usize,
    },
    /// The tokenizer failed.
    #[error("cannot encode the text")]
    Tokenizer(#[source] Box<dyn Error + Send + Sync>),
}

/// A call of the decoder that was refused, or whose attention failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum ForwardError<E> {
    /// One position per token is needed.
    #[error("expected {tokens} positions, one a token, got {positions}")]
    Positions {
        /// Number of tokens.
        tokens: usize,
        /// Number of positions.
        positions: usize,
    },
    /// A token is not in the vocabulary.
    #[error("row {row}: expected a token below {vocab}, got {got}")]
    Token {
        /// Packed row.
        row: usize,
        /// Size of the vocabulary.
        vocab: usize,
        /// The token.
        got: u32,
    },
    /// A position is past the context that the model was trained for.
    #[error("row {row}: expected a position below {context}, got {got}")]
    Position {
        /// Packed row.
        row: usize,
        /// Length of the context in tokens.
        context: usize,
        /// The position.
        got: u32,
    },
    /// Logits were asked of a row that is not there.
    #[error("expected wanted rows below {tokens}, got {got}")]
    Row {
        /// Number of tokens.
        tokens: usize,
        /// The row.
        got: usize,
    },
    /// The attention of a layer failed.
    #[error("attention of layer {layer} failed")]
    Attention {
        /// The layer.
        layer: usize,
        /// The implementor's error.
        source: E,
    },
}
