//! The usage profile and pins, from outside.

#[path = "support/program.rs"]
mod program;

use std::fs;
use std::path::Path;
use std::process::Command;

use program::{program, run, tiny};
use serde_json::{Value, json};

/// A tiny model with ids to continue; `run` of it takes the line's end.
fn model(form: &str) -> tempfile::TempDir {
    let dir = tiny(form);
    let ids = json!({"ids": (1..20).collect::<Vec<u32>>()});
    fs::write(dir.path().join("ids.json"), ids.to_string()).unwrap();
    dir
}

const RUN: &str = "run --model model --ids ids.json --max-tokens 12 --ram 256M --json --usage";

fn shown(dir: &Path, place: &str) -> Value {
    run(dir, &format!("usage show --model model --json --usage {place}")).expect(0).json()
}

#[test]
fn what_a_profile_counts_is_what_the_run_counts() {
    let dir = model("slab");
    let first = run(dir.path(), &format!("{RUN} u")).expect(0).json();
    let selections = first["stats"]["experts"]["selections"].as_u64().unwrap();
    let tokens = first["stats"]["prefill"]["tokens"].as_u64().unwrap()
        + first["stats"]["decode"]["tokens"].as_u64().unwrap();
    let profile = shown(dir.path(), "u");
    assert_eq!((&profile["selections"], &profile["weight"]), (&json!(selections), &json!(selections)));
    assert_eq!(profile["tokens"], json!(tokens));
    assert_eq!(first["stats"]["config"]["usage"], "u");
    run(dir.path(), &format!("{RUN} u")).expect(0);
    let again = shown(dir.path(), "u");
    assert_eq!(again["selections"], json!(2 * selections));
    assert!(again["weight"].as_u64().unwrap() <= 2 * selections);
    // What a model computes does not depend on it.
    let off = run(dir.path(), &format!("{RUN} off")).expect(0).json();
    assert_eq!((&off["ids"], &off["stats"]["config"]["usage"]), (&first["ids"], &json!("off")));
}

#[test]
fn the_usual_place_is_the_users_state_directory() {
    let dir = model("slab");
    let line = RUN.trim_end_matches(" --usage");
    let call = |name: &str, value: &Path| {
        let mut command = program(dir.path());
        command.env(name, value).args(line.split_whitespace());
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice::<Value>(&output.stdout).unwrap()["stats"]["config"]["usage"].clone()
    };
    let (state, home) = (dir.path().join("state"), dir.path().join("home"));
    call("XDG_STATE_HOME", &state);
    call("HOME", &home);
    let only = |place: &Path| {
        let files: Vec<_> = fs::read_dir(place).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert_eq!(files.len(), 1, "{files:?}");
        files[0].clone()
    };
    let (a, b) = (only(&state.join("metaltail/usage")), only(&home.join(".local/state/metaltail/usage")));
    assert_eq!(a.file_name(), b.file_name());
    assert!(a.extension().is_some_and(|extension| extension == "usage"));
    // A relative one does not count, and without a home nothing is kept.
    assert_eq!(call("XDG_STATE_HOME", Path::new("here")), "off");
    assert!(!dir.path().join("here").exists());
}

#[test]
fn what_measures_only_reads_unless_a_file_is_named() {
    let dir = model("slab");
    let state = dir.path().join("state");
    fs::write(dir.path().join("seqs.json"), r#"{"sequences": [[1, 2, 3, 4, 5]]}"#).unwrap();
    let with_state = |line: &str| {
        let words = line.split_whitespace();
        let output = program(dir.path()).env("XDG_STATE_HOME", &state).args(words).output().unwrap();
        assert!(output.status.success(), "{output:?}");
    };
    with_state("score --model model --ids seqs.json");
    with_state("trace record t.csv --model model --ids ids.json");
    assert!(!state.exists());
    with_state("score --model model --ids seqs.json --usage named");
    assert!(dir.path().join("named").exists());
    with_state(RUN.trim_end_matches(" --usage"));
    assert!(state.exists());
}

#[test]
fn read_only_leaves_the_file_as_it_is() {
    let dir = model("slab");
    run(dir.path(), &format!("{RUN} u")).expect(0);
    let path = dir.path().join("u");
    let state = || (fs::read(&path).unwrap(), fs::metadata(&path).unwrap().modified().unwrap());
    let before = state();
    let result = run(dir.path(), &format!("{RUN} read-only:u")).expect(0).json();
    assert_eq!(state(), before);
    assert_eq!(result["stats"]["config"]["usage"], "read-only:u");
    let refused = run(dir.path(), "usage import u --model model --usage read-only:u --json").expect(2);
    assert!(refused.error().contains("writes nothing"));
    assert_eq!(state(), before);
    let names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names.len(), 3, "{names:?}");
}

