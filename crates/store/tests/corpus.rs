//! The corpora of the fuzz targets `trace` and `coli`, as plain tests: hostile text gives an answer or an error,
//! and what is valid among it is accepted (`fuzz/README.md`).

#[path = "../../../fuzz/corpus.rs"]
mod files;

use files::corpus;
use metaltail_store::PolicyKind;
use metaltail_store::trace::{Rule, Scope, Trace, replay};
use metaltail_store::usage::ColiUsage;

#[test]
fn hostile_traces_are_refused_in_words_and_the_others_replay() {
    for (name, bytes) in corpus("trace") {
        let text = String::from_utf8(bytes).unwrap();
        match Trace::parse(&text) {
            Ok(trace) => {
                assert!(name.starts_with("valid"), "{name} was accepted");
                let played = replay(&trace, Rule::Policy(PolicyKind::Lru), Scope::Pool, trace.token_bytes());
                assert!(played.decode.hits <= played.decode.selections, "{name}");
            }
            Err(error) => {
                let error = error.to_string();
                assert!(!name.starts_with("valid"), "{name}: {error}");
                assert!(!error.is_empty() && error.len() < 600, "{name}: {error}");
            }
        }
    }
}

#[test]
fn hostile_histories_are_refused_with_their_line() {
    for (name, bytes) in corpus("coli") {
        let text = String::from_utf8(bytes).unwrap();
        match ColiUsage::parse(&text) {
            Ok(_) => assert!(name.starts_with("valid"), "{name} was accepted"),
            Err(error) => {
                let error = error.to_string();
                assert!(!name.starts_with("valid"), "{name}: {error}");
                assert!(error.contains("line 1") && error.len() < 600, "{name}: {error}");
            }
        }
    }
}
