mod gpt_oss;
mod qwen3_5;

use serde_json::{Value, json};

use crate::config::ConfigError;
use crate::plan::{AttentionPlan, GqaPlan, IndexerUse, Plan, QkNorm, Scoring};

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
        AttentionPlan::Gqa(_) | AttentionPlan::DeltaNet(_) => false,
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

fn mixtral() -> Value {
    with(olmoe(), "model_type", json!("mixtral"))
}

fn minimax() -> Value {
    with(olmoe(), "model_type", json!("minimax_m2"))
}

fn glm4() -> Value {
    json!({
        "model_type": "glm4_moe", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128,
        "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "n_shared_experts": 1, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1
    })
}

/// Its own refusals are tested where it is: most of what the others refuse it computes.
fn gpt_oss() -> Value {
    json!({
        "model_type": "gpt_oss", "vocab_size": 320, "hidden_size": 64, "intermediate_size": 32,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16, "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702, "attention_bias": true, "max_position_embeddings": 512,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        "rope_scaling": {
            "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
            "original_max_position_embeddings": 128
        },
        "rope_theta": 150000.0
    })
}

fn all() -> [Value; 9] {
    [glm(), deepseek(), qwen(), olmoe(), mixtral(), minimax(), qwen3_5::text(), qwen3_5::next(), glm4()]
}

/// The grouped-query attention of the first layer.
fn gqa(config: &Value) -> GqaPlan {
    let AttentionPlan::Gqa(gqa) = Plan::from_config(config).unwrap().layers.remove(0).attention else {
        panic!("{config} has latent attention");
    };
    gqa
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
        ("partial_rotary_factor", json!("half")),
        ("partial_rotary_factor", json!(0.0)),
        ("partial_rotary_factor", json!(1.5)),
        ("mlp_bias", json!(true)),
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
    let (sigmoid, softmax) = ([glm(), deepseek(), glm4()], [qwen(), olmoe(), mixtral()]);
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
    check(&all()[1..], "layer_types", &json!(["indexed_attention"]), false);
    check(&[minimax()], "scoring_func", &json!("sigmoid"), true);
    check(&[minimax()], "scoring_func", &json!("softmax"), false);
    check(&[minimax()], "routed_scaling_factor", &json!(2.5), false);
}

#[test]
fn a_part_of_each_head_is_rotated_only_where_the_family_does_so() {
    let (whole, parts) = ([glm(), deepseek(), qwen(), olmoe(), mixtral()], [minimax(), glm4()]);
    let nested = json!({"rope_theta": 10000.0, "partial_rotary_factor": 0.5});
    for (configs, computed) in [(&whole[..], false), (&parts[..], true)] {
        check(configs, "partial_rotary_factor", &json!(0.5), computed);
        for config in configs {
            let found = Plan::from_config(&with(config.clone(), "rope_parameters", nested.clone()));
            assert_eq!(found.is_ok(), computed, "{}", config["model_type"]);
        }
    }
    for config in parts {
        let half = with(config.clone(), "rope_parameters", nested.clone());
        assert_eq!(gqa(&half).rope.dim, 8);
        // Frequencies are those of the rotated width.
        assert_eq!(gqa(&half).rope.inv_freq[1], 0.1);
        check(std::slice::from_ref(&half), "partial_rotary_factor", &json!(0.25), false);
        let odd = Plan::from_config(&with(config, "partial_rotary_factor", json!(0.2))).unwrap_err();
        assert!(odd.to_string().contains("a rotation of 3 elements"), "{odd}");
    }
    assert_eq!(gqa(&glm4()).rope.dim, 8, "half is what glm4_moe takes for granted");
    assert_eq!(gqa(&minimax()).rope.dim, 16, "minimax_m2 takes the whole head for granted");
}

