//! Range-checked access to `config.json`: configurations come from untrusted mirrors.

use std::fmt;
use std::ops::RangeInclusive;

use serde_json::{Map, Value};
use thiserror::Error;

/// A configuration that cannot be a model.
#[derive(Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file does not say which family the model belongs to.
    #[error(
        "config.json has no `model_type`, which names the model's family; check that it is the \
         configuration of a language model"
    )]
    NoModelType,
    /// A key that the family needs is absent.
    #[error("config.json has no `{key}`, which a {family} model needs")]
    Missing {
        /// The key.
        key: String,
        /// `model_type`.
        family: String,
    },
    /// A key has another type than it must have.
    #[error("config.json: `{key}` must be {wanted}, got {got}")]
    Type {
        /// The key.
        key: String,
        /// What is accepted.
        wanted: String,
        /// What was found, shortened.
        got: String,
    },
    /// A number is outside what any real model has.
    #[error("config.json: `{key}` is {got}, outside {min}..={max}")]
    Range {
        /// The key.
        key: String,
        /// The value found.
        got: u64,
        /// Smallest accepted.
        min: u64,
        /// Largest accepted.
        max: u64,
    },
    /// Keys contradict each other.
    #[error("config.json: {0}")]
    Inconsistent(String),
    /// The file asks for something that this version does not compute.
    #[error("config.json asks for {what}, which metaltail does not support for {family}")]
    Unsupported {
        /// What was asked for.
        what: String,
        /// `model_type`.
        family: String,
    },
    /// No description of this architecture of GGUF.
    #[error("the GGUF architecture {found:?} is not supported; supported are {supported}")]
    Architecture {
        /// The `general.architecture` found.
        found: String,
        /// Names of the supported ones.
        supported: String,
    },
    /// A key that the architecture needs is not in the metadata.
    #[error("the GGUF metadata have no `{key}`, which a model of the architecture {architecture} needs")]
    NoMetadata {
        /// The key.
        key: String,
        /// `general.architecture`.
        architecture: String,
    },
    /// A key of the metadata has another kind than it must have.
    #[error("the GGUF metadata: `{key}` must be {wanted}, got the kind {got}")]
    Metadata {
        /// The key.
        key: String,
        /// What is accepted.
        wanted: &'static str,
        /// Kind found.
        got: String,
    },
    /// No plan for this `model_type`.
    #[error("model_type {found:?} is not supported; supported are {supported}")]
    Family {
        /// The `model_type` found.
        found: String,
        /// Names of the supported families.
        supported: String,
    },
}

/// Reads keys of one configuration object.
#[derive(Clone, Copy)]
pub struct ConfigReader<'a> {
    family: &'a str,
    path: &'a str,
    map: &'a Map<String, Value>,
}

/// At most `max` bytes of a text that a file put into a message.
fn shorten(mut text: String, max: usize) -> String {
    if text.len() > max {
        let cut = (0..=max).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0);
        text.truncate(cut);
        text.push('…');
    }
    text
}

impl<'a> ConfigReader<'a> {
    /// A reader of the top-level object; refuses anything else.
    pub fn new(config: &'a Value) -> Result<Self, ConfigError> {
        let map = config.as_object().ok_or_else(|| ConfigError::Type {
            key: "(the file)".into(),
            wanted: "an object".into(),
            got: shorten(config.to_string(), 60),
        })?;
        let mut reader = ConfigReader { family: "", path: "", map };
        if reader.get("model_type").is_none() {
            return Err(ConfigError::NoModelType);
        }
        reader.family = reader.text("model_type")?;
        Ok(reader)
    }

    /// A refusal of the whole family, naming those that are supported.
    pub fn unknown_family(&self, supported: String) -> ConfigError {
        ConfigError::Family { found: shorten(self.family.to_owned(), 60), supported }
    }

