//! How the program ends: exit codes, and errors in words or as JSON.

use std::error::Error;
use std::ffi::OsStr;

use serde_json::{Value, json};

use crate::output::{self, Lost};
use crate::settings::on_off;

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
    channel: Channel,
}

/// Where a failure is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Channel {
    /// Words on standard error, JSON on standard output.
    Usual,
    /// Standard error, since standard output is what failed.
    Stderr,
    /// Nowhere: all that there is to say was said already.
    Silent,
}

impl Failure {
    /// A failure in words, without a cause.
    pub fn new(kind: Kind, message: impl Into<String>) -> Failure {
        Failure { kind, message: message.into(), causes: Vec::new(), channel: Channel::Usual }
    }

    /// A failure by an error, whose sources become the causes. A source whose words are part of its
    /// error's (a transparent one, or one that is quoted) is told once.
    pub fn from_error(kind: Kind, error: &(dyn Error + 'static)) -> Failure {
        let message = error.to_string();
        let mut causes = Vec::new();
        let mut next = error.source();
        while let Some(cause) = next {
            let text = cause.to_string();
            if !causes.last().unwrap_or(&message).contains(&text) {
                causes.push(text);
            }
            next = cause.source();
        }
        Failure { kind, message, causes, channel: Channel::Usual }
    }

    /// Only an exit code: the command has printed its result, which says how it ended.
    pub fn silent(kind: Kind) -> Failure {
        Failure { kind, message: String::new(), causes: Vec::new(), channel: Channel::Silent }
    }

    /// The same failure, told on standard error whatever was asked for.
    pub fn without_stdout(self) -> Failure {
        Failure { channel: Channel::Stderr, ..self }
    }

    /// The JSON object of this failure.
    pub fn to_json(&self) -> Value {
        json!({"error": {"kind": self.kind.name(), "message": self.message, "causes": self.causes}})
    }

    /// Prints the failure: words on standard error or, with `json`, one object on standard output.
    /// An object that cannot be written there goes to standard error.
    pub fn print(&self, json: bool) {
        let object = || format!("{}\n", self.to_json());
        let text = match (self.channel, json) {
            (Channel::Silent, _) => return,
            (Channel::Usual, true) => match output::show(&object()) {
                Ok(()) | Err(Lost::ReaderGone) => return,
                Err(Lost::Failed(_)) => object(),
            },
            (Channel::Stderr, true) => object(),
            (_, false) => self.to_words(),
        };
        output::notice(text.trim_end());
    }

    fn to_words(&self) -> String {
        let causes = self.causes.iter().map(|cause| format!("  because: {cause}\n"));
        format!("error: {}\n{}", self.message, causes.collect::<String>())
    }
}

/// What clap has to say: help and version go to standard output and are no failure.
///
/// # Errors
/// Wrong usage, with clap's message.
pub fn clap_outcome(error: &clap::Error) -> Result<(), Failure> {
    if !error.use_stderr() {
        return output::print(&error.to_string());
    }
    let text = error.to_string();
    let text = text.trim_end();
    Err(Failure::new(Kind::Usage, text.strip_prefix("error: ").unwrap_or(text)))
}

/// Whether errors are to be JSON when the command line or the settings could not be understood:
/// `--json` among the words before `--`, the last one that makes sense counting, else
/// `METALTAIL_JSON`.
pub fn json_wanted<'a>(words: impl Iterator<Item = &'a OsStr>, variable: Option<&OsStr>) -> bool {
    let before_dashes = words.take_while(|word| *word != "--").filter_map(OsStr::to_str);
    let given = before_dashes.filter_map(|word| match word.strip_prefix("--json")? {
        "" => Some(true),
        rest => on_off(rest.strip_prefix('=')?).ok(),
    });
    let by_variable = || variable.and_then(OsStr::to_str).is_some_and(|text| on_off(text) == Ok(true));
    given.last().unwrap_or_else(by_variable)
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
    fn a_cause_that_was_quoted_is_not_told_again() {
        let cause = Layer("no such file", None);
        let error = Layer("cannot read x: no such file. What was there is unchanged", Some(Box::new(cause)));
        assert_eq!(Failure::from_error(Kind::Failed, &error).causes, [""; 0]);
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
        assert!(wanted(&["run", "--json", "--json=maybe"], None));
    }
}
