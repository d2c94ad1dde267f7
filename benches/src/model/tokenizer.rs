//! Text to tokens and back: byte-level BPE from the vocabulary and merges of the model file.
//!
//! Invariant: decoding the encoding of a text gives the text back, byte for byte, and a text for
//! which that is impossible is refused. Merging is left to the `tokenizers` crate; decoding is done
//! here, from one table of bytes, because a token may end in the middle of a character and a stream
//! has to hold those bytes back.
//!
//! The "smollm" pre-tokeniser puts every digit on its own and then splits by the pattern of GPT-2.
//!
//! Source: Sennrich et al., arXiv:1508.07909; the byte alphabet is that of GPT-2's `encoder.py`.

use std::mem;
use std::str;

use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::{AddedToken, PreTokenizerWrapper};

use super::config::refuse;
use super::error::{EncodeError, ModelError};
use super::gguf::Metadata;

/// The token types of GGUF that are markers and not text.
const CONTROL: i32 = 3;
/// Markers that end a turn or a text, wherever the vocabulary has them.
const END_MARKERS: [&str; 2] = ["<|im_end|>", "<|endoftext|>"];

/// A vocabulary with its merge rules.
#[derive(Debug)]
pub(crate) struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// What each token adds to a text; nothing for a marker.
    bytes: Vec<Box<[u8]>>,
    /// The bytes that some token consists of.
    in_vocabulary: [bool; 256],
    /// The tokens that end a text, ascending.
    ends: Vec<u32>,
}

/// A text that arrives token by token.
#[derive(Debug)]
pub(crate) struct TextStream<'t> {
    tokenizer: &'t Tokenizer,
    /// The bytes of a character that is not complete yet.
    pending: Vec<u8>,
}

impl Tokenizer {
    /// Builds the tokenizer of a model file; the vocabulary is moved out of the metadata.
    ///
    /// # Errors
    /// [`ModelError::MissingKey`], [`ModelError::KeyType`]; [`ModelError::KeyValue`] when the file
    /// asks for another tokenizer, or its lists are not of the length of the vocabulary;
    /// [`ModelError::Merge`], [`ModelError::TokenText`], [`ModelError::Tokenizer`].
    pub(crate) fn from_metadata(metadata: &mut Metadata, vocab: usize) -> Result<Self, ModelError> {
        for (key, expected) in [("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "smollm")]
        {
            let got = metadata.str(key)?;
            if got != expected {
                return Err(refuse(key, expected, got));
            }
        }
        for key in ["tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_space_prefix"] {
            if metadata.bool(key)? {
                return Err(refuse(key, false, true));
            }
        }
        let types = metadata.i32s("tokenizer.ggml.token_type")?;
        let tokens = metadata.take_strings("tokenizer.ggml.tokens")?;
        for (key, len) in
            [("tokenizer.ggml.tokens", tokens.len()), ("tokenizer.ggml.token_type", types.len())]
        {
            if len != vocab {
                return Err(refuse(key, format!("{vocab} entries"), len));
            }
        }
        let merges = metadata.take_strings("tokenizer.ggml.merges")?;
        let eos = metadata.u32("tokenizer.ggml.eos_token_id")?;
        Self::new(&tokens, &types, merges, eos)
    }

    fn new(
        tokens: &[String],
        types: &[i32],
        merges: Vec<String>,
        eos: u32,
    ) -> Result<Self, ModelError> {
        let byte_of = byte_alphabet();
        let mut bytes = Vec::with_capacity(tokens.len());
        let (mut markers, mut ends) = (Vec::new(), vec![eos]);
        for (id, (token, &kind)) in (0u32..).zip(tokens.iter().zip(types)) {
            if kind == CONTROL {
                markers.push(AddedToken::from(token.as_str(), true));
                bytes.push(Box::default());
                if END_MARKERS.contains(&token.as_str()) {
                    ends.push(id);
                }
            } else {
                let of_token: Option<Vec<u8>> = token.chars().map(&byte_of).collect();
                let of_token =
                    of_token.ok_or_else(|| ModelError::TokenText { id, got: token.clone() })?;
                bytes.push(of_token.into_boxed_slice());
            }
        }
        ends.sort_unstable();
        ends.dedup();
        let mut in_vocabulary = [false; 256];
        for token in &bytes {
            if let [byte] = **token {
                in_vocabulary[usize::from(byte)] = true;
            }
        }

        let rule = |(index, rule): (usize, String)| match rule.split_once(' ') {
            Some((left, right)) => Ok((left.to_owned(), right.to_owned())),
            None => Err(ModelError::Merge { index, got: rule }),
        };
        let merges = merges.into_iter().enumerate().map(rule).collect::<Result<_, _>>()?;
        let vocabulary: Vocab = tokens.iter().cloned().zip(0..).collect();
        let model = BPE::builder()
            .vocab_and_merges(vocabulary, merges)
            .build()
            .map_err(ModelError::Tokenizer)?;
        let mut inner = tokenizers::Tokenizer::new(model);
        inner.with_pre_tokenizer(Some(Sequence::new(vec![
            PreTokenizerWrapper::Digits(Digits::new(true)),
            PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, true)),
        ])));
        inner.add_special_tokens(markers).map_err(ModelError::Tokenizer)?;
        Ok(Self { inner, bytes, in_vocabulary, ends })
    }

