//! Tokenizer and chat template from GGUF metadata, held against the same model's own files.

use std::fs;
use std::path::{Path, PathBuf};

use metaltail_container::Checkpoint;
use metaltail_container::gguf::{
    Array, GgufPlan, GgufTensorSpec, Scalars, Strings, TensorType, Text, Value, ValueKind,
};
use metaltail_model::text::{ChatTemplate, Tokenizer, message};
use serde_json::{Map, Value as Json};

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/hummingbird-56m")
}

fn text(value: &str) -> Value {
    Value::String(Text(value.as_bytes().into()))
}

fn strings(items: &[String]) -> Value {
    let mut strings = Strings::default();
    items.iter().for_each(|item| strings.push(item.as_bytes()));
    Value::Array(Array::Strings(strings))
}

fn numbers(kind: ValueKind, items: &[[u8; 4]]) -> Value {
    Value::Array(Array::Scalars(Scalars::new(kind, items.concat()).unwrap()))
}

/// A file with this tokenizer and no model.
fn open(keys: Vec<(&str, Value)>) -> (tempfile::TempDir, Checkpoint) {
    let mut metadata = vec![("general.architecture".to_owned(), text("olmoe"))];
    metadata.extend(keys.into_iter().map(|(key, value)| (format!("tokenizer.{key}"), value)));
    let kind = TensorType::all().find(|kind| kind.name() == "F32").unwrap();
    let spec = GgufTensorSpec { name: "output_norm.weight".into(), kind, dims: vec![8] };
    let plan = GgufPlan::new(&metadata, &[spec]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    fs::write(&path, [plan.header(), &[0; 32]].concat()).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    (dir, checkpoint)
}

/// The demo model's tokenizer as llama.cpp's conversion writes one.
fn demo_keys(pre: &str) -> Vec<(&'static str, Value)> {
    let json: Json = serde_json::from_slice(&fs::read(demo().join("tokenizer.json")).unwrap()).unwrap();
    let vocab = json["model"]["vocab"].as_object().unwrap();
    let mut tokens: Vec<(u64, String, u32)> =
        vocab.iter().map(|(token, id)| (id.as_u64().unwrap(), token.clone(), 1)).collect();
    for added in json["added_tokens"].as_array().unwrap() {
        let id = added["id"].as_u64().unwrap();
        tokens.retain(|(known, ..)| *known != id);
        let kind = if added["special"] == true { 3 } else { 4 };
        tokens.push((id, added["content"].as_str().unwrap().to_owned(), kind));
    }
    tokens.sort();
    assert!(tokens.iter().enumerate().all(|(at, (id, ..))| at as u64 == *id));
    let pair = |merge: &Json| match merge {
        Json::String(pair) => pair.clone(),
        pair => format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()),
    };
    let merges: Vec<String> = json["model"]["merges"].as_array().unwrap().iter().map(pair).collect();
    let config = fs::read(demo().join("tokenizer_config.json")).unwrap();
    let config: Json = serde_json::from_slice(&config).unwrap();
    let template = config["chat_template"].as_str().unwrap();
    let kinds: Vec<[u8; 4]> = tokens.iter().map(|(.., kind)| kind.to_le_bytes()).collect();
    let texts: Vec<String> = tokens.into_iter().map(|(_, token, _)| token).collect();
    vec![
        ("ggml.model", text("gpt2")),
        ("ggml.pre", text(pre)),
        ("ggml.tokens", strings(&texts)),
        ("ggml.token_type", numbers(ValueKind::I32, &kinds)),
        ("ggml.merges", strings(&merges)),
        ("chat_template", text(template)),
    ]
}

/// T25 among them: special tokens after punctuation, runs of white space.
const TEXTS: [&str; 14] = [
    "",
    "Define \"hummingbird\".",
    "a.<|user|>b <|assistant|>",
    "trailing   \n\n  spaces \t\t ",
    "1234567 12 3.14159 １２３",
    "don't WE'LL they'Re",
    "naïve café über 東京 привет мир",
    "👩‍👩‍👧‍👦 emoji 🦜",
    "\u{0000}\u{00ad}\u{200b}",
    "fn main() { println!(\"{}\", x[0]); }\r\n",
    "[gMASK]<sop>x",
    "    indented\n\tcode",
    "ﬁ e\u{301} \u{1F1E9}\u{1F1EA}",
    "<|endoftext|><|endoftext|>",
];

