use serde_json::{Value, json};

use crate::config::ConfigError;
use crate::plan::{AttentionPlan, IndexerUse, Plan};

fn glm() -> Value {
    json!({
        "model_type": "glm_moe_dsa", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128,
        "moe_intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
        "n_shared_experts": 1, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "kv_lora_rank": 32, "q_lora_rank": 48, "qk_rope_head_dim": 16, "qk_nope_head_dim": 24,
        "v_head_dim": 32, "first_k_dense_replace": 1, "index_topk": 12, "index_head_dim": 32,
        "index_n_heads": 8, "num_nextn_predict_layers": 1
    })
}

fn with(mut config: Value, key: &str, value: Value) -> Value {
    config[key] = value;
    config
}

fn owners(config: &Value) -> Vec<bool> {
    let plan = Plan::from_config(config).unwrap();
    let own = |layer: &crate::plan::LayerPlan| match &layer.attention {
        AttentionPlan::Mla(mla) => matches!(mla.indexer, IndexerUse::Own(_)),
        AttentionPlan::Gqa(_) => false,
    };
    plan.layers.iter().map(own).collect()
}

#[test]
fn indexer_types_precede_the_pattern_and_the_pattern_precedes_the_frequency() {
    let every_second = with(with(glm(), "index_topk_freq", json!(2)), "index_skip_topk_offset", json!(1));
    assert_eq!(owners(&every_second), [true, false, true, false]);
    let pattern = with(every_second, "index_topk_pattern", json!("FSSF"));
    assert_eq!(owners(&pattern), [true, false, false, true]);
    let types = with(pattern, "indexer_types", json!(["full", "full", "shared", "shared"]));
    assert_eq!(owners(&types), [true, true, false, false]);
}

#[test]
fn an_array_shorter_than_the_layers_is_refused() {
    for (key, value) in [
        ("indexer_types", json!(["full"])),
        ("mlp_layer_types", json!(["dense", "sparse"])),
        ("index_topk_pattern", json!("F")),
    ] {
        let error = Plan::from_config(&with(glm(), key, value)).unwrap_err();
        assert!(matches!(error, ConfigError::Inconsistent(_)), "{key}: {error}");
    }
}

#[test]
fn what_is_not_computed_is_refused_by_name() {
    let rope = json!({"rope_type": "longrope", "rope_theta": 10000.0});
    for (key, value, named) in [
        ("attention_bias", json!(true), "attention_bias"),
        ("mlp_bias", json!(true), "mlp_bias"),
        ("hidden_act", json!("gelu"), "gelu"),
        ("rope_parameters", rope, "longrope"),
        ("num_nextn_predict_layers", json!(3), "3 draft layers"),
    ] {
        let error = Plan::from_config(&with(glm(), key, value)).unwrap_err();
        assert!(error.to_string().contains(named), "{key}: {error}");
    }
}

#[test]
fn an_unknown_family_is_refused_with_the_supported_ones() {
    let error = Plan::from_config(&with(glm(), "model_type", json!("llama"))).unwrap_err();
    assert!(error.to_string().contains("glm_moe_dsa"), "{error}");
}

#[test]
fn the_inventory_has_every_tensor_once_and_the_draft_layer_last() {
    let plan = Plan::from_config(&glm()).unwrap();
    let inventory = plan.inventory();
    let mut names: Vec<&str> = inventory.tensors.iter().map(|t| t.name.as_str()).collect();
    let total = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), total);
    let layers: Vec<(u32, bool)> = inventory.experts.iter().map(|e| (e.layer, e.draft)).collect();
    assert_eq!(layers, [(1, false), (2, false), (3, false), (4, true)]);
    assert!(names.contains(&"model.layers.4.eh_proj.weight"));
    assert!(!names.contains(&"model.layers.4.self_attn.indexer.wk.weight"));
}

#[test]
fn a_gqa_head_count_that_does_not_divide_is_refused() {
    let config = json!({
        "model_type": "qwen3_moe", "vocab_size": 320, "hidden_size": 64,
        "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 5,
        "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2
    });
    assert!(matches!(Plan::from_config(&config), Err(ConfigError::Inconsistent(_))));
}

proptest::proptest! {
    /// Whatever is put in place of one value, the answer is a plan or an error, never a panic.
    #[test]
    fn a_configuration_with_one_wild_value_never_panics(
        pick in 0usize..64,
        number in proptest::prelude::any::<i64>(),
        kind in 0usize..6,
    ) {
        let mut config = glm();
        let keys: Vec<String> = config.as_object().unwrap().keys().cloned().collect();
        let key = &keys[pick % keys.len()];
        config[key.as_str()] = match kind {
            0 => json!(number),
            1 => json!(number as f64 * 1e200),
            2 => json!("text"),
            3 => json!([number]),
            4 => json!({"a": number}),
            _ => Value::Null,
        };
        if let Ok(plan) = Plan::from_config(&config) {
            plan.inventory();
        }
    }
}
