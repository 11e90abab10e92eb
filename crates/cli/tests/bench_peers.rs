//! `metaltail bench peers`, from outside, beside a script that plays the peer: what it is told, what is
//! refused, and the form of what comes out, never a speed.
#![cfg(target_os = "linux")]

#[path = "support/program.rs"]
mod program;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use program::{Outcome, run, tiny};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Answers with ids 1, 2, … and made-up times; logs its words, its control groups and who is busy beside it.
const PEER: &str = r#"#!/bin/sh
echo "$@" >> words.log
cat /proc/self/cgroup >> groups.log
for f in /proc/[0-9]*/cmdline; do tr '\0' ' ' < "$f" 2>/dev/null; echo; done | grep -F "kill -0" | grep -c " $PPID " >> busy.log
while [ $# -gt 0 ]; do
    case "$1" in
        --ids) prompt=$(sed 's/.*\[\(.*\)\].*/\1/' "$2") ;;
        --tokens) tokens=$2 ;;
    esac
    shift
done
rows=$(echo "$prompt" | tr ',' '\n' | wc -l)
ids=$(seq -s, 1 "$tokens")
echo "{\"name\": \"fake\", \"version\": \"7\", \"more\": [1], \"prompt_ids\": [$prompt], \"ids\": [$ids],
 \"prefill\": {\"tokens\": $rows, \"seconds\": 0.5}, \"decode\": {\"tokens\": $((tokens - 1)), \"seconds\": 0.25}}"
"#;

/// Noise that a busy machine cannot exceed: what is tested is everything else.
const SMALL: &str = "--threads 1 --pairs 2 --tokens 6 --page-cache warm --noise 100 --prompt-tokens 4";

fn script(dir: &Path, text: &str) {
    let path = dir.join("peer.sh");
    fs::write(&path, text).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).unwrap();
}

/// A tiny model, a file that stands for the peer's, and the peer.
fn scene(peer: &str) -> TempDir {
    let dir = tiny("slab");
    fs::write(dir.path().join("peer.bin"), "weights").unwrap();
    script(dir.path(), peer);
    dir
}

/// As often as a busy machine drifts by more than all noise that can be stated.
fn quiet(mut run: impl FnMut() -> Outcome) -> Outcome {
    let drifted =
        |outcome: &Outcome| format!("{}{}", outcome.stdout, outcome.stderr).contains("the machine drifts");
    (0..20).map(|_| run()).find(|outcome| !drifted(outcome)).expect("a run without drift")
}

fn bench(dir: &Path, more: &str) -> Outcome {
    let model = "--model model --ram 512M --peer-model peer.bin";
    run(dir, &format!("bench peers --peer ./peer.sh {model} {SMALL} {more}"))
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/gguf/oracles").join(name)
}

#[test]
fn both_get_the_same_prompt_and_answer_in_turn() {
    let dir = scene(PEER);
    let record = quiet(|| {
        let _ = fs::remove_file(dir.path().join("words.log"));
        bench(dir.path(), "--seed 3 --json --peer-args '--repack_off'")
    });
    let record = record.expect(0).json();
    assert_eq!((&record["kind"], &record["refused"]), (&json!("peers"), &Value::Null));
    let runs = record["runs"].as_array().unwrap();
    let sides: Vec<&str> = runs.iter().map(|run| run["side"].as_str().unwrap()).collect();
    assert_eq!(sides, ["metaltail", "metaltail", "metaltail", "peer", "peer", "metaltail", "metaltail"]);
    let prompt = &record["job"]["prompt_ids"];
    assert_eq!(prompt.as_array().unwrap().len(), 4);
    for run in runs {
        let answer = &run["measured"]["answer"];
        assert_eq!((&answer["prompt_ids"], &answer["prefill"]["tokens"]), (prompt, &json!(4)));
        assert!(answer["decode"]["seconds"].as_f64().unwrap() > 0.0);
        assert_eq!(run["measured"]["peak_bytes"], Value::Null);
    }
    assert_eq!(record["ids"]["peer"], json!([1, 2, 3, 4, 5, 6]));
    assert_eq!(record["ids"]["metaltail"], runs[0]["measured"]["answer"]["ids"]);
    assert_eq!(
        (&record["ids"]["metaltail_repeats"], &record["ids"]["peer_repeats"]),
        (&json!(true), &json!(true))
    );
    let figure = |key: &str| {
        let rows = record["figures"].as_array().unwrap();
        rows.iter().find(|row| row["key"] == key).unwrap().clone()
    };
    let decode = figure("decode_tokens_per_second");
    assert_eq!((&decode["peer"]["median"], &decode["ratio"]["n"]), (&json!(20.0), &json!(2)));
    assert_eq!(figure("prefill_tokens_per_second")["peer"]["max"], 8.0);
    assert_eq!((&record["peer"]["name"], &record["peer"]["version"]), (&json!("fake"), &json!("7")));
    let words = fs::read_to_string(dir.path().join("words.log")).unwrap();
    assert_eq!(words.lines().count(), 2);
    for line in words.lines() {
        assert!(line.starts_with("--model peer.bin --ids "), "{line}");
        assert!(line.ends_with(" --tokens 6 --threads 1 --repack_off"), "{line}");
    }
    assert!(!dir.path().join("bench-records").exists(), "--json records nothing unless told");
}