#[test]
fn byte_level_ids_are_those_of_the_models_own_tokenizer() {
    let (_dir, checkpoint) = open(demo_keys("glm4"));
    let from_file = Tokenizer::of(&checkpoint).unwrap().unwrap();
    let own = Tokenizer::from_dir(&demo()).unwrap();
    assert_eq!(from_file.vocab_size(), own.vocab_size());
    for text in TEXTS {
        let ids = from_file.encode(text).unwrap();
        assert_eq!(ids, own.encode(text).unwrap(), "{text:?}");
        assert_eq!(from_file.decode(&ids, false).unwrap(), text);
    }
    assert!(from_file.is_special(from_file.token_to_id("<|user|>").unwrap()));
}

#[test]
fn the_template_renders_what_the_models_own_does() {
    let (_dir, checkpoint) = open(demo_keys("glm4"));
    let conversation = [message("user", "Hello"), message("assistant", "Hi."), message("user", "Bye")];
    let [from_file, own] = [ChatTemplate::of(&checkpoint), ChatTemplate::from_dir(&demo())]
        .map(|template| template.unwrap().unwrap().render(&conversation, true, &Map::new()).unwrap());
    assert_eq!(from_file, own);
    assert!(own.contains("<|user|>"), "{own}");
}

#[test]
fn an_unknown_pre_tokenizer_is_named() {
    let (_dir, checkpoint) = open(demo_keys("tekken"));
    let error = Tokenizer::of(&checkpoint).unwrap_err().to_string();
    assert!(error.contains("\"tekken\"") && error.contains("--ids"), "{error}");
}

/// A vocabulary whose merges would take memory without bound.
#[test]
fn tokens_of_no_real_vocabulary_are_refused() {
    let tokens: Vec<String> = (1..700).map(|len| "a".repeat(len)).collect();
    let scores = vec![0f32.to_le_bytes(); tokens.len()];
    let (_dir, checkpoint) = open(vec![
        ("ggml.model", text("llama")),
        ("ggml.tokens", strings(&tokens)),
        ("ggml.scores", numbers(ValueKind::F32, &scores)),
    ]);
    let error = Tokenizer::of(&checkpoint).unwrap_err().to_string();
    assert!(error.contains("in no vocabulary of this kind"), "{error}");
}

/// Of two neighbours those are joined first whose union has the highest score; a character that is in no token is
/// spelt by its bytes; a space stands before a text.
#[test]
fn sentence_piece_joins_by_score_and_spells_bytes() {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(str::to_owned).to_vec();
    tokens.extend((0..=255u8).map(|byte| format!("<0x{byte:02X}>")));
    let pieces = [
        ("\u{2581}a", -1.0),
        ("ab", -2.0),
        ("bc", -0.5),
        ("\u{2581}", -9.0),
        ("a", -9.0),
        ("b", -9.0),
        ("c", -9.0),
    ];
    let first = tokens.len() as u32;
    tokens.extend(pieces.iter().map(|(piece, _)| (*piece).to_owned()));
    let mut scores = vec![0f32.to_le_bytes(); first as usize];
    scores.extend(pieces.iter().map(|(_, score)| f32::to_le_bytes(*score)));
    let kinds: Vec<[u8; 4]> = (0..tokens.len() as u32)
        .map(|id| {
            (if id == 0 {
                2u32
            } else if id < 3 {
                3
            } else if id < first {
                6
            } else {
                1
            })
            .to_le_bytes()
        })
        .collect();
    let (_dir, checkpoint) = open(vec![
        ("ggml.model", text("llama")),
        ("ggml.tokens", strings(&tokens)),
        ("ggml.scores", numbers(ValueKind::F32, &scores)),
        ("ggml.token_type", numbers(ValueKind::I32, &kinds)),
    ]);
    let tokenizer = Tokenizer::of(&checkpoint).unwrap().unwrap();
    let id = |token: &str| tokenizer.token_to_id(token).unwrap();
    // bc is joined before ▁a, and ab never.
    assert_eq!(tokenizer.encode("abc").unwrap(), [id("\u{2581}a"), id("bc")]);
    let spelt = ["\u{2581}", "<0xC3>", "<0xA9>"].map(id);
    assert_eq!(tokenizer.encode("é").unwrap(), spelt);
    assert_eq!(tokenizer.decode(&spelt, true).unwrap(), "é");
    assert_eq!(tokenizer.encode("</s>").unwrap(), [2]);
}