    /// The tokens of a text. Markers written out in the text, such as `<|im_start|>`, become marker
    /// tokens; nothing is put before or after the text.
    ///
    /// # Errors
    /// [`EncodeError::Byte`] when the vocabulary lacks a byte of the text;
    /// [`EncodeError::Tokenizer`].
    pub(crate) fn encode(&self, text: &str) -> Result<Vec<u32>, EncodeError> {
        let missing = text.bytes().enumerate().find(|&(_, b)| !self.in_vocabulary[usize::from(b)]);
        if let Some((offset, byte)) = missing {
            return Err(EncodeError::Byte { byte, offset });
        }
        let encoding = self.inner.encode_fast(text, false).map_err(EncodeError::Tokenizer)?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of some tokens. Markers give nothing; bytes that are no UTF-8 give U+FFFD.
    pub(crate) fn decode(&self, tokens: &[u32]) -> String {
        let mut stream = self.stream();
        let mut text: String = tokens.iter().map(|&token| stream.push(token)).collect();
        text.push_str(&stream.finish());
        text
    }

    /// Starts a text that arrives token by token.
    pub(crate) fn stream(&self) -> TextStream<'_> {
        TextStream { tokenizer: self, pending: Vec::new() }
    }

    /// Whether a token ends the text.
    pub(crate) fn is_end(&self, token: u32) -> bool {
        self.ends.binary_search(&token).is_ok()
    }

    /// The bytes of a token; none for a marker or for a token that does not exist.
    fn bytes(&self, token: u32) -> &[u8] {
        usize::try_from(token).ok().and_then(|i| self.bytes.get(i)).map_or(&[], |bytes| bytes)
    }
}

impl TextStream<'_> {
    /// Takes one token and returns the characters that it completes.
    pub(crate) fn push(&mut self, token: u32) -> String {
        self.pending.extend_from_slice(self.tokenizer.bytes(token));
        let mut text = String::new();
        let mut rest = mem::take(&mut self.pending);
        loop {
            match str::from_utf8(&rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    return text;
                }
                Err(error) => {
                    let after = rest.split_off(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(&rest));
                    let Some(len) = error.error_len() else {
                        self.pending = after;
                        return text;
                    };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = after[len..].to_vec();
                }
            }
        }
    }

    /// Ends the text; an incomplete character gives U+FFFD.
    pub(crate) fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}

