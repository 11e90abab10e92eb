//! `metaltail inspect`, from outside.

#[path = "support/models.rs"]
mod models;
#[path = "support/program.rs"]
mod program;

use std::fs;

use models::call;
use program::{bytes, drop_tensors, flip, run, tiny};
use serde_json::Value;

#[test]
fn one_object_says_what_each_container_holds() {
    for form in ["slab", "colibri", "hf"] {
        let dir = tiny(form);
        let report = run(dir.path(), "inspect model --json").expect(0).json();
        assert_eq!(report["kind"], form);
        assert_eq!(report["model_type"], "glm_moe_dsa");
        assert_eq!(report["architecture"]["sparse_layers"], 3);
        assert_eq!(report["architecture"]["top_k"], 2);
        assert_eq!(report["draft"]["state"], "complete");
        assert_eq!(report["numerics"], Value::Null);
        assert_eq!(report["verification"], Value::Null);
        let files = report["files"].as_array().unwrap();
        let said: u64 = files.iter().map(|file| file["bytes"].as_u64().unwrap()).sum();
        assert!(said <= bytes(&dir.path().join("model")));
        let roles = report["roles"].as_object().unwrap();
        let by_role: u64 = roles.values().map(|role| role["bytes"].as_u64().unwrap()).sum();
        assert_eq!(report["bytes"], by_role, "roles add up");
    }
}

/// Families name their tensors differently; what is said of them is the same.
#[test]
fn families_are_shown_before_and_after_conversion() {
    let gqa = "grouped-query";
    for (family, sparse, experts, draft, attention) in [
        ("mixtral", 4, 4, false, gqa),
        ("glm4_moe", 3, 8, true, gqa),
        ("minimax_m2", 4, 8, false, gqa),
        ("gpt_oss", 4, 8, false, gqa),
        ("qwen3_5_moe", 4, 8, false, "hybrid"),
    ] {
        let (model, _) = models::oracle(family);
        let dir = tempfile::tempdir().unwrap();
        let source = model.to_str().unwrap();
        let slab = dir.path().join("slab");
        call(dir.path(), &["convert", source, "slab", "--experts", "int8"]).expect(0);
        for (path, kind) in [(source, "hf"), (slab.to_str().unwrap(), "slab")] {
            let report = call(dir.path(), &["inspect", path, "--verify", "--json"]).expect(0).json();
            assert_eq!(report["kind"], kind);
            assert!(report["model_type"].as_str().unwrap().starts_with(family));
            let architecture = &report["architecture"];
            assert_eq!(architecture["attention"], attention);
            assert_eq!(architecture["state_bytes"].as_u64().unwrap() > 0, attention == "hybrid");
            assert_eq!(architecture["sparse_layers"], sparse);
            assert_eq!(architecture["experts"], experts);
            assert_eq!(architecture["draft_layer"], draft);
            assert_eq!(report["layers"].as_array().unwrap().len(), sparse, "{family}: {report}");
            assert_eq!(report["unused"], 0, "{family}: every tensor has a use");
        }
    }
}

