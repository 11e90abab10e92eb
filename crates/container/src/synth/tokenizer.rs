//! A byte-level tokenizer that needs no training: id = byte, then GLM's special tokens.

use serde_json::{Map, Value, json};

/// Special tokens; the first has id 256.
const SPECIALS: [&str; 9] = [
    "<|endoftext|>",
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<think>",
    "</think>",
];

/// Id of `<|endoftext|>`, which also pads.
pub(super) const PAD: u32 = 256;

/// Ids that end an answer: `<|endoftext|>`, `<|user|>`, `<|observation|>`.
pub(super) const ASSISTANT_STOPS: [u32; 3] = [256, 260, 262];

/// GLM's shape of a conversation.
pub(super) const CHAT_TEMPLATE: &str = "[gMASK]<sop>\
{%- for m in messages -%}\
{%- if m.role == 'system' -%}<|system|>{{ m.content }}\
{%- elif m.role == 'user' -%}<|user|>{{ m.content }}\
{%- elif m.role == 'assistant' -%}<|assistant|><think></think>{{ m.content }}\
{%- endif -%}\
{%- endfor -%}\
{%- if add_generation_prompt -%}<|assistant|><think></think>{%- endif -%}";

/// The printable stand-in that byte-level tokenizers use for each byte: printable Latin-1
/// stands for itself, the other 68 bytes are the characters from U+0100 on, in order.
fn stand_ins() -> Vec<char> {
    let mut next = 0x100u32;
    (0u8..=255)
        .map(|byte| match byte {
            0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
            _ => {
                next += 1;
                char::from_u32(next - 1).unwrap_or(char::REPLACEMENT_CHARACTER)
            }
        })
        .collect()
}

/// `tokenizer.json`.
pub(super) fn tokenizer_json() -> Value {
    let vocab: Map<String, Value> =
        stand_ins().into_iter().zip(0u32..).map(|(c, id)| (c.to_string(), id.into())).collect();
    let added: Vec<Value> = SPECIALS
        .iter()
        .zip(256u32..)
        .map(|(content, id)| {
            json!({"id": id, "content": content, "single_word": false, "lstrip": false,
                   "rstrip": false, "normalized": false, "special": true})
        })
        .collect();
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                  "ignore_merges": false, "vocab": vocab, "merges": []},
    })
}

/// Every token in the order of ids, and whether it is a special one.
pub(super) fn tokens() -> impl Iterator<Item = (String, bool)> {
    let bytes = stand_ins().into_iter().map(|c| (c.to_string(), false));
    bytes.chain(SPECIALS.iter().map(|special| ((*special).to_owned(), true)))
}

/// `tokenizer_config.json`, with a chat template in GLM's shape.
pub(super) fn tokenizer_config() -> Value {
    json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": CHAT_TEMPLATE,
        "eos_token": SPECIALS[0],
        "pad_token": SPECIALS[0],
        "model_max_length": 4096,
        "clean_up_tokenization_spaces": false,
    })
}

/// `generation_config.json`.
pub(super) fn generation_config() -> Value {
    json!({"eos_token_id": ASSISTANT_STOPS, "pad_token_id": PAD, "do_sample": true, "temperature": 0.7, "top_p": 0.9})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_own_stand_in_and_id() {
        let chars = stand_ins();
        assert_eq!(chars.len(), 256);
        assert_eq!((chars[usize::from(b'a')], chars[usize::from(b' ')], chars[0]), ('a', 'Ġ', 'Ā'));
        let tokenizer = tokenizer_json();
        let vocab = tokenizer["model"]["vocab"].as_object().unwrap();
        assert_eq!(vocab.len(), 256);
        assert_eq!(vocab["a"], 97);
        assert_eq!(tokenizer["added_tokens"][4]["id"], ASSISTANT_STOPS[1]);
        assert_eq!(tokenizer["added_tokens"][4]["content"], "<|user|>");
    }
}
