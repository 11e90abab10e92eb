//! `--model DIR,DIR`, `--io` and `--chunk-size`, from outside.

#[path = "support/models.rs"]
mod models;
#[path = "support/program.rs"]
mod program;

use std::fs;
use std::path::Path;

use models::{count, ids_file, seeded_ids};
use program::{Outcome, flip, run, tiny};
use serde_json::Value;
use tempfile::TempDir;

fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
}

/// A tiny model at `model`, a copy of it at `mirror`, and ids to run.
fn mirrored() -> TempDir {
    let dir = tiny("slab");
    copy(&dir.path().join("model"), &dir.path().join("mirror"));
    ids_file(dir.path(), &seeded_ids(20, 256));
    dir
}

fn asked(dir: &TempDir, more: &str) -> Outcome {
    let fixed = "run --ids ids.json --max-tokens 8 --temperature 0 --ram 256M --cap 1 --json";
    run(dir.path(), &format!("{fixed} {more}"))
}

fn ids(answer: &Value) -> Vec<u32> {
    models::ids(&answer["ids"])
}

#[test]
fn a_mirror_is_read_along_and_the_figures_say_how_much() {
    let dir = mirrored();
    let wanted = ids(&asked(&dir, "--model model").expect(0).json());
    for io in ["threads", "auto", "uring"] {
        let outcome = asked(&dir, &format!("--model model,mirror --io {io} --chunk-size 4K"));
        if io == "uring" && outcome.code != 0 {
            assert!(outcome.error().contains("io_uring does not work here: "), "{}", outcome.stdout);
            println!("SKIPPED: {}", outcome.error());
            continue;
        }
        let answer = outcome.expect(0).json();
        assert_eq!(ids(&answer), wanted, "{io}");
        let (stats, config) = (&answer["stats"], &answer["stats"]["config"]);
        // A model that fits in memory is not worth a measurement.
        assert_eq!(config["io"], if io == "uring" { "uring" } else { "threads" });
        assert_eq!(config["chunk_size"], 4096);
        assert_eq!(config["model"], "model,mirror");
        assert!(count(stats, "/io/reads") > count(stats, "/experts/misses"), "a part is a read");
        let drives = stats["io"]["drives"].as_array().unwrap();
        assert_eq!(
            drives.iter().map(|d| d["path"].as_str().unwrap()).collect::<Vec<_>>(),
            ["model", "mirror"]
        );
        assert!(drives.iter().all(|drive| count(drive, "/bytes") > 0 && drive["set_aside"] == false));
        let bytes: u64 = drives.iter().map(|drive| count(drive, "/bytes")).sum();
        assert_eq!(bytes, count(stats, "/io/total_bytes"));
    }
}

#[test]
fn people_get_a_line_of_drives_only_where_there_are_several() {
    let dir = mirrored();
    let block = |model: &str| {
        let line = format!("run --ids ids.json --max-tokens 2 --ram 256M --cap 1 --model {model}");
        run(dir.path(), &line).expect(0).stderr
    };
    let several = block("model,mirror");
    assert!(several.contains("\ndrives ") && several.contains("from mirror"), "{several}");
    let one = block("model");
    assert!(!one.contains("\ndrives ") && one.contains("reads by threads"), "{one}");
}

#[test]
fn a_split_model_is_run_inspected_and_planned() {
    let dir = mirrored();
    let wanted = ids(&asked(&dir, "--model model").expect(0).json());
    for file in ["experts-00001.safetensors", "dense-00000.safetensors"] {
        fs::remove_file(dir.path().join("model").join(file)).unwrap();
    }
    assert!(asked(&dir, "--model model").expect(3).error().contains("experts-00001.safetensors"));
    assert_eq!(ids(&asked(&dir, "--model model,mirror").expect(0).json()), wanted);
    run(dir.path(), "inspect --verify model,mirror").expect(0);
    run(dir.path(), "plan --model model,mirror --ram 256M").expect(0);
}

#[test]
fn a_directory_whose_name_has_a_comma_is_one() {
    let dir = mirrored();
    fs::rename(dir.path().join("model"), dir.path().join("model,mirror")).unwrap();
    let answer = asked(&dir, "--model model,mirror").expect(0).json();
    assert_eq!(answer["stats"]["io"]["drives"].as_array().unwrap().len(), 1);
}

#[test]
fn directories_that_are_none_or_differ_are_refused_by_name() {
    let dir = mirrored();
    for model in ["model,", ",model", "model,,mirror"] {
        assert!(asked(&dir, &format!("--model {model}")).expect(2).error().contains("DIR,DIR"));
    }
    assert!(asked(&dir, "--model model,absent").expect(3).error().contains("absent does not exist"));
    fs::create_dir(dir.path().join("empty")).unwrap();
    assert!(asked(&dir, "--model model,empty").expect(3).error().contains("holds no weight file"));
    flip(&dir.path().join("mirror/experts-00001.safetensors"), 0);
    let error = asked(&dir, "--model model,mirror").expect(3).error();
    assert!(error.contains("mirror/experts-00001.safetensors is no copy of"), "{error}");
}

#[test]
fn impossible_chunks_are_refused() {
    let dir = mirrored();
    for chunk in ["0", "4095", "x"] {
        asked(&dir, &format!("--model model --chunk-size {chunk}")).expect(2);
    }
}