    /// `model_type`.
    pub fn family(&self) -> &'a str {
        self.family
    }

    fn name(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    /// The value of a key; `null` counts as absent.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn need(&self, key: &str) -> Result<&'a Value, ConfigError> {
        self.get(key).ok_or_else(|| ConfigError::Missing {
            key: self.name(key),
            family: shorten(self.family.to_owned(), 60),
        })
    }

    fn wrong(&self, key: &str, wanted: impl fmt::Display, got: &Value) -> ConfigError {
        ConfigError::Type {
            key: self.name(key),
            wanted: wanted.to_string(),
            got: shorten(got.to_string(), 60),
        }
    }

    /// A nested object, if present.
    pub fn object(&self, key: &'a str) -> Result<Option<ConfigReader<'a>>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(ConfigReader { family: self.family, path: key, map })),
            Some(other) => Err(self.wrong(key, "an object", other)),
        }
    }

    /// A required string.
    pub fn text(&self, key: &str) -> Result<&'a str, ConfigError> {
        let value = self.need(key)?;
        value.as_str().ok_or_else(|| self.wrong(key, "a string", value))
    }

    /// Refuses a string by name that is none of `computed`; an absent one is fine.
    ///
    /// # Errors
    /// Another type than a string, or another string.
    pub fn only(&self, key: &str, computed: &[&str]) -> Result<(), ConfigError> {
        if self.get(key).is_none() {
            return Ok(());
        }
        let found = self.text(key)?;
        self.refuse_unless(computed.contains(&found), format!("{} {found:?}", self.name(key)))
    }

    /// Refuses a number by name that is not `computed`; an absent one is fine.
    ///
    /// # Errors
    /// Another type than a finite number, or another number.
    pub fn only_number(&self, key: &str, computed: f64) -> Result<(), ConfigError> {
        let found = self.number_or(key, computed)?;
        self.refuse_unless(found == computed, format!("{} {found}", self.name(key)))
    }

    /// A required whole number within `range`.
    pub fn size(&self, key: &str, range: RangeInclusive<usize>) -> Result<usize, ConfigError> {
        let value = self.need(key)?;
        self.checked(key, value, range)
    }

    /// A whole number within `range`, or `default` where absent.
    pub fn size_or(
        &self,
        key: &str,
        default: usize,
        range: RangeInclusive<usize>,
    ) -> Result<usize, ConfigError> {
        self.get(key).map_or(Ok(default), |value| self.checked(key, value, range))
    }

    fn checked(&self, key: &str, value: &Value, range: RangeInclusive<usize>) -> Result<usize, ConfigError> {
        let number = value.as_u64().ok_or_else(|| self.wrong(key, "a whole number", value))?;
        usize::try_from(number).ok().filter(|n| range.contains(n)).ok_or_else(|| ConfigError::Range {
            key: self.name(key),
            got: number,
            min: *range.start() as u64,
            max: *range.end() as u64,
        })
    }

    /// A finite number, or `default` where absent.
    pub fn number_or(&self, key: &str, default: f64) -> Result<f64, ConfigError> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value
                .as_f64()
                .filter(|number| number.is_finite())
                .ok_or_else(|| self.wrong(key, "a finite number", value)),
        }
    }

    /// A boolean, or `default` where absent.
    pub fn flag_or(&self, key: &str, default: bool) -> Result<bool, ConfigError> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value.as_bool().ok_or_else(|| self.wrong(key, "true or false", value)),
        }
    }

    /// A list of strings, if present.
    pub fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>, ConfigError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let list = value.as_array().ok_or_else(|| self.wrong(key, "a list of strings", value))?;
        list.iter()
            .map(|item| item.as_str().ok_or_else(|| self.wrong(key, "a list of strings", item)))
            .collect::<Result<Vec<_>, _>>()
            .map(Some)
    }

    /// A refusal of a feature by name.
    pub fn unsupported(&self, what: impl Into<String>) -> ConfigError {
        let family = shorten(self.family.to_owned(), 60);
        ConfigError::Unsupported { what: shorten(what.into(), 120), family }
    }

    /// Refuses a feature by name unless `holds`.
    pub fn refuse_unless(&self, holds: bool, what: impl Into<String>) -> Result<(), ConfigError> {
        if holds {
            return Ok(());
        }
        Err(self.unsupported(what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_number_outside_its_range_is_refused_with_the_range() {
        let config = json!({"model_type": "x", "num_hidden_layers": 1_000_000});
        let reader = ConfigReader::new(&config).unwrap();
        let error = reader.size("num_hidden_layers", 1..=128).unwrap_err();
        assert_eq!(
            error,
            ConfigError::Range { key: "num_hidden_layers".into(), got: 1_000_000, min: 1, max: 128 }
        );
    }

    #[test]
    fn null_counts_as_absent_and_wrong_types_are_named() {
        let config = json!({"model_type": "x", "a": null, "b": -3, "c": "x"});
        let reader = ConfigReader::new(&config).unwrap();
        assert_eq!(reader.size_or("a", 7, 0..=9).unwrap(), 7);
        assert!(matches!(reader.size("b", 0..=9), Err(ConfigError::Type { .. })));
        assert!(matches!(reader.flag_or("c", true), Err(ConfigError::Type { .. })));
        assert!(matches!(reader.size("d", 0..=9), Err(ConfigError::Missing { .. })));
    }

    #[test]
    fn a_configuration_without_a_family_is_refused_in_a_sentence() {
        for config in [json!({}), json!({"model_type": null, "hidden_size": 64})] {
            let Err(error) = ConfigReader::new(&config) else { panic!("{config} was accepted") };
            assert_eq!(error, ConfigError::NoModelType);
            assert!(error.to_string().contains("no `model_type`, which names"), "{error}");
        }
    }

    #[test]
    fn a_long_value_is_shortened_in_the_message() {
        let config = json!({"model_type": "x", "a": "é".repeat(1000)});
        let reader = ConfigReader::new(&config).unwrap();
        assert!(reader.size("a", 0..=9).unwrap_err().to_string().len() < 200);
    }
}
