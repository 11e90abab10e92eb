//! Typed access to the metadata of one architecture.

use std::collections::HashSet;

use metaltail_container::gguf::{Array, Gguf, Scalar, Value as Stored};
use serde_json::{Map, Value, json};

use crate::config::ConfigError;

/// Most layers that are looked at; what a plan takes is fewer.
const LAYERS: u64 = 1024;

/// The metadata of a model, and which tensors it has.
pub(super) struct Metadata<'a> {
    gguf: &'a Gguf,
    architecture: &'a str,
    tensors: HashSet<&'a str>,
}

impl<'a> Metadata<'a> {
    pub(super) fn of(gguf: &'a Gguf) -> Result<Metadata<'a>, ConfigError> {
        let key = "general.architecture";
        let stored = gguf.get(key).ok_or_else(|| missing(key, "any"))?;
        let architecture = stored.as_str().ok_or_else(|| wrong(key, "a text", stored))?;
        let tensors = gguf.tensors().map(|(_, tensor)| tensor.name.as_str()).collect();
        Ok(Metadata { gguf, architecture, tensors })
    }

    pub(super) fn architecture(&self) -> &'a str {
        self.architecture
    }

    /// Whether a tensor is there; in any layer where the name begins with `*.`.
    pub(super) fn has(&self, name: &str) -> bool {
        match name.strip_prefix('*') {
            Some(rest) => self.tensors.iter().any(|tensor| tensor.ends_with(rest)),
            None => self.tensors.contains(name),
        }
    }

