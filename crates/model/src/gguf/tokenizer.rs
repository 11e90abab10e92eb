//! The tokenizer and chat template in the metadata, as `tokenizer.json` and `tokenizer_config.json`.

use std::collections::HashMap;

use metaltail_container::gguf::{Array, Gguf, Scalar, Scalars, Strings};
use serde_json::{Map, Value, json};

use super::pretokenizers;

/// Kinds of `tokenizer.ggml.token_type`.
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;
const BYTE: u64 = 6;
/// Longest token of a SentencePiece vocabulary that is taken, in bytes.
const TOKEN_BYTES: usize = 512;
/// Most pairs that its tokens may be made of, in the mean.
const PAIRS: usize = 32;
/// What stands for a space at the beginning of a word in a SentencePiece vocabulary.
const SPACE: &str = "\u{2581}";

/// The text part of a model, as files of a Hugging Face checkpoint.
pub(crate) struct TextFiles {
    pub tokenizer: Value,
    pub config: Value,
}

impl TextFiles {
    /// Those of a GGUF model; `None` where it has no tokenizer.
    pub(crate) fn of(gguf: &Gguf) -> Result<Option<TextFiles>, String> {
        let tokenizer = tokenizer(gguf)?;
        tokenizer.map(|tokenizer| Ok(TextFiles { tokenizer, config: config(gguf)? })).transpose()
    }
}

/// `tokenizer_config.json`: special tokens by name, and the chat template.
pub(crate) fn config(gguf: &Gguf) -> Result<Value, String> {
    let mut config = Map::new();
    if let Some(Array::Strings(tokens)) = gguf.get("tokenizer.ggml.tokens").and_then(|value| value.as_array())
    {
        let names =
            [("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token"), ("padding", "pad_token")];
        for (key, name) in names {
            let id = gguf.get(&format!("tokenizer.ggml.{key}_token_id")).and_then(|id| id.as_u64());
            let token = id.and_then(|id| tokens.get(usize::try_from(id).ok()?));
            if let Some(token) = token {
                config.insert(name.into(), String::from_utf8_lossy(token).into());
            }
        }
    }
    if let Some(template) = gguf.get("tokenizer.chat_template") {
        let text = template.as_str().ok_or("tokenizer.chat_template is no text in UTF-8")?;
        config.insert("chat_template".into(), text.into());
    }
    Ok(Value::Object(config))
}

/// `tokenizer.json`; `None` where there is no tokenizer.
pub(crate) fn tokenizer(gguf: &Gguf) -> Result<Option<Value>, String> {
    let Some(model) = gguf.get("tokenizer.ggml.model") else { return Ok(None) };
    let model = model.as_str().ok_or("tokenizer.ggml.model is no text")?;
    match model {
        "none" | "no_vocab" => Ok(None),
        "gpt2" => byte_level(gguf).map(Some),
        "llama" => sentence_piece(gguf).map(Some),
        other => Err(format!("its tokenizer is of the kind {other:?}, known are \"gpt2\" and \"llama\"")),
    }
}

/// Tokens with their kinds, every one in UTF-8.
struct Vocabulary<'a> {
    tokens: Vec<&'a str>,
    kinds: Option<&'a Scalars>,
}

impl<'a> Vocabulary<'a> {
    fn of(gguf: &'a Gguf) -> Result<Vocabulary<'a>, String> {
        let stored = strings(gguf, "tokenizer.ggml.tokens")?.ok_or("there is no tokenizer.ggml.tokens")?;
        let text = |(id, token): (usize, &'a [u8])| {
            std::str::from_utf8(token).map_err(|_| format!("token {id} is not UTF-8"))
        };
        let tokens: Vec<&str> = stored.iter().enumerate().map(text).collect::<Result<_, _>>()?;
        let kinds = scalars(gguf, "tokenizer.ggml.token_type")?;
        match kinds {
            Some(kinds) if kinds.len() != tokens.len() => {
                Err(format!("there are {} tokens with {} kinds", tokens.len(), kinds.len()))
            }
            _ => Ok(Vocabulary { tokens, kinds }),
        }
    }

    fn kind(&self, id: usize) -> u64 {
        self.kinds.and_then(|kinds| kinds.get(id)?.as_u64()).unwrap_or(1)
    }

    /// Token to id; of a token that is there twice the first.
    fn ids(&self) -> HashMap<&'a str, usize> {
        let mut ids = HashMap::with_capacity(self.tokens.len());
        for (id, token) in self.tokens.iter().enumerate() {
            ids.entry(*token).or_insert(id);
        }
        ids
    }

    /// Tokens that are found in a text before it is split.
    fn added(&self) -> Vec<Value> {
        let added = self.tokens.iter().enumerate().filter_map(|(id, token)| {
            let special = match self.kind(id) {
                CONTROL => true,
                USER_DEFINED => false,
                _ => return None,
            };
            let flags = json!({"single_word": false, "lstrip": false, "rstrip": false, "normalized": false});
            let mut token = json!({"id": id, "content": token, "special": special});
            if let (Value::Object(token), Value::Object(flags)) = (&mut token, flags) {
                token.extend(flags);
            }
            Some(token)
        });
        added.collect()
    }

