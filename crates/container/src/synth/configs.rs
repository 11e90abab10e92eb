//! Configurations of synthetic models, as data in Hugging Face key names.
//!
//! The sizes of GLM-5.2, OLMoE, Qwen3-30B-A3B, Qwen3.5-35B-A3B, DeepSeek-V3 and gpt-oss-120b are the published
//! ones.

use std::fmt;
use std::str::FromStr;

use serde_json::{Map, Value, json};
use thiserror::Error;

use super::tokenizer::{ASSISTANT_STOPS, PAD};
use crate::slab_writer::WriteError;

/// Which model a synthetic one resembles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Like {
    /// 1 dense and 3 sparse layers of width 64, 8 experts, a draft layer: for tests.
    Tiny,
    /// 256 experts a layer of width 64: router, accounting, planner.
    Wide,
    /// 8 layers × 64 experts × 2 MiB, 1 GiB: I/O, eviction, budget.
    Fat,
    /// GLM-5.2.
    Glm52,
    /// OLMoE-1B-7B.
    Olmoe,
    /// Qwen3-30B-A3B.
    Qwen3Moe,
    /// DeepSeek-V3.
    DeepseekV3,
    /// gpt-oss-120b.
    GptOss,
    /// Qwen3.5-35B-A3B.
    Qwen35Moe,
}

impl Like {
    /// All of them.
    pub const ALL: [Like; 9] = [
        Like::Tiny,
        Like::Wide,
        Like::Fat,
        Like::Glm52,
        Like::Olmoe,
        Like::Qwen3Moe,
        Like::DeepseekV3,
        Like::GptOss,
        Like::Qwen35Moe,
    ];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Like::Tiny => "tiny",
            Like::Wide => "wide",
            Like::Fat => "fat",
            Like::Glm52 => "glm-5.2",
            Like::Olmoe => "olmoe",
            Like::Qwen3Moe => "qwen3-moe",
            Like::DeepseekV3 => "deepseek-v3",
            Like::GptOss => "gpt-oss",
            Like::Qwen35Moe => "qwen3.5-moe",
        }
    }

    /// Whether the vocabulary is the 256 bytes and a few specials and nothing more.
    fn made_up(self) -> bool {
        matches!(self, Like::Tiny | Like::Wide | Like::Fat)
    }
}

impl fmt::Display for Like {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that no synthetic model has.
#[derive(Debug, Error, PartialEq, Eq)]
#[error(
    "unknown synthetic model {0:?}: expected tiny, wide, fat, glm-5.2, olmoe, qwen3-moe, deepseek-v3, gpt-oss or qwen3.5-moe"
)]
pub struct ParseLikeError(pub String);

impl FromStr for Like {
    type Err = ParseLikeError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Like::ALL.into_iter().find(|l| l.name() == name).ok_or_else(|| ParseLikeError(name.to_owned()))
    }
}

/// Rows of the embedding of the made-up models: 256 bytes, 9 specials, rounded up to a multiple of 16.
const BYTE_VOCABULARY: u32 = 272;

/// The `config.json` of a synthetic model, with another number of layers or experts if given.
///
/// # Errors
/// A number out of range: 1 to 128 layers, 1 to 4096 experts.
pub fn config(like: Like, layers: Option<u32>, experts: Option<u32>) -> Result<Value, WriteError> {
    check("layers", layers, 128)?;
    check("experts", experts, 4096)?;
    let mut config = match like {
        Like::Tiny => tiny(),
        Like::Wide => wide(),
        Like::Fat => fat(),
        Like::Glm52 => glm_5_2(),
        Like::Olmoe => olmoe(),
        Like::Qwen3Moe => qwen3_moe(),
        Like::DeepseekV3 => deepseek_v3(),
        Like::GptOss => gpt_oss(),
        Like::Qwen35Moe => qwen3_5_moe(),
    };
    if like.made_up() {
        config.insert("vocab_size".to_owned(), BYTE_VOCABULARY.into());
    }
    for (key, value) in common() {
        config.entry(key).or_insert(value);
    }
    if let Some(layers) = layers {
        set_layers(&mut config, layers);
    }
    if let Some(experts) = experts {
        set_experts(&mut config, experts);
    }
    Ok(Value::Object(config))
}

