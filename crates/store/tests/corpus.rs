//! The corpora of the fuzz targets `trace` and `coli`, as plain tests: hostile text gives an answer or an error,
//! and what is valid among it is accepted (`fuzz/README.md`).

use std::path::{Path, PathBuf};

use metaltail_store::PolicyKind;
use metaltail_store::trace::{Rule, Scope, Trace, replay};
use metaltail_store::usage::ColiUsage;

fn corpus(name: &str) -> Vec<(String, String)> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(name);
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert!(files.len() > 20, "the corpus {name} is not there");
    let name = |path: &PathBuf| path.file_name().unwrap().to_string_lossy().into_owned();
    files.iter().map(|path| (name(path), std::fs::read_to_string(path).unwrap())).collect()
}

#[test]
fn hostile_traces_are_refused_in_words_and_the_others_replay() {
    for (name, text) in corpus("trace") {
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
    for (name, text) in corpus("coli") {
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
