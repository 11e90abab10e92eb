//! The fuzz targets' corpora, as plain tests: hostile files give an answer or an error, and the
//! valid ones among them are accepted (`fuzz/README.md`).

#[path = "../../../fuzz/corpus.rs"]
mod files;

use files::corpus;
use metaltail_model::Plan;
use metaltail_model::text::Tokenizer;

#[test]
fn hostile_configurations_are_refused_in_words() {
    for (name, bytes) in corpus("config") {
        let plan = serde_json::from_slice(&bytes)
            .map_err(|error| error.to_string())
            .and_then(|config| Plan::from_config(&config).map_err(|error| error.to_string()));
        match plan {
            Ok(plan) => {
                assert!(name.starts_with("valid"), "{name} was accepted");
                assert!(!plan.inventory().tensors.is_empty());
            }
            Err(error) => {
                assert!(!name.starts_with("valid"), "{name}: {error}");
                assert!(!error.is_empty() && error.len() < 600, "{name}: {error}");
            }
        }
    }
}

#[test]
fn hostile_tokenizers_end_in_an_answer_or_an_error() {
    for (name, bytes) in corpus("tokenizer") {
        match Tokenizer::from_bytes(&bytes) {
            Ok(tokenizer) => {
                if let Ok(ids) = tokenizer.encode("aba<|user|>b and more aaaaaaaaaaaaaaaaaaaaaaaa!") {
                    let _ = tokenizer.decode(&ids, true);
                }
            }
            Err(error) => assert!(!error.is_empty() && name != "valid.json", "{name}: {error}"),
        }
    }
}
