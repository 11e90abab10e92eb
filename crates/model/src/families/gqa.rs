//! Families with grouped-query attention and a softmax router.

use metaltail_kernels::Activation;

use crate::config::{ConfigError, ConfigReader};
use crate::families::Common;
use crate::plan::{
    AttentionPlan, FfnPlan, GqaPlan, LayerPlan, MoeNames, MoePlan, Plan, QkNorm, RopePairs, RouterPlan,
    Scoring,
};
use crate::rope;

/// OLMoE: every layer sparse, one norm over the whole query and key projections.
pub(super) fn olmoe(config: &ConfigReader<'_>) -> Result<Plan, ConfigError> {
    let common = Common::read(config, &["full_attention"])?;
    config.refuse_unless(config.get("clip_qkv").is_none(), "clip_qkv")?;
    let attention = attention(config, &common, &Variant::new(QkNorm::Projection))?;
    let moe = softmax_moe(config, "intermediate_size", false, MoeNames::MLP)?;
    let layer = LayerPlan { attention, ffn: FfnPlan::Moe(moe) };
    let layers = vec![layer; common.layers];
    Ok(common.plan(config.family(), layers, None))
}

/// Mixtral: every layer sparse, queries and keys are not normed.
pub(super) fn mixtral(config: &ConfigReader<'_>) -> Result<Plan, ConfigError> {
    let common = Common::read(config, &["full_attention"])?;
    let rope = rope::Defaults { theta: 1e6, part: None };
    let attention = attention(config, &common, &Variant { rope, ..Variant::new(QkNorm::None) })?;
    let moe = softmax_moe(config, "intermediate_size", true, MoeNames::BLOCK_SPARSE)?;
    let layers = vec![LayerPlan { attention, ffn: FfnPlan::Moe(moe) }; common.layers];
    Ok(common.plan(config.family(), layers, None))
}

/// Qwen3-MoE: some layers may be dense, queries and keys are normed a head at a time.
pub(super) fn qwen3_moe(config: &ConfigReader<'_>) -> Result<Plan, ConfigError> {
    let common = Common::read(config, &["full_attention"])?;
    let attention = attention(config, &common, &Variant::new(QkNorm::Head))?;
    let moe = softmax_moe(config, "moe_intermediate_size", true, MoeNames::MLP)?;
    partly_dense(config, common, &attention, &moe)
}

/// Qwen2-MoE: queries, keys and values have biases, and a shared expert stands behind a gate.
pub(super) fn qwen2_moe(config: &ConfigReader<'_>) -> Result<Plan, ConfigError> {
    let common = Common::read(config, &["full_attention"])?;
    let rope = rope::Defaults::USUAL;
    let plan = grouped(config, &common, &Variant { qk_norm: QkNorm::None, bias: true, rope })?;
    let attention = AttentionPlan::Gqa(GqaPlan { bias: config.flag_or("qkv_bias", true)?, ..plan });
    let routed = softmax_moe(config, "moe_intermediate_size", false, MoeNames::ONE_SHARED)?;
    let shared = config.size_or("shared_expert_intermediate_size", 5632, 1..=1 << 20)?;
    let moe = MoePlan { shared_width: Some(shared), shared_gate: true, ..routed };
    partly_dense(config, common, &attention, &moe)
}

