//! `metaltail bench residency`, from outside.

#[path = "support/program.rs"]
mod program;

use std::fs;
use std::path::Path;

use program::{edit_json, run};
use serde_json::Value;

const WORDS: &str = "no evidence about hardware";

/// Profiles of the tree, to be given by hand.
fn profile(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../device/profiles").join(name);
    fs::read_to_string(path).unwrap()
}

#[test]
fn published_rows_stand_beside_their_replays_and_questions_have_answers() {
    let dir = tempfile::tempdir().unwrap();
    let json = run(dir.path(), "bench residency --json").expect(0).json();
    let report = &json["report"];
    assert!(report["note"].as_str().unwrap().contains(WORDS));
    assert_eq!((&json["profile"]["name"], &report["profile"]), (&"m5max-128".into(), &"m5max-128".into()));
    let rows = report["rows"].as_array().unwrap();
    let speed = |row: usize, side: &str| rows[row][side]["tokens_per_second"].as_f64().unwrap();
    // Cap 1 and cap 64, walked: the collapse, as it was published and as it comes out.
    assert_eq!((speed(0, "published"), speed(4, "published")), (2.09, 0.89));
    assert!(speed(4, "predicted") < 0.5 * speed(0, "predicted"));
    let check = &report["check"];
    assert_eq!((&check["holds"], &check["order"]["different"]), (&true.into(), &Value::Array(vec![])));
    assert!(check["parameters"].as_array().unwrap().len() < check["rows"].as_u64().unwrap() as usize);
    assert!(check["worst"].as_f64().unwrap() <= 0.15);
    let questions = report["questions"].as_array().unwrap();
    assert_eq!(questions.len(), 5);
    for question in questions {
        assert!(question["arms"].as_array().unwrap().len() >= 3, "{question}");
    }

    let text = run(dir.path(), "bench residency").expect(0).stdout;
    for part in [WORDS, "0.89 / ", "36 of 36 of tokens/s", "32 at most", "not kept alive", "removals, s"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn a_fit_is_written_and_is_the_profile_that_is_built_in() {
    let dir = tempfile::tempdir().unwrap();
    let fitted = run(dir.path(), "bench residency --fit fitted.json --json").expect(0).json();
    let built_in = run(dir.path(), "bench residency --profile fitted.json --json").expect(0).json();
    assert_eq!(fitted, built_in);
    let written: Value = serde_json::from_slice(&fs::read(dir.path().join("fitted.json")).unwrap()).unwrap();
    let wanted: Value = serde_json::from_str(&profile("m5max-128.json")).unwrap();
    for (key, value) in wanted.as_object().unwrap() {
        match value.as_f64() {
            // Logarithms of other machines may end in another digit.
            Some(value) => {
                let off = (written[key].as_f64().unwrap() / value - 1.0).abs();
                assert!(off < 0.02, "{key}: {} and {value}", written[key]);
            }
            None => assert_eq!(value.is_string(), written[key].is_string(), "{key}"),
        }
    }
}

#[test]
fn a_machine_that_contradicts_the_rows_is_a_failure_and_another_machine_is_none() {
    let dir = tempfile::tempdir().unwrap();
    let wrong = dir.path().join("wrong.json");
    fs::write(&wrong, profile("m5max-128.json")).unwrap();
    edit_json(&wrong, |profile| (profile["declare"], profile["rewire"]) = (0.into(), 0.into()));
    let text = run(dir.path(), "bench residency --profile wrong.json").expect(1);
    assert!(text.stderr.contains("does not explain what was published"), "{}", text.stderr);
    assert!(text.stdout.contains("other order of tokens/s: "), "{}", text.stdout);
    let json = run(dir.path(), "bench residency --profile wrong.json --json").expect(1).json();
    assert_eq!(json["report"]["check"]["holds"], false);

    fs::write(dir.path().join("half.json"), profile("half-m5max.json")).unwrap();
    let half = run(dir.path(), "bench residency --profile half.json --json").expect(0).json();
    assert_eq!((&half["report"]["check"], &half["profile"]["like"]), (&Value::Null, &"m5max-128".into()));
    assert!(half["report"]["rows"][4]["refused"].as_str().unwrap().contains("--ram"));
}

#[test]
fn what_is_no_machine_is_wrong_usage() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("text"), "{").unwrap();
    fs::write(dir.path().join("small"), profile("m5max-128.json")).unwrap();
    edit_json(&dir.path().join("small"), |profile| profile["working_set"] = 1_000_000_000.into());
    for (file, wanted) in [("none", "none"), ("text", "not a machine profile"), ("small", "refuses")] {
        let refused = run(dir.path(), &format!("bench residency --profile {file} --json")).expect(2);
        assert!(refused.error().contains(wanted), "{file}: {}", refused.error());
    }
}
