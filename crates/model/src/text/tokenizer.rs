//! The tokenizer of a model directory.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use metaltail_container::Checkpoint;

use super::{TextError, read_limited};
use crate::gguf;

/// The largest `tokenizer.json` accepted, in bytes. Published ones are below 40 MB.
const MAX_TOKENIZER_BYTES: u64 = 256 << 20;

/// A model's tokenizer: text to ids and back. Cloning shares it.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    inner: Arc<tokenizers::Tokenizer>,
    /// One more than the largest id.
    vocab_size: usize,
}

impl Tokenizer {
    /// Reads `tokenizer.json` of a model directory.
    ///
    /// # Errors
    /// A file that is absent, unreadable, larger than 256 MB or malformed is an error that names it.
    pub fn from_dir(dir: &Path) -> Result<Tokenizer, TextError> {
        let path = dir.join("tokenizer.json");
        let bytes = read_limited(&path, MAX_TOKENIZER_BYTES)?.ok_or_else(|| TextError::Read {
            path: path.clone(),
            source: std::io::ErrorKind::NotFound.into(),
        })?;
        Self::from_bytes(&bytes).map_err(|reason| TextError::Malformed { path, reason })
    }

    /// The tokenizer of an opened model: `tokenizer.json` of its directory, or that of a GGUF model's metadata;
    /// `None` where it has none.
    ///
    /// # Errors
    /// As [`Tokenizer::from_dir`]; metadata that cannot be expressed, such as an unknown pre-tokenizer.
    pub fn of(checkpoint: &Checkpoint) -> Result<Option<Tokenizer>, TextError> {
        let dir = checkpoint.dir();
        let Some(gguf) = checkpoint.gguf() else {
            return dir.join("tokenizer.json").exists().then(|| Self::from_dir(dir)).transpose();
        };
        let unusable = |reason| TextError::Metadata { path: dir.to_owned(), reason };
        let json = gguf::tokenizer(gguf).map_err(unusable)?;
        json.map(|json| Self::from_json(json).map_err(unusable)).transpose()
    }

    /// Parses the text of a `tokenizer.json`.
    ///
    /// # Errors
    /// A reason without the file's name, whatever the bytes are.
    pub fn from_bytes(bytes: &[u8]) -> Result<Tokenizer, String> {
        Self::from_json(serde_json::from_slice(bytes).map_err(|error| error.to_string())?)
    }

    fn from_json(mut json: serde_json::Value) -> Result<Tokenizer, String> {
        let fields = json.as_object_mut().ok_or("the top level must be an object")?;
        // A file may carry its trainer's truncation (a prompt cut without a word), padding and a
        // post-processor (ids added that the text does not have). None of them is wanted here.
        for unwanted in ["truncation", "padding", "post_processor"] {
            fields.insert(unwanted.to_owned(), serde_json::Value::Null);
        }
        let byte_level =
            ["normalizer", "pre_tokenizer", "decoder"].iter().any(|part| is_byte_level(fields.get(*part)));
        let inner: tokenizers::Tokenizer =
            guarded(|| serde_json::from_value(json).map_err(|error: serde_json::Error| error.to_string()))?;
        let largest = inner.get_vocab(true).into_values().max();
        let vocab_size = match largest {
            Some(id) => id as usize + 1,
            None => return Err("the vocabulary is empty".to_owned()),
        };
        if byte_level {
            check_bytes(&inner)?;
        }
        Ok(Tokenizer { inner: Arc::new(inner), vocab_size })
    }

    /// One more than the largest id of the vocabulary, added tokens included.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Checks that the model has a row for every id of this tokenizer. A model's vocabulary is often
    /// padded and may be larger, never smaller.
    ///
    /// # Errors
    /// The tokenizer's largest id is not below `model_vocab` (`vocab_size` of `config.json`).
    pub fn check_vocab(&self, model_vocab: usize) -> Result<(), TextError> {
        if self.vocab_size <= model_vocab {
            return Ok(());
        }
        Err(TextError::VocabTooSmall { largest: self.vocab_size - 1, model_vocab })
    }

