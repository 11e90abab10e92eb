//! A hand-made inventory of the synthetic `glm_moe_dsa` models, which the model room would derive.

use metaltail_container::{ExpertLayerSpec, Inventory, Role, TensorSpec};
use serde_json::Value;

fn number(config: &Value, key: &str) -> usize {
    config[key].as_u64().unwrap() as usize
}

fn spec(
    name: String,
    rows: usize,
    cols: usize,
    role: Role,
    layer: Option<u32>,
    optional: bool,
) -> TensorSpec {
    TensorSpec { name, rows, cols, role, layer, optional }
}

/// Every tensor that a configuration of `synth::config` asks for.
pub fn inventory(config: &Value) -> Inventory {
    let n = |key| number(config, key);
    let hidden = n("hidden_size");
    let (layers, dense) = (n("num_hidden_layers"), n("first_k_dense_replace"));
    let draft = n("num_nextn_predict_layers");
    let top = |name: &str, rows, role| spec(name.to_owned(), rows, hidden, role, None, false);
    let mut inventory = Inventory {
        family: config["model_type"].as_str().unwrap().to_owned(),
        tensors: vec![
            top("model.embed_tokens.weight", n("vocab_size"), Role::Embedding),
            top("lm_head.weight", n("vocab_size"), Role::Head),
            top("model.norm.weight", 1, Role::Norm),
        ],
        experts: Vec::new(),
    };
    for layer in 0..layers + draft {
        attention(&mut inventory, config, layer as u32, layer >= layers);
        if layer < layers && config["indexer_types"][layer] == "full" {
            indexer(&mut inventory, config, layer as u32);
        }
        if layer < dense {
            ffn(&mut inventory, "", n("intermediate_size"), hidden, layer as u32, Role::DenseFfn, false);
        } else {
            sparse(&mut inventory, config, layer as u32, layer >= layers);
        }
        if layer >= layers {
            let at = |name: &str| format!("model.layers.{layer}.{name}.weight");
            let l = Some(layer as u32);
            inventory.tensors.push(spec(at("eh_proj"), hidden, 2 * hidden, Role::Draft, l, true));
            for norm in ["enorm", "hnorm", "shared_head.norm"] {
                inventory.tensors.push(spec(at(norm), 1, hidden, Role::Norm, l, true));
            }
        }
    }
    inventory
}

fn attention(inventory: &mut Inventory, config: &Value, layer: u32, draft: bool) {
    let n = |key| number(config, key);
    let (hidden, heads) = (n("hidden_size"), n("num_attention_heads"));
    let (nope, rope, v) = (n("qk_nope_head_dim"), n("qk_rope_head_dim"), n("v_head_dim"));
    let (q_lora, kv_lora) = (n("q_lora_rank"), n("kv_lora_rank"));
    let role = if draft { Role::Draft } else { Role::Attention };
    for (name, rows, cols, role) in [
        ("input_layernorm", 1, hidden, Role::Norm),
        ("post_attention_layernorm", 1, hidden, Role::Norm),
        ("self_attn.q_a_proj", q_lora, hidden, role),
        ("self_attn.q_a_layernorm", 1, q_lora, Role::Norm),
        ("self_attn.q_b_proj", heads * (nope + rope), q_lora, role),
        ("self_attn.kv_a_proj_with_mqa", kv_lora + rope, hidden, role),
        ("self_attn.kv_a_layernorm", 1, kv_lora, Role::Norm),
        ("self_attn.kv_b_proj", heads * (nope + v), kv_lora, role),
        ("self_attn.o_proj", hidden, heads * v, role),
    ] {
        let name = format!("model.layers.{layer}.{name}.weight");
        inventory.tensors.push(spec(name, rows, cols, role, Some(layer), draft));
    }
}

fn indexer(inventory: &mut Inventory, config: &Value, layer: u32) {
    let n = |key| number(config, key);
    let (hidden, heads, dim) = (n("hidden_size"), n("index_n_heads"), n("index_head_dim"));
    for (name, rows, cols, role) in [
        ("wq_b.weight", heads * dim, n("q_lora_rank"), Role::Indexer),
        ("wk.weight", dim, hidden, Role::Indexer),
        ("weights_proj.weight", heads, hidden, Role::IndexerWeights),
        ("k_norm.weight", 1, dim, Role::Norm),
        ("k_norm.bias", 1, dim, Role::Bias),
    ] {
        let name = format!("model.layers.{layer}.self_attn.indexer.{name}");
        inventory.tensors.push(spec(name, rows, cols, role, Some(layer), true));
    }
}

fn ffn(
    inventory: &mut Inventory,
    prefix: &str,
    width: usize,
    hidden: usize,
    layer: u32,
    role: Role,
    optional: bool,
) {
    for (part, rows, cols) in [("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)] {
        let name = format!("model.layers.{layer}.mlp.{prefix}{part}_proj.weight");
        inventory.tensors.push(spec(name, rows, cols, role, Some(layer), optional));
    }
}

fn sparse(inventory: &mut Inventory, config: &Value, layer: u32, draft: bool) {
    let n = |key| number(config, key);
    let (hidden, width, count) = (n("hidden_size"), n("moe_intermediate_size"), n("n_routed_experts"));
    let at = |name: &str| format!("model.layers.{layer}.mlp.gate.{name}");
    inventory.tensors.push(spec(at("weight"), count, hidden, Role::Router, Some(layer), draft));
    inventory.tensors.push(spec(
        at("e_score_correction_bias"),
        1,
        count,
        Role::RouterBias,
        Some(layer),
        draft,
    ));
    let role = if draft { Role::Draft } else { Role::SharedExpert };
    ffn(inventory, "shared_experts.", width * n("n_shared_experts"), hidden, layer, role, draft);
    inventory.experts.push(ExpertLayerSpec {
        layer,
        count: count as u32,
        hidden,
        width,
        draft,
        prefix: format!("model.layers.{layer}.mlp.experts."),
        suffixes: [".gate_proj.weight", ".up_proj.weight", ".down_proj.weight"],
        stacked: None,
    });
}
