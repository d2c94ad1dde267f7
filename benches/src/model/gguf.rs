//! A GGUF file as typed metadata and as tensors of an expected shape.
//!
//! Invariant: a tensor leaves here only as f32, only with the shape that the caller worked out from
//! the metadata, and only once; what nobody asked for is an error at the end, so that no weight of
//! the file is left out in silence. candle reads the container and dequantises; its tensors are
//! dropped at once, because the rest of the program wants plain slices and candle's quantised
//! matrix products round the activations.
//!
//! Source: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

use std::collections::HashMap;
use std::fs::File;
use std::io::BufReader;
use std::mem;
use std::path::Path;

use candle_core::Device;
use candle_core::quantized::gguf_file::{Content, Value};

use super::error::ModelError;

/// Reads the head of a file.
///
/// # Errors
/// [`ModelError::Open`], [`ModelError::Header`].
pub(crate) fn open(path: &Path) -> Result<(Metadata, Tensors), ModelError> {
    let file =
        File::open(path).map_err(|source| ModelError::Open { path: path.to_owned(), source })?;
    let mut reader = BufReader::new(file);
    let mut content = Content::read(&mut reader)
        .map_err(|source| ModelError::Header { path: path.to_owned(), source })?;
    let metadata = Metadata(mem::take(&mut content.metadata));
    Ok((metadata, Tensors { reader, content }))
}

/// The key-value part of the file.
#[derive(Debug)]
pub(crate) struct Metadata(HashMap<String, Value>);

/// The tensors of the file that have not been read yet.
#[derive(Debug)]
pub(crate) struct Tensors {
    reader: BufReader<File>,
    content: Content,
}

impl Metadata {
    /// All keys, in no order.
    pub(crate) fn keys(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }

    /// An unsigned 32-bit value.
    ///
    /// # Errors
    /// [`ModelError::MissingKey`], [`ModelError::KeyType`].
    pub(crate) fn u32(&self, key: &str) -> Result<u32, ModelError> {
        match self.value(key)? {
            Value::U32(value) => Ok(*value),
            other => Err(key_type(key, "u32", other)),
        }
    }

    /// A 32-bit float.
    ///
    /// # Errors
    /// [`ModelError::MissingKey`], [`ModelError::KeyType`].
    pub(crate) fn f32(&self, key: &str) -> Result<f32, ModelError> {
        match self.value(key)? {
            Value::F32(value) => Ok(*value),
            other => Err(key_type(key, "f32", other)),
        }
    }

    /// A boolean.
    ///
    /// # Errors
    /// [`ModelError::MissingKey`], [`ModelError::KeyType`].
    pub(crate) fn bool(&self, key: &str) -> Result<bool, ModelError> {
        match self.value(key)? {
            Value::Bool(value) => Ok(*value),
            other => Err(key_type(key, "bool", other)),
        }
    }

    /// A string.
    ///
    /// # Errors
    /// [`ModelError::MissingKey`], [`ModelError::KeyType`].
    pub(crate) fn str(&self, key: &str) -> Result<&str, ModelError> {
        match self.value(key)? {
            Value::String(value) => Ok(value),
            other => Err(key_type(key, "string", other)),
        }
    }

    /// An array of signed 32-bit values.
    ///
    /// # Errors
    /// [`ModelError::MissingKey`], [`ModelError::KeyType`].
    pub(crate) fn i32s(&self, key: &str) -> Result<Vec<i32>, ModelError> {
        let item = |value: &Value| match value {
            Value::I32(value) => Ok(*value),
            other => Err(key_type(key, "array of i32", other)),
        };
        match self.value(key)? {
            Value::Array(items) => items.iter().map(item).collect(),
            other => Err(key_type(key, "array of i32", other)),
        }
    }

    /// An array of strings, moved out: a vocabulary is not copied.
    ///
    /// # Errors
    /// [`ModelError::MissingKey`], [`ModelError::KeyType`].
    pub(crate) fn take_strings(&mut self, key: &str) -> Result<Vec<String>, ModelError> {
        let item = |value| match value {
            Value::String(value) => Ok(value),
            other => Err(key_type(key, "array of string", &other)),
        };
        match self.0.remove(key) {
            Some(Value::Array(items)) => items.into_iter().map(item).collect(),
            Some(other) => Err(key_type(key, "array of string", &other)),
            None => Err(ModelError::MissingKey { key: key.to_owned() }),
        }
    }

    fn value(&self, key: &str) -> Result<&Value, ModelError> {
        self.0.get(key).ok_or_else(|| ModelError::MissingKey { key: key.to_owned() })
    }
}

