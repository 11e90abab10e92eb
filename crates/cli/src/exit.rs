//! How the program ends: exit codes, and errors in words or as JSON.

use std::error::Error;
use std::ffi::OsStr;
use std::io::{self, Write};

use serde_json::{Value, json};

/// Why the program did not do what was asked, by exit code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// 1: it failed while running.
    Failed,
    /// 2: wrong usage or settings.
    Usage,
    /// 3: the model is refused: missing, damaged or unsupported.
    Model,
    /// 4: the memory budget is refused.
    Budget,
    /// 130: it was interrupted.
    Interrupted,
}

impl Kind {
    /// The exit code.
    pub fn code(self) -> u8 {
        match self {
            Kind::Failed => 1,
            Kind::Usage => 2,
            Kind::Model => 3,
            Kind::Budget => 4,
            Kind::Interrupted => 130,
        }
    }

    /// The name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Failed => "failed",
            Kind::Usage => "usage",
            Kind::Model => "model",
            Kind::Budget => "budget",
            Kind::Interrupted => "interrupted",
        }
    }
}

/// An error on its way out of the program.
#[derive(Debug)]
pub struct Failure {
    /// Decides the exit code.
    pub kind: Kind,
    /// What happened, one sentence.
    pub message: String,
    /// Why, outermost first.
    pub causes: Vec<String>,
    /// Whether all that there is to say was said already.
    silent: bool,
}

impl Failure {
    /// A failure in words, without a cause.
    pub fn new(kind: Kind, message: impl Into<String>) -> Failure {
        Failure { kind, message: message.into(), causes: Vec::new(), silent: false }
    }

    /// A failure by an error, whose sources become the causes. A source that its error repeats word
    /// for word (a transparent one) is told once.
    pub fn from_error(kind: Kind, error: &(dyn Error + 'static)) -> Failure {
        let message = error.to_string();
        let mut causes = Vec::new();
        let mut next = error.source();
        while let Some(cause) = next {
            let text = cause.to_string();
            if causes.last().unwrap_or(&message) != &text {
                causes.push(text);
            }
            next = cause.source();
        }
        Failure { kind, message, causes, silent: false }
    }

    /// Only an exit code: the command has printed its result, which says how it ended.
    pub fn silent(kind: Kind) -> Failure {
        Failure { kind, message: String::new(), causes: Vec::new(), silent: true }
    }

    /// The JSON object of this failure.
    pub fn to_json(&self) -> Value {
        json!({"error": {"kind": self.kind.name(), "message": self.message, "causes": self.causes}})
    }

    /// Prints the failure: words on standard error or, with `json`, one object on standard output.
    pub fn print(&self, json: bool) {
        if self.silent {
            return;
        }
        // When even this cannot be written, the exit code is all that is left to say.
        let _ = if json {
            writeln!(io::stdout(), "{}", self.to_json())
        } else {
            io::stderr().write_all(self.to_words().as_bytes())
        };
    }

    fn to_words(&self) -> String {
        let causes = self.causes.iter().map(|cause| format!("  because: {cause}\n"));
        format!("error: {}\n{}", self.message, causes.collect::<String>())
    }
}

/// Prints to standard output. A reader that has gone away (`metaltail man | head`) is no failure.
///
/// # Errors
/// Standard output cannot be written.
pub fn print(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(Failure::from_error(Kind::Failed, &error))
        }
        _ => Ok(()),
    }
}

/// What clap has to say: help and version go to standard output and are no failure.
///
/// # Errors
/// Wrong usage, with clap's message.
pub fn clap_outcome(error: &clap::Error) -> Result<(), Failure> {
    if !error.use_stderr() {
        return print(&error.to_string());
    }
    let text = error.to_string();
    let text = text.trim_end();
    Err(Failure::new(Kind::Usage, text.strip_prefix("error: ").unwrap_or(text)))
}

/// Whether errors are to be JSON when the command line or the settings could not be understood:
/// `--json` among the words before `--`, the last one counting, else `METALTAIL_JSON`.
pub fn json_wanted<'a>(words: impl Iterator<Item = &'a OsStr>, variable: Option<&OsStr>) -> bool {
    let on = |text: &str| matches!(text.to_ascii_lowercase().as_str(), "on" | "true" | "1");
    let before_dashes = words.take_while(|word| *word != "--").filter_map(OsStr::to_str);
    let given = before_dashes.filter_map(|word| match word.strip_prefix("--json") {
        Some("") => Some(true),
        Some(rest) => rest.strip_prefix('=').map(on),
        None => None,
    });
    given.last().unwrap_or_else(|| variable.and_then(OsStr::to_str).is_some_and(on))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{0}")]
    struct Layer(&'static str, #[source] Option<Box<Layer>>);

    fn failure() -> Failure {
        let inner = Layer("the file ends early", None);
        let middle = Layer("the header is damaged", Some(Box::new(inner)));
        let twice = Layer("the header is damaged", Some(Box::new(middle)));
        Failure::from_error(Kind::Model, &Layer("the model is refused", Some(Box::new(twice))))
    }

    #[test]
    fn causes_stand_below_the_error() {
        assert_eq!(
            failure().to_words(),
            "error: the model is refused\n  because: the header is damaged\n  because: the file ends early\n"
        );
    }

    #[test]
    fn json_holds_kind_message_and_causes() {
        let wanted = json!({"error": {"kind": "model", "message": "the model is refused",
            "causes": ["the header is damaged", "the file ends early"]}});
        assert_eq!(failure().to_json(), wanted);
    }

    #[test]
    fn exit_codes_are_the_contract() {
        let kinds = [Kind::Failed, Kind::Usage, Kind::Model, Kind::Budget, Kind::Interrupted];
        assert_eq!(kinds.map(Kind::code), [1, 2, 3, 4, 130]);
    }

    #[test]
    fn json_is_noticed_before_parsing() {
        let wanted = |words: &[&'static str], variable: Option<&'static str>| {
            json_wanted(words.iter().map(OsStr::new), variable.map(OsStr::new))
        };
        assert!(wanted(&["run", "--json", "--nonsense"], None));
        assert!(wanted(&["run"], Some("1")));
        assert!(!wanted(&["run", "--json=off"], Some("1")));
        assert!(!wanted(&["run", "--", "--json"], None));
        assert!(!wanted(&["run", "--jsonx"], None));
    }
}