#[test]
fn people_get_a_table_and_the_way_to_measure_numerics() {
    let dir = tiny("slab");
    let text = run(dir.path(), "inspect --model model").expect(0).stdout;
    for part in ["glm_moe_dsa (slab)", "4 layers, 3 of them sparse", "int4-g32", "checksums", "--numerics"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn verification_names_the_expert_of_a_flipped_byte() {
    let dir = tiny("slab");
    let whole = run(dir.path(), "inspect model --verify --json").expect(0).json();
    assert_eq!(whole["verification"]["damage"], Value::Array(Vec::new()));
    assert_eq!(whole["verification"]["experts"], 4 * 8);
    assert_eq!(whole["verification"]["checksummed"], 4 * 8);

    let file = dir.path().join("model/experts-00002.safetensors");
    let stride = whole["layers"][1]["expert_bytes"].as_u64().unwrap() as usize;
    let length = fs::metadata(&file).unwrap().len() as usize;
    // The last expert's run ends the file.
    flip(&file, length - stride + 10);
    let refused = run(dir.path(), "inspect model --verify --json").expect(3);
    let error = refused.error();
    assert!(error.contains("layer 2, expert 7"), "{error}");
    assert!(error.contains("experts-00002.safetensors"), "{error}");
    let words = run(dir.path(), "inspect model --verify").expect(3);
    assert!(words.stderr.contains("layer 2, expert 7"), "{}", words.stderr);
    run(dir.path(), "inspect model").expect(0);
}

#[test]
fn absent_layers_are_named() {
    let dir = tiny("colibri");
    drop_tensors(&dir.path().join("model"), |name| name.contains("layers.2."));
    let refused = run(dir.path(), "inspect model --json").expect(3);
    assert!(refused.error().contains("layer 2 absent"), "{}", refused.stdout);
    assert_eq!(refused.json()["error"]["kind"], "model");
}

#[test]
fn numerics_are_measured_on_what_the_model_says() {
    let dir = tiny("slab");
    let line = "inspect model --numerics --ram 512M --json";
    assert_eq!(run(dir.path(), line).code, 2, "memory is not inspect's to set");
    let line = "inspect model --numerics --json";
    let [first, second] = [run(dir.path(), line), run(dir.path(), line)]
        .map(|outcome| outcome.expect(0).json()["numerics"].clone());
    assert_eq!(first, second, "the same ids, the same figures");
    assert_eq!(first["ids"], "generated");
    assert_eq!(first["tokens"], 256);
    let nll = |key: &str| first[key].as_f64().unwrap();
    assert!(nll("exact_nll") > 0.0 && nll("default_nll") > 0.0);
    assert_eq!(nll("difference"), nll("default_nll") - nll("exact_nll"));
    assert_ne!(nll("difference"), 0.0, "quantised activations are not exact");
}

#[test]
fn numerics_take_ids_from_a_file() {
    let dir = tiny("slab");
    fs::write(dir.path().join("ids.json"), r#"{"sequences": [[1, 2, 3, 4], [5]]}"#).unwrap();
    let line = "inspect model --numerics --ids ids.json --json";
    let numerics = run(dir.path(), line).expect(0).json()["numerics"].clone();
    assert_eq!((&numerics["ids"], &numerics["tokens"]), (&"file".into(), &3.into()));
    fs::write(dir.path().join("ids.json"), r#"{"ids": [1]}"#).unwrap();
    let refused = run(dir.path(), line).expect(2);
    assert!(refused.error().contains("sequences"), "{}", refused.stdout);
    fs::write(dir.path().join("ids.json"), r#"{"sequences": [[1, 2], []]}"#).unwrap();
    let refused = run(dir.path(), line).expect(2);
    assert!(refused.error().contains("sequence 1 has no ids"), "{}", refused.stdout);
}

#[test]
#[cfg(target_os = "linux")]
fn a_path_that_is_no_text_is_shown_as_well_as_can_be() {
    use std::os::unix::ffi::OsStrExt;
    let dir = tiny("slab");
    let name = std::ffi::OsStr::from_bytes(b"model\xff");
    fs::rename(dir.path().join("model"), dir.path().join(name)).unwrap();
    let said = |args: &[&str]| -> Value {
        let output = program::program(dir.path())
            .arg(args[0])
            .arg("--json")
            .args(&args[1..])
            .arg(name)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(0), "{args:?}: {output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let lossy = "model\u{fffd}";
    assert_eq!(said(&["inspect"])["dir"], lossy);
    assert_eq!(said(&["plan"])["model"], lossy);
    let config = said(&["run", "hello", "--max-tokens", "1", "--model"])["stats"]["config"].clone();
    assert_eq!((&config["model"], &config["container"]), (&lossy.into(), &"slab".into()));
}

#[test]
fn what_is_no_model_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    run(dir.path(), "inspect nowhere --json").expect(3);
    run(dir.path(), "inspect . --json").expect(3);
    run(dir.path(), "inspect a --model b").expect(2);
}
