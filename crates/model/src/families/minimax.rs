//! `minimax_m2`: grouped-query attention that norms whole projections and rotates a part of each
//! head, sigmoid router with correction bias, tensors named as Mixtral's.

use metaltail_kernels::Activation;

use crate::config::{ConfigError, ConfigReader};
use crate::families::Common;
use crate::families::gqa::{Variant, attention, expert_count, head_dim};
use crate::plan::{AttentionPlan, FfnPlan, LayerPlan, MoeNames, MoePlan, Plan, QkNorm, RouterPlan, Scoring};
use crate::rope;

pub(super) fn plan(config: &ConfigReader<'_>) -> Result<Plan, ConfigError> {
    let common = Common::read(config, &["full_attention"])?;
    refuse_other_variants(config)?;
    let layer = LayerPlan { attention: rotated_attention(config, &common)?, ffn: FfnPlan::Moe(moe(config)?) };
    // Draft modules, which published configurations count (`num_mtp_modules`), are not used: no
    // answer depends on them.
    let layers = vec![layer; common.layers];
    Ok(common.plan(config.family(), layers, None))
}

/// The configuration has switches for what earlier MiniMax models computed.
fn refuse_other_variants(config: &ConfigReader<'_>) -> Result<(), ConfigError> {
    config.only("qk_norm_type", &["per_layer"])?;
    for key in ["use_qk_norm", "use_routing_bias"] {
        config.refuse_unless(config.flag_or(key, true)?, format!("{key} false"))?;
    }
    config.only_number("shared_intermediate_size", 0.0)?;
    match config.get("attn_type_list") {
        Some(kinds) if !kinds.as_array().is_some_and(|kinds| kinds.iter().all(|kind| *kind == 1)) => {
            Err(config.unsupported("an attn_type_list with other entries than 1 (full attention)"))
        }
        _ => Ok(()),
    }
}

/// Attention that rotates `rotary_dim` elements of each head, or the `partial_rotary_factor` of
/// newer files; where a file has both they must agree.
fn rotated_attention(config: &ConfigReader<'_>, common: &Common) -> Result<AttentionPlan, ConfigError> {
    let head_dim = head_dim(config, common)?;
    let stated = config.size_or("rotary_dim", head_dim, 2..=head_dim)?;
    let rope = rope::Defaults { theta: 5e6, part: Some(stated as f64 / head_dim as f64) };
    let attention = attention(config, common, &Variant { rope, ..Variant::new(QkNorm::Projection) })?;
    if let AttentionPlan::Gqa(gqa) = &attention
        && config.get("rotary_dim").is_some()
        && gqa.rope.dim != stated
    {
        return Err(ConfigError::Inconsistent(format!(
            "`rotary_dim` is {stated}, but `partial_rotary_factor` rotates {} of {head_dim} elements",
            gqa.rope.dim
        )));
    }
    Ok(attention)
}

fn moe(config: &ConfigReader<'_>) -> Result<MoePlan, ConfigError> {
    config.only("scoring_func", &["sigmoid"])?;
    config.only_number("routed_scaling_factor", 1.0)?;
    let experts = expert_count(config)?;
    Ok(MoePlan {
        experts,
        top_k: config.size("num_experts_per_tok", 1..=experts.min(64))?,
        width: config.size("intermediate_size", 1..=1 << 20)?,
        router: RouterPlan {
            scoring: Scoring::Sigmoid,
            bias: false,
            correction_bias: true,
            groups: None,
            normalise: true,
            scale: 1.0,
        },
        shared_width: None,
        activation: Activation::SwiGlu,
        expert_biases: None,
        shared_gate: false,
        names: MoeNames::BLOCK_SPARSE,
    })
}