#[test]
fn a_damaged_profile_is_told_and_begun_anew() {
    let dir = model("slab");
    run(dir.path(), &format!("{RUN} u")).expect(0);
    let path = dir.path().join("u");
    let whole = fs::read(&path).unwrap();
    fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    let outcome = run(dir.path(), &format!("{RUN} u")).expect(0);
    assert!(outcome.stderr.contains("the usage profile u is damaged: it ends early"), "{}", outcome.stderr);
    let notices = outcome.json()["stats"]["notices"].to_string();
    assert!(notices.contains("begun anew"), "{notices}");
    assert_eq!(fs::read(&path).unwrap().len(), whole.len());
    assert_eq!(fs::read(dir.path().join("u.old")).unwrap().len(), whole.len() / 2);
    let outcome = run(dir.path(), &format!("{RUN} u")).expect(0);
    assert!(!outcome.stderr.contains("damaged"), "{}", outcome.stderr);
}

#[test]
fn a_full_disk_is_a_notice_and_leaves_the_old_profile() {
    let dir = model("slab");
    run(dir.path(), &format!("{RUN} u")).expect(0);
    let before = fs::read(dir.path().join("u")).unwrap();
    // A limit on file sizes stands for a full disk: every write of a file fails.
    let script = format!("ulimit -f 0; exec {} {RUN} u", env!("CARGO_BIN_EXE_metaltail"));
    let output = Command::new("sh").args(["-c", &script]).env_clear().current_dir(&dir).output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{stderr}");
    assert!(stderr.contains("cannot save the usage profile u") && stderr.contains("unchanged"), "{stderr}");
    assert_eq!(fs::read(dir.path().join("u")).unwrap(), before);
    let names: Vec<_> = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(names.len(), 3, "{names:?}");
}

#[test]
fn a_profile_of_another_model_is_not_taken() {
    let dir = model("slab");
    run(dir.path(), &format!("{RUN} u")).expect(0);
    run(dir.path(), "synth other --like tiny --seed 5").expect(0);
    let line = RUN.replace("--model model", "--model other");
    let outcome = run(dir.path(), &format!("{line} u")).expect(0);
    assert!(outcome.stderr.contains("another model: wanted checkpoint"), "{}", outcome.stderr);
    // Of the same shape, it can be taken over by hand.
    let imported =
        run(dir.path(), "usage import u.old --model other --usage v --json").expect(0).json()["imported"]
            .clone();
    assert_eq!(
        run(dir.path(), "usage show --model other --usage v --json").expect(0).json()["weight"],
        imported
    );
}

#[test]
fn histories_go_out_and_in() {
    let dir = model("colibri");
    let counted = run(dir.path(), &format!("{RUN} u")).expect(0).json();
    let exported = run(dir.path(), "usage export h --model model --usage u --json").expect(0).json();
    assert_eq!(exported["weight"], counted["stats"]["experts"]["selections"]);
    let text = fs::read_to_string(dir.path().join("h")).unwrap();
    assert!(text.starts_with("-1 "), "{text}");
    run(dir.path(), "usage import h --model model --usage v").expect(0);
    run(dir.path(), "usage export again --model model --usage v").expect(0);
    assert_eq!(fs::read_to_string(dir.path().join("again")).unwrap(), text);
    // What colibrì left beside its model is the beginning where there is no profile yet.
    fs::copy(dir.path().join("h"), dir.path().join("model/.coli_usage")).unwrap();
    let pins = run(dir.path(), &format!("{RUN} read-only:absent --pin-size 64K")).expect(0).json();
    assert!(pins["stats"]["pins"]["experts"].as_u64().unwrap() > 0, "{}", pins["stats"]["pins"]);
    fs::write(dir.path().join("model/.coli_usage"), "-1 99 99\n1 0 1\n").unwrap();
    let outcome = run(dir.path(), &format!("{RUN} w")).expect(0);
    assert!(outcome.stderr.contains("99 layers of 99 experts"), "{}", outcome.stderr);
    fs::write(dir.path().join("bad"), text.replace("-2 1 ", "-2 7 ")).unwrap();
    let refused = run(dir.path(), "usage import bad --model model --usage v --json").expect(2);
    assert!(refused.error().contains("version 7, wanted 1"));
    let other = text.lines().map(|line| if line.starts_with("-2") { "-2 1 77" } else { line });
    fs::write(dir.path().join("other"), other.collect::<Vec<_>>().join("\n")).unwrap();
    let told = run(dir.path(), "usage import other --model model --usage x").expect(0);
    assert!(told.stderr.contains("engine"), "{}", told.stderr);
}

