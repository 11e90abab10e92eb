//! `metaltail convert`, from outside.

#[path = "support/program.rs"]
mod program;

use std::fs;
use std::process::{Command, Stdio};

use program::{bytes, contents, drop_tensors, edit_json, flip, run, tiny};

#[test]
fn the_size_said_beforehand_is_the_directorys_size() {
    let dir = tiny("hf");
    let done = run(dir.path(), "convert model slab --json").expect(0);
    let report = done.json();
    let size = bytes(&dir.path().join("slab"));
    assert_eq!(report["bytes"], size);
    assert_eq!(report["plan"]["bytes"], size);
    assert_eq!(report["files"], contents(&dir.path().join("slab")).len());
    assert_eq!(report["parameters"]["experts"], "int4-g64");
    assert!(done.stderr.contains(&format!("({size} bytes)")), "{}", done.stderr);
    assert!(done.stderr.contains("free"), "{}", done.stderr);
}

#[test]
fn a_complete_container_is_left_as_it_is() {
    let dir = tiny("colibri");
    run(dir.path(), "convert model slab").expect(0);
    let before = contents(&dir.path().join("slab"));
    let again = run(dir.path(), "convert model slab --json").expect(0);
    assert_eq!(again.json()["already_complete"], true);
    assert!(contents(&dir.path().join("slab")) == before, "the second run changed the container");
}

#[test]
fn other_parameters_in_one_directory_are_wrong_usage() {
    let dir = tiny("hf");
    run(dir.path(), "convert model slab").expect(0);
    let weights = || {
        let mut files = contents(&dir.path().join("slab"));
        files.retain(|name, _| !name.starts_with('.'));
        files
    };
    let before = weights();
    let refused = run(dir.path(), "convert model slab --experts int4-g32 --json").expect(2);
    let error = refused.error();
    assert!(error.contains("int4-g64") && error.contains("int4-g32"), "{error}");
    assert!(weights() == before, "the refused run changed the container");
}

#[test]
fn an_interrupted_conversion_says_how_to_go_on_and_ends_with_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    // Large enough that it cannot be over before the signal comes.
    run(dir.path(), "synth model --like fat --layers 2 --experts 8 --format hf").expect(0);
    let mut child = Command::new(env!("CARGO_BIN_EXE_metaltail"))
        .args(["convert", "model", "slab"])
        .env_clear()
        .current_dir(dir.path())
        .stderr(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    while !dir.path().join("slab/convert.json").exists() {
        assert!(child.try_wait().unwrap().is_none(), "it ended before it was interrupted");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let signalled = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(signalled.success());
    let output = child.wait_with_output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(130), "{stderr}");
    assert!(stderr.contains("the same command goes on"), "{stderr}");
    assert!(!dir.path().join("slab/manifest.json").exists());

    run(dir.path(), "convert model slab --rest bf16").expect(2);
    run(dir.path(), "inspect slab").expect(3);
    run(dir.path(), "convert model slab").expect(0);
    run(dir.path(), "convert model undisturbed").expect(0);
    let [resumed, undisturbed] = ["slab", "undisturbed"].map(|name| contents(&dir.path().join(name)));
    assert!(resumed == undisturbed, "the resumed container has other bytes");
}

#[test]
fn a_family_that_is_not_supported_is_refused_before_anything_is_written() {
    let dir = tiny("hf");
    edit_json(&dir.path().join("model/config.json"), |config| config["model_type"] = "mamba".into());
    let refused = run(dir.path(), "convert model slab --json").expect(3);
    assert!(refused.error().contains("mamba"), "{}", refused.stdout);
    assert!(!dir.path().join("slab").exists());
}

#[test]
fn a_missing_shard_is_refused_by_name_before_anything_is_written() {
    let dir = tiny("hf");
    let model = dir.path().join("model");
    let last = contents(&model).into_keys().rfind(|name| name.ends_with(".safetensors")).unwrap();
    fs::remove_file(model.join(&last)).unwrap();
    let refused = run(dir.path(), "convert model slab --json").expect(3);
    let error = refused.error();
    assert!(error.contains(&last) && error.contains('3'), "{error}");
    assert!(!dir.path().join("slab").exists());
}

#[test]
fn a_damaged_source_is_refused() {
    let dir = tiny("slab");
    let file = dir.path().join("model/experts-00001.safetensors");
    let middle = fs::metadata(&file).unwrap().len() as usize / 2;
    flip(&file, middle);
    let refused = run(dir.path(), "convert model slab --experts keep --rest keep --json").expect(3);
    let error = refused.error();
    assert!(error.contains(" of layer 1 is damaged: ") && error.contains("should have checksum"), "{error}");
    // The expert that the flipped byte is in.
    let (_, place) = error.split_once("experts-00001.safetensors at offset ").unwrap();
    let offset: usize = place.split(' ').next().unwrap().parse().unwrap();
    let manifest = fs::read(dir.path().join("model/manifest.json")).unwrap();
    let manifest: serde_json::Value = serde_json::from_slice(&manifest).unwrap();
    let layers = manifest["experts"].as_array().unwrap();
    let layer = layers.iter().find(|layer| layer["layer"] == 1).unwrap();
    let stride = layer["stride"].as_u64().unwrap() as usize;
    assert!((offset..offset + stride).contains(&middle), "{offset} {stride} {middle}");
    assert!(!dir.path().join("slab/manifest.json").exists());
}

#[test]
fn an_incomplete_draft_layer_is_left_out_with_a_notice() {
    let dir = tiny("colibri");
    drop_tensors(&dir.path().join("model"), |name| name.contains("layers.4.mlp.experts.7."));
    let done = run(dir.path(), "convert model slab --json").expect(0);
    assert_eq!(done.json()["plan"]["draft"]["state"], "partial");
    assert!(done.stderr.contains("draft layer: left out"), "{}", done.stderr);
    assert!(!contents(&dir.path().join("slab")).contains_key("experts-00004.safetensors"));
}

#[test]
fn the_source_and_a_foreign_directory_are_no_targets() {
    let dir = tiny("hf");
    let before = contents(&dir.path().join("model"));
    run(dir.path(), "convert model model").expect(2);
    assert!(contents(&dir.path().join("model")) == before, "the source was changed");
    fs::create_dir(dir.path().join("other")).unwrap();
    fs::write(dir.path().join("other/letter.txt"), "dear").unwrap();
    run(dir.path(), "convert model other").expect(2);
    assert_eq!(contents(&dir.path().join("other")).len(), 1);
}