fn check(what: &str, asked: Option<u32>, most: u32) -> Result<(), WriteError> {
    match asked {
        Some(n) if n == 0 || n > most => {
            Err(WriteError::Synth(format!("{what}: wanted 1 to {most}, got {n}")))
        }
        _ => Ok(()),
    }
}

/// Reads a number that the tables below hold.
fn number(config: &Map<String, Value>, key: &str) -> Option<u32> {
    config.get(key)?.as_u64()?.try_into().ok()
}

/// Which layers own an indexer: `indexer_types[i]` is full where max(0, i − offset + 1) mod freq = 0.
fn indexer_types(layers: u32, freq: u32, offset: u32) -> Value {
    let full = |i: u32| (i + 1).saturating_sub(offset).is_multiple_of(freq);
    (0..layers).map(|i| if full(i) { "full" } else { "shared" }).collect()
}

/// Windows in every other layer, from the first on.
fn layer_types(layers: u32) -> Value {
    let slides = |i: u32| i.is_multiple_of(2);
    (0..layers).map(|i| if slides(i) { "sliding_attention" } else { "full_attention" }).collect()
}

fn set_layers(config: &mut Map<String, Value>, layers: u32) {
    config.insert("num_hidden_layers".to_owned(), layers.into());
    let freq = number(config, "index_topk_freq");
    if let (Some(freq), Some(offset)) = (freq, number(config, "index_skip_topk_offset")) {
        config.insert("indexer_types".to_owned(), indexer_types(layers, freq, offset));
    }
    if config.contains_key("layer_types") {
        config.insert("layer_types".to_owned(), layer_types(layers));
    }
    if let Some(dense) = number(config, "first_k_dense_replace") {
        config.insert("first_k_dense_replace".to_owned(), dense.min(layers).into());
    }
}

fn set_experts(config: &mut Map<String, Value>, experts: u32) {
    let known = ["num_experts", "num_local_experts"].into_iter().find(|key| config.contains_key(*key));
    let key = known.unwrap_or("n_routed_experts");
    config.insert(key.to_owned(), experts.into());
    let chosen = number(config, "num_experts_per_tok").unwrap_or(1).min(experts);
    config.insert("num_experts_per_tok".to_owned(), chosen.into());
    if let (Some(groups), Some(kept)) = (number(config, "n_group"), number(config, "topk_group")) {
        // A group's score is the sum of its two best, and the kept groups must hold the chosen experts.
        let size = experts / groups;
        if !experts.is_multiple_of(groups) || size < 2 || size * kept < chosen {
            config.insert("n_group".to_owned(), 1.into());
            config.insert("topk_group".to_owned(), 1.into());
        }
    }
}

/// A JSON object from `json!`.
fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(map) => map,
        _ => Map::new(),
    }
}

/// Keys that every configuration has unless its table says otherwise.
fn common() -> Map<String, Value> {
    object(json!({
        "hidden_act": "silu",
        "tie_word_embeddings": false,
        "attention_bias": false,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        "bos_token_id": null,
        "pad_token_id": PAD,
        "eos_token_id": ASSISTANT_STOPS,
    }))
}

/// `glm_moe_dsa` keys shared by the made-up models.
fn glm_small() -> Map<String, Value> {
    object(json!({
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_nextn_predict_layers": 0,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": true,
        "routed_scaling_factor": 2.5,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "index_topk": 64,
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk_freq": 2,
        "index_skip_topk_offset": 1,
        "indexer_types": indexer_types(4, 2, 1),
        "rope_interleave": true,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "max_position_embeddings": 4096,
    }))
}

fn with(mut base: Map<String, Value>, changes: Value) -> Map<String, Value> {
    base.extend(object(changes));
    base
}

fn tiny() -> Map<String, Value> {
    // Expert width 96 differs from hidden, so a swapped shape cannot pass.
    with(glm_small(), json!({"moe_intermediate_size": 96, "num_nextn_predict_layers": 1}))
}

fn wide() -> Map<String, Value> {
    with(glm_small(), json!({"n_routed_experts": 256, "num_experts_per_tok": 8}))
}

/// One expert in int4-g64 takes 3 · 192 · 6464 · 0.5625 = 2,094,336 bytes, 2 MiB in whole pages.
fn fat() -> Map<String, Value> {
    with(
        glm_small(),
        json!({
            "hidden_size": 192,
            "intermediate_size": 512,
            "moe_intermediate_size": 6464,
            "num_hidden_layers": 8,
            "first_k_dense_replace": 0,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "q_lora_rank": 96,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "index_topk": 256,
            "indexer_types": indexer_types(8, 2, 1),
        }),
    )
}