#[test]
fn pins_come_from_a_list_a_size_or_nothing() {
    let dir = model("slab");
    run(dir.path(), &format!("{RUN} u")).expect(0);
    let pins = |more: &str| {
        let outcome = run(dir.path(), &format!("{RUN} read-only:u {more}")).expect(0);
        outcome.json()["stats"]["pins"].clone()
    };
    assert_eq!(pins("--pin off")["experts"], 0);
    assert_eq!(pins("--cap 2")["experts"], 0);
    fs::write(dir.path().join("list"), "# hot\n1 0\n1 2\n").unwrap();
    let listed = pins("--pin list");
    assert_eq!(listed["experts"], 2);
    let one = listed["bytes"].as_u64().unwrap() / 2;
    assert_eq!(pins(&format!("--pin list --pin-size {one}"))["experts"], 1);
    assert_eq!(pins(&format!("--pin-size {}", 3 * one))["experts"], 3);
    assert_eq!(pins(&format!("--pin u --pin-size {}", 3 * one))["experts"], 3);
    fs::write(dir.path().join("list"), "1 9999\n").unwrap();
    let refused = run(dir.path(), &format!("{RUN} off --pin list")).expect(2);
    assert!(refused.error().contains("expert 9999 of layer 1"), "{}", refused.error());
    let refused = run(dir.path(), &format!("{RUN} u --pin-size 300M")).expect(4);
    assert!(refused.error().contains("--pin-size 300M does not fit"), "{}", refused.error());
    run(dir.path(), &format!("{RUN} u --pin off --pin-size 1M")).expect(2);
    let refused = run(dir.path(), &format!("{RUN} u --pin absent")).expect(2).json();
    let message = refused["error"]["message"].as_str().unwrap();
    assert!(message.starts_with("cannot read the list of pins absent: "), "{message}");
    assert_eq!(refused["error"]["causes"], json!([]), "said once");
    fs::write(dir.path().join("list"), "1 0\n1\n").unwrap();
    let refused = run(dir.path(), &format!("{RUN} u --pin list")).expect(2);
    assert!(refused.error().contains("list: line 2: wanted layer and expert"), "{}", refused.error());
    // A profile of too few tokens to judge by says so where it was asked for by name.
    let told = run(dir.path(), &format!("{RUN} read-only:u --pin u --cap 2")).expect(0);
    assert!(told.stderr.contains("--pin u pins nothing: "), "{}", told.stderr);
    assert!(told.stderr.contains("--pin-size decides"), "{}", told.stderr);
    let told = run(dir.path(), &format!("{RUN} off --pin-size {one}")).expect(0);
    assert!(told.stderr.contains("--pin-size pins nothing: there is no usage profile"), "{}", told.stderr);
}

/// A slot for every expert is as good as pinning them, and takes half the memory.
#[test]
fn nothing_is_pinned_where_every_expert_has_a_slot() {
    let dir = model("slab");
    run(dir.path(), &format!("{RUN} u")).expect(0);
    let stats = run(dir.path(), &format!("{RUN} read-only:u -v")).expect(0).json()["stats"].clone();
    assert_eq!(stats["pins"]["experts"], 0);
    assert_eq!(stats["pins"]["reason"], "there is a slot for every expert");
    assert_eq!(stats["memory"]["terms"]["pinned"], 0);
}

#[test]
fn an_export_makes_no_directory_and_refusals_name_the_file() {
    let dir = model("slab");
    run(dir.path(), &format!("{RUN} u")).expect(0);
    let usage = |more: &str, code| {
        run(dir.path(), &format!("usage {more} --model model --usage u --json")).expect(code)
    };
    let refused = usage("export absent/deep/x", 1);
    assert!(refused.error().contains("absent/deep"), "{}", refused.error());
    assert!(!dir.path().join("absent").exists());
    usage("export x", 0);
    fs::write(dir.path().join("README.md"), "# Title\n\nProse only here.\n").unwrap();
    let refused = usage("import README.md", 2);
    assert!(refused.error().contains("README.md: line 1: wanted three numbers"), "{}", refused.error());
    let refused = usage("import none", 2).json();
    assert!(refused["error"]["message"].as_str().unwrap().starts_with("cannot read none: "), "{refused}");
    assert_eq!(refused["error"]["causes"], json!([]));
}
