//! `gpt_oss`: grouped-query attention with sinks, biases and windows in some layers; a router with a bias; experts with
//! biases and a clamped activation, stored a tensor a layer.

use metaltail_kernels::Activation;

use crate::config::{ConfigError, ConfigReader};
use crate::families::Common;
use crate::families::gqa::{Variant, expert_count, grouped};
use crate::plan::{
    AttentionPlan, ExpertBiasForm, FfnPlan, GqaPlan, LayerPlan, MoeNames, MoePlan, Plan, QkNorm,
};
use crate::plan::{RouterPlan, Scoring};
use crate::rope;

/// Positions of a window where the configuration is silent.
const WINDOW: usize = 128;

pub(super) fn plan(config: &ConfigReader<'_>) -> Result<Plan, ConfigError> {
    refuse_other_variants(config)?;
    let common = Common::dimensions(config)?;
    let (attention, moe) = (attention(config, &common)?, moe(config)?);
    let window = config.size_or("sliding_window", WINDOW, 1..=1 << 28)?;
    let layer = |slides: bool| LayerPlan {
        attention: AttentionPlan::Gqa(GqaPlan { window: slides.then_some(window), ..attention.clone() }),
        ffn: FfnPlan::Moe(moe.clone()),
    };
    let layers = sliding_layers(config, common.layers)?.into_iter().map(layer).collect();
    Ok(common.plan(config.family(), layers, None))
}

fn refuse_other_variants(config: &ConfigReader<'_>) -> Result<(), ConfigError> {
    config.only("hidden_act", &["silu"])?;
    config.only("scoring_func", &["softmax"])?;
    config.only_number("routed_scaling_factor", 1.0)?;
    for key in ["mlp_bias", "norm_topk_prob"] {
        config.refuse_unless(config.flag_or(key, true)?, format!("{key} false"))?;
    }
    config.refuse_unless(!config.flag_or("use_qk_norm", false)?, "use_qk_norm true")?;
    if let Some(quantization) = config.object("quantization_config")? {
        let method = quantization.text("quant_method")?;
        config.refuse_unless(method == "mxfp4", format!("quant_method {method:?}"))?;
    }
    Ok(())
}

/// Whether each layer attends to a window: `layer_types` where given, else every other layer from the first on.
fn sliding_layers(config: &ConfigReader<'_>, layers: usize) -> Result<Vec<bool>, ConfigError> {
    let Some(kinds) = config.texts("layer_types")? else {
        return Ok((0..layers).map(|layer| layer.is_multiple_of(2)).collect());
    };
    if kinds.len() < layers {
        let text = format!("`layer_types` has {} entries for {layers} layers", kinds.len());
        return Err(ConfigError::Inconsistent(text));
    }
    let slides = |kind: &&str| match *kind {
        "sliding_attention" => Ok(true),
        "full_attention" => Ok(false),
        other => Err(config.unsupported(format!("layer_types {other:?}"))),
    };
    kinds[..layers].iter().map(slides).collect()
}

/// All but the window.
fn attention(config: &ConfigReader<'_>, common: &Common) -> Result<GqaPlan, ConfigError> {
    // Nothing follows from the model's width here, and without a rotation the reference takes one of its own.
    config.size("head_dim", 2..=4096)?;
    if config.object("rope_parameters")?.is_none() && config.object("rope_scaling")?.is_none() {
        let (key, family) = ("rope_parameters".to_owned(), config.family().to_owned());
        return Err(ConfigError::Missing { key, family });
    }
    let rope = rope::Defaults { theta: 150_000.0, part: None };
    let plan = grouped(config, common, &Variant { qk_norm: QkNorm::None, bias: true, rope })?;
    let bias = config.flag_or("attention_bias", true)?;
    Ok(GqaPlan { bias, output_bias: bias, sinks: true, ..plan })
}

fn moe(config: &ConfigReader<'_>) -> Result<MoePlan, ConfigError> {
    let experts = expert_count(config)?;
    let (alpha, limit) = (config.number_or("swiglu_alpha", 1.702)?, config.number_or("swiglu_limit", 7.0)?);
    config.refuse_unless(limit > 0.0 && limit <= 1e6, format!("swiglu_limit {limit}"))?;
    config.refuse_unless(alpha > 0.0 && alpha <= 1e6, format!("swiglu_alpha {alpha}"))?;
    // Not a key of published files: configurations that come from GGUF have it.
    let biases = match config.flag_or("expert_biases_apart", false)? {
        true => ExpertBiasForm::Apart,
        false => ExpertBiasForm::InTurn,
    };
    Ok(MoePlan {
        experts,
        top_k: config.size("num_experts_per_tok", 1..=experts.min(64))?,
        width: config.size("intermediate_size", 1..=1 << 20)?,
        router: RouterPlan {
            // The reference takes the softmax of the chosen logits alone, which is that of all divided by the
            // chosen ones' sum.
            scoring: Scoring::Softmax,
            bias: true,
            correction_bias: false,
            groups: None,
            normalise: true,
            scale: 1.0,
        },
        shared_width: None,
        shared_gate: false,
        activation: Activation::ClampedSwiGlu { alpha: alpha as f32, limit: limit as f32 },
        expert_biases: Some(biases),
        names: MoeNames::STACKED,
    })
}