    /// Dimensions of a tensor, the fastest first.
    pub(super) fn dims(&self, name: &str) -> Option<&'a [u64]> {
        self.gguf.tensors().find(|(_, tensor)| tensor.name == name).map(|(_, tensor)| &*tensor.dims)
    }

    fn get(&self, key: &str) -> Option<&'a Stored> {
        self.gguf.get(&self.key(key))
    }

    fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    /// A whole number of the architecture, if it is there. Where it has one a layer all must be equal.
    pub(super) fn number(&self, key: &str) -> Result<Option<u64>, ConfigError> {
        let Some(stored) = self.get(key) else { return Ok(None) };
        let wrong = || wrong(&self.key(key), "a whole number", stored);
        let number = match stored.as_array() {
            None => stored.as_u64().ok_or_else(wrong)?,
            Some(_) => {
                let all = self.numbers(key)?.unwrap_or_default();
                let first = *all.first().ok_or_else(wrong)?;
                if all.iter().any(|number| *number != first) {
                    let what = format!("{} that differs from layer to layer", self.key(key));
                    return Err(self.unsupported(what));
                }
                first
            }
        };
        Ok(Some(number))
    }

    /// A whole number for each layer, if the key is an array.
    pub(super) fn numbers(&self, key: &str) -> Result<Option<Vec<u64>>, ConfigError> {
        let Some(stored) = self.get(key) else { return Ok(None) };
        let Some(Array::Scalars(items)) = stored.as_array() else { return Ok(None) };
        let number = |item: Scalar| match item {
            Scalar::Bool(on) => Some(u64::from(on)),
            other => other.as_u64(),
        };
        let all: Option<Vec<u64>> = items.iter().map(number).collect();
        all.map(Some).ok_or_else(|| wrong(&self.key(key), "whole numbers", stored))
    }

    pub(super) fn need(&self, key: &str) -> Result<u64, ConfigError> {
        self.number(key)?.ok_or_else(|| missing(&self.key(key), self.architecture))
    }

    /// A number with a fraction, if it is there.
    pub(super) fn float(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        let Some(stored) = self.get(key) else { return Ok(None) };
        let value = match stored {
            Stored::Scalar(Scalar::F32(value)) => Some(f64::from(*value)),
            Stored::Scalar(Scalar::F64(value)) => Some(*value),
            other => other.as_u64().map(|value| value as f64),
        };
        let finite = value.filter(|value| value.is_finite());
        finite.map(Some).ok_or_else(|| wrong(&self.key(key), "a finite number", stored))
    }

    /// A bool, if it is there.
    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(Stored::Scalar(Scalar::Bool(on))) => Ok(Some(*on)),
            Some(stored) => Err(wrong(&self.key(key), "true or false", stored)),
        }
    }

    /// A text, if it is there.
    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        let Some(stored) = self.get(key) else { return Ok(None) };
        stored.as_str().map(Some).ok_or_else(|| wrong(&self.key(key), "a text", stored))
    }

    pub(super) fn unsupported(&self, what: String) -> ConfigError {
        ConfigError::Unsupported { what, family: self.architecture.to_owned() }
    }

    /// Layers without those that only predict drafts, and those.
    pub(super) fn layers(&self) -> Result<(u64, u64), ConfigError> {
        let (all, drafts) = (self.need("block_count")?, self.number("nextn_predict_layers")?.unwrap_or(0));
        // Lists of layers are made of it, before the plan sees it.
        if all > LAYERS {
            let key = self.key("block_count");
            return Err(ConfigError::Range { key, got: all, min: 1, max: LAYERS });
        }
        match all.checked_sub(drafts) {
            Some(layers) => Ok((layers, drafts)),
            None => Err(ConfigError::Inconsistent(format!("{drafts} of {all} layers predict drafts"))),
        }
    }

    /// What every architecture has under the same names.
    pub(super) fn common(&self, config: &mut Map<String, Value>) -> Result<(), ConfigError> {
        let vocab = match self.number("vocab_size")? {
            Some(size) => size,
            None => match self.dims("token_embd.weight") {
                Some([_, size]) => *size,
                _ => return Err(missing("vocab_size", self.architecture)),
            },
        };
        let (layers, drafts) = self.layers()?;
        config.insert("vocab_size".into(), vocab.into());
        config.insert("num_hidden_layers".into(), layers.into());
        config.insert("hidden_size".into(), self.need("embedding_length")?.into());
        config.insert("num_attention_heads".into(), self.need("attention.head_count")?.into());
        config.insert("tie_word_embeddings".into(), (!self.has("output.weight")).into());
        if drafts > 0 {
            config.insert("num_nextn_predict_layers".into(), drafts.into());
        }
        let numbers = [
            ("feed_forward_length", "intermediate_size"),
            ("attention.head_count_kv", "num_key_value_heads"),
            ("context_length", "max_position_embeddings"),
            ("expert_used_count", "num_experts_per_tok"),
            ("expert_feed_forward_length", "moe_intermediate_size"),
        ];
        for (key, name) in numbers {
            if let Some(number) = self.number(key)? {
                config.insert(name.into(), number.into());
            }
        }
        let eps = self.float("attention.layer_norm_rms_epsilon")?;
        let eps =
            eps.ok_or_else(|| missing(&self.key("attention.layer_norm_rms_epsilon"), self.architecture))?;
        config.insert("rms_norm_eps".into(), json!(eps));
        if let Some(theta) = self.float("rope.freq_base")? {
            config.insert("rope_theta".into(), json!(theta));
        }
        self.refuse_other_arithmetic()?;
        self.rope_scaling(config)
    }

    /// Refuses what would change the result and is computed for no architecture; values that change nothing are
    /// let be.
    fn refuse_other_arithmetic(&self) -> Result<(), ConfigError> {
        for (key, neutral) in [
            ("attention.scale", [0.0, 0.0]),
            ("attention.clamp_kqv", [0.0, 0.0]),
            ("logit_scale", [0.0, 1.0]),
            ("rope.scale_linear", [0.0, 1.0]),
            ("rope.scaling.yarn_ext_factor", [-1.0, 1.0]),
        ] {
            if let Some(value) = self.float(key)?.filter(|value| !neutral.contains(value)) {
                return Err(self.unsupported(format!("{} {value}", self.key(key))));
            }
        }
        Ok(())
    }

    /// Refuses a window over positions, for architectures that have none.
    pub(super) fn refuse_windows(&self) -> Result<(), ConfigError> {
        match self.number("attention.sliding_window")? {
            None | Some(0) => Ok(()),
            Some(size) => Err(self.unsupported(format!("{} {size}", self.key("attention.sliding_window")))),
        }
    }

    /// Refuses a factor on the weights of chosen experts, for architectures that have none.
    pub(super) fn refuse_scaled_weights(&self) -> Result<(), ConfigError> {
        match self.float("expert_weights_scale")?.filter(|scale| ![0.0, 1.0].contains(scale)) {
            None => Ok(()),
            Some(scale) => Err(self.unsupported(format!("{} {scale}", self.key("expert_weights_scale")))),
        }
    }

    /// The same, and weights normalised otherwise than `normalised` says.
    pub(super) fn refuse_other_weights(&self, normalised: bool) -> Result<(), ConfigError> {
        self.refuse_scaled_weights()?;
        match self.flag("expert_weights_norm")? {
            Some(got) if got != normalised => {
                Err(self.unsupported(format!("{} {got}", self.key("expert_weights_norm"))))
            }
            _ => Ok(()),
        }
    }

    /// `rope.scaling.*` as `rope_scaling`. The factor on scores of `deepseek2` comes from a key of its own.
    fn rope_scaling(&self, config: &mut Map<String, Value>) -> Result<(), ConfigError> {
        if self.has("rope_freqs.weight") {
            return Err(self.unsupported("factors on frequencies of rotation (rope_freqs)".into()));
        }
        let kind = match self.text("rope.scaling.type")? {
            None | Some("none") => return Ok(()),
            Some(kind) => kind,
        };
        let mut scaling = Map::from_iter([("type".to_owned(), Value::from(kind))]);
        let keys = [
            ("rope.scaling.factor", "factor"),
            ("rope.scaling.yarn_beta_fast", "beta_fast"),
            ("rope.scaling.yarn_beta_slow", "beta_slow"),
        ];
        for (key, name) in keys {
            if let Some(value) = self.float(key)? {
                scaling.insert(name.into(), json!(value));
            }
        }
        if let Some(context) = self.number("rope.scaling.original_context_length")? {
            scaling.insert("original_max_position_embeddings".into(), context.into());
        }
        for (key, usual) in [("rope.scaling.yarn_attn_factor", 1.0), ("rope.scaling.attn_factor", 1.0)] {
            if let Some(factor) = self.float(key)?.filter(|factor| *factor != usual) {
                return Err(self.unsupported(format!("{} {factor}", self.key(key))));
            }
        }
        // Written as a tenth of the published `mscale_all_dim`, which equals `mscale` in every model so far.
        if let Some(tenth) = self.float("rope.scaling.yarn_log_multiplier")? {
            let mscale = (tenth * 10.0 * 1e6).round() / 1e6;
            scaling.insert("mscale".into(), json!(mscale));
            scaling.insert("mscale_all_dim".into(), json!(mscale));
        }
        config.insert("rope_scaling".into(), Value::Object(scaling));
        Ok(())
    }
}

fn missing(key: &str, architecture: &str) -> ConfigError {
    ConfigError::NoMetadata { key: key.to_owned(), architecture: architecture.chars().take(60).collect() }
}

fn wrong(key: &str, wanted: &'static str, got: &Stored) -> ConfigError {
    ConfigError::Metadata { key: key.to_owned(), wanted, got: got.kind().to_string() }
}
