//! `metaltail inspect` of GGUF files, from outside.

#[path = "support/program.rs"]
mod program;

use std::fs;
use std::path::{Path, PathBuf};

use program::run;
use serde_json::{Value, json};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/gguf")
}

#[test]
fn one_object_says_what_a_file_holds() {
    let report = run(&fixtures(), "inspect --model moe.gguf --json").expect(0).json();
    assert_eq!(report["path"], "moe.gguf");
    assert_eq!((&report["kind"], &report["version"]), (&json!("gguf"), &json!(3)));
    assert_eq!(report["architecture"], "qwen3moe");
    assert_eq!(report["runnable"]["value"], false);
    assert!(report["runnable"]["reason"].as_str().unwrap().contains("layer_norm_rms_epsilon"));
    assert_eq!(report["file_type"], json!({"number": 2, "name": "Q4_0"}));
    assert_eq!(report["model"]["experts"], 4);
    assert_eq!(report["model"]["max_context"], 4096);
    assert_eq!(report["tokenizer"], json!({"model": "gpt2", "pre": "qwen2", "tokens": 8, "merges": 3}));
    assert_eq!(report["chat_templates"], json!([{"name": null, "bytes": 25}]));
    assert_eq!(
        report["layers"][0],
        json!({"layer": 0, "experts": 4, "draft": false, "formats": ["Q4_0", "Q4_1"],
            "expert_bytes": 1792, "bytes": 7168, "runs": 3})
    );
    assert_eq!(report["files"][0]["bytes"], fs::metadata(fixtures().join("moe.gguf")).unwrap().len());
    let roles = report["roles"].as_object().unwrap();
    let by_role: u64 = roles.values().map(|role| role["bytes"].as_u64().unwrap()).sum();
    assert_eq!(report["bytes"], by_role, "roles add up");
    assert_eq!(report["types"]["Q8_0"]["support"], "computed");
    assert_eq!(report["types"]["Q8_0"]["bits_per_weight"], 8.5);
    let metadata = report["metadata"].as_array().unwrap();
    let of = |key: &str| metadata.iter().find(|entry| entry["key"] == key).unwrap();
    assert_eq!(of("general.name")["value"], "tiny moe");
    assert_eq!(of("tokenizer.ggml.tokens")["length"], 8);
}

#[test]
fn people_are_told_first_whether_it_can_be_run() {
    let text = run(&fixtures(), "inspect moe.gguf").expect(0).stdout;
    assert!(text.lines().nth(1).unwrap().starts_with("cannot be run: the GGUF metadata have no"), "{text}");
    for part in [
        "qwen3moe (gguf, version 3), 1 file",
        "quantisation Q4_0",
        "experts 4, chosen 2",
        "context up to 4096",
        "gpt2 (qwen2), 8 tokens, 3 merges; chat template: 25 bytes",
        "routed experts",
        "1.8 KiB (1792 bytes)     3  Q4_0, Q4_1",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let text = run(&fixtures(), "inspect dense.gguf").expect(0).stdout;
    for part in
        ["none, cannot be computed", "note: 1 tensor of type TQ1_0", "tokenizer: none; chat template: none"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn a_set_is_described_from_any_of_its_files() {
    let whole = run(&fixtures(), "inspect pair-00002-of-00002.gguf --json").expect(0).json();
    assert_eq!((&whole["tensors"], &whole["files"][1]["tensors"]), (&json!(4), &json!(2)));
    let text = run(&fixtures(), "inspect pair-00001-of-00002.gguf").expect(0).stdout;
    assert!(text.contains("2 files") && text.contains("pair-00002-of-00002.gguf"), "{text}");

    let dir = tempfile::tempdir().unwrap();
    let first = "pair-00001-of-00002.gguf";
    fs::copy(fixtures().join(first), dir.path().join(first)).unwrap();
    let error = run(dir.path(), "inspect pair-00001-of-00002.gguf --json").expect(3).error();
    assert!(error.contains("pair-00002-of-00002.gguf"), "{error}");
    fs::copy(fixtures().join(first), dir.path().join("pair-00002-of-00002.gguf")).unwrap();
    let error = run(dir.path(), "inspect pair-00001-of-00002.gguf --json").expect(3).error();
    assert!(error.contains("split.no is 0, wanted 1"), "{error}");
}

#[test]
fn a_damaged_file_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = fs::read(fixtures().join("moe.gguf")).unwrap();
    fs::write(dir.path().join("cut.gguf"), &bytes[..bytes.len() - 64]).unwrap();
    let error = run(dir.path(), "inspect cut.gguf --json").expect(3).error();
    assert!(error.contains("cut.gguf") && error.contains("blk.1.ffn_down_exps.weight"), "{error}");
    let error = run(dir.path(), "inspect absent.gguf --json").expect(3).error();
    assert!(error.contains("absent.gguf does not exist"), "{error}");
}

#[test]
fn what_a_file_lacks_is_refused_with_the_reason() {
    for (line, code, words) in [
        ("inspect moe.gguf --verify --json", 2, "no checksums"),
        ("inspect moe.gguf --numerics --json", 3, "layer_norm_rms_epsilon"),
        ("run --model moe.gguf hello --json", 3, "layer_norm_rms_epsilon"),
        ("plan moe.gguf --json", 3, "layer_norm_rms_epsilon"),
        ("convert moe.gguf out --json", 3, "layer_norm_rms_epsilon"),
    ] {
        let refused = run(&fixtures(), line).expect(code);
        assert!(refused.error().contains(words), "{line}: {}", refused.error());
        assert_eq!(refused.json().as_object().map(|object| object.len()), Some(1));
    }
    assert!(!fixtures().join("out").exists());
}

#[test]
fn text_of_a_file_cannot_move_the_cursor() {
    // An escape sequence in place of the model's name, of the same length.
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = fs::read(fixtures().join("moe.gguf")).unwrap();
    let at = bytes.windows(8).position(|window| window == b"tiny moe").unwrap();
    bytes[at..at + 8].copy_from_slice(b"\x1b[2J\n\rab");
    fs::write(dir.path().join("m.gguf"), &bytes).unwrap();
    let text = run(dir.path(), "inspect m.gguf").expect(0).stdout;
    assert!(text.contains("name: \u{fffd}[2J\u{fffd}\u{fffd}ab\n") && !text.contains('\x1b'), "{text:?}");
    let report = run(dir.path(), "inspect m.gguf --json").expect(0).json();
    assert_eq!(report["name"], Value::from("\u{1b}[2J\n\rab"));
}