    /// The ids of `text`. Special tokens written in it are recognised; nothing is added.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        guarded(|| match self.inner.encode_fast(text, false) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(error) => Err(error.to_string()),
        })
        .map_err(|reason| TextError::Tokenizer { action: "encode the text", reason })
    }

    /// The text of `ids`, bytes that are not UTF-8 replaced by U+FFFD. Ids without a token give
    /// nothing; with `skip_special` special tokens give nothing either.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TextError> {
        guarded(|| self.inner.decode(ids, skip_special).map_err(|error| error.to_string()))
            .map_err(|reason| TextError::Tokenizer { action: "decode the ids", reason })
    }

    /// The id of a token by its literal name, such as `<|user|>`.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Whether `id` is one of the tokenizer's special tokens.
    pub fn is_special(&self, id: u32) -> bool {
        let added = self.inner.get_added_vocabulary();
        added.simple_id_to_token(id).is_some_and(|token| added.is_special_token(&token))
    }

    /// Whether `id` contributes text: it has a token, and that token is not special.
    pub(super) fn has_text(&self, id: u32) -> bool {
        !self.is_special(id) && self.inner.id_to_token(id).is_some()
    }
}

/// Whether a part of a `tokenizer.json`, or a step of it, works on bytes shown as characters.
fn is_byte_level(part: Option<&serde_json::Value>) -> bool {
    let Some(part) = part else { return false };
    let steps = ["normalizers", "pretokenizers", "decoders"];
    part["type"] == "ByteLevel"
        || steps
            .iter()
            .filter_map(|key| part[*key].as_array())
            .flatten()
            .any(|step| is_byte_level(Some(step)))
}

/// Refuses a byte-level vocabulary without a token for a byte that text may have: the library would
/// drop that byte from the text without a word. Tokenizers that show the unknown are left alone.
fn check_bytes(tokenizer: &tokenizers::Tokenizer) -> Result<(), String> {
    let tokenizers::ModelWrapper::BPE(model) = tokenizer.get_model() else { return Ok(()) };
    if model.byte_fallback || model.unk_token.is_some() {
        return Ok(());
    }
    let missing: Vec<u8> = stand_ins()
        .filter(|(_, stand_in)| tokenizer.token_to_id(stand_in.encode_utf8(&mut [0; 4])).is_none())
        .map(|(byte, _)| byte)
        .collect();
    match missing.first() {
        None => Ok(()),
        Some(first) => Err(format!(
            "its byte-level vocabulary lacks tokens for {} bytes, the first of them 0x{first:02X}, which \
             would vanish from every text",
            missing.len()
        )),
    }
}

/// The bytes that UTF-8 text may have, each with the character that byte-level vocabularies write for
/// it (GPT-2's `bytes_to_unicode`): printable Latin-1 stands for itself, the others are the characters
/// from U+0100 on, in order. 0xC0, 0xC1 and those above 0xF4 occur in no text, and published
/// vocabularies need not have them.
fn stand_ins() -> impl Iterator<Item = (u8, char)> {
    let itself = |byte: u8| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let others = (0..=255u8).filter(move |byte| !itself(*byte)).zip('\u{100}'..);
    let all =
        (0..=255u8).filter(move |byte| itself(*byte)).map(|byte| (byte, char::from(byte))).chain(others);
    all.filter(|(byte, _)| !matches!(byte, 0xC0 | 0xC1 | 0xF5..=0xFF))
}

/// Checks ids from outside against the model's vocabulary size (of its configuration, which may be
/// larger than the tokenizer's).
///
/// # Errors
/// The first id out of range, with its position.
pub fn check_ids(ids: &[u32], vocab_size: usize) -> Result<(), TextError> {
    match ids.iter().position(|&id| id as usize >= vocab_size) {
        None => Ok(()),
        Some(position) => Err(TextError::IdOutOfRange { id: ids[position], position, vocab_size }),
    }
}

