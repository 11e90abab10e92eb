//! Pre-tokenizers by the name that `tokenizer.ggml.pre` has for them, as parts of a `tokenizer.json`.
//!
//! The expressions are those of the `tokenizer.json` that the models were published with.

use serde_json::{Value, json};

/// Letters, then up to three digits at a time.
const THREE_DIGITS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Letters, then digits one at a time.
const ONE_DIGIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// The same with combining marks among the letters.
const MARKS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Words split where lower case turns into upper case.
const CASES: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// DeepSeek-V3: digits first, then runs of Han and kana, then the rest.
const DEEPSEEK: [&str; 3] = [
    r"\p{N}{1,3}",
    "[一-龥\u{3040}-ゟ゠-ヿ]+",
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
];

/// The `pre_tokenizer` of a byte-level vocabulary; `None` for a name that is not known.
pub(super) fn byte_level(name: &str) -> Option<Value> {
    Some(match name {
        // These split as GPT-2 does, which the step itself knows.
        "gpt-2" | "default" | "olmo" => {
            return Some(
                json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}),
            );
        }
        "llama-bpe" | "llama3" | "llama-v3" | "glm4" | "chatglm-bpe" => splits(&[THREE_DIGITS]),
        "qwen2" | "deepseek-r1-qwen" => splits(&[ONE_DIGIT]),
        "qwen35" => splits(&[MARKS]),
        "gpt-4o" | "minimax-m2" => splits(&[CASES]),
        "deepseek-v3" => splits(&DEEPSEEK),
        _ => return None,
    })
}

/// Splits by each expression in turn, then bytes shown as characters.
fn splits(patterns: &[&str]) -> Value {
    let split = |pattern: &&str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let steps: Vec<Value> = patterns.iter().map(split).chain([bytes]).collect();
    json!({"type": "Sequence", "pretokenizers": steps})
}
