//! Settings from `METALTAIL_` variables.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};

use clap::Arg;

use super::{SettingsError, check, name, suggest};

/// What the program's environment variables begin with.
const PREFIX: &str = "METALTAIL_";
/// The variable that names the settings file instead of being a setting.
const CONFIG: &str = "METALTAIL_CONFIG";

/// The environment, taken once; a test gives its own.
#[derive(Clone, Debug, Default)]
pub struct Environment(BTreeMap<OsString, OsString>);

impl Environment {
    /// The process's own.
    pub fn of_process() -> Environment {
        std::env::vars_os().collect()
    }

    /// A variable; an empty one counts as absent.
    pub fn get(&self, name: &str) -> Option<&OsStr> {
        self.0.get(OsStr::new(name)).map(OsString::as_os_str).filter(|value| !value.is_empty())
    }

    /// The settings file that `METALTAIL_CONFIG` names.
    ///
    /// # Errors
    /// The variable is empty.
    pub(super) fn config_file(&self) -> Result<Option<&OsStr>, SettingsError> {
        let named = self.0.get(OsStr::new(CONFIG)).map(OsString::as_os_str);
        if named.is_some_and(OsStr::is_empty) {
            let place = format!("the environment variable {CONFIG}");
            let reason = "it is empty: give a settings file, or unset it".to_owned();
            return Err(SettingsError::Value { place, reason });
        }
        Ok(named)
    }

    /// The values of the declared settings by id.
    pub(super) fn values(&self, declared: &[Arg]) -> Result<BTreeMap<String, Vec<OsString>>, SettingsError> {
        let mut values = BTreeMap::new();
        for (variable, value) in &self.0 {
            let shown = variable.to_string_lossy();
            if !shown.starts_with(PREFIX) || shown == CONFIG {
                continue;
            }
            let Some(arg) = declared.iter().find(|arg| variable_of(arg) == shown) else {
                let known = declared.iter().map(variable_of).chain([CONFIG.to_owned()]);
                let suggestion = suggest(&shown.to_ascii_uppercase(), known);
                return Err(SettingsError::UnknownVariable { name: shown.into_owned(), suggestion });
            };
            let given = vec![value.clone()];
            check(arg, &given, || format!("the environment variable {shown}"))?;
            values.insert(arg.get_id().to_string(), given);
        }
        Ok(values)
    }
}

impl<K: Into<OsString>, V: Into<OsString>> FromIterator<(K, V)> for Environment {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(variables: I) -> Environment {
        Environment(variables.into_iter().map(|(name, value)| (name.into(), value.into())).collect())
    }
}

/// `METALTAIL_PREFILL_CHUNK` for `--prefill-chunk`.
fn variable_of(arg: &Arg) -> String {
    format!("{PREFIX}{}", name(arg).replace('-', "_").to_ascii_uppercase())
}
