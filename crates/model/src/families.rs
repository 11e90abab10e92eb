//! One function a family: configuration to plan. A new family is a new row here.

mod deepseek;
mod glm;
mod glm4;
mod gpt_oss;
mod gqa;
mod minimax;
mod qwen3_5;

use serde_json::{Value, json};

use crate::config::{ConfigError, ConfigReader};
use crate::plan::{LayerPlan, NormWeights, Plan};

/// A family that this version runs.
pub struct Family {
    /// `model_type` in `config.json`.
    pub name: &'static str,
    plan: fn(&ConfigReader<'_>) -> Result<Plan, ConfigError>,
}

/// All families, in alphabetical order.
pub const FAMILIES: &[Family] = &[
    Family { name: "deepseek_v2", plan: deepseek::v2 },
    Family { name: "deepseek_v3", plan: deepseek::plan },
    Family { name: "glm4_moe", plan: glm4::plan },
    Family { name: "glm_moe_dsa", plan: glm::plan },
    Family { name: "gpt_oss", plan: gpt_oss::plan },
    Family { name: "minimax_m2", plan: minimax::plan },
    Family { name: "mixtral", plan: gqa::mixtral },
    Family { name: "olmoe", plan: gqa::olmoe },
    Family { name: "qwen2_moe", plan: gqa::qwen2_moe },
    Family { name: "qwen3_5_moe", plan: qwen3_5::qwen3_5_moe },
    Family { name: "qwen3_5_moe_text", plan: qwen3_5::qwen3_5_moe_text },
    Family { name: "qwen3_moe", plan: gqa::qwen3_moe },
    Family { name: "qwen3_next", plan: qwen3_5::qwen3_next },
];

impl Plan {
    /// The plan of a configuration, every dimension checked.
    ///
    /// # Errors
    /// Unknown family, missing or ill-typed keys, dimensions outside what real models have,
    /// features that this version does not compute: each is named.
    pub fn from_config(config: &Value) -> Result<Plan, ConfigError> {
        let reader = ConfigReader::new(config)?;
        let family = FAMILIES.iter().find(|family| family.name == reader.family());
        let supported = || FAMILIES.iter().map(|f| f.name).collect::<Vec<_>>().join(", ");
        let family = family.ok_or_else(|| reader.unknown_family(supported()))?;
        (family.plan)(&reader)
    }
}

/// Keys that every family shares.
struct Common {
    hidden: usize,
    vocab: usize,
    max_context: usize,
    norm_eps: f32,
    tied_head: bool,
    layers: usize,
}

impl Common {
    /// `layer_types` are the entries of that list that the family computes.
    fn read(config: &ConfigReader<'_>, layer_types: &[&str]) -> Result<Common, ConfigError> {
        config.only("hidden_act", &["silu"])?;
        for kind in config.texts("layer_types")?.unwrap_or_default() {
            config.refuse_unless(layer_types.contains(&kind), format!("layer_types {kind:?}"))?;
        }
        refuse_windows(config)?;
        refuse_other_quantization(config)?;
        config.refuse_unless(!config.flag_or("mlp_bias", false)?, "mlp_bias true")?;
        Common::dimensions(config)
    }

    /// The numbers alone, for a family with refusals of its own.
    fn dimensions(config: &ConfigReader<'_>) -> Result<Common, ConfigError> {
        let eps = config.number_or("rms_norm_eps", 1e-5)?;
        config.refuse_unless((0.0..1.0).contains(&eps), format!("rms_norm_eps {eps}"))?;
        Ok(Common {
            hidden: config.size("hidden_size", 1..=65_536)?,
            vocab: config.size("vocab_size", 1..=4_194_304)?,
            max_context: config.size_or("max_position_embeddings", 4096, 1..=1 << 28)?,
            norm_eps: eps as f32,
            tied_head: config.flag_or("tie_word_embeddings", false)?,
            layers: config.size("num_hidden_layers", 1..=128)?,
        })
    }

    fn plan(self, family: &str, layers: Vec<LayerPlan>, draft: Option<LayerPlan>) -> Plan {
        Plan {
            family: family.to_owned(),
            hidden: self.hidden,
            vocab: self.vocab,
            max_context: self.max_context,
            norm_eps: self.norm_eps,
            norms: NormWeights::Plain,
            tied_head: self.tied_head,
            layers,
            draft,
        }
    }
}

/// Refuses attention to a window. Published files leave a window's size in place beside
/// `use_sliding_window` false, which switches it off.
fn refuse_windows(config: &ConfigReader<'_>) -> Result<(), ConfigError> {
    let switched_off = config.get("use_sliding_window").is_some();
    config.refuse_unless(!config.flag_or("use_sliding_window", false)?, "use_sliding_window")?;
    match config.get("sliding_window") {
        Some(_) if !switched_off => {
            let size = config.size("sliding_window", 0..=usize::MAX)?;
            Err(config.unsupported(format!("sliding_window {size}")))
        }
        _ => Ok(()),
    }
}

/// Refuses stored formats other than FP8 in blocks of 128 × 128, by the name the file gives them.
fn refuse_other_quantization(config: &ConfigReader<'_>) -> Result<(), ConfigError> {
    let Some(quantization) = config.object("quantization_config")? else { return Ok(()) };
    let method = quantization.text("quant_method")?;
    config.refuse_unless(method == "fp8", format!("quant_method {method:?}"))?;
    match quantization.get("weight_block_size") {
        Some(size) if *size != json!([128, 128]) => {
            Err(config.unsupported(format!("quantization_config.weight_block_size {size}")))
        }
        _ => Ok(()),
    }
}

/// Whether each layer has routed experts: `mlp_layer_types` where given, else all layers from
/// `first_k_dense_replace` on.
fn sparse_layers(config: &ConfigReader<'_>, layers: usize) -> Result<Vec<bool>, ConfigError> {
    if let Some(kinds) = config.texts("mlp_layer_types")? {
        if kinds.len() < layers {
            return Err(ConfigError::Inconsistent(format!(
                "`mlp_layer_types` has {} entries for {layers} layers",
                kinds.len()
            )));
        }
        return kinds[..layers]
            .iter()
            .map(|kind| match *kind {
                "sparse" => Ok(true),
                "dense" => Ok(false),
                other => Err(config.unsupported(format!("mlp_layer_types {other:?}"))),
            })
            .collect();
    }
    let dense = config.size_or("first_k_dense_replace", 0, 0..=layers)?;
    Ok((0..layers).map(|layer| layer >= dense).collect())
}

#[cfg(test)]
mod tests;