    /// A BPE model of these tokens.
    fn bpe(&self, merges: Vec<Value>, byte_fallback: bool, unknown: Option<&str>) -> Value {
        let ids = self.ids();
        let vocab: Map<String, Value> =
            ids.iter().map(|(token, id)| ((*token).to_owned(), (*id).into())).collect();
        json!({
            "type": "BPE", "dropout": null, "unk_token": unknown, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": byte_fallback, "byte_fallback": byte_fallback,
            "ignore_merges": false, "vocab": vocab, "merges": merges
        })
    }
}

/// GPT-2's form: bytes shown as characters, merges in order, a pre-tokenizer by name.
fn byte_level(gguf: &Gguf) -> Result<Value, String> {
    let vocabulary = Vocabulary::of(gguf)?;
    let name = match gguf.get("tokenizer.ggml.pre") {
        None => "default",
        Some(name) => name.as_str().ok_or("tokenizer.ggml.pre is no text")?,
    };
    let pre = pretokenizers::byte_level(name)
        .ok_or_else(|| format!("its pre-tokenizer {name:?} is not known; token ids (`--ids`) go without"))?;
    let stored = strings(gguf, "tokenizer.ggml.merges")?.ok_or("there is no tokenizer.ggml.merges")?;
    let merge = |(number, merge): (usize, &[u8])| {
        let text = std::str::from_utf8(merge).ok();
        // A pair is joined by one space; a token of it may begin with no space itself.
        let pair = text.and_then(|text| text.split_once(' '));
        pair.map(|(left, right)| json!([left, right]))
            .ok_or_else(|| format!("merge {number} is no pair of tokens"))
    };
    let merges = stored.iter().enumerate().map(merge).collect::<Result<Vec<_>, _>>()?;
    Ok(json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": vocabulary.added(),
        "normalizer": null, "pre_tokenizer": pre, "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": vocabulary.bpe(merges, false, None)
    }))
}

/// SentencePiece's BPE: of two neighbours those are joined first whose union has the highest score.
fn sentence_piece(gguf: &Gguf) -> Result<Value, String> {
    let vocabulary = Vocabulary::of(gguf)?;
    let scores = scalars(gguf, "tokenizer.ggml.scores")?.ok_or("there is no tokenizer.ggml.scores")?;
    if scores.len() != vocabulary.tokens.len() {
        return Err(format!("there are {} tokens with {} scores", vocabulary.tokens.len(), scores.len()));
    }
    let score = |id: usize| match scores.get(id) {
        Some(Scalar::F32(score)) => f64::from(score),
        Some(Scalar::F64(score)) => score,
        _ => 0.0,
    };
    let ids = vocabulary.ids();
    // Real vocabularies have some five pairs a token; the text of each is kept.
    let most = vocabulary.tokens.len().saturating_mul(PAIRS);
    let mut pairs: Vec<(usize, &str, &str)> = Vec::new();
    for (id, token) in vocabulary.tokens.iter().enumerate() {
        if matches!(vocabulary.kind(id), CONTROL | BYTE) {
            continue;
        }
        if token.len() > TOKEN_BYTES || pairs.len() > most {
            return Err(format!("token {id} of {} bytes is in no vocabulary of this kind", token.len()));
        }
        let splits = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
        pairs.extend(
            splits.filter(|(l, r)| ids.contains_key(l) && ids.contains_key(r)).map(|(l, r)| (id, l, r)),
        );
    }
    pairs.sort_by(|a, b| score(b.0).total_cmp(&score(a.0)).then(a.0.cmp(&b.0)));
    let merges = pairs.into_iter().map(|(_, left, right)| json!([left, right])).collect();
    let unknown = gguf.get("tokenizer.ggml.unknown_token_id").and_then(|id| id.as_u64()).unwrap_or(0);
    let unknown = usize::try_from(unknown).ok().and_then(|id| vocabulary.tokens.get(id).copied());
    let prefix = !matches!(
        gguf.get("tokenizer.ggml.add_space_prefix"),
        Some(metaltail_container::gguf::Value::Scalar(Scalar::Bool(false)))
    );
    let replace = json!({"type": "Replace", "pattern": {"String": " "}, "content": SPACE});
    let mut normalizers = vec![replace];
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": SPACE}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if prefix {
        normalizers.insert(0, json!({"type": "Prepend", "prepend": SPACE}));
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    Ok(json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": vocabulary.added(),
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": null, "post_processor": null,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": vocabulary.bpe(merges, true, unknown)
    }))
}

fn strings<'a>(gguf: &'a Gguf, key: &str) -> Result<Option<&'a Strings>, String> {
    match gguf.get(key) {
        None => Ok(None),
        Some(value) => match value.as_array() {
            Some(Array::Strings(strings)) => Ok(Some(strings)),
            _ => Err(format!("{key} is no array of strings")),
        },
    }
}

fn scalars<'a>(gguf: &'a Gguf, key: &str) -> Result<Option<&'a Scalars>, String> {
    match gguf.get(key) {
        None => Ok(None),
        Some(value) => match value.as_array() {
            Some(Array::Scalars(scalars)) => Ok(Some(scalars)),
            _ => Err(format!("{key} is no array of numbers")),
        },
    }
}
