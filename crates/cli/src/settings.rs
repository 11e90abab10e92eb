//! Settings: every shared flag declared once, resolved once.
//!
//! [`Flags`] is the declaration: clap draws the help from it, and the names of environment variables
//! (`METALTAIL_<NAME>`) and of keys of `metaltail.toml` follow from it. A value is parsed by the same
//! parser wherever it came from. Flag over environment over file over default; a value that was
//! given is never overwritten, `0` and `off` included.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Arg, ArgMatches, Args, FromArgMatches};
use serde::Serialize;

mod environment;
mod file;
mod flags;
mod parse;
mod usage;

pub use environment::Environment;
pub use file::ConfigFile;
pub use flags::{Device, Direct, Flags, Io, ModelFlags, OutputFlags, Policy, Residency, SlabAllocation};
pub use parse::{on_off, share, size, whole};
pub use usage::{Pin, Usage};

/// Where a setting's value came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// The command line.
    Flag,
    /// A `METALTAIL_` variable.
    Environment,
    /// `metaltail.toml`.
    File,
    /// Nowhere: the program, the model or a measurement decides.
    Default,
}

/// A setting that cannot be accepted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SettingsError {
    /// A `METALTAIL_` variable that names no setting.
    #[error("the environment variable {name} names no setting{}", near(.suggestion.as_deref()))]
    UnknownVariable {
        /// The variable.
        name: String,
        /// The nearest one that exists.
        suggestion: Option<String>,
    },
    /// A key of the file that names no setting.
    #[error("`{key}` in {} names no setting{}", path.display(), near(.suggestion.as_deref()))]
    UnknownKey {
        /// The file.
        path: PathBuf,
        /// The key.
        key: String,
        /// The nearest one that exists.
        suggestion: Option<String>,
    },
    /// A value that does not parse.
    #[error("{place} has a value that cannot be used: {reason}")]
    Value {
        /// The variable, or the key and its file.
        place: String,
        /// What was wanted and got.
        reason: String,
    },
    /// The file cannot be read or is not TOML.
    #[error("cannot use the settings file {}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

/// The tail of a message about an unknown name.
fn near(suggestion: Option<&str>) -> String {
    match suggestion {
        Some(name) => format!("; did you mean `{name}`?"),
        None => "; `metaltail run --help` lists them".to_owned(),
    }
}

/// All shared settings, resolved.
#[derive(Clone, Debug)]
pub struct Settings {
    values: Flags,
    origins: BTreeMap<String, Origin>,
    flags: BTreeMap<String, Vec<OsString>>,
}

impl Settings {
    /// Resolves the settings of a command from its own matches (those of the innermost subcommand),
    /// the environment and the file.
    ///
    /// # Errors
    /// An unknown name or a value that does not parse, in the environment or the file, even where a
    /// flag would win: a mistake that is not reported now surprises later.
    pub fn resolve(
        matches: &ArgMatches,
        environment: &Environment,
        file: Option<&ConfigFile>,
    ) -> Result<Settings, SettingsError> {
        let declared = declared();
        let from_environment = environment.values(&declared)?;
        let from_file = match file {
            Some(file) => file.values(&declared)?,
            None => BTreeMap::new(),
        };
        let mut origins = BTreeMap::new();
        let mut words = vec![OsString::from("settings")];
        let mut flags = BTreeMap::new();
        for arg in &declared {
            let id = arg.get_id().as_str();
            let environment = from_environment.get(id).map(|values| (Origin::Environment, values.clone()));
            let file = || from_file.get(id).map(|values| (Origin::File, values.clone()));
            let flag = on_command_line(matches, id).map(|values| (Origin::Flag, values));
            let (origin, values) =
                flag.or(environment).or_else(file).unwrap_or((Origin::Default, Vec::new()));
            origins.insert(id.to_owned(), origin);
            let given: Vec<OsString> = values.iter().map(|value| word(arg, value)).collect();
            words.extend(given.iter().cloned());
            if origin == Origin::Flag {
                flags.insert(id.to_owned(), given);
            }
        }
        let values = parse_words(words)
            .map_err(|reason| SettingsError::Value { place: "the command line".to_owned(), reason })?;
        Ok(Settings { values, origins, flags })
    }

