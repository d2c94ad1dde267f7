//! The sizes and constants of the model.
//!
//! Invariant: a `Config` exists only if its sizes agree with one another and the file asks for
//! nothing under `llama.` that this decoder does not know. A list of known keys, and not a list of
//! forbidden ones: a key that a later format adds could change the arithmetic, and the text would
//! then be wrong with no error to show for it.

use super::error::ModelError;
use super::gguf::Metadata;

/// The keys that are read here, without their `llama.` prefix.
const KNOWN: [&str; 12] = [
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "vocab_size",
];

/// The sizes and constants of a llama-architecture decoder.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Config {
    /// Number of layers.
    pub(crate) layers: usize,
    /// Width of the residual stream.
    pub(crate) width: usize,
    /// Query heads.
    pub(crate) q_heads: usize,
    /// Key and value heads; divides `q_heads`.
    pub(crate) kv_heads: usize,
    /// Width of a head of any kind, even; `q_heads * head_dim == width`.
    pub(crate) head_dim: usize,
    /// Width of the gated feed-forward part.
    pub(crate) hidden: usize,
    /// Number of tokens in the vocabulary.
    pub(crate) vocab: usize,
    /// Longest sequence, in tokens.
    pub(crate) context: usize,
    /// Base of the rotary frequencies.
    pub(crate) rope_theta: f32,
    /// The constant under the root of the RMS norm.
    pub(crate) norm_eps: f32,
}

impl Config {
    /// Reads and checks the configuration.
    ///
    /// # Errors
    /// [`ModelError::MissingKey`], [`ModelError::KeyType`], [`ModelError::KeyValue`].
    pub(crate) fn from_metadata(metadata: &Metadata) -> Result<Self, ModelError> {
        let architecture = metadata.str("general.architecture")?;
        if architecture != "llama" {
            return Err(refuse("general.architecture", "llama", architecture));
        }
        let mut unknown = metadata.keys().filter(|key| {
            key.strip_prefix("llama.").is_some_and(|suffix| !KNOWN.contains(&suffix))
        });
        if let Some(key) = unknown.next() {
            return Err(refuse(key, "absent, for this decoder does not know it", "present"));
        }

        let config = Self {
            layers: size(metadata, "llama.block_count")?,
            width: size(metadata, "llama.embedding_length")?,
            q_heads: size(metadata, "llama.attention.head_count")?,
            kv_heads: size(metadata, "llama.attention.head_count_kv")?,
            head_dim: size(metadata, "llama.rope.dimension_count")?,
            hidden: size(metadata, "llama.feed_forward_length")?,
            vocab: size(metadata, "llama.vocab_size")?,
            context: size(metadata, "llama.context_length")?,
            rope_theta: positive(metadata, "llama.rope.freq_base")?,
            norm_eps: positive(metadata, "llama.attention.layer_norm_rms_epsilon")?,
        };
        if !config.q_heads.is_multiple_of(config.kv_heads) {
            let expected = format!("a divisor of {}", config.q_heads);
            return Err(refuse("llama.attention.head_count_kv", expected, config.kv_heads));
        }
        if !config.head_dim.is_multiple_of(2) {
            return Err(refuse("llama.rope.dimension_count", "an even number", config.head_dim));
        }
        if config.q_heads.checked_mul(config.head_dim) != Some(config.width) {
            let expected = format!("{} heads of {}", config.q_heads, config.head_dim);
            return Err(refuse("llama.embedding_length", expected, config.width));
        }
        for key in ["llama.attention.key_length", "llama.attention.value_length"] {
            if metadata.keys().any(|present| present == key) {
                let got = size(metadata, key)?;
                if got != config.head_dim {
                    return Err(refuse(key, config.head_dim, got));
                }
            }
        }
        Ok(config)
    }

    /// Width of the keys, or of the values, of one token.
    pub(crate) fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

fn size(metadata: &Metadata, key: &str) -> Result<usize, ModelError> {
    let value = metadata.u32(key)?;
    match usize::try_from(value) {
        Ok(value) if value > 0 => Ok(value),
        _ => Err(refuse(key, "a positive number", value)),
    }
}

fn positive(metadata: &Metadata, key: &str) -> Result<f32, ModelError> {
    let value = metadata.f32(key)?;
    if value.is_finite() && value > 0.0 {
        Ok(value)
    } else {
        Err(refuse(key, "a positive finite number", value))
    }
}

pub(super) fn refuse(key: &str, expected: impl ToString, got: impl ToString) -> ModelError {
    ModelError::KeyValue {
        key: key.to_owned(),
        expected: expected.to_string(),
        got: got.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use candle_core::quantized::gguf_file::Value;

    use super::*;

    fn metadata() -> Metadata {
        Metadata::from_pairs([
            ("general.architecture", Value::String("llama".to_owned())),
            ("general.name", Value::String("anything".to_owned())),
            ("llama.block_count", Value::U32(30)),
            ("llama.context_length", Value::U32(8192)),
            ("llama.embedding_length", Value::U32(576)),
            ("llama.feed_forward_length", Value::U32(1536)),
            ("llama.attention.head_count", Value::U32(9)),
            ("llama.attention.head_count_kv", Value::U32(3)),
            ("llama.rope.freq_base", Value::F32(1e5)),
            ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
            ("llama.vocab_size", Value::U32(49152)),
            ("llama.rope.dimension_count", Value::U32(64)),
        ])
    }

    /// The key that is complained about once `key` is `value`.
    fn refused(key: &str, value: Value) -> Option<String> {
        let mut metadata = metadata();
        metadata.set(key, value);
        match Config::from_metadata(&metadata) {
            Err(ModelError::KeyValue { key, .. }) => Some(key),
            _ => None,
        }
    }

    #[test]
    fn config_reads_every_size() {
        let expected = Config {
            layers: 30,
            width: 576,
            q_heads: 9,
            kv_heads: 3,
            head_dim: 64,
            hidden: 1536,
            vocab: 49152,
            context: 8192,
            rope_theta: 1e5,
            norm_eps: 1e-5,
        };
        assert_eq!(Config::from_metadata(&metadata()).unwrap(), expected);
        assert_eq!(expected.kv_width(), 192);
    }

    #[test]
    fn config_refuses_sizes_that_disagree() {
        for (key, value) in [
            ("llama.attention.head_count_kv", Value::U32(2)),
            ("llama.attention.head_count_kv", Value::U32(0)),
            ("llama.embedding_length", Value::U32(575)),
            ("llama.rope.freq_base", Value::F32(f32::NAN)),
            ("llama.attention.layer_norm_rms_epsilon", Value::F32(0.0)),
            ("llama.attention.key_length", Value::U32(32)),
            ("general.architecture", Value::String("gemma".to_owned())),
        ] {
            assert_eq!(refused(key, value).as_deref(), Some(key));
        }
        assert_eq!(
            refused("llama.rope.dimension_count", Value::U32(63)).as_deref(),
            Some("llama.rope.dimension_count")
        );
    }

    #[test]
    fn config_refuses_option_it_does_not_know() {
        let key = "llama.rope.scaling.type";
        assert_eq!(refused(key, Value::String("yarn".to_owned())).as_deref(), Some(key));
    }

    #[test]
    fn config_accepts_head_length_that_agrees() {
        assert_eq!(refused("llama.attention.key_length", Value::U32(64)), None);
    }

    #[test]
    fn config_names_missing_key() {
        let mut metadata = metadata();
        metadata.unset("llama.vocab_size");
        let error = Config::from_metadata(&metadata).unwrap_err();
        assert!(matches!(error, ModelError::MissingKey { ref key } if key == "llama.vocab_size"));
    }
}
