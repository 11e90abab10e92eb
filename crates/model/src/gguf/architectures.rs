//! One function an architecture: what its metadata come to in a configuration. A new one is a new row here.

use serde_json::{Map, Value, json};

use super::metadata::Metadata;
use crate::config::ConfigError;

type Config = Map<String, Value>;

/// An architecture of GGUF that this version runs.
pub(super) struct Architecture {
    /// `general.architecture`.
    pub names: &'static [&'static str],
    /// `model_type` of the same model as a Hugging Face checkpoint.
    pub family: &'static str,
    /// Adds what is not common to all; may name another family.
    pub describe: fn(&Metadata<'_>, &mut Config) -> Result<(), ConfigError>,
}

/// All architectures, in alphabetical order.
pub(super) const ARCHITECTURES: &[Architecture] = &[
    Architecture { names: &["deepseek2"], family: "deepseek_v3", describe: deepseek2 },
    Architecture { names: &["glm-dsa"], family: "glm_moe_dsa", describe: glm_dsa },
    Architecture { names: &["glm4moe"], family: "glm4_moe", describe: glm4moe },
    Architecture { names: &["gpt-oss"], family: "gpt_oss", describe: gpt_oss },
    Architecture { names: &["llama"], family: "mixtral", describe: llama },
    Architecture { names: &["minimax-m2"], family: "minimax_m2", describe: minimax_m2 },
    Architecture { names: &["olmoe"], family: "olmoe", describe: olmoe },
    Architecture { names: &["qwen2moe"], family: "qwen2_moe", describe: qwen2moe },
    Architecture { names: &["qwen35moe"], family: "qwen3_5_moe_text", describe: qwen35moe },
    Architecture { names: &["qwen3moe"], family: "qwen3_moe", describe: qwen3moe },
];

fn insert(config: &mut Config, key: &str, value: impl Into<Value>) {
    config.insert(key.to_owned(), value.into());
}

/// Width of a head, which need not be the model's width shared out.
fn head_dim(metadata: &Metadata<'_>, config: &mut Config) -> Result<Option<u64>, ConfigError> {
    let (keys, values) =
        (metadata.number("attention.key_length")?, metadata.number("attention.value_length")?);
    if let (Some(keys), Some(values)) = (keys, values)
        && keys != values
    {
        return Err(metadata.unsupported(format!("keys of {keys} numbers with values of {values}")));
    }
    if let Some(width) = keys {
        insert(config, "head_dim", width);
    }
    let (hidden, heads) = (metadata.need("embedding_length")?, metadata.need("attention.head_count")?);
    Ok(keys.or_else(|| hidden.checked_div(heads)))
}

/// Refuses a rotation of less than the whole head, for architectures that rotate all of it.
fn rotates_all(metadata: &Metadata<'_>, head: Option<u64>) -> Result<(), ConfigError> {
    match (metadata.number("rope.dimension_count")?, head) {
        (Some(dim), Some(head)) if dim != head => {
            Err(metadata.unsupported(format!("a rotation of {dim} of {head} numbers")))
        }
        _ => Ok(()),
    }
}

/// `expert_gating_func`: 1 is softmax, 2 the logistic function.
fn gating(metadata: &Metadata<'_>, wanted: u64) -> Result<(), ConfigError> {
    match metadata.number("expert_gating_func")? {
        // Old files have 0 or nothing where there was one function only.
        None | Some(0) => Ok(()),
        Some(got) if got == wanted => Ok(()),
        Some(got) => Err(metadata.unsupported(format!("expert_gating_func {got}"))),
    }
}

/// Heads that are rotated whole, and a softmax router whose weights have no factor.
fn softmax_moe(metadata: &Metadata<'_>, config: &mut Config) -> Result<(), ConfigError> {
    metadata.refuse_windows()?;
    metadata.refuse_scaled_weights()?;
    let head = head_dim(metadata, config)?;
    rotates_all(metadata, head)?;
    gating(metadata, 1)?;
    insert(config, "num_experts", metadata.need("expert_count")?);
    Ok(())
}

fn olmoe(metadata: &Metadata<'_>, config: &mut Config) -> Result<(), ConfigError> {
    softmax_moe(metadata, config)?;
    // One length for the experts, whichever key a file has it under.
    if let Some(width) = metadata.number("expert_feed_forward_length")? {
        insert(config, "intermediate_size", width);
    }
    insert(config, "norm_topk_prob", metadata.flag("expert_weights_norm")?.unwrap_or(false));
    Ok(())
}

fn qwen2moe(metadata: &Metadata<'_>, config: &mut Config) -> Result<(), ConfigError> {
    softmax_moe(metadata, config)?;
    insert(config, "qkv_bias", metadata.has("blk.0.attn_q.bias"));
    insert(config, "norm_topk_prob", metadata.flag("expert_weights_norm")?.unwrap_or(false));
    if let Some(width) = metadata.number("expert_shared_feed_forward_length")? {
        insert(config, "shared_expert_intermediate_size", width);
    }
    Ok(())
}

