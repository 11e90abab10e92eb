//! `glm4_moe` (GLM-4.5 to 4.7): grouped-query attention with biases that rotates half of each head,
//! and the mixture of `deepseek_v3`.

use crate::config::{ConfigError, ConfigReader};
use crate::families::deepseek::{dense_ffn, has_draft, moe};
use crate::families::gqa::{Variant, attention};
use crate::families::{Common, sparse_layers};
use crate::plan::{FfnPlan, LayerPlan, Plan, QkNorm};
use crate::rope;

pub(super) fn plan(config: &ConfigReader<'_>) -> Result<Plan, ConfigError> {
    let common = Common::read(config, &["full_attention"])?;
    // The larger models norm queries and keys, the smaller do not.
    let qk_norm = if config.flag_or("use_qk_norm", false)? { QkNorm::Head } else { QkNorm::None };
    let rope = rope::Defaults { part: Some(0.5), ..rope::Defaults::USUAL };
    let attention = attention(config, &common, &Variant { qk_norm, bias: true, rope })?;
    let (dense, moe) = (dense_ffn(config)?, moe(config, 1.0)?);
    let layer = |sparse: bool| LayerPlan {
        attention: attention.clone(),
        ffn: if sparse { FfnPlan::Moe(moe.clone()) } else { dense.clone() },
    };
    let layers = sparse_layers(config, common.layers)?.into_iter().map(layer).collect();
    let draft = has_draft(config)?.then(|| layer(true));
    Ok(common.plan(config.family(), layers, draft))
}