fn glm_5_2() -> Map<String, Value> {
    with(
        glm_small(),
        json!({
            "hidden_size": 6144,
            "intermediate_size": 12288,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 78,
            "num_nextn_predict_layers": 1,
            "first_k_dense_replace": 3,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "num_attention_heads": 64,
            "num_key_value_heads": 64,
            "q_lora_rank": 2048,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "index_topk": 2048,
            "index_n_heads": 32,
            "index_head_dim": 128,
            "index_topk_freq": 4,
            "index_skip_topk_offset": 3,
            "indexer_types": indexer_types(78, 4, 3),
            "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
            "max_position_embeddings": 202752,
            "vocab_size": 154880,
        }),
    )
}

fn olmoe() -> Map<String, Value> {
    object(json!({
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "norm_topk_prob": false,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "clip_qkv": null,
        "rope_theta": 10000.0,
        "rope_scaling": null,
        "max_position_embeddings": 4096,
        "vocab_size": 50304,
    }))
}

fn qwen3_moe() -> Map<String, Value> {
    object(json!({
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": true,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "use_sliding_window": false,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": null,
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
    }))
}

fn deepseek_v3() -> Map<String, Value> {
    object(json!({
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": true,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 2.5,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
        },
        "max_position_embeddings": 163840,
        "vocab_size": 129280,
    }))
}

fn gpt_oss() -> Map<String, Value> {
    object(json!({
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": true,
        "layer_types": layer_types(36),
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 4096,
            "truncate": false,
        },
        "max_position_embeddings": 131072,
        "vocab_size": 201088,
    }))
}

fn qwen3_5_moe() -> Map<String, Value> {
    object(json!({
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_hidden_layers": 40,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_theta": 10000000.0,
            "rope_type": "default",
            "partial_rotary_factor": 0.25,
        },
        "max_position_embeddings": 262144,
        "vocab_size": 248320,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_back_and_others_are_refused() {
        for like in Like::ALL {
            assert_eq!(like.name().parse(), Ok(like));
        }
        assert!("glm".parse::<Like>().unwrap_err().to_string().contains("glm-5.2"));
    }

    #[test]
    fn glm_has_its_published_indexer_layers() {
        let config = config(Like::Glm52, None, None).unwrap();
        let types = config["indexer_types"].as_array().unwrap();
        let full: Vec<usize> = (0..types.len()).filter(|i| types[*i] == "full").collect();
        assert_eq!(types.len(), 78);
        assert_eq!(full[..5], [0, 1, 2, 6, 10]);
        assert_eq!(full.last(), Some(&74));
    }

    #[test]
    fn fewer_layers_and_experts_keep_the_rest_consistent() {
        let glm = config(Like::Glm52, Some(5), Some(4)).unwrap();
        assert_eq!(glm["indexer_types"].as_array().unwrap().len(), 5);
        assert_eq!((&glm["first_k_dense_replace"], &glm["num_experts_per_tok"]), (&json!(3), &json!(4)));
        let deepseek = config(Like::DeepseekV3, Some(2), Some(64)).unwrap();
        assert_eq!((&deepseek["n_group"], &deepseek["first_k_dense_replace"]), (&json!(8), &json!(2)));
        let ungrouped = config(Like::DeepseekV3, None, Some(10)).unwrap();
        assert_eq!((&ungrouped["n_group"], &ungrouped["topk_group"]), (&json!(1), &json!(1)));
        assert_eq!(config(Like::Olmoe, None, Some(16)).unwrap()["num_experts"], 16);
        let oss = config(Like::GptOss, Some(3), Some(2)).unwrap();
        assert_eq!(oss["layer_types"].as_array().unwrap().len(), 3);
        assert_eq!((&oss["num_local_experts"], &oss["num_experts_per_tok"]), (&json!(2), &json!(2)));
    }

    #[test]
    fn impossible_numbers_are_refused() {
        for (layers, experts) in [(Some(0), None), (Some(129), None), (None, Some(0)), (None, Some(4097))] {
            assert!(config(Like::Tiny, layers, experts).is_err());
        }
    }
}
