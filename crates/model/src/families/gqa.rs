//! Families with grouped-query attention and a softmax router.

use serde_json::Value;

use crate::config::{ConfigError, ConfigReader};
use crate::families::Common;
use crate::plan::{
    AttentionPlan, FfnPlan, GqaPlan, LayerPlan, MoePlan, Plan, QkNorm, RopePairs, RouterPlan, Scoring,
};
use crate::rope;

/// OLMoE: every layer sparse, one norm over the whole query and key projections.
pub(super) fn olmoe(config: &ConfigReader<'_>) -> Result<Plan, ConfigError> {
    let common = Common::read(config, &["full_attention"])?;
    config.refuse_unless(config.get("clip_qkv").is_none(), "clip_qkv")?;
    let attention = attention(config, &common, QkNorm::Projection)?;
    let moe = softmax_moe(config, "intermediate_size", false)?;
    let layer = LayerPlan { attention, ffn: FfnPlan::Moe(moe) };
    let layers = vec![layer; common.layers];
    Ok(common.plan(config.family(), layers, None))
}

/// Qwen3-MoE: some layers may be dense, queries and keys are normed a head at a time.
pub(super) fn qwen3_moe(config: &ConfigReader<'_>) -> Result<Plan, ConfigError> {
    let common = Common::read(config, &["full_attention"])?;
    let attention = attention(config, &common, QkNorm::Head)?;
    let moe = softmax_moe(config, "moe_intermediate_size", true)?;
    let step = config.size_or("decoder_sparse_step", 1, 1..=128)?;
    let dense_only = dense_layers(config)?;
    let dense = FfnPlan::Dense { width: config.size_or("intermediate_size", 1, 1..=1 << 20)? };
    let layers = (0..common.layers)
        .map(|index| {
            let sparse = !dense_only.contains(&index) && (index + 1).is_multiple_of(step);
            let ffn = if sparse { FfnPlan::Moe(moe.clone()) } else { dense.clone() };
            LayerPlan { attention: attention.clone(), ffn }
        })
        .collect();
    Ok(common.plan(config.family(), layers, None))
}

fn dense_layers(config: &ConfigReader<'_>) -> Result<Vec<usize>, ConfigError> {
    let Some(value) = config.get("mlp_only_layers") else { return Ok(Vec::new()) };
    let wrong = || ConfigError::Type {
        key: "mlp_only_layers".into(),
        wanted: "a list of layer numbers".into(),
        got: "something else".into(),
    };
    let list = value.as_array().ok_or_else(wrong)?;
    list.iter().map(|item| item.as_u64().and_then(|n| usize::try_from(n).ok()).ok_or_else(wrong)).collect()
}

fn attention(
    config: &ConfigReader<'_>,
    common: &Common,
    qk_norm: QkNorm,
) -> Result<AttentionPlan, ConfigError> {
    let heads = config.size("num_attention_heads", 1..=1024)?;
    let kv_heads = config.size_or("num_key_value_heads", heads, 1..=heads)?;
    let head_dim = match config.get("head_dim") {
        Some(_) => config.size("head_dim", 2..=4096)?,
        None => common.hidden / heads,
    };
    if !heads.is_multiple_of(kv_heads) {
        return Err(ConfigError::Inconsistent(format!(
            "{heads} query heads over {kv_heads} key-value heads"
        )));
    }
    Ok(AttentionPlan::Gqa(GqaPlan {
        heads,
        kv_heads,
        head_dim,
        rope: rope::plan(config, head_dim, RopePairs::Halves)?,
        scale: (head_dim as f64).powf(-0.5) as f32,
        qk_norm,
        qk_norm_eps: common.norm_eps,
    }))
}

fn softmax_moe(
    config: &ConfigReader<'_>,
    width_key: &str,
    normalise_default: bool,
) -> Result<MoePlan, ConfigError> {
    config.only("scoring_func", &["softmax"])?;
    config.only_number("routed_scaling_factor", 1.0)?;
    // Newer files say num_local_experts, older num_experts.
    let key = ["num_experts", "num_local_experts"]
        .into_iter()
        .find(|key| config.get(key).is_some_and(|value| *value != Value::Null))
        .unwrap_or("num_experts");
    let experts = config.size(key, 1..=4096)?;
    Ok(MoePlan {
        experts,
        top_k: config.size("num_experts_per_tok", 1..=experts.min(64))?,
        width: config.size(width_key, 1..=1 << 20)?,
        router: RouterPlan {
            scoring: Scoring::Softmax,
            correction_bias: false,
            groups: None,
            normalise: config.flag_or("norm_topk_prob", normalise_default)?,
            scale: 1.0,
        },
        shared_width: None,
    })
}
