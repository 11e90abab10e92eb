//! The ids that end a text.

use serde_json::{Map, Value};

use super::{TextError, Tokenizer};

/// Tokens that end an answer by their name alone: end of text, and the role markers with which a
/// model would begin the next turn itself.
const STOP_NAMES: [&str; 5] = ["<|endoftext|>", "<|user|>", "<|observation|>", "<|system|>", "<|assistant|>"];

/// The ids that end generation, ascending and distinct.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopIds(Vec<u32>);

impl StopIds {
    /// Gathers the stop ids of a model: `eos_token_id` (an id or a list) of `config.json` and of
    /// `generation_config.json`, and, where there is a tokenizer, the end-of-text and role markers
    /// that it knows by name. All are united: published models name some in one place only.
    ///
    /// # Errors
    /// An `eos_token_id` that is neither null, an id nor a list of ids.
    pub fn gather(
        config: &Map<String, Value>,
        generation_config: Option<&Value>,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<StopIds, TextError> {
        let mut ids = Vec::new();
        collect("config.json", config.get("eos_token_id"), &mut ids)?;
        // A model that also sees has the configuration of its text part within.
        let text = config.get("text_config").and_then(|value| value.get("eos_token_id"));
        collect("config.json", text, &mut ids)?;
        let generation = generation_config.and_then(|value| value.get("eos_token_id"));
        collect("generation_config.json", generation, &mut ids)?;
        if let Some(tokenizer) = tokenizer {
            ids.extend(STOP_NAMES.iter().filter_map(|name| tokenizer.token_to_id(name)));
        }
        Ok(ids.into_iter().collect())
    }

    /// Whether `id` ends the text.
    pub fn contains(&self, id: u32) -> bool {
        self.0.binary_search(&id).is_ok()
    }

    /// The ids, ascending.
    pub fn as_slice(&self) -> &[u32] {
        &self.0
    }
}

impl FromIterator<u32> for StopIds {
    fn from_iter<I: IntoIterator<Item = u32>>(ids: I) -> StopIds {
        let mut ids: Vec<u32> = ids.into_iter().collect();
        ids.sort_unstable();
        ids.dedup();
        StopIds(ids)
    }
}

/// Appends the ids of one `eos_token_id`.
fn collect(file: &'static str, value: Option<&Value>, ids: &mut Vec<u32>) -> Result<(), TextError> {
    let Some(value) = value else { return Ok(()) };
    let bad = || TextError::BadStopId { file, got: value.to_string() };
    let id_of = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(bad);
    match value {
        Value::Null => {}
        Value::Array(list) => {
            for id in list {
                ids.push(id_of(id)?);
            }
        }
        single => ids.push(id_of(single)?),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn gather(config: Value, generation: Value) -> Result<StopIds, TextError> {
        StopIds::gather(config.as_object().unwrap(), Some(&generation), None)
    }

    #[test]
    fn config_and_generation_config_are_united() {
        let stops = gather(json!({"eos_token_id": [9, 0]}), json!({"eos_token_id": 7})).unwrap();
        assert_eq!(stops.as_slice(), [0, 7, 9]);
        assert!(stops.contains(7) && !stops.contains(8));
    }

    #[test]
    fn a_text_configuration_within_another_counts() {
        let stops = gather(json!({"text_config": {"eos_token_id": 5}}), json!({"eos_token_id": 7})).unwrap();
        assert_eq!(stops.as_slice(), [5, 7]);
    }

    #[test]
    fn null_and_absent_mean_none() {
        assert_eq!(gather(json!({"eos_token_id": null}), json!({})).unwrap(), StopIds::default());
    }

    #[test]
    fn what_is_not_an_id_is_refused() {
        for bad in [json!("2"), json!(-1), json!(1.5), json!([1, "x"]), json!(4294967296u64)] {
            let error = gather(json!({}), json!({"eos_token_id": bad})).unwrap_err();
            assert!(error.to_string().contains("generation_config.json"), "{error}");
        }
    }

    #[test]
    fn role_markers_are_armed_by_name() {
        let Some(dir) = super::super::demo_model() else {
            return;
        };
        let tokenizer = Tokenizer::from_dir(&dir).unwrap();
        let stops = StopIds::gather(&Map::new(), None, Some(&tokenizer)).unwrap();
        assert_eq!(stops.as_slice(), [0, 6, 7, 8, 9]);
    }
}
