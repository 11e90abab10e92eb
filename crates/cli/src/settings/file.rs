//! Settings from `metaltail.toml`.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::{Arg, ArgAction};

use crate::input;

use super::{Environment, SettingsError, check, name, suggest};

/// The largest settings file accepted, in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// A settings file, read but not yet resolved.
#[derive(Clone, Debug)]
pub struct ConfigFile {
    path: PathBuf,
    table: toml::Table,
}

impl ConfigFile {
    /// Finds and reads the settings file: the one that `METALTAIL_CONFIG` names, else
    /// `metaltail.toml` in `working_dir`, else `metaltail/metaltail.toml` in `$XDG_CONFIG_HOME`
    /// (`~/.config` where unset). The first that exists is the only one read.
    ///
    /// # Errors
    /// A file that `METALTAIL_CONFIG` names and that does not exist, or one that cannot be read, is
    /// no regular file or is not TOML.
    pub fn find(environment: &Environment, working_dir: &Path) -> Result<Option<ConfigFile>, SettingsError> {
        if let Some(named) = environment.config_file()? {
            return Self::read(&working_dir.join(named)).map(Some);
        }
        let config_home = match environment.get("XDG_CONFIG_HOME") {
            Some(dir) => Some(PathBuf::from(dir)),
            None => environment.get("HOME").map(|home| Path::new(home).join(".config")),
        };
        let candidates = [
            Some(working_dir.join("metaltail.toml")),
            config_home.map(|dir| dir.join("metaltail").join("metaltail.toml")),
        ];
        match candidates.into_iter().flatten().find(|path| path.exists()) {
            Some(path) => Self::read(&path).map(Some),
            None => Ok(None),
        }
    }

    fn read(path: &Path) -> Result<ConfigFile, SettingsError> {
        let fail = |reason: String| SettingsError::File { path: path.to_owned(), reason };
        let bytes = input::regular(path)
            .and_then(|file| input::read_capped(file, MAX_BYTES))
            .map_err(|error| fail(error.to_string()))?;
        let text = String::from_utf8(bytes).map_err(|error| fail(error.to_string()))?;
        Self::parse(path, &text)
    }

    /// Parses the text of a settings file; `path` is for messages.
    ///
    /// # Errors
    /// The text is not TOML.
    pub fn parse(path: &Path, text: &str) -> Result<ConfigFile, SettingsError> {
        let table = text.parse().map_err(|error: toml::de::Error| {
            let mut reason = error.to_string().trim_end().to_owned();
            // TOML's whole numbers end below 2^63, a seed's do not.
            if error.message().contains("too large") {
                reason.push_str(
                    "\nwrite a number of 2^63 or more as a text, such as seed = \"9223372036854775808\"",
                );
            }
            SettingsError::File { path: path.to_owned(), reason }
        })?;
        Ok(ConfigFile { path: path.to_owned(), table })
    }

    /// The values of the declared settings by id. A key is the flag's name, with `-` or `_`.
    pub(super) fn values(&self, declared: &[Arg]) -> Result<BTreeMap<String, Vec<OsString>>, SettingsError> {
        let mut values = BTreeMap::new();
        for (key, value) in &self.table {
            let wanted = key.replace('_', "-");
            let Some(arg) = declared.iter().find(|arg| name(arg) == wanted) else {
                return Err(SettingsError::UnknownKey {
                    path: self.path.clone(),
                    key: key.clone(),
                    suggestion: suggest(&wanted, declared.iter().map(|arg| name(arg).to_owned())),
                });
            };
            let place = || format!("`{key}` in {}", self.path.display());
            let refuse = |reason: &str| SettingsError::Value { place: place(), reason: reason.to_owned() };
            let given = match value {
                toml::Value::Array(list) if matches!(arg.get_action(), ArgAction::Append) => {
                    let texts: Option<Vec<OsString>> = list.iter().map(text_of).collect();
                    texts.ok_or_else(|| refuse("it must be a list of texts"))?
                }
                single => vec![
                    text_of(single).ok_or_else(|| refuse("it must be a text, a number or true or false"))?,
                ],
            };
            check(arg, &given, place)?;
            if values.insert(arg.get_id().to_string(), given).is_some() {
                return Err(refuse("it is given twice, once with `-` and once with `_`"));
            }
        }
        Ok(values)
    }
}

/// A simple value as it would be written on the command line.
fn text_of(value: &toml::Value) -> Option<OsString> {
    match value {
        toml::Value::String(text) => Some(text.into()),
        toml::Value::Integer(number) => Some(number.to_string().into()),
        // With its point, so that 1.0 is no whole number here either.
        toml::Value::Float(number) => Some(format!("{number:?}").into()),
        toml::Value::Boolean(on) => Some(if *on { "on" } else { "off" }.into()),
        _ => None,
    }
}
