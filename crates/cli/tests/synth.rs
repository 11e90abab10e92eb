//! `metaltail synth`, from outside.

#[path = "support/program.rs"]
mod program;

use std::fs;

use program::{bytes, contents, run};

#[test]
fn the_same_seed_writes_the_same_model() {
    for form in ["slab", "colibri", "hf"] {
        let dir = tempfile::tempdir().unwrap();
        let line = |name: &str, seed: u32| format!("synth {name} --like tiny --format {form} --seed {seed}");
        for (name, seed) in [("a", 7), ("b", 7), ("c", 8)] {
            run(dir.path(), &line(name, seed)).expect(0);
        }
        let [a, b, c] = ["a", "b", "c"].map(|name| contents(&dir.path().join(name)));
        assert!(a == b, "{form}: one seed, two models");
        assert!(a != c, "{form}: two seeds, one model");
    }
}

#[test]
fn what_is_printed_is_what_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let line = "synth m --like wide --layers 2 --experts 16 --expert-format int8 --json";
    let report = run(dir.path(), line).expect(0).json();
    assert_eq!(report["bytes"], bytes(&dir.path().join("m")));
    assert_eq!(report["files"], contents(&dir.path().join("m")).len());
    assert_eq!(report["parameters"]["experts"], "int8");
    let held = run(dir.path(), "inspect m --json").expect(0).json();
    assert_eq!(held["architecture"]["layers"], 2);
    assert_eq!(held["layers"][0]["experts"], 16);
    assert_eq!(held["layers"][0]["formats"][0], "int8");

    let words = run(dir.path(), "synth n --like tiny").expect(0).stdout;
    let size = bytes(&dir.path().join("n"));
    assert!(words.contains(&format!("({size} bytes)")), "{words}");
    assert!(words.contains("metaltail run --model n"), "{words}");
}

#[test]
fn a_target_that_is_not_empty_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("m")).unwrap();
    fs::write(dir.path().join("m/letter.txt"), "dear").unwrap();
    let refused = run(dir.path(), "synth m --like tiny --json").expect(2);
    assert!(refused.error().contains("not empty"), "{}", refused.stdout);
    assert_eq!(contents(&dir.path().join("m")).len(), 1);
}

#[test]
fn what_cannot_be_made_is_wrong_usage() {
    let dir = tempfile::tempdir().unwrap();
    for line in [
        "synth m --like tiny --format gguf",
        "synth m/n.gguf --like deepseek-v3 --format gguf",
        "synth m --like olmoe --format gguf --type q9",
        "synth m --like olmoe --format gguf --type iq1_s",
        "synth m --like olmoe --format gguf --expert-format int8",
        "synth m --like olmoe --type q8_0",
        "synth m --like nothing",
        "synth m --like tiny --layers 0",
        "synth m --like tiny --experts 5000",
        "synth m",
    ] {
        run(dir.path(), line).expect(2);
        assert!(!dir.path().join("m").exists(), "{line}");
    }
}

/// 1 layer with 2 experts of OLMoE's width; the embedding is the most of it.
const SMALL: &str = "--like olmoe --format gguf --layers 1 --experts 2";

#[test]
fn a_gguf_file_has_the_shape_the_type_and_a_tokenizer() {
    let dir = tempfile::tempdir().unwrap();
    let line = format!("synth m/small.gguf {SMALL} --type q2_k --json");
    let report = run(dir.path(), &line).expect(0).json();
    let file = dir.path().join("m/small.gguf");
    assert_eq!((&report["files"], &report["bytes"]), (&1.into(), &fs::metadata(&file).unwrap().len().into()));
    assert_eq!(report["output"], "m/small.gguf");
    assert_eq!(report["parameters"]["experts"], "Q2_K");
    let held = run(dir.path(), "inspect m/small.gguf --json").expect(0).json();
    assert_eq!(held["architecture"], "olmoe");
    assert_eq!(held["file_type"]["name"], "Q2_K");
    let model = &held["model"];
    let sizes = ["layers", "hidden", "vocab", "experts", "top_k"].map(|key| model[key].as_u64().unwrap());
    assert_eq!(sizes, [1, 2048, 50_304, 2, 2]);
    let layer = &held["layers"][0];
    assert_eq!((&layer["experts"], &layer["formats"]), (&2.into(), &serde_json::json!(["Q2_K"])));
    // Three matrices of 1024 × 2048 in blocks of 256 values and 84 bytes.
    assert_eq!(layer["expert_bytes"], 3 * 1024 * 2048 / 256 * 84);
    assert_eq!(
        held["types"]["F32"]["tensors"], 6,
        "two norms, two norms of heads, the last norm, the router"
    );
    assert_eq!(held["tokenizer"]["tokens"], 50_304);
    assert_eq!(held["chat_templates"].as_array().unwrap().len(), 1);
    assert_eq!(held["notices"], serde_json::json!([]));
}

#[test]
fn the_gguf_form_takes_a_directory_too_and_leaves_what_is_there_alone() {
    let dir = tempfile::tempdir().unwrap();
    let words = run(dir.path(), &format!("synth d {SMALL} --type q4_0")).expect(0).stdout;
    assert!(words.starts_with("d/model.gguf: synthetic olmoe (gguf, Q4_0, seed 0)"), "{words}");
    let before = fs::metadata(dir.path().join("d/model.gguf")).unwrap().len();
    run(dir.path(), &format!("synth d {SMALL} --type q8_0")).expect(2);
    run(dir.path(), &format!("synth d/model.gguf {SMALL} --type q8_0")).expect(2);
    assert_eq!(fs::metadata(dir.path().join("d/model.gguf")).unwrap().len(), before);
    assert_eq!(contents(&dir.path().join("d")).len(), 1);
}