    /// The settings that some words give, with nothing from elsewhere.
    ///
    /// # Errors
    /// Words that are no shared flags, or values that do not parse.
    pub fn of_words(words: impl IntoIterator<Item = OsString>) -> Result<Settings, SettingsError> {
        let command = Flags::augment_args(clap::Command::new("settings").disable_help_flag(true));
        let words = std::iter::once(OsString::from("settings")).chain(words);
        let matches = command.try_get_matches_from(words).map_err(|error| SettingsError::Value {
            place: "the list of flags".to_owned(),
            reason: reason(&error),
        })?;
        Settings::resolve(&matches, &Environment::default(), None)
    }

    /// The flags of the command line by key, each as the words (`--name=value`) that give it.
    pub fn flags(&self) -> &BTreeMap<String, Vec<OsString>> {
        &self.flags
    }

    /// Where the value of a setting came from, by its flag name with underscores.
    pub fn origin(&self, key: &str) -> Origin {
        self.origins.get(key).copied().unwrap_or(Origin::Default)
    }

    /// Whether one JSON object is all that goes to standard output.
    pub fn json(&self) -> bool {
        self.values.output.json.unwrap_or(false)
    }

    /// Whether to say more on standard error.
    pub fn verbose(&self) -> bool {
        self.values.output.verbose.unwrap_or(false)
    }

    /// The settings as a JSON map: flag names with underscores; null where nothing was given.
    pub fn config(&self) -> serde_json::Map<String, serde_json::Value> {
        match serde_json::to_value(&self.values) {
            Ok(serde_json::Value::Object(map)) => map,
            _ => serde_json::Map::new(),
        }
    }

    /// The origins as a JSON map with the keys of [`Settings::config`].
    pub fn origins(&self) -> serde_json::Map<String, serde_json::Value> {
        self.origins.iter().map(|(key, origin)| (key.clone(), serde_json::json!(origin))).collect()
    }
}

impl std::ops::Deref for Settings {
    type Target = Flags;

    fn deref(&self) -> &Flags {
        &self.values
    }
}

/// The declared flags: the table that everything else is drawn from.
fn declared() -> Vec<Arg> {
    Flags::augment_args(clap::Command::new("settings")).get_arguments().cloned().collect()
}

/// A flag's name without dashes in front, as in `prefill-chunk`.
fn name(arg: &Arg) -> &str {
    arg.get_long().unwrap_or(arg.get_id().as_str())
}

/// The values given on the command line, as written; `None` where the flag was not given.
fn on_command_line(matches: &ArgMatches, id: &str) -> Option<Vec<OsString>> {
    // A command that does not take this flag at all is an error here, and so nothing was given.
    let raw = matches.try_get_raw(id).ok().flatten()?;
    let given = matches.value_source(id) == Some(clap::parser::ValueSource::CommandLine);
    given.then(|| raw.map(OsString::from).collect())
}

/// `--name=value`
fn word(arg: &Arg, value: &OsString) -> OsString {
    let mut word = OsString::from(format!("--{}=", name(arg)));
    word.push(value);
    word
}

/// Parses words by the declaration; the error is a reason of one line.
fn parse_words(words: Vec<OsString>) -> Result<Flags, String> {
    let command = Flags::augment_args(clap::Command::new("settings").no_binary_name(false));
    let parsed = command.try_get_matches_from(words).and_then(|matches| Flags::from_arg_matches(&matches));
    parsed.map_err(|error| reason(&error))
}

/// What clap has to say, on one line.
fn reason(error: &clap::Error) -> String {
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default();
    let hint = text.lines().map(str::trim).find(|line| line.starts_with("[possible values"));
    let line = line.strip_prefix("error: ").unwrap_or(line);
    hint.map_or(line.to_owned(), |hint| format!("{line} {hint}"))
}

/// Whether there is a setting of this name, with underscores.
pub fn exists(key: &str) -> bool {
    declared().iter().any(|arg| arg.get_id() == key)
}

/// Checks one setting's values by themselves, so that an error can say where they stand.
fn check(arg: &Arg, values: &[OsString], place: impl Fn() -> String) -> Result<(), SettingsError> {
    let words = std::iter::once(OsString::from("settings"));
    parse_words(words.chain(values.iter().map(|value| word(arg, value))).collect())
        .map(|_| ())
        .map_err(|reason| SettingsError::Value { place: place(), reason })
}

/// The nearest of `names`, if any is near.
fn suggest(wanted: &str, names: impl Iterator<Item = String>) -> Option<String> {
    names
        .map(|name| (strsim::jaro_winkler(wanted, &name), name))
        .filter(|(similarity, _)| *similarity > 0.8)
        .max_by(|a, b| a.0.total_cmp(&b.0))
        .map(|(_, name)| name)
}

#[cfg(test)]
mod tests;
