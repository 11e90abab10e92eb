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

fn qwen() -> Value {
    json!({
        "model_type": "qwen3_moe", "vocab_size": 320, "hidden_size": 64,
        "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
        "rope_theta": 10000.0
    })
}

fn olmoe() -> Value {
    with(with(qwen(), "model_type", json!("olmoe")), "intermediate_size", json!(32))
}

fn deepseek() -> Value {
    with(glm(), "model_type", json!("deepseek_v3"))
}

fn all() -> [Value; 4] {
    [glm(), deepseek(), qwen(), olmoe()]
}

/// Every family refuses the value in a message with the key, or accepts it.
fn check(configs: &[Value], key: &str, value: &Value, accepted: bool) {
    for config in configs {
        match Plan::from_config(&with(config.clone(), key, value.clone())) {
            Ok(_) => assert!(accepted, "{}: {key} {value} was accepted", config["model_type"]),
            Err(error) => {
                assert!(!accepted, "{}: {error}", config["model_type"]);
                assert!(error.to_string().contains(key), "{key}: {error}");
            }
        }
    }
}

#[test]
fn what_contradicts_the_computation_is_refused_by_every_family() {
    for (key, value) in [
        ("hidden_act", json!("gelu")),
        ("hidden_act", json!(7)),
        ("partial_rotary_factor", json!(0.5)),
        ("partial_rotary_factor", json!("half")),
        ("scoring_func", json!("tanh")),
        ("scoring_func", json!(1)),
        ("layer_types", json!(["full_attention", "sliding_attention"])),
        ("layer_types", json!("full_attention")),
        ("sliding_window", json!(4096)),
        ("use_sliding_window", json!(true)),
        ("routed_scaling_factor", json!(0.0)),
        ("routed_scaling_factor", json!(-1.0)),
        ("routed_scaling_factor", json!(1.1e4)),
        ("quantization_config", json!("fp8")),
        ("quantization_config", json!({"bits": 4})),
    ] {
        check(&all(), key, &value, false);
    }
    for value in
        [json!({"quant_method": "awq"}), json!({"quant_method": "fp8", "weight_block_size": [64, 64]})]
    {
        for config in all() {
            let error = Plan::from_config(&with(config, "quantization_config", value.clone())).unwrap_err();
            let named = ["awq", "weight_block_size [64,64]"].iter().any(|n| error.to_string().contains(n));
            assert!(named, "{error}");
        }
    }
}

#[test]
fn what_agrees_with_the_computation_is_accepted_by_every_family() {
    for (key, value) in [
        ("hidden_act", Value::Null),
        ("partial_rotary_factor", json!(1)),
        ("rope_parameters", json!({"rope_theta": 10000.0, "partial_rotary_factor": 1.0})),
        ("layer_types", json!(["full_attention", "full_attention"])),
        ("sliding_window", Value::Null),
        ("use_sliding_window", json!(false)),
        ("quantization_config", json!({"quant_method": "fp8"})),
        ("quantization_config", json!({"quant_method": "fp8", "weight_block_size": [128, 128]})),
    ] {
        check(&all(), key, &value, true);
    }
    let off = with(qwen(), "use_sliding_window", json!(false));
    check(&[off], "sliding_window", &json!(4096), true);
}

#[test]
fn each_family_takes_its_own_router_only() {
    let (sigmoid, softmax) = ([glm(), deepseek()], [qwen(), olmoe()]);
    check(&sigmoid, "scoring_func", &json!("sigmoid"), true);
    check(&sigmoid, "scoring_func", &json!("softmax"), false);
    check(&sigmoid, "topk_method", &json!("noaux_tc"), true);
    check(&sigmoid, "topk_method", &json!("group_limited_greedy"), false);
    check(&sigmoid, "routed_scaling_factor", &json!(1e4), true);
    check(&sigmoid, "moe_layer_freq", &json!(1), true);
    check(&sigmoid, "moe_layer_freq", &json!(2), false);
    check(&softmax, "scoring_func", &json!("softmax"), true);
    check(&softmax, "scoring_func", &json!("sigmoid"), false);
    check(&softmax, "routed_scaling_factor", &json!(1.0), true);
    check(&softmax, "routed_scaling_factor", &json!(2.5), false);
    check(&[glm()], "layer_types", &json!(["indexed_attention", "full_attention"]), true);
    check(&[glm()], "indexer_types", &json!(["full", "half", "full", "full"]), false);
    check(&[deepseek(), qwen(), olmoe()], "layer_types", &json!(["indexed_attention"]), false);
}

#[test]
fn old_and_new_rotation_keys_must_say_the_same() {
    let yarn = |factor: f64| json!({"type": "yarn", "factor": factor});
    let new = json!({"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0});
    for config in all() {
        let config = with(config, "rope_parameters", new.clone());
        check(std::slice::from_ref(&config), "rope_scaling", &yarn(4.0), true);
        check(std::slice::from_ref(&config), "rope_scaling", &yarn(8.0), false);
        check(std::slice::from_ref(&config), "rope_scaling", &json!({"type": "default"}), false);
        check(std::slice::from_ref(&config), "rope_theta", &json!(10000), true);
        check(std::slice::from_ref(&config), "rope_theta", &json!(50000.0), false);
    }
}

/// The configurations that the project itself has: oracles, the demo model, synthetic models.
#[test]
fn the_projects_own_configurations_are_accepted() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let oracles = std::fs::read_dir(root.join("fixtures/oracles")).unwrap();
    let mut files: Vec<_> = oracles.map(|entry| entry.unwrap().path().join("config.json")).collect();
    files.retain(|file| file.exists());
    assert!(files.len() >= 6, "the oracles are not there");
    files.push(root.join("models/hummingbird-56m/config.json"));
    for file in files {
        let config = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
        assert!(Plan::from_config(&config).is_ok(), "{}", file.display());
    }
    for like in metaltail_container::synth::Like::ALL {
        let config = metaltail_container::synth::config(like, None, None).unwrap();
        Plan::from_config(&config).unwrap_or_else(|error| panic!("{like}: {error}"));
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
    let config = with(qwen(), "num_attention_heads", json!(5));
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