#[test]
fn minimax_takes_its_rotation_from_either_key_and_refuses_two_answers() {
    let rotary = with(minimax(), "rotary_dim", json!(8));
    assert_eq!(gqa(&rotary).rope.dim, 8);
    check(std::slice::from_ref(&rotary), "partial_rotary_factor", &json!(0.5), true);
    check(&[rotary], "partial_rotary_factor", &json!(1.0), false);
    check(&[minimax()], "rotary_dim", &json!(32), false);
    let odd = Plan::from_config(&with(minimax(), "rotary_dim", json!(7))).unwrap_err();
    assert!(odd.to_string().contains("a rotation of 7 elements"), "{odd}");
}

#[test]
fn minimax_refuses_what_earlier_models_of_that_name_computed() {
    for (key, value, accepted) in [
        ("qk_norm_type", json!("per_layer"), true),
        ("qk_norm_type", json!("per_head"), false),
        ("use_qk_norm", json!(false), false),
        ("use_routing_bias", json!(true), true),
        ("use_routing_bias", json!(false), false),
        ("shared_intermediate_size", json!(0), true),
        ("shared_intermediate_size", json!(64), false),
        ("attn_type_list", json!([1, 1]), true),
        ("attn_type_list", json!([0, 1]), false),
        ("attn_type_list", json!("full"), false),
        ("num_mtp_modules", json!(3), true),
    ] {
        check(&[minimax()], key, &value, accepted);
    }
}

#[test]
fn attention_biases_are_computed_for_glm4_moe_alone() {
    let [others @ .., glm4] = all();
    check(&others, "attention_bias", &json!(true), false);
    check(std::slice::from_ref(&glm4), "attention_bias", &json!(true), true);
    let names = |config: &Value| -> Vec<String> {
        let tensors = Plan::from_config(config).unwrap().inventory().tensors;
        tensors.into_iter().map(|tensor| tensor.name).filter(|name| name.ends_with("proj.bias")).collect()
    };
    assert!(names(&glm4).is_empty());
    // Two layers and the draft's.
    let biased = names(&with(glm4, "attention_bias", json!(true)));
    assert_eq!(biased.len(), 9, "{biased:?}");
}

#[test]
fn queries_and_keys_are_normed_as_the_family_does() {
    let normed = with(glm4(), "use_qk_norm", json!(true));
    for (config, norm) in [
        (qwen(), QkNorm::Head),
        (olmoe(), QkNorm::Projection),
        (minimax(), QkNorm::Projection),
        (mixtral(), QkNorm::None),
        (glm4(), QkNorm::None),
        (normed, QkNorm::Head),
    ] {
        assert_eq!(gqa(&config).qk_norm, norm, "{}", config["model_type"]);
        let tensors = Plan::from_config(&config).unwrap().inventory().tensors;
        let any = tensors.iter().any(|tensor| tensor.name.contains("q_norm"));
        assert_eq!(any, norm != QkNorm::None, "{}", config["model_type"]);
    }
}

#[test]
fn what_a_silent_configuration_means_is_the_references_default() {
    let second = |config: Value, theta: f32| {
        let mut config = with(config, "rope_theta", Value::Null);
        config["rope_parameters"] = Value::Null;
        let rope = gqa(&config).rope;
        let wanted = 1.0 / theta.powf(2.0 / rope.dim as f32);
        assert!((rope.inv_freq[1] / wanted - 1.0).abs() < 1e-5, "{}", config["model_type"]);
    };
    second(qwen(), 1e4);
    second(mixtral(), 1e6);
    second(minimax(), 5e6);
    second(glm4(), 1e4);
    let plan = Plan::from_config(&glm4()).unwrap();
    assert!(plan.layers[0].moe().is_none(), "the first layer is dense");
    let router = &plan.layers[1].moe().unwrap().router;
    assert_eq!((router.scoring, router.scale, router.normalise), (Scoring::Sigmoid, 1.0, true));
    let router = Plan::from_config(&deepseek()).unwrap().layers[1].moe().unwrap().router.clone();
    assert_eq!(router.scale, 2.5);
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
    assert!(files.len() >= 12, "the oracles are not there");
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
        family in 0usize..10,
        pick in 0usize..64,
        number in proptest::prelude::any::<i64>(),
        kind in 0usize..6,
    ) {
        let mut config = all().get(family).cloned().unwrap_or_else(gpt_oss);
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
