//! `metaltail score`, from outside.

#[path = "support/models.rs"]
mod models;
#[path = "support/program.rs"]
mod program;

use std::fs;
use std::path::Path;

use models::{call, count, ids, oracle, seeded_ids};
use program::{Outcome, tiny};
use serde_json::{Value, json};

/// Scores sequences with a model; `more` are further words.
fn score(model: &Path, sequences: &Value, more: &[&str]) -> Outcome {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("sequences.json");
    fs::write(&file, json!({"sequences": sequences}).to_string()).unwrap();
    let model = model.to_str().unwrap();
    let args = ["score", "--json", "--ids", file.to_str().unwrap(), "--model", model];
    call(dir.path(), &[&args[..], more].concat())
}

#[test]
fn every_family_scores_as_the_oracle_does() {
    for family in [
        "glm_moe_dsa",
        "glm_moe_dsa_dense_ctx",
        "deepseek_v3",
        "deepseek_v3_noqlora",
        "olmoe",
        "qwen3_moe",
        "mixtral",
        "glm4_moe",
        "gpt_oss",
        "gpt_oss_mxfp4",
        "minimax_m2",
        "qwen3_5_moe",
    ] {
        let (model, oracle) = oracle(family);
        let prompt = ids(&oracle["prompt"]);
        let rows = oracle["logits"].as_object().unwrap();
        let positions: Vec<&str> = rows.keys().map(String::as_str).collect();
        let scored =
            score(&model, &json!([prompt]), &["--exact", "--logits", &positions.join(",")]).expect(0).json();
        let difference = scored["nll"].as_f64().unwrap() - oracle["nll"].as_f64().unwrap();
        assert!(difference.abs() < 1e-4, "{family}: NLL is off by {difference}");
        assert_eq!(scored["tokens"], prompt.len() - 1);
        assert_eq!(scored["per_sequence"][0], scored["nll"]);
        let margins = oracle["margin"].as_array().unwrap();
        let (got, wanted) = (ids(&scored["argmax"][0]), ids(&oracle["argmax"]));
        assert_eq!(got.len(), prompt.len(), "one entry an id, the last included");
        for (position, margin) in margins.iter().enumerate() {
            let certain = margin.as_f64().unwrap() > 1e-3;
            assert!(!certain || got[position] == wanted[position], "{family} at {position}");
        }
        for (position, wanted) in rows {
            let got = scored["logits"][position].as_array().unwrap();
            let wanted = wanted.as_array().unwrap();
            assert_eq!(got.len(), wanted.len());
            for (got, wanted) in got.iter().zip(wanted) {
                let difference = got.as_f64().unwrap() - wanted.as_f64().unwrap();
                assert!(difference.abs() < 1e-3, "{family}: logits at {position} are off by {difference}");
            }
        }
        assert_eq!(scored["logits"].as_object().unwrap().len(), rows.len());
    }
}

#[test]
fn sequences_are_scored_apart_and_weigh_by_their_tokens() {
    let dir = tiny("slab");
    let model = dir.path().join("model");
    let (a, b) = (seeded_ids(40, 250), seeded_ids(12, 200));
    let both = score(&model, &json!([a, b, [7]]), &[]).expect(0).json();
    let alone = |ids: &[u32]| score(&model, &json!([ids]), &[]).expect(0).json();
    let per_sequence = both["per_sequence"].as_array().unwrap();
    assert_eq!(per_sequence[0], alone(&a)["nll"]);
    assert_eq!(per_sequence[1], alone(&b)["nll"]);
    assert_eq!(per_sequence[2], Value::Null, "one id predicts nothing");
    assert_eq!(both["tokens"], 39 + 11);
    let mean = (per_sequence[0].as_f64().unwrap() * 39.0 + per_sequence[1].as_f64().unwrap() * 11.0) / 50.0;
    assert!((both["nll"].as_f64().unwrap() - mean).abs() < 1e-9, "{both}");
    let lengths: Vec<usize> = both["argmax"].as_array().unwrap().iter().map(|list| ids(list).len()).collect();
    assert_eq!(lengths, [40, 12, 1]);
    assert_eq!(both["logits"], json!({}));
    assert_eq!(count(&both["stats"], "/prefill/tokens"), 40 + 12 + 1);
    assert_eq!(count(&both["stats"], "/decode/tokens"), 0);
    // Three sparse layers, two experts a row.
    assert_eq!(count(&both["stats"], "/experts/selections"), 53 * 3 * 2);
}

#[test]
fn a_sequence_of_one_id_has_no_nll() {
    let dir = tiny("slab");
    let scored = score(&dir.path().join("model"), &json!([[7]]), &[]).expect(0).json();
    assert_eq!((&scored["nll"], &scored["tokens"]), (&Value::Null, &0.into()));
    assert_eq!(scored["per_sequence"], json!([null]));
    assert_eq!(ids(&scored["argmax"][0]).len(), 1);
}

