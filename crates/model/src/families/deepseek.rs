//! `deepseek_v3`, and the parts that GLM-5 took from it: latent attention, grouped sigmoid router.

use metaltail_kernels::Activation;

use crate::config::{ConfigError, ConfigReader};
use crate::families::{Common, sparse_layers};
use crate::plan::{
    AttentionPlan, FfnPlan, IndexerUse, KvExpansion, LayerPlan, MlaForm, MlaPlan, MoeNames, MoePlan, Plan,
    RopePairs, RouterPlan, Scoring,
};
use crate::rope;

pub(super) fn plan(config: &ConfigReader<'_>) -> Result<Plan, ConfigError> {
    layers(config, moe(config, 2.5)?)
}

/// DeepSeek-V2: the same with a softmax router that has neither bias nor groups.
pub(super) fn v2(config: &ConfigReader<'_>) -> Result<Plan, ConfigError> {
    config.only("scoring_func", &["softmax"])?;
    config.only("topk_method", &["greedy"])?;
    config.only_number("n_group", 1.0)?;
    let scoring = Scoring::Softmax;
    let mixture = mixture(config, 1.0, false)?;
    let router = RouterPlan { scoring, correction_bias: false, groups: None, ..mixture.router };
    layers(config, MoePlan { router, ..mixture })
}

fn layers(config: &ConfigReader<'_>, moe: MoePlan) -> Result<Plan, ConfigError> {
    let common = Common::read(config, &["full_attention"])?;
    let attention = latent_attention(config, true)?;
    let dense = dense_ffn(config)?;
    let layer = |sparse: bool| LayerPlan {
        attention: AttentionPlan::Mla(attention.clone()),
        ffn: if sparse { FfnPlan::Moe(moe.clone()) } else { dense.clone() },
    };
    let layers = sparse_layers(config, common.layers)?.into_iter().map(layer).collect();
    let draft = has_draft(config)?.then(|| layer(true));
    Ok(common.plan(config.family(), layers, draft))
}

/// Whether the configuration declares a draft layer; more than one is refused.
pub(super) fn has_draft(config: &ConfigReader<'_>) -> Result<bool, ConfigError> {
    let count = config.size_or("num_nextn_predict_layers", 0, 0..=64)?;
    config.refuse_unless(count <= 1, format!("{count} draft layers"))?;
    Ok(count == 1)
}

pub(super) fn dense_ffn(config: &ConfigReader<'_>) -> Result<FfnPlan, ConfigError> {
    Ok(FfnPlan::Dense { width: config.size("intermediate_size", 1..=1 << 20)? })
}

/// Latent attention without an indexer. `interleave_default` is what the reference assumes where
/// `rope_interleave` is absent.
pub(super) fn latent_attention(
    config: &ConfigReader<'_>,
    interleave_default: bool,
) -> Result<MlaPlan, ConfigError> {
    config.refuse_unless(!config.flag_or("attention_bias", false)?, "attention_bias true")?;
    let rope_dim = config.size("qk_rope_head_dim", 2..=1024)?;
    let nope = config.size("qk_nope_head_dim", 1..=4096)?;
    let pairs = if config.flag_or("rope_interleave", interleave_default)? {
        RopePairs::Interleaved
    } else {
        RopePairs::Halves
    };
    let score_factor = rope::Yarn::of(config)?.map_or(1.0, |yarn| yarn.score_factor());
    let q_lora = config.get("q_lora_rank").map(|_| config.size("q_lora_rank", 1..=65_536));
    Ok(MlaPlan {
        heads: config.size("num_attention_heads", 1..=1024)?,
        q_lora: q_lora.transpose()?,
        kv_lora: config.size("kv_lora_rank", 1..=8192)?,
        nope,
        rope: rope::plan(config, rope_dim, pairs, rope::Defaults::USUAL)?,
        value: config.size("v_head_dim", 1..=4096)?,
        scale: (((nope + rope_dim) as f64).powf(-0.5) * score_factor) as f32,
        // The reference builds these two norms with its default, whatever rms_norm_eps says.
        lora_norm_eps: 1e-6,
        indexer: IndexerUse::None,
        form: MlaForm::default(),
        // Not a key of published files: configurations that come from GGUF have it.
        expansion: match config.flag_or("kv_b_proj_split", false)? {
            true => KvExpansion::Split,
            false => KvExpansion::Joint,
        },
    })
}

/// Sigmoid router with correction bias and groups, one shared expert block. `scale_default` is what
/// the reference assumes where `routed_scaling_factor` is absent.
pub(super) fn moe(config: &ConfigReader<'_>, scale_default: f64) -> Result<MoePlan, ConfigError> {
    config.only("scoring_func", &["sigmoid"])?;
    config.only("topk_method", &["noaux_tc"])?;
    mixture(config, scale_default, true)
}

/// What the mixtures of all DeepSeek models share.
fn mixture(
    config: &ConfigReader<'_>,
    scale_default: f64,
    normalise_default: bool,
) -> Result<MoePlan, ConfigError> {
    config.only_number("moe_layer_freq", 1.0)?;
    let experts = config.size("n_routed_experts", 1..=4096)?;
    let top_k = config.size("num_experts_per_tok", 1..=experts.min(64))?;
    let width = config.size("moe_intermediate_size", 1..=1 << 20)?;
    let shared = config.size_or("n_shared_experts", 0, 0..=64)?;
    let groups = config.size_or("n_group", 1, 1..=experts)?;
    let kept = config.size_or("topk_group", 1, 1..=groups)?;
    if !experts.is_multiple_of(groups) {
        return Err(ConfigError::Inconsistent(format!("{experts} experts in {groups} groups")));
    }
    if kept * (experts / groups) < top_k {
        return Err(ConfigError::Inconsistent(format!(
            "{kept} groups of {} experts cannot give {top_k} a token",
            experts / groups
        )));
    }
    let scale = config.number_or("routed_scaling_factor", scale_default)?;
    config.refuse_unless(scale > 0.0 && scale <= 1e4, format!("routed_scaling_factor {scale}"))?;
    Ok(MoePlan {
        experts,
        top_k,
        width,
        router: RouterPlan {
            scoring: Scoring::Sigmoid,
            bias: false,
            correction_bias: true,
            groups: (groups > 1).then_some((groups, kept)),
            normalise: config.flag_or("norm_topk_prob", normalise_default)?,
            scale: scale as f32,
        },
        shared_width: (shared > 0).then_some(shared * width),
        activation: Activation::SwiGlu,
        expert_biases: None,
        shared_gate: false,
        names: MoeNames::MLP,
    })
}
