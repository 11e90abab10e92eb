//! The tokenizer of a model directory.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;

use super::{TextError, read_limited};

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

    /// Parses the text of a `tokenizer.json`.
    ///
    /// # Errors
    /// A reason without the file's name, whatever the bytes are.
    pub fn from_bytes(bytes: &[u8]) -> Result<Tokenizer, String> {
        let mut json: serde_json::Value = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        let fields = json.as_object_mut().ok_or("the top level must be an object")?;
        // A file may carry its trainer's truncation (a prompt cut without a word), padding and a
        // post-processor (ids added that the text does not have). None of them is wanted here.
        for unwanted in ["truncation", "padding", "post_processor"] {
            fields.insert(unwanted.to_owned(), serde_json::Value::Null);
        }
        let inner: tokenizers::Tokenizer =
            guarded(|| serde_json::from_value(json).map_err(|error: serde_json::Error| error.to_string()))?;
        let largest = inner.get_vocab(true).into_values().max();
        let vocab_size = match largest {
            Some(id) => id as usize + 1,
            None => return Err("the vocabulary is empty".to_owned()),
        };
        Ok(Tokenizer { inner: Arc::new(inner), vocab_size })
    }

    /// One more than the largest id of the vocabulary, added tokens included.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
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

    /// A tokenizer file around a byte-level model of few tokens.
    fn file(extra: &str) -> String {
        format!(
            r#"{{"version":"1.0","truncation":{{"direction":"Right","max_length":1,"strategy":"LongestFirst","stride":0}},
            "padding":null,"added_tokens":[{{"id":3,"content":"<|user|>","single_word":false,"lstrip":false,
            "rstrip":false,"normalized":false,"special":true}}],"normalizer":null,
            "pre_tokenizer":{{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":false}},
            "post_processor":null,"decoder":{{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true}},
            "model":{{"type":"BPE","vocab":{{"a":0,"b":1,"ab":2}},"merges":["a b"]{extra}}}}}"#
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
        assert_eq!(tokenizer.encode("aba<|user|>b").unwrap(), [2, 0, 3, 1]);
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
            good.replace(r#"["a b"]"#, r#"["a z"]"#),
            good.replace(r#""id":3"#, r#""id":"3""#),
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
    fn ids_are_checked_against_the_vocabulary() {
        assert!(check_ids(&[0, 9], 10).is_ok());
        let error = check_ids(&[0, 10], 10).unwrap_err();
        assert!(matches!(error, TextError::IdOutOfRange { id: 10, position: 1, vocab_size: 10 }));
    }

    proptest! {
        #[test]
        fn a_damaged_file_never_panics(at in 0usize..900, byte: u8, text in "[ab<|user>]{0,12}") {
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