#[cfg(test)]
impl Metadata {
    /// Metadata that came from no file.
    pub(crate) fn from_pairs(pairs: impl IntoIterator<Item = (&'static str, Value)>) -> Self {
        Self(pairs.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
    }

    /// Replaces or adds one value.
    pub(crate) fn set(&mut self, key: &str, value: Value) {
        self.0.insert(key.to_owned(), value);
    }

    /// Removes one value.
    pub(crate) fn unset(&mut self, key: &str) {
        self.0.remove(key);
    }
}

impl Tensors {
    /// Whether a tensor is there and unread.
    pub(crate) fn contains(&self, name: &str) -> bool {
        self.content.tensor_infos.contains_key(name)
    }

    /// Reads and dequantises one tensor.
    ///
    /// Shapes: `shape` has the outermost dimension first; the result is row-major.
    ///
    /// # Errors
    /// [`ModelError::MissingTensor`], [`ModelError::Shape`], [`ModelError::Tensor`]. The shape is
    /// checked before anything is allocated.
    pub(crate) fn take(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let Some(info) = self.content.tensor_infos.remove(name) else {
            return Err(ModelError::MissingTensor { name: name.to_owned() });
        };
        if info.shape.dims() != shape {
            let (expected, got) = (shape.to_vec(), info.shape.dims().to_vec());
            return Err(ModelError::Shape { name: name.to_owned(), expected, got });
        }
        info.read(&mut self.reader, self.content.tensor_data_offset, &Device::Cpu)
            .and_then(|quantized| quantized.dequantize(&Device::Cpu))
            .and_then(|tensor| tensor.flatten_all()?.to_vec1())
            .map_err(|source| ModelError::Tensor { name: name.to_owned(), source })
    }

    /// Confirms that every tensor was read.
    ///
    /// # Errors
    /// [`ModelError::UnexpectedTensor`].
    pub(crate) fn finish(self) -> Result<(), ModelError> {
        match self.content.tensor_infos.into_keys().min() {
            Some(name) => Err(ModelError::UnexpectedTensor { name }),
            None => Ok(()),
        }
    }
}

fn key_type(key: &str, expected: &'static str, got: &Value) -> ModelError {
    ModelError::KeyType { key: key.to_owned(), expected, got: format!("{:?}", got.value_type()) }
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::fs;
    use std::io::Cursor;
    use std::process;

    use candle_core::Tensor;
    use candle_core::quantized::{GgmlDType, QTensor, gguf_file};

    use super::*;

    /// A file with one `[2, 32]` tensor in `Q8_0` and one key.
    fn small_file() -> Vec<u8> {
        let values: Vec<f32> = (0..64u8).map(f32::from).collect();
        let tensor = Tensor::from_vec(values, (2, 32), &Device::Cpu).unwrap();
        let tensor = QTensor::quantize(&tensor, GgmlDType::Q8_0).unwrap();
        let mut file = Cursor::new(Vec::new());
        gguf_file::write(&mut file, &[("key", &Value::U32(7))], &[("w", &tensor)]).unwrap();
        file.into_inner()
    }

    fn with_file<T>(name: &str, bytes: &[u8], f: impl FnOnce(&Path) -> T) -> T {
        let path = env::temp_dir().join(format!("attn-bench-{}-{name}.gguf", process::id()));
        fs::write(&path, bytes).unwrap();
        let result = f(&path);
        fs::remove_file(&path).unwrap();
        result
    }

    #[test]
    fn tensors_dequantise_within_half_a_step() {
        with_file("read", &small_file(), |path| {
            let (metadata, mut tensors) = open(path).unwrap();
            assert_eq!(metadata.u32("key").unwrap(), 7);
            let values = tensors.take("w", &[2, 32]).unwrap();
            for (i, value) in (0..64u8).zip(&values) {
                let step = if i < 32 { 31.0 } else { 63.0 } / 127.0;
                assert!((value - f32::from(i)).abs() <= 0.51 * step, "{i}: {value}");
            }
            assert!(matches!(tensors.take("w", &[2, 32]), Err(ModelError::MissingTensor { .. })));
            tensors.finish().unwrap();
        });
    }

    #[test]
    fn tensors_refuse_other_shape_and_leftovers() {
        with_file("shape", &small_file(), |path| {
            let (_, mut tensors) = open(path).unwrap();
            let error = tensors.take("w", &[32, 2]).unwrap_err();
            assert!(
                matches!(error, ModelError::Shape { ref expected, ref got, .. }
                    if *expected == [32, 2] && *got == [2, 32]),
                "{error}"
            );
            let (_, tensors) = open(path).unwrap();
            assert!(tensors.contains("w"));
            let error = tensors.finish().unwrap_err();
            assert!(matches!(error, ModelError::UnexpectedTensor { ref name } if name == "w"));
        });
    }

    #[test]
    fn open_refuses_garbage_and_absent_file() {
        with_file("garbage", b"GGUFgarbage", |path| {
            assert!(matches!(open(path), Err(ModelError::Header { .. })));
        });
        let absent = Path::new("/nonexistent/model.gguf");
        assert!(matches!(open(absent), Err(ModelError::Open { .. })));
    }

    #[test]
    fn take_refuses_truncated_data() {
        let bytes = small_file();
        with_file("truncated", &bytes[..bytes.len() - 40], |path| {
            let (_, mut tensors) = open(path).unwrap();
            assert!(matches!(tensors.take("w", &[2, 32]), Err(ModelError::Tensor { .. })));
        });
    }

    #[test]
    fn metadata_reports_missing_and_mistyped_keys() {
        let mut metadata = Metadata::from_pairs([("n", Value::U32(1)), ("s", Value::Bool(true))]);
        assert!(matches!(metadata.u32("absent"), Err(ModelError::MissingKey { .. })));
        let error = metadata.f32("n").unwrap_err();
        assert!(
            matches!(error, ModelError::KeyType { expected: "f32", ref got, .. } if got == "U32"),
            "{error}"
        );
        assert!(matches!(metadata.take_strings("s"), Err(ModelError::KeyType { .. })));
    }
}