/// Layers that are sparse unless the configuration says otherwise.
fn partly_dense(
    config: &ConfigReader<'_>,
    common: Common,
    attention: &AttentionPlan,
    moe: &MoePlan,
) -> Result<Plan, ConfigError> {
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

/// Layers without routed experts, by `mlp_only_layers`.
pub(super) fn dense_layers(config: &ConfigReader<'_>) -> Result<Vec<usize>, ConfigError> {
    let Some(value) = config.get("mlp_only_layers") else { return Ok(Vec::new()) };
    let wrong = || ConfigError::Type {
        key: "mlp_only_layers".into(),
        wanted: "a list of layer numbers".into(),
        got: "something else".into(),
    };
    let list = value.as_array().ok_or_else(wrong)?;
    list.iter().map(|item| item.as_u64().and_then(|n| usize::try_from(n).ok()).ok_or_else(wrong)).collect()
}

/// What tells the attention of one family from that of another.
pub(super) struct Variant {
    /// What the norm of queries and keys runs over.
    pub qk_norm: QkNorm,
    /// Whether `attention_bias` is computed; where not, it is refused.
    pub bias: bool,
    /// Rotation where the configuration is silent.
    pub rope: rope::Defaults,
}

impl Variant {
    /// Without biases, and with the usual rotation.
    pub(super) fn new(qk_norm: QkNorm) -> Variant {
        Variant { qk_norm, bias: false, rope: rope::Defaults::USUAL }
    }
}

pub(super) fn attention(
    config: &ConfigReader<'_>,
    common: &Common,
    variant: &Variant,
) -> Result<AttentionPlan, ConfigError> {
    Ok(AttentionPlan::Gqa(grouped(config, common, variant)?))
}

/// Attention to all positions, without sinks.
pub(super) fn grouped(
    config: &ConfigReader<'_>,
    common: &Common,
    variant: &Variant,
) -> Result<GqaPlan, ConfigError> {
    let bias = config.flag_or("attention_bias", false)?;
    config.refuse_unless(variant.bias || !bias, "attention_bias true")?;
    let heads = config.size("num_attention_heads", 1..=1024)?;
    let kv_heads = config.size_or("num_key_value_heads", heads, 1..=heads)?;
    let head_dim = head_dim(config, common)?;
    if !heads.is_multiple_of(kv_heads) {
        return Err(ConfigError::Inconsistent(format!(
            "{heads} query heads over {kv_heads} key-value heads"
        )));
    }
    Ok(GqaPlan {
        heads,
        kv_heads,
        head_dim,
        rope: rope::plan(config, head_dim, pairs(config)?, variant.rope)?,
        scale: (head_dim as f64).powf(-0.5) as f32,
        qk_norm: variant.qk_norm,
        qk_norm_eps: common.norm_eps,
        bias,
        output_bias: false,
        sinks: false,
        window: None,
        gate: false,
    })
}

/// Which elements a rotation pairs. Published files have halves; those that come from GGUF may have had the rows of
/// queries and keys permuted so that the elements of a pair are neighbours.
fn pairs(config: &ConfigReader<'_>) -> Result<RopePairs, ConfigError> {
    let interleaved = config.flag_or("rope_interleave", false)?;
    Ok(if interleaved { RopePairs::Interleaved } else { RopePairs::Halves })
}

/// Width of a head: stated, else the model's width shared out.
pub(super) fn head_dim(config: &ConfigReader<'_>, common: &Common) -> Result<usize, ConfigError> {
    let heads = config.size("num_attention_heads", 1..=1024)?;
    config.size_or("head_dim", common.hidden / heads, 2..=4096)
}

/// Experts behind a softmax router; `width_key` is the configuration's name of their width.
pub(super) fn softmax_moe(
    config: &ConfigReader<'_>,
    width_key: &str,
    normalise_default: bool,
    names: MoeNames,
) -> Result<MoePlan, ConfigError> {
    config.only("scoring_func", &["softmax"])?;
    config.only_number("routed_scaling_factor", 1.0)?;
    let experts = expert_count(config)?;
    Ok(MoePlan {
        experts,
        top_k: config.size("num_experts_per_tok", 1..=experts.min(64))?,
        width: config.size(width_key, 1..=1 << 20)?,
        router: RouterPlan {
            scoring: Scoring::Softmax,
            bias: false,
            correction_bias: false,
            groups: None,
            normalise: config.flag_or("norm_topk_prob", normalise_default)?,
            scale: 1.0,
        },
        shared_width: None,
        activation: Activation::SwiGlu,
        expert_biases: None,
        shared_gate: false,
        names,
    })
}

/// Routed experts a layer: some files say `num_experts`, some `num_local_experts`.
pub(super) fn expert_count(config: &ConfigReader<'_>) -> Result<usize, ConfigError> {
    let local = config.get("num_experts").is_none() && config.get("num_local_experts").is_some();
    config.size(if local { "num_local_experts" } else { "num_experts" }, 1..=4096)
}