#[test]
fn our_ids_are_those_of_run() {
    let dir = scene(PEER);
    fs::write(dir.path().join("ids.json"), r#"{"ids": [11, 12, 13]}"#).unwrap();
    let record = quiet(|| bench(dir.path(), "--ids ids.json --json")).expect(0).json();
    let alone =
        run(dir.path(), "run --model model --ram 512M --ids ids.json --max-tokens 6 --temperature 0 --json");
    assert_eq!(record["ids"]["metaltail"], alone.expect(0).json()["ids"]);
    assert_eq!(record["job"]["prompt_ids"], json!([11, 12, 13]));
}

#[test]
fn a_gguf_file_is_given_to_both() {
    let dir = tempfile::tempdir().unwrap();
    script(dir.path(), PEER);
    fs::copy(fixture("olmoe.gguf"), dir.path().join("m.gguf")).unwrap();
    let line = format!("bench peers --peer ./peer.sh --model m.gguf {SMALL}");
    let text = quiet(|| run(dir.path(), &line)).expect(0).stdout;
    for part in [
        "beside fake (7)",
        "prefill, tokens/s",
        "decode, tokens/s",
        "ratio",
        "fake: [1, 2, 3, 4, 5, 6]",
        "ids: ",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let record = text.lines().find_map(|line| line.strip_prefix("record: ")).unwrap();
    let record: Value = serde_json::from_slice(&fs::read(dir.path().join(record)).unwrap()).unwrap();
    assert_eq!(record["peer"]["model"], "m.gguf");
}

#[test]
fn busy_processes_run_beside_and_end_with_it() {
    let dir = scene(PEER);
    let record = quiet(|| {
        let _ = fs::remove_file(dir.path().join("busy.log"));
        bench(dir.path(), "--busy 2 --json")
    });
    assert_eq!(record.expect(0).json()["job"]["busy"], 2);
    assert_eq!(fs::read_to_string(dir.path().join("busy.log")).unwrap(), "2\n2\n");
}

#[test]
fn each_process_has_a_group_of_its_own_or_it_is_said_why_not() {
    let dir = scene(PEER);
    let outcome = quiet(|| bench(dir.path(), "--memory 512M --json"));
    if outcome.code == 1 {
        assert!(outcome.error().contains("--memory: "), "{}", outcome.stdout);
        assert!(!dir.path().join("groups.log").exists(), "refused before anything ran");
        return;
    }
    let record = outcome.expect(0).json();
    assert_eq!(record["job"]["memory_bytes"], 512 << 20);
    let groups = fs::read_to_string(dir.path().join("groups.log")).unwrap();
    assert!(groups.lines().filter(|line| line.contains("/metaltail-bench-")).count() >= 2, "{groups}");
    for run in record["runs"].as_array().unwrap() {
        let peak = run["measured"]["peak_bytes"].as_u64();
        assert!(peak.is_none_or(|peak| peak > 0 && peak <= 512 << 20), "{peak:?}");
    }
}

#[test]
fn a_peer_that_fails_or_makes_no_sense_ends_it_with_the_reason() {
    for (peer, why) in [
        ("#!/bin/sh\necho no such model >&2\nexit 3\n", "no such model"),
        ("#!/bin/sh\necho tokens: 7\n", "not one JSON object"),
        ("#!/bin/sh\necho '{\"ids\": [1]}'\n", "missing field"),
        (&PEER.replace("$((tokens - 1))", "$tokens"), "decoded 6 rows for 6 ids"),
        (&PEER.replace("[$prompt]", "[1, 2]"), "another prompt"),
    ] {
        let dir = scene(peer);
        let outcome = quiet(|| bench(dir.path(), "--json")).expect(1);
        let refused = outcome.json()["refused"].as_str().unwrap().to_owned();
        assert!(refused.starts_with("the peer: ") && refused.contains(why), "{refused}");
        let text = quiet(|| bench(dir.path(), "--record off")).expect(1);
        assert!(
            text.stderr.contains("nothing follows from this run") && text.stderr.contains(why),
            "{}",
            text.stderr
        );
    }
}

#[test]
fn what_cannot_be_compared_is_refused_before_anything_runs() {
    let dir = scene(PEER);
    let peers = "bench peers --peer ./peer.sh --model model";
    fs::write(dir.path().join("big.json"), r#"{"ids": [1, 4000000]}"#).unwrap();
    for (line, code) in [
        (format!("{peers} --json"), 2),
        (format!("{peers} --peer-model absent --json"), 2),
        (format!("{peers} --peer-model peer.bin --tokens 0 --json"), 2),
        (format!("{peers} --peer-model peer.bin --ids big.json --json"), 2),
        (format!("{peers} --peer-model peer.bin --pairs 0 --json"), 2),
        ("bench peers --model model --json".to_owned(), 2),
        ("bench peers --peer ./peer.sh --model nowhere --json".to_owned(), 3),
    ] {
        run(dir.path(), &line).expect(code);
    }
    assert!(!dir.path().join("words.log").exists());
    let absent = "bench peers --peer ./absent.sh --model model --ram 512M --peer-model peer.bin --json";
    let refused = quiet(|| run(dir.path(), &format!("{absent} {SMALL}"))).expect(1).json();
    assert!(refused["refused"].as_str().unwrap().contains("cannot be started"), "{}", refused["refused"]);
}
