//! What `gpt_oss` takes and refuses.

use metaltail_container::Role;
use metaltail_kernels::Activation;

use super::*;
use crate::plan::MoePlan;

fn oss() -> Value {
    super::gpt_oss()
}

fn moe(config: &Value) -> MoePlan {
    Plan::from_config(config).unwrap().layers[0].moe().unwrap().clone()
}

fn windows(config: &Value) -> Vec<Option<usize>> {
    let plan = Plan::from_config(config).unwrap();
    let window = |layer: &crate::plan::LayerPlan| match &layer.attention {
        AttentionPlan::Gqa(gqa) => gqa.window,
        _ => panic!("latent attention"),
    };
    plan.layers.iter().map(window).collect()
}

#[test]
fn windows_go_by_layer_and_every_other_layer_has_one_by_default() {
    assert_eq!(windows(&oss()), [Some(16), None, Some(16), None]);
    let own = with(oss(), "layer_types", Value::from(vec!["full_attention"; 4]));
    assert_eq!(windows(&own), [None; 4]);
    let silent = with(with(oss(), "layer_types", Value::Null), "sliding_window", Value::Null);
    assert_eq!(windows(&silent), [Some(128), None, Some(128), None]);
    let short =
        Plan::from_config(&with(oss(), "layer_types", Value::from(vec!["full_attention"; 3]))).unwrap_err();
    assert!(matches!(short, ConfigError::Inconsistent(_)), "{short}");
    let none = Plan::from_config(&with(oss(), "sliding_window", json!(0))).unwrap_err();
    assert!(matches!(none, ConfigError::Range { .. }), "{none}");
}

#[test]
fn biases_and_sinks_are_part_of_the_inventory() {
    let inventory = Plan::from_config(&oss()).unwrap().inventory();
    let shape = |name: &str| {
        let spec = inventory.tensors.iter().find(|spec| spec.name == format!("model.layers.1.{name}"));
        spec.map(|spec| (spec.rows, spec.cols, spec.role))
    };
    assert_eq!(shape("self_attn.sinks"), Some((1, 4, Role::Bias)));
    assert_eq!(shape("self_attn.o_proj.bias"), Some((1, 64, Role::Bias)));
    assert_eq!(shape("mlp.router.weight"), Some((8, 64, Role::Router)));
    assert_eq!(shape("mlp.router.bias"), Some((1, 8, Role::Bias)));
    assert_eq!(shape("mlp.experts.gate_up_proj_bias"), Some((8, 64, Role::Bias)));
    assert_eq!(shape("mlp.experts.down_proj_bias"), Some((8, 64, Role::Bias)));
    assert!(inventory.experts.iter().all(|layer| layer.stacked.is_some()));
    let without = Plan::from_config(&with(oss(), "attention_bias", json!(false))).unwrap();
    let has = |what: &str| without.inventory().tensors.iter().any(|spec| spec.name.contains(what));
    assert!(!has("o_proj.bias") && !has("q_proj.bias") && has("router.bias") && has("sinks"));
}

#[test]
fn what_a_silent_configuration_means_is_the_references_default() {
    let silent = ["swiglu_limit", "swiglu_alpha", "attention_bias", "quantization_config"]
        .into_iter()
        .fold(oss(), |config, key| with(config, key, Value::Null));
    assert_eq!(moe(&silent).activation, Activation::ClampedSwiGlu { alpha: 1.702, limit: 7.0 });
    let plan = gqa(&silent);
    assert!(plan.bias && plan.output_bias && plan.sinks && plan.qk_norm == QkNorm::None);
    // 0.1 ln 4 + 1 on cosine and sine, nothing on the scores.
    assert!((plan.rope.magnitude - 1.138_629_4).abs() < 1e-6 && plan.scale == 0.25);
    for key in ["head_dim", "rope_scaling"] {
        let error = Plan::from_config(&with(oss(), key, Value::Null)).unwrap_err();
        assert!(matches!(error, ConfigError::Missing { .. }), "{key}: {error}");
    }
}

#[test]
fn what_is_not_computed_is_refused_by_name() {
    for (key, value) in [
        ("hidden_act", json!("gelu")),
        ("layer_types", json!(["chunked_attention", "full_attention", "full_attention", "full_attention"])),
        ("scoring_func", json!("sigmoid")),
        ("routed_scaling_factor", json!(2.5)),
        ("norm_topk_prob", json!(false)),
        ("mlp_bias", json!(false)),
        ("use_qk_norm", json!(true)),
        ("partial_rotary_factor", json!(0.5)),
        ("swiglu_limit", json!(0.0)),
        ("swiglu_limit", json!(-7.0)),
        ("swiglu_alpha", json!(0.0)),
        ("quantization_config", json!("mxfp4")),
    ] {
        check(&[oss()], key, &value, false);
    }
    let other = with(oss(), "quantization_config", json!({"quant_method": "awq"}));
    let error = Plan::from_config(&other).unwrap_err();
    assert!(error.to_string().contains("awq"), "{error}");
}

#[test]
fn the_stored_form_is_that_of_no_other_family() {
    for config in all() {
        let config = with(config, "quantization_config", json!({"quant_method": "mxfp4"}));
        let error = Plan::from_config(&config).unwrap_err();
        assert!(error.to_string().contains("mxfp4"), "{error}");
    }
}
