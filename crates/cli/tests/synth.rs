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
        "synth m --like nothing",
        "synth m --like tiny --layers 0",
        "synth m --like tiny --experts 5000",
        "synth m",
    ] {
        run(dir.path(), line).expect(2);
        assert!(!dir.path().join("m").exists(), "{line}");
    }
}