fn qwen3moe(metadata: &Metadata<'_>, config: &mut Config) -> Result<(), ConfigError> {
    softmax_moe(metadata, config)?;
    insert(config, "norm_topk_prob", metadata.flag("expert_weights_norm")?.unwrap_or(true));
    let (layers, _) = metadata.layers()?;
    let dense: Vec<u64> =
        (0..layers).filter(|layer| metadata.has(&format!("blk.{layer}.ffn_gate.weight"))).collect();
    insert(config, "mlp_only_layers", dense);
    Ok(())
}

/// Delta nets between attention. The converter adds the one to norms, takes the exponential of the rates of decay and
/// puts the value heads in another order.
fn qwen35moe(metadata: &Metadata<'_>, config: &mut Config) -> Result<(), ConfigError> {
    metadata.refuse_windows()?;
    metadata.refuse_other_weights(true)?;
    let head = head_dim(metadata, config)?;
    gating(metadata, 1)?;
    insert(config, "num_experts", metadata.need("expert_count")?);
    insert(config, "shared_expert_intermediate_size", metadata.need("expert_shared_feed_forward_length")?);
    if let (Some(dim), Some(head)) = (metadata.number("rope.dimension_count")?, head) {
        insert(config, "partial_rotary_factor", json!(dim as f64 / head.max(1) as f64));
    }
    let (layers, _) = metadata.layers()?;
    let recurrent = |layer| metadata.has(&format!("blk.{layer}.ssm_a"));
    let kind = |layer| if recurrent(layer) { "linear_attention" } else { "full_attention" };
    insert(config, "layer_types", (0..layers).map(kind).collect::<Vec<_>>());
    let (inner, heads) = (metadata.need("ssm.inner_size")?, metadata.need("ssm.time_step_rank")?);
    if heads == 0 || !inner.is_multiple_of(heads) {
        return Err(ConfigError::Inconsistent(format!("values of {inner} numbers in {heads} heads")));
    }
    insert(config, "linear_num_value_heads", heads);
    insert(config, "linear_value_head_dim", inner / heads);
    insert(config, "linear_num_key_heads", metadata.need("ssm.group_count")?);
    insert(config, "linear_key_head_dim", metadata.need("ssm.state_size")?);
    insert(config, "linear_conv_kernel_dim", metadata.need("ssm.conv_kernel")?);
    for key in ["norm_weights_plain", "linear_heads_modulo", "linear_rates_plain"] {
        insert(config, key, true);
    }
    Ok(())
}

/// Which layers slide is not said: every other one does, from the first on, as in every model so far.
fn gpt_oss(metadata: &Metadata<'_>, config: &mut Config) -> Result<(), ConfigError> {
    metadata.refuse_other_weights(true)?;
    let head = head_dim(metadata, config)?;
    rotates_all(metadata, head)?;
    insert(config, "num_local_experts", metadata.need("expert_count")?);
    if let Some(width) = metadata.number("expert_feed_forward_length")? {
        insert(config, "intermediate_size", width);
    }
    insert(config, "sliding_window", metadata.need("attention.sliding_window")?);
    if let Some(pattern) = metadata.numbers("attention.sliding_window_pattern")? {
        let kind = |slides: &u64| if *slides != 0 { "sliding_attention" } else { "full_attention" };
        insert(config, "layer_types", pattern.iter().map(kind).collect::<Vec<_>>());
    }
    insert(config, "attention_bias", metadata.has("blk.0.attn_q.bias"));
    insert(config, "expert_biases_apart", true);
    // The published models interpolate between whole dimensions; the keys of GGUF have no word for that.
    if let Some(Value::Object(scaling)) = config.get_mut("rope_scaling") {
        scaling.insert("truncate".into(), false.into());
    }
    Ok(())
}

/// Mixtral. The converter permutes the rows of queries and keys, so that the elements of a pair are neighbours.
fn llama(metadata: &Metadata<'_>, config: &mut Config) -> Result<(), ConfigError> {
    metadata.refuse_windows()?;
    metadata.refuse_other_weights(true)?;
    let Some(experts) = metadata.number("expert_count")?.filter(|experts| *experts > 0) else {
        return Err(metadata.unsupported("a model without routed experts".into()));
    };
    let head = head_dim(metadata, config)?;
    rotates_all(metadata, head)?;
    gating(metadata, 1)?;
    insert(config, "num_local_experts", experts);
    insert(config, "rope_interleave", true);
    if let Some(width) = metadata.number("expert_feed_forward_length")? {
        insert(config, "intermediate_size", width);
    }
    Ok(())
}

