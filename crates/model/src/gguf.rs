//! GGUF models in the words of Hugging Face: metadata to the configuration, tokenizer and chat template that the
//! same model has there.
//!
//! Everything after this works from those: a plan, and with it the forward pass, knows no GGUF. Keys and their
//! meaning are those of the `gguf` Python package and of llama.cpp, which writes and runs such files.

mod architectures;
mod metadata;
mod pretokenizers;
mod tokenizer;

use metaltail_container::Checkpoint;
use metaltail_container::gguf::Gguf;
use serde_json::{Map, Value, json};

use crate::config::ConfigError;
use crate::plan::Plan;
use architectures::ARCHITECTURES;
use metadata::Metadata;
use tokenizer::TextFiles;
pub(crate) use tokenizer::{config as tokenizer_config, tokenizer};

/// Names of the architectures that can be run.
pub fn architectures() -> impl Iterator<Item = &'static str> {
    ARCHITECTURES.iter().flat_map(|architecture| architecture.names.iter().copied())
}

impl Plan {
    /// The plan of an opened model. One in GGUF gets the configuration that its metadata come to.
    ///
    /// # Errors
    /// As [`Plan::from_config`]; an architecture that is not supported; metadata that are missing or ill-typed.
    pub fn of(checkpoint: &mut Checkpoint) -> Result<Plan, ConfigError> {
        if let Some(gguf) = checkpoint.gguf() {
            let config = configuration(gguf)?;
            let generation = generation(gguf);
            checkpoint.adopt(config, Some(generation));
        }
        Plan::from_config(checkpoint.config())
    }
}

/// Gives a GGUF model the tokenizer and chat template of its metadata, so that they are written with it.
///
/// # Errors
/// A tokenizer that cannot be expressed; a reason in words.
pub fn adopt_text(checkpoint: &mut Checkpoint) -> Result<(), String> {
    let Some(gguf) = checkpoint.gguf() else { return Ok(()) };
    let Some(files) = TextFiles::of(gguf)? else { return Ok(()) };
    let text = |value: &Value| value.to_string().into_bytes();
    let (tokenizer, config) = (text(&files.tokenizer), text(&files.config));
    checkpoint.add_companion("tokenizer.json", tokenizer);
    checkpoint.add_companion("tokenizer_config.json", config);
    Ok(())
}

/// The `config.json` of a GGUF model.
fn configuration(gguf: &Gguf) -> Result<Value, ConfigError> {
    let metadata = Metadata::of(gguf)?;
    let known = ARCHITECTURES.iter().find(|known| known.names.contains(&metadata.architecture()));
    let known = known.ok_or_else(|| ConfigError::Architecture {
        found: metadata.architecture().chars().take(60).collect(),
        supported: architectures().collect::<Vec<_>>().join(", "),
    })?;
    let mut config = Map::new();
    metadata.common(&mut config)?;
    config.insert("model_type".into(), known.family.into());
    (known.describe)(&metadata, &mut config)?;
    Ok(Value::Object(config))
}

/// The `generation_config.json` of a GGUF model: the ids that end a text.
fn generation(gguf: &Gguf) -> Value {
    let id = |name: &str| gguf.get(&format!("tokenizer.ggml.{name}_token_id")).and_then(|id| id.as_u64());
    let mut ends: Vec<u64> = ["eos", "eot", "eom"].into_iter().filter_map(id).collect();
    ends.sort_unstable();
    ends.dedup();
    match id("bos") {
        Some(bos) => json!({"bos_token_id": bos, "eos_token_id": ends}),
        None => json!({"eos_token_id": ends}),
    }
}