/// The map from GPT-2's printable stand-ins to bytes.
///
/// Printable Latin-1 bytes stand for themselves; the others, in ascending order, are U+0100 and
/// what follows.
fn byte_alphabet() -> impl Fn(char) -> Option<u8> {
    let printable = |byte: &u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let others: Vec<u8> = (0..=u8::MAX).filter(|byte| !printable(byte)).collect();
    move |c| match u8::try_from(c) {
        Ok(byte) => Some(byte).filter(printable),
        Err(_) => others.get(usize::try_from(u32::from(c)).ok()?.checked_sub(0x100)?).copied(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All bytes but 0x06, three merges, two markers.
    fn small() -> Tokenizer {
        let alphabet = byte_alphabet();
        let mut letters: Vec<char> = (0..0x200).filter_map(char::from_u32).collect();
        letters.retain(|&c| alphabet(c).is_some_and(|byte| byte != 6));
        let mut tokens = vec!["<|endoftext|>".to_owned(), "<|im_end|>".to_owned()];
        tokens.extend(letters.iter().map(char::to_string));
        let merges = ["h e", "he y", "Ġ hey"].map(str::to_owned);
        tokens.extend(merges.iter().map(|m| m.replace(' ', "")));
        let types: Vec<i32> = (0..tokens.len()).map(|i| if i < 2 { CONTROL } else { 1 }).collect();
        Tokenizer::new(&tokens, &types, merges.to_vec(), 1).unwrap()
    }

    #[test]
    fn byte_alphabet_is_a_bijection_on_bytes() {
        let alphabet = byte_alphabet();
        let mut bytes: Vec<u8> =
            (0..0x1000).filter_map(char::from_u32).filter_map(alphabet).collect();
        bytes.sort_unstable();
        assert!(bytes.into_iter().eq(0..=u8::MAX));
        assert_eq!(byte_alphabet()('Ġ'), Some(b' '));
    }

    #[test]
    fn tokenizer_merges_by_rank_and_parses_markers() {
        let tokenizer = small();
        let last = 2 + 255 + 2;
        assert_eq!(tokenizer.encode(" hey").unwrap(), [last]);
        assert_eq!(tokenizer.encode("hey<|im_end|> hey").unwrap(), [last - 1, 1, last]);
        assert_eq!(tokenizer.encode("").unwrap(), [0; 0]);
    }

    #[test]
    fn tokenizer_round_trips_every_kind_of_text() {
        let tokenizer = small();
        for text in ["", "hey hey", "  two\n\n\tlines ", "naïve 日本語 🦀🦀", "12,5", "it's"]
        {
            let tokens = tokenizer.encode(text).unwrap();
            assert_eq!(tokenizer.decode(&tokens), text);
        }
    }

    #[test]
    fn tokenizer_refuses_byte_outside_vocabulary() {
        let error = small().encode("ab\u{6}").unwrap_err();
        assert!(matches!(error, EncodeError::Byte { byte: 6, offset: 2 }), "{error}");
    }

    #[test]
    fn tokenizer_knows_its_ends() {
        let tokenizer = small();
        assert!(tokenizer.is_end(0) && tokenizer.is_end(1) && !tokenizer.is_end(2));
    }

    #[test]
    fn tokenizer_refuses_merge_without_space_and_foreign_token() {
        let text = |s: &str| vec![s.to_owned()];
        let error = Tokenizer::new(&text("a"), &[1], text("ab"), 0).unwrap_err();
        assert!(matches!(error, ModelError::Merge { index: 0, .. }), "{error}");
        let error = Tokenizer::new(&text("日"), &[1], vec![], 0).unwrap_err();
        assert!(matches!(error, ModelError::TokenText { id: 0, .. }), "{error}");
    }

    #[test]
    fn stream_holds_back_incomplete_character() {
        let tokenizer = small();
        let tokens = tokenizer.encode("a🦀b").unwrap();
        assert_eq!(tokens.len(), 6, "each byte is a token here");
        let mut stream = tokenizer.stream();
        let pieces: Vec<String> = tokens.iter().map(|&t| stream.push(t)).collect();
        assert_eq!(pieces, ["a", "", "", "", "🦀", "b"]);
        assert_eq!(stream.finish(), "");
    }

    #[test]
    fn stream_replaces_what_is_no_text() {
        let tokenizer = small();
        let crab = tokenizer.encode("🦀").unwrap();
        let letter = tokenizer.encode("a").unwrap()[0];
        assert_eq!(tokenizer.decode(&[crab[0], crab[1], letter]), "\u{fffd}a");
        assert_eq!(tokenizer.decode(&[crab[1], letter, crab[0]]), "\u{fffd}a\u{fffd}");
        assert_eq!(tokenizer.decode(&[0, letter, u32::MAX]), "a");
    }
}
