//! What `qwen3_5_moe` and `qwen3_next` take, and what they refuse.

use super::*;
use crate::plan::{DeltaNetPlan, DeltaProjections, LayerPlan, NormWeights};

pub(super) fn text() -> Value {
    json!({
        "model_type": "qwen3_5_moe_text", "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 2,
        "full_attention_interval": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_conv_kernel_dim": 4,
        "rope_theta": 10000.0
    })
}

pub(super) fn next() -> Value {
    with(text(), "model_type", json!("qwen3_next"))
}

fn linear(config: &Value) -> Vec<bool> {
    let is_linear = |layer: &LayerPlan| matches!(layer.attention, AttentionPlan::DeltaNet(_));
    Plan::from_config(config).unwrap().layers.iter().map(is_linear).collect()
}

fn delta(config: &Value) -> DeltaNetPlan {
    let AttentionPlan::DeltaNet(delta) = Plan::from_config(config).unwrap().layers.remove(0).attention else {
        panic!("{config} begins with another layer");
    };
    delta
}

#[test]
fn layer_types_precede_the_interval() {
    let eight = with(text(), "num_hidden_layers", json!(8));
    let every = |n: usize| (0..8).map(|layer| (layer + 1) % n != 0).collect::<Vec<_>>();
    assert_eq!(linear(&eight), every(2));
    assert_eq!(linear(&with(eight.clone(), "full_attention_interval", Value::Null)), every(4));
    let types = json!(["full_attention", "linear_attention"]);
    assert_eq!(linear(&with(text(), "layer_types", types)), [false, true]);
    for types in [json!(["linear_attention"]), json!(vec!["linear_attention"; 3])] {
        check(&[text(), next()], "layer_types", &types, false);
    }
    check(&[text(), next()], "full_attention_interval", &json!(0), false);
}

#[test]
fn every_dimension_is_the_configurations_or_the_references_default() {
    let plan = delta(&text());
    assert_eq!((plan.key_heads, plan.value_heads, plan.key_dim, plan.value_dim), (2, 4, 16, 24));
    assert_eq!((plan.channels(), plan.state_sizes()), (64 + 96, (3 * 160, 4 * 24 * 16)));
    let mut silent = text();
    silent.as_object_mut().unwrap().retain(|key, _| !key.starts_with("linear_"));
    let plan = delta(&silent);
    assert_eq!((plan.key_heads, plan.value_heads, plan.key_dim, plan.value_dim), (16, 32, 128, 128));
    assert_eq!(plan.kernel, 4);
    let all = Plan::from_config(&text()).unwrap();
    assert_eq!(all.norms, NormWeights::OnePlus);
    let moe = all.layers[0].moe().unwrap();
    assert_eq!((moe.shared_width, moe.shared_gate, moe.router.normalise), (Some(48), true, true));
    let AttentionPlan::Gqa(gqa) = &all.layers[1].attention else { panic!("the second layer is linear") };
    assert_eq!((gqa.gate, gqa.rope.dim, gqa.qk_norm), (true, 8, QkNorm::Head));
}

#[test]
fn dimensions_that_do_not_fit_are_refused_by_name() {
    for (key, value) in [
        ("linear_num_value_heads", json!(3)),
        ("linear_num_key_heads", json!(0)),
        ("linear_key_head_dim", json!(1 << 20)),
        ("linear_value_head_dim", json!("wide")),
        ("linear_conv_kernel_dim", json!(1)),
        ("shared_expert_intermediate_size", json!(0)),
        ("attention_bias", json!(true)),
    ] {
        check(&[text(), next()], key, &value, false);
    }
}

#[test]
fn only_qwen3_next_has_dense_layers_and_projections_by_key_head() {
    assert_eq!(delta(&text()).projections, DeltaProjections::Apart);
    assert_eq!(delta(&next()).projections, DeltaProjections::ByKeyHead);
    let dense = with(with(next(), "mlp_only_layers", json!([1])), "intermediate_size", json!(128));
    let plan = Plan::from_config(&dense).unwrap();
    assert_eq!(plan.layers.iter().map(|layer| layer.moe().is_some()).collect::<Vec<_>>(), [true, false]);
}

#[test]
fn a_text_configuration_may_lie_within_that_of_a_model_that_sees() {
    let inner = with(text(), "tie_word_embeddings", json!(true));
    let outer = |more: Value| {
        let mut outer = json!({"model_type": "qwen3_5_moe", "text_config": inner.clone()});
        outer.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        Plan::from_config(&outer)
    };
    let (plan, alone) = (outer(json!({})).unwrap(), Plan::from_config(&text()).unwrap());
    assert_eq!((plan.family.as_str(), &plan.layers, plan.tied_head), ("qwen3_5_moe", &alone.layers, false));
    assert!(outer(json!({"tie_word_embeddings": true})).unwrap().tied_head);
    let error = outer(json!({"quantization_config": {"quant_method": "awq"}})).unwrap_err();
    assert!(error.to_string().contains("awq"), "{error}");
    let error = outer(json!({"text_config": []})).unwrap_err();
    assert!(error.to_string().contains("text_config"), "{error}");
    let error = outer(json!({"text_config": {"hidden_size": 0}})).unwrap_err();
    assert!(error.to_string().contains("text_config."), "{error}");
}

#[test]
fn no_device_takes_recurrent_layers() {
    for config in [text(), next()] {
        let plan = Plan::from_config(&config).unwrap();
        assert_eq!(crate::Model::why_not_accelerated(&plan), Some("linear attention"));
    }
}