/// Runs a call into `tokenizers`, turning its panics into reasons.
///
/// That library panics on some malformed files (a merge shorter than `continuing_subword_prefix`, a
/// damaged `Precompiled` map), and which ones cannot be told beforehand without doing its work.
fn guarded<T>(call: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    // The library's values are dropped or only read after a panic, so no broken state is seen.
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => result,
        Err(payload) => {
            let message = payload
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| payload.downcast_ref::<&str>().copied())
                .unwrap_or("no message");
            Err(format!("the tokenizer library panicked ({message})"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The id of `<|user|>` in [`file`].
    const USER: u32 = 244;

    /// A tokenizer file around a byte-level model: all bytes, `ab` and a special token.
    fn file(extra: &str) -> String {
        let mut vocab = serde_json::Map::new();
        for (token, id) in [("a", 0), ("b", 1), ("ab", 2)] {
            vocab.insert(token.to_owned(), id.into());
        }
        for (_, stand_in) in stand_ins() {
            let next = vocab.len();
            vocab.entry(stand_in.to_string()).or_insert(next.into());
        }
        let vocab = serde_json::Value::from(vocab);
        format!(
            r#"{{"version":"1.0","truncation":{{"direction":"Right","max_length":1,"strategy":"LongestFirst","stride":0}},
            "padding":null,"added_tokens":[{{"id":{USER},"content":"<|user|>","single_word":false,"lstrip":false,
            "rstrip":false,"normalized":false,"special":true}}],"normalizer":null,
            "pre_tokenizer":{{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":false}},
            "post_processor":null,"decoder":{{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true}},
            "model":{{"type":"BPE","vocab":{vocab},"merges":["a b"]{extra}}}}}"#
        )
    }

    fn dir_with(text: &[u8]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), text).unwrap();
        dir
    }

    #[test]
    fn the_trainers_truncation_is_ignored() {
        let tokenizer = Tokenizer::from_bytes(file("").as_bytes()).unwrap();
        assert_eq!(tokenizer.encode("aba<|user|>b").unwrap(), [2, 0, USER, 1]);
    }

    #[test]
    fn an_absent_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let error = Tokenizer::from_dir(dir.path()).unwrap_err();
        assert!(error.to_string().contains("tokenizer.json"), "{error}");
    }

    #[test]
    fn entries_of_a_wrong_type_are_refused_with_the_file_named() {
        let good = file("");
        for bad in [
            "".to_owned(),
            "[]".to_owned(),
            "{".to_owned(),
            good.replace(r#""a":0"#, r#""a":"zero""#),
            good.replace(r#""a":0"#, r#""a":-1"#),
            good.replace(r#""a":0"#, r#"a":0"#),
            good.replace(r#"["a b"]"#, r#"[7]"#),
            good.replace(r#"["a b"]"#, r#"["a zz"]"#),
            good.replace(&format!(r#""id":{USER}"#), r#""id":"3""#),
            good.replace("BPE", "Nothing"),
        ] {
            let dir = dir_with(bad.as_bytes());
            let error = Tokenizer::from_dir(dir.path()).unwrap_err();
            assert!(matches!(error, TextError::Malformed { .. }), "{error}");
            assert!(error.to_string().contains("tokenizer.json"), "{error}");
        }
    }

    #[test]
    fn a_panic_in_the_library_is_an_error() {
        // The prefix is longer than the merged tokens, which the library subtracts unchecked.
        let hostile = file(r#","continuing_subword_prefix":"________________""#);
        let dir = dir_with(hostile.as_bytes());
        assert!(matches!(Tokenizer::from_dir(dir.path()), Err(TextError::Malformed { .. })));
    }

    #[test]
    fn a_special_token_is_recognised_right_after_punctuation() {
        let Some(dir) = super::super::demo_model() else {
            return;
        };
        let tokenizer = Tokenizer::from_dir(&dir).unwrap();
        let user = tokenizer.token_to_id("<|user|>").unwrap();
        for text in ["Hello!<|user|>", "Hello! \n<|user|>x", "(<|user|>)", "  <|user|>  "] {
            let ids = tokenizer.encode(text).unwrap();
            assert_eq!(ids.iter().filter(|&&id| id == user).count(), 1, "{text:?}");
            assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
        }
        assert!(tokenizer.is_special(user));
    }

    #[test]
    fn a_vocabulary_that_cannot_say_some_byte_is_refused_with_their_number() {
        let whole = file("");
        assert!(Tokenizer::from_bytes(whole.as_bytes()).is_ok());
        let mut json: serde_json::Value = serde_json::from_str(&whole).unwrap();
        let vocab = json["model"]["vocab"].as_object_mut().unwrap();
        vocab.remove("h");
        vocab.remove("Ġ");
        let error = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap_err();
        assert!(error.contains("2 bytes") && error.contains("0x"), "{error}");
        // One that is byte-level in a step of a sequence loses as much.
        let step = json["pre_tokenizer"].take();
        json["decoder"].take();
        assert!(Tokenizer::from_bytes(json.to_string().as_bytes()).is_ok(), "no part is byte-level");
        json["pre_tokenizer"] = serde_json::json!({"type": "Sequence", "pretokenizers": [step]});
        assert!(Tokenizer::from_bytes(json.to_string().as_bytes()).is_err());
        // An unknown token shows what was lost.
        json["model"]["unk_token"] = "a".into();
        assert!(Tokenizer::from_bytes(json.to_string().as_bytes()).is_ok());
    }

    #[test]
    fn a_vocabulary_that_says_every_byte_loses_no_text() {
        let tokenizer = Tokenizer::from_bytes(file("").as_bytes()).unwrap();
        proptest!(|(text in any::<String>())| {
            let ids = tokenizer.encode(&text).unwrap();
            prop_assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
        });
    }

    #[test]
    fn a_tokenizer_with_ids_beyond_the_model_is_refused() {
        let tokenizer = Tokenizer::from_bytes(file("").as_bytes()).unwrap();
        let size = tokenizer.vocab_size();
        assert!(tokenizer.check_vocab(size).is_ok());
        assert!(tokenizer.check_vocab(size + 64).is_ok(), "a model's vocabulary may be padded");
        let error = tokenizer.check_vocab(size - 1).unwrap_err();
        assert!(error.to_string().contains("tokenizer.json has the id"), "{error}");
    }

    #[test]
    fn ids_are_checked_against_the_vocabulary() {
        assert!(check_ids(&[0, 9], 10).is_ok());
        let error = check_ids(&[0, 10], 10).unwrap_err();
        assert!(matches!(error, TextError::IdOutOfRange { id: 10, position: 1, vocab_size: 10 }));
    }

    proptest! {
        #[test]
        fn a_damaged_file_never_panics(at: usize, byte: u8, text in "[ab<|user>]{0,12}") {
            let mut bytes = file("").into_bytes();
            let at = at % bytes.len();
            bytes[at] = byte;
            if let Ok(tokenizer) = Tokenizer::from_bytes(&bytes) {
                let _ = tokenizer.encode(&text).map(|ids| tokenizer.decode(&ids, true));
            }
        }
    }

    #[test]
    fn text_survives_the_way_to_ids_and_back() {
        let Some(dir) = super::super::demo_model() else {
            return;
        };
        let tokenizer = Tokenizer::from_dir(&dir).unwrap();
        proptest!(|(text in "\\PC{0,40}")| {
            let ids = tokenizer.encode(&text).unwrap();
            prop_assert!(check_ids(&ids, tokenizer.vocab_size()).is_ok());
            prop_assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
        });
    }
}