fn minimax_m2(metadata: &Metadata<'_>, config: &mut Config) -> Result<(), ConfigError> {
    metadata.refuse_windows()?;
    metadata.refuse_other_weights(true)?;
    head_dim(metadata, config)?;
    gating(metadata, 2)?;
    insert(config, "num_local_experts", metadata.need("expert_count")?);
    if let Some(width) = metadata.number("expert_feed_forward_length")? {
        insert(config, "intermediate_size", width);
    }
    if let Some(dim) = metadata.number("rope.dimension_count")? {
        insert(config, "rotary_dim", dim);
    }
    Ok(())
}

/// A router with groups and a shared expert, the leading layers dense.
fn grouped_moe(metadata: &Metadata<'_>, config: &mut Config) -> Result<(), ConfigError> {
    insert(config, "n_routed_experts", metadata.need("expert_count")?);
    insert(config, "n_shared_experts", metadata.number("expert_shared_count")?.unwrap_or(0));
    insert(config, "first_k_dense_replace", metadata.number("leading_dense_block_count")?.unwrap_or(0));
    insert(config, "routed_scaling_factor", json!(metadata.float("expert_weights_scale")?.unwrap_or(1.0)));
    insert(config, "norm_topk_prob", metadata.flag("expert_weights_norm")?.unwrap_or(false));
    for (key, name) in [("expert_group_count", "n_group"), ("expert_group_used_count", "topk_group")] {
        if let Some(number) = metadata.number(key)?.filter(|number| *number > 0) {
            insert(config, name, number);
        }
    }
    Ok(())
}

fn glm4moe(metadata: &Metadata<'_>, config: &mut Config) -> Result<(), ConfigError> {
    metadata.refuse_windows()?;
    let head = head_dim(metadata, config)?;
    if let (Some(dim), Some(head)) = (metadata.number("rope.dimension_count")?, head) {
        insert(config, "partial_rotary_factor", json!(dim as f64 / head.max(1) as f64));
    }
    insert(config, "use_qk_norm", metadata.has("blk.0.attn_q_norm.weight"));
    insert(config, "attention_bias", metadata.has("blk.0.attn_q.bias"));
    gating(metadata, 2)?;
    grouped_moe(metadata, config)
}

/// Latent attention. Newer files store the two halves of `kv_b_proj` apart, that of the keys transposed.
fn latent(metadata: &Metadata<'_>, config: &mut Config) -> Result<(), ConfigError> {
    let rope = metadata.need("rope.dimension_count")?;
    // Files that were written for the absorbed form say there what a head has in the other one.
    let either = |mla: &str, plain: &str| match metadata.number(mla)? {
        Some(width) => Ok(width),
        None => metadata.need(plain),
    };
    let key = either("attention.key_length_mla", "attention.key_length")?;
    let value = either("attention.value_length_mla", "attention.value_length")?;
    let Some(nope) = key.checked_sub(rope) else {
        return Err(ConfigError::Inconsistent(format!("keys of {key} numbers of which {rope} are rotated")));
    };
    insert(config, "qk_rope_head_dim", rope);
    insert(config, "qk_nope_head_dim", nope);
    insert(config, "v_head_dim", value);
    insert(config, "kv_lora_rank", metadata.need("attention.kv_lora_rank")?);
    if let Some(rank) = metadata.number("attention.q_lora_rank")?.filter(|rank| *rank > 0) {
        insert(config, "q_lora_rank", rank);
    }
    insert(config, "num_key_value_heads", metadata.need("attention.head_count")?);
    insert(config, "kv_b_proj_split", !metadata.has("blk.0.attn_kv_b.weight"));
    Ok(())
}

fn deepseek2(metadata: &Metadata<'_>, config: &mut Config) -> Result<(), ConfigError> {
    metadata.refuse_windows()?;
    latent(metadata, config)?;
    if metadata.has("*.exp_probs_b.bias") {
        gating(metadata, 2)?;
    } else {
        gating(metadata, 1)?;
        insert(config, "model_type", "deepseek_v2");
    }
    grouped_moe(metadata, config)
}

fn glm_dsa(metadata: &Metadata<'_>, config: &mut Config) -> Result<(), ConfigError> {
    metadata.refuse_windows()?;
    latent(metadata, config)?;
    gating(metadata, 2)?;
    grouped_moe(metadata, config)?;
    let indexer = [
        ("attention.indexer.head_count", "index_n_heads"),
        ("attention.indexer.key_length", "index_head_dim"),
        ("attention.indexer.top_k", "index_topk"),
    ];
    for (key, name) in indexer {
        if let Some(number) = metadata.number(key)? {
            insert(config, name, number);
        }
    }
    // A layer without an indexer of its own uses the selection of the last one that has it.
    let (layers, _) = metadata.layers()?;
    let own = |layer| metadata.has(&format!("blk.{layer}.indexer.attn_k.weight"));
    let kinds: Vec<&str> = (0..layers).map(|layer| if own(layer) { "full" } else { "shared" }).collect();
    insert(config, "indexer_types", kinds);
    Ok(())
}
