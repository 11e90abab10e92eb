//! `glm_moe_dsa` (GLM-5): latent attention with a sparse indexer on some layers.

use crate::config::{ConfigError, ConfigReader};
use crate::families::deepseek::{dense_ffn, has_draft, latent_attention, moe};
use crate::families::{Common, sparse_layers};
use crate::plan::{AttentionPlan, FfnPlan, IndexerPlan, IndexerUse, LayerPlan, Plan};

pub(super) fn plan(config: &ConfigReader<'_>) -> Result<Plan, ConfigError> {
    let common = Common::read(config, &["full_attention", "indexed_attention"])?;
    let attention = latent_attention(config, true)?;
    let indexers = indexer_uses(config, common.layers, attention.q_lora.is_some())?;
    let (dense, moe) = (dense_ffn(config)?, moe(config, 2.5)?);
    let layer = |sparse: bool, indexer: IndexerUse| {
        let mut attention = attention.clone();
        attention.indexer = indexer;
        LayerPlan {
            attention: AttentionPlan::Mla(attention),
            ffn: if sparse { FfnPlan::Moe(moe.clone()) } else { dense.clone() },
        }
    };
    let sparse = sparse_layers(config, common.layers)?;
    let layers = sparse.into_iter().zip(indexers).map(|(s, i)| layer(s, i)).collect();
    // The draft layer attends to everything.
    let draft = has_draft(config)?.then(|| layer(true, IndexerUse::None));
    Ok(common.plan(config.family(), layers, draft))
}

fn indexer_uses(
    config: &ConfigReader<'_>,
    layers: usize,
    compressed_queries: bool,
) -> Result<Vec<IndexerUse>, ConfigError> {
    if config.get("index_topk").is_none() {
        return Ok(vec![IndexerUse::None; layers]);
    }
    config.refuse_unless(compressed_queries, "an indexer without q_lora_rank")?;
    let indexer = IndexerPlan {
        heads: config.size("index_n_heads", 1..=1024)?,
        head_dim: config.size("index_head_dim", 2..=4096)?,
        top_k: config.size("index_topk", 1..=1 << 24)?,
    };
    let rope_dim = config.size("qk_rope_head_dim", 2..=1024)?;
    if indexer.head_dim < rope_dim {
        return Err(ConfigError::Inconsistent(format!(
            "`index_head_dim` {} is smaller than `qk_rope_head_dim` {rope_dim}",
            indexer.head_dim
        )));
    }
    let owners = owners(config, layers)?;
    if !owners.first().copied().unwrap_or(false) {
        return Err(ConfigError::Inconsistent(
            "layer 0 shares an indexer, but there is none before it".into(),
        ));
    }
    Ok(owners
        .into_iter()
        .map(|own| if own { IndexerUse::Own(indexer.clone()) } else { IndexerUse::Shared })
        .collect())
}

/// Which layers own an indexer: `indexer_types`, else `index_topk_pattern`, else every
/// `index_topk_freq`-th layer after `index_skip_topk_offset`.
fn owners(config: &ConfigReader<'_>, layers: usize) -> Result<Vec<bool>, ConfigError> {
    let short = |key: &str, len: usize| {
        ConfigError::Inconsistent(format!("`{key}` has {len} entries for {layers} layers"))
    };
    if let Some(kinds) = config.texts("indexer_types")? {
        if kinds.len() < layers {
            return Err(short("indexer_types", kinds.len()));
        }
        return kinds[..layers]
            .iter()
            .map(|kind| match *kind {
                "full" => Ok(true),
                "shared" => Ok(false),
                other => Err(config.unsupported(format!("indexer_types {other:?}"))),
            })
            .collect();
    }
    if config.get("index_topk_pattern").is_some() {
        let pattern = config.text("index_topk_pattern")?;
        if pattern.chars().count() < layers {
            return Err(short("index_topk_pattern", pattern.chars().count()));
        }
        let known = pattern.chars().all(|c| c == 'F' || c == 'S');
        config.refuse_unless(known, "an index_topk_pattern with letters other than F and S")?;
        return Ok(pattern.chars().take(layers).map(|c| c == 'F').collect());
    }
    let every = config.size_or("index_topk_freq", 1, 1..=128)?;
    let offset = config.size_or("index_skip_topk_offset", 2, 0..=128)?;
    Ok((0..layers).map(|layer| (layer + 1).saturating_sub(offset).is_multiple_of(every)).collect())
}
