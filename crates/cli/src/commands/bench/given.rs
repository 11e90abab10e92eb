//! What the user gave, as a job and as arms.

use std::ffi::OsString;

use metaltail_bench::harness::Arm;
use metaltail_bench::job::{Feed, Job, JobError};

use crate::args::Protocol;
use crate::exit::{Failure, Kind};
use crate::input::Sequences;
use crate::opened::{Opened, refused};
use crate::runtime::model_dir;
use crate::settings::{self, Origin, Settings};

/// Rows decoded after each prompt where nothing is said: enough for a cache to matter.
const TOKENS: usize = 256;

/// Settings that an arm cannot have: its ids are chosen by the harness, and it prints a record.
const NOT_OF_ARMS: [&str; 9] =
    ["json", "verbose", "temperature", "top_p", "top_k", "min_p", "stop", "seed", "max_tokens"];

/// Settings that would have no effect.
const NO_EFFECT: [&str; 5] = ["temperature", "top_p", "top_k", "min_p", "stop"];

/// The job that the flags describe.
///
/// # Errors
/// A file of ids that cannot be used, sampling that would have no effect, nothing to decode.
pub fn job(protocol: &Protocol, settings: &Settings) -> Result<Job, Failure> {
    if let Some(key) = NO_EFFECT.iter().find(|key| settings.flags().contains_key(**key)) {
        let flag = key.replace('_', "-");
        let text = format!("--{flag} has no effect here: what is decoded is greedy or given (--feed)");
        return Err(Failure::new(Kind::Usage, text));
    }
    // A limit that a file or a variable sets is for answers; only the flag is this command's.
    let given = |key: &str| settings.origin(key) == Origin::Flag;
    let tokens = settings.max_tokens.filter(|_| given("max_tokens")).unwrap_or(TOKENS);
    if tokens == 0 {
        return Err(Failure::new(Kind::Usage, "--max-tokens 0 decodes nothing: use at least 1"));
    }
    let sequences = match &protocol.ids {
        Some(path) => Some(Sequences::read(path)?.lists().to_vec()),
        None => None,
    };
    let feed = Feed::from(protocol.feed);
    if feed == Feed::Ids && sequences.is_none() {
        return Err(Failure::from_error(Kind::Usage, &JobError::NoIds));
    }
    Ok(Job {
        seed: settings.seed.filter(|_| given("seed")).unwrap_or(0),
        prompts: protocol.prompts,
        warmup: protocol.warmup,
        prompt_tokens: protocol.prompt_tokens,
        tokens,
        feed,
        page_cache: protocol.page_cache.into(),
        numerics: false,
        sequences,
    })
}

/// An arm: the shared flags of the command line, and `flags` instead of them or beside them.
///
/// # Errors
/// Words that are no shared flags, or that an arm cannot have.
pub fn arm(name: &str, flags: &str, settings: &Settings) -> Result<Arm, Failure> {
    let refuse = |reason: String| Failure::new(Kind::Usage, format!("arm {name} ({flags}): {reason}"));
    let words = shlex::split(flags).ok_or_else(|| refuse("a quote is not closed".to_owned()))?;
    let own = Settings::of_words(words.into_iter().map(OsString::from))
        .map_err(|error| refuse(error.to_string()))?;
    if let Some(key) = own.flags().keys().find(|key| NOT_OF_ARMS.contains(&key.as_str())) {
        let flag = key.replace('_', "-");
        return Err(refuse(format!("--{flag} is no setting of an arm: give it once, beside the arms")));
    }
    let mut arm = Arm { name: name.to_owned(), ..Arm::default() };
    let shared = settings
        .flags()
        .iter()
        .filter(|(key, _)| !own.flags().contains_key(*key) && !NOT_OF_ARMS.contains(&key.as_str()));
    let words = shared.chain(own.flags()).flat_map(|(_, words)| words.iter().cloned());
    arm.words.extend(words);
    for settings in [settings, &own] {
        let given = settings.config().into_iter().filter(|(key, _)| settings.origin(key) != Origin::Default);
        arm.given.extend(given.filter(|(key, _)| !NOT_OF_ARMS.contains(&key.as_str())));
    }
    // What an arm learns about its prompts must not help the next one.
    if settings::exists("usage") && !arm.given.contains_key("usage") {
        arm.words.push("--usage=off".into());
        arm.given.insert("usage".to_owned(), "off".into());
    }
    Ok(arm)
}

/// Opens the model of every arm, so that one which is refused is refused as `run` does, before anything is
/// measured.
///
/// # Errors
/// A model that is missing, damaged or unsupported.
pub fn check_models(arms: &[Arm], settings: &Settings) -> Result<(), Failure> {
    let mut models = Vec::new();
    for arm in arms {
        let own = Settings::of_words(arm.words.iter().cloned());
        let own = own.map_err(|error| Failure::from_error(Kind::Usage, &error))?;
        let model = own.input.model.clone().map_or_else(|| model_dir(settings), Ok)?;
        if !models.contains(&model) {
            models.push(model);
        }
    }
    for model in &models {
        let opened = Opened::at(model)?;
        opened.checkpoint.check(&opened.inventory).map_err(|error| refused(&error))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(line: &str) -> Settings {
        Settings::of_words(line.split_whitespace().map(OsString::from)).unwrap()
    }

    fn words(arm: &Arm) -> Vec<&str> {
        arm.words
            .iter()
            .filter_map(|word| word.to_str())
            .filter(|word| !word.starts_with("--usage"))
            .collect()
    }

    #[test]
    fn an_arms_flags_win_over_shared_ones() {
        let shared = settings("--cap 4 --ram 1G --json --seed 3 --max-tokens 9");
        let arm = arm("B", "--cap=8 --direct 'on'", &shared).unwrap();
        assert_eq!(words(&arm), ["--ram=1G", "--cap=8", "--direct=on"]);
        assert_eq!(
            (&arm.given["cap"], &arm.given["ram"], &arm.given["direct"]),
            (&8.into(), &(1u64 << 30).into(), &"on".into())
        );
        assert!(!arm.given.contains_key("json") && !arm.given.contains_key("seed"));
    }

    #[test]
    fn arms_without_sense_are_refused() {
        for flags in [
            "--cap",
            "--cap x",
            "cap 4",
            "--capp 4",
            "--json",
            "--max-tokens 3",
            "--top-k 3",
            "--a 'b",
            "--help",
        ] {
            let refused = arm("A", flags, &settings("")).unwrap_err();
            assert_eq!(refused.kind, Kind::Usage, "{flags}");
            assert!(refused.message.starts_with("arm A"), "{}", refused.message);
        }
        assert!(words(&arm("A", "", &settings("")).unwrap()).is_empty());
    }
}