#[test]
fn storage_settings_do_not_change_a_bit_of_the_logits() {
    let dir = tiny("slab");
    let model = dir.path().join("model");
    let sequences = json!([seeded_ids(30, 250)]);
    let logits = |more: &[&str]| {
        let more = [&["--logits", "0,13,29"], more].concat();
        let scored = score(&model, &sequences, &more).expect(0).json();
        (scored["logits"].clone(), scored["nll"].clone())
    };
    let wanted = logits(&[]);
    for more in [
        &["--cap", "0"][..],
        &["--cap", "1", "--loaders", "1"],
        &["--threads", "1", "--prefill-chunk", "1"],
        &["--prefill-chunk", "7", "--direct", "off", "--checksums", "off"],
    ] {
        assert_eq!(logits(more), wanted, "{more:?}");
    }
}

#[test]
fn what_cannot_be_scored_is_wrong_usage() {
    let dir = tiny("slab");
    let model = dir.path().join("model");
    let refused = |sequences: Value, more: &[&str], part: &str| {
        let refused = score(&model, &sequences, more).expect(2);
        assert!(refused.error().contains(part), "{part}: {}", refused.stdout);
        assert_eq!(refused.json()["error"]["kind"], "usage");
    };
    refused(json!([[1, 2, 3]]), &["--logits", "0,3"], "position 3");
    refused(json!([[1, 2, 3], [1, 2, 3, 4]]), &["--logits", "3"], "position 3");
    refused(json!([]), &["--logits", "0"], "the list of sequences is empty");
    refused(json!([[1], []]), &[], "sequence 1 has no ids");
    refused(json!([[1], [1, 272]]), &[], "sequence 1 has the id 272");
    refused(json!([[1], seeded_ids(65, 200)]), &["--context", "64"], "sequence 1 has 65 ids");
    refused(json!("no"), &[], "sequences");
    refused(json!([[1]]), &["--logits", "x"], "--logits");
}

#[test]
fn people_get_a_line_a_sequence() {
    let dir = tiny("slab");
    fs::write(dir.path().join("s.json"), "{\"sequences\": [[1, 2, 3], [4]]}").unwrap();
    let words = program::run(dir.path(), "score --model model --ids s.json").expect(0);
    for part in
        ["sequence 0: 3 tokens", "sequence 1: 1 tokens, NLL –", "all: 2 predicted tokens", "perplexity"]
    {
        assert!(words.stdout.contains(part), "{part}: {}", words.stdout);
    }
    assert!(words.stderr.contains("prefill"), "{}", words.stderr);
}

#[test]
fn leaving_experts_out_is_scored_with_and_without() {
    let dir = program::tiny("slab");
    let ids = serde_json::json!({"sequences": [(1..60).collect::<Vec<u32>>()]});
    std::fs::write(dir.path().join("ids.json"), ids.to_string()).unwrap();
    let call = |more: &str| {
        let line = format!("score --model model --ids ids.json --ram 256M --json {more}");
        program::run(dir.path(), &line).expect(0)
    };
    let plain = call("").json();
    assert!(plain["expert_top_p"].is_null());
    let off = call("--expert-top-p 1").json();
    assert_eq!((&off["nll"], &off["argmax"]), (&plain["nll"], &plain["argmax"]));
    let outcome = call("--expert-top-p 0.5");
    assert!(outcome.stderr.contains("lossy"), "{}", outcome.stderr);
    assert!(!outcome.stderr.contains("metaltail score"), "it is what runs: {}", outcome.stderr);
    let lossy = outcome.json();
    let told = &lossy["expert_top_p"];
    assert_eq!(told["nll_without"], plain["nll"]);
    let digits = call("--expert-top-p 0.8").stdout;
    assert!(digits.contains("\"value\":0.8,") && !digits.contains("0.80000001"), "{digits}");
    let difference = lossy["nll"].as_f64().unwrap() - plain["nll"].as_f64().unwrap();
    assert_eq!(told["nll_difference"].as_f64().unwrap(), difference);
    let experts = &lossy["stats"]["experts"];
    assert_eq!(experts["selections"], plain["stats"]["experts"]["selections"]);
    let share = experts["dropped"].as_f64().unwrap() / experts["selections"].as_f64().unwrap();
    assert!(share > 0.0 && told["dropped_share"].as_f64().unwrap() == share, "{told}");
    assert!(experts["lookups"].as_u64() <= plain["stats"]["experts"]["lookups"].as_u64());
    assert_eq!(plain["stats"]["experts"]["dropped"], 0);
}
