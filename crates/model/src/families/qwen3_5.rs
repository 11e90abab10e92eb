//! `qwen3_5_moe` and `qwen3_next`: layers with linear attention between layers with gated grouped-query
//! attention, a softmax router, and a shared expert behind a gate. The two store the same model differently.

use crate::config::{ConfigError, ConfigReader};
use crate::families::gqa::{Variant, attention, dense_layers, softmax_moe};
use crate::families::{Common, refuse_other_quantization};
use crate::plan::{
    AttentionPlan, DecayRate, DeltaNetPlan, DeltaProjections, FfnPlan, HeadSharing, LayerPlan, MoeNames,
    MoePlan, NormWeights, Plan, QkNorm,
};
use crate::rope;

/// Entries of `layer_types`.
const LINEAR: &str = "linear_attention";
const FULL: &str = "full_attention";

/// A model that also sees: the configuration of its text part lies within. Images are not read.
pub(super) fn qwen3_5_moe(config: &ConfigReader<'_>) -> Result<Plan, ConfigError> {
    let Some(text) = config.object("text_config")? else {
        return qwen3_5_moe_text(config);
    };
    refuse_other_quantization(config)?;
    let mut plan = qwen3_5_moe_text(&text)?;
    // The outer key is the one that the reference heeds.
    plan.tied_head = config.flag_or("tie_word_embeddings", false)?;
    Ok(plan)
}

/// Its text part, or a model without another.
pub(super) fn qwen3_5_moe_text(config: &ConfigReader<'_>) -> Result<Plan, ConfigError> {
    let moe = moe(config)?;
    hybrid(config, DeltaProjections::Apart, |_| FfnPlan::Moe(moe.clone()))
}

/// Qwen3-Next, of which some layers may be dense.
pub(super) fn qwen3_next(config: &ConfigReader<'_>) -> Result<Plan, ConfigError> {
    let moe = moe(config)?;
    let step = config.size_or("decoder_sparse_step", 1, 1..=128)?;
    let dense_only = dense_layers(config)?;
    let dense = FfnPlan::Dense { width: config.size_or("intermediate_size", 5632, 1..=1 << 20)? };
    hybrid(config, DeltaProjections::ByKeyHead, |index| {
        let sparse = !dense_only.contains(&index) && (index + 1).is_multiple_of(step);
        if sparse { FfnPlan::Moe(moe.clone()) } else { dense.clone() }
    })
}

fn hybrid(
    config: &ConfigReader<'_>,
    projections: DeltaProjections,
    ffn: impl Fn(usize) -> FfnPlan,
) -> Result<Plan, ConfigError> {
    let common = Common::read(config, &[LINEAR, FULL])?;
    let rope = rope::Defaults { part: Some(0.25), ..rope::Defaults::USUAL };
    let mut full = attention(config, &common, &Variant { rope, ..Variant::new(QkNorm::Head) })?;
    if let AttentionPlan::Gqa(gqa) = &mut full {
        gqa.gate = true;
    }
    // Not a key of published files: configurations that come from GGUF have it.
    let norms = match config.flag_or("norm_weights_plain", false)? {
        true => NormWeights::Plain,
        false => NormWeights::OnePlus,
    };
    let linear = AttentionPlan::DeltaNet(delta_net(config, &common, projections)?);
    let layers = linear_layers(config, common.layers)?
        .into_iter()
        .enumerate()
        .map(|(index, is_linear)| LayerPlan {
            attention: if is_linear { linear.clone() } else { full.clone() },
            ffn: ffn(index),
        })
        .collect();
    Ok(Plan { norms, ..common.plan(config.family(), layers, None) })
}

/// Which layers have linear attention: `layer_types`, else all but every `full_attention_interval`-th.
fn linear_layers(config: &ConfigReader<'_>, layers: usize) -> Result<Vec<bool>, ConfigError> {
    let Some(kinds) = config.texts("layer_types")? else {
        let interval = config.size_or("full_attention_interval", 4, 1..=128)?;
        return Ok((0..layers).map(|layer| !(layer + 1).is_multiple_of(interval)).collect());
    };
    if kinds.len() != layers {
        return Err(ConfigError::Inconsistent(format!(
            "`layer_types` has {} entries for {layers} layers",
            kinds.len()
        )));
    }
    // Other entries were refused by name.
    Ok(kinds.into_iter().map(|kind| kind == LINEAR).collect())
}

fn delta_net(
    config: &ConfigReader<'_>,
    common: &Common,
    projections: DeltaProjections,
) -> Result<DeltaNetPlan, ConfigError> {
    let key_heads = config.size_or("linear_num_key_heads", 16, 1..=1024)?;
    let value_heads = config.size_or("linear_num_value_heads", 32, 1..=1024)?;
    if !value_heads.is_multiple_of(key_heads) {
        return Err(ConfigError::Inconsistent(format!(
            "`linear_num_value_heads` {value_heads} over `linear_num_key_heads` {key_heads}"
        )));
    }
    Ok(DeltaNetPlan {
        key_heads,
        value_heads,
        key_dim: config.size_or("linear_key_head_dim", 128, 1..=1024)?,
        value_dim: config.size_or("linear_value_head_dim", 128, 1..=1024)?,
        kernel: config.size_or("linear_conv_kernel_dim", 4, 2..=64)?,
        norm_eps: common.norm_eps,
        projections,
        // Nor are these two.
        sharing: match config.flag_or("linear_heads_modulo", false)? {
            true => HeadSharing::Modulo,
            false => HeadSharing::Neighbours,
        },
        rate: match config.flag_or("linear_rates_plain", false)? {
            true => DecayRate::Plain,
            false => DecayRate::Logarithm,
        },
    })
}

fn moe(config: &ConfigReader<'_>) -> Result<MoePlan, ConfigError> {
    let routed = softmax_moe(config, "moe_intermediate_size", true, MoeNames::ONE_SHARED)?;
    let width = config.size_or("shared_expert_intermediate_size", 512, 1..=1 << 20)?;
    Ok(MoePlan { shared_width: Some(width), shared_gate: true, ..routed })
}
